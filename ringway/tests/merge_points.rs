//! The daemon dies at each named step of a snapshot, of flattening and of merging, under a guest that
//! writes: the chain is whole each time, and the same command can be given again. Not for a release,
//! which has no points to die at.
#![allow(missing_docs)]

use crate::common::guest::{
    Known, base, bytes, content, done, images, same_between, says, wait_for, whole, within,
};
use crate::common::{Daemon, ringway, run, text};
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

const SERVE: [&str; 8] =
    ["serve", "disk.qcow2", "--format", "qcow2", "--socket", "s", "--control", "ctl"];

/// `disk.qcow2` on top of `base`, with each place written.
fn disk(dir: &Path, known: &Known) -> Vec<u8> {
    let content = base(9);
    std::fs::write(dir.join("content"), &content).unwrap();
    let made = says(dir, &["copy", "--to-format", "qcow2", "content", "base"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let args = ["create", "disk.qcow2", "--backing", "base", "--backing-format", "qcow2"];
    assert!(says(dir, &args).status.success());
    let daemon = Daemon::serve(dir, &SERVE[1..]);
    write(dir, known, || {
        wait_for("each place is written", || {
            Known::now(&known.acknowledged).iter().all(|number| *number > 0)
        });
        known.stop.store(true, SeqCst);
    });
    known.stop.store(false, SeqCst);
    daemon.stop();
    content
}

/// A guest writes while something is done.
fn write(dir: &Path, known: &Known, act: impl FnOnce()) {
    std::thread::scope(|scope| {
        let load = scope.spawn(|| known.write(dir, 3));
        act();
        load.join().unwrap();
    });
}

/// Dies at the count-th time of a point while `command` is carried out; `images` is how many there are
/// before, and how many afterwards.
fn dies(point: &str, sandbox: &str, command: &[&str], more: (usize, usize)) {
    println!("{point}: {command:?}");
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let known = Known::new();
    let base = disk(dir, &known);
    if command[0] == "commit" {
        let daemon = Daemon::serve(dir, &SERVE[1..]);
        done(dir, &["snapshot", "s", "middle"]);
        daemon.stop();
    }
    assert_eq!(images(dir), more.0);
    let mut serve = ringway();
    serve.args(SERVE).args(["--sandbox", sandbox]).current_dir(dir);
    serve.env(ringway_core::kill_points::VARIABLE, point);
    let mut daemon = Daemon::start(serve);
    let begun = known.done();
    write(dir, &known, || {
        wait_for("the load runs", || known.done() > begun + 50);
        let mut ctl = ringway();
        ctl.args(["ctl", "--control", "ctl"]).args(command).current_dir(dir);
        assert_ne!(run(ctl).status.code(), Some(0), "{point}: nobody can have answered");
        assert_eq!(daemon.wait().0.code(), None, "{point}: it was killed");
    });
    // The next one puts into the image what that one had answered.
    Daemon::serve(dir, &SERVE[1..]).stop();
    let held = content(dir, "disk.qcow2");
    within(&held, &Known::now(&known.acknowledged), &Known::now(&known.begun), point);
    same_between(bytes(dir, "disk.qcow2"), base.clone());
    let all_whole = || {
        for name in ["disk.qcow2", "base", "middle", "new"] {
            if dir.join(name).exists() {
                whole(dir, name);
            }
        }
    };
    all_whole();
    assert_eq!(images(dir), more.1, "{point}");
    // The same again, if it was not done.
    let daemon = Daemon::serve(dir, &SERVE[1..]);
    if more.0 == more.1 {
        done(dir, command);
    }
    daemon.stop();
    assert_eq!(content(dir, "disk.qcow2"), held, "{point}");
    same_between(bytes(dir, "disk.qcow2"), base);
    all_whole();
}

#[test]
fn c23_killed_at_each_step_of_a_snapshot() {
    let command = ["snapshot", "s", "new"];
    for (point, sandbox, after) in [
        ("overlay-made:1", "on", 2),
        // In the helper's process, if there is one.
        ("overlay-linked:1", "off", 2),
        ("overlay-named:1", "on", 3),
        ("overlay-on-top:1", "on", 3),
    ] {
        dies(point, sandbox, &command, (2, after));
    }
}

#[test]
fn c27_killed_at_each_step_of_flattening() {
    let command = ["flatten", "s", "--bps", "4M", "--wait"];
    for (point, after) in [("pulled:1", 2), ("pulled:2", 2), ("detached:1", 1), ("reopened:1", 1)] {
        dies(point, "on", &command, (2, after));
    }
}

#[test]
fn c30_killed_at_each_step_of_merging() {
    let command = ["commit", "s", "--bps", "64M", "--wait"];
    for (point, after) in [
        ("merged:1", 3),
        ("merged:3", 3),
        ("merge-durable:1", 3),
        ("name-written:1", 3),
        ("middle-skipped:1", 2),
        ("reopened:1", 2),
    ] {
        dies(point, "on", &command, (3, after));
    }
}
