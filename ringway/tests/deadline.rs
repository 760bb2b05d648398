//! Something keeps the daemon from ending in order (hazard E10). In a release nobody can
//! have it wait for less than 75 seconds.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, says, write};
use ringway_driver::{BlkQueue, Device, Options};
use std::path::Path;
use std::time::{Duration, Instant};

/// `ringway serve ARGS` that ends after two seconds, and the process of a disk after 1.3, if it has not ended
/// by itself.
fn daemon(dir: &Path, args: &[&str]) -> Daemon {
    let mut command = ringway();
    command.env("RINGWAY_END", "2").arg("serve").args(args).current_dir(dir);
    Daemon::start(command)
}

/// Two disks: one that answers after a minute, and one that answers at once.
fn two_disks(dir: &Path, isolate: bool) -> Daemon {
    let disk = |image, socket| format!("[[disk]]\nimage = '{image}'\nsocket = '{socket}'\n");
    let disks = disk("null:1G,latency=60000ms", "slow") + &disk("disk.img", "quick");
    let toml = format!("control = 'ctl'\nisolate = {isolate}\n{disks}");
    std::fs::write(dir.join("c.toml"), toml).unwrap();
    daemon(dir, &["--config", "c.toml"])
}

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

/// Asks the slow disk for something, and waits until that is under way: what is not taken yet keeps nobody from
/// ending.
fn ask(dir: &Path, device: &mut Device) -> BlkQueue<()> {
    let mut queue = device.queue().unwrap();
    queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
    queue.submit().unwrap();
    let begun = Instant::now();
    let stats = || says(dir, &["ctl", "--control", "ctl", "--json", "stats"], 0, &[]);
    while !stats().replace(' ', "").contains(r#""in_flight":1"#) {
        assert!(begun.elapsed() < PATIENCE, "nothing is under way");
    }
    queue
}

fn told_to_end(mut daemon: Daemon, meanwhile: impl FnOnce()) -> String {
    daemon.signal(libc::SIGTERM);
    let begun = Instant::now();
    while !daemon.log().contains("the end took longer than 2s: ending at once") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    meanwhile();
    let (status, _) = daemon.wait();
    assert_eq!(status.code(), Some(1), "{status}: {}", daemon.log());
    daemon.log()
}

/// The quick disk's image is free then, and what was written to it there.
fn can_be_served_again(dir: &Path) {
    let daemon = Daemon::serve(dir, &["disk.img", "--socket", "quick"]);
    let mut device = connect(dir, "quick");
    let mut queue = device.queue().unwrap();
    assert_eq!(read(&device, &mut queue, 3), [9; 512]);
    drop((queue, device));
    daemon.stop();
}

#[test]
fn e10_a_disk_that_never_answers_does_not_keep_the_daemon() {
    let dir = folder();
    let daemon = two_disks(dir.path(), false);
    let mut quick = connect(dir.path(), "quick");
    let mut queue = quick.queue().unwrap();
    assert!(write(&quick, &mut queue, 3, 9));
    let mut slow = connect(dir.path(), "slow");
    let _asked = ask(dir.path(), &mut slow);
    let log = told_to_end(daemon, || {});
    let named: Vec<_> = log.lines().filter(|line| line.contains("does not end")).collect();
    assert!(named.len() == 1 && named[0].contains("null:1G"), "{log}");
    can_be_served_again(dir.path());
}

/// The process of the slow disk ends first, so that the daemon hears of it and ends in order.
#[test]
fn e10_a_process_whose_disk_never_answers_ends_before_its_daemon() {
    let dir = folder();
    let mut daemon = two_disks(dir.path(), true);
    let mut slow = connect(dir.path(), "slow");
    let _asked = ask(dir.path(), &mut slow);
    daemon.signal(libc::SIGTERM);
    let (status, _) = daemon.wait();
    // Its last words may come after those of the daemon.
    let begun = Instant::now();
    while !daemon.log().contains("the end took longer than 1.3") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    let log = daemon.log();
    assert_eq!(status.code(), Some(0), "{log}");
    let named: Vec<_> = log.lines().filter(|line| line.contains("does not end")).collect();
    assert!(named.len() == 1 && named[0].contains("null:1G"), "{log}");
    assert!(log.contains("stopped"), "{log}");
}

/// One that is stopped, as by a debugger, or held by the kernel.
#[test]
fn e10_a_process_that_does_nothing_is_left_behind() {
    let dir = folder();
    let daemon = two_disks(dir.path(), true);
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json", "list"]).current_dir(dir.path());
    let list: serde_json::Value = serde_json::from_slice(&run(command).stdout).unwrap();
    let its = i32::try_from(list["disks"][0]["process"].as_i64().unwrap()).unwrap();
    let signal = |signal| {
        // SAFETY: a process of the daemon's, which waits to be told to go on.
        assert_eq!(unsafe { libc::kill(its, signal) }, 0);
    };
    signal(libc::SIGSTOP);
    let mut quick = connect(dir.path(), "quick");
    let mut queue = quick.queue().unwrap();
    assert!(write(&quick, &mut queue, 3, 9));
    // What is left behind keeps the daemon's standard output open.
    let log = told_to_end(daemon, || signal(libc::SIGKILL));
    let named: Vec<_> = log.lines().filter(|line| line.contains("it is left behind")).collect();
    assert!(named.len() == 1 && named[0].contains("null:1G"), "{log}");
    assert!(named[0].contains(&its.to_string()), "{log}");
    can_be_served_again(dir.path());
}

/// A neighbour is left in order before the time is over, though it is told to end after the slow one.
#[test]
fn e60_a_disk_that_never_answers_keeps_no_other_from_being_left() {
    let dir = folder();
    let path = dir.path();
    let disk = |image, socket| format!("[[disk]]\nimage = '{image}'\nsocket = '{socket}'\n");
    let disks = disk("null:1G,latency=60000ms", "slow") + &disk("disk.img", "quick");
    let toml = format!("control = 'ctl'\nstate-dir = 'state'\n{disks}");
    std::fs::write(path.join("c.toml"), toml).unwrap();
    let mut command = ringway();
    // Less than the slow one is waited for.
    command.env("RINGWAY_END", "25").args(["serve", "--config", "c.toml"]).current_dir(path);
    let daemon = Daemon::start(command);
    let pages = || std::fs::read_dir(path.join("state")).unwrap().count();
    assert_eq!(pages(), 1, "that of disk.img");
    let mut slow = connect(path, "slow");
    let _asked = ask(path, &mut slow);
    daemon.signal(libc::SIGTERM);
    while pages() > 0 {
        assert!(!daemon.log().contains("the end took longer"), "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    daemon.kill();
}
