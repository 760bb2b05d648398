//! Images that are merged while nobody serves them, `ringway commit` and `ringway flatten`: what they hold,
//! what a kill or a signal leaves, what is refused.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use crate::common::guest::{
    Known, bytes, ctl, disk_on_base, images, same_between, says, wait_for, whole,
};
use crate::common::{Daemon, kill_all, ringway, text, wait};
use ringway_testkit::{Need, Rng, Thin, skip};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const SERVE: [&str; 7] = ["disk.qcow2", "--format", "qcow2", "--socket", "s", "--control", "ctl"];

/// A disk as `disk.qcow2`, on top of `base`, with each place written by a guest; all it holds.
fn disk(dir: &Path, seed: u64, raw: bool) -> Vec<u8> {
    let below = disk_on_base(dir, seed, raw);
    let daemon = Daemon::serve(dir, &SERVE);
    let known = Known::new();
    known.write_each_place(dir, 7);
    daemon.stop();
    let held = bytes(dir, "disk.qcow2");
    same_between(held.clone(), below);
    held
}

#[track_caller]
fn done(dir: &Path, args: &[&str]) -> Value {
    let output = says(dir, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn refused(dir: &Path, args: &[&str], words: &[&str]) {
    let output = says(dir, args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
}

/// What an image holds without those above it.
fn held(dir: &Path, image: &str, raw: bool) -> Vec<u8> {
    match raw {
        true => std::fs::read(dir.join(image)).unwrap(),
        false => bytes(dir, image),
    }
}

#[test]
fn c34_an_image_goes_into_its_base_and_a_base_into_its_image() {
    for raw in [true, false] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let content = disk(dir, 1, raw);
        let said = done(dir, &["commit", "--json", "--bps", "1G", "disk.qcow2"]);
        assert_eq!(said["image"], "disk.qcow2");
        assert!(said["base"].as_str().unwrap().ends_with("/base"), "{said}");
        assert_eq!(said["virtual_bytes"], content.len());
        assert!(said["copied_bytes"].as_u64() > Some(0), "{said}");
        assert!(held(dir, "base", raw) == content);
        // It holds what it did, and nothing is left behind in either.
        assert!(bytes(dir, "disk.qcow2") == content);
        for name in ["disk.qcow2", "base"] {
            if name == "disk.qcow2" || !raw {
                assert_eq!(says(dir, &["check", name]).status.code(), Some(0), "{name}");
                whole(dir, name);
            }
        }
        // The other way: a new one takes in all of it.
        let format = if raw { "raw" } else { "qcow2" };
        let args = ["create", "new.qcow2", "--backing", "base", "--backing-format", format];
        assert!(says(dir, &args).status.success());
        let said = done(dir, &["flatten", "--json", "new.qcow2"]);
        assert_eq!(
            (&said["image"], &said["virtual_bytes"]),
            (&"new.qcow2".into(), &content.len().into())
        );
        std::fs::write(dir.join("base"), "garbage").unwrap();
        std::fs::remove_file(dir.join("base")).unwrap();
        assert!(bytes(dir, "new.qcow2") == content);
        assert_eq!(says(dir, &["check", "new.qcow2"]).status.code(), Some(0));
        whole(dir, "new.qcow2");
        refused(dir, &["flatten", "new.qcow2"], &["based on nothing"]);
        refused(dir, &["commit", "new.qcow2"], &["based on nothing"]);
    }
}

/// `disk.qcow2` on a base whose data are in `base.data`, which holds the first of these; the second is what
/// the disk holds.
fn on_data_file(dir: &Path, options: &str) -> Option<[Vec<u8>; 2]> {
    let content = |factor: usize, zero: usize| -> Vec<u8> {
        let byte = |at: usize| if at >> 16 & 7 == zero { 0 } else { (at / 512 * factor) as u8 | 1 };
        (0..8 << 20).map(byte).collect()
    };
    let all = [content(3, 2), content(5, 5)];
    for (bytes, name) in all.iter().zip(["base.raw", "disk.raw"]) {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    let options = format!("data_file=base.data,{options}");
    let onto = ["convert", "-O", "qcow2", "-B", "base", "-F", "qcow2", "disk.raw", "disk.qcow2"];
    for args in [
        &["create", "-f", "qcow2", "-o", &options, "base", "8M"][..],
        &["convert", "-n", "-O", "qcow2", "base.raw", "base"],
        &onto,
    ] {
        let Ok(output) = Command::new("qemu-img").args(args).current_dir(dir).output() else {
            skip(Need::Qemu, "qemu-img".to_owned());
            return None;
        };
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }
    Some(all)
}

/// The data file is written, and nobody else may use it; killed, the two together hold what they did.
#[test]
fn c34_a_base_with_a_data_file_takes_an_image_in() {
    let mut rng = Rng::for_test("a_base_with_a_data_file");
    for options in ["data_file_raw=on", "data_file_raw=off", "cluster_size=4k"] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let Some([base, disk]) = on_data_file(dir, options) else { return };
        for more in [&[][..], &["--read-only"]] {
            let serve = ["base.data", "--format", "raw", "--socket", "s"];
            let daemon = Daemon::serve(dir, &[&serve[..], more].concat());
            refused(dir, &["commit", "disk.qcow2"], &["data file", "use"]);
            daemon.stop();
        }
        assert!(bytes(dir, "base") == base, "nothing was changed");
        for _ in 0..4 {
            let mut child = start(dir, "commit");
            std::thread::sleep(Duration::from_millis(rng.below(300)));
            child.kill().unwrap();
            wait(&mut child, crate::common::PATIENCE).unwrap();
            assert!(bytes(dir, "disk.qcow2") == disk, "{options}: killed");
        }
        done(dir, &["commit", "--json", "disk.qcow2"]);
        assert!(bytes(dir, "disk.qcow2") == disk && bytes(dir, "base") == disk, "{options}");
        if options == "data_file_raw=on" {
            assert!(std::fs::read(dir.join("base.data")).unwrap() == disk, "it stays a raw image");
        }
        let checked = says(dir, &["check", "--repair", "leaks", "base"]).status.code();
        assert_eq!(checked, Some(0), "{options}");
        whole(dir, "base");
    }
}

/// Starts a command that takes a while.
fn start(dir: &Path, command: &str) -> Child {
    let mut slow = ringway();
    slow.args([command, "--bps", "16M", "disk.qcow2"]).current_dir(dir);
    slow.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Killed or interrupted at any moment: the disk holds what it did, and the same command gets it done.
#[test]
fn c34_killed_at_any_moment_the_disk_holds_what_it_did() {
    let rounds: u64 = std::env::var("RINGWAY_MERGE_KILLS").map_or(6, |n| n.parse().unwrap());
    let mut rng = Rng::for_test("merged_offline_and_killed");
    for (command, raw) in [("commit", true), ("commit", false), ("flatten", false)] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let content = disk(dir, 2, raw);
        for round in 0..rounds {
            let mut child = start(dir, command);
            std::thread::sleep(Duration::from_millis(rng.below(300)));
            let signal = if rng.below(3) == 0 { libc::SIGTERM } else { libc::SIGKILL };
            // SAFETY: our child, which nobody has waited for.
            unsafe { libc::kill(child.id().try_into().unwrap(), signal) };
            let status = wait(&mut child, crate::common::PATIENCE).expect("it ends");
            println!("{command}, raw {raw}, round {round}: {status}");
            assert!(bytes(dir, "disk.qcow2") == content);
            whole(dir, "disk.qcow2");
            if !raw {
                whole(dir, "base");
            }
            if images(dir) == 1 {
                break;
            }
        }
        if images(dir) == 2 {
            done(dir, &[command, "--json", "disk.qcow2"]);
        }
        assert!(bytes(dir, "disk.qcow2") == content);
        match command {
            "commit" => assert!(held(dir, "base", raw) == content),
            _ => assert_eq!(images(dir), 1),
        }
        // What kills have leaked can be given back.
        for name in ["disk.qcow2", "base"] {
            if name == "disk.qcow2" || !raw {
                assert_eq!(says(dir, &["check", "--repair", "leaks", name]).status.code(), Some(0));
            }
        }
    }
}

/// A signal is heard between two portions: nothing leaks, and the status names it.
#[test]
fn c34_a_signal_ends_it_in_order() {
    for command in ["commit", "flatten"] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let content = disk(dir, 3, false);
        let mut slow = ringway();
        // So slow that it cannot be done before.
        slow.args([command, "--bps", "1K", "disk.qcow2"]).current_dir(dir);
        let mut child = slow.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let its = child.id();
        wait_for("it listens to signals, and has the image", || {
            let status = std::fs::read_to_string(format!("/proc/{its}/status")).unwrap();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
            // A lock to try would be in its way.
            let files = std::fs::read_dir(format!("/proc/{its}/fd")).unwrap().flatten();
            let mut files = files.filter_map(|fd| std::fs::read_link(fd.path()).ok());
            let has_it = files.any(|file| file.ends_with("disk.qcow2"));
            caught & (1 << (libc::SIGTERM - 1)) != 0 && has_it
        });
        // SAFETY: our child, which nobody has waited for.
        assert_eq!(unsafe { libc::kill(its.try_into().unwrap(), libc::SIGTERM) }, 0);
        let status = wait(&mut child, crate::common::PATIENCE).expect("it ends");
        assert_eq!(status.code(), Some(128 + libc::SIGTERM));
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
        assert!(said.contains("interrupted"), "{said}");
        assert!(bytes(dir, "disk.qcow2") == content);
        for name in ["disk.qcow2", "base"] {
            assert_eq!(says(dir, &["check", name]).status.code(), Some(0), "{command}: {name}");
        }
    }
}

/// What somebody uses, or may not be written, stays as it is.
#[test]
fn c34_what_is_in_use_is_not_merged() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let content = disk(dir, 4, true);
    let before = std::fs::read(dir.join("base")).unwrap();
    let daemon = Daemon::serve(dir, &SERVE);
    for command in ["commit", "flatten"] {
        refused(dir, &[command, "disk.qcow2"], &["in use by", "ringway ctl"]);
    }
    daemon.stop();
    // Another clone is served: the base has a reader.
    let args = ["create", "two.qcow2", "--backing", "base", "--backing-format", "raw"];
    assert!(says(dir, &args).status.success());
    let two = [&["two.qcow2"], &SERVE[1..]].concat();
    let daemon = Daemon::serve(dir, &two);
    refused(dir, &["commit", "disk.qcow2"], &["in use by somebody else"]);
    daemon.stop();
    let mode = |mode| std::fs::set_permissions(dir.join("base"), PermissionsExt::from_mode(mode));
    mode(0o444).unwrap();
    refused(dir, &["commit", "disk.qcow2"], &["may not be written", "chmod u+w"]);
    mode(0o644).unwrap();
    refused(dir, &["commit", "--bps", "0", "disk.qcow2"], &["never be done"]);
    refused(dir, &["commit", "base"], &["base"]);
    refused(dir, &["flatten", "gone"], &["gone: there is no such file. Check the path"]);
    assert!(std::fs::read(dir.join("base")).unwrap() == before);
    // A longer one would show what lies behind.
    File::options().write(true).open(dir.join("base")).unwrap().set_len(20 << 20).unwrap();
    refused(dir, &["commit", "disk.qcow2"], &["20971520 bytes"]);
    // It is only read by the other way.
    mode(0o444).unwrap();
    done(dir, &["flatten", "--json", "disk.qcow2"]);
    assert_eq!(images(dir), 1);
    assert!(bytes(dir, "disk.qcow2") == content);
}

