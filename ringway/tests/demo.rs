//! `ringway demo`, from outside.

use crate::common::{Daemon, ringway, run, text};
use std::time::Duration;

#[test]
fn the_demo_verifies_measures_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = ringway();
    command.args(["demo", "--quick", "--size", "16M"]).env("TMPDIR", dir.path());
    let output = run(command);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    for part in ["all 32,768 sectors are right", "p99.9 µs", "ringway serve", "vhost-user-blk-pci"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains('\x1b') && output.stderr.is_empty(), "no bar without a terminal");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = ringway();
    command.args(["demo", "--size", "16M"]).env("TMPDIR", dir.path());
    let mut demo = Daemon::start(command);
    std::thread::sleep(Duration::from_millis(1500));
    demo.signal(libc::SIGINT);
    let (status, _) = demo.wait();
    assert_eq!(status.code(), Some(130), "{}", demo.log());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
