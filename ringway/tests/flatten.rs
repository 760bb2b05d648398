//! Disks that are flattened while they are served: what they hold, what a kill leaves, what is refused.
#![allow(missing_docs)]

use crate::common::guest::{
    BYTES, Known, base, bytes, content, done, images, job, refused, same_between, says, wait_for,
    whole, within,
};
use crate::common::{Daemon, ringway, run, text};
use ringway_driver::Options;
use ringway_testkit::{Mounted, Rng};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

const SERVE: [&str; 7] = ["disk.qcow2", "--format", "qcow2", "--socket", "s", "--control", "ctl"];

/// Such a disk as `disk.qcow2`, on top of `middle.qcow2` and `base.raw`.
fn chain(dir: &Path, seed: u64) -> Vec<u8> {
    for name in ["disk.qcow2", "middle.qcow2", "base.raw"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    let base = base(seed);
    std::fs::write(dir.join("base.raw"), &base).unwrap();
    for [name, backing] in [["middle.qcow2", "base.raw"], ["disk.qcow2", "middle.qcow2"]] {
        let made = says(dir, &["create", name, "--backing", backing]);
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    base
}

/// A disk is flattened under load: it holds what was written, and what it was based on is free.
#[test]
fn c27_a_disk_is_flattened_while_its_guest_writes() {
    let direct = &["--cache", "none", "--engine", "threads"];
    for more in [&[][..], &["--sandbox", "off"], direct, &["--isolate"]] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        let base = chain(dir, 1);
        let daemon = Daemon::serve(dir, &[&SERVE[..], more].concat());
        let known = Known::new();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, 7));
            wait_for("the load runs", || known.done() > 300);
            let answer = done(dir, &["flatten", "disk.qcow2", "--bps", "32M", "--wait"]);
            let job = &answer["job"];
            println!("{more:?}: {job}");
            assert_eq!((&job["job"], &job["state"]), (&"flatten".into(), &"done".into()));
            assert_eq!((&job["done_bytes"], &job["total_bytes"]), (&BYTES.into(), &BYTES.into()));
            let copied = job["copied_bytes"].as_u64().unwrap();
            assert!(copied > 0 && copied < BYTES, "{copied}: zeroes and what was there are not");
            // Nobody needs these any more, not even who has them open.
            for name in ["middle.qcow2", "base.raw"] {
                let file = File::options().write(true).open(dir.join(name)).unwrap();
                flock(file, FlockOperation::NonBlockingLockExclusive).unwrap();
                std::fs::write(dir.join(name), "garbage").unwrap();
                std::fs::remove_file(dir.join(name)).unwrap();
            }
            let then = known.done();
            wait_for("the guest goes on", || known.done() > then + 500);
            known.stop.store(true, SeqCst);
            load.join().unwrap();
        });
        refused(dir, &["flatten", "s"], &["based on nothing"]);
        let end = Known::now(&known.acknowledged);
        daemon.stop();
        assert_eq!(images(dir), 1);
        assert_eq!(content(dir, "disk.qcow2"), end, "{more:?}");
        same_between(bytes(dir, "disk.qcow2"), base);
        whole(dir, "disk.qcow2");
        Daemon::serve(dir, &SERVE).stop();
    }
}

/// A table of counts that is full moves to the end of the file, and what was its place holds data later. A disk that
/// was opened before that is opened anew by a merge, as its header is by then.
#[test]
fn c27_an_image_whose_table_of_counts_has_moved_is_merged() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let dir = folder.path();
    for (merge, more) in [("flatten", &[][..]), ("flatten", &["--isolate"]), ("commit", &[])] {
        for name in ["base.raw", "disk.qcow2", "old.qcow2"] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        File::create(dir.join("base.raw")).unwrap().set_len(24 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(
            &File::options().write(true).open(dir.join("base.raw")).unwrap(),
            &[0xba; 4096],
            0,
        )
        .unwrap();
        let made = ["create", "disk.qcow2", "--backing", "base.raw", "--cluster-size", "512"];
        assert!(says(dir, &made).status.success());
        let table = || -> u64 {
            let mut word = [0; 8];
            let image = File::open(dir.join("disk.qcow2")).unwrap();
            std::os::unix::fs::FileExt::read_exact_at(&image, &mut word, 48).unwrap();
            u64::from_be_bytes(word)
        };
        let before = table();
        let daemon = Daemon::serve(dir, &[&SERVE[..], more].concat());
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        let mut put = |at: u64, byte: u8| {
            let mut buffer = device.pool().alloc(64 << 10).unwrap();
            buffer.fill(byte);
            queue.write(at << 16, buffer, ()).unwrap();
            assert!(crate::common::finish(&mut queue).0, "{more:?} {at}: {}", daemon.log());
        };
        if merge == "commit" {
            done(dir, &["snapshot", "disk.qcow2", "old.qcow2"]);
        }
        (1..260).for_each(|at| put(at, 1));
        assert_ne!(table(), before, "it has not moved: this tests nothing");
        done(dir, &[merge, "disk.qcow2", "--wait"]);
        (260..384).for_each(|at| put(at, 2));
        (200..270).for_each(|at| put(at, 3));
        drop((queue, device));
        daemon.stop();
        let found = bytes(dir, "disk.qcow2");
        for (at, piece) in found.chunks(64 << 10).enumerate().skip(1) {
            let byte = if at < 200 { 1 } else { 2 + u8::from(at < 270) };
            assert!(piece.iter().all(|found| *found == byte), "{merge} {more:?}: {at}");
        }
        whole(dir, "disk.qcow2");
    }
}

