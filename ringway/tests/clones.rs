//! Clones that a daemon makes: where they are, what becomes of them, what they cost.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, PATIENCE, children, folder, read, ringway, run, text, write};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of the base.
const BYTES: usize = 8 << 20;

/// A base of which each sector says which one it is, and a folder for clones.
fn base() -> tempfile::TempDir {
    let dir = folder();
    let content: Vec<u8> = (0..BYTES).map(|at| (at / 512 % 251) as u8).collect();
    std::fs::write(dir.path().join("base.raw"), content).unwrap();
    std::fs::create_dir(dir.path().join("clones")).unwrap();
    dir
}

fn sector(dir: &Path, socket: &str, sector: u64) -> u8 {
    let mut device = Options::new().connect(dir.join(socket)).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let bytes = read(&device, &mut queue, sector);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

fn put(dir: &Path, socket: &str, sector: u64, byte: u8) {
    let mut device = Options::new().connect(dir.join(socket)).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, sector, byte));
}

/// QEMU's verdict on an image that nobody has.
fn whole(dir: &Path, image: &str) {
    // What a killed daemon has started ends a moment after it; --force-share would not see that.
    let deadline = Instant::now() + PATIENCE;
    let checked = loop {
        let checked =
            Command::new("qemu-img").args(["check", "-q", image]).current_dir(dir).output();
        match checked {
            Ok(output) if text(&output.stderr).contains("\" lock") && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            checked => break checked,
        }
    };
    match checked {
        // Leaks are what a kill may leave.
        Ok(output) => assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "{image}: {}",
            text(&output.stderr)
        ),
        Err(_) => skip(Need::Qemu, "qemu-img".to_owned()),
    }
}

fn ctl(dir: &Path, args: &[&str]) -> Value {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).arg("--json").current_dir(dir);
    let output = run(command);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_clone_is_made_served_and_found_again() {
    let dir = base();
    let dir = dir.path();
    let before = std::fs::read(dir.join("base.raw")).unwrap();
    let args = ["base.raw", "--overlay", "clones", "--socket", "vm7.sock"];
    for (round, more) in [&[][..], &["--sandbox", "off"], &["--isolate"], &["--cache", "none"]]
        .into_iter()
        .enumerate()
    {
        let daemon = Daemon::serve(dir, &[&args[..], more].concat());
        let round = round as u8;
        if round > 0 {
            assert_eq!(sector(dir, "vm7.sock", 5), 100 + round - 1, "what the last one wrote");
        }
        put(dir, "vm7.sock", 5, 100 + round);
        assert_eq!(sector(dir, "vm7.sock", 6), 6, "the base's");
        // Ended, or killed.
        if round == 1 {
            daemon.kill();
            // Puts into the clone what that one had answered.
            Daemon::serve(dir, &args).stop();
        } else {
            drop(daemon.stop())
        }
        whole(dir, "clones/vm7.qcow2");
    }
    let mode = dir.join("clones/vm7.qcow2").metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    let names: Vec<_> = std::fs::read_dir(dir.join("clones")).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(std::fs::read(dir.join("base.raw")).unwrap() == before, "nobody writes the base");
    // The same by its own name, larger, on a clone as its base.
    let args = ["two", "--base", "clones/vm7.qcow2", "--size", "9M", "--socket", "two.sock"];
    let daemon = Daemon::serve(dir, &[&args[..], &["--backing-root", "."]].concat());
    assert_eq!((sector(dir, "two.sock", 5), sector(dir, "two.sock", 6)), (103, 6));
    assert_eq!(sector(dir, "two.sock", (9 << 11) - 1), 0, "behind the base");
    daemon.stop();
    whole(dir, "two");
}

