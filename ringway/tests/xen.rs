//! `ringway serve --xen` in its sandbox, against a xenstore of the test's own: what is said to the
//! toolstack, whose options a disk has, who opens what. There is no hypervisor here, so no front-end
//! ever connects; `e2e/tests/xen.rs` has a real one.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text};
use ringway_testkit::FakeStore;
use ringway_testkit::{Need, skip};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

const XVDA: u32 = 51712;
const XVDB: u32 = 51728;

/// A xenstore at `dir/store`, and what the toolstack writes to it.
struct Toolstack(FakeStore);

impl Toolstack {
    fn new(dir: &Path) -> Self {
        let store = FakeStore::default();
        store.listen(&dir.join("store")).unwrap();
        Self(store)
    }

    /// As `xl block-attach` does.
    fn attach(&self, (domid, guest): (u16, &str), device: u32, image: &Path, mode: &str) {
        self.0.set(&format!("/local/domain/{domid}/name"), guest);
        let front = format!("/local/domain/{domid}/device/vbd/{device}");
        self.0.set(&format!("{front}/state"), "1");
        let back = format!("backend/vbd3/{domid}/{device}");
        for (key, value) in [
            ("frontend", front.as_str()),
            ("mode", mode),
            ("online", "1"),
            ("state", "1"),
            ("params", image.to_str().unwrap()),
        ] {
            self.0.set(&format!("{back}/{key}"), value);
        }
    }

    fn key(&self, domid: u16, device: u32, key: &str) -> String {
        self.0.get(&format!("backend/vbd3/{domid}/{device}/{key}")).unwrap_or_default()
    }

    fn state(&self, domid: u16, device: u32) -> String {
        self.key(domid, device, "state")
    }

    /// Waits until a disk is in a state.
    fn until(&self, daemon: &Daemon, (domid, device): (u16, u32), state: &str) {
        until(daemon, || self.state(domid, device) == state);
    }
}

fn until(daemon: &Daemon, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "it does not happen:\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A line of /proc/PID/status.
fn status(pid: u32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn list(dir: &Path) -> String {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "list", "--json"]).current_dir(dir);
    text(&run(command).stdout).replace([' ', '\n'], "")
}

const OPTIONS: [&str; 7] =
    ["--xen", "--xen-store", "store", "--xen-records", "records", "--control", "ctl"];

fn root() -> bool {
    // SAFETY: no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        skip(Need::Root, "to change the user");
    }
    root
}

#[test]
fn disks_come_and_go_in_the_sandbox() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    let image = dir.path().join("disk.img");
    let daemon = Daemon::serve(dir.path(), &OPTIONS);
    assert!(
        daemon.log().contains("sandbox on: 51 system calls (workers 31 of them"),
        "{}",
        daemon.log()
    );
    assert_eq!(status(daemon.pid(), "Seccomp"), "2");
    xen.attach((1, "a"), XVDA, &image, "w");
    xen.until(&daemon, (1, XVDA), "2");
    assert_eq!(xen.key(1, XVDA, "sectors"), "2048");
    assert_eq!(xen.key(1, XVDA, "info"), "0");
    // Attached is not connected, whatever the front-end is about to do.
    let message = list(dir.path());
    assert!(message.contains("\"device\":\"backend/vbd3/1/51712\""), "{message}");
    assert!(message.contains("\"connected\":false"), "{message}");
    // There is no grant device here: the helper says so, and the front-end is told to close.
    let front = "/local/domain/1/device/vbd/51712";
    xen.0.set(&format!("{front}/ring-ref"), "8");
    xen.0.set(&format!("{front}/event-channel"), "9");
    if !Path::new("/dev/xen/gntdev").exists() {
        xen.0.set(&format!("{front}/state"), "3");
        xen.until(&daemon, (1, XVDA), "5");
        assert!(daemon.log().contains("/dev/xen/gntdev: No such file"), "{}", daemon.log());
        assert!(list(dir.path()).contains("\"connected\":false"));
        // It comes back, after its driver was loaded again.
        xen.0.set(&format!("{front}/state"), "6");
        xen.until(&daemon, (1, XVDA), "6");
        xen.0.set(&format!("{front}/state"), "1");
        xen.until(&daemon, (1, XVDA), "2");
    }
    // The same image, for another guest, is refused; the toolstack is told.
    xen.attach((2, "b"), XVDA, &image, "w");
    xen.until(&daemon, (2, XVDA), "6");
    let error = xen.0.get("error/backend/vbd3/2/51712/error").unwrap();
    assert!(error.contains("is served"), "{error}");
    xen.0.remove("backend/vbd3/1/51712");
    until(&daemon, || list(dir.path()).contains("\"disks\":[]"));
    daemon.stop();
}

