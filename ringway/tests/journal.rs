//! What a daemon has answered, and its guest not flushed, when the daemon is killed together with its helper.
#![allow(missing_docs)]

use crate::common::{Daemon, folder, kill_all, read, ringway, run, text, until_ended, write};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::{LoopDevice, Mounted, Need, skip};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Sectors of a cluster.
const CLUSTER: u64 = 128;

fn overlay(dir: &Path) -> bool {
    std::fs::write(dir.join("base.raw"), vec![0xba; 8 << 20]).unwrap();
    let args = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    match Command::new("qemu-img").args(args).current_dir(dir).status() {
        Ok(status) => {
            assert!(status.success());
            true
        }
        Err(_) => {
            skip(Need::Qemu, "qemu-img".to_owned());
            false
        }
    }
}

fn serve(dir: &Path, state: &str, more: &[&str]) -> Daemon {
    let args = ["top.qcow2", "--format", "qcow2", "--socket", "s", "--state-dir", state];
    Daemon::serve(dir, &[&args[..], more].concat())
}

/// A guest that goes on with the next daemon.
fn connect(dir: &Path) -> Device {
    Options::new().reconnect(crate::common::PATIENCE).connect(dir.join("s")).unwrap()
}

fn flush(queue: &mut BlkQueue<()>) -> bool {
    queue.flush(()).unwrap();
    crate::common::finish(queue).0
}

/// Runs a program of QEMU once nobody has the image any more: the kernel lets go of what killed processes
/// had a moment after them.
fn qemu(dir: &Path, program: &str, args: &[&str], statuses: &[i32]) {
    let deadline = Instant::now() + crate::common::PATIENCE;
    loop {
        let output = Command::new(program).args(args).current_dir(dir).output().unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        if said.contains("\" lock") && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        assert!(output.status.code().is_some_and(|code| statuses.contains(&code)), "{said}");
        return;
    }
}

/// No errors; leaks may be.
fn check(dir: &Path) {
    qemu(dir, "qemu-img", &["check", "top.qcow2"], &[0, 3]);
}

/// What would spoil such an image, or show it without what is missing.
const TOOLS: &[&[&str]] = &[
    &["resize", "top.qcow2", "16M"],
    &["flatten", "top.qcow2"],
    &["commit", "top.qcow2"],
    &["io", "--format", "qcow2", "top.qcow2", "-c", "read 0 512"],
    &["io", "--read-only", "--format", "qcow2", "top.qcow2", "-c", "read 0 512"],
    &["bench", "--format", "qcow2", "top.qcow2", "--io-size", "1M"],
    &["create", "clone.qcow2", "--backing", "top.qcow2"],
    &["serve", "top.qcow2", "--overlay", ".", "--socket", "clone.sock"],
    &[
        "bench",
        "--format",
        "qcow2",
        "top.qcow2",
        "--rw",
        "write",
        "--allow-write",
        "--io-size",
        "1M",
    ],
    &["copy", "--from-format", "qcow2", "top.qcow2", "copy.img"],
    &["check", "--repair", "leaks", "top.qcow2"],
    &[
        "serve",
        "--read-only",
        "--format",
        "qcow2",
        "top.qcow2",
        "--socket",
        "ro",
        "--state-dir",
        "state",
    ],
];

