//! `ringway serve`, from outside: the real program, a front-end, signals.

use crate::common::{
    Daemon, PATIENCE, folder, read, ringway, run, says, serial, snapshot, text, write,
};
use ringway_driver::{Device, Options};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A device with one queue.
fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

#[test]
fn the_ready_line_says_what_is_served_and_the_others_attach_it() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--queues", "4", "--workers", "2", "--engine"];
    let daemon =
        Daemon::serve(dir.path(), &[&args[..], &["threads", "--cache", "writeback"]].concat());
    for fact in ["disk.img", "1 MiB", "4 queues", "2 workers", "engine threads (as asked)"] {
        assert!(daemon.ready.contains(fact), "{fact}: {}", daemon.ready);
    }
    assert!(daemon.ready.contains("cache writeback (as asked)"), "{}", daemon.ready);
    let socket = dir.path().join("s").canonicalize().unwrap().display().to_string();
    let lines = daemon.stop();
    assert!(!lines.contains('\x1b'), "color only on a terminal: {lines:?}");
    for part in [
        "memory-backend-memfd,id=mem,size=4G,share=on",
        "reconnect-ms=1000",
        "vhost-user-blk-pci,chardev=disk0,num-queues=4",
        "<disk type='vhostuser' device='disk'>",
        "<memoryBacking>",
        "vhost_user=on",
    ] {
        assert!(lines.contains(part), "{part}: {lines}");
    }
    assert_eq!(lines.matches(&socket).count(), 3, "three front-ends: {lines}");
}

#[test]
fn every_engine_and_cache_mode_serves() {
    for engine in ["auto", "io_uring", "threads"] {
        for cache in ["writeback", "writethrough", "unsafe"] {
            let dir = folder();
            let args = ["disk.img", "--socket", "s", "--engine", engine, "--cache", cache];
            let daemon = Daemon::serve(dir.path(), &args);
            let mut device = connect(dir.path(), "s");
            let mut queue = device.queue().unwrap();
            assert_eq!(device.info().writeback, cache != "writethrough");
            assert!(write(&device, &mut queue, 7, 0x77), "{engine} {cache}");
            assert_eq!(read(&device, &mut queue, 7), [0x77; 512], "{engine} {cache}");
            daemon.stop();
            assert_eq!(std::fs::read(dir.path().join("disk.img")).unwrap()[7 * 512], 0x77);
        }
    }
}

#[test]
fn quiet_prints_and_logs_nothing() {
    let dir = folder();
    let mut command = ringway();
    command.args(["serve", "-q", "disk.img", "--socket", "s", "--stats"]).current_dir(dir.path());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(connect(dir.path(), "s"));
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
    let stats = text(&output.stdout);
    assert!(stats.contains("flushes") && !stats.contains("QEMU"), "{stats}");
}

#[test]
fn counts_are_printed_at_the_end() {
    let dir = folder();
    let daemon =
        Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--stats", "--workers", "1"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    for sector in 0..5 {
        assert!(write(&device, &mut queue, sector, 1));
    }
    let rest = daemon.stop();
    let row = rest.lines().find(|line| line.contains("/0")).unwrap();
    let words: Vec<_> = row.split_whitespace().collect();
    assert_eq!(words[1..7].join(" "), "0 0 bytes 5 2.5 KiB", "{rest}");
}