#[test]
fn options_are_those_of_the_first_table_that_fits() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    for name in ["log.img", "base.img"] {
        std::fs::copy(dir.path().join("disk.img"), dir.path().join(name)).unwrap();
    }
    std::os::unix::fs::symlink("base.img", dir.path().join("link.img")).unwrap();
    let config = "control = 'ctl'\n[xen]\nstore = 'store'\nrecords = 'records'\nqueues = 2\n\
        [[xen.disk]]\nguest = 'db'\nvdev = 'xvdb'\nqueues = 3\ncache = 'writethrough'\n\
        [[xen.disk]]\nimage = 'base.img'\nread-only = true\n\
        [[xen.disk]]\nguest = 'bad'\nengine = 'linux-aio'\ncache = 'writeback'\n";
    std::fs::write(dir.path().join("xen.toml"), config).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "xen.toml"]);
    xen.attach((1, "db"), XVDA, &dir.path().join("disk.img"), "w");
    xen.attach((1, "db"), XVDB, &dir.path().join("log.img"), "w");
    // Its image by another name.
    xen.attach((2, "web"), XVDB, &dir.path().join("link.img"), "w");
    for at in [(1, XVDA), (1, XVDB), (2, XVDB)] {
        xen.until(&daemon, at, "2");
    }
    let said = |(domid, device)| {
        ["multi-queue-max-queues", "feature-flush-cache", "info"]
            .map(|key| xen.key(domid, device, key))
    };
    assert_eq!(said((1, XVDA)), ["2", "1", "0"]);
    assert_eq!(said((1, XVDB)), ["3", "0", "0"]);
    assert_eq!(said((2, XVDB)), ["2", "1", "4"]);
    assert!(daemon.log().contains("1/51728: its options are those of xen.toml, line 6"));
    // What cannot be served says whose words they are.
    xen.attach((3, "bad"), XVDA, &dir.path().join("other.img"), "w");
    std::fs::copy(dir.path().join("disk.img"), dir.path().join("other.img")).unwrap();
    xen.until(&daemon, (3, XVDA), "6");
    let error = xen.0.get("error/backend/vbd3/3/51712/error").unwrap();
    assert!(error.contains("xen.toml, line 14: --engine linux-aio"), "{error}");
    daemon.stop();
}

#[test]
fn limits_are_those_of_the_tables_until_ctl_changes_them() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    std::fs::copy(dir.path().join("disk.img"), dir.path().join("log.img")).unwrap();
    let config = "control = 'ctl'\n\
        [[limit-group]]\nname = 'gold'\nlimits = { iops = 5000 }\n\
        [xen]\nstore = 'store'\nrecords = 'records'\nlimits = { bps = '100M', iops = 300 }\n\
        [[xen.disk]]\nguest = 'db'\nlimits = { bps = 'none', iops = 800 }\nlimit-group = 'gold'\n";
    std::fs::write(dir.path().join("xen.toml"), config).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "xen.toml"]);
    xen.attach((1, "web"), XVDA, &dir.path().join("disk.img"), "w");
    xen.until(&daemon, (1, XVDA), "2");
    xen.attach((2, "db"), XVDA, &dir.path().join("log.img"), "w");
    xen.until(&daemon, (2, XVDA), "2");
    let message = list(dir.path());
    for words in [
        "\"limit_group\":null,\"limits\":{\"bps\":104857600,\"iops\":300}",
        "\"limit_group\":\"gold\",\"limits\":{\"iops\":800}",
        "\"disks\":[1],\"limits\":{\"iops\":5000},\"name\":\"gold\"",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "limit"]).args(args).current_dir(dir.path());
        text(&run(command).stdout)
    };
    assert!(ctl(&["0", "--lift", "--iops", "50"]).ends_with(": iops 50\n"));
    assert!(ctl(&["1", "--group", "none"]).ends_with("iops 800\n"));
    daemon.stop();
}

#[test]
fn another_user_has_what_root_opens() {
    if !root() {
        return;
    }
    let dir = folder();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let xen = Toolstack::new(dir.path());
    // As xenstored does: whoever is not root cannot connect.
    let closed = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(dir.path().join("store"), closed.clone()).unwrap();
    let image = |name: &str, owner| {
        let path = dir.path().join(name);
        std::fs::copy(dir.path().join("disk.img"), &path).unwrap();
        std::fs::set_permissions(&path, closed.clone()).unwrap();
        chown(&path, Some(owner), None).unwrap();
        path
    };
    let (its, roots) = (image("its.img", 65534), image("roots.img", 0));
    for sandbox in ["on", "off"] {
        let args = [&OPTIONS[..], &["--user", "nobody", "--sandbox", sandbox]].concat();
        let daemon = Daemon::serve(dir.path(), &args);
        assert_eq!(status(daemon.pid(), "Uid"), "65534 65534 65534 65534");
        assert_eq!(status(daemon.pid(), "CapEff"), "0000000000000000");
        xen.attach((1, "a"), XVDA, &its, "w");
        xen.attach((1, "a"), XVDB, &roots, "w");
        xen.until(&daemon, (1, XVDA), "2");
        xen.until(&daemon, (1, XVDB), "6");
        let error = xen.0.get("error/backend/vbd3/1/51728/error").unwrap();
        assert!(error.contains("no permission"), "{error}");
        xen.0.remove("backend/vbd3/1");
        until(&daemon, || list(dir.path()).contains("\"disks\":[]"));
        daemon.stop();
    }
}

