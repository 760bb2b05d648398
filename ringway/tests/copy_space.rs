//! `ringway copy`: what space a copy takes, on file systems made for it.

use crate::common::{Daemon, copies, copy, same, text};
use ringway_testkit::{Lack, Mounted};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Of the image to copy: its end is in the middle of a block.
const BYTES: u64 = 24 * MIB + 4096 + 100;

/// A small file system of its own; `None`, with the reason said, if there can be none here.
fn mount(mounted: Result<Mounted, Lack>) -> Option<Mounted> {
    mounted.inspect_err(Lack::skip).ok()
}

/// A file system on a file: made by `mkfs.NAME`, mounted at `dir/NAME`.
fn file_system(dir: &Path, name: &str, options: &[&str]) -> Option<Mounted> {
    mount(Mounted::on_file(dir.join(name), name, options, 400 * MIB))
}

/// Refused with status 1; nothing is left at `b` but what was there.
#[track_caller]
fn refuses(dir: &Path, args: &[&str], says: &[&str]) {
    refuses_as(1, dir, args, says);
}

/// As [`refuses`], with another status.
#[track_caller]
fn refuses_as(status: i32, dir: &Path, args: &[&str], says: &[&str]) {
    let b = dir.join("b");
    let before = std::fs::read(&b).ok();
    let output = copy(dir, args);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
    for word in says {
        assert!(error.contains(word), "{args:?}: {error}");
    }
    assert!(std::fs::read(&b).ok() == before, "{args:?}: it was touched");
    assert!(!dir.join("b.ringway-copy").exists(), "{args:?}: its journal was left");
}

/// Data, holes and zeroes by turns, each 1 MiB; no two sectors of the data are the same.
fn image(path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(BYTES).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for (number, offset) in (0u64..).zip((0..BYTES).step_by(1 << 20)) {
        let len = usize::try_from(MIB.min(BYTES - offset)).unwrap();
        match number % 3 {
            0 => {
                for (at, word) in (offset / 8..).zip(bytes.chunks_mut(8)) {
                    word.copy_from_slice(
                        &(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes(),
                    );
                }
            }
            1 => bytes.fill(0),
            _ => continue,
        }
        file.write_all_at(&bytes[..len], offset).unwrap();
    }
    file.sync_all().unwrap();
}

/// Bytes that are free for anybody.
fn free(at: &Path) -> u64 {
    assert!(Command::new("sync").arg("-f").arg(at).status().unwrap().success());
    let found = rustix::fs::statvfs(at).unwrap();
    found.f_bfree * found.f_frsize
}

fn blocks(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

fn shares(name: &str, options: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let Some(mount) = file_system(dir.path(), name, options) else { return };
    let here = mount.path();
    let (a, b) = (here.join("a"), here.join("b"));
    image(&a);
    let before = free(here);
    for mode in ["auto", "always"] {
        let said = copies(here, &["--reflink", mode, "--verify", "a", "b"]);
        assert!(said.contains("24 MiB shared") && said.contains("verified"), "{said}");
        assert!(!said.contains("copied"), "{said}");
        same(&a, &b);
        let taken = before.saturating_sub(free(here));
        assert!(taken < MIB, "{mode}: {taken} bytes of {name} were taken");
        std::fs::remove_file(&b).unwrap();
    }

    // Over a longer file: the half block at the end is no hindrance.
    std::fs::write(&b, vec![7; 30 << 20]).unwrap();
    let said = copies(here, &["--force", "--reflink", "always", "a", "b"]);
    assert!(said.contains("shared"), "{said}");
    same(&a, &b);
    // Each is written without the other.
    let file = File::options().write(true).open(&b).unwrap();
    file.write_all_at(&[0xee; 5000], 3000).unwrap();
    let (one, other) = (std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    assert!(one[..3000] == other[..3000] && one[8000..] == other[8000..]);
    assert!(other[3000..8000] == [0xee; 5000] && one[3000..8000] != [0xee; 5000]);
    std::fs::remove_file(&b).unwrap();

    let before = free(here);
    let said = copies(here, &["--reflink", "never", "a", "b"]);
    assert!(said.contains("24 MiB copied") && !said.contains("shared"), "{said}");
    same(&a, &b);
    assert!(before - free(here) > 8 * MIB, "copies have space of their own");
    std::fs::remove_file(&b).unwrap();

    // Space that is promised is not shared.
    let said = copies(here, &["--prealloc", "falloc", "a", "b"]);
    assert!(said.contains("copied") && said.contains("reserved"), "{said}");
    same(&a, &b);
    assert!(blocks(&b) >= BYTES && before - free(here) >= BYTES);
    std::fs::remove_file(&b).unwrap();
    let both = ["--reflink", "always", "--prealloc", "full", "a", "b"];
    refuses_as(2, here, &both, &["exclude each other"]);

    // An empty file has nothing to share, which is no failure.
    File::create(&a).unwrap();
    copies(here, &["--reflink", "always", "--verify", "a", "b"]);
    assert_eq!(b.metadata().unwrap().len(), 0);
}

#[test]
fn files_on_xfs_share_their_blocks() {
    shares("xfs", &["-q", "-m", "reflink=1"]);
}

#[test]
fn files_on_btrfs_share_their_blocks() {
    shares("btrfs", &["-q"]);
}

#[test]
fn where_blocks_cannot_be_shared_they_are_copied_or_nothing_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let Some(other) = mount(Mounted::in_memory(path.join("other"), 64 * MIB)) else { return };
    image(&path.join("a"));
    image(&other.path().join("a"));
    let far = path.join("a");
    let far = far.to_str().unwrap();
    let here = other.path();
    let always = |source| ["--reflink", "always", source, "b"];
    refuses(here, &always(far), &["different file systems", "--reflink auto"]);
    refuses(here, &always("a"), &["cannot share", "--reflink auto"]);
    std::fs::write(here.join("b"), "precious").unwrap();
    for source in [far, "a"] {
        refuses(here, &["--force", "--reflink", "always", source, "b"], &["--reflink auto"]);
        let said = copies(here, &["--force", "--verify", source, "b"]);
        assert!(said.contains("copied") && !said.contains("shared"), "{said}");
        same(&here.join("a"), &here.join("b"));
    }
    // xfs without it.
    let Some(without) = file_system(path, "xfs", &["-q", "-m", "reflink=0"]) else { return };
    image(&without.path().join("a"));
    refuses(without.path(), &always("a"), &["the file system cannot share blocks"]);
    assert!(copies(without.path(), &["a", "b"]).contains("copied"));
}

#[test]
fn what_is_no_file_is_neither_shared_nor_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"));
    let daemon = Daemon::serve(path, &["null:64M", "--socket", "s"]);
    refuses_as(2, path, &["--reflink", "always", "s", "b"], &["s is a served disk", "only files"]);
    refuses_as(2, path, &["--force", "--reflink", "always", "a", "s"], &["s is a served disk"]);
    for how in ["falloc", "full"] {
        refuses_as(
            2,
            path,
            &["--force", "--prealloc", how, "a", "s"],
            &["--prealloc is for files"],
        );
    }
    // A new file for a served disk may have its space.
    let said = copies(path, &["--prealloc", "full", "s", "b"]);
    assert!(said.contains("written"), "{said}");
    assert!(blocks(&path.join("b")) >= 64 * MIB);
    daemon.stop();
}

#[test]
fn holes_get_the_space_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let (a, b) = (path.join("a"), path.join("b"));
    image(&a);
    for engine in ["auto", "threads"] {
        for (how, least, says) in [
            ("off", 0, "zeroes  "),
            ("falloc", BYTES, "zeroes reserved"),
            ("full", BYTES, "zeroes written"),
        ] {
            let said = copies(path, &["--prealloc", how, "--verify", "--engine", engine, "a", "b"]);
            assert!(said.contains(says), "{how}: {said}");
            same(&a, &b);
            assert!(blocks(&b) >= least, "{how}: {} of {BYTES}", blocks(&b));
            if how == "off" {
                assert!(blocks(&b) < 12 * MIB, "only a third of it is data: {}", blocks(&b));
            }
            if how == "full" {
                let file = File::open(&b).unwrap();
                let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
                assert_eq!(hole, BYTES, "all of it is written");
            }
            std::fs::remove_file(&b).unwrap();
        }
    }
}

