//! What is not in guests' memory and outlives a daemon: pauses, failed flushes.
#![allow(missing_docs)]

use crate::common::{Daemon, finish, folder, kill_all, names, read, ringway, says, write};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::nbd::{Client, SIMPLE, command};
use ringway_testkit::{LoopDevice, Mounted, Need, skip};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

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
    for sandbox in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
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
        assert!(queue.wait(Some(crate::common::PATIENCE)).unwrap());
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

/// As a daemon leaves it that is killed with its helper during a snapshot.
#[test]
fn e80_a_state_of_two_names_goes_with_the_last_thing_that_was_kept() {
    for sandbox in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let state = dir.join("state");
        let daemon = serve(dir, sandbox);
        ctl(dir, &["pause", "0"]);
        daemon.stop();
        let kept = crate::common::names(&state);
        assert_eq!(kept.len(), 1, "{kept:?}");
        std::fs::hard_link(state.join(&kept[0]), state.join("image-1-2-3")).unwrap();
        std::fs::write(state.join("of-another"), "").unwrap();
        serve(dir, sandbox).stop();
        assert_eq!(crate::common::names(&state).len(), 3, "whichever is served finds it");
        let daemon = serve(dir, sandbox);
        ctl(dir, &["resume", "0"]);
        daemon.stop();
        assert_eq!(crate::common::names(&state), ["of-another"], "{sandbox:?}");
    }
}

/// It was moved, or its file system is not mounted: its guest would find an empty disk in its place.
#[test]
fn c88_an_image_that_was_served_is_not_made_again_by_the_next_daemon() {
    let raw: &[&str] = &["made.img", "--format", "raw", "--size", "4M"];
    let clone: &[&str] = &["c.qcow2", "--base", "disk.img", "--base-format", "raw"];
    let off: &[&str] = &["--sandbox", "off"];
    for (image, more) in [(raw, &[][..]), (clone, &[]), (raw, off), (clone, &["--isolate"])] {
        let dir = folder();
        let dir = dir.path();
        let args =
            [image, &["--socket", "s", "--control", "c", "--state-dir", "state"], more].concat();
        let first = |byte| {
            let mut device = Options::new().connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            assert_eq!(read(&device, &mut queue, 3)[0], byte, "{image:?} {more:?}");
            assert!(write(&device, &mut queue, 3, byte + 1));
            queue.flush(()).unwrap();
            assert!(finish(&mut queue).0);
        };
        for killed in [false, true] {
            let daemon = Daemon::serve(dir, &args);
            first(killed.into());
            if killed {
                daemon.kill()
            } else {
                daemon.stop().clear()
            }
            std::fs::rename(dir.join(image[0]), dir.join("away")).unwrap();
            let words = ["it was served before", "ringway create", "--state-dir"];
            says(dir, &[&["serve"], &args[..]].concat(), 1, &words);
            assert!(!dir.join(image[0]).exists(), "{image:?} {more:?}");
            std::fs::rename(dir.join("away"), dir.join(image[0])).unwrap();
        }
        // Who removes a disk for good may have another one of its name.
        let daemon = Daemon::serve(dir, &args);
        first(2);
        ctl(dir, &["remove", "0"]);
        daemon.stop();
        std::fs::remove_file(dir.join(image[0])).unwrap();
        let daemon = Daemon::serve(dir, &args);
        first(0);
        daemon.stop();
    }
}

