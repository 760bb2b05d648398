//! Disks whose images are merged into what these are based on, while they are served: what they hold, what
//! a kill leaves, what is refused.
#![allow(missing_docs)]

use crate::common::guest::{
    BYTES, Known, bytes, content, disk_on_base, done, images, job, refused, same_between, says,
    wait_for, whole, within,
};
use crate::common::{Daemon, PATIENCE, ringway, run, text};
use ringway_driver::Options;
use ringway_testkit::{Mounted, Need, Rng, skip};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

const SERVE: [&str; 7] = ["disk.qcow2", "--format", "qcow2", "--socket", "s", "--control", "ctl"];

/// What was written goes into the base under load, again and again, and each time nothing but these two
/// is needed.
#[test]
fn c29_what_was_written_is_merged_while_a_guest_writes() {
    let direct = &["--cache", "none", "--engine", "threads"];
    let apart = &["--isolate"];
    for (more, raw) in
        [(&[][..], true), (&["--sandbox", "off"], false), (direct, false), (apart, false)]
    {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let content_then = disk_on_base(dir, 1, raw);
        let daemon = Daemon::serve(dir, &[&SERVE[..], more].concat());
        let known = Known::new();
        let merge = |name: &str| {
            let args = ["commit", "disk.qcow2", "--snapshot", name, "--bps", "64M", "--wait"];
            let job = &done(dir, &args)["job"];
            println!("{more:?}: {job}");
            assert_eq!((&job["job"], &job["state"]), (&"commit".into(), &"done".into()));
            assert_eq!((&job["done_bytes"], &job["total_bytes"]), (&BYTES.into(), &BYTES.into()));
            assert!(job["copied_bytes"].as_u64() > Some(0));
            // Nobody needs the snapshot any more, not even who had it open; others may read the base.
            let file = File::options().write(true).open(dir.join(name)).unwrap();
            flock(file, FlockOperation::NonBlockingLockExclusive).unwrap();
            std::fs::write(dir.join(name), "garbage").unwrap();
            std::fs::remove_file(dir.join(name)).unwrap();
            flock(File::open(dir.join("base")).unwrap(), FlockOperation::NonBlockingLockShared)
                .unwrap();
        };
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, 7));
            for name in ["one", "two"] {
                let then = known.done();
                wait_for("the guest goes on", || known.done() > then + 300);
                merge(name);
            }
            let then = known.done();
            wait_for("the guest goes on", || known.done() > then + 300);
            known.stop.store(true, SeqCst);
            load.join().unwrap();
        });
        // The rest as well: then the base holds the disk.
        merge("three");
        let end = Known::now(&known.acknowledged);
        daemon.stop();
        assert_eq!(images(dir), 2);
        assert_eq!(content(dir, "disk.qcow2"), end, "{more:?}");
        let found = bytes(dir, "disk.qcow2");
        same_between(found.clone(), content_then);
        whole(dir, "disk.qcow2");
        if raw {
            assert!(std::fs::read(dir.join("base")).unwrap() == found);
        } else {
            whole(dir, "base");
            assert!(bytes(dir, "base") == found);
        }
        Daemon::serve(dir, &SERVE).stop();
    }
}