/// Killed at any moment: an overlay with more clusters, or one file. Asked again, it goes on there.
#[test]
fn c27_a_daemon_that_is_killed_while_it_flattens_leaves_a_whole_image() {
    let rounds: u64 = std::env::var("RINGWAY_FLATTEN_KILLS").map_or(24, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    let mut rng = Rng::for_test("killed_while_it_flattens");
    let (mut known, mut base, mut alone) = (Known::new(), chain(dir, 2), 0);
    for round in 0..rounds {
        let daemon = Daemon::serve(dir, &SERVE);
        let begun = known.done();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, round));
            wait_for("the load runs", || known.done() > begun + 5);
            let mut command = ringway();
            command.args(["ctl", "--control", "ctl", "flatten", "s", "--wait"]).current_dir(dir);
            let child = scope.spawn(|| run(command));
            std::thread::sleep(Duration::from_micros(rng.below(120_000)));
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
        known.holds(&held);
        if images(dir) == 1 {
            alone += 1;
            base = chain(dir, round);
            known = Known::new();
        }
    }
    println!("{alone} of {rounds} kills came when it was one file");
}

/// No room: it fails, what was copied stays, the guest goes on, and the next one gets it done.
#[test]
fn c28_without_room_it_fails_and_the_disk_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::in_memory(dir.path().join("small"), 24 << 20) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    let small = mounted.path();
    let base = chain(small, 3);
    let daemon = Daemon::serve(small, &SERVE);
    refused(
        small,
        &["flatten", "s", "--wait"],
        &["No space left", "make room", "what was copied stays"],
    );
    let job = job(small);
    assert_eq!(job["state"], "failed");
    assert!(job["copied_bytes"].as_u64().unwrap() > 1 << 20, "{job}");
    assert_eq!(images(small), 3);
    // What is there can be written, and read: the first cluster that was copied.
    let cluster = base.chunks(64 << 10).position(|cluster| cluster.iter().any(|byte| *byte != 0));
    let at = (cluster.unwrap() << 16) + 4096;
    let sector = at as u64 / 512;
    let mut device = Options::new().connect(small.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(crate::common::write(&device, &mut queue, sector, 9));
    assert_eq!(crate::common::read(&device, &mut queue, sector), vec![9; 512]);
    mounted.set_room(64 << 20);
    done(small, &["flatten", "s", "--wait"]);
    drop((queue, device));
    daemon.stop();
    assert_eq!(images(small), 1);
    let mut found = bytes(small, "disk.qcow2");
    assert_eq!(found[at..at + 512], [9; 512]);
    found[at..at + 512].copy_from_slice(&base[at..at + 512]);
    assert!(found == base, "the disk holds what it did");
    whole(small, "disk.qcow2");
}

/// A limit holds, a cancelled one leaves an overlay, and nobody else changes the files meanwhile.
#[test]
fn a_job_can_be_limited_and_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = chain(dir, 4);
    let daemon = Daemon::serve(dir, &SERVE);
    refused(dir, &["flatten", "s", "--cancel"], &["nothing is under way"]);
    let begun = Instant::now();
    let answer = done(dir, &["flatten", "s", "--bps", "4M"]);
    assert_eq!(
        (&answer["job"]["state"], &answer["job"]["bps"]),
        (&"running".into(), &(4 << 20).into())
    );
    wait_for("it has begun", || job(dir)["copied_bytes"].as_u64() > Some(0));
    refused(dir, &["flatten", "s"], &["being merged", "--cancel"]);
    refused(dir, &["snapshot", "s", "new"], &["being merged", "--cancel"]);
    // A disk may grow meanwhile.
    done(dir, &["resize", "s", "20M"]);
    wait_for("a part is copied", || job(dir)["done_bytes"].as_u64() > Some(4 << 20));
    assert!(begun.elapsed() > Duration::from_millis(500), "no faster than it was told");
    assert_eq!(job(dir)["total_bytes"], 20 << 20);
    let answer = done(dir, &["flatten", "s", "--cancel"]);
    assert_eq!(answer["job"]["state"], "cancelled");
    assert_eq!(images(dir), 3);
    // Stopped, removed: an overlay; then it goes on, and what was added is zeroes.
    done(dir, &["flatten", "s", "--bps", "1M"]);
    daemon.stop();
    let daemon = Daemon::serve(dir, &SERVE);
    done(dir, &["add", "disk2.qcow2", "--base", "middle.qcow2", "--socket", "s2"]);
    done(dir, &["flatten", "s2", "--bps", "1M"]);
    done(dir, &["remove", "s2"]);
    let before = done(dir, &["flatten", "s", "--wait"])["job"]["copied_bytes"].as_u64().unwrap();
    assert!(before < 13 << 20, "{before}: what was copied was there");
    daemon.stop();
    assert_eq!(images(dir), 1);
    let found = bytes(dir, "disk.qcow2");
    assert!(found[..base.len()] == base && found[base.len()..].iter().all(|byte| *byte == 0));
    assert_eq!(found.len(), 20 << 20);
    whole(dir, "disk.qcow2");
    whole(dir, "disk2.qcow2");
}