/// What cannot be kept is said when the disk is opened, and a pause that would be forgotten is refused.
#[test]
fn c15_a_state_folder_without_room_is_told() {
    let dir = folder();
    let dir = dir.path();
    let small = match Mounted::in_memory(dir.join("state"), 64 << 10) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    std::fs::set_permissions(small.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let mut filler = std::fs::File::create(small.path().join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    for sandbox in [&[][..], &["--sandbox", "off"]] {
        let daemon = serve(dir, sandbox);
        let log = daemon.log();
        assert!(log.contains("a pause will not outlive this daemon"), "{log}");
        let pause = ["ctl", "--control", "c", "pause", "0"];
        let said = ringway().args(pause).current_dir(dir).output().unwrap();
        let why = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && why.contains("would not outlive"), "{why}");
        assert!(!ctl(dir, &["list", "--json"]).contains("\"paused\""));
        daemon.stop();
    }
    filler.set_len(0).unwrap();
    let daemon = serve(dir, &[]);
    assert!(!daemon.log().contains("will not outlive"), "{}", daemon.log());
    daemon.stop();
}

/// What was kept of a disk is there and cannot be taken up: it is not served as if nothing had been kept, whether it
/// is there at the start or added.
#[test]
fn c80_what_was_kept_and_cannot_be_taken_up_is_not_forgotten() {
    for sandbox in [&[][..], &["--sandbox", "off"], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let daemon = serve(dir, sandbox);
        ctl(dir, &["pause", "0"]);
        match sandbox {
            // It has no other process.
            ["--sandbox", "off"] => daemon.kill(),
            _ => kill_all(daemon),
        }
        let files = std::fs::read_dir(dir.join("state")).unwrap().map(|file| file.unwrap().path());
        let file = files.last().expect("what is kept");
        let all = || (std::fs::read(&file).unwrap(), file.metadata().unwrap().permissions().mode());
        let length = file.metadata().unwrap().len();
        let open = || std::fs::File::options().write(true).open(&file).unwrap();
        let allow =
            |mode| std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        type Change<'a> = &'a dyn Fn();
        let wrongs: [(Change<'_>, Change<'_>, &str); 2] = [
            (&|| allow(0o666), &|| allow(0o600), "others can write"),
            (
                &|| open().set_len(length + 1).unwrap(),
                &|| open().set_len(length).unwrap(),
                "version",
            ),
        ];
        for (spoil, mend, why) in wrongs {
            spoil();
            let before = all();
            let refused = ringway().arg("serve").args(ARGS).args(sandbox).current_dir(dir).output();
            let refused = refused.unwrap();
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(!refused.status.success() && said.contains(why), "{sandbox:?}: {said}");
            assert!(said.contains("disk.img: what was kept of it"), "{sandbox:?}: {said}");
            assert!(all() == before, "{sandbox:?}, {why}: it was changed");
            // Another disk is served, and that one is not added either.
            std::fs::write(dir.join("other.img"), vec![0; 1 << 20]).unwrap();
            let other = ["other.img", "--socket", "o", "--control", "c", "--state-dir", "state"];
            let daemon = Daemon::serve(dir, &[&other[..], sandbox].concat());
            let add = ["ctl", "--control", "c", "add", "disk.img", "--socket", "s"];
            let added = ringway().args(add).current_dir(dir).output().unwrap();
            let said = String::from_utf8_lossy(&added.stderr);
            assert!(!added.status.success() && said.contains(why), "{sandbox:?}: {said}");
            daemon.stop();
            assert!(all() == before, "{sandbox:?}, {why}: it was changed");
            mend();
        }
        let daemon = serve(dir, sandbox);
        assert!(ctl(dir, &["list", "--json"]).contains("\"paused\""), "{sandbox:?}");
        daemon.stop();
    }
}

/// On a file system that does not tell when files were made, an image may get the number of one that was
/// deleted when it was paused. It is served; the same image, which nobody has touched, stays paused.
#[test]
fn e26_an_image_is_not_paused_because_a_deleted_one_was() {
    let dir = folder();
    let dir = dir.path();
    let at = dir.join("small");
    let small = match Mounted::on_file(at, "ext4", &["-q", "-I", "128"], 16 << 20) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let image = small.path().join("disk.img");
    let make = || {
        let file = std::fs::File::create_new(&image).unwrap();
        file.set_len(1 << 20).unwrap();
        std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap())
    };
    let serve = || {
        let mut args = ARGS;
        args[0] = "small/disk.img";
        Daemon::serve(dir, &args)
    };
    let is_paused = || ctl(dir, &["list", "--json"]).contains("\"paused\"");
    let number = make();
    let daemon = serve();
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 1, 7));
    drop((queue, device));
    ctl(dir, &["pause", "0"]);
    daemon.kill();
    let daemon = serve();
    assert!(is_paused(), "it is the same image: {}", daemon.log());
    daemon.stop();
    std::fs::remove_file(&image).unwrap();
    // Such a file system tells times in seconds: within one, two images are alike.
    std::thread::sleep(Duration::from_millis(1100));
    // It is free once nobody has it open any more. Those that get other numbers stay beside it.
    let tries = (0..500).take_while(|at| {
        let is_other = make() != number;
        if is_other {
            std::fs::rename(&image, small.path().join(format!("other-{at}"))).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        is_other
    });
    assert!(tries.count() < 500, "no number is given again");
    let daemon = serve();
    assert!(!is_paused() && daemon.log().contains("taken for another one"), "{}", daemon.log());
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 1, 7));
    drop((queue, device));
    daemon.stop();
}

