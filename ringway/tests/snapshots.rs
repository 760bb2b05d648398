//! Snapshots of disks that are served: what they hold, what the disk holds, and what a kill leaves.
#![allow(missing_docs)]

use crate::common::guest::{Known, STRIDE, content, ctl, done, says, whole, within};
use crate::common::{Daemon, ringway, run, text};
use ringway_driver::Options;
use ringway_testkit::Rng;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

#[track_caller]
fn refused(dir: &Path, args: &[&str], words: &[&str]) {
    let before = names(dir);
    let output = ctl(dir, args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    assert_eq!(names(dir), before, "{args:?}: nothing is left behind");
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn image(dir: &Path) {
    let made = says(dir, &["create", "disk.qcow2", "--size", "16M"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
}

const SERVE: [&str; 7] = ["disk.qcow2", "--format", "qcow2", "--socket", "s", "--control", "ctl"];

#[test]
fn a_snapshot_holds_what_had_been_written_and_the_disk_goes_on() {
    let direct = &["--cache", "none", "--engine", "threads"];
    for more in [&[][..], &["--sandbox", "off"], direct, &["--isolate"]] {
        let dir = tempfile::tempdir_in(".").unwrap();
        let dir = dir.path();
        image(dir);
        let serve = [&SERVE[..], more].concat();
        let daemon = Daemon::serve(dir, &serve);
        let known = Known::new();
        let mut taken = Vec::new();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, 7));
            for round in 0..4 {
                let enough = 500 * (round + 1);
                while Known::now(&known.acknowledged).iter().sum::<u64>() < enough {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let least = Known::now(&known.acknowledged);
                let name = format!("snap-{round}.qcow2");
                let answer = done(dir, &["snapshot", "disk.qcow2", &name]);
                let most = Known::now(&known.begun);
                assert_eq!(answer["images"], round + 2);
                assert!(answer["snapshot"].as_str().unwrap().ends_with(&name));
                println!("{more:?}: blackout {} us", answer["blackout_us"]);
                let held = content(dir, &name);
                within(&held, &least, &most, &name);
                taken.push((name, held));
            }
            known.stop.store(true, SeqCst);
            assert!(load.join().unwrap() > 2000);
        });
        let end = Known::now(&known.acknowledged);
        daemon.stop();
        assert_eq!(content(dir, "disk.qcow2"), end, "{more:?}");
        // The same words serve the disk again, and nothing of a snapshot has changed.
        let daemon = Daemon::serve(dir, &serve);
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        for (place, number) in end.iter().enumerate() {
            let sector = crate::common::read(&device, &mut queue, place as u64 * STRIDE / 512);
            assert_eq!(sector[..8], number.to_le_bytes(), "place {place}");
        }
        drop((queue, device));
        daemon.stop();
        for (name, held) in &taken {
            assert_eq!(content(dir, name), *held, "{name}");
            whole(dir, name);
        }
        whole(dir, "disk.qcow2");
        assert_eq!(names(dir).iter().filter(|name| name.starts_with('.')).count(), 0);
    }
}

/// Killed at any moment of a snapshot under writes: the same words serve all that was acknowledged.
#[test]
fn c23_a_daemon_that_is_killed_in_a_snapshot_leaves_a_whole_chain() {
    let rounds: u64 = std::env::var("RINGWAY_SNAPSHOT_KILLS").map_or(12, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    image(dir);
    let mut rng = Rng::for_test("killed_in_a_snapshot");
    let (known, mut named) = (Known::new(), 0);
    for round in 0..rounds {
        let daemon = Daemon::serve(dir, &SERVE);
        let name = format!("snap-{round}");
        let begun = Known::now(&known.acknowledged).iter().sum::<u64>();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| known.write(dir, round));
            while Known::now(&known.acknowledged).iter().sum::<u64>() < begun + 200 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut command = ringway();
            command.args(["ctl", "--control", "ctl", "snapshot", "s", &name]).current_dir(dir);
            let child = scope.spawn(|| run(command));
            std::thread::sleep(Duration::from_micros(rng.below(60_000)));
            daemon.kill();
            let _ = (load.join().unwrap(), child.join().unwrap());
        });
        // The next one puts into the image what that one had answered.
        Daemon::serve(dir, &SERVE).stop();
        let held = content(dir, "disk.qcow2");
        within(&held, &Known::now(&known.acknowledged), &Known::now(&known.begun), &name);
        known.holds(&held);
        whole(dir, "disk.qcow2");
        if dir.join(&name).exists() {
            named += 1;
            whole(dir, &name);
        }
    }
    println!("{named} of {rounds} snapshots have a name");
    // What a kill before the new image had its name leaves goes with the helper.
    assert_eq!(names(dir).iter().filter(|name| name.starts_with(".ringway")).count(), 0);
}

