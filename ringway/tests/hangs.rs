//! Paths on a file system that hangs.
#![allow(missing_docs)]

use crate::common::guest::wait_for as until;
use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, text, write};
use ringway_driver::Options;
use ringway_testkit::LateStore;
use ringway_testkit::raw::{F_FLUSH, F_VERSION_1, RawGuest};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

fn ctl(dir: &Path, args: &[&str]) -> (bool, String) {
    let mut command = ringway();
    command.args(["ctl", "--control", "c"]).args(args).current_dir(dir);
    let output = run(command);
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn e34_a_path_that_hangs_keeps_nobody_else_waiting() {
    let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
    let dir = dir.path();
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    std::fs::write(dir.join("other.img"), vec![0; 1 << 20]).unwrap();
    let path = mount.path().join("hangs");
    let path = path.to_str().unwrap();
    let mut daemon = Daemon::serve(dir, &["disk.img", "--socket", "s", "--control", "c"]);
    let mut add = UnixStream::connect(dir.join("c")).unwrap();
    let disk = serde_json::json!({ "image": path, "format": "raw", "socket": dir.join("t") });
    let request = serde_json::json!({ "command": "add", "disk": disk });
    add.write_all(format!("{request}\n").as_bytes()).unwrap();
    until("nobody looks it up", || store.hanging() > 0);
    let (done, said) = ctl(dir, &["drain", "/no/such/path"]);
    assert!(!done && !said.contains("hangs"), "{said}");
    let (done, said) = ctl(dir, &["add", "other.img", "--format", "raw", "--socket", "u"]);
    assert!(done, "{said}");
    add.set_nonblocking(true).unwrap();
    let silent = add.read(&mut [0; 64]).unwrap_err();
    assert_eq!(silent.kind(), std::io::ErrorKind::WouldBlock, "its path is waited for");
    let mut device = Options::new().patience(PATIENCE).connect(dir.join("u")).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 1, 9));
    drop((queue, device));
    daemon.signal(libc::SIGTERM);
    let (status, _) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    assert!(!dir.join("u").exists() && !dir.join("s").exists(), "it ended in order");
    store.let_go();
}

/// Also one with a process of its own; a reload with such a disk ends, and the next one is not in its way.
#[test]
fn e62_a_disk_that_hangs_at_the_start_keeps_no_other_from_being_served() {
    let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
    let dir = dir.path();
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let hangs = mount.path().join("hangs");
    let hangs = hangs.to_str().unwrap();
    let disk = |image: &str, socket: &str, more: &str| {
        format!("[[disk]]\nimage = '{image}'\nformat = 'raw'\nsocket = '{socket}'\n{more}\n")
    };
    let say = |disks: &[String]| {
        std::fs::write(dir.join("c.toml"), format!("control = 'c'\n{}", disks.concat())).unwrap();
    };
    let (good, bad) = (disk("disk.img", "s", ""), disk(hangs, "t", "read-only = true"));
    say(&[bad, good.clone(), disk(hangs, "u", "isolate = true\nread-only = true")]);
    let mut daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let log = daemon.log();
    let names_it = |line: &str| line.contains("c.toml, line 2: ") && line.contains(hangs);
    assert!(log.lines().any(names_it), "{log}");
    let mut device = Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 1, 9));
    let (done, said) = ctl(dir, &["list"]);
    assert!(done && said.matches("a disk is not served").count() == 2, "{said}");
    let (done, said) = ctl(dir, &["reload"]);
    assert!(!done && said.contains(hangs) && said.contains("its file system hangs"), "{said}");
    // `ctl` would look at it itself.
    let mut add = UnixStream::connect(dir.join("c")).unwrap();
    let asked = serde_json::json!({ "image": hangs, "format": "raw", "socket": dir.join("v") });
    let request = serde_json::json!({ "command": "add", "disk": asked });
    add.write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut answer = [0; 4096];
    let got = add.read(&mut answer).unwrap();
    let said = text(&answer[..got]);
    assert!(said.contains("its file system hangs"), "{said}");
    say(&[good, disk("null:1M", "w", "").replace("format = 'raw'\n", "")]);
    let (done, said) = ctl(dir, &["reload"]);
    assert!(done, "{said}");
    let (done, said) = ctl(dir, &["list"]);
    assert!(done && said.contains("null:1M") && !said.contains("not served"), "{said}");
    assert!(write(&device, &mut queue, 1, 8));
    drop((queue, device));
    daemon.signal(libc::SIGTERM);
    let (status, _) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    store.let_go();
}

/// There is nothing else to serve, and no way to be given it.
#[test]
fn e62_a_daemon_whose_only_disk_hangs_says_so_and_ends() {
    let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let mut command = ringway();
    let image = mount.path().join("hangs");
    command.arg("serve").arg(&image).args(["--format", "raw", "--socket", "s"]);
    command.current_dir(dir.path());
    let output = run(command);
    let said = text(&output.stderr);
    let names_it = said.contains(image.to_str().unwrap()) && said.contains("its file system hangs");
    assert!(output.status.code() == Some(1) && names_it, "{said}");
    store.let_go();
}

