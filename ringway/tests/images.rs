//! `create`, `check` and `info` on qcow2 images, and what other commands say of the format, from outside.

use crate::common::{Daemon, folder, names, ringway, run, says, text};
use ringway_testkit::{Need, skip};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

fn qemu_img(dir: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("qemu-img").args(args).current_dir(dir).output().ok()?;
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    Some(text(&output.stdout))
}

#[test]
fn images_are_made_and_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    says(dir, &["create", "disk.img", "--size", "10G"], 0, &["disk.img: made, 10 GiB, raw"]);
    says(dir, &["create", "base.qcow2", "--size", "1T"], 0, &["1 TiB, qcow2"]);
    says(dir, &["create", "a.qcow2", "--backing", "base.qcow2"], 0, &["based on base.qcow2"]);
    let more = ["create", "b", "--backing", "disk.img", "--size", "20G", "--cluster-size", "2M"];
    says(dir, &more, 0, &["b: made, 20 GiB, qcow2, based on disk.img (raw)"]);
    std::fs::create_dir(dir.join("clones")).unwrap();
    let up = ["create", "clones/c.qcow2", "--backing", "a.qcow2"];
    says(dir, &up, 0, &["based on ../a.qcow2 (qcow2)", "--backing-root"]);
    assert_eq!(names(dir), ["a.qcow2", "b", "base.qcow2", "clones", "disk.img"]);
    assert_eq!(names(&dir.join("clones")), ["c.qcow2"]);
    let meta = dir.join("disk.img").metadata().unwrap();
    assert_eq!((meta.len(), meta.blocks(), meta.mode() & 0o777), (10 << 30, 0, 0o600));
    // A table for 1 TiB is a hole.
    assert!(dir.join("a.qcow2").metadata().unwrap().blocks() * 512 <= 256 << 10);
    for image in ["base.qcow2", "a.qcow2", "b", "clones/c.qcow2"] {
        says(dir, &["check", image], 0, &["whole", "0 of"]);
        if qemu_img(dir, &["check", "-f", "qcow2", image]).is_none() {
            skip(Need::Qemu, "no qemu-img here (apt install qemu-utils)");
        }
    }
    if let Some(info) = qemu_img(dir, &["info", "--output=json", "-f", "qcow2", "clones/c.qcow2"]) {
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["virtual-size"], 1_u64 << 40);
        assert_eq!(info["backing-filename"], "../a.qcow2");
        assert_eq!(info["backing-filename-format"], "qcow2");
    }
    let info = says(dir, &["info", "--format", "qcow2", "a.qcow2"], 0, &["Based on", "64 KiB"]);
    assert!(info.contains("base.qcow2 (qcow2)"), "{info}");
    let root = ["info", "--json", "--format", "qcow2", "--backing-root", ".", "clones/c.qcow2"];
    let chain: Value = serde_json::from_str(&says(dir, &root, 0, &[])).unwrap();
    let chain = chain["chain"].as_array().unwrap();
    assert_eq!(chain.len(), 3);
    assert_eq!(chain[0]["backing"], "../a.qcow2");
    assert_eq!(chain[2]["qcow2"]["cluster_bytes"], 65536);
    says(
        dir,
        &["info", "--format", "qcow2", "clones/c.qcow2"],
        1,
        &["is outside", "--backing-root"],
    );
}

#[test]
fn what_cannot_be_made_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let large = ["create", "new.qcow2", "--cluster-size", "512", "--size", "1P"];
    let small = ["create", "new.qcow2", "--size", "1G", "--cluster-size", "3K"];
    let raw = ["create", "new", "--format", "raw", "--size", "1G", "--cluster-size", "64K"];
    let none = ["create", "new.qcow2", "--backing", "gone.raw"];
    for (args, status, words) in [
        (&["create", "new.qcow2"][..], 2, "--size"),
        (&["create", "new.img", "--size", "1000"], 1, "multiple of 512"),
        (&["create", "new.img", "--size", "0"], 1, "positive multiple"),
        (&["create", "new.img", "--size", "9E"], 1, "a size of 9 EiB is too large: an image has"),
        (&["create", "no/new.img", "--size", "1G"], 1, "folder"),
        (&large, 1, "--cluster-size"),
        (&small, 2, "'3K' for '--cluster-size <SIZE>': a cluster has 512, 1K, 2K"),
        (&raw, 2, "is for qcow2 images. Add --format qcow2, or leave --cluster-size out"),
        (&none, 1, "gone.raw"),
        (&["create", "new.qcow2", "--backing", "/dev/null"], 1, "neither a file"),
    ] {
        says(dir, args, status, &[words]);
        assert_eq!(names(dir), Vec::<String>::new(), "{args:?}");
    }
    // A full disk: the largest file that the process may write.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 1; trap '' XFSZ; exec \"$0\" create new.qcow2 --size 1T"]);
    let output = run({
        limited.arg(ringway().get_program()).current_dir(dir);
        limited
    });
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("cannot make it"), "{}", text(&output.stderr));
    assert_eq!(names(dir), Vec::<String>::new());
}