/// A kill between two names: the image has both. The same snapshot can be taken then.
#[test]
fn c23_a_snapshot_that_was_begun_can_be_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    image(dir);
    std::fs::hard_link(dir.join("disk.qcow2"), dir.join("monday")).unwrap();
    let daemon = Daemon::serve(dir, &SERVE);
    done(dir, &["snapshot", "disk.qcow2", "monday"]);
    let facts = done(dir, &["list"]);
    assert_eq!(facts["disks"][0]["image"], "disk.qcow2");
    daemon.stop();
    whole(dir, "monday");
    whole(dir, "disk.qcow2");
    Daemon::serve(dir, &SERVE).stop();
}

#[test]
fn what_cannot_be_a_snapshot_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    image(dir);
    std::fs::create_dir(dir.join("sub")).unwrap();
    std::fs::write(dir.join("there"), "precious").unwrap();
    std::os::unix::fs::symlink("disk.qcow2", dir.join("link")).unwrap();
    std::fs::write(dir.join("raw"), vec![0; 1 << 20]).unwrap();
    std::fs::write(dir.join("base"), vec![0; 1 << 20]).unwrap();
    let create = |name: &str| {
        assert!(says(dir, &["create", name, "--size", "1M"]).status.success());
    };
    create("ro.qcow2");
    create("apart.qcow2");
    let conf = "control = 'ctl'\n\
        [[disk]]\nimage = 'disk.qcow2'\nformat = 'qcow2'\nsocket = 's'\n\
        [[disk]]\nimage = 'raw'\nsocket = 'r'\n\
        [[disk]]\nimage = 'ro.qcow2'\nformat = 'qcow2'\nread-only = true\nsocket = 'o'\n\
        [[disk]]\nimage = 'apart.qcow2'\nformat = 'qcow2'\nisolate = true\nsocket = 'i'\n\
        [[disk]]\nimage = 'clone.qcow2'\nbase = 'base'\nephemeral = true\nsocket = 'e'\n\
        [[disk]]\nimage = 'null:1M'\nsocket = 'n'\n";
    std::fs::write(dir.join("conf"), conf).unwrap();
    let daemon = Daemon::serve(dir, &["--config", "conf"]);
    let snapshot = |disk: &'static str, new: &'static str| ["snapshot", disk, new];
    refused(dir, &snapshot("s", "there"), &["there already", "another name"]);
    refused(dir, &snapshot("s", "link"), &["there already"]);
    refused(dir, &snapshot("s", "disk.qcow2"), &["there already"]);
    refused(dir, &snapshot("s", "sub/new"), &["kept beside its image"]);
    refused(dir, &snapshot("s", "/dev/shm/new"), &["kept beside its image"]);
    refused(dir, &snapshot("s", "nowhere/new"), &["nowhere"]);
    refused(dir, &snapshot("s", ".."), &["names no file"]);
    refused(dir, &snapshot("r", "new"), &["raw", "--base"]);
    refused(dir, &snapshot("o", "new"), &["read-only"]);
    refused(dir, &snapshot("i", "there"), &["there already", "another name"]);
    refused(dir, &snapshot("e", "new"), &["ephemeral"]);
    refused(dir, &snapshot("n", "new"), &["has no image"]);
    refused(dir, &snapshot("gone", "new"), &["no disk"]);
    assert_eq!(std::fs::read(dir.join("there")).unwrap(), b"precious");
    // The disk is as it was.
    done(dir, &["snapshot", "s", "./new"]);
    daemon.stop();
    whole(dir, "disk.qcow2");
    // By a link into another folder the snapshot would not be found again, by one in this folder it is.
    create("linked.qcow2");
    std::os::unix::fs::symlink("../linked.qcow2", dir.join("sub/link")).unwrap();
    std::os::unix::fs::symlink("linked.qcow2", dir.join("here")).unwrap();
    let serve = |image| [&[image], &SERVE[1..]].concat();
    let daemon = Daemon::serve(dir, &serve("sub/link"));
    refused(dir, &snapshot("s", "newer"), &["symbolic link", "linked.qcow2"]);
    daemon.stop();
    let daemon = Daemon::serve(dir, &serve("here"));
    done(dir, &["snapshot", "s", "newer"]);
    daemon.stop();
    Daemon::serve(dir, &serve("here")).stop();
}