#[test]
fn only_a_clone_of_this_base_is_served_as_one() {
    let dir = base();
    let dir = dir.path();
    std::fs::copy(dir.join("base.raw"), dir.join("other.raw")).unwrap();
    let create = |args: &[&str]| {
        let mut command = ringway();
        command.arg("create").args(args).current_dir(dir);
        assert!(run(command).status.success());
    };
    create(&["clones/other.qcow2", "--backing", "other.raw"]);
    create(&["clones/alone.qcow2", "--size", "1M"]);
    std::fs::write(dir.join("clones/raw.qcow2"), vec![0; 4096]).unwrap();
    let refused = |args: &[&str], words: &[&str]| {
        let mut command = ringway();
        command.arg("serve").args(args).args(["--socket", "s"]).current_dir(dir);
        let output = run(command);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    };
    let before = crate::common::snapshot(dir);
    let on_base = |image: &'static str| [image, "--base", "base.raw"];
    refused(&on_base("clones/other.qcow2"), &["other.qcow2", "not based on", "base.raw"]);
    refused(&on_base("clones/raw.qcow2"), &["no qcow2 image"]);
    refused(&on_base("nowhere/new.qcow2"), &["folder does not exist"]);
    refused(&["a", "--base", "gone.raw"], &["gone.raw", "nothing can be based on it"]);
    refused(
        &["a", "--base", "clones/alone.qcow2", "--base-format", "raw", "--size", "1"],
        &["size"],
    );
    refused(&["a", "--ephemeral"], &["add base"]);
    refused(&["base.raw", "--base", "base.raw"], &["base.raw"]);
    assert!(crate::common::snapshot(dir) == before, "nothing was made or changed");
    // One that was merged with its base is based on nothing any more.
    let args = ["clones/alone.qcow2", "--base", "base.raw", "--socket", "s"];
    Daemon::serve(dir, &args).stop();
    // A header may say what it likes: the base that is said is the one that is opened.
    create(&["clones/far.qcow2", "--backing", "base.raw"]);
    let args = ["clones/far.qcow2", "--format", "qcow2", "--socket", "s"];
    refused(&args[..3], &["--backing-root"]);
    Daemon::serve(dir, &["clones/far.qcow2", "--base", "base.raw", "--socket", "s"]).stop();
    // It is somebody else's to write: named once.
    let daemon = Daemon::serve(dir, &["other.raw", "--socket", "b"]);
    let mut command = ringway();
    let args = ["serve", "clones/new.qcow2", "--base", "other.raw", "--socket", "s"];
    command.args(args).current_dir(dir);
    let said = text(&run(command).stderr);
    assert!(said.contains("in use by"), "{said}");
    assert_eq!(said.matches("other.raw").count(), 1, "{said}");
    daemon.stop();
}

/// Who deletes files for the daemon has died: the next disk of that name would be served what is in the clone.
#[test]
fn e36_a_clone_that_cannot_be_deleted_is_not_said_to_be() {
    let dir = base();
    let dir = dir.path();
    let words = ["base.raw", "--overlay", "clones", "--ephemeral", "--socket", "e.sock"];
    let daemon = Daemon::serve(dir, &[&words[..], &["--control", "ctl"]].concat());
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    let helper = children(daemon.pid()).into_iter().find(|pid| name(pid).contains("helper"));
    // SAFETY: a process of this test's own daemon.
    assert_eq!(unsafe { libc::kill(helper.unwrap().try_into().unwrap(), libc::SIGKILL) }, 0);
    ctl(dir, &["remove", "0"]);
    let log = daemon.log();
    assert!(dir.join("clones/e.qcow2").exists());
    assert!(log.contains("cannot be deleted") && !log.contains("was deleted"), "{log}");
    daemon.stop();
}

