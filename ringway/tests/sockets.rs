//! Who may connect to the sockets of `ringway serve`, whatever the umask is.

use crate::common::{Daemon, folder, ringway, run, text};
use ringway_testkit::{Need, skip};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

fn with_umask(dir: &Path, mask: libc::mode_t, args: &[&str]) -> Command {
    let mut command = ringway();
    command.arg("serve").args(args).current_dir(dir);
    let set = move || {
        // SAFETY: it takes a number.
        unsafe { libc::umask(mask) };
        Ok(())
    };
    // SAFETY: one system call.
    unsafe { command.pre_exec(set) };
    command
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().mode() & 0o777
}

fn group(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().gid()
}

fn ctl(dir: &Path, args: &[&str]) -> (bool, String) {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    let output = run(command);
    (output.status.success(), text(&output.stderr))
}

fn root() -> bool {
    // SAFETY: it only tells.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        skip(Need::Root, "to be another user");
    }
    root
}

#[test]
fn b17_sockets_are_their_owners_alone_whatever_the_umask_is() {
    for (mask, sandbox) in [(0, "on"), (0o077, "on"), (0, "off"), (0o077, "off")] {
        let dir = folder();
        let at = |name: &str| mode(&dir.path().join(name));
        let words = ["new.img", "--size", "1M", "--socket", "s", "--control", "ctl"];
        let args = [&words[..], &["--sandbox", sandbox]].concat();
        let daemon = Daemon::start(with_umask(dir.path(), mask, &args));
        assert_eq!((at("s"), at("ctl")), (0o600, 0o600), "umask {mask:o}, sandbox {sandbox}");
        let add = |image: &str, socket: &str, more: &[&str]| {
            let (done, error) =
                ctl(dir.path(), &[&["add", image, "--socket", socket], more].concat());
            assert!(done, "{error}");
            at(socket)
        };
        assert_eq!(add("disk.img", "t", &[]), 0o600);
        assert_eq!(add("null:1G", "u", &["--socket-mode", "0666"]), 0o666);
        assert_eq!(add("null:1G", "v", &["--socket-mode", "660"]), 0o660);
        daemon.stop();
    }
}

#[test]
fn b17_a_mode_is_said_for_one_or_for_all() {
    let dir = folder();
    let text = "socket-mode = '0660'\ncontrol = 'ctl'\n\
                [[disk]]\nimage = 'disk.img'\nsocket = 's'\n\
                [[disk]]\nimage = 'null:1G'\nsocket = 't'\nsocket-mode = '0606'\n";
    std::fs::write(dir.path().join("c.toml"), text).unwrap();
    let daemon = Daemon::start(with_umask(dir.path(), 0o077, &["--config", "c.toml"]));
    let at = |name: &str| mode(&dir.path().join(name));
    assert_eq!((at("s"), at("t"), at("ctl")), (0o660, 0o606, 0o600));
    assert!(ctl(dir.path(), &["add", "null:1G", "--socket", "u"]).0);
    assert_eq!(at("u"), 0o660, "that of all");
    daemon.stop();
    // An option of the command line holds for what is added later.
    let args = ["disk.img", "--socket", "s", "--socket-mode", "0666", "--control", "ctl"];
    let daemon = Daemon::start(with_umask(dir.path(), 0o077, &args));
    assert!(ctl(dir.path(), &["add", "null:1G", "--socket", "u"]).0);
    assert_eq!((at("s"), at("u")), (0o666, 0o666));
    daemon.stop();
}

/// As one of these numbers and no other, on a thread of its own.
fn connect_as(user: u32, group: u32, also: &[u32], path: &Path) -> io::Result<()> {
    let (also, path) = (also.to_vec(), path.to_path_buf());
    let thread = std::thread::spawn(move || {
        // By the system calls themselves: the C library would change all threads.
        // SAFETY: they take numbers, and a list that is there.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, also.len(), also.as_ptr()), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, group, group, group), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, user, user, user), 0);
        }
        UnixStream::connect(path).map(drop)
    });
    thread.join().unwrap()
}

#[test]
fn b17_a_group_of_virtual_machines_may_connect_and_nobody_else() {
    if !root() {
        return;
    }
    let dir = folder();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (s, t) = (dir.path().join("s"), dir.path().join("t"));
    for more in [&[][..], &["--sandbox", "off"], &["--user", "nobody"], &["--isolate"]] {
        let words = ["disk.img", "--socket", "s", "--socket-group", "54321", "--control", "ctl"];
        let args = [&words[..], more].concat();
        let daemon = Daemon::start(with_umask(dir.path(), 0o077, &args));
        assert_eq!((mode(&s), group(&s)), (0o660, 54321), "{more:?}");
        // As libvirt runs QEMU: a user of its own, which is in the group.
        connect_as(64055, 64055, &[54321], &s).unwrap();
        let refused = connect_as(64055, 64055, &[], &s).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{more:?}");
        // With --user that one makes what is added later, which is in no other group.
        let (done, error) = ctl(dir.path(), &["add", "null:1G", "--socket", "t"]);
        if more.contains(&"--user") {
            assert!(error.contains("no permission"), "{error}");
        } else {
            assert!(done, "{more:?}: {error}");
            assert_eq!((mode(&t), group(&t)), (0o660, 54321), "{more:?}");
            let named = ["add", "null:1G", "--socket", "u", "--socket-group", "root"];
            let (done, error) = ctl(dir.path(), &named);
            assert!(done, "{error}");
            assert_eq!(group(&dir.path().join("u")), 0, "a name");
        }
        daemon.stop();
        assert!(!s.exists() && !t.exists());
    }
}