/// Killed at any moment: the chain is whole, with the snapshot or without. Asked again, it goes on.
#[test]
fn c30_a_daemon_that_is_killed_while_it_merges_leaves_a_whole_chain() {
    let rounds: u64 = std::env::var("RINGWAY_COMMIT_KILLS").map_or(16, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    let mut rng = Rng::for_test("killed_while_it_merges");
    let (mut known, base, mut merged) = (Known::new(), disk_on_base(dir, 2, false), 0);
    for round in 0..rounds {
        let daemon = Daemon::serve(dir, &SERVE);
        let (begun, new, before) = (known.done(), format!("snap-{round}"), images(dir));
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, round));
            wait_for("the load runs", || known.done() > begun + 50);
            let mut command = ringway();
            command.args(["ctl", "--control", "ctl", "commit", "s", "--wait"]).current_dir(dir);
            command.args(if before == 2 { vec!["--snapshot", &new] } else { Vec::new() });
            let child = scope.spawn(|| run(command));
            std::thread::sleep(Duration::from_micros(rng.below(200_000)));
            daemon.kill();
            let _ = (load.join().unwrap(), child.join().unwrap());
        });
        // The next one puts into the image what that one had answered.
        Daemon::serve(dir, &SERVE).stop();
        let held = content(dir, "disk.qcow2");
        let (least, most) = (Known::now(&known.acknowledged), Known::now(&known.begun));
        within(&held, &least, &most, &format!("round {round}"));
        same_between(bytes(dir, "disk.qcow2"), base.clone());
        whole(dir, "disk.qcow2");
        whole(dir, "base");
        known.holds(&held);
        let now = images(dir);
        assert!(now == before || now + 1 == before || (now, before) == (3, 2), "{before}, {now}");
        merged += u32::from(now < before);
        if now == 2 {
            // Merged, or no more than a second name of the image.
            for round in 0..=round {
                let _ = std::fs::remove_file(dir.join(format!("snap-{round}")));
            }
        }
        known = Known::new();
        known.holds(&held);
    }
    println!("{merged} of {rounds} kills came when a snapshot was merged");
}

/// The process of a disk is killed while its files change: another one serves the chain, and what is asked
/// again is done. The daemon knows which file the image is by then.
#[test]
fn c32_a_disks_own_process_is_killed_while_its_files_change() {
    let rounds: u64 = std::env::var("RINGWAY_COMMIT_KILLS").map_or(9, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    let mut rng = Rng::for_test("its_own_process_is_killed");
    let (mut known, base) = (Known::new(), disk_on_base(dir, 6, false));
    let process = || done(dir, &["list"])["disks"][0]["process"].as_i64();
    for round in 0..rounds {
        let daemon = Daemon::serve(dir, &[&SERVE[..], &["--isolate"]].concat());
        let its = process().unwrap();
        let (begun, new) = (known.done(), format!("apart-{round}"));
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, round));
            wait_for("the load runs", || known.done() > begun + 50);
            let words = match round % 3 {
                0 => vec!["snapshot", "s", &new],
                1 => vec!["commit", "s", "--snapshot", &new, "--bps", "8M", "--wait"],
                _ => vec!["commit", "s", "--snapshot", &new, "--wait"],
            };
            let mut command = ringway();
            command.args(["ctl", "--control", "ctl"]).args(words).current_dir(dir);
            let child = scope.spawn(|| run(command));
            std::thread::sleep(Duration::from_micros(rng.below(150_000)));
            // SAFETY: a process of the daemon's, which was there a moment ago.
            assert_eq!(unsafe { libc::kill(its.try_into().unwrap(), libc::SIGKILL) }, 0);
            let _ = (load.join().unwrap(), child.join().unwrap());
        });
        wait_for("another process serves it", || process().is_some_and(|now| now != its));
        if images(dir) > 2 {
            done(dir, &["commit", "s", "--wait"]);
        }
        let path = dir.join("disk.qcow2").canonicalize().unwrap();
        done(dir, &["remove", path.to_str().unwrap()]);
        daemon.stop();
        assert_eq!(images(dir), 2);
        let _ = std::fs::remove_file(dir.join(new));
        let held = content(dir, "disk.qcow2");
        let (least, most) = (Known::now(&known.acknowledged), Known::now(&known.begun));
        within(&held, &least, &most, &format!("round {round}"));
        same_between(bytes(dir, "disk.qcow2"), base.clone());
        whole(dir, "disk.qcow2");
        whole(dir, "base");
        known = Known::new();
        known.holds(&held);
    }
}

/// Disks with processes of their own do not share what they are based on; its locks tell.
#[test]
fn c32_isolated_disks_do_not_write_a_base_that_they_share() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk_on_base(dir, 7, true);
    let args = ["create", "two.qcow2", "--backing", "base", "--backing-format", "raw"];
    assert!(says(dir, &args).status.success());
    let before = std::fs::read(dir.join("base")).unwrap();
    let daemon = Daemon::serve(dir, &[&SERVE[..], &["--isolate"]].concat());
    done(dir, &["add", "two.qcow2", "--format", "qcow2", "--socket", "t"]);
    refused(dir, &["commit", "s", "--snapshot", "new"], &["in use by somebody else"]);
    assert!(!dir.join("new").exists());
    done(dir, &["remove", "t"]);
    done(dir, &["commit", "s", "--snapshot", "new", "--wait"]);
    daemon.stop();
    assert!(std::fs::read(dir.join("base")).unwrap() == before);
    assert_eq!(images(dir), 2);
}