/// The daemon dies when it has noted a pause and its queues still run: whoever asked for it got no
/// answer, and finds the disk paused, or would take a snapshot of one that runs.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c15_a_pause_that_was_noted_outlives_its_daemon() {
    let dir = folder();
    let dir = dir.path();
    let mut command = ringway();
    command.arg("serve").args(ARGS).current_dir(dir);
    command.env(ringway_core::kill_points::VARIABLE, "pausing:1");
    let mut daemon = Daemon::start(command);
    let mut pause = ringway();
    pause.args(["ctl", "--control", "c", "pause", "0"]).current_dir(dir);
    assert_ne!(crate::common::run(pause).status.code(), Some(0), "nobody can have answered");
    assert_eq!(daemon.wait().0.code(), None, "it was killed");
    let daemon = serve(dir, &[]);
    assert!(ctl(dir, &["list", "--json"]).contains("\"paused\""), "{}", daemon.log());
    ctl(dir, &["resume", "0"]);
    let mut device = Options::new().connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 1, 7));
    daemon.stop();
}

/// A disk changes its size while a daemon serves it, by order or because its file does, and the daemon is
/// killed: a guest that goes on is told by the next one when its first queue starts, and finds what there
/// is now.
#[test]
fn c15_a_guest_that_goes_on_is_told_of_a_size_that_changed() {
    const MIB: u64 = 1 << 20;
    let grow_file = |dir: &Path, bytes| {
        let file = std::fs::File::options().write(true).open(dir.join("disk.img")).unwrap();
        file.set_len(bytes).unwrap();
    };
    for (packed, more) in [(false, &[][..]), (true, &[]), (false, &["--isolate"])] {
        let dir = folder();
        let dir = dir.path();
        let mut daemon = serve(dir, more);
        let options =
            Options::new().packed(packed).watch_config(true).reconnect(crate::common::PATIENCE);
        let mut device = options.connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        assert!(write(&device, &mut queue, 1, 7));
        // By order, and killed before the guest has looked; by the file, which this daemon never notices;
        // smaller; paused by then; while nobody serves it.
        let changes: [(u64, &dyn Fn()); 4] = [
            (2, &|| drop(ctl(dir, &["resize", "0", "2M"]))),
            (3, &|| grow_file(dir, 3 * MIB)),
            (1, &|| drop(ctl(dir, &["resize", "0", "1M", "--shrink"]))),
            (4, &|| {
                ctl(dir, &["pause", "0"]);
                grow_file(dir, 4 * MIB);
            }),
        ];
        for (mib, change) in changes {
            let last = device.capacity();
            change();
            daemon.kill();
            daemon = serve(dir, more);
            let is_paused = ctl(dir, &["list", "--json"]).contains("\"paused\"");
            assert_eq!(is_paused, mib == 4);
            if is_paused {
                ctl(dir, &["resume", "0"]);
            }
            // Through the next daemon, so the connection is there.
            assert!(write(&device, &mut queue, 1, 8), "{more:?}");
            await_change(&mut device);
            assert_eq!(device.capacity(), mib * MIB, "{more:?}, packed: {packed}, was {last}");
            assert!(write(&device, &mut queue, mib * 2048 - 1, 9), "{more:?}");
            assert!(!write(&device, &mut queue, mib * 2048, 9), "{more:?}");
        }
        daemon.kill();
        grow_file(dir, 5 * MIB);
        daemon = serve(dir, more);
        assert!(write(&device, &mut queue, 1, 8), "{more:?}");
        await_change(&mut device);
        assert_eq!(device.capacity(), 5 * MIB);
        drop((queue, device));
        daemon.stop();
    }
}

