//! What systemd does for a daemon: sockets that it opens, and the watchdog.

use crate::common::{Daemon, folder, ringway, run, text, write};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// `ringway serve ARGS` with `listener` as its first passed socket, as systemd starts it.
fn activated(dir: &Path, listener: &OwnedFd, args: &[&str]) -> Command {
    let program = ringway();
    // The shell puts its own number there, which is that of the daemon.
    let mut command = Command::new("sh");
    command
        .args(["-c", "LISTEN_PID=$$ exec \"$0\" serve \"$@\""])
        .arg(program.get_program())
        .args(args)
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "vm1.socket")
        .current_dir(dir)
        .stdin(Stdio::null());
    for name in ["RUST_LOG", "NOTIFY_SOCKET", "WATCHDOG_USEC"] {
        command.env_remove(name);
    }
    let fd = listener.as_raw_fd();
    let pass = move || {
        // SAFETY: two system calls on numbers; 3 is free or the listener itself in this child.
        match unsafe { if fd == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) } }
        {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // SAFETY: it only makes system calls.
    unsafe { command.pre_exec(pass) };
    command
}

fn serves(socket: &Path) {
    let mut device = Options::new().over(UnixStream::connect(socket).unwrap()).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 2, 0x22));
    drop(queue);
    device.stop().unwrap();
}

#[test]
fn a_disk_gets_the_socket_that_is_bound_where_it_wants_one() {
    let dir = folder();
    let at = dir.path().join("vm1.sock");
    let listener: OwnedFd = UnixListener::bind(&at).unwrap().into();
    std::fs::write(
        dir.path().join("vm1.toml"),
        "[[disk]]\nimage = 'disk.img'\nsocket = 'vm1.sock'\n\
         [[disk]]\nimage = 'null:1G'\nsocket = 'other.sock'\n",
    )
    .unwrap();
    for (args, lines) in [
        (&["--config", "vm1.toml"][..], vec!["vm1.sock,", "other.sock,"]),
        (&["disk.img"], vec!["vm1.sock,"]),
    ] {
        let daemon = Daemon::start(activated(dir.path(), &listener, args));
        serves(&at);
        let rest = daemon.stop();
        for line in lines {
            assert!(rest.contains(line), "how to attach {line}: {rest}");
        }
        assert!(at.exists(), "it belongs to the manager");
        assert!(!dir.path().join("other.sock").exists(), "that one was its own");
    }
}

/// Its process gets the socket, and so does the one after that.
#[test]
fn a_disk_with_a_process_of_its_own_gets_its_socket() {
    let dir = folder();
    let at = dir.path().join("vm1.sock");
    let listener: OwnedFd = UnixListener::bind(&at).unwrap().into();
    let disk =
        "control = 'ctl'\n[[disk]]\nimage = 'disk.img'\nsocket = 'vm1.sock'\nisolate = true\n";
    std::fs::write(dir.path().join("vm1.toml"), disk).unwrap();
    let daemon = Daemon::start(activated(dir.path(), &listener, &["--config", "vm1.toml"]));
    serves(&at);
    let process = || {
        let list = crate::common::guest::ctl(dir.path(), &["list"]);
        let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
        let disk = &list["disks"][0];
        assert!(disk["socket"].as_str().unwrap().ends_with("vm1.sock"), "{disk}");
        disk["process"].as_i64()
    };
    let first = process().unwrap();
    // SAFETY: a process of this test's own daemon.
    unsafe { libc::kill(i32::try_from(first).unwrap(), libc::SIGKILL) };
    crate::common::guest::wait_for("another process", || {
        process().is_some_and(|process| process != first)
    });
    serves(&at);
    daemon.stop();
    assert!(at.exists(), "it belongs to the manager");
}

