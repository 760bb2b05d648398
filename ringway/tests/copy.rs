//! `ringway copy`, from outside: real files, our daemon, qemu-storage-daemon, kills and corruption.

use crate::common::{Daemon, PATIENCE, copies, copy, ringway, run, same, text, wait};
use ringway_testkit::{Mounted, Need, skip};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[track_caller]
fn refuses(dir: &Path, args: &[&str], status: i32, says: &str) {
    let output = copy(dir, args);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
    assert!(error.contains(says), "{args:?}: {error}");
}

/// Content of its own for each place.
fn noise(seed: u64, offset: u64, bytes: &mut [u8]) {
    for (at, word) in (offset / 8..).zip(bytes.chunks_mut(8)) {
        let mut z = (at ^ seed << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1;
        word.copy_from_slice(&z.to_le_bytes()[..word.len()]);
    }
}

/// A file of `bytes` bytes: every other 256 KiB a hole, some data zeroes.
fn image(path: &Path, bytes: u64, seed: u64) {
    let file = File::create(path).unwrap();
    file.set_len(bytes).unwrap();
    let mut chunk = vec![0; 256 << 10];
    for offset in (0..bytes).step_by(512 << 10) {
        noise(seed, offset, &mut chunk);
        chunk[65_000..200_000].fill(0);
        let len = (bytes - offset).min(chunk.len() as u64);
        file.write_all_at(&chunk[..usize::try_from(len).unwrap()], offset).unwrap();
    }
    file.sync_all().unwrap();
}

fn journal(dst: &Path) -> PathBuf {
    dst.with_file_name(format!("{}.ringway-copy", dst.file_name().unwrap().to_str().unwrap()))
}

/// A folder with an image `a` of 20 MiB and a bit.
fn folder() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    image(&a, 20 * MIB + 4096, 1);
    (dir, a, b)
}

#[test]
fn every_size_and_engine_copies_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let sizes = [0, 1, 511, 512, 4095, 4096, 4097, 65536 + 1, MIB - 1, MIB, MIB + 513, 3 * MIB + 7];
    for (index, engine) in ["auto", "io_uring", "threads"].into_iter().enumerate() {
        for (seed, &bytes) in (0..).zip(&sizes) {
            image(&a, bytes, seed);
            let args = ["copy", "--engine", engine, "--verify", "a", "b"];
            let mut command = ringway();
            let output = run({
                command.args(args).current_dir(dir.path());
                command
            });
            let error = text(&output.stderr);
            if index > 0 && error.contains("does not work here") {
                skip(Need::IoUring, error);
                break;
            }
            assert_eq!(output.status.code(), Some(0), "{engine} {bytes}: {error}");
            same(&a, &b);
            assert!(!journal(&b).exists(), "it is complete");
            std::fs::remove_file(&b).unwrap();
        }
    }
}

#[test]
fn holes_and_zeroes_take_no_space() {
    let (dir, a, b) = folder();
    let said = copies(dir.path(), &["--verify", "a", "b"]);
    assert!(said.contains("20 MiB") && said.contains("verified"), "{said}");
    same(&a, &b);
    let (a_meta, b_meta) = (a.metadata().unwrap(), b.metadata().unwrap());
    assert_eq!(a_meta.mode(), b_meta.mode());
    // Of each 256 KiB of data the two middle quarters are zeroes.
    assert!(b_meta.blocks() < a_meta.blocks(), "{} {}", b_meta.blocks(), a_meta.blocks());
    let kept = copies(dir.path(), &["--keep-zeroes", "a", "c"]);
    assert!(!kept.contains("verified"));
    same(&a, &dir.path().join("c"));
    assert!(dir.path().join("c").metadata().unwrap().blocks() > b_meta.blocks());
}