#[test]
fn an_ephemeral_clone_goes_with_its_disk_and_not_with_the_daemon() {
    let dir = base();
    let dir = dir.path();
    let words = |name: &str, more: &str| {
        format!("[[disk]]\nbase = 'base.raw'\noverlay = 'clones'\nsocket = '{name}.sock'\n{more}\n")
    };
    let file = |disks: &[(&str, &str)]| {
        let disks: String = disks.iter().map(|(name, more)| words(name, more)).collect();
        std::fs::write(dir.join("conf"), format!("control = 'ctl'\n{disks}")).unwrap();
    };
    let here = |name: &str| dir.join(format!("clones/{name}.qcow2")).exists();
    let (goes, stays) = ("ephemeral = true", "");
    let apart = "ephemeral = true\nisolate = true";
    file(&[("a", goes), ("b", stays), ("c", apart), ("d", goes)]);
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    put(dir, "a.sock", 5, 77);
    put(dir, "c.sock", 5, 78);
    daemon.stop();
    assert!(here("a") && here("c"), "a guest may come back");
    Daemon::serve(dir, &["--config", "conf"]).kill();
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    assert_eq!((sector(dir, "a.sock", 5), sector(dir, "c.sock", 5)), (77, 78));
    let list = ctl(dir, &["list"]);
    let of = |nth: usize, word: &str| list["disks"][nth]["qcow2"][word].clone();
    assert_eq!((of(0, "ephemeral"), of(1, "ephemeral")), (true.into(), false.into()));
    assert!(of(0, "base").as_str().unwrap().ends_with("base.raw"));
    for name in ["a", "b", "c"] {
        ctl(dir, &["remove", &format!("{name}.sock")]);
    }
    assert_eq!((here("a"), here("b"), here("c"), here("d")), (false, true, false, true));
    // The same by the control socket.
    let add = ["add", "base.raw", "--overlay", "clones", "--socket", "e.sock", "--ephemeral"];
    ctl(dir, &add);
    put(dir, "e.sock", 9, 9);
    assert!(here("e"));
    ctl(dir, &["remove", "e.sock"]);
    assert!(!here("e"));
    // A file that names it no more.
    file(&[("b", stays)]);
    ctl(dir, &["reload"]);
    assert_eq!((here("b"), here("d")), (true, false));
    // What cannot be added takes nothing away that was there.
    let args = ["add", "base.raw", "--overlay", "clones", "--socket", "f.sock"];
    ctl(dir, &args);
    ctl(dir, &["remove", "f.sock"]);
    file(&[
        ("b", stays),
        ("f", goes),
        ("g", "ephemeral = true\nserial = 'much too long for a serial number'"),
    ]);
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "reload"]).current_dir(dir);
    assert!(!run(command).status.success());
    assert_eq!((here("f"), here("g")), (true, false));
    daemon.stop();
}

/// Whoever waits for its lock, as another daemon does, does not get a clone that is gone a moment later.
#[test]
fn c81_an_ephemeral_clone_is_deleted_before_its_lock_goes() {
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = base();
        let dir = dir.path();
        let args = ["base.raw", "--overlay", "clones", "--socket", "a.sock", "--control", "ctl"];
        let daemon = Daemon::serve(dir, &[&args[..], &["--ephemeral"], more].concat());
        let clone = dir.join("clones/a.qcow2");
        let file = std::fs::File::options().read(true).write(true).open(&clone).unwrap();
        let found = std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let begun = Instant::now();
                while ringway_disk::lock_image(&file, false).is_err() {
                    assert!(begun.elapsed() < PATIENCE, "it is locked for ever");
                }
                clone.exists()
            });
            ctl(dir, &["remove", "a.sock"]);
            looks.join().unwrap()
        });
        assert!(!found, "{more:?}: its lock was free while it was there");
        daemon.stop();
    }
}

/// Descriptors of a process that lead to a file.
fn opened(pid: u32, path: &Path) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    fds.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == path))
        .count()
}

fn kib(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
}

/// `RINGWAY_CLONES=1000 cargo test -p ringway --test clones many -- --nocapture` prints what that many
/// cost.
#[test]
fn many_clones_have_one_base() {
    let count: usize = std::env::var("RINGWAY_CLONES").map_or(40, |count| count.parse().unwrap());
    let dir = base();
    let dir = dir.path();
    let disk = |nth: usize| {
        format!(
            "[[disk]]\nbase = 'base.raw'\noverlay = 'clones'\nqueues = 1\nsocket = '{nth}.sock'\n"
        )
    };
    let serve = |count: usize| {
        let disks: String = (0..count).map(disk).collect();
        let conf = format!("control = 'ctl'\nworkers = 1\nsandbox = 'off'\n{disks}");
        std::fs::write(dir.join("conf"), conf).unwrap();
        Daemon::serve(dir, &["--config", "conf"])
    };
    let usage = |daemon: &Daemon| {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
        (fds, kib(daemon.pid(), "VmRSS:"))
    };
    let one = serve(1);
    assert_eq!(sector(dir, "0.sock", 1), 1);
    let (fds_of_one, rss_of_one) = usage(&one);
    one.stop();
    let daemon = serve(count);
    for nth in 0..count {
        assert_eq!(sector(dir, &format!("{nth}.sock"), 1), 1);
    }
    let list = ctl(dir, &["list"]);
    for disk in list["disks"].as_array().unwrap() {
        assert_eq!(disk["qcow2"]["base_disks"], count, "one base");
        assert_eq!(disk["qcow2"]["table_bytes"], 0, "what is not written needs no table");
        assert_eq!(
            disk["qcow2"]["base_table_bytes"],
            list["disks"][0]["qcow2"]["base_table_bytes"]
        );
    }
    let real = dir.canonicalize().unwrap().join("base.raw");
    assert_eq!(opened(daemon.pid(), &real), 1, "the base is open once");
    let (fds, rss) = usage(&daemon);
    let each = |all: usize, one: usize| (all - one) as f64 / (count - 1) as f64;
    let (fds, rss) = (each(fds, fds_of_one), each(rss as usize, rss_of_one as usize));
    println!("{count} clones: {fds:.1} descriptors and {rss:.0} KiB of RSS for each more");
    assert!(fds <= 6.0 && rss < 512.0, "{fds} descriptors, {rss} KiB");
    // Each is a disk of its own.
    put(dir, "0.sock", 3, 200);
    assert_eq!((sector(dir, "0.sock", 3), sector(dir, "1.sock", 3)), (200, 3));
    daemon.stop();
    (0..count.min(3)).for_each(|nth| whole(dir, &format!("clones/{nth}.qcow2")));
}

