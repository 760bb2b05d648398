//! Tools on qcow2 images, from outside: what they write is judged by QEMU's programs, what QEMU's
//! programs have made is read.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, copy, folder, names, ringway, run, says, text};
use ringway_testkit::{Need, Rng, skip};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Runs `qemu-img`; `None` if it is not here.
#[track_caller]
fn qemu(dir: &Path, args: &[&str]) -> Option<String> {
    let Ok(output) = Command::new("qemu-img").args(args).current_dir(dir).output() else {
        skip(Need::Qemu, "no qemu-img here (apt install qemu-utils)");
        return None;
    };
    assert!(output.status.success(), "{args:?}: {}", text(&output.stdout) + &text(&output.stderr));
    Some(text(&output.stdout))
}

/// Data that compresses, data that does not, zeroes and holes.
fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut content = vec![0; bytes];
    for (at, piece) in content.chunks_mut(96 << 10).enumerate() {
        match at % 4 {
            0 => piece.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8),
            1 => piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 300) as u8),
            _ => {}
        }
    }
    content
}

/// A sparse file.
fn raw(path: &Path, content: &[u8]) {
    let file = File::create(path).unwrap();
    file.set_len(content.len() as u64).unwrap();
    for (at, piece) in (0..).step_by(4096).zip(content.chunks(4096)) {
        if piece.iter().any(|&byte| byte != 0) {
            file.write_all_at(piece, at).unwrap();
        }
    }
}

/// It is whole to both judges, and holds what the raw image holds.
#[track_caller]
fn judge(dir: &Path, image: &str, raw: &str) -> bool {
    says(dir, &["check", image], 0, &["whole"]);
    let judged = qemu(dir, &["check", "-f", "qcow2", image]).is_some();
    judged && qemu(dir, &["compare", "-f", "raw", "-F", "qcow2", raw, image]).is_some()
}

/// Bytes of disk that have a place in an image, by `qemu-img map`.
fn mapped(dir: &Path, image: &str) -> Option<u64> {
    let map = qemu(dir, &["map", "--output=json", "-f", "qcow2", image])?;
    let map: Value = serde_json::from_str(&map).unwrap();
    let data = map.as_array().unwrap().iter().filter(|extent| extent["data"] == true);
    Some(data.map(|extent| extent["length"].as_u64().unwrap()).sum())
}

#[test]
fn raw_images_become_qcow2_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let sizes = [0, 512, 65536 + 512, 3 * MIB + 7, 9 * MIB];
    let kinds: [&[&str]; 5] = [
        &[],
        &["--compress"],
        &["--compress=zstd", "--cluster-size", "4K"],
        &["--cluster-size", "512"],
        &["--compress", "--cluster-size", "2M", "--in-flight", "3"],
    ];
    for (nth, (bytes, kind)) in sizes.iter().flat_map(|s| kinds.map(|k| (s, k))).enumerate() {
        let bytes = if *bytes == 0 { 1 } else { *bytes };
        raw(&dir.join("a.raw"), &content(nth as u64, bytes));
        let said = copy(dir, &[&["--verify", "--json", "a.raw", "b.qcow2"], kind].concat());
        assert!(said.status.success(), "{kind:?} {bytes}: {}", text(&said.stderr));
        let said: Value = serde_json::from_str(&text(&said.stdout)).unwrap();
        assert_eq!(said["bytes"], bytes);
        assert_eq!((&said["to_format"], &said["verified"]), (&"qcow2".into(), &true.into()));
        let file = dir.join("b.qcow2").metadata().unwrap();
        assert_eq!(said["file_bytes"], file.len());
        if !judge(dir, "b.qcow2", "a.raw") {
            return;
        }
        // Tables of large clusters are larger than what is saved here.
        if kind == ["--compress"] && bytes > 8 * MIB {
            assert!(said["data_bytes"].as_u64().unwrap() * 9 / 10 > file.len(), "{said}");
        }
        // Half of it is zeroes, in pieces of three clusters.
        if kind.is_empty() && bytes > 8 * MIB {
            assert!(mapped(dir, "b.qcow2").unwrap() < bytes as u64 * 7 / 10);
        }
        let back = ["copy", "--from-format", "qcow2", "--verify", "b.qcow2", "c.raw"];
        says(dir, &back, 0, &["verified"]);
        let mut wanted = std::fs::read(dir.join("a.raw")).unwrap();
        wanted.resize(bytes.next_multiple_of(512), 0);
        let found = std::fs::read(dir.join("c.raw")).unwrap();
        assert!(found == wanted, "{kind:?} {bytes}");
        let (from, to) = (dir.join("a.raw").metadata().unwrap(), dir.join("c.raw").metadata());
        assert!(to.unwrap().blocks() <= from.blocks() + 128, "it has its holes");
        assert_eq!(names(dir), ["a.raw", "b.qcow2", "c.raw"]);
        for name in ["b.qcow2", "c.raw"] {
            std::fs::remove_file(dir.join(name)).unwrap();
        }
    }
}