#[test]
fn nothing_is_overwritten_without_being_told_to() {
    let (dir, a, b) = folder();
    let path = dir.path();
    image(&b, 30 * MIB, 2);
    let before = std::fs::read(&b).unwrap();
    refuses(path, &["a", "b"], 1, "b: it is there already. Overwrite it with --force");
    refuses(path, &["--resume", "a", "b"], 1, "--force");
    assert!(std::fs::read(&b).unwrap() == before && !journal(&b).exists());
    std::fs::hard_link(&a, path.join("hard")).unwrap();
    std::os::unix::fs::symlink("a", path.join("soft")).unwrap();
    for link in ["a", "hard", "soft", "./a"] {
        refuses(path, &["--force", "a", link], 1, "are the same");
    }
    refuses(path, &["missing", "c"], 1, "missing: there is no such file. Check the path");
    refuses(path, &["a", "no/such/folder"], 1, "no such folder: no/such");
    refuses(path, &[".", "c"], 1, "is a folder");
    refuses(path, &["a", "."], 1, "is a folder");
    refuses(path, &["a"], 2, "DST");
    assert!(!path.join("c").exists());
    // Longer than the source: what was there is gone.
    copies(path, &["--force", "--verify", "a", "b"]);
    same(&a, &b);
}

#[test]
fn a_served_disk_is_copied_both_ways() {
    let (dir, a, b) = folder();
    let path = dir.path();
    image(&path.join("d"), 24 * MIB, 9);
    let daemon = Daemon::serve(path, &["d", "--socket", "s"]);
    // Whoever serves it may write it.
    refuses(path, &["d", "x"], 1, "in use");
    refuses(path, &["--force", "a", "d"], 1, "in use");
    refuses(path, &["a", "s"], 1, "may hold something");
    copies(path, &["--force", "--verify", "a", "vhost-user:s"]);
    copies(path, &["--verify", "s", "b"]);
    daemon.stop();
    let (have, want) = (std::fs::read(&b).unwrap(), std::fs::read(&a).unwrap());
    assert!(have[..want.len()] == want[..] && have.len() == 24 << 20);
    same(&b, &path.join("d"));
    // Zeroes were written as zeroes, and the space of what was there is given back.
    assert!(path.join("d").metadata().unwrap().blocks() < a.metadata().unwrap().blocks() * 9 / 10);
    refuses(path, &["vhost-user:s", "x"], 1, "ringway serve");
}

#[test]
fn a_disk_that_is_too_small_or_read_only_is_refused() {
    let (dir, _, _) = folder();
    let path = dir.path();
    let small = Daemon::serve(path, &["null:1M", "--socket", "small"]);
    refuses(path, &["--force", "a", "small"], 1, "does not fit");
    small.stop();
    image(&path.join("d"), 24 * MIB, 9);
    let fixed = Daemon::serve(path, &["d", "--read-only", "--socket", "fixed"]);
    refuses(path, &["--force", "a", "fixed"], 1, "read-only");
    // Reading it is no conflict with a daemon that only reads it.
    copies(path, &["d", "e"]);
    fixed.stop();
}

#[test]
fn odd_sizes_go_to_a_disk_padded_with_zeroes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"), MIB + 100, 3);
    image(&path.join("d"), 2 * MIB, 4);
    let daemon = Daemon::serve(path, &["d", "--socket", "s"]);
    copies(path, &["--force", "--verify", "a", "s"]);
    daemon.stop();
    let (a, d) = (std::fs::read(path.join("a")).unwrap(), std::fs::read(path.join("d")).unwrap());
    assert!(d[..a.len()] == a[..]);
    assert!(d[a.len()..a.len().next_multiple_of(512)].iter().all(|&byte| byte == 0));
    let mut rest = vec![0; 2 << 20];
    image(&path.join("fresh"), 2 * MIB, 4);
    rest.copy_from_slice(&std::fs::read(path.join("fresh")).unwrap());
    let after = a.len().next_multiple_of(512);
    assert!(d[after..] == rest[after..], "what lies behind is untouched");
}

#[test]
fn one_served_disk_is_copied_to_another() {
    let (dir, a, _) = folder();
    let path = dir.path();
    File::create(path.join("d")).unwrap().set_len(21 * MIB).unwrap();
    let from = Daemon::serve(path, &["a", "--read-only", "--socket", "from"]);
    let to = Daemon::serve(path, &["d", "--socket", "to"]);
    refuses(path, &["from", "vhost-user:from"], 1, "the same");
    copies(path, &["--force", "--verify", "--target-is-zero", "from", "to"]);
    from.stop();
    to.stop();
    let (a, d) = (std::fs::read(a).unwrap(), std::fs::read(path.join("d")).unwrap());
    assert!(d[..a.len()] == a[..] && d[a.len()..].iter().all(|&byte| byte == 0));
}