#[test]
fn nothing_is_overwritten_unless_it_was_meant_and_nobody_uses_it() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let dir = dir.path();
    let create = ["create", "disk.img", "--size", "1G"];
    let force = ["create", "--force", "disk.img", "--size", "1G"];
    says(dir, &create, 1, &["is there already", "--force"]);
    says(dir, &force, 1, &["in use by"]);
    daemon.stop();
    says(dir, &force, 0, &["made"]);
    assert_eq!(dir.join("disk.img").metadata().unwrap().len(), 1 << 30);
    let itself = ["create", "--force", "disk.img", "--backing", "disk.img", "--format", "qcow2"];
    says(dir, &itself, 1, &["based on itself"]);
    std::fs::create_dir(dir.join("folder")).unwrap();
    says(dir, &["create", "--force", "folder", "--size", "1G"], 1, &["it is no file"]);
    symlink("gone", dir.join("link")).unwrap();
    says(dir, &["create", "link", "--size", "1G"], 1, &["a link to a file that is not there"]);
    // Through a link the file is replaced, and the link stays.
    std::fs::remove_file(dir.join("link")).unwrap();
    symlink("disk.img", dir.join("link")).unwrap();
    says(dir, &["create", "--force", "link", "--size", "2G"], 0, &[]);
    assert_eq!(dir.join("disk.img").metadata().unwrap().len(), 2 << 30);
    assert!(dir.join("link").is_symlink());
}

/// What a guest wrote into its raw disk is no format, whatever the command.
#[test]
fn the_format_is_said_by_names_and_words_never_by_content() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    says(dir, &["create", "x.qcow2", "--size", "1G"], 0, &[]);
    std::fs::rename(dir.join("x.qcow2"), dir.join("base")).unwrap();
    let clone = ["create", "a.qcow2", "--backing", "base"];
    says(dir, &clone, 1, &["looks like a qcow2 image", "--backing-format"]);
    for (format, size) in [("raw", "256 KiB"), ("qcow2", "1 GiB")] {
        let said = [&clone[..], &["--force", "--backing-format", format]].concat();
        says(dir, &said, 0, &[&format!("({format})"), &format!("made, {size}")]);
    }
    // A name says qcow2, and it is none.
    std::fs::write(dir.join("text.qcow2"), [7; 512]).unwrap();
    let text = ["create", "b.qcow2", "--backing", "text.qcow2"];
    says(dir, &text, 1, &["text.qcow2: it is no qcow2 image"]);
    says(dir, &["check", "text.qcow2"], 1, &["it is no qcow2 image"]);
    // What looks like qcow2 is shown both ways, and is raw.
    says(dir, &["info", "base"], 0, &["looks like qcow2", "not servable", "Image base", "1.1"]);
    says(dir, &["info", "--format", "qcow2", "text.qcow2"], 1, &["it is no qcow2 image"]);
    // A header whose chain leads nowhere does not keep a raw disk from being looked at.
    let bad = ["create", "bad", "--backing", "base", "--backing-format", "qcow2"];
    says(dir, &bad, 0, &[]);
    std::fs::remove_file(dir.join("base")).unwrap();
    says(dir, &["info", "bad"], 0, &["looks like qcow2", "as qcow2", "is not there"]);
    says(dir, &["info", "--format", "qcow2", "bad"], 1, &["'base' is not there"]);
    let raw = says(dir, &["info", "--format", "raw", "bad"], 0, &[]);
    assert!(!raw.contains("as qcow2"), "{raw}");
}

/// QEMU writes nothing behind the last entry of a table of snapshots, which may be where the file ends.
#[test]
fn an_image_may_end_with_its_table_of_snapshots() {
    let dir = folder();
    let dir = dir.path();
    for name in ["s", "seven77", "eight888"] {
        let create = ["create", "-q", "-f", "qcow2", "sn.qcow2", "1M"];
        if qemu_img(dir, &create).is_none() {
            return skip(Need::Qemu, "qemu-img".to_owned());
        }
        for snapshot in [name, "b"] {
            qemu_img(dir, &["snapshot", "-c", snapshot, "sn.qcow2"]).unwrap();
            says(dir, &["info", "--format", "qcow2", "sn.qcow2"], 0, &[snapshot]);
            says(dir, &["check", "sn.qcow2"], 0, &["whole"]);
        }
    }
}