#[test]
fn chains_of_every_kind_are_copied_as_one_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = content(1, 5 * MIB + 512);
    raw(&dir.join("base.raw"), &base);
    let made = qemu(dir, &["convert", "-c", "-f", "raw", "-O", "qcow2", "base.raw", "low.qcow2"])
        .and_then(|_| {
            let zstd = "compression_type=zstd,cluster_size=4k";
            let args = ["create", "-f", "qcow2", "-b", "low.qcow2", "-F", "qcow2", "-o", zstd];
            qemu(dir, &[&args[..], &["top.qcow2", "8M"]].concat())
        });
    if made.is_none() {
        return;
    }
    let mut io = Command::new("qemu-io");
    io.args(["-f", "qcow2", "-c", "write -P 7 1M 200k", "-c", "write -z 2M 64k"]);
    io.args(["-c", "write -P 9 6M 4k", "top.qcow2"]).current_dir(dir);
    assert!(run(io).status.success());
    assert!(qemu(dir, &["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "wanted"]).is_some());
    let wanted = std::fs::read(dir.join("wanted")).unwrap();
    let from = ["copy", "--from-format", "qcow2", "--verify", "top.qcow2"];
    says(dir, &[&from[..], &["one.raw"]].concat(), 0, &["verified"]);
    assert!(std::fs::read(dir.join("one.raw")).unwrap() == wanted);
    for kind in [&["two.qcow2"][..], &["three.qcow2", "--compress"]] {
        says(dir, &[&from[..], kind].concat(), 0, &["verified"]);
        assert!(judge(dir, kind[0], "wanted"));
        let info = says(dir, &["info", "--json", "--format", "qcow2", kind[0]], 0, &[]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["chain"].as_array().unwrap().len(), 1, "it is based on nothing");
    }
    // Zeroes are told without being read: clusters of zeroes over data of the base are a hole.
    let holes = rustix::fs::seek(
        File::open(dir.join("one.raw")).unwrap(),
        rustix::fs::SeekFrom::Hole(2 * MIB as u64),
    );
    assert!(holes.unwrap() < (2 * MIB + 65536) as u64);
}

#[test]
fn what_is_read_is_said_and_what_is_made_may_be_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    says(dir, &["create", "a.qcow2", "--size", "1M"], 0, &[]);
    let before = std::fs::read(dir.join("a.qcow2")).unwrap();
    raw(&dir.join("b.raw"), &content(2, MIB));
    let unsaid = ["looks like a qcow2 image", "--from-format qcow2", "--from-format raw"];
    says(dir, &["copy", "a.qcow2", "c.raw"], 1, &unsaid);
    says(dir, &["copy", "a.qcow2", "c.qcow2"], 1, &unsaid);
    let both = ["copy", "--from-format", "raw", "a.qcow2", "c.qcow2"];
    says(dir, &both, 1, &["--to-format raw", "--from-format qcow2"]);
    says(dir, &[&both[..], &["--to-format", "raw"]].concat(), 0, &[]);
    assert!(std::fs::read(dir.join("c.qcow2")).unwrap() == before, "bytes as they are");
    says(dir, &["copy", "b.raw", "c.qcow2"], 1, &["c.qcow2", "--force"]);
    says(dir, &["copy", "--force", "b.raw", "c.qcow2"], 0, &["of qcow2"]);
    says(dir, &["check", "c.qcow2"], 0, &["16 clusters allocated"]);
    says(dir, &["copy", "--to-format", "qcow2", "b.raw", "d"], 0, &[]);
    says(dir, &["check", "d"], 0, &["whole"]);
    let from = ["copy", "--from-format", "qcow2"];
    says(dir, &[&from[..], &["b.raw", "e"]].concat(), 1, &["b.raw", "no qcow2 image"]);
    let qcow2_only = ["--compress", "--cluster-size=64K"];
    for option in qcow2_only {
        let args = ["copy", option, "--to-format", "raw", "b.raw", "e"];
        says(dir, &args, 2, &["is for qcow2 images"]);
    }
    for option in ["--resume", "--prealloc=full", "--target-is-zero", "--journal=j"] {
        let name = option.split('=').next().unwrap();
        says(dir, &["copy", option, "b.raw", "e.qcow2"], 2, &[name, "for raw ones"]);
    }
    let apart = ["copy", "--compress", "zstd", "b.raw", "e.qcow2"];
    says(dir, &apart, 2, &["tip: write --compress=zstd"]);
    let odd = ["copy", "--cluster-size", "3000", "b.raw", "e.qcow2"];
    says(dir, &odd, 2, &["'3000'", "512, 1K, 2K"]);
    says(dir, &["copy", "--backing-root", "/", "b.raw", "e"], 2, &["--from-format qcow2"]);
    says(dir, &["copy", "b.raw", "no/such/folder.qcow2"], 1, &["folder"]);
    assert_eq!(names(dir), ["a.qcow2", "b.raw", "c.qcow2", "d"]);
    assert!(std::fs::read(dir.join("a.qcow2")).unwrap() == before);
}

#[test]
fn nothing_is_left_of_an_image_that_could_not_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(&dir.join("a.raw"), &content(3, 4 * MIB));
    std::fs::write(dir.join("old.qcow2"), b"old").unwrap();
    // A full disk, as far as this process can see.
    let mut limited = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_ringway");
    let words = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" copy --force a.raw old.qcow2";
    limited.args(["-c", words, program]).current_dir(dir);
    let output = run(limited);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("writing at byte"), "{}", text(&output.stderr));
    assert_eq!(names(dir), ["a.raw", "old.qcow2"]);
    assert_eq!(std::fs::read(dir.join("old.qcow2")).unwrap(), b"old");
    // Interrupted in the middle, by a source that waits for its server.
    raw(&dir.join("big.raw"), &content(4, 64 * MIB));
    let mut child = ringway();
    child.args(["copy", "--compress", "--in-flight", "1", "big.raw", "new.qcow2"]);
    let mut child = child.current_dir(dir).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + crate::common::PATIENCE;
    while names(dir).len() == 3 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    let status = crate::common::wait(&mut child, crate::common::PATIENCE).expect("it ends");
    let made = status.code() == Some(0);
    assert!(made || status.code() == Some(143), "{status:?}");
    let there = names(dir);
    assert_eq!(there.contains(&"new.qcow2".to_owned()), made, "{there:?}");
    assert_eq!(there.len(), 3 + usize::from(made), "{there:?}");
}