/// A qemu-storage-daemon; killed when dropped.
struct Qsd(Child);

impl Drop for Qsd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves `image`; `None` if there is no qemu-storage-daemon here.
fn qsd(dir: &Path, image: &str) -> Option<Qsd> {
    let export = "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=q,writable=on";
    let child = Command::new("qemu-storage-daemon")
        .args(["--blockdev", &format!("driver=file,filename={image},node-name=f,discard=unmap")])
        .args(["--export", export])
        .current_dir(dir)
        .stdin(Stdio::null())
        .spawn();
    let Ok(child) = child else {
        skip(Need::StorageDaemon, "apt install qemu-system-common");
        return None;
    };
    let deadline = Instant::now() + PATIENCE;
    while !dir.join("q").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(Qsd(child))
}

#[test]
fn a_foreign_server_is_copied_both_ways() {
    let (dir, a, b) = folder();
    let path = dir.path();
    image(&path.join("d"), 20 * MIB + 4096, 9);
    let Some(_server) = qsd(path, "d") else { return };
    refuses(path, &["--force", "a", "d"], 1, "(qemu-storage-da");
    refuses(path, &["d", "x"], 1, "(qemu-storage-da");
    copies(path, &["--force", "--verify", "a", "vhost-user:q"]);
    copies(path, &["--verify", "vhost-user:q", "b"]);
    same(&a, &b);
}

/// Kills a copy once some of it is durable (a first mark is in the journal) or after `limit`.
fn kill_in_the_middle(dir: &Path, args: &[&str], journal: &Path, signal: i32) -> Option<i32> {
    let mut command = ringway();
    command.arg("copy").args(args).current_dir(dir).stderr(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !journal.exists() && child.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::hint::spin_loop();
    }
    std::thread::sleep(Duration::from_millis(30));
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), signal) };
    wait(&mut child, PATIENCE).expect("it ends").code()
}

/// The same for a copy onto the new file `b`; again and again if it is done before the signal comes.
fn interrupt(dir: &Path, args: &[&str], signal: i32) -> Option<i32> {
    let b = dir.join("b");
    let statuses = (0..20).map(|_| {
        let _ = std::fs::remove_file(&b);
        kill_in_the_middle(dir, args, &journal(&b), signal)
    });
    let mut interrupted = statuses.filter(|status| *status != Some(0));
    interrupted.next().expect("a copy that is slow enough to be interrupted")
}

/// As long as the journal is there the destination is not complete, whatever was tried since.
#[test]
fn a_resume_that_cannot_begin_keeps_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let (path, a, b) = (dir.path(), dir.path().join("a"), dir.path().join("b"));
    image(&a, 256 * MIB, 5);
    let args = ["--in-flight", "1", "--reflink", "never", "a", "b"];
    assert_eq!(interrupt(path, &args, libc::SIGKILL), None);
    let mut command = ringway();
    command.args(["copy", "--resume", "--reflink", "always", "a", "b"]).current_dir(path);
    if run(command).status.code() == Some(0) {
        return skip(Need::OwnBlocks, path.display());
    }
    assert!(journal(&b).exists(), "{b:?} looks complete");
    copies(path, &["--resume", "--verify", "a", "b"]);
    same(&a, &b);
}

#[test]
fn an_interrupted_copy_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (path, a, b) = (dir.path(), dir.path().join("a"), dir.path().join("b"));
    image(&a, 256 * MIB, 5);
    for signal in [libc::SIGKILL, libc::SIGINT, libc::SIGTERM] {
        let status = interrupt(path, &["--in-flight", "1", "a", "b"], signal);
        let expected = if signal == libc::SIGKILL { None } else { Some(128 + signal) };
        assert_eq!(status, expected);
        assert!(journal(&b).exists(), "it is not complete");
        refuses(path, &["a", "b"], 1, "is an unfinished copy of");
        let said = copies(path, &["--resume", "--verify", "a", "b"]);
        // What was made durable on request is not copied again.
        assert_eq!(said.contains("resumed at"), signal != libc::SIGKILL, "{said}");
        same(&a, &b);
        assert!(!journal(&b).exists());
        std::fs::remove_file(&b).unwrap();
    }
}