/// A limit holds, a cancelled one leaves the chain, and nobody else changes the files meanwhile. A base
/// that is smaller becomes as large.
#[test]
fn a_merge_can_be_limited_and_cancelled() {
    for raw in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let base = disk_on_base(dir, 4, raw);
        let daemon = Daemon::serve(dir, &SERVE);
        refused(dir, &["commit", "s", "--cancel"], &["nothing is under way"]);
        done(dir, &["resize", "s", "20M"]);
        let known = Known::new();
        known.write_each_place(dir, 7);
        let end = Known::now(&known.acknowledged);
        let begun = done(dir, &["commit", "s", "--snapshot", "new", "--bps", "2M"]);
        assert_eq!(
            (&begun["job"]["state"], &begun["job"]["bps"]),
            (&"running".into(), &(2 << 20).into())
        );
        wait_for("it has begun", || job(dir)["copied_bytes"].as_u64() > Some(0));
        for other in [&["commit", "s"][..], &["flatten", "s"], &["snapshot", "s", "newer"]] {
            refused(dir, other, &["being merged", "ctl commit --cancel"]);
        }
        refused(dir, &["flatten", "s", "--cancel"], &["commit is under way"]);
        // Nobody reads it while the job runs.
        let format = if raw { "raw" } else { "qcow2" };
        let reads = || {
            let mut command = Command::new("qemu-io");
            command.args(["-r", "-f", format, "-c", "read 0 512", "base"]).current_dir(dir);
            command.output().map(|output| output.status.success())
        };
        assert!(reads().is_ok_and(|succeeds| !succeeds) || reads().is_err());
        assert_eq!(done(dir, &["commit", "s", "--cancel"])["job"]["state"], "cancelled");
        assert!(reads().unwrap_or(true));
        assert_eq!(images(dir), 3);
        // Stopped with its daemon, too; then it is done.
        done(dir, &["commit", "s", "--bps", "1M"]);
        daemon.stop();
        let daemon = Daemon::serve(dir, &SERVE);
        done(dir, &["commit", "s", "--wait"]);
        daemon.stop();
        assert_eq!(images(dir), 2);
        std::fs::remove_file(dir.join("new")).unwrap();
        let mut found = bytes(dir, "disk.qcow2");
        assert_eq!(found.len(), 20 << 20);
        assert!(found.split_off(base.len()).iter().all(|byte| *byte == 0));
        assert_eq!(crate::common::guest::places(&found), end);
        same_between(found, base);
        whole(dir, "disk.qcow2");
        match raw {
            true => assert_eq!(dir.join("base").metadata().unwrap().len(), 20 << 20),
            false => whole(dir, "base"),
        }
    }
}