/// No tool takes such an image for whole: it could not be made so any more once it was changed, and a copy would lack
/// what was answered. What only looks at it says so.
#[test]
fn c38_tools_leave_an_image_alone_that_waits_for_its_daemon() {
    let dir = folder();
    let dir = dir.path();
    if !overlay(dir) {
        return;
    }
    let daemon = serve(dir, "state", &[]);
    let mut device = connect(dir);
    let mut queue = device.queue::<()>().unwrap();
    // A new table does not wait; entries in it do.
    assert!(write(&device, &mut queue, CLUSTER, 1) && write(&device, &mut queue, 5, 77));
    let run_tool = |args: &[&str]| {
        let mut command = ringway();
        command.args(args).current_dir(dir);
        let output = run(command);
        (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
    };
    let info = ["info", "--format", "qcow2", "top.qcow2"];
    assert!(!run_tool(&info).1.contains("--state-dir"), "it is whole: its daemon has it");
    kill_all(daemon);
    // The kernel lets go of it a moment later.
    let image = std::fs::File::open(dir.join("top.qcow2")).unwrap();
    let deadline = Instant::now() + crate::common::PATIENCE;
    while ringway_disk::lock_image(&image, true).is_err() {
        assert!(Instant::now() < deadline, "somebody has it");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(image);
    for tool in TOOLS {
        let (status, said) = run_tool(tool);
        assert!(status == 1 && said.contains("--state-dir"), "{tool:?}: {status} {said}");
    }
    assert!(!dir.join("copy.img").exists());
    for tool in [&info[..], &["check", "top.qcow2"], &["doctor", "--format", "qcow2", "top.qcow2"]]
    {
        let (_, said) = run_tool(tool);
        assert!(said.contains("--state-dir"), "{tool:?}: {said}");
    }
    let daemon = serve(dir, "state", &[]);
    assert_eq!(read(&device, &mut queue, 5)[0], 77);
    assert!(flush(&mut queue), "{}", daemon.log());
    drop((queue, device));
    daemon.stop();
    let (status, said) = run_tool(&["resize", "top.qcow2", "16M"]);
    assert_eq!(status, 0, "{said}");
    check(dir);
}

/// The next daemon finds it in its state folder.
#[test]
fn c38_what_was_answered_outlives_daemon_and_helper() {
    let dir = folder();
    let dir = dir.path();
    if !overlay(dir) {
        return;
    }
    for (round, more) in (1_u8..).zip([&[][..], &["--cache", "none"], &["--isolate"]]) {
        let daemon = serve(dir, "state", more);
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        let first = u64::from(round) * 16;
        for cluster in first..first + 8 {
            assert!(write(&device, &mut queue, cluster * CLUSTER + 5, round));
        }
        kill_all(daemon);
        let daemon = serve(dir, "state", more);
        for cluster in first..first + 8 {
            assert_eq!(read(&device, &mut queue, cluster * CLUSTER + 5)[0], round, "{more:?}");
            assert_eq!(read(&device, &mut queue, cluster * CLUSTER + 6)[0], 0xba);
        }
        assert!(flush(&mut queue), "{}", daemon.log());
        drop((queue, device));
        daemon.stop();
        check(dir);
        assert_eq!(std::fs::read_dir(dir.join("state")).unwrap().count(), 0, "nothing is left");
    }
}

/// The next daemon has another folder, or the image was written by somebody else: a guest that goes on is told
/// by its flushes, and one that begins afresh is not.
#[test]
fn c38_a_guest_is_told_if_what_was_answered_is_lost() {
    for foreign in [false, true] {
        let dir = folder();
        let dir = dir.path();
        if !overlay(dir) {
            return;
        }
        let daemon = serve(dir, "state", &[]);
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        for cluster in 1..8 {
            assert!(write(&device, &mut queue, cluster * CLUSTER, 1));
        }
        kill_all(daemon);
        let state = if foreign {
            let args = ["-f", "qcow2", "-c", "write -P 9 4M 512", "top.qcow2"];
            qemu(dir, "qemu-io", &args, &[0]);
            "state"
        } else {
            "other"
        };
        let daemon = serve(dir, state, &[]);
        assert_eq!(read(&device, &mut queue, 7 * CLUSTER)[0], 0xba);
        assert!(!flush(&mut queue), "it is told nothing: {}", daemon.log());
        let deadline = Instant::now() + crate::common::PATIENCE;
        while !daemon.log().contains("may be lost") {
            assert!(Instant::now() < deadline, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        drop((queue, device));
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        assert!(flush(&mut queue), "{}", daemon.log());
        drop((queue, device));
        daemon.stop();
        check(dir);
    }
}

/// The names of a snapshot that was not taken have stayed, and its disk went on with what is its base by them: the
/// entries of that one wait in the state folder, and nobody looks for them there.
#[test]
fn c112_a_guest_is_told_if_what_was_answered_is_below_an_empty_image() {
    let dir = folder();
    let dir = dir.path();
    if !overlay(dir) {
        return;
    }
    let daemon = serve(dir, "state", &[]);
    let mut device = connect(dir);
    let mut queue = device.queue::<()>().unwrap();
    for cluster in 1..8 {
        assert!(write(&device, &mut queue, cluster * CLUSTER, 1));
    }
    kill_all(daemon);
    std::fs::rename(dir.join("top.qcow2"), dir.join("snapshot.qcow2")).unwrap();
    let args = ["create", "-q", "-f", "qcow2", "-b", "snapshot.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu(dir, "qemu-img", &args, &[0]);
    let daemon = serve(dir, "state", &[]);
    assert_eq!(read(&device, &mut queue, 7 * CLUSTER)[0], 0xba);
    assert!(!flush(&mut queue), "it is told nothing: {}", daemon.log());
    drop((queue, device));
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 5, 7) && flush(&mut queue), "{}", daemon.log());
    drop((queue, device));
    daemon.stop();
    check(dir);
}

fn ctl(dir: &Path, args: &[&str]) -> String {
    let mut command = ringway();
    command.args(["ctl", "--control", "c"]).args(args).current_dir(dir);
    let output = run(command);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// What is copied holds what was answered, and says nothing of a journal that it has not.
#[test]
fn c38_a_paused_image_has_all_of_it() {
    let dir = folder();
    let dir = dir.path();
    if !overlay(dir) {
        return;
    }
    let daemon = serve(dir, "state", &["--control", "c"]);
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let marked = |image: &str| {
        let header = std::fs::read(dir.join(image)).unwrap();
        header[88..96] != [0; 8]
    };
    for round in 1..4_u8 {
        for cluster in 0..8 {
            let cluster = u64::from(round) * 8 + cluster;
            assert!(write(&device, &mut queue, cluster * CLUSTER, round));
        }
        assert!(marked("top.qcow2"), "it has no journal");
        ctl(dir, &["pause", "0"]);
        assert!(!marked("top.qcow2"));
        ctl(dir, &["resize", "0", &format!("{}M", 64 + round)]);
        assert!(!marked("top.qcow2"), "a copy would be refused");
        std::fs::copy(dir.join("top.qcow2"), dir.join("copy.qcow2")).unwrap();
        ctl(dir, &["resume", "0"]);
        qemu(dir, "qemu-img", &["convert", "-O", "raw", "copy.qcow2", "copy.raw"], &[0]);
        let found = std::fs::read(dir.join("copy.raw")).unwrap();
        for cluster in 8..usize::from(round) * 8 + 8 {
            assert_eq!(usize::from(found[cluster << 16]), cluster / 8, "cluster {cluster}");
        }
    }
    drop((queue, device));
    daemon.stop();
    assert!(!marked("top.qcow2"));
}

/// Without a journal the write would have found no room for its table, and been held.
#[test]
fn c18_a_flush_that_finds_no_room_for_a_table_is_held() {
    let dir = folder();
    let dir = dir.path();
    let small = match Mounted::in_memory(dir.join("small"), 4 << 20) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let args = ["create", "-q", "-f", "qcow2", "small/top.qcow2", "64M"];
    qemu(dir, "qemu-img", &args, &[0]);
    let args = ["small/top.qcow2", "--format", "qcow2", "--socket", "s", "--state-dir", "state"];
    let daemon = Daemon::serve(dir, &[&args[..], &["--control", "c", "--queues", "1"]].concat());
    let mut device =
        Options::new().patience(crate::common::PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 0, 1) && write(&device, &mut queue, CLUSTER, 1));
    assert!(flush(&mut queue));
    // One page is left, for what is written 40 MiB further on; its entry is in another page of its table.
    let filler = std::fs::File::create(small.path().join("filler")).unwrap();
    let mut bytes = 0;
    while filler.write_all_at(&[1; 4096], bytes).is_ok() {
        bytes += 4096;
    }
    filler.set_len(bytes - 4096).unwrap();
    assert!(write(&device, &mut queue, 640 * CLUSTER, 2), "{}", daemon.log());
    queue.flush(()).unwrap();
    queue.submit().unwrap();
    let held = || {
        let list: serde_json::Value = serde_json::from_str(&ctl(dir, &["--json", "list"])).unwrap();
        list["disks"][0]["held"]["count"] == 1
    };
    let deadline = Instant::now() + crate::common::PATIENCE;
    while !held() {
        assert!(Instant::now() < deadline, "{}", ctl(dir, &["--json", "list"]));
        std::thread::sleep(Duration::from_millis(10));
    }
    filler.set_len(0).unwrap();
    ctl(dir, &["retry", "0"]);
    assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
    assert_eq!(read(&device, &mut queue, 640 * CLUSTER)[0], 2);
    drop((queue, device));
    daemon.stop();
    qemu(dir, "qemu-img", &["check", "small/top.qcow2"], &[0]);
}

/// On a full file system, with entries that its tables have no room for.
#[test]
fn e43_an_end_that_leaves_answered_data_outside_of_the_image_fails_and_says_so() {
    for isolate in [&[][..], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let small = match Mounted::in_memory(dir.join("small"), 4 << 20) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let args = ["create", "-q", "-f", "qcow2", "small/top.qcow2", "64M"];
        qemu(dir, "qemu-img", &args, &[0]);
        let serve = || {
            let args = ["small/top.qcow2", "--format", "qcow2", "--socket", "s", "--queues", "1"];
            let more = ["--state-dir", "state", "--control", "ctl"];
            Daemon::serve(dir, &[&args[..], &more, isolate].concat())
        };
        let connect =
            || Options::new().patience(crate::common::PATIENCE).connect(dir.join("s")).unwrap();
        let mut daemon = serve();
        let mut device = connect();
        let mut queue = device.queue::<()>().unwrap();
        assert!(write(&device, &mut queue, 0, 1) && write(&device, &mut queue, CLUSTER, 1));
        assert!(flush(&mut queue));
        let filler = std::fs::File::create(small.path().join("filler")).unwrap();
        let mut bytes = 0;
        while filler.write_all_at(&[1; 4096], bytes).is_ok() {
            bytes += 4096;
        }
        filler.set_len(bytes - 4096).unwrap();
        assert!(write(&device, &mut queue, 640 * CLUSTER, 2), "{}", daemon.log());
        drop((queue, device));
        daemon.signal(libc::SIGTERM);
        let status = daemon.wait().0;
        let log = daemon.log();
        assert_eq!(status.code(), Some(1), "{isolate:?}: {log}");
        assert!(log.contains("is in the state folder (--state-dir) alone"), "{isolate:?}: {log}");
        // So does a removal, and the daemon goes on.
        let daemon = serve();
        let mut remove = ringway();
        remove.args(["ctl", "--control", "ctl", "remove", "0"]).current_dir(dir);
        let removed = run(remove);
        let said = text(&removed.stderr);
        let what = if isolate.is_empty() { "(--state-dir) alone" } else { "could not end it" };
        assert!(!removed.status.success() && said.contains(what), "{isolate:?}: {said}");
        daemon.stop();
        // It is served on, and its next end, with room, leaves all in the image.
        let daemon = serve();
        let mut device = connect();
        let mut queue = device.queue::<()>().unwrap();
        assert_eq!(read(&device, &mut queue, 640 * CLUSTER)[0], 2, "{isolate:?}");
        drop((queue, device));
        filler.set_len(0).unwrap();
        daemon.stop();
        qemu(dir, "qemu-img", &["check", "small/top.qcow2"], &[0]);
        drop(small);
    }
}

/// A device does not say its size as a file does.
#[test]
fn c38_what_was_answered_is_found_on_a_device() {
    let dir = folder();
    let dir = dir.path();
    let device = match LoopDevice::new(dir, 64 << 20, 512) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let path = device.path().to_str().unwrap();
    qemu(dir, "qemu-img", &["create", "-q", "-f", "qcow2", path, "16M"], &[0]);
    for all in [false, true] {
        let serve = || {
            let args = [path, "--format", "qcow2", "--socket", "s", "--state-dir", "state"];
            Daemon::serve(dir, &args)
        };
        let daemon = serve();
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        let first = if all { 16 } else { 0 };
        for cluster in first..first + 8 {
            assert!(write(&device, &mut queue, cluster * CLUSTER, 7));
        }
        if all {
            kill_all(daemon);
        } else {
            let others = crate::common::descendants(daemon.pid());
            daemon.kill();
            until_ended(&others);
            // Nobody else has put it there: the next daemon does.
            qemu(dir, "qemu-img", &["convert", "-O", "raw", path, "now.raw"], &[0]);
            assert_eq!(std::fs::read(dir.join("now.raw")).unwrap()[7 << 16], 0);
        }
        let daemon = serve();
        assert_eq!(read(&device, &mut queue, (first + 7) * CLUSTER)[0], 7, "{}", daemon.log());
        assert!(flush(&mut queue), "{}", daemon.log());
        drop((queue, device));
        daemon.stop();
        qemu(dir, "qemu-img", &["check", path], &[0, 3]);
    }
}

/// A copy from before, made while the image was served, is put back in its place: the guest is told.
#[test]
fn c44_a_guest_is_told_if_older_contents_were_put_back() {
    for more in [&[][..], &["--cache", "none"]] {
        let dir = folder();
        let dir = dir.path();
        if !overlay(dir) {
            return;
        }
        let daemon = serve(dir, "state", more);
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        (1..8).for_each(|cluster| assert!(write(&device, &mut queue, cluster * CLUSTER, 1)));
        assert!(flush(&mut queue), "{}", daemon.log());
        std::fs::copy(dir.join("top.qcow2"), dir.join("copy.qcow2")).unwrap();
        (8..40).for_each(|cluster| assert!(write(&device, &mut queue, cluster * CLUSTER, 2)));
        kill_all(daemon);
        let copy = std::fs::read(dir.join("copy.qcow2")).unwrap();
        let image = std::fs::File::options().write(true).open(dir.join("top.qcow2")).unwrap();
        image.set_len(copy.len() as u64).unwrap();
        image.write_all_at(&copy, 0).unwrap();
        let daemon = serve(dir, "state", more);
        assert_eq!(read(&device, &mut queue, 7 * CLUSTER)[0], 1);
        assert_eq!(read(&device, &mut queue, 39 * CLUSTER)[0], 0xba);
        assert!(!flush(&mut queue), "it is told nothing: {}", daemon.log());
        (40..60).for_each(|cluster| assert!(write(&device, &mut queue, cluster * CLUSTER, 3)));
        (1..8).for_each(|cluster| assert_eq!(read(&device, &mut queue, cluster * CLUSTER)[0], 1));
        drop((queue, device));
        daemon.stop();
        check(dir);
    }
}

/// What a daemon had taken ahead the next one gives back.
#[test]
fn c47_kills_of_daemon_and_helper_cost_no_space() {
    for more in [&[][..], &["--cache", "none"]] {
        let dir = folder();
        let dir = dir.path();
        if !overlay(dir) {
            return;
        }
        for round in 0..8_u8 {
            let daemon = serve(dir, "state", more);
            let mut device = Options::new().connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            for cluster in 0..14 {
                let cluster = u64::from(round) * 14 + cluster;
                assert!(write(&device, &mut queue, cluster * CLUSTER, round));
            }
            assert!(round % 2 == 0 || flush(&mut queue));
            kill_all(daemon);
        }
        // None that the header still names is left to the tool.
        let daemon = serve(dir, "state", more);
        daemon.stop();
        qemu(dir, "qemu-img", &["check", "top.qcow2"], &[0]);
        let clusters = dir.join("top.qcow2").metadata().unwrap().len() >> 16;
        assert!(clusters <= 8 * 14 + 5 + 32, "{clusters} clusters");
    }
}