/// What a job that was stopped has copied, the next one passes over.
#[test]
fn c27_a_second_job_copies_what_the_first_one_has_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = chain(dir, 8);
    let daemon = Daemon::serve(dir, &SERVE);
    done(dir, &["flatten", "s", "--bps", "4M"]);
    wait_for("a part is copied", || job(dir)["copied_bytes"].as_u64() > Some(1 << 20));
    let copied = |answer: Value| answer["job"]["copied_bytes"].as_u64().unwrap();
    let first = copied(done(dir, &["flatten", "s", "--cancel"]));
    let second = copied(done(dir, &["flatten", "s", "--wait"]));
    let held = base.chunks(64 << 10).filter(|cluster| cluster.iter().any(|byte| *byte != 0));
    assert!(first > 0 && second > 0, "{first} {second}");
    assert_eq!(first + second, held.count() as u64 * (64 << 10));
    daemon.stop();
    assert!(bytes(dir, "disk.qcow2") == base);
}

/// Clones of one base in one daemon: the others keep it, and its lock.
#[test]
fn clones_keep_a_base_that_one_of_them_has_left() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = chain(dir, 5);
    let conf = "control = 'ctl'\n\
        [[disk]]\nimage = 'one.qcow2'\nbase = 'base.raw'\nsocket = 's'\n\
        [[disk]]\nimage = 'two.qcow2'\nbase = 'base.raw'\nsocket = 't'\n";
    std::fs::write(dir.join("conf"), conf).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    done(dir, &["flatten", "s", "--wait"]);
    let file = || File::options().write(true).open(dir.join("base.raw")).unwrap();
    assert!(
        flock(file(), FlockOperation::NonBlockingLockExclusive).is_err(),
        "the other one is based on it"
    );
    let facts = done(dir, &["list"]);
    assert_eq!(facts["disks"][1]["qcow2"]["base_disks"], 1);
    let mut device = Options::new().connect(dir.join("t")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert_eq!(crate::common::read(&device, &mut queue, 1), base[512..1024]);
    drop((queue, device));
    daemon.stop();
    // The same words serve both.
    Daemon::serve(dir, &["--config", "conf"]).stop();
    assert!(bytes(dir, "one.qcow2") == base);
    whole(dir, "one.qcow2");
}

#[test]
fn what_cannot_be_flattened_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    chain(dir, 6);
    std::fs::write(dir.join("raw"), vec![0; 1 << 20]).unwrap();
    for [name, backing] in [["ro.qcow2", "base.raw"], ["apart.qcow2", "base.raw"]] {
        assert!(says(dir, &["create", name, "--backing", backing]).status.success());
    }
    assert!(says(dir, &["create", "alone.qcow2", "--size", "1M"]).status.success());
    let conf = "control = 'ctl'\n\
        [[disk]]\nimage = 'alone.qcow2'\nformat = 'qcow2'\nsocket = 'a'\n\
        [[disk]]\nimage = 'raw'\nsocket = 'r'\n\
        [[disk]]\nimage = 'ro.qcow2'\nformat = 'qcow2'\nread-only = true\nsocket = 'o'\n\
        [[disk]]\nimage = 'apart.qcow2'\nformat = 'qcow2'\nisolate = true\nsocket = 'i'\n\
        [[disk]]\nimage = 'clone.qcow2'\nbase = 'base.raw'\nephemeral = true\nsocket = 'e'\n\
        [[disk]]\nimage = 'null:1M'\nsocket = 'n'\n";
    std::fs::write(dir.join("conf"), conf).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    refused(dir, &["flatten", "a"], &["based on nothing"]);
    refused(dir, &["flatten", "r"], &["raw"]);
    refused(dir, &["flatten", "o"], &["read-only"]);
    done(dir, &["flatten", "i", "--wait"]);
    refused(dir, &["flatten", "e"], &["ephemeral"]);
    refused(dir, &["flatten", "n"], &["no file"]);
    refused(dir, &["flatten", "gone"], &["no disk"]);
    refused(dir, &["flatten", "a", "--bps", "0"], &["never be done"]);
    daemon.stop();
}