#[test]
fn a_check_tells_leaks_from_errors_and_repairs_leaks_only() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    says(dir, &["create", "disk.qcow2", "--size", "1G"], 0, &[]);
    let file = std::fs::File::options().write(true).open(dir.join("disk.qcow2")).unwrap();
    // One more cluster, which is counted and used by nobody: cluster 4.
    file.set_len(5 << 16).unwrap();
    file.write_all_at(&[0, 1], (2 << 16) + 8).unwrap();
    // And a mark that it was not closed.
    file.write_all_at(&1_u64.to_be_bytes(), 72).unwrap();
    let reported = ["leak: cluster 4 at 0x40000", "1 leaked cluster (64 KiB)", "marked as dirty"];
    says(dir, &["check", "disk.qcow2"], 4, &reported);
    let json = says(dir, &["check", "--json", "disk.qcow2"], 4, &[]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["leaks"], &json["errors"]), (&1.into(), &0.into()));
    // An error: the L1 table is used and not counted. Nothing is changed then.
    file.write_all_at(&[0, 0], (2 << 16) + 6).unwrap();
    let before = std::fs::read(dir.join("disk.qcow2")).unwrap();
    let repair = ["check", "--repair", "leaks", "disk.qcow2"];
    says(
        dir,
        &repair,
        3,
        &[
            "error: cluster 3",
            "1 error, 1 leaked cluster.",
            "nothing was changed",
            "qemu-img check -r all",
        ],
    );
    assert!(std::fs::read(dir.join("disk.qcow2")).unwrap() == before);
    file.write_all_at(&[0, 1], (2 << 16) + 6).unwrap();
    says(dir, &repair, 0, &["whole", "1 leaked cluster repaired (64 KiB)", "not marked as dirty"]);
    says(dir, &["check", "disk.qcow2"], 0, &["whole"]);
    // A shared lock is enough to read it, and repairing needs it alone.
    flock(&file, FlockOperation::LockShared).unwrap();
    says(dir, &["check", "disk.qcow2"], 0, &["whole"]);
    says(dir, &repair, 1, &["in use by"]);
    flock(&file, FlockOperation::LockExclusive).unwrap();
    says(dir, &["check", "disk.qcow2"], 1, &["in use by"]);
    // A child of another test has it too, until it is a program of its own.
    flock(&file, FlockOperation::Unlock).unwrap();
    std::fs::set_permissions(dir.join("disk.qcow2"), PermissionsExt::from_mode(0o400)).unwrap();
    says(dir, &["check", "disk.qcow2"], 0, &["whole"]);
    says(dir, &["check", "gone.qcow2"], 1, &["gone.qcow2: there is no such file. Check the path"]);
    says(dir, &["check", "--repair", "all", "disk.qcow2"], 2, &["leaks"]);
}

#[test]
fn c45_what_is_lost_is_named_and_the_rest_can_be_had() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("raw"), vec![0x77; 2 << 20]).unwrap();
    // Tables first, then data.
    if qemu_img(dir, &["convert", "-f", "raw", "-O", "qcow2", "raw", "a.qcow2"]).is_none() {
        return skip(Need::Qemu, "no qemu-img here (apt install qemu-utils)");
    }
    let image = std::fs::File::options().write(true).open(dir.join("a.qcow2")).unwrap();
    let end = image.metadata().unwrap().len() - (1 << 20);
    image.set_len(end).unwrap();
    says(dir, &["create", "top.qcow2", "--backing", "a.qcow2"], 0, &[]);
    for name in ["a.qcow2", "top.qcow2"] {
        let serve = ["serve", name, "--format", "qcow2", "--socket", "s.sock"];
        says(dir, &serve, 1, &["a.qcow2", "1048576 bytes of the disk are lost", "--read-only"]);
        assert_eq!(image.metadata().unwrap().len(), end, "nothing is changed");
        let read_only = Daemon::serve(dir, &[&serve[1..], &["--read-only"]].concat());
        let deadline = std::time::Instant::now() + crate::common::PATIENCE;
        while !read_only.log().contains("1048576 bytes of the disk are lost") {
            assert!(std::time::Instant::now() < deadline, "{}", read_only.log());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        drop(read_only);
        let copy = ["copy", "--from-format", "qcow2", name, "b"];
        says(dir, &copy, 1, &["1048576 bytes of the disk are lost", "..", "--salvage"]);
        assert!(!dir.join("b").exists());
        says(
            dir,
            &[&copy[..], &["--salvage"]].concat(),
            4,
            &["1048576 bytes of the disk are lost"],
        );
        let content = std::fs::read(dir.join("b")).unwrap();
        let there = content.iter().filter(|byte| **byte == 0x77).count();
        assert_eq!((content.len(), there), (2 << 20, 1 << 20));
        assert!(content.iter().all(|byte| matches!(byte, 0 | 0x77)));
        std::fs::remove_file(dir.join("b")).unwrap();
    }
}