#[test]
fn served_disks_and_images_are_copied_to_each_other() {
    let dir = folder();
    let dir = dir.path();
    let wanted = content(5, 8 * MIB);
    raw(&dir.join("a.raw"), &wanted);
    says(dir, &["copy", "--compress=zstd", "a.raw", "a.qcow2"], 0, &[]);
    says(dir, &["create", "top.qcow2", "--backing", "a.qcow2"], 0, &[]);
    let daemon = Daemon::serve(dir, &["top.qcow2", "--format", "qcow2", "--socket", "s"]);
    says(dir, &["copy", "--verify", "vhost-user:s", "b.qcow2"], 0, &["verified"]);
    judge(dir, "b.qcow2", "a.raw");
    let other = content(6, 8 * MIB);
    raw(&dir.join("c.raw"), &other);
    says(dir, &["copy", "c.raw", "c.qcow2"], 0, &[]);
    let onto = ["copy", "--force", "--verify", "--from-format", "qcow2", "c.qcow2", "vhost-user:s"];
    says(dir, &onto, 0, &["verified"]);
    let used = ["copy", "--from-format", "qcow2", "top.qcow2", "d.raw"];
    says(dir, &used, 1, &["in use by"]);
    let odd = ["copy", "--force", "--compress", "a.raw", "vhost-user:s"];
    says(dir, &odd, 2, &["served disk", "--compress"]);
    daemon.stop();
    judge(dir, "top.qcow2", "c.raw");
    judge(dir, "a.qcow2", "a.raw");
}