/// A base that somebody else reads stays as it is, and no snapshot is taken in vain.
#[test]
fn c31_a_base_that_others_use_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    disk_on_base(dir, 5, true);
    for name in ["two.qcow2", "clone.qcow2"] {
        let args = ["create", name, "--backing", "base", "--backing-format", "raw"];
        assert!(says(dir, &args).status.success());
    }
    let before = std::fs::read(dir.join("base")).unwrap();
    let daemon = Daemon::serve(dir, &SERVE);
    refused(dir, &["commit", "s"], &["--snapshot"]);
    // Another disk of this daemon, which shares all that it is based on.
    let add = ["add", "two.qcow2", "--format", "qcow2", "--socket", "t"];
    done(dir, &add);
    refused(dir, &["commit", "s", "--snapshot", "new"], &["other disks of this daemon", "flatten"]);
    // And one that has a snapshot.
    done(dir, &["snapshot", "t", "two-now"]);
    refused(dir, &["commit", "s", "--snapshot", "new"], &["other disks of this daemon"]);
    refused(dir, &["commit", "t"], &["other disks of this daemon"]);
    done(dir, &["remove", "t"]);
    // Another process.
    let other = File::open(dir.join("base")).unwrap();
    flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
    refused(dir, &["commit", "s", "--snapshot", "new"], &["in use by somebody else"]);
    drop(other);
    // A program of QEMU that reads a clone of it, and would let others write. It has it once it asks.
    let mut reader = Command::new("qemu-io");
    reader.args(["-r", "two.qcow2"]).current_dir(dir);
    reader.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    match reader.spawn() {
        Ok(mut reader) => {
            let mut prompt = [0; 7];
            let out = reader.stdout.as_mut().unwrap();
            std::io::Read::read_exact(out, &mut prompt).unwrap();
            refused(
                dir,
                &["commit", "s", "--snapshot", "new"],
                &["in use by somebody else", "QEMU"],
            );
            drop(reader.stdin.take());
            reader.wait().unwrap();
        }
        Err(_) => skip(Need::Qemu, "qemu-io".to_owned()),
    }
    // Its owner allows nobody to write it, not even root.
    let mode = |mode| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(dir.join("base"), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(0o444);
    refused(dir, &["commit", "s", "--snapshot", "new"], &["may not be written", "chmod u+w"]);
    mode(0o644);
    // What is served as a clone of it.
    let clone = ["add", "clone.qcow2", "--base", "base", "--base-format", "raw", "--socket", "c"];
    let daemon_of_clones = {
        daemon.stop();
        Daemon::serve(dir, &["null:1M", "--socket", "n", "--control", "ctl"])
    };
    done(dir, &clone);
    refused(dir, &["commit", "c", "--snapshot", "new"], &["as a clone of it", "without base"]);
    // Each time it stayed locked for reading: nobody else can write it.
    let base = File::options().write(true).open(dir.join("base")).unwrap();
    assert!(flock(base, FlockOperation::NonBlockingLockExclusive).is_err());
    daemon_of_clones.stop();
    assert!(!dir.join("new").exists());
    assert!(std::fs::read(dir.join("base")).unwrap() == before);
}

/// A snapshot is a base by its own name, whatever the image was called before.
#[test]
fn c29_snapshots_are_merged_into_snapshots_taken_since_the_daemon_began() {
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let base = disk_on_base(dir, 8, false);
        let daemon = Daemon::serve(dir, &[&SERVE[..], more].concat());
        done(dir, &["snapshot", "s", "one"]);
        done(dir, &["commit", "s", "--snapshot", "two", "--wait"]);
        assert_eq!(images(dir), 3, "{more:?}: one, and what it is based on");
        done(dir, &["snapshot", "s", "three"]);
        done(dir, &["snapshot", "s", "four"]);
        done(dir, &["commit", "s", "--wait"]);
        assert_eq!(images(dir), 4, "{more:?}: four went into three");
        daemon.stop();
        same_between(bytes(dir, "disk.qcow2"), base);
        whole(dir, "disk.qcow2");
        Daemon::serve(dir, &SERVE).stop();
    }
}

/// Whoever opens the image by its names would not find what went into a file that has none any more.
#[test]
fn c31_a_base_that_lost_its_name_is_not_merged_into() {
    const NOT_FOUND: &str = "another file has the name of what it would be merged into";
    for more in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let at = |name: &str| dir.join(name);
        let base = disk_on_base(dir, 5, false);
        let daemon = Daemon::serve(dir, &[&SERVE[..], more].concat());
        let replace = || {
            std::fs::rename(at("base"), at("moved")).unwrap();
            std::fs::copy(at("moved"), at("base")).unwrap();
        };
        let put_back = || std::fs::rename(at("moved"), at("base")).unwrap();
        replace();
        refused(dir, &["commit", "s", "--snapshot", "new"], &[NOT_FOUND, "Put the file back"]);
        std::fs::remove_file(at("base")).unwrap();
        refused(dir, &["commit", "s", "--snapshot", "new"], &[NOT_FOUND]);
        assert!(!at("new").exists(), "no snapshot is taken in vain");
        put_back();
        let known = Known::new();
        known.write_each_place(dir, 7);
        let end = Known::now(&known.acknowledged);
        done(dir, &["commit", "s", "--snapshot", "new", "--bps", "4M"]);
        wait_for("it has begun", || job(dir)["copied_bytes"].as_u64() > Some(0));
        replace();
        wait_for("it ends", || job(dir)["state"] != "running");
        let job = job(dir);
        assert_eq!(job["state"], "failed", "{job}");
        assert!(job["error"].as_str().unwrap().contains(NOT_FOUND), "{job}");
        // The image names the snapshot as before, and that has all.
        put_back();
        assert_eq!(images(dir), 3);
        done(dir, &["commit", "s", "--wait"]);
        daemon.stop();
        assert_eq!(images(dir), 2);
        let found = bytes(dir, "disk.qcow2");
        assert_eq!(crate::common::guest::places(&found), end);
        same_between(found, base);
        whole(dir, "disk.qcow2");
        whole(dir, "base");
    }
}