#[test]
fn sigterm_completes_what_is_in_flight_and_removes_the_socket() {
    let dir = folder();
    let disk = "null:1G,latency=2000ms";
    let daemon = Daemon::serve(dir.path(), &[disk, "--socket", "s", "--control", "ctl"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue::<u64>().unwrap();
    for number in 0..8 {
        let buffer = device.pool().alloc(4096).unwrap();
        queue.read(number * 4096, buffer, number).unwrap();
    }
    let begin = Instant::now();
    queue.submit().unwrap();
    let args = ["ctl", "--control", "ctl", "--json", "stats"];
    while !says(dir.path(), &args, 0, &[]).replace(' ', "").contains(r#""in_flight":8"#) {
        // All are answered: this machine was too busy to see them.
        if begin.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
    daemon.stop();
    assert!(begin.elapsed() >= Duration::from_secs(2), "it waited for the disk");
    let mut done: Vec<_> = queue.completions().filter(|done| done.is_ok()).map(|d| d.ctx).collect();
    done.sort_unstable();
    assert_eq!(done, (0..8).collect::<Vec<_>>());
    assert!(!dir.path().join("s").exists(), "its socket file is gone");
}

#[test]
fn a_second_signal_ends_it_at_once() {
    for (signal, status) in [(libc::SIGTERM, 143), (libc::SIGINT, 130)] {
        let dir = folder();
        let disk = "null:1G,latency=60000000us";
        let mut daemon = Daemon::serve(dir.path(), &[disk, "--socket", "s"]);
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
        queue.submit().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        daemon.signal(signal);
        // Two that come before it has seen the first one are one.
        let deadline = Instant::now() + PATIENCE;
        while !daemon.log().contains("a second signal ends at once") {
            assert!(Instant::now() < deadline, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.signal(signal);
        assert_eq!(daemon.wait().0.code(), Some(status), "{}", daemon.log());
    }
}

#[test]
fn a_killed_daemon_leaves_a_socket_that_the_next_one_replaces() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s"];
    let daemon = Daemon::serve(dir.path(), &args);
    {
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 3, 0x33));
        daemon.kill();
    }
    assert!(dir.path().join("s").exists());
    let daemon = Daemon::serve(dir.path(), &args);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert_eq!(read(&device, &mut queue, 3), [0x33; 512]);
    daemon.stop();
    assert!(!dir.path().join("s").exists());
}

#[test]
fn a_socket_that_somebody_else_put_there_stays() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    std::fs::remove_file(dir.path().join("s")).unwrap();
    let _other = UnixListener::bind(dir.path().join("s")).unwrap();
    daemon.stop();
    assert!(dir.path().join("s").exists());
}

#[test]
fn clients_come_and_go_and_come_back() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--queues", "2"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    for round in 1..=5 {
        assert!(write(&device, &mut queue, 9, round));
        device.reconnect().unwrap();
        assert_eq!(read(&device, &mut queue, 9), [round; 512]);
    }
    drop((queue, device));
    // One that talks nonsense costs its own connection only.
    let mut rude = UnixStream::connect(dir.path().join("s")).unwrap();
    std::io::Write::write_all(&mut rude, &[0xff; 64]).unwrap();
    drop(rude);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert_eq!(read(&device, &mut queue, 9), [5; 512]);
    daemon.stop();
}

#[test]
fn one_process_serves_the_disks_of_a_file() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("conf")).unwrap();
    std::fs::write(dir.path().join("conf/b.img"), vec![0xbb; 1 << 20]).unwrap();
    let config = "
        workers = 2
        poll = 'never'
        [[disk]]
        image = '../disk.img'
        socket = '../a'
        serial = 'first'
        queues = 2
        [[disk]]
        image = 'b.img'
        socket = '../b'
        serial = 'second'
        read-only = true
        engine = 'threads'
    ";
    std::fs::write(dir.path().join("conf/disks.toml"), config).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "conf/disks.toml"]);
    let mut a = connect(dir.path(), "a");
    let mut b = connect(dir.path(), "b");
    let (mut queue_a, mut queue_b) = (a.queue().unwrap(), b.queue().unwrap());
    assert_eq!(serial(&a, &mut queue_a), "first");
    assert_eq!(serial(&b, &mut queue_b), "second");
    assert_eq!((a.server_queues(), a.info().read_only, b.info().read_only), (2, false, true));
    assert!(write(&a, &mut queue_a, 1, 0xaa));
    assert!(!write(&b, &mut queue_b, 1, 0xaa), "it is read-only");
    assert_eq!(read(&a, &mut queue_a, 1), [0xaa; 512]);
    assert_eq!(read(&b, &mut queue_b, 1), [0xbb; 512]);
    let lines = daemon.stop();
    assert!(lines.contains("b.img") && lines.contains("read-only"), "{lines}");
    assert!(lines.contains("disk1,") && lines.contains("'vdb'"), "{lines}");
}

#[test]
fn a_missing_image_is_created_sparse_and_an_existing_one_never_touched() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["new.img", "--size", "10G", "--socket", "s"]);
    assert!(daemon.ready.contains("10 GiB"), "{}", daemon.ready);
    daemon.stop();
    let meta = dir.path().join("new.img").metadata().unwrap();
    assert_eq!(meta.len(), 10 << 30);
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) < 1000, "sparse");

    std::fs::remove_file(dir.path().join("new.img")).unwrap();

    let before = snapshot(dir.path());
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--size", "10G", "--socket", "s"]);
    assert!(daemon.ready.contains("1 MiB"), "{}", daemon.ready);
    let said = "disk.img exists and has 1 MiB, not 10 GiB";
    assert!(daemon.log().contains(said), "{}", daemon.log());
    daemon.stop();
    assert_eq!(snapshot(dir.path()), before);
}