/// A base whose table leads one of its clusters to its own L1 table: what is merged does not go there.
#[test]
fn b32_a_merge_does_not_write_to_the_tables_of_its_base() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let run = |args: &[&str]| {
        let output = says(dir, args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    };
    run(&["create", "base.qcow2", "--size", "8M"]);
    run(&["io", "--format", "qcow2", "base.qcow2", "-c", "write -P 1 0 64K"]);
    run(&["create", "top.qcow2", "--backing", "base.qcow2"]);
    run(&["io", "--format", "qcow2", "top.qcow2", "-c", "write -P 2 64K 64K"]);
    let base = File::options().read(true).write(true).open(dir.join("base.qcow2")).unwrap();
    let word = |at| {
        let mut bytes = [0; 8];
        base.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let l1 = word(40);
    let l2 = word(l1) & 0x00ff_ffff_ffff_fe00;
    base.write_all_at(&(1 << 63 | l1).to_be_bytes(), l2 + 8).unwrap();
    let before = word(l1);
    refused(dir, &["commit", "top.qcow2"], &["base.qcow2: cannot go on"]);
    assert_eq!(word(l1), before);
}

/// KiB that a pool has left: for none of what an act writes, or for all but the last of it.
const ROOMS: [u64; 6] = [0, 4, 8, 48, 80, 208];

/// The host's cache holds what it could not store, as if it were. A command that fails for that and is said again goes
/// by what is stored.
#[test]
fn c103_a_command_that_is_said_again_goes_by_what_is_stored() {
    const OWN: [&str; 4] = ["io", "--format", "qcow2", "own.qcow2"];
    // A page: of more, those that there is room for are enough for the loop device.
    let write = [&OWN[..], &["-c", "write -P 0x33 128M 4K", "-c", "flush"]].concat();
    for (act, image, pattern, bytes) in [
        (&["flatten", "top.qcow2"][..], "top.qcow2", "0x22", "64K"),
        // What the base has there is not part of it.
        (&["resize", "small.qcow2", "256M"], "small.qcow2", "0", "64K"),
        // Nothing is kept for whoever opens it next.
        (&write, "own.qcow2", "0x33", "4K"),
    ] {
        let mut failed = 0;
        for room in ROOMS {
            let dir = tempfile::tempdir_in(".").unwrap();
            let mut thin = match Thin::new(dir.path()) {
                Ok(thin) => thin,
                Err(lack) => return lack.skip(),
            };
            let at = |path: &Path, args: &[&str]| says(path, args).status.code();
            let filled = "write -P 0x22 128M 64K";
            for args in [
                &["create", "base.qcow2", "--size", "256M"][..],
                &["io", "--format", "qcow2", "base.qcow2", "-c", filled, "-c", "flush"],
                &["create", "top.qcow2", "--backing", "base.qcow2"],
                &["create", "small.qcow2", "--backing", "base.qcow2", "--size", "64M"],
                &["create", "own.qcow2", "--size", "256M"],
            ] {
                assert_eq!(at(thin.path(), args), Some(0), "{args:?}");
            }
            thin.fill(room << 10);
            let first = at(thin.path(), act);
            thin.extend();
            if first == Some(0) {
                continue;
            }
            // The host may have tried to store more of it meanwhile, of which whoever opens it next is told.
            let done = (0..4).any(|_| at(thin.path(), act) == Some(0));
            assert!(done, "{act:?}, {room} KiB");
            if let Err(lack) = thin.forget() {
                return lack.skip();
            }
            if std::fs::read(thin.path().join(image)).is_err() {
                // What the file system itself could not store.
                continue;
            }
            failed += 1;
            let verify = format!("verify -P {pattern} 128M {bytes}");
            let verify = ["io", "--read-only", "--format", "qcow2", image, "-c", &verify];
            let found = says(thin.path(), &verify);
            assert!(found.status.success(), "{act:?}, {room} KiB: {}", text(&found.stderr));
        }
        assert!(failed > 0, "{act:?}: the pool was never full");
    }
}

/// A daemon's job has failed in a sync, and all who could have told are killed: whoever serves the image next goes by what
/// is stored, too.
#[test]
fn c115_what_a_killed_daemon_has_lost_is_not_believed() {
    let mut failed = 0;
    for room in ROOMS {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let mut thin = match Thin::new(dir) {
            Ok(thin) => thin,
            Err(lack) => return lack.skip(),
        };
        for args in [
            &["create", "base.qcow2", "--size", "256M"][..],
            &[
                "io",
                "--format",
                "qcow2",
                "base.qcow2",
                "-c",
                "write -P 0x22 128M 64K",
                "-c",
                "flush",
            ],
            &["create", "top.qcow2", "--backing", "base.qcow2"],
            &["io", "--format", "qcow2", "top.qcow2", "-c", "write -P 0x11 0 64K", "-c", "flush"],
        ] {
            assert_eq!(says(thin.path(), args).status.code(), Some(0), "{args:?}");
        }
        let mut serve = SERVE.to_vec();
        (serve[0], serve[4]) = ("pool/fs/top.qcow2", "s");
        serve.extend(["--state-dir", "state"]);
        let daemon = Daemon::serve(dir, &serve);
        thin.fill(room << 10);
        let flatten = || ctl(dir, &["flatten", "s", "--wait"]).status.success();
        let first = flatten();
        if first {
            daemon.stop();
            continue;
        }
        kill_all(daemon);
        thin.extend();
        let daemon = Daemon::serve(dir, &serve);
        // A sync had failed, and no guest has begun afresh: what is done may not be said to be durable.
        let log = if flatten() { String::new() } else { daemon.log() };
        assert!(log.is_empty() || log.contains("an earlier flush failed"), "{room} KiB: {log}");
        daemon.stop();
        if let Err(lack) = thin.forget() {
            return lack.skip();
        }
        if std::fs::read(thin.path().join("top.qcow2")).is_err() {
            continue;
        }
        failed += 1;
        let verify = ["-c", "verify -P 0x11 0 64K", "-c", "verify -P 0x22 128M 64K"];
        let verify =
            [&["io", "--read-only", "--format", "qcow2", "top.qcow2"][..], &verify].concat();
        let found = says(thin.path(), &verify);
        assert!(found.status.success(), "{room} KiB: {}", text(&found.stderr));
    }
    assert!(failed > 0, "the pool was never full");
}