/// The daemon has none of it left to serve the disk at again, should the one that takes its image fail.
#[test]
fn e42_a_disk_whose_socket_was_passed_is_not_replaced() {
    for isolate in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let at = dir.join("vm1.sock");
        let listener: OwnedFd = UnixListener::bind(&at).unwrap().into();
        let say = |socket: &str| {
            let disk = format!("[[disk]]\nimage = 'disk.img'\nsocket = '{socket}'\n");
            let all = format!("control = 'ctl'\n{disk}isolate = {isolate}\n");
            std::fs::write(dir.join("vm1.toml"), all).unwrap();
        };
        say("vm1.sock");
        let daemon = Daemon::start(activated(dir, &listener, &["--config", "vm1.toml"]));
        say("other.sock");
        for words in [&["reload", "--dry-run"][..], &["reload"]] {
            let refused = crate::common::guest::ctl(dir, words);
            let said = text(&refused.stderr);
            assert!(!refused.status.success() && said.contains("was passed"), "{isolate}: {said}");
        }
        serves(&at);
        daemon.stop();
    }
}

#[test]
fn a_socket_that_is_passed_in_vain_is_an_error() {
    let dir = folder();
    let listener: OwnedFd = UnixListener::bind(dir.path().join("vm1.sock")).unwrap().into();
    let (connected, _peer) = UnixStream::pair().unwrap();
    let file: OwnedFd = std::fs::File::open(dir.path().join("disk.img")).unwrap().into();
    for (fd, args, what) in [
        (&listener, &["disk.img", "--socket", "s"][..], &["vm1.sock", "'vm1.socket'"][..]),
        (&connected.into(), &["disk.img", "--socket", "s"], &["'vm1.socket'", "ListenStream="]),
        (&file, &["disk.img", "--socket", "s"], &["'vm1.socket'", "not an open socket"]),
    ] {
        let output = run(activated(dir.path(), fd, args));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        for what in what {
            assert!(error.contains(what), "no {what} in: {error}");
        }
        assert!(!dir.path().join("s").exists());
    }
}

/// By systemd's own program.
#[test]
fn a_daemon_starts_when_the_first_front_end_connects() {
    let activate = "systemd-socket-activate";
    if Command::new(activate).arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip(Need::Systemd, format_args!("there is no {activate}"));
    }
    let dir = folder();
    let at = dir.path().join("vm1.sock");
    let mut command = Command::new(activate);
    command.arg("--listen").arg(&at).arg("--fdname=vm1.socket");
    command.arg(ringway().get_program()).args(["serve", "disk.img", "--format", "raw"]);
    command.arg("--socket").arg(&at).current_dir(dir.path());
    let mut manager =
        command.stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
    let deadline = std::time::Instant::now() + crate::common::PATIENCE;
    while UnixStream::connect(&at).is_err() {
        assert!(std::time::Instant::now() < deadline, "nobody listens");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The connection above has started it, and is over.
    serves(&at);
    // It has replaced the manager, so the number is the daemon's.
    let pid = i32::try_from(manager.id()).unwrap();
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let status = crate::common::wait(&mut manager, crate::common::PATIENCE).expect("it ends");
    let mut printed = String::new();
    manager.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert!(printed.contains("1 MiB"), "{printed}");
}

#[test]
fn systemd_hears_of_a_daemon_as_often_as_it_asked() {
    let dir = folder();
    let path = dir.path().join("notify");
    let systemd = UnixDatagram::bind(&path).unwrap();
    systemd.set_read_timeout(Some(crate::common::PATIENCE)).unwrap();
    let mut command = ringway();
    command.args(["serve", "disk.img", "--socket", "s"]).current_dir(dir.path());
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000").env_remove("WATCHDOG_PID");
    let daemon = Daemon::start(command);
    let mut buffer = [0; 64];
    let mut next = || {
        let length = systemd.recv(&mut buffer).unwrap();
        text(&buffer[..length])
    };
    assert_eq!(next(), "READY=1");
    for _ in 0..5 {
        assert_eq!(next(), "WATCHDOG=1");
    }
    daemon.stop();
    let last = std::iter::repeat_with(next).find(|word| word != "WATCHDOG=1");
    assert_eq!(last.as_deref(), Some("STOPPING=1"));
}