/// How the daemon has a file open: for direct I/O or not, each time it has.
fn is_direct(daemon: &Daemon, file: &Path) -> Vec<bool> {
    const O_DIRECT: u32 = 0o40000;
    let proc = Path::new("/proc").join(daemon.pid().to_string());
    let mut found = Vec::new();
    for fd in std::fs::read_dir(proc.join("fd")).unwrap() {
        let fd = fd.unwrap();
        if std::fs::read_link(fd.path()).is_ok_and(|link| link == file) {
            let info = std::fs::read_to_string(proc.join("fdinfo").join(fd.file_name())).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            found.push(u32::from_str_radix(flags.trim(), 8).unwrap() & O_DIRECT != 0);
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// A clone may have direct I/O and the base that it shares with others be in the page cache, if that is said; a
/// disk of which it is not said shares nothing with them.
#[test]
fn a_base_is_cached_though_its_clone_is_not_if_that_is_said() {
    let dir = base();
    let dir = &dir.path().canonicalize().unwrap();
    let mut direct = std::fs::File::options();
    direct.read(true).custom_flags(libc::O_DIRECT);
    if direct.open(dir.join("base.raw")).is_err() {
        return skip(Need::Direct, "this folder takes no O_DIRECT");
    }
    let none = ["--cache", "none", "--control", "ctl"];
    let args = ["base.raw", "--overlay", "clones", "--socket", "one.sock", "--cache-base"];
    for sandbox in [&[][..], &["--sandbox", "off"]] {
        let daemon = Daemon::serve(dir, &[&args[..], &none, sandbox].concat());
        let opened = |file: &str| is_direct(&daemon, &dir.join(file));
        assert_eq!((opened("base.raw"), opened("clones/one.qcow2")), (vec![false], vec![true]));
        put(dir, "one.sock", 5, 77);
        assert_eq!((sector(dir, "one.sock", 5), sector(dir, "one.sock", 4)), (77, 4));
        let add = ["add", "base.raw", "--overlay", "clones", "--cache", "none", "--socket"];
        ctl(dir, &[&add[..], &["two.sock", "--cache-base"]].concat());
        assert_eq!(opened("base.raw"), [false]);
        ctl(dir, &[&add[..], &["three.sock"]].concat());
        assert_eq!(opened("base.raw"), [false, true]);
        assert_eq!((sector(dir, "two.sock", 5), sector(dir, "three.sock", 5)), (5, 5));
        daemon.stop();
        whole(dir, "clones/one.qcow2");
    }
    let mut command = ringway();
    command.args(["serve", "--engine", "linux-aio"]).args(args).args(none).current_dir(dir);
    let output = run(command);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("--cache-base"), "{said}");
}

/// With direct I/O the file system is asked for room ahead of writes, and has it back when the image is closed.
#[test]
fn room_for_first_writes_is_found_ahead_with_direct_io_and_given_back() {
    let dir = base();
    let dir = dir.path();
    let mut direct = std::fs::File::options();
    direct.read(true).custom_flags(libc::O_DIRECT);
    if direct.open(dir.join("base.raw")).is_err() {
        return skip(Need::Direct, "this folder takes no O_DIRECT");
    }
    let there = |image: &str| dir.join(image).metadata().unwrap().blocks() * 512;
    for (cache, ahead) in [("none", true), ("writeback", false)] {
        let image = format!("clones/{cache}.qcow2");
        let socket = format!("{cache}.sock");
        let args = ["base.raw", "--overlay", "clones", "--socket", &socket, "--cache", cache];
        let daemon = Daemon::serve(dir, &args);
        put(dir, &socket, 5, 7);
        // Eight clusters are taken at first, of which one is written.
        let taken = there(&image);
        assert_eq!(taken >= 8 << 16, ahead, "{cache}: {taken}");
        assert_eq!((sector(dir, &socket, 5), sector(dir, &socket, 6)), (7, 6));
        daemon.stop();
        let left = there(&image);
        assert!(left < 6 << 16, "{cache}: {left}");
        whole(dir, &image);
    }
}

/// As on a file system that has no such call.
fn without(command: &mut Command, call: libc::c_long, errno: i32) {
    let (call, errno) = (u32::try_from(call).unwrap(), errno.unsigned_abs());
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let filter = [
        // Load the number of the call; unless it is that one go on by one.
        step(0x20, 0, 0),
        step(0x15, 1, call),
        step(0x06, 0, libc::SECCOMP_RET_ERRNO | errno),
        step(0x06, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let confine = move || {
        let mut filter = filter;
        let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
        // SAFETY: the program is ours and lives as long as the call.
        let confined = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
                    == 0
        };
        if confined { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(confine) };
}

/// Nobody can tell whether it is in use.
#[test]
fn c94_what_cannot_be_locked_is_not_overwritten() {
    let dir = folder();
    let image = dir.path().join("disk.img");
    let before = image.metadata().unwrap().ino();
    for locks in [false, true] {
        let mut command = ringway();
        command.args(["create", "disk.img", "--size", "2M", "--force"]).current_dir(dir.path());
        if !locks {
            without(&mut command, libc::SYS_flock, libc::ENOLCK);
        }
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.success(), locks, "{said}");
        assert!(locks || said.contains("cannot be locked"), "{said}");
        assert_eq!(image.metadata().unwrap().ino() != before, locks);
    }
}

/// The names of an image and of its base, swapped: whoever would write, replace or delete the base of others is
/// refused.
#[test]
fn c49_an_image_is_not_put_on_top_of_one_that_is_based_on_it() {
    let dir = base();
    let dir = dir.path();
    let create = |args: &[&str]| {
        let mut command = ringway();
        command.arg("create").args(args).current_dir(dir);
        run(command)
    };
    let made = |args: &[&str]| {
        let output = create(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    };
    made(&["golden.qcow2", "--size", "8M"]);
    made(&["middle.qcow2", "--backing", "golden.qcow2"]);
    made(&["clones/vm7.qcow2", "--backing", "middle.qcow2"]);
    made(&["gone.qcow2", "--size", "8M"]);
    made(&["dangling.qcow2", "--backing", "gone.qcow2"]);
    std::fs::remove_file(dir.join("gone.qcow2")).unwrap();
    std::fs::hard_link(dir.join("golden.qcow2"), dir.join("other-name.qcow2")).unwrap();
    let before = std::fs::read(dir.join("golden.qcow2")).unwrap();
    let unchanged = || assert_eq!(std::fs::read(dir.join("golden.qcow2")).unwrap(), before);
    for (image, base) in [
        ("golden.qcow2", "clones/vm7.qcow2"),
        ("golden.qcow2", "middle.qcow2"),
        ("other-name.qcow2", "clones/vm7.qcow2"),
        ("golden.qcow2", "golden.qcow2"),
        ("gone.qcow2", "dangling.qcow2"),
    ] {
        let output = create(&[image, "--backing", base, "--force"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{image} {base}");
        assert!(said.contains("cannot be based on itself"), "{image} {base}: {said}");
        unchanged();
        let mut command = ringway();
        command.args(["serve", "--control", "ctl"]).current_dir(dir);
        let daemon = Daemon::start(command);
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "add", image, "--base", base]);
        command.args(["--ephemeral", "--socket", "s"]).current_dir(dir);
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{image} {base}: it is served");
        assert!(said.contains("on itself"), "{image} {base}: {said}");
        daemon.stop();
        unchanged();
        assert!(!dir.join("gone.qcow2").exists());
    }
    // What is based on it is served as before.
    let daemon =
        Daemon::serve(dir, &["clones/vm7.qcow2", "--base", "middle.qcow2", "--socket", "s"]);
    daemon.stop();
}

/// Sockets of several guests may end alike: a clone is named by that part, and is one guest's.
#[test]
fn e72_a_clone_is_for_the_socket_that_it_was_made_for() {
    let dir = base();
    let dir = dir.path();
    ["a", "b"].iter().for_each(|name| std::fs::create_dir(dir.join(name)).unwrap());
    let serve = |socket, more: &[&'static str]| {
        [&["base.raw", "--overlay", "clones", "--socket", socket][..], more].concat()
    };
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let daemon = Daemon::serve(dir, &serve("a/disk.sock", more));
        put(dir, "a/disk.sock", 5, 77);
        daemon.stop();
        let clone = File::open(dir.join("clones/disk.qcow2")).unwrap();
        let mut whose = [0; 256];
        if rustix::fs::fgetxattr(&clone, c"user.ringway.socket", &mut whose[..]).is_err() {
            return skip(Need::OwnBlocks, "attributes of files".to_owned());
        }
        let mut other = ringway();
        other.arg("serve").args(serve("b/disk.sock", more)).current_dir(dir);
        let refused = run(other);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{more:?}: {said}");
        assert!(
            said.contains("a/disk.sock") && said.contains("the clone of another disk"),
            "{said}"
        );
        // Added later, in place of one that was removed.
        let args = serve("./b/../a/disk.sock", more);
        let daemon = Daemon::serve(dir, &[&args[..], &["--control", "ctl"]].concat());
        ctl(dir, &["remove", "0"]);
        let mut add = ringway();
        add.args(["ctl", "--control", "ctl", "add", "base.raw", "--overlay", "clones"]);
        add.args(["--socket", "b/disk.sock"]).current_dir(dir);
        let refused = run(add);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("the clone of another disk"), "{said}");
        ctl(dir, &["add", "base.raw", "--overlay", "clones", "--socket", "a/disk.sock"]);
        assert_eq!(sector(dir, "a/disk.sock", 5), 77);
        daemon.stop();
    }
    // By another way to its folder it is the same socket.
    std::os::unix::fs::symlink("a", dir.join("link")).unwrap();
    Daemon::serve(dir, &serve("link/disk.sock", &[])).stop();
    // A copy is another one's as long as it says so.
    for (option, theirs) in [("--preserve=xattr", true), ("--preserve=mode", false)] {
        std::fs::remove_file(dir.join("clones/copy.qcow2")).ok();
        let mut cp = Command::new("cp");
        cp.args([option, "clones/disk.qcow2", "clones/copy.qcow2"]).current_dir(dir);
        assert!(cp.status().unwrap().success());
        let mut other = ringway();
        other.arg("serve").args(serve("b/copy.sock", &[])).current_dir(dir);
        if theirs {
            let said = text(&run(other).stderr);
            assert!(said.contains("whose socket is") && said.contains("a/disk.sock"), "{said}");
        } else {
            Daemon::start(other).stop();
        }
    }
}

/// Where clones cannot be told apart by their sockets it is said.
#[test]
fn e85_a_clone_that_keeps_no_socket_is_said_to() {
    let dir = base();
    let dir = dir.path();
    for (socket, more) in [("one.sock", &[][..]), ("other.sock", &["--sandbox", "off"])] {
        let mut serve = ringway();
        let args = ["serve", "base.raw", "--overlay", "clones", "--socket", socket];
        serve.args(args).args(more).current_dir(dir);
        without(&mut serve, libc::SYS_fsetxattr, libc::EOPNOTSUPP);
        let daemon = Daemon::start(serve);
        let log = daemon.log();
        assert!(log.contains("does not keep for which socket this clone was made"), "{log}");
        put(dir, socket, 5, 77);
        daemon.stop();
    }
}