/// Killed while the journal is being written: it has no name yet, so nothing can be resumed; what is left
/// of it keeps nobody from beginning anew.
#[test]
fn a_copy_that_is_killed_before_its_journal_is_there_can_begin_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (path, a, b) = (dir.path(), dir.path().join("a"), dir.path().join("b"));
    image(&a, 4 * MIB, 5);
    let fresh = || crate::common::names(path).iter().any(|name| name.starts_with(".ringway-copy-"));
    let struck = (0..500).any(|_| {
        let _ = std::fs::remove_file(&b);
        let mut command = ringway();
        command.args(["copy", "a", "b"]).current_dir(path);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !fresh() && child.try_wait().unwrap().is_none() {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let struck = fresh() && !journal(&b).exists();
        if !struck {
            let _ = std::fs::remove_file(journal(&b));
        }
        struck
    });
    println!("struck: {struck}");
    if !struck {
        // This file system is too quick: what such a kill leaves.
        std::fs::write(&b, "").unwrap();
    }
    refuses(path, &["--resume", "a", "b"], 1, "--force");
    refuses(path, &["a", "b"], 1, "--force");
    copies(path, &["--force", "--verify", "a", "b"]);
    same(&a, &b);
    assert!(!journal(&b).exists(), "something is left");
}

/// Leaves an unfinished copy of `a` at `b`, 16 MiB of it durable as its journal says, the rest noise
/// of another time.
fn unfinished(dir: &Path) -> (PathBuf, PathBuf) {
    let (a, b) = (dir.join("a"), dir.join("b"));
    let status = interrupt(dir, &["--in-flight", "1", "a", "b"], libc::SIGINT);
    assert_eq!(status, Some(130));
    (a, b)
}

#[test]
fn a_resumed_copy_trusts_nothing_behind_its_mark() {
    let dir = tempfile::tempdir().unwrap();
    image(&dir.path().join("a"), 256 * MIB, 5);
    let (a, b) = unfinished(dir.path());
    // Somebody wrote behind the mark, also where the source has holes and zeroes.
    let file = File::options().write(true).open(&b).unwrap();
    file.write_all_at(&vec![0xee; 3 << 20], 250 * MIB + 17).unwrap();
    copies(dir.path(), &["--resume", "a", "b"]);
    same(&a, &b);
}

#[test]
fn a_changed_source_or_destination_does_not_resume() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"), 256 * MIB, 5);
    let (a, b) = unfinished(path);
    std::fs::copy(&b, path.join("other")).unwrap();
    // Another source.
    image(&path.join("z"), MIB, 1);
    refuses(path, &["--resume", "z", "b"], 1, "which is not z");
    // Another destination in the same place.
    let kept = std::fs::read(journal(&b)).unwrap();
    std::fs::rename(path.join("other"), &b).unwrap();
    refuses(path, &["--resume", "a", "b"], 1, "is not what was being written");
    // A journal that is no journal.
    std::fs::write(journal(&b), "hello\n").unwrap();
    refuses(path, &["--resume", "a", "b"], 1, "no journal of this program");
    std::fs::write(journal(&b), kept).unwrap();
    // One byte of the source, its time as it was.
    let meta = a.metadata().unwrap();
    let file = File::options().write(true).open(&a).unwrap();
    file.write_all_at(&[7], 3).unwrap();
    file.set_modified(meta.modified().unwrap()).unwrap();
    drop(file);
    refuses(path, &["--resume", "a", "b"], 1, "a has changed since b was begun");
    copies(path, &["--force", "a", "b"]);
    same(&a, &b);
}

#[test]
fn a_source_whose_changes_cannot_be_seen_resumes_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"), 256 * MIB, 5);
    let daemon = Daemon::serve(path, &["a", "--read-only", "--socket", "s"]);
    let b = path.join("b");
    let args = ["--in-flight", "1", "s", "b"];
    while kill_in_the_middle(path, &args, &journal(&b), libc::SIGINT) == Some(0) {
        std::fs::remove_file(&b).unwrap();
    }
    refuses(path, &["--resume", "s", "b"], 1, "--source-unchanged");
    copies(path, &["--resume", "--source-unchanged", "--verify", "s", "b"]);
    daemon.stop();
    same(&path.join("a"), &b);
}