/// An image with 1 MiB of `0x5a` at its beginning.
fn with_data(dir: &Path, name: &str) -> std::fs::File {
    says(dir, &["create", name, "--size", "64M"], 0, &[]);
    says(dir, &["io", "--format", "qcow2", name, "-c", "write -P 0x5a 0 1M"], 0, &[]);
    std::fs::File::options().read(true).write(true).open(dir.join(name)).unwrap()
}

/// Bytes 72 to 80 of the header.
fn set_incompatible(image: &std::fs::File, bits: u64) {
    image.write_all_at(&bits.to_be_bytes(), 72).unwrap();
}

fn incompatible(image: &std::fs::File) -> u64 {
    u64::from_be_bytes(at(image, 72))
}

fn at(image: &std::fs::File, offset: u64) -> [u8; 8] {
    let mut bytes = [0; 8];
    image.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn c45_an_image_that_is_marked_as_corrupt_can_be_read_and_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let image = with_data(dir, "a.qcow2");
    set_incompatible(&image, 2);
    let before = std::fs::read(dir.join("a.qcow2")).unwrap();
    let mark = "a.qcow2: it is marked as corrupt";
    let serve = ["serve", "a.qcow2", "--format", "qcow2", "--socket", "s"];
    says(dir, &serve, 1, &[mark, "--read-only"]);
    says(dir, &["resize", "a.qcow2", "128M"], 1, &[mark]);
    says(dir, &["create", "b.qcow2", "--backing", "a.qcow2"], 1, &["marked as corrupt"]);
    let io = ["io", "--format", "qcow2", "a.qcow2", "-c", "verify -P 0x5a 0 1M"];
    says(dir, &io, 1, &[mark]);
    says(dir, &[&io[..], &["--read-only"]].concat(), 0, &[mark, "may be wrong"]);
    says(dir, &["info", "--format", "qcow2", "a.qcow2"], 0, &[mark, "corrupt", "read-only"]);
    says(dir, &["copy", "-f", "qcow2", "a.qcow2", "a.img"], 0, &[mark, "1 MiB data"]);
    let copy = std::fs::read(dir.join("a.img")).unwrap();
    assert!(copy.len() == 64 << 20 && copy[..1 << 20].iter().all(|byte| *byte == 0x5a));
    let daemon = Daemon::serve(dir, &[&serve[1..], &["--read-only"]].concat());
    assert!(daemon.log().contains(mark), "{}", daemon.log());
    let verify = ["io", "--read-only", "vhost-user:s", "-c", "verify -P 0x5a 0 1M"];
    says(dir, &verify, 0, &[]);
    daemon.stop();
    assert!(std::fs::read(dir.join("a.qcow2")).unwrap() == before, "nothing has changed it");
}

