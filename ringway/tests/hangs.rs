//! Paths on a file system that hangs.
#![allow(missing_docs)]

use crate::common::guest::wait_for as until;
use crate::common::{Daemon, PATIENCE, folder, ringway, run, text, write};
use ringway_driver::Options;
use ringway_testkit::LateStore;
use std::io::{Read, Write};
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