#[test]
fn io_and_bench_work_on_images_as_on_disks() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    raw(&dir.join("base.raw"), &content(7, 8 * MIB));
    std::fs::copy(dir.join("base.raw"), dir.join("kept")).unwrap();
    says(dir, &["create", "top.qcow2", "--backing", "base.raw"], 0, &[]);
    let io = ["io", "--format", "qcow2", "top.qcow2"];
    let commands = ["-c", "write -P 7 1M 100K", "-c", "zero 2M 64K", "-c", "flush"];
    let said = says(dir, &[&io[..], &commands].concat(), 0, &["wrote"]);
    assert!(!said.contains("INFO"), "what serves the image inside is nobody's business: {said}");
    let verify = ["-c", "verify -P 7 1M 100K", "-c", "verify -P 0 2M 64K", "-c", "info"];
    says(dir, &[&io[..], &verify].concat(), 0, &["qcow2 image", "8 MiB"]);
    let read_only = ["--read-only", "-c", "write 0 512"];
    says(dir, &[&io[..], &read_only].concat(), 1, &["read-only"]);
    says(dir, &[&io[..], &["--direct", "-c", "read 0 512"]].concat(), 1, &["--direct"]);
    let bench = ["bench", "--format", "qcow2", "top.qcow2", "--bs", "64k"];
    says(dir, &[&bench[..], &["--rw", "randwrite"]].concat(), 1, &["--allow-write"]);
    let write = ["--rw", "randwrite", "--allow-write", "--verify"];
    says(dir, &[&bench[..], &write].concat(), 0, &["qcow2 image"]);
    says(dir, &["check", "top.qcow2"], 0, &["whole"]);
    qemu(dir, &["check", "-f", "qcow2", "top.qcow2"]);
    let same =
        std::fs::read(dir.join("base.raw")).unwrap() == std::fs::read(dir.join("kept")).unwrap();
    assert!(same, "the base is only read");
    // As the bytes of a file: reading does no harm, writing does.
    says(dir, &["io", "top.qcow2", "-c", "read 0 512"], 0, &[]);
    let hint = ["--format qcow2", "--format raw"];
    says(dir, &["io", "top.qcow2", "-c", "write 0 512"], 1, &hint);
}

#[test]
fn doctor_looks_at_images_with_all_they_are_based_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    says(dir, &["create", "base.qcow2", "--size", "1G"], 0, &[]);
    says(dir, &["create", "top.qcow2", "--backing", "base.qcow2"], 0, &[]);
    says(dir, &["doctor", "top.qcow2"], 1, &["looks like qcow2", "--format qcow2"]);
    let doctor = ["doctor", "--format", "qcow2", "top.qcow2"];
    let said = says(dir, &doctor, 0, &["Based on", "base.qcow2", "Served with", "writeback"]);
    assert!(!said.contains("not raw") && !said.contains("truncate"), "{said}");
    let json = says(dir, &["doctor", "--json", "--format", "qcow2", "top.qcow2"], 0, &[]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["chain"].as_array().unwrap().len(), 2);
    assert_eq!(json["image"]["choice"]["cache"], "writeback");
    std::fs::remove_file(dir.join("base.qcow2")).unwrap();
    says(dir, &doctor, 1, &["'base.qcow2' is not there"]);
}