/// As QEMU leaves one with lazy reference counts that it has not closed.
#[test]
fn c45_lazy_reference_counts_are_made_right_before_an_image_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let image = with_data(dir, "a.qcow2");
    let not_closed = || {
        // The counts of all clusters behind the first tables, and the marks.
        image.write_all_at(&[0; 128], (2 << 16) + 8).unwrap();
        image.write_all_at(&1_u64.to_be_bytes(), 80).unwrap();
        set_incompatible(&image, 1);
    };
    not_closed();
    let serve = ["a.qcow2", "--format", "qcow2", "--socket", "s"];
    let never = [&["serve"][..], &serve, &["--repair", "never"]].concat();
    says(dir, &never, 1, &["it was not closed", "qemu-img check -r all"]);
    assert_eq!(incompatible(&image), 1, "who wants to look first can");
    Daemon::serve(dir, &[&serve[..], &["--read-only"]].concat()).stop();
    assert_eq!(incompatible(&image), 1);
    let daemon = Daemon::serve(dir, &serve);
    let said =
        "a.qcow2: it was not closed (lazy refcounts): its reference counts were made right, in ";
    assert!(daemon.log().contains(said), "{}", daemon.log());
    let verify = "verify -P 0x5a 0 1M";
    says(dir, &["io", "vhost-user:s", "-c", verify, "-c", "write -P 1 4M 1M"], 0, &[]);
    daemon.stop();
    says(dir, &["check", "a.qcow2"], 0, &["whole"]);
    says(dir, &["io", "-f", "qcow2", "a.qcow2", "-c", verify, "-c", "verify -P 1 4M 1M"], 0, &[]);
    // Tools that change an image do so, too.
    not_closed();
    says(dir, &["resize", "a.qcow2", "128M"], 0, &[said]);
    says(dir, &["check", "a.qcow2"], 0, &["whole"]);
    // Also where QEMU had not written a block of counts yet.
    let table = u64::from_be_bytes(at(&image, 48));
    let no_block = || {
        image.write_all_at(&[0; 8], table).unwrap();
        image.write_all_at(&1_u64.to_be_bytes(), 80).unwrap();
        set_incompatible(&image, 1);
    };
    no_block();
    let daemon = Daemon::serve(dir, &serve);
    assert!(daemon.log().contains(said), "{}", daemon.log());
    says(dir, &["io", "vhost-user:s", "-c", verify, "-c", "write -P 2 8M 1M"], 0, &[]);
    daemon.stop();
    says(dir, &["check", "a.qcow2"], 0, &["whole"]);
    let both = ["-c", verify, "-c", "verify -P 1 4M 1M", "-c", "verify -P 2 8M 1M"];
    says(dir, &[&["io", "-f", "qcow2", "a.qcow2"][..], &both].concat(), 0, &[]);
    if qemu_img(dir, &["check", "-f", "qcow2", "a.qcow2"]).is_none() {
        skip(Need::Qemu, "no qemu-img here (apt install qemu-utils)".to_owned());
    }
    // Not where the end of the file is missing: the block would be where a table leads to.
    let whole = std::fs::read(dir.join("a.qcow2")).unwrap();
    no_block();
    let l2 = u64::from_be_bytes(at(&image, u64::from_be_bytes(at(&image, 40)))) & !(1 << 63);
    let end = image.metadata().unwrap().len().next_multiple_of(1 << 16);
    image.set_len(end).unwrap();
    image.write_all_at(&((1_u64 << 63) | end).to_be_bytes(), l2 + 8 * 1023).unwrap();
    let before = std::fs::read(dir.join("a.qcow2")).unwrap();
    says(dir, &[&["serve"][..], &serve].concat(), 1, &["it was not closed"]);
    assert!(std::fs::read(dir.join("a.qcow2")).unwrap() == before, "it stays as it is");
    std::fs::write(dir.join("a.qcow2"), &whole).unwrap();
    // Where something else is wrong, too, it stays as it is marked: the first entry leads out of the file.
    not_closed();
    let l1 = u64::from_be_bytes(at(&image, 40));
    image.write_all_at(&((1_u64 << 63) | (1 << 40)).to_be_bytes(), l1).unwrap();
    says(dir, &[&["serve"][..], &serve].concat(), 1, &["it was not closed"]);
    assert_eq!(incompatible(&image), 1);
}

/// Images that QEMU has really left so.
#[test]
fn c45_images_that_qemu_did_not_close_are_served_and_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (bits, cluster) in [("16", "64k"), ("1", "4k"), ("64", "512")] {
        let options = format!("lazy_refcounts=on,refcount_bits={bits},cluster_size={cluster}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, "q.qcow2", "64M"];
        if qemu_img(dir, &create).is_none() {
            return skip(Need::Qemu, "qemu-img".to_owned());
        }
        let mut command = Command::new("qemu-io");
        let words = ["-f", "qcow2", "q.qcow2", "-c", "write -P 9 1M 8M", "-c", "abort"];
        assert!(!command.args(words).current_dir(dir).output().unwrap().status.success());
        let image = std::fs::File::open(dir.join("q.qcow2")).unwrap();
        assert_eq!(incompatible(&image), 1, "QEMU did not close it");
        let words = ["-c", "verify -P 9 1M 8M", "-c", "write -P 3 20M 8M"];
        let io = [&["io", "--format", "qcow2", "q.qcow2"][..], &words].concat();
        says(dir, &io, 0, &["its reference counts were made right"]);
        qemu_img(dir, &["check", "-f", "qcow2", "q.qcow2"]).unwrap();
        std::fs::remove_file(dir.join("q.qcow2")).unwrap();
    }
}