/// A held request keeps the disk from coming to rest: that is known before any name changes, at which the daemon
/// would die.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c112_a_snapshot_that_is_refused_for_held_requests_changes_no_name() {
    use ringway_core::kill_points::{FAULTS, VARIABLE};
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    image(dir);
    let mut command = ringway();
    command.arg("serve").args(SERVE).args(["--on-write-error", "hold", "--queues", "1"]);
    command.current_dir(dir).env(FAULTS, "eio=1:0").env(VARIABLE, "overlay-named:1");
    let mut daemon = Daemon::start(command);
    let mut device =
        Options::new().patience(crate::common::PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let deadline = Instant::now() + crate::common::PATIENCE;
    let mut written = 0;
    while done(dir, &["list"])["disks"][0]["held"]["count"] != 1 {
        assert!(Instant::now() < deadline, "nothing is held: {}", daemon.log());
        // A first write of a cluster is not the engine's.
        if queue.in_flight() == 0 {
            let buffer = device.pool().alloc(4096).unwrap();
            queue.write(0, buffer, ()).unwrap();
            queue.submit().unwrap();
            written += 1;
        }
        std::thread::sleep(Duration::from_millis(10));
        while queue.pop().unwrap().is_some() {}
    }
    println!("{written} writes until one is held");
    refused(dir, &["snapshot", "disk.qcow2", "snap.qcow2"], &["held"]);
    daemon.signal(libc::SIGKILL);
    daemon.wait();
}

/// Asks on one connection, without a pause, until the daemon is gone or refuses: how many were answered.
fn ask_until_the_end(dir: &Path, mut request: impl FnMut(u64) -> Value) -> u64 {
    // It may be gone before the first question.
    let Ok(mut line) = UnixStream::connect(dir.join("ctl")) else { return 0 };
    let mut answers = BufReader::new(line.try_clone().unwrap());
    for number in 1.. {
        let mut answer = String::new();
        let asked = line.write_all(format!("{}\n", request(number)).as_bytes()).is_ok()
            && answers.read_line(&mut answer).is_ok();
        if !asked || !answer.contains("\"ok\":true") {
            return number - 1;
        }
    }
    0
}

/// The daemon is killed while its disk becomes larger and gets new images at the same time: it is as large as the
/// last answer said.
#[test]
fn c23_a_disk_that_grows_while_a_snapshot_is_taken_does_not_shrink_by_a_kill() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let dir = dir.path();
    let mut rng = Rng::for_test("c23_a_disk_that_grows");
    for round in 0..24 {
        for name in names(dir) {
            let _ = std::fs::remove_file(dir.join(name));
        }
        image(dir);
        let mut daemon = Daemon::serve(dir, &SERVE);
        let answered = std::thread::scope(|scope| {
            let grow = scope.spawn(|| {
                ask_until_the_end(dir, |number| {
                    let size = format!("{}M", 16 + number);
                    json!({"command": "resize", "disk": 0, "size": size})
                })
            });
            scope.spawn(|| {
                ask_until_the_end(dir, |number| {
                    json!({"command": "snapshot", "disk": 0, "snapshot": format!("s{number}.qcow2")})
                })
            });
            std::thread::sleep(Duration::from_millis(20 + rng.below(130)));
            daemon.signal(libc::SIGKILL);
            daemon.wait();
            16 + grow.join().unwrap()
        });
        let daemon = Daemon::serve(dir, &SERVE);
        let size = done(dir, &["list"])["disks"][0]["size"].as_u64().unwrap() >> 20;
        daemon.stop();
        assert!(size >= answered, "round {round}: {size} MiB, and {answered} were answered");
    }
}