#[test]
fn a_host_without_xen_is_told_of() {
    let dir = folder();
    let refused = |args: &[&str]| {
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir.path());
        let output = run(command);
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let error = refused(&OPTIONS);
    assert!(error.contains("--xen: no xenstore: store: "), "{error}");
    std::fs::set_permissions(dir.path().join("records"), std::fs::Permissions::from_mode(0o777))
        .unwrap();
    let error = refused(&OPTIONS);
    assert!(error.contains("--xen-records records: others can write to it"), "{error}");
}

/// What a daemon makes for itself is nobody else's.
#[test]
fn e88_folders_of_a_daemon_are_its_own_whatever_the_umask_is() {
    let dir = folder();
    let dir = dir.path();
    let _xen = Toolstack::new(dir);
    let mut serve = ringway();
    serve.args(["serve", "--xen", "--xen-store", "store", "--xen-records", "run/ringway/xen"]);
    serve.args(["--state-dir", "run/ringway/state", "--control", "ctl"]).current_dir(dir);
    let open_to_all = || {
        // SAFETY: it takes a number.
        unsafe { libc::umask(0) };
        Ok(())
    };
    // SAFETY: one system call.
    unsafe { serve.pre_exec(open_to_all) };
    let daemon = Daemon::start(serve);
    for (path, right) in [
        ("run", 0o755),
        ("run/ringway", 0o755),
        ("run/ringway/xen", 0o700),
        ("run/ringway/state", 0o700),
        ("ctl", 0o600),
    ] {
        let mode = dir.join(path).symlink_metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, right, "{path}");
    }
    daemon.stop();
}

/// A guest that has its disk already loses it for good if its back-end says that it is closed.
#[test]
fn b33_a_disk_that_a_guest_has_is_never_closed_for_want_of_an_image() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    let image = dir.path().join("disk.img");
    let away = dir.path().join("away");
    // A daemon before this one has served it; its volume comes later than the daemon.
    std::fs::rename(&image, &away).unwrap();
    for (guest, state) in [(1, "4"), (2, "2"), (3, "1")] {
        xen.attach((guest, "a"), XVDA, &image, "w");
        xen.0.set(&format!("/local/domain/{guest}/device/vbd/{XVDA}/state"), state);
        xen.0.set(&format!("backend/vbd3/{guest}/{XVDA}/state"), state);
    }
    let daemon = Daemon::serve(dir.path(), &OPTIONS);
    // What nobody has offered is refused; by then the others have been, too.
    xen.until(&daemon, (3, XVDA), "6");
    until(&daemon, || daemon.log().matches("has it already").count() == 2);
    std::thread::sleep(Duration::from_millis(1500));
    // Not even if it cannot be served once its image is there: there are no rings here.
    assert_eq!([1, 2].map(|guest| xen.state(guest, XVDA)), ["4", "2"], "{}", daemon.log());
    assert_eq!(daemon.log().matches("is not served").count(), 3, "{}", daemon.log());
    // Of two disks with one image one is served.
    std::fs::rename(&away, &image).unwrap();
    until(&daemon, || list(dir.path()).contains("\"device\":\"backend/vbd3/"));
    assert_eq!(xen.state(3, XVDA), "6");
    assert!(!["5", "6"].contains(&xen.state(1, XVDA).as_str()), "{}", daemon.log());
    daemon.stop();
}

#[test]
fn b33_a_store_has_one_daemon() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    let daemon = Daemon::serve(dir.path(), &OPTIONS);
    std::os::unix::fs::symlink("store", dir.path().join("other")).unwrap();
    let second = |store: &str, name: &str| {
        let mut command = ringway();
        command.args(["serve", "--xen", "--xen-store", store, "--xen-records", "records2"]);
        command.args(["--xen-name", name, "--control", "ctl2"]).current_dir(dir.path());
        command
    };
    let refused = run(second("other", "vbd3"));
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("another daemon serves the disks"), "{said}");
    // Disks of another name are others; what a killed daemon has claimed is free.
    Daemon::start(second("other", "vbd4")).stop();
    daemon.kill();
    Daemon::start(second("store", "vbd3")).stop();
    drop(xen);
}

/// An image that has to be waited for keeps neither other guests waiting nor the daemon from ending.
#[test]
fn b33_an_image_that_is_waited_for_keeps_nobody_waiting() {
    let dir = folder();
    let xen = Toolstack::new(dir.path());
    let image = dir.path().join("disk.img");
    std::fs::copy(&image, dir.path().join("other.img")).unwrap();
    let hold = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let daemon = Daemon::serve(dir.path(), &[&OPTIONS[..], &["--lock-wait", "300"]].concat());
    xen.attach((1, "a"), XVDA, &image, "w");
    until(&daemon, || daemon.log().contains("waiting"));
    xen.attach((2, "b"), XVDA, &dir.path().join("other.img"), "w");
    xen.until(&daemon, (2, XVDA), "2");
    assert_eq!(xen.state(1, XVDA), "1");
    daemon.stop();
    hold.stop();
}