/// No room: it fails, the disk is served as before, and the next one gets it done.
#[test]
fn c31_without_room_it_fails_and_the_disk_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::in_memory(dir.path().join("small"), 12 << 20) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    let small = mounted.path();
    File::create_new(small.join("base")).unwrap().set_len(BYTES).unwrap();
    let args = ["create", "disk.qcow2", "--backing", "base", "--backing-format", "raw"];
    assert!(says(small, &args).status.success());
    let daemon = Daemon::serve(small, &SERVE);
    let mut device = Options::new().connect(small.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    for at in 0..32 {
        let mut buffer = device.pool().alloc(256 << 10).unwrap();
        buffer.fill(at + 1);
        queue.write(u64::from(at) * (256 << 10), buffer, ()).unwrap();
        assert!(queue.wait(Some(PATIENCE)).unwrap());
        assert!(queue.pop().unwrap().unwrap().is_ok());
    }
    let args = ["commit", "s", "--snapshot", "new", "--wait"];
    refused(small, &args, &["No space left", "make room", "without --snapshot"]);
    assert_eq!((&job(small)["state"], images(small)), (&"failed".into(), 3));
    assert_eq!(crate::common::read(&device, &mut queue, 512 * 31), vec![32; 512]);
    mounted.set_room(64 << 20);
    assert!(crate::common::write(&device, &mut queue, 512 * 31, 99));
    done(small, &["commit", "s", "--wait"]);
    drop((queue, device));
    daemon.stop();
    std::fs::remove_file(small.join("new")).unwrap();
    let found = bytes(small, "disk.qcow2");
    for (nth, sector) in found.chunks(512).enumerate() {
        let byte = match nth {
            15872 => 99,
            nth if nth < 16384 => u8::try_from(nth / 512 + 1).unwrap(),
            _ => 0,
        };
        assert!(sector.iter().all(|found| *found == byte), "sector {nth}");
    }
    whole(small, "disk.qcow2");
}