#[test]
fn a_server_that_dies_is_an_error_and_not_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"), 64 * MIB, 5);
    let args = ["null:1G,latency=2000ms", "--socket", "s", "--control", "ctl"];
    let daemon = Daemon::serve(path, &args);
    let mut command = ringway();
    command.args(["copy", "--force", "a", "s"]).current_dir(path);
    command.stderr(Stdio::piped()).stdout(Stdio::null());
    let child = command.spawn().unwrap();
    let in_flight = || {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "--json", "stats"]).current_dir(path);
        let stats: serde_json::Value = serde_json::from_slice(&run(command).stdout).unwrap();
        stats["disks"][0]["in_flight"].as_u64().unwrap()
    };
    let deadline = Instant::now() + PATIENCE;
    while in_flight() == 0 {
        assert!(Instant::now() < deadline, "nothing is written");
    }
    daemon.kill();
    let output = child.wait_with_output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("--resume"), "{error}");
}

#[test]
fn a_wrong_byte_is_found_by_verify() {
    // A disk that forgets all it is told: only reading back can know.
    let (dir, _, _) = folder();
    let path = dir.path();
    let daemon = Daemon::serve(path, &["null:64M", "--socket", "s"]);
    refuses(path, &["--force", "--verify", "a", "s"], 3, "differs from a at byte");
    assert!(journal(&path.join("s")).exists(), "it is not complete");
    copies(path, &["--force", "a", "s"]);
    assert!(!journal(&path.join("s")).exists());
    daemon.stop();
}

#[test]
fn a_full_disk_is_an_error_and_the_copy_goes_on_when_there_is_room() {
    let (dir, a, b) = folder();
    let path = dir.path();
    let mut command = ringway();
    command.args(["copy", "a", "b"]).current_dir(path);
    // SAFETY: setrlimit and signal may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 21 << 20, rlim_max: 21 << 20 };
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            Ok(())
        });
    }
    // Just enough: the limit is on the size of a file.
    assert_eq!(run(command).status.code(), Some(0));
    same(&a, &b);
    std::fs::remove_file(&b).unwrap();

    // A small file system, where we may mount one.
    let mounted = match Mounted::in_memory(path.join("full"), 4 * MIB) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    let full = mounted.path();
    let output = copy(path, &["a", "full/b"]);
    let error = text(&output.stderr);
    let left = journal(&full.join("b")).exists();
    mounted.set_room(64 * MIB);
    let resumed = copy(path, &["--resume", "--verify", "a", "full/b"]);
    let content = std::fs::read(full.join("b"));
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("No space left") && error.contains("--resume"), "{error}");
    assert!(left);
    assert_eq!(resumed.status.code(), Some(0), "{}", text(&resumed.stderr));
    assert!(content.unwrap() == std::fs::read(&a).unwrap());
}

#[test]
fn block_devices_are_written_in_place() {
    let (dir, a, b) = folder();
    let path = dir.path();
    let disk = path.join("disk");
    image(&disk, 24 * MIB, 8);
    let made = Command::new("losetup").args(["-f", "--show"]).arg(&disk).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else {
        return skip(Need::LoopDevice, "losetup fails");
    };
    let device = text(&made.stdout).trim().to_owned();
    let refused = copy(path, &["a", &device]);
    let written = copy(path, &["--force", "--verify", "a", &device]);
    let back = copy(path, &["--verify", &device, "b"]);
    let _ = Command::new("losetup").args(["-d", &device]).status();
    assert!(text(&refused.stderr).contains("may hold something"), "{}", text(&refused.stderr));
    for output in [written, back] {
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    let (a, b) = (std::fs::read(a).unwrap(), std::fs::read(b).unwrap());
    assert!(b[..a.len()] == a[..] && b.len() == 24 << 20);
}

/// A copy whose writes to the page cache are lost by the first fdatasync of `b`, which fails; as the kernel
/// reports such a loss, the next one succeeds.
fn copy_that_loses_a_sync(dir: &Path, args: &[&str]) -> Command {
    let source = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
int fdatasync(int fd) {
    static int failed;
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    char path[64], name[256] = "";
    struct stat now;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(path, name, 255);
    if (failed || len < 2 || strcmp(name + len - 2, "/b")) return real(fd);
    failed = 1;
    fstat(fd, &now);
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, now.st_size);
    errno = EIO;
    return -1;
}
"#;
    std::fs::write(dir.join("shim.c"), source).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"])
        .current_dir(dir)
        .status();
    assert!(built.unwrap().success());
    let mut command = ringway();
    command.args(["copy", "--engine", "threads"]).args(args).current_dir(dir);
    command.env("LD_PRELOAD", dir.join("shim.so"));
    command
}

