//! What outlives a process belongs to whoever holds its lock: nobody else acts upon it or takes it away, and who is
//! alive is not taken for dead.
#![allow(missing_docs)]

mod common;

use common::{Daemon, descendants, folder, kill_all, read, ringway, run, text, until_ended, write};
use ringway_driver::{Device, Options};
use ringway_testkit::{Need, skip};
use std::path::Path;
use std::process::Command;

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
    Options::new().reconnect(common::PATIENCE).connect(dir.join("s")).unwrap()
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
        assert!(common::finish(&mut queue).0, "{}", daemon.log());
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