/// The file system of the image is full at the last step, so that requests are held: the job fails and says
/// what is so, no snapshot is taken of what was not opened anew, and with room the same command ends it.
#[test]
fn c35_a_last_step_that_fails_is_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::in_memory(dir.path().join("small"), 6 << 20) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    let small = mounted.path();
    File::create_new(dir.path().join("base")).unwrap().set_len(BYTES).unwrap();
    let args = ["create", "disk.qcow2", "--backing", "../base", "--backing-format", "raw"];
    assert!(says(small, &args).status.success());
    let more = ["--backing-root", dir.path().to_str().unwrap(), "--on-write-error", "hold"];
    let daemon = Daemon::serve(small, &[&SERVE[..], &more].concat());
    let mut device = Options::new().connect(small.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let write = |queue: &mut ringway_driver::BlkQueue<()>, nth: u64| {
        let mut buffer = device.pool().alloc(64 << 10).unwrap();
        buffer.fill(u8::try_from(nth + 1).unwrap());
        queue.write(nth * (64 << 10), buffer, ()).unwrap();
    };
    for nth in 0..32 {
        write(&mut queue, nth);
        assert!(crate::common::finish(&mut queue).0);
    }
    // So slow that it cannot be done before.
    done(small, &["commit", "s", "--snapshot", "new", "--bps", "1K"]);
    // More than there is room for.
    (32..128).for_each(|nth| write(&mut queue, nth));
    let facts = || done(small, &["list"])["disks"][0].clone();
    wait_for("requests are held", || {
        assert!(queue.wait(Some(Duration::from_millis(50))).is_ok());
        facts()["held"]["count"].as_u64() > Some(0)
    });
    done(small, &["commit", "s", "--cancel"]);
    let args = ["commit", "s", "--wait"];
    refused(small, &args, &["its header names what was merged into by now", "held"]);
    assert_eq!(job(small)["state"], "failed");
    refused(small, &["snapshot", "s", "newer"], &["last step of a merge", "ctl commit"]);
    refused(small, &["commit", "s", "--snapshot", "newer"], &["last step of a merge"]);
    assert!(!small.join("newer").exists());
    mounted.set_room(64 << 20);
    done(small, &["retry", "s"]);
    let mut left = 96;
    wait_for("what was held is written", || {
        assert!(queue.wait(Some(Duration::from_millis(50))).is_ok());
        while let Ok(Some(answer)) = queue.pop() {
            assert!(answer.is_ok());
            left -= 1;
        }
        left == 0
    });
    done(small, &["commit", "s", "--wait"]);
    std::fs::remove_file(small.join("new")).unwrap();
    done(small, &["snapshot", "s", "newer"]);
    drop((queue, device));
    daemon.stop();
    whole(small, "disk.qcow2");
    let root = dir.path().to_str().unwrap();
    let args = ["--from-format", "qcow2", "--backing-root", root, "disk.qcow2", "out.raw"];
    let copied = crate::common::copy(small, &args);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let found = std::fs::read(small.join("out.raw")).unwrap();
    for (nth, piece) in found.chunks(64 << 10).enumerate() {
        let byte = if nth < 128 { u8::try_from(nth + 1).unwrap() } else { 0 };
        assert!(piece.iter().all(|found| *found == byte), "piece {nth}");
    }
}

#[test]
fn what_cannot_be_merged_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("base.raw"), vec![0; 2 << 20]).unwrap();
    std::fs::write(dir.join("raw"), vec![0; 1 << 20]).unwrap();
    assert!(says(dir, &["create", "ro.qcow2", "--backing", "base.raw"]).status.success());
    let create = |name: &str, more: &[&str]| {
        assert!(says(dir, &[&["create", name], more].concat()).status.success());
    };
    create("alone.qcow2", &["--size", "1M"]);
    create("coarse.qcow2", &["--size", "1M", "--cluster-size", "128K"]);
    create("fine.qcow2", &["--backing", "coarse.qcow2"]);
    create("apart.qcow2", &["--size", "1M"]);
    let conf = "control = 'ctl'\n\
        [[disk]]\nimage = 'alone.qcow2'\nformat = 'qcow2'\nsocket = 'a'\n\
        [[disk]]\nimage = 'raw'\nsocket = 'r'\n\
        [[disk]]\nimage = 'fine.qcow2'\nformat = 'qcow2'\nsocket = 'f'\n\
        [[disk]]\nimage = 'ro.qcow2'\nformat = 'qcow2'\nread-only = true\nsocket = 'o'\n\
        [[disk]]\nimage = 'apart.qcow2'\nformat = 'qcow2'\nisolate = true\nsocket = 'i'\n\
        [[disk]]\nimage = 'clone.qcow2'\nbase = 'base.raw'\nephemeral = true\nsocket = 'e'\n\
        [[disk]]\nimage = 'null:1M'\nsocket = 'n'\n";
    std::fs::write(dir.join("conf"), conf).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    refused(dir, &["commit", "a", "--snapshot", "new"], &["based on nothing"]);
    refused(dir, &["commit", "r"], &["raw"]);
    refused(dir, &["commit", "f", "--snapshot", "new"], &["clusters of 131072 bytes"]);
    refused(dir, &["commit", "o"], &["read-only"]);
    refused(dir, &["commit", "i"], &["based on nothing"]);
    refused(dir, &["commit", "e"], &["ephemeral"]);
    refused(dir, &["commit", "n"], &["no file"]);
    refused(dir, &["commit", "gone"], &["no disk"]);
    refused(dir, &["commit", "a", "--bps", "0"], &["never be done"]);
    assert!(!dir.join("new").exists());
    daemon.stop();
}
