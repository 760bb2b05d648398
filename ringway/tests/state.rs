//! What is not in guests' memory and outlives a daemon: pauses, failed flushes.
#![allow(missing_docs)]

mod common;

use common::{Daemon, folder, ringway, write};
use ringway_driver::Options;
use std::path::Path;
use std::time::Duration;

const ARGS: [&str; 9] =
    ["disk.img", "--socket", "s", "--control", "c", "--state-dir", "state", "--cache", "writeback"];

fn serve(dir: &Path, more: &[&str]) -> Daemon {
    Daemon::serve(dir, &[&ARGS[..], more].concat())
}

fn ctl(dir: &Path, args: &[&str]) -> String {
    let output = ringway().args(["ctl", "--control", "c"]).args(args).current_dir(dir).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whoever takes a snapshot of a paused disk must not find it running because somebody started the
/// daemon again.
#[test]
fn c15_a_paused_disk_is_paused_in_the_next_daemon() {
    for sandbox in [&[][..], &["--sandbox", "off"]] {
        let dir = folder();
        let dir = dir.path();
        let is_paused = || ctl(dir, &["list", "--json"]).contains("\"paused\"");
        let daemon = serve(dir, sandbox);
        assert!(!is_paused());
        ctl(dir, &["pause", "0"]);
        daemon.kill();
        let daemon = serve(dir, sandbox);
        assert!(is_paused() && daemon.log().contains("ringway ctl resume"), "{}", daemon.log());
        daemon.stop();
        let daemon = serve(dir, sandbox);
        assert!(is_paused(), "an end in order is no resume");
        // A rest is no pause, and nothing is taken meanwhile.
        ctl(dir, &["drain", "0"]);
        assert!(is_paused());
        let mut device = Options::new().connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
        assert!(!queue.wait(Some(Duration::from_millis(200))).unwrap());
        ctl(dir, &["resume", "0"]);
        assert!(queue.wait(Some(common::PATIENCE)).unwrap());
        assert!(queue.pop().unwrap().is_some_and(|done| done.is_ok()));
        assert!(write(&device, &mut queue, 1, 7));
        daemon.kill();
        let daemon = serve(dir, sandbox);
        assert!(!is_paused());
        // What is removed leaves nothing.
        ctl(dir, &["pause", "0"]);
        ctl(dir, &["remove", "0"]);
        assert_eq!(std::fs::read_dir(dir.join("state")).unwrap().count(), 0);
        daemon.kill();
    }
}

/// A folder that others can write to is refused; a daemon without one serves all the same.
#[test]
fn a_folder_that_cannot_be_is_told() {
    let dir = folder();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let mut args = ARGS.to_vec();
    args[6] = "file";
    let output = ringway().arg("serve").args(&args).current_dir(dir.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("--state-dir file"), "{told}");
}

/// A sync fails, and the daemon dies at any place from there on: the guest that goes on never has a
/// flush that succeeds, one that begins afresh has. The error is made in the first daemon; the file's
/// own syncs succeed throughout, as those of Linux do after they have told an error once.
#[cfg(feature = "kill-points")]
#[test]
fn c04_a_failed_flush_outlives_the_daemon() {
    use ringway_core::kill_points::{FAULTS, VARIABLE};
    let flush = |queue: &mut ringway_driver::BlkQueue<()>| {
        queue.flush(()).unwrap();
        assert!(queue.wait(Some(common::PATIENCE)).unwrap(), "no answer");
        queue.pop().unwrap().unwrap().is_ok()
    };
    for point in [None, Some("flush-failed:1")] {
        for cache in ["on", "off"] {
            let dir = folder();
            let dir = dir.path();
            let mut command = ringway();
            command.arg("serve").args(ARGS).current_dir(dir).env(FAULTS, "sync=2");
            if let Some(point) = point {
                command.env(VARIABLE, point);
            }
            let mut daemon = Daemon::start(command);
            let options = Options::new().reconnect(common::PATIENCE);
            let mut device = options.connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            assert!(flush(&mut queue) && write(&device, &mut queue, 1, 1));
            if point.is_some() {
                queue.flush(()).unwrap();
                queue.submit().unwrap();
                daemon.wait();
            } else {
                assert!(!flush(&mut queue));
                daemon.kill();
            }
            let daemon = serve(dir, &[]);
            if point.is_some() {
                // The flush that was under way is carried out again.
                assert!(queue.wait(Some(common::PATIENCE)).unwrap(), "no answer");
                assert!(!queue.pop().unwrap().unwrap().is_ok(), "a failed flush was forgotten");
            }
            assert!(daemon.log().contains("a flush had failed"), "{}", daemon.log());
            assert!(write(&device, &mut queue, 1, 2));
            assert!(!flush(&mut queue));
            if cache == "off" {
                // What was written before cannot be made durable.
                assert!(device.set_writeback(false).is_err());
            }
            daemon.stop();
            let daemon = serve(dir, &[]);
            assert!(!flush(&mut queue), "forgotten by the third");
            device.stop().unwrap();
            drop((queue, device));
            let mut device = Options::new().connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            assert!(flush(&mut queue), "it begins afresh");
            assert!(daemon.log().contains("begins afresh"), "{}", daemon.log());
            daemon.stop();
        }
    }
}