#[test]
fn c54_a_sync_that_failed_is_not_made_good_by_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let (path, a, b) = (dir.path(), dir.path().join("a"), dir.path().join("b"));
    image(&a, 48 * MIB, 5);
    // So slow that a checkpoint falls into the copy.
    let slow = Daemon::serve(path, &["a", "--read-only", "--bps-read", "6M", "--socket", "s"]);
    let output = run(copy_that_loses_a_sync(path, &["s", "b"]));
    slow.stop();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("durable"), "{error}");
    let fast = Daemon::serve(path, &["a", "--read-only", "--socket", "s"]);
    let said = copies(path, &["--resume", "--source-unchanged", "s", "b"]);
    assert!(!said.contains("resumed at"), "{said}");
    fast.stop();
    same(&a, &b);
}

/// Nothing but a journal of the same destination is taken for one, whatever is forced.
#[test]
fn c55_a_journal_takes_the_place_of_nothing_else() {
    let (dir, a, b) = folder();
    let path = dir.path();
    let precious = path.join("precious");
    std::fs::write(&precious, "precious").unwrap();
    let before = std::fs::read(&a).unwrap();
    for to in ["b", "./b"] {
        refuses(path, &["a", "b", "--journal", to], 2, "which is copied");
    }
    refuses(path, &["--force", "a", "b", "--journal", "a"], 2, "which is copied");
    refuses(path, &["--force", "a", "b", "--journal", "precious"], 1, "no journal");
    std::fs::write(journal(&b), "precious").unwrap();
    refuses(path, &["--force", "a", "b"], 1, "no journal");
    assert_eq!(crate::common::names(path), ["a", "b.ringway-copy", "precious"]);
    std::fs::remove_file(journal(&b)).unwrap();
    // Links that somebody has put where a journal is going to be.
    for name in ["b.ringway-copy.new", "b.ringway-copy"] {
        std::os::unix::fs::symlink("precious", path.join(name)).unwrap();
        let output = copy(path, &["a", "b"]);
        assert_eq!(output.status.success(), name.ends_with("new"), "{}", text(&output.stderr));
        std::fs::remove_file(path.join(name)).unwrap();
        let _ = std::fs::remove_file(&b);
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
    assert!(std::fs::read(&a).unwrap() == before);
    // The journal of another copy: without it that one would look complete.
    image(&path.join("big"), 256 * MIB, 5);
    assert_eq!(interrupt(path, &["--in-flight", "1", "big", "b"], libc::SIGKILL), None);
    let other = journal(&b);
    let other = other.to_str().unwrap();
    refuses(path, &["--force", "a", "c", "--journal", other], 1, "unfinished copy to");
    copies(path, &["--resume", "big", "b"]);
    same(&path.join("big"), &b);
}

/// An image that is overwritten is nobody else's from the first look to the moment its name leads to the new one.
#[test]
fn c55_nobody_begins_to_use_an_image_that_is_being_overwritten() {
    let (dir, a, _) = folder();
    let path = dir.path();
    let create =
        || crate::common::says(path, &["create", "vm.qcow2", "--size", "32M", "--force"], 0, &[]);
    create();
    let slow = Daemon::serve(path, &["a", "--read-only", "--bps-read", "4M", "--socket", "s"]);
    let mut command = ringway();
    command.args(["copy", "--force", "s", "vm.qcow2"]).current_dir(path).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let begun =
        || crate::common::names(path).iter().any(|name| name.starts_with(".ringway-create-"));
    crate::common::guest::wait_for("the copy has begun", begun);
    let guest = ["io", "--format", "qcow2", "vm.qcow2", "-c", "write -P 0x77 0 1M"];
    crate::common::says(path, &guest, 1, &["in use"]);
    assert_eq!(wait(&mut child, PATIENCE).expect("it ends").code(), Some(0));
    slow.stop();
    copies(path, &["--from-format", "qcow2", "vm.qcow2", "b"]);
    same(&a, &path.join("b"));
}

#[test]
fn c55_an_image_that_is_overwritten_keeps_owner_and_mode() {
    let (dir, a, _) = folder();
    let path = dir.path();
    let image = path.join("vm.qcow2");
    copies(path, &["a", "vm.qcow2"]);
    std::fs::set_permissions(&image, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let named = rustix::fs::XattrFlags::empty();
    let has_attributes = rustix::fs::setxattr(&image, "user.tenant", b"seven", named).is_ok();
    let is_root = std::os::unix::fs::chown(&image, Some(107), Some(108)).is_ok();
    let before = image.metadata().unwrap();
    copies(path, &["--force", "a", "vm.qcow2"]);
    let after = image.metadata().unwrap();
    assert_ne!(before.ino(), after.ino(), "a new file");
    let facts = |meta: &std::fs::Metadata| (meta.mode(), meta.uid(), meta.gid());
    assert_eq!(facts(&before), facts(&after));
    if has_attributes {
        let mut value = [0; 16];
        let len = rustix::fs::getxattr(&image, "user.tenant", &mut value[..]).unwrap();
        assert_eq!(&value[..len], b"seven");
    }
    if !is_root {
        skip(Need::Root, "owners");
    }
    std::fs::hard_link(&image, path.join("other")).unwrap();
    let kept = std::fs::read(&image).unwrap();
    refuses(path, &["--force", "a", "vm.qcow2"], 1, "2 names");
    assert!(std::fs::read(&image).unwrap() == kept);
    assert_eq!(crate::common::names(path), ["a", "other", "vm.qcow2"]);
    drop(a);
}

/// Many zeroings are in flight when the first one of them is refused.
#[test]
fn c56_a_device_that_cannot_zero_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    // Of its files the kernel makes devices that have no way to zero.
    let ram = match Mounted::new(path.join("ram"), &["-t", "ramfs", "none"]) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    image(&path.join("a"), 64 * MIB, 1);
    let disk = ram.path().join("disk");
    std::fs::write(&disk, vec![0xee; 64 << 20]).unwrap();
    let made = Command::new("losetup").args(["-f", "--show"]).arg(&disk).output();
    let device = made.ok().filter(|made| made.status.success()).map(|made| text(&made.stdout));
    let mut copied = Vec::new();
    if let Some(device) = device.as_deref().map(str::trim) {
        let limit = format!("/sys/block/{}/queue/write_zeroes_max_bytes", &device[5..]);
        println!("{device} zeroes {} bytes", std::fs::read_to_string(limit).unwrap().trim());
        for engine in ["auto", "threads"] {
            copied.push(copy(path, &["--force", "--verify", "--engine", engine, "a", device]));
        }
        let _ = Command::new("losetup").args(["-d", device]).status();
    }
    drop(ram);
    if copied.is_empty() {
        return skip(Need::LoopDevice, "losetup fails");
    }
    for output in copied {
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
}

/// A name is any bytes: the journal holds it, too.
#[test]
fn c56_a_name_that_is_no_text_is_copied() {
    use std::os::unix::ffi::OsStringExt;
    let (dir, a, _) = folder();
    let odd = |bytes: &[u8]| std::ffi::OsString::from_vec(bytes.to_vec());
    let (from, to) = (odd(b"caf\xe9.img"), odd(b"d\xe9.img"));
    std::fs::rename(&a, dir.path().join(&from)).unwrap();
    for to in [&to, &odd(b"e.img"), &odd(b"f\xe9.qcow2")] {
        let mut command = ringway();
        command.arg("copy").args([&from, to]).current_dir(dir.path());
        let output = run(command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    same(&dir.path().join(&from), &dir.path().join(&to));
}

#[test]
fn c56_large_clusters_of_a_served_disk_are_compressed() {
    let (dir, a, b) = folder();
    let daemon = Daemon::serve(dir.path(), &["a", "--read-only", "--socket", "s"]);
    copies(dir.path(), &["--compress", "--cluster-size", "2M", "s", "c.qcow2"]);
    daemon.stop();
    copies(dir.path(), &["--from-format", "qcow2", "c.qcow2", "b"]);
    same(&a, &b);
}

/// Starts a copy from the disk at `s` to `b`, and waits until it has begun.
fn begin(dir: &Path, ignored: Option<i32>) -> Child {
    let mut command = ringway();
    command.args(["copy", "s", "b"]).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: signal may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            if let Some(signal) = ignored {
                libc::signal(signal, libc::SIG_IGN);
            }
            Ok(())
        });
    }
    let child = command.spawn().unwrap();
    crate::common::guest::wait_for("the copy has begun", || journal(&dir.join("b")).exists());
    std::thread::sleep(Duration::from_millis(200));
    child
}

fn send(child: &Child, signal: i32) {
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(i32::try_from(child.id()).unwrap(), signal) }, 0);
}