#[test]
fn b17_what_cannot_be_is_refused() {
    let dir = folder();
    for (words, what) in [
        (["--socket-mode", "0444"], "nobody could connect"),
        (["--socket-mode", "rw"], "is not the mode of a file"),
        (["--socket-mode", "1777"], "more than rights"),
        (["--socket-group", "no-such-group"], "there is no group 'no-such-group'"),
        (["--socket-group", "4294967295"], "is not the number of"),
    ] {
        let mut command = ringway();
        command.args(["serve", "disk.img", "--socket", "s"]).args(words).current_dir(dir.path());
        let output = run(command);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(what), "{words:?}: {error}");
        assert!(!dir.path().join("s").exists());
    }
    std::fs::write(
        dir.path().join("c.toml"),
        "[[disk]]\nimage = 'disk.img'\nsocket = 's'\nsocket-group = 'no-such-group'\n",
    )
    .unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "c.toml"]).current_dir(dir.path());
    let error = text(&run(command).stderr);
    assert!(error.contains("c.toml, line 1: socket-group: there is no group"), "{error}");
    let mut command = ringway();
    command.args(["serve", "--xen", "--socket-mode", "0660"]).current_dir(dir.path());
    let error = text(&run(command).stderr);
    assert!(error.contains("--xen has none"), "{error}");
}

/// Whoever can connect reads and writes the disk.
#[test]
fn a_socket_for_everybody_earns_a_warning() {
    let dir = folder();
    for (mode, warned) in [("777", true), ("0666", true), ("0660", false)] {
        let words = ["serve", "disk.img", "--socket", "s", "--socket-mode", mode];
        let mut command = ringway();
        command.args(words).current_dir(dir.path());
        let daemon = Daemon::start(command);
        assert_eq!(daemon.log().contains("every user of this host"), warned, "{}", daemon.log());
        daemon.stop();
    }
}

/// As root, where `/run` is empty: the daemon makes the folder of its own state beside the socket.
#[test]
fn b17_the_usual_state_folder_is_private_and_its_neighbours_can_be_reached() {
    if !root() {
        return;
    }
    let dir = folder();
    let mount = "umask 077 && mount -t tmpfs tmpfs /run && exec \"$@\"";
    let inside = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", mount, "sh"]).args(words).current_dir(dir.path());
        command
    };
    if !inside(&["true"]).status().is_ok_and(|status| status.success()) {
        return skip(Need::Mount, "tmpfs");
    }
    let program = env!("CARGO_BIN_EXE_ringway");
    let words = [program, "serve", "disk.img", "--socket", "/run/ringway/disk.sock"];
    let daemon = Daemon::start(inside(&[&words[..], &["--socket-group", "54321"]].concat()));
    let there = Path::new("/proc").join(daemon.pid().to_string()).join("root/run/ringway");
    assert_eq!(mode(&there), 0o755, "others may search it");
    assert_eq!(mode(&there.join("state")), 0o700);
    assert_eq!((mode(&there.join("disk.sock")), group(&there.join("disk.sock"))), (0o660, 54321));
    daemon.stop();
}

/// A connection that waits to be accepted; `None` if no more may.
fn connect_at_once(path: &Path) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok().map(|()| socket)
}

/// That of a daemon that was stopped, or hangs.
#[test]
fn e58_commands_to_a_socket_at_which_nobody_accepts_end() {
    let dir = folder();
    let path = dir.path();
    let _listener = std::os::unix::net::UnixListener::bind(path.join("ctl")).unwrap();
    let waiting: Vec<_> = std::iter::from_fn(|| connect_at_once(&path.join("ctl"))).collect();
    let (done, said) = ctl(path, &["list"]);
    assert!(
        !done && said.contains("ctl: whoever listens there has accepted no connection"),
        "{said}"
    );
    drop(waiting);
}

/// As that of a process that was stopped.
#[test]
fn e41_a_socket_at_which_nobody_accepts_is_refused_at_once() {
    for sandbox in ["on", "off"] {
        let dir = folder();
        let path = dir.path();
        let (mut listeners, mut waiting) = (Vec::new(), Vec::new());
        for name in ["full", "full-ctl"] {
            let at = path.join(name);
            listeners.push(std::os::unix::net::UnixListener::bind(&at).unwrap());
            while let Some(stream) = connect_at_once(&at) {
                waiting.push(stream);
            }
        }
        for sockets in [["full", "ctl"], ["s", "full-ctl"]] {
            let mut command = ringway();
            let args = ["serve", "disk.img", "--format", "raw", "--sandbox", sandbox, "--socket"];
            command.args(args).args([sockets[0], "--control", sockets[1]]).current_dir(path);
            let output = run(command);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{sandbox}, {sockets:?}: {said}");
            assert!(
                said.contains("another process is listening"),
                "{sandbox}, {sockets:?}: {said}"
            );
        }
        let args = ["null:1M", "--socket", "s", "--control", "ctl", "--sandbox", sandbox];
        let daemon = Daemon::serve(path, &args);
        let (added, said) = ctl(path, &["add", "null:2M", "--socket", "full"]);
        assert!(!added && said.contains("another process is listening"), "{sandbox}: {said}");
        assert!(path.join("full").exists(), "{sandbox}: it is another's");
        daemon.stop();
    }
}
