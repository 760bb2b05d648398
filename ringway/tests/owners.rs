//! What outlives a process belongs to whoever holds its lock: nobody else acts upon it or takes it away, and who is
//! alive is not taken for dead.
#![allow(missing_docs)]

use crate::common::{
    Daemon, descendants, folder, kill_all, read, ringway, run, text, until_ended, write,
};
use ringway_driver::{Device, Options};
use ringway_testkit::{Need, Rng, skip};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Sectors of a cluster.
const CLUSTER: u64 = 128;
const MARK: std::ops::Range<usize> = 88..96;

/// An empty image.
fn image(dir: &Path) -> bool {
    let args = ["create", "-q", "-f", "qcow2", "top.qcow2", "64M"];
    match Command::new("qemu-img").args(args).current_dir(dir).status() {
        Ok(status) => status.success(),
        Err(_) => {
            skip(Need::Qemu, "qemu-img".to_owned());
            false
        }
    }
}

fn serve(dir: &Path, more: &[&str]) -> Daemon {
    let args = ["top.qcow2", "--format", "qcow2", "--socket", "s", "--control", "c"];
    Daemon::serve(dir, &[&args[..], &["--state-dir", "state"], more].concat())
}

/// A guest that goes on with the next daemon.
fn connect(dir: &Path) -> Device {
    Options::new().reconnect(crate::common::PATIENCE).connect(dir.join("s")).unwrap()
}

fn ctl(dir: &Path, args: &[&str]) -> (bool, String) {
    let mut command = ringway();
    command.args(["ctl", "--control", "c"]).args(args).current_dir(dir);
    let output = run(command);
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// One that it cannot take in is refused; what it keeps of disks that are served stays.
#[test]
fn c39_a_request_that_is_too_long_ends_nobody() {
    for more in [&[][..], &["--cache", "none"], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        if !image(dir) {
            return;
        }
        let daemon = serve(dir, more);
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        for cluster in 0..8 {
            assert!(write(&device, &mut queue, cluster * CLUSTER, 1));
        }
        let before = descendants(daemon.pid());
        for letters in [5_000, 17_000, 60_000] {
            let path = format!("/{}", "z".repeat(letters));
            assert!(!ctl(dir, &["pause", &path]).0);
            // By the helper, or by the process that starts others.
            let (done, said) = ctl(dir, &["add", &path, "--socket", "x"]);
            let said = said.replace("zz", "");
            assert!(!done && said.contains("too long"), "{letters}: {said}");
        }
        let after = descendants(daemon.pid());
        assert!(before.iter().all(|pid| after.contains(pid)), "{before:?} {after:?}");
        // It does what it is there for, as before.
        let (done, said) = ctl(dir, &["add", "disk.img", "--format", "raw", "--socket", "y"]);
        assert!(done, "{said}");
        let (done, said) = ctl(dir, &["remove", "disk.img"]);
        assert!(done, "{said}");
        for cluster in 8..16 {
            assert!(write(&device, &mut queue, cluster * CLUSTER, 1), "{}", daemon.log());
        }
        kill_all(daemon);
        let daemon = serve(dir, more);
        for cluster in 0..16 {
            assert_eq!(read(&device, &mut queue, cluster * CLUSTER)[0], 1, "cluster {cluster}");
        }
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
        drop((queue, device));
        daemon.stop();
        assert_eq!(std::fs::read_dir(dir.join("state")).unwrap().count(), 0, "nothing is left");
    }
}

/// It neither puts what its daemon had answered into the image, nor takes away what the next daemon finds it by.
#[test]
fn c39_a_helper_leaves_the_image_of_a_dead_daemon_alone() {
    for more in [&[][..], &["--cache", "none"], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        if !image(dir) {
            return;
        }
        let daemon = serve(dir, more);
        let mut device = connect(dir);
        let mut queue = device.queue::<()>().unwrap();
        for cluster in 0..8 {
            assert!(write(&device, &mut queue, cluster * CLUSTER, 1));
        }
        let served = std::fs::read(dir.join("top.qcow2")).unwrap();
        let others = descendants(daemon.pid());
        daemon.kill();
        until_ended(&others);
        let left = std::fs::read(dir.join("top.qcow2")).unwrap();
        assert!(served == left, "{more:?}: somebody has written to it");
        assert!(left[MARK] != [0; 8], "{more:?}: it has no journal");
        assert_eq!(std::fs::read_dir(dir.join("state")).unwrap().count(), 1);
        let daemon = serve(dir, more);
        for cluster in 0..8 {
            assert_eq!(read(&device, &mut queue, cluster * CLUSTER)[0], 1, "cluster {cluster}");
        }
        drop((queue, device));
        daemon.stop();
    }
}

/// Whenever it is killed, and with nobody to kill the others: they end by themselves.
#[test]
fn e27_no_process_outlives_a_daemon_that_was_killed() {
    let mut rng = Rng::for_test("no_process_outlives");
    let rounds = std::env::var("RINGWAY_ORPHAN_ROUNDS");
    for round in 0..rounds.map_or(24, |rounds| rounds.parse().unwrap()) {
        let dir = folder();
        let dir = dir.path();
        let disks = "[[disk]]\nimage = \"disk.img\"\nformat = \"raw\"\nsocket = \"s\"\n\
                     [[disk]]\nimage = \"other.img\"\nformat = \"raw\"\nsocket = \"t\"\nisolate = true\n";
        std::fs::copy(dir.join("disk.img"), dir.join("other.img")).unwrap();
        std::fs::write(dir.join("disks.toml"), disks).unwrap();
        let mut command = ringway();
        command.args(["serve", "--config", "disks.toml", "--state-dir", "state"]);
        // By this group they are found, whoever their parent is by then.
        command.current_dir(dir).process_group(0).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let mut daemon = command.spawn().unwrap();
        let group = daemon.id();
        if round % 3 == 0 {
            let begun = std::time::Instant::now();
            while !dir.join("t").exists() || !dir.join("s").exists() {
                assert!(begun.elapsed() < crate::common::PATIENCE, "it does not start");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        std::thread::sleep(Duration::from_micros(rng.below(150_000)));
        let others: Vec<u32> = group_of(group).into_iter().filter(|pid| *pid != group).collect();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        until_ended(&others);
        // And those that were about to be started.
        let deadline = std::time::Instant::now() + crate::common::PATIENCE;
        while !group_of(group).is_empty() {
            assert!(std::time::Instant::now() < deadline, "{:?}", group_of(group));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A helper that is killed with its daemon says nothing of its last flush.
#[test]
fn e27_the_unit_leaves_the_helper_alive() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd/ringway@.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    assert!(unit.lines().any(|line| line == "KillMode=process"));
}

/// The processes of a group that live.
fn group_of(group: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let is_of = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Its state, its parent, its group.
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        let words: Vec<&str> = rest.split(' ').collect();
        words.first() != Some(&"Z") && words.get(2) == Some(&group.to_string().as_str())
    };
    pids.filter(is_of).collect()
}