#[test]
fn an_inherited_connection_is_served_until_it_ends() {
    let dir = folder();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut daemon = with_fd(dir.path(), &theirs.into());
    let mut device = Options::new().over(ours).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 2, 0x22));
    device.stop().unwrap();
    let (status, lines) = daemon.wait();
    assert_eq!(status.code(), Some(0), "nobody can come after it");
    assert!(!lines.contains("QEMU"), "nothing to attach: {lines}");
}

#[test]
fn an_inherited_listener_is_served_until_a_signal() {
    let dir = folder();
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    let daemon = with_fd(dir.path(), &listener.into());
    for _ in 0..2 {
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 2, 0x22));
    }
    daemon.stop();
    assert!(dir.path().join("s").exists(), "it is not the daemon's");
}

/// A daemon as a manager starts it: no subcommand, an inherited socket.
fn with_fd(dir: &Path, fd: &OwnedFd) -> Daemon {
    // SAFETY: it changes a flag of our own descriptor, which stays open during the call.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) }, 0);
    let mut command = ringway();
    command.arg(format!("--fd={}", fd.as_raw_fd())).arg("--blk-file=disk.img").current_dir(dir);
    let daemon = Daemon::start(command);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    daemon
}

#[test]
fn managers_start_it_by_the_convention_of_vhost_user_back_ends() {
    for args in [&["--print-capabilities"][..], &["serve", "--print-capabilities"]] {
        let mut command = ringway();
        command.args(args);
        let output = run(command);
        assert_eq!(output.status.code(), Some(0));
        let expected = r#"{"type":"block","features":["read-only","blk-file"]}"#;
        assert_eq!(text(&output.stdout), format!("{expected}\n"));
        assert_eq!(text(&output.stderr), "");
    }
    let dir = folder();
    for args in [
        &["--socket-path=s", "--blk-file=disk.img", "--read-only"][..],
        &["--read-only", "--blk-file", "disk.img", "--socket-path", "s"],
        &["serve", "--socket-path=s", "--blk-file=disk.img", "--read-only"],
    ] {
        let mut command = ringway();
        command.args(args).current_dir(dir.path());
        let daemon = Daemon::start(command);
        assert!(connect(dir.path(), "s").info().read_only);
        daemon.stop();
    }
}

#[test]
fn every_line_of_a_json_log_is_an_object() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--log-format", "json", "-v"];
    let daemon = Daemon::serve(dir.path(), &args);
    drop(connect(dir.path(), "s"));
    daemon.signal(libc::SIGTERM);
    let mut daemon = daemon;
    daemon.wait();
    let log = daemon.log();
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| line["level"].is_string() && line["timestamp"].is_string()));
    let connected = lines.iter().find(|line| line["message"] == "front-end connected").unwrap();
    assert_eq!(connected["disk"], "disk.img");

    // An error is one, too.
    let mut command = ringway();
    command.args(["serve", "missing.img", "--socket", "s", "--log-format", "json"]);
    let output = run(command);
    assert_eq!(output.status.code(), Some(1));
    let line: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(line["message"].as_str().unwrap().contains("missing.img"));
}

#[test]
fn the_service_manager_is_told() {
    let dir = folder();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = ringway();
    command.args(["serve", "disk.img", "--socket", "s"]).current_dir(dir.path());
    command.env("NOTIFY_SOCKET", &path);
    let daemon = Daemon::start(command);
    let mut datagram = [0; 256];
    let len = manager.recv(&mut datagram).unwrap();
    assert_eq!(text(&datagram[..len]).trim_end(), "READY=1");
    daemon.stop();
    let len = manager.recv(&mut datagram).unwrap();
    assert_eq!(text(&datagram[..len]).trim_end(), "STOPPING=1");
}

#[test]
fn help_and_version_are_there() {
    for (args, part) in [
        (&["--version"][..], "ringway 0."),
        (&["--help"], "Examples:"),
        (&["help", "serve"], "--socket"),
        (&["serve", "--help"], "[[disk]]"),
        (&["demo", "--help"], "--quick"),
    ] {
        let mut command = ringway();
        command.args(args);
        let output = run(command);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(part), "{args:?}");
    }
}