#[test]
fn a_copy_that_cannot_have_its_space_does_not_begin() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"));
    let Some(small) = mount(Mounted::in_memory(path.join("small"), 16 * MIB)) else {
        return;
    };
    for how in ["falloc", "full"] {
        refuses(
            small.path(),
            &["--prealloc", how, "../a", "b"],
            &["reserve 24 MiB", "No space left"],
        );
    }
    // Its data alone find room.
    let said = copies(small.path(), &["../a", "b"]);
    assert!(said.contains("copied"), "{said}");
    same(&path.join("a"), &small.path().join("b"));

    let Some(memory) = mount(Mounted::new(path.join("memory"), &["-t", "ramfs", "none"])) else {
        return;
    };
    let falloc = ["--prealloc", "falloc", "../a", "b"];
    refuses(memory.path(), &falloc, &["cannot reserve space", "--prealloc full"]);
    let said = copies(memory.path(), &["--prealloc", "full", "../a", "b"]);
    assert!(said.contains("written"), "{said}");
    same(&path.join("a"), &memory.path().join("b"));
}

#[test]
fn an_overwritten_file_without_its_space_is_unfinished_and_goes_on_when_there_is_some() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    image(&path.join("a"));
    let Some(small) = mount(Mounted::in_memory(path.join("small"), 16 * MIB)) else {
        return;
    };
    let here = small.path();
    std::fs::write(here.join("b"), "old").unwrap();
    let failed = copy(here, &["--force", "--prealloc", "falloc", "../a", "b"]);
    let error = text(&failed.stderr);
    assert_eq!(failed.status.code(), Some(1), "{error}");
    assert!(error.contains("No space left") && error.contains("--resume"), "{error}");
    assert!(here.join("b.ringway-copy").exists(), "it is not complete");
    small.set_room(64 * MIB);
    let other = copy(here, &["--resume", "--prealloc", "full", "../a", "b"]);
    let error = text(&other.stderr);
    assert!(error.contains("begun with --prealloc falloc"), "{error}");
    // It goes on as it was begun.
    let said = copies(here, &["--resume", "--verify", "../a", "b"]);
    assert!(said.contains("reserved"), "{said}");
    same(&path.join("a"), &here.join("b"));
    assert!(blocks(&here.join("b")) >= BYTES);
}