/// Waits until the front-end was told that the configuration space has changed, and takes it over.
fn await_change(device: &mut Device) {
    let deadline = Instant::now() + crate::common::PATIENCE;
    while !device.config_changed().unwrap() {
        assert!(Instant::now() < deadline, "nobody told it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The daemon dies when the file has its new size, and nobody was told: so the next one tells, and what
/// was asked for has happened.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c15_a_resize_that_a_kill_interrupts_is_told_by_the_next_daemon() {
    for (point, size) in
        [("grown", "2M"), ("settled", "512K"), ("resized", "512K"), ("resized", "2M")]
    {
        let dir = folder();
        let dir = dir.path();
        let mut command = ringway();
        command.arg("serve").args(ARGS).current_dir(dir);
        command.env(ringway_core::kill_points::VARIABLE, format!("{point}:1"));
        let mut daemon = Daemon::start(command);
        let options = Options::new().watch_config(true).reconnect(crate::common::PATIENCE);
        let mut device = options.connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        assert!(write(&device, &mut queue, 1, 7));
        let mut resize = ringway();
        resize.args(["ctl", "--control", "c", "resize", "0", size, "--shrink"]).current_dir(dir);
        assert_ne!(crate::common::run(resize).status.code(), Some(0), "nobody can have answered");
        assert_eq!(daemon.wait().0.code(), None, "it was killed");
        let daemon = serve(dir, &[]);
        let bytes = dir.join("disk.img").metadata().unwrap().len();
        assert!(write(&device, &mut queue, 1, 8));
        await_change(&mut device);
        assert_eq!(device.capacity(), bytes, "{point}, {size}");
        assert!(write(&device, &mut queue, bytes / 512 - 1, 9));
        drop((queue, device));
        daemon.stop();
    }
}

/// What a loop device has been told to flush while `count` writes were made, one after the other.
fn flushes_of(
    device: &Device,
    queue: &mut BlkQueue<()>,
    disk: &LoopDevice,
    (count, byte): (u64, u8),
) -> u64 {
    let before = disk.flushes();
    (0..count).for_each(|sector| assert!(write(device, queue, 8 * sector, byte)));
    disk.flushes() - before
}

/// The device itself counts how often it is told to flush, whatever the daemons say of themselves. A
/// guest that has switched its write cache off has every write flushed before the answer, by each
/// daemon that serves it; and when it is on, by none.
#[test]
fn c06_what_the_device_counts_while_daemons_come_and_go() {
    const WRITES: u64 = 16;
    for (cache, engine) in [
        ("none", "io_uring"),
        ("none", "threads"),
        ("writeback", "io_uring"),
        ("writeback", "threads"),
    ] {
        let dir = folder();
        let disk = match LoopDevice::new(dir.path(), 1 << 20, 512) {
            Ok(disk) => disk,
            Err(lack) => return lack.skip(),
        };
        let dir = dir.path();
        let image = disk.path().to_str().unwrap();
        let args = [image, "--socket", "s", "--cache", cache, "--engine", engine];
        let serve = || Daemon::serve(dir, &args);
        let daemon = serve();
        let options = Options::new().reconnect(crate::common::PATIENCE);
        let mut device = options.connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        let mut flushes =
            |device: &Device, byte| flushes_of(device, &mut queue, &disk, (WRITES, byte));
        assert_eq!(flushes(&device, 1), 0, "{cache}, {engine}: the cache is on");
        device.set_writeback(false).unwrap();
        let first = flushes(&device, 2);
        assert!(first >= WRITES, "{cache}, {engine}: {first} flushes in the first daemon");
        daemon.kill();
        let daemon = serve();
        let killed = flushes(&device, 3);
        assert!(killed >= WRITES, "{cache}, {engine}: {killed} flushes after SIGKILL");
        daemon.stop();
        let daemon = serve();
        let flushed = flushes(&device, 4);
        assert!(flushed >= WRITES, "{cache}, {engine}: {flushed} flushes after SIGTERM");
        device.set_writeback(true).unwrap();
        assert_eq!(flushes(&device, 5), 0, "{cache}, {engine}: it is on again");
        daemon.kill();
        let daemon = serve();
        assert_eq!(flushes(&device, 6), 0, "{cache}, {engine}: it stays on");
        drop((queue, device));
        daemon.stop();
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
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("--state-dir: file"), "{message}");
}

/// A sync fails, and the daemon dies at any place from there on: the guest that goes on never has a
/// flush that succeeds, one that begins afresh has. The error is made in the first daemon; the file's
/// own syncs succeed throughout, as those of Linux do after they have told an error once.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c04_a_failed_flush_outlives_the_daemon() {
    use ringway_core::kill_points::{FAULTS, VARIABLE};
    let flush = |queue: &mut ringway_driver::BlkQueue<()>| {
        queue.flush(()).unwrap();
        assert!(queue.wait(Some(crate::common::PATIENCE)).unwrap(), "no answer");
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
            let options = Options::new().reconnect(crate::common::PATIENCE);
            let mut device = options.connect(dir.join("s")).unwrap();
            let mut queue = device.queue::<()>().unwrap();
            assert!(flush(&mut queue) && write(&device, &mut queue, 1, 1));
            if point.is_some() {
                queue.flush(()).unwrap();
                queue.submit().unwrap();
                daemon.wait();
            } else {
                assert!(!flush(&mut queue));
                // This daemon does not know what it has lost.
                says(
                    dir,
                    &["ctl", "--control", "c", "retry", "0", "--flushes"],
                    1,
                    &["restart the daemon first"],
                );
                daemon.kill();
            }
            let daemon = serve(dir, &[]);
            if point.is_some() {
                // The flush that was under way is carried out again.
                assert!(queue.wait(Some(crate::common::PATIENCE)).unwrap(), "no answer");
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

/// A flush has failed, as the page of the only image says from now on.
fn a_flush_has_failed(dir: &Path) {
    let state = dir.join("state");
    let page = names(&state).into_iter().find(|name| name.starts_with("image-")).expect("a page");
    let page = std::fs::File::options().write(true).open(state.join(page)).unwrap();
    page.write_all_at(&[1], 0).unwrap();
}

fn is_kept(dir: &Path) -> bool {
    names(&dir.join("state")).iter().any(|name| name.starts_with("image-"))
}

/// Clients of NBD and front-ends that come back show nobody whether they begin: a person says what goes on. Nobody can
/// say that of what this daemon has seen itself.
#[test]
fn b66_flushes_go_on_when_somebody_says_so() {
    let flush = |queue: &mut BlkQueue<()>| {
        queue.flush(()).unwrap();
        finish(queue).0
    };
    for more in [&[][..], &["--isolate"]] {
        let dir = folder();
        let dir = dir.path();
        let daemon = serve(dir, more);
        let options = Options::new().reconnect(crate::common::PATIENCE);
        let mut device = options.connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        assert!(ctl(dir, &["retry", "0", "--flushes"]).contains("no flush had failed"));
        assert!(write(&device, &mut queue, 1, 7));
        a_flush_has_failed(dir);
        kill_all(daemon);
        let daemon = serve(dir, more);
        let shown = |is: bool| {
            let list: serde_json::Value =
                serde_json::from_str(&ctl(dir, &["list", "--json"])).unwrap();
            assert_eq!(list["disks"][0]["storage"]["flushes_fail"], is, "{list}");
            assert_eq!(ctl(dir, &["list"]).contains("its flushes fail"), is);
        };
        shown(true);
        assert!(!flush(&mut queue));
        assert!(daemon.log().contains("ctl retry --flushes"), "{}", daemon.log());
        assert!(ctl(dir, &["retry", "0", "--flushes"]).contains("flushes are tried again"));
        shown(false);
        assert!(flush(&mut queue), "{}", daemon.log());
        assert!(ctl(dir, &["retry", "0", "--flushes"]).contains("no flush had failed"));
        kill_all(daemon);
        let daemon = serve(dir, more);
        assert!(flush(&mut queue), "{}", daemon.log());
        // Its guest may come back, and goes on then.
        a_flush_has_failed(dir);
        kill_all(daemon);
        let daemon = serve(dir, more);
        ctl(dir, &["remove", "0"]);
        assert!(is_kept(dir), "{}", daemon.log());
        daemon.stop();
    }
}

/// The clients of a disk are those that it has until it is removed, through all daemons; or until somebody says so.
#[test]
fn b66_whoever_comes_after_a_disk_for_nbd_clients_was_removed_begins_afresh() {
    let dir = folder();
    let dir = dir.path();
    let serve = || {
        let mut command = ringway();
        let args = [
            "nbd",
            "disk.img",
            "--format",
            "raw",
            "--listen",
            "unix:n.sock",
            "--export",
            "disk",
            "--state-dir",
            "state",
        ];
        command.args(args).args(["--control", "c"]).current_dir(dir);
        Daemon::start(command)
    };
    let flushes = || {
        let client = UnixStream::connect(dir.join("n.sock")).unwrap();
        Client::new(client, SIMPLE).call(command::FLUSH, 0, (0, 0), &[]).error == 0
    };
    let fails = || {
        let daemon = serve();
        assert!(flushes(), "{}", daemon.log());
        a_flush_has_failed(dir);
        kill_all(daemon);
        for _ in 0..2 {
            let daemon = serve();
            assert!(!flushes() && !flushes(), "{}", daemon.log());
            daemon.stop();
        }
        serve()
    };
    let daemon = fails();
    ctl(dir, &["retry", "0", "--flushes"]);
    assert!(flushes(), "{}", daemon.log());
    daemon.stop();
    let daemon = fails();
    ctl(dir, &["remove", "0"]);
    assert!(!is_kept(dir), "{}", daemon.log());
    daemon.stop();
    let daemon = serve();
    assert!(flushes(), "{}", daemon.log());
    daemon.stop();
}

/// The process of the only disk, which has one of its own, once there is one.
fn process_of_disk(dir: &Path) -> Option<i32> {
    let list: serde_json::Value = serde_json::from_str(&ctl(dir, &["list", "--json"])).unwrap();
    i32::try_from(list["disks"][0]["process"].as_i64()?).ok()
}

/// Kills it, and waits until another one serves the disk.
fn replace_process(dir: &Path) {
    let old = process_of_disk(dir).expect("the disk has a process");
    // SAFETY: a process of this test's own daemon, which was there a moment ago.
    assert_eq!(unsafe { libc::kill(old, libc::SIGKILL) }, 0);
    let deadline = Instant::now() + crate::common::PATIENCE;
    while process_of_disk(dir).is_none_or(|process| process == old) {
        assert!(Instant::now() < deadline, "it is not served again");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process of an isolated disk is killed, and its daemon starts another one: that is paused as the one
/// before was, and tells its guest of a size that has changed.
#[test]
fn c15_what_is_kept_outlives_the_process_of_an_isolated_disk() {
    let dir = folder();
    let dir = dir.path();
    let daemon = serve(dir, &["--isolate"]);
    let options = Options::new().watch_config(true).reconnect(crate::common::PATIENCE);
    let mut device = options.connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    assert!(write(&device, &mut queue, 1, 7));
    ctl(dir, &["pause", "0"]);
    replace_process(dir);
    assert!(ctl(dir, &["list", "--json"]).contains("\"paused\""), "{}", daemon.log());
    ctl(dir, &["resume", "0"]);
    assert!(write(&device, &mut queue, 1, 8));
    let image = std::fs::File::options().write(true).open(dir.join("disk.img")).unwrap();
    image.set_len(2 << 20).unwrap();
    replace_process(dir);
    assert!(write(&device, &mut queue, 1, 9));
    await_change(&mut device);
    assert_eq!(device.capacity(), 2 << 20);
    assert!(write(&device, &mut queue, 4095, 9));
    drop((queue, device));
    daemon.stop();
}

/// As [`c04_a_failed_flush_outlives_the_daemon`], for the process of an isolated disk: each one fails its
/// second sync, so the first of the next one would succeed if nothing were known.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c04_a_failed_flush_outlives_the_process_of_an_isolated_disk() {
    let dir = folder();
    let dir = dir.path();
    let mut command = ringway();
    command.arg("serve").args(ARGS).arg("--isolate").current_dir(dir);
    command.env(ringway_core::kill_points::FAULTS, "sync=2");
    let daemon = Daemon::start(command);
    let options = Options::new().reconnect(crate::common::PATIENCE);
    let mut device = options.connect(dir.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let flush = |queue: &mut BlkQueue<()>| {
        queue.flush(()).unwrap();
        crate::common::finish(queue).0
    };
    assert!(flush(&mut queue) && write(&device, &mut queue, 1, 1));
    assert!(!flush(&mut queue), "the second one fails");
    for _ in 0..2 {
        replace_process(dir);
        assert!(write(&device, &mut queue, 1, 2));
        assert!(!flush(&mut queue), "a failed flush was forgotten");
    }
    drop((queue, device));
    daemon.stop();
}

/// As before, for a disk that has come after its daemon had become another user: what is kept of it is in root's
/// folder, which that user cannot enter.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn e33_what_is_kept_outlives_the_process_of_an_added_disk_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return ringway_testkit::skip(ringway_testkit::Need::Root, "to change the user");
    }
    let dir = folder();
    let dir = dir.path();
    let own = dir.join("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("a.img"), vec![0; 1 << 20]).unwrap();
    for path in [&own, &own.join("a.img")] {
        std::os::unix::fs::chown(path, Some(65534), None).unwrap();
    }
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = ringway();
    command.args(["serve", "null:1M", "--socket", "n", "--control", "c", "--state-dir", "state"]);
    command.args(["--isolate", "--user", "nobody"]).current_dir(dir);
    command.env(ringway_core::kill_points::FAULTS, "sync=2");
    let daemon = Daemon::start(command);
    ctl(dir, &["remove", "0"]);
    let words =
        ["add", "own/a.img", "--format", "raw", "--cache", "writeback", "--socket", "own/s"];
    ctl(dir, &words);
    assert_eq!(std::fs::read_dir(dir.join("state")).unwrap().count(), 1, "{}", daemon.log());
    let its = process_of_disk(dir).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{its}/status")).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    assert!(status.contains("CapPrm:\t0000000000000000"), "{status}");
    let options = Options::new().reconnect(crate::common::PATIENCE);
    let mut device = options.connect(own.join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    let flush = |queue: &mut BlkQueue<()>| {
        queue.flush(()).unwrap();
        crate::common::finish(queue).0
    };
    assert!(flush(&mut queue) && write(&device, &mut queue, 1, 1));
    assert!(!flush(&mut queue), "the second one fails");
    for _ in 0..2 {
        replace_process(dir);
        assert!(write(&device, &mut queue, 1, 2));
        assert!(!flush(&mut queue), "a failed flush was forgotten: {}", daemon.log());
    }
    drop((queue, device));
    daemon.stop();
}

/// The host has really lost what was written (a device over a file system that is full, with the disk or with the data
/// of a qcow2 image), has told the daemon so, and would not tell anybody again. The daemon dies before it has noted that,
/// or after: the flush is carried out once more by the next one, and fails.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c04_what_the_host_lost_is_known_if_the_daemon_dies_before_it_notes_it() {
    let points = ["flush-failing:1", "flush-failed:1"];
    for (point, apart) in points.into_iter().flat_map(|point| [(point, false), (point, true)]) {
        let dir = folder();
        let dir = dir.path();
        let small = match Mounted::in_memory(dir.join("small"), 64 << 10) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let disk = match LoopDevice::new(small.path(), 1 << 20, 512) {
            Ok(disk) => disk,
            Err(lack) => return lack.skip(),
        };
        let mut args = ARGS.to_vec();
        args[0] = disk.path().to_str().unwrap();
        if apart {
            let options = format!("data_file={},data_file_raw=on", args[0]);
            let create = ["create", "-q", "-f", "qcow2", "-o", &options, "top.qcow2", "1M"];
            match Command::new("qemu-img").args(create).current_dir(dir).status() {
                Ok(status) => assert!(status.success()),
                Err(_) => return skip(Need::Qemu, "qemu-img".to_owned()),
            }
            args[0] = "top.qcow2";
            args.extend(["--format", "qcow2", "--backing-root", "/"]);
        }
        let mut command = ringway();
        command.arg("serve").args(&args).current_dir(dir);
        command.env(ringway_core::kill_points::VARIABLE, point);
        let mut daemon = Daemon::start(command);
        let mut device =
            Options::new().reconnect(crate::common::PATIENCE).connect(dir.join("s")).unwrap();
        let mut queue = device.queue::<()>().unwrap();
        for at in 0..16u64 {
            let mut buffer = device.pool().alloc(65_536).unwrap();
            buffer.fill(1);
            queue.write(at * 65_536, buffer, ()).unwrap();
            assert!(crate::common::finish(&mut queue).0, "{point}: it is in the page cache");
        }
        queue.flush(()).unwrap();
        queue.submit().unwrap();
        assert_eq!(daemon.wait().0.code(), None, "{point}: it was killed: {}", daemon.log());
        let daemon = Daemon::serve(dir, &args);
        assert!(
            !crate::common::finish(&mut queue).0,
            "{point}: what was lost was said to be durable"
        );
        queue.flush(()).unwrap();
        assert!(!crate::common::finish(&mut queue).0, "{point}: and now");
        assert!(daemon.log().contains("a flush had failed"), "{point}: {}", daemon.log());
        drop((queue, device));
        daemon.stop();
        std::fs::remove_file(disk.backing()).unwrap();
    }
}

/// A new image has its name and nothing in it, and what was written to the one below it turns out to be lost when the
/// next daemon starts. The host tells it that one alone.
#[test]
fn c100_what_is_lost_below_a_new_image_is_known_to_whoever_starts_next() {
    let dir = folder();
    let dir = dir.path();
    let small = match Mounted::in_memory(dir.join("small"), 64 << 10) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let below = match LoopDevice::new(small.path(), 1 << 20, 512) {
        Ok(below) => below,
        Err(lack) => return lack.skip(),
    };
    let name = below.path().to_str().unwrap();
    for args in [
        &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", name, "512k"][..],
        &["create", "-q", "-f", "qcow2", "-b", name, "-F", "qcow2", "top.qcow2"],
    ] {
        match Command::new("qemu-img").args(args).current_dir(dir).status() {
            Ok(status) => assert!(status.success()),
            Err(_) => return skip(Need::Qemu, "qemu-img".to_owned()),
        }
    }
    let device = File::options().read(true).write(true).open(below.path()).unwrap();
    device.sync_all().unwrap();
    let mut args = ARGS.to_vec();
    args[0] = "top.qcow2";
    args.extend(["--format", "qcow2", "--backing-root", "/"]);
    let daemon = Daemon::serve(dir, &args);
    let mut guest =
        Options::new().reconnect(crate::common::PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = guest.queue::<()>().unwrap();
    queue.flush(()).unwrap();
    assert!(finish(&mut queue).0);
    kill_all(daemon);
    // More than there is room for, behind its tables. Apart, because a loop device takes the half of a write for all of it.
    for at in (512 << 10..1 << 20).step_by(8192) {
        device.write_all_at(&[1; 4096], at).unwrap();
    }
    let mut command = ringway();
    command.arg("serve").args(&args).current_dir(dir);
    let refused = crate::common::run(command);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("cannot be made durable"), "{why}");
    let daemon = Daemon::serve(dir, &args);
    queue.flush(()).unwrap();
    assert!(!finish(&mut queue).0, "what was lost was said to be durable: {}", daemon.log());
    drop((queue, guest));
    daemon.stop();
    drop(device);
    std::fs::remove_file(below.backing()).unwrap();
}