#[test]
fn c56_a_signal_that_nohup_ignores_ends_nothing() {
    let (dir, a, b) = folder();
    let slow = ["a", "--read-only", "--bps-read", "8M", "--socket", "s"];
    let daemon = Daemon::serve(dir.path(), &slow);
    let mut child = begin(dir.path(), Some(libc::SIGHUP));
    send(&child, libc::SIGHUP);
    assert_eq!(wait(&mut child, PATIENCE).expect("it ends").code(), Some(0));
    same(&a, &b);
    std::fs::remove_file(&b).unwrap();
    let mut child = begin(dir.path(), None);
    send(&child, libc::SIGHUP);
    assert_eq!(wait(&mut child, PATIENCE).expect("it ends").code(), Some(128 + libc::SIGHUP));
    daemon.stop();
}

/// One signal ends a copy whose server has stopped answering; what is done can be resumed.
#[test]
fn c56_a_silent_server_keeps_no_copy_from_ending() {
    let (dir, a, b) = folder();
    let slow = ["a", "--read-only", "--bps-read", "4M", "--socket", "s"];
    let daemon = Daemon::serve(dir.path(), &slow);
    let mut child = begin(dir.path(), None);
    daemon.signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(300));
    send(&child, libc::SIGTERM);
    let ended = wait(&mut child, PATIENCE);
    if ended.is_none() {
        child.kill().unwrap();
    }
    daemon.signal(libc::SIGCONT);
    assert_eq!(ended.expect("it ends").code(), Some(128 + libc::SIGTERM));
    copies(dir.path(), &["--resume", "--source-unchanged", "s", "b"]);
    daemon.stop();
    same(&a, &b);
}