/// The one that hangs was asked for a snapshot before, so it is looked up where its image is by now.
#[test]
fn e63_a_disk_that_is_named_exactly_is_found_without_looking_at_others() {
    let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
    let dir = dir.path();
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let (link, other) = (dir.join("link.img"), dir.join("other.img"));
    std::os::unix::fs::symlink(dir.join("disk.img"), &link).unwrap();
    std::fs::write(&other, vec![0; 1 << 20]).unwrap();
    let (image, named) = (link.to_str().unwrap(), other.to_str().unwrap());
    let words = [image, "--format", "raw", "--read-only", "--isolate"];
    let daemon = Daemon::serve(dir, &[&words[..], &["--socket", "s", "--control", "c"]].concat());
    let (done, said) = ctl(dir, &["add", named, "--format", "raw", "--socket", "t"]);
    assert!(done, "{said}");
    let (done, said) = ctl(dir, &["snapshot", image, "old.img"]);
    assert!(!done && said.contains("read-only"), "{said}");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(mount.path().join("hangs"), &link).unwrap();
    let (done, said) = ctl(dir, &["drain", named]);
    assert!(done && store.hanging() == 0, "{said}");
    // Who names none of them exactly has all of them looked at.
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| ctl(dir, &["drain", "/no/such/path"]));
        until("nobody looks it up", || store.hanging() > 0);
        store.let_go();
        assert!(!asks.join().unwrap().0);
    });
    daemon.stop();
}

/// A guest comes by live migration, and the storage of its image hangs when its tables are read.
#[test]
fn e70_an_incoming_image_on_hung_storage_keeps_nobody_else_waiting() {
    let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
    let dir = dir.path();
    let mut create = ringway();
    create.args(["create", "image.qcow2", "1M"]).current_dir(dir);
    assert!(run(create).status.success());
    let image = std::fs::read(dir.join("image.qcow2")).unwrap();
    let store = match LateStore::mount(mount.path(), image.len()) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    File::options().write(true).open(store.path()).unwrap().write_all_at(&image, 0).unwrap();
    let path = store.path().to_str().unwrap();
    let words = [path, "--format", "qcow2", "--incoming", "--socket", "s", "--control", "c"];
    let daemon = Daemon::serve(dir, &words);
    let (done, said) = ctl(dir, &["add", "disk.img", "--format", "raw", "--socket", "t"]);
    assert!(done, "{said}");
    store.hang_reads();
    let line = UnixStream::connect(dir.join("s")).unwrap();
    let comes = std::thread::spawn(move || {
        let mut guest = RawGuest::connect(line, F_VERSION_1 | F_FLUSH);
        (guest.start_queue(0).unwrap(), guest)
    });
    until("nobody reads its tables", || store.hanging() > 0);
    let unlocked = r#""state": "unlocked""#;
    let (done, said) = ctl(dir, &["list", "--json"]);
    assert!(done && said.contains("disk.img") && said.contains(unlocked), "{said}");
    store.let_go();
    let (started, guest) = comes.join().unwrap();
    assert!(started);
    until("its image is not locked", || !ctl(dir, &["list", "--json"]).1.contains(unlocked));
    drop(guest);
    daemon.stop();
}

/// Front-ends come to a disk whose file system does not answer, and to a neighbour of the same worker.
#[test]
fn b67_a_guest_that_comes_to_a_hung_file_system_keeps_its_worker_for_others() {
    for engine in ["io_uring", "threads"] {
        let (dir, mount) = (folder(), tempfile::tempdir().unwrap());
        let dir = dir.path();
        let store = match LateStore::mount(mount.path(), 1 << 20) {
            Ok(store) => store,
            Err(lack) => return lack.skip(),
        };
        let disk = |image: &str, socket| {
            format!(
                "[[disk]]\nimage = '{image}'\nsocket = '{socket}'\nformat = 'raw'\nqueues = 1\nengine = '{engine}'\n"
            )
        };
        let slow = store.path().display().to_string();
        let disks = format!("workers = 1\n{}{}", disk(&slow, "slow"), disk("disk.img", "fast"));
        std::fs::write(dir.join("c.toml"), disks).unwrap();
        let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
        let mut neighbour = Options::new().patience(PATIENCE).connect(dir.join("fast")).unwrap();
        let mut fast = neighbour.queue().unwrap();
        store.hang_reads();
        let at = dir.join("slow");
        let comes = std::thread::spawn(move || {
            let mut device = Options::new().patience(PATIENCE).connect(at).unwrap();
            let mut queue = device.queue().unwrap();
            read(&device, &mut queue, 1)
        });
        until("nothing is asked of it", || store.hanging() > 0);
        for round in 0..20 {
            assert!(write(&neighbour, &mut fast, 1, round), "{engine}: {}", daemon.log());
        }
        store.let_go();
        assert_eq!(comes.join().unwrap(), [0; 512], "{engine}");
        drop((fast, neighbour));
        daemon.stop();
    }
}
