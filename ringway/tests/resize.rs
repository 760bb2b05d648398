//! Images whose disks become larger or smaller while nobody serves them (hazard C37).
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text, wait};
use ringway_testkit::{Need, Rng, skip};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const MIB: usize = 1 << 20;

fn img(dir: &Path, args: &[&str]) -> Option<(Option<i32>, String)> {
    let Ok(output) = Command::new("qemu-img").args(args).current_dir(dir).output() else {
        skip(Need::Qemu, "qemu-img".to_owned());
        return None;
    };
    Some((output.status.code(), text(&output.stdout) + &text(&output.stderr)))
}

/// `disk.qcow2` on `base.raw`, both full, and what the disk holds.
fn images(dir: &Path) -> Option<Vec<u8>> {
    let base: Vec<u8> = (0..8 * MIB).map(|at| (at / 512 % 251) as u8 | 1).collect();
    let disk: Vec<u8> = (0..8 * MIB).map(|at| (at / 512 % 241) as u8 | 1).collect();
    std::fs::write(dir.join("base.raw"), &base).unwrap();
    std::fs::write(dir.join("disk.raw"), &disk).unwrap();
    let _ = std::fs::remove_file(dir.join("disk.qcow2"));
    let like = ["convert", "-O", "qcow2", "-o", "cluster_size=4k", "-B", "base.raw", "-F", "raw"];
    let (code, said) = img(dir, &[&like[..], &["disk.raw", "disk.qcow2"]].concat())?;
    assert_eq!(code, Some(0), "{said}");
    Some(disk)
}

/// Whole, with leaks only if they may be; what it holds.
fn content(dir: &Path, leaks: bool) -> Vec<u8> {
    let (code, said) = img(dir, &["check", "disk.qcow2"]).unwrap();
    assert!(code == Some(0) || (leaks && code == Some(3)), "{code:?} {said}");
    let (code, said) = img(dir, &["convert", "-O", "raw", "disk.qcow2", "now.raw"]).unwrap();
    assert_eq!(code, Some(0), "{said}");
    std::fs::read(dir.join("now.raw")).unwrap()
}

fn resize(dir: &Path, words: &[&str]) -> (Option<i32>, String) {
    let mut command = ringway();
    command.arg("resize").args(words).current_dir(dir);
    let output = run(command);
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn c37_a_disk_becomes_smaller_only_if_that_is_meant() {
    let dir = folder();
    let dir = dir.path();
    let Some(mut model) = images(dir) else { return };
    let before = std::fs::read(dir.join("disk.qcow2")).unwrap();
    let (code, said) = resize(dir, &["disk.qcow2", "2M"]);
    assert!(code == Some(1) && said.contains("add --shrink"), "{said}");
    let (code, said) = resize(dir, &["disk.qcow2", "1000", "--shrink"]);
    assert!(code == Some(1) && said.contains("multiple of 512"), "{said}");
    // In use, also by who reads it.
    for more in [&[][..], &["--read-only"]] {
        let serve = ["disk.qcow2", "--format", "qcow2", "--socket", "s"];
        let daemon = Daemon::serve(dir, &[&serve[..], more].concat());
        let (code, said) = resize(dir, &["disk.qcow2", "2M", "--shrink"]);
        assert!(code == Some(1) && said.contains("in use by process"), "{said}");
        daemon.stop();
    }
    assert!(std::fs::read(dir.join("disk.qcow2")).unwrap() == before, "nothing was changed");

    let (code, said) = resize(dir, &["disk.qcow2", "2M", "--shrink"]);
    assert_eq!((code, &*said), (Some(0), "disk.qcow2: 2 MiB by now, it had 8 MiB\n"));
    model.truncate(2 * MIB);
    assert!(content(dir, false) == model);
    let blocks = std::os::unix::fs::MetadataExt::blocks;
    let taken = 512 * blocks(&dir.join("disk.qcow2").metadata().unwrap());
    assert!(taken < 4 * MIB as u64, "the host has the space: {taken} bytes are left");
    // Neither what was cut off nor the base is behind the end.
    let (code, said) = resize(dir, &["disk.qcow2", "4M", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    let told: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(told["from_bytes"].as_u64(), Some(2 * MIB as u64));
    assert_eq!(told["virtual_bytes"].as_u64(), Some(4 * MIB as u64));
    model.resize(4 * MIB, 0);
    assert!(content(dir, false) == model);
    let (code, said) = resize(dir, &["disk.qcow2", "4M"]);
    assert!(code == Some(0) && said.contains("has 4 MiB already"), "{said}");
}

/// The disk has the old size or the new one, and the same command gets it done.
#[test]
fn c37_killed_at_any_moment_the_image_is_whole() {
    let kills = std::env::var("RINGWAY_RESIZE_KILLS");
    let kills = kills.map_or(24, |count| count.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    let Some(model) = images(dir) else { return };
    let image = std::fs::read(dir.join("disk.qcow2")).unwrap();
    let mut rng = Rng::for_test("killed_while_it_shrinks");
    let (mut old, mut new) = (0, 0);
    for _ in 0..kills {
        std::fs::write(dir.join("disk.qcow2"), &image).unwrap();
        let mut command = ringway();
        command.args(["resize", "--shrink", "disk.qcow2", "1M"]).current_dir(dir);
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(rng.below(60_000)));
        child.kill().unwrap();
        wait(&mut child, PATIENCE).unwrap();
        let found = content(dir, true);
        assert!(found[..MIB] == model[..MIB], "what lies before the new end");
        match found.len() {
            len if len == model.len() => old += 1,
            len => {
                assert_eq!(len, MIB);
                new += 1;
            }
        }
        let (code, said) = resize(dir, &["--shrink", "disk.qcow2", "1M"]);
        assert_eq!(code, Some(0), "{said}");
        let mut command = ringway();
        command.args(["check", "--repair", "leaks", "disk.qcow2"]).current_dir(dir);
        assert_eq!(run(command).status.code(), Some(0));
        assert!(content(dir, false) == model[..MIB]);
    }
    println!("{old} kills left the old size, {new} the new one");
}