/// A disk behind a cache may take longer than a minute to flush it.
#[test]
fn c56_a_flush_may_take_its_time() {
    let (dir, a, _) = folder();
    let path = dir.path();
    let script = "#!/bin/sh
cd \"${0%/*}\"
case \"$1\" in
open) echo h;; get_size) echo 20975616;; thread_model) echo parallel;;
can_write|can_flush) exit 0;; can_fua) echo none;; can_multi_conn|can_zero|can_trim|can_extents) exit 3;;
pread) dd if=d iflag=skip_bytes,count_bytes skip=$4 count=$3 bs=1M status=none;;
pwrite) dd of=d oflag=seek_bytes seek=$4 bs=1M conv=notrunc status=none iflag=fullblock;;
flush) sleep 63;;
*) exit 2;; esac
";
    let program = path.join("disk.sh");
    std::fs::write(&program, script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, executable).unwrap();
    File::create(path.join("d")).unwrap().set_len(20 * MIB + 4096).unwrap();
    let words = ["-f", "-U", "n.sock", "sh", program.to_str().unwrap()];
    let Some(_server) = crate::common::nbd::server(path, "nbdkit", &words) else { return };
    let mut command = ringway();
    command.args(["copy", "--force", "a"]).current_dir(path);
    command.arg(format!("nbd:unix:{}", path.join("n.sock").display()));
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let ended = wait(&mut child, 3 * PATIENCE);
    assert_eq!(ended.expect("it ends").code(), Some(0));
    same(&a, &path.join("d"));
}
