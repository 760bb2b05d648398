//! Disks of NBD servers, from outside: `ringway serve nbd:…` before stock servers and our own, which fail,
//! fall silent, die and come back. The rows of group F of docs/hazards.md that need real programs.

use crate::common::exports::{
    BYTES, EXPORT, LISTEN, MIB, REQUESTS, STORAGE, assert_written, connect, goes_on, guest_of_part,
    image, is_flushed,
};
use crate::common::guest::{ctl, wait_for as until};
use crate::common::nbd::{Server, server};
use crate::common::{Daemon, PATIENCE, folder, ringway, run, snapshot, text};
use ringway_driver::{BlkQueue, BufferPool};
use ringway_testkit::{Need, pattern, skip};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn nbdkit(dir: &Path, args: &[&str]) -> Option<Server> {
    server(dir, "nbdkit", &[&["-f", "-U", "n.sock"], args].concat())
}

/// `ringway serve nbd:unix:…/n.sock ARGS`.
fn serve(dir: &Path, args: &[&str]) -> Daemon {
    let export = format!("nbd:unix:{}/n.sock", dir.display());
    let queues: &[&str] = if args.contains(&"--queues") { &[] } else { &["--queues", "2"] };
    Daemon::serve(dir, &[&[export.as_str(), "--socket", "s"], queues, args].concat())
}

/// Writes the whole disk, each request with its own content, several at a time; then reads it.
/// `answered` counts. Every one has to succeed.
fn guest(pool: &BufferPool, queue: &mut BlkQueue<u64>, sequence: u64, answered: &AtomicU64) {
    guest_of_part((pool, queue), 0..REQUESTS, sequence, answered);
}

/// Servers with their words, and whether disk.img holds the data.
const SERVERS: &[(&str, &[&str], bool)] = &[
    ("nbdkit", &["-f", "-U", "n.sock", "file", "disk.img"], true),
    ("nbdkit", &["-f", "-U", "n.sock", "memory", "8M"], false),
    // No structured replies.
    ("nbdkit", &["-f", "-U", "n.sock", "--no-sr", "file", "disk.img"], true),
    // Whole blocks only, and small requests.
    (
        "nbdkit",
        &[
            "-f",
            "-U",
            "n.sock",
            "--filter=blocksize-policy",
            "file",
            "disk.img",
            "blocksize-minimum=4096",
            "blocksize-preferred=4096",
            "blocksize-maximum=16384",
            "blocksize-error-policy=error",
        ],
        true,
    ),
    ("qemu-nbd", &["-t", "-f", "raw", "-k", "DIR/n.sock", "-x", "d", "disk.img"], true),
    (
        "qemu-storage-daemon",
        &["--blockdev", STORAGE, "--nbd-server", LISTEN, "--export", EXPORT],
        true,
    ),
    (
        "ringway",
        &["nbd", "disk.img", "--format", "raw", "--listen", "unix:n.sock", "--export", "d"],
        true,
    ),
];

#[test]
fn a_guest_uses_an_export_of_each_server() {
    for &(program, args, holds) in SERVERS {
        let dir = folder();
        let path = dir.path();
        image(path);
        let args: Vec<String> =
            args.iter().map(|arg| arg.replace("DIR", path.to_str().unwrap())).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let Some(_server) = server(path, program, &args) else { continue };
        let name = if args.contains(&"-x") || !args.contains(&"-U") { ":d" } else { "" };
        let export = format!("nbd:unix:{}/n.sock{name}", path.display());
        let daemon = Daemon::serve(path, &[&export, "--socket", "s", "--queues", "2"]);
        assert!(daemon.ready.contains("engine nbd"), "{}", daemon.ready);
        let mut device = connect(path, 2);
        assert_eq!(device.info().capacity, BYTES, "{program}");
        let mut queues = device.queues().unwrap().into_iter();
        let (mut one, mut two) = (queues.next().unwrap(), queues.next().unwrap());
        let pool = device.pool();
        guest(&pool, &mut one, 3, &AtomicU64::new(0));
        guest(&pool, &mut two, 4, &AtomicU64::new(0));
        assert!(is_flushed(&mut one), "{program}: {}", daemon.log());
        drop((one, two, queues, device));
        daemon.stop();
        if holds {
            assert_written(path, 4);
        }
    }
}

/// A guest that switches its cache off flushes no more, and whoever asks for a moment of rest wants to copy what
/// was written: the server is sent a flush before either is answered.
#[test]
fn f05_a_server_flushes_before_a_cache_is_off_and_at_rest() {
    for queues in ["1", "4"] {
        let dir = folder();
        let path = dir.path();
        let args = ["--filter=log", "memory", "8M", "logfile=asked"];
        let Some(_server) = nbdkit(path, &args) else { return };
        let daemon = serve(path, &["--queues", queues, "--control", "ctl"]);
        let mut device = connect(path, queues.parse().unwrap());
        let mut all = device.queues().unwrap();
        let pool = device.pool();
        let flushes = || {
            let asked = std::fs::read_to_string(path.join("asked")).unwrap();
            asked.lines().filter(|line| line.contains(" Flush ")).count()
        };
        // Row F17: the first request is one.
        let first = flushes();
        for queue in &mut all {
            guest(&pool, queue, 3, &AtomicU64::new(0));
        }
        assert_eq!((first, flushes()), (1, 1));
        assert!(ctl(path, &["drain", "s"]).status.success(), "{}", daemon.log());
        let at_rest = flushes();
        assert!(at_rest > first, "{queues} queues");
        device.set_writeback(false).unwrap();
        assert!(flushes() > at_rest, "{queues} queues");
        drop((all, device));
        daemon.stop();
    }
}

#[test]
fn f16_a_server_that_is_slow_to_shake_hands_is_refused_after_the_limit_with_its_name() {
    let dir = folder();
    let path = dir.path();
    // It takes connections, and says nothing.
    let _silent = UnixListener::bind(path.join("n.sock")).unwrap();
    let export = format!("nbd:unix:{}/n.sock", path.display());
    let args = ["serve", &export, "--socket", "s", "--connect-timeout", "1"];
    let mut command = ringway();
    command.args(args).current_dir(path);
    let output = run(command);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("(connect-timeout: 1 s)"), "{error}");
    assert!(!path.join("s").exists());
}

/// A guest writes and reads without a pause and without an error, while somebody does something; whether a
/// flush succeeds then, and what came of that.
fn meanwhile<T>(dir: &Path, act: impl FnOnce(&AtomicU64) -> T) -> (bool, T) {
    let mut device = connect(dir, 1);
    let mut queue = device.queue().unwrap();
    let (pool, answered) = (device.pool(), AtomicU64::new(0));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (answered, stop) = (&answered, &stop);
        let guest = scope.spawn(move || {
            let mut sequence = 1;
            while !stop.load(SeqCst) {
                sequence += 1;
                guest(&pool, &mut queue, sequence, answered);
            }
            (is_flushed(&mut queue), sequence)
        });
        let came = act(answered);
        stop.store(true, SeqCst);
        let (flushed, sequence) = guest.join().unwrap();
        assert_written(dir, sequence);
        (flushed, came)
    })
}

/// A process that stands still has its connections stay, and new ones be accepted by the kernel.
#[test]
fn f03_a_server_that_stands_still_is_left_after_the_time_that_was_given() {
    for more in [&[][..], &["--isolate"]] {
        let dir = folder();
        let path = dir.path();
        image(path);
        let socket = path.join("n.sock").display().to_string();
        let args = ["-t", "-e", "8", "-f", "raw", "-k", &socket, "disk.img"];
        let Some(server) = server(path, "qemu-nbd", &args) else { return };
        let signal = |signal| {
            let pid = i32::try_from(server.0.id()).unwrap();
            // SAFETY: a process that this test has started, and has not waited for.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        };
        let args = [&["--response-timeout", "1", "--connect-timeout", "1"], more].concat();
        let daemon = serve(path, &args);
        let mut device = connect(path, 1);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        assert!(crate::common::write(&device, &mut queue, 3, 7));
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0);
        signal(libc::SIGSTOP);
        queue.read(3 * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
        queue.submit().unwrap();
        until("that is told", || daemon.log().contains("has said nothing for 1 s"));
        assert!(!queue.wait(Some(Duration::from_millis(100))).unwrap(), "who answers?");
        signal(libc::SIGCONT);
        assert_eq!(crate::common::finish(&mut queue), (true, vec![7; 512]));
        let again = || daemon.log().contains("connected to the NBD server again");
        until("that it is connected again is told", again);
        assert!(crate::common::write(&device, &mut queue, 4, 8));
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0, "nothing was lost");
        daemon.stop();
    }
}

#[test]
fn f06_requests_fail_after_the_time_that_was_given_until_the_server_is_back() {
    let dir = folder();
    let path = dir.path();
    image(path);
    let Some(first) = nbdkit(path, &["file", "disk.img"]) else { return };
    let daemon = serve(path, &["--reconnect-timeout", "1"]);
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 3, 7));
    queue.flush(()).unwrap();
    assert!(crate::common::finish(&mut queue).0);
    drop(first);
    let read = |queue: &mut BlkQueue<()>| {
        queue.read(3 * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
        crate::common::finish(queue)
    };
    assert!(!read(&mut queue).0, "a read without a server");
    until("that is told", || daemon.log().contains("requests fail until there is one"));
    let _server = nbdkit(path, &["file", "disk.img"]);
    until("the server is back", || daemon.log().contains("connected to the NBD server"));
    assert_eq!(read(&mut queue), (true, vec![7; 512]));
    daemon.stop();
}

#[test]
fn f08_a_server_that_is_killed_costs_its_guest_a_moment() {
    for (cache, survives) in [("writethrough", true), ("writeback", false)] {
        let dir = folder();
        let path = dir.path();
        image(path);
        let Some(first) = nbdkit(path, &["file", "disk.img"]) else { return };
        let daemon = serve(path, &["--cache", cache]);
        let (flushed, _server) = meanwhile(path, |answered| {
            let mut server = Some(first);
            for round in 1..=3 {
                goes_on(answered, 50 * round);
                drop(server.take());
                server = nbdkit(path, &["file", "disk.img"]);
                goes_on(answered, 50);
            }
            server
        });
        let log = daemon.log();
        assert!(log.contains("is lost") && log.contains("connected to the NBD server"), "{log}");
        assert_eq!(flushed, survives, "{cache}: {log}");
        daemon.stop();
    }
}

#[test]
fn f08_a_daemon_that_is_killed_leaves_what_was_answered() {
    let dir = folder();
    let path = dir.path();
    image(path);
    // nbdkit 1.32 ends now and then when a client of it is killed.
    let socket = path.join("n.sock").display().to_string();
    let args = ["-t", "-e", "8", "-f", "raw", "-k", &socket, "disk.img"];
    let Some(_server) = server(path, "qemu-nbd", &args) else { return };
    // With a cache nobody can tell what the server would have lost if it had been started anew, too.
    for (cache, survives) in [("writethrough", true), ("writeback", false)] {
        let args = ["--cache", cache, "--state-dir", "state"];
        let mut daemon = Some(serve(path, &args));
        let (flushed, daemon) = meanwhile(path, |answered| {
            for round in 1..=3 {
                goes_on(answered, 40 * round);
                daemon.take().unwrap().kill();
                daemon = Some(serve(path, &args));
                goes_on(answered, 40);
            }
            daemon
        });
        let log = daemon.unwrap().log();
        assert_eq!(flushed, survives, "{cache}: {log}");
        // The last one may have been killed amid reads, with nothing owed.
        let says = ["were not flushed, may be lost", "a flush had failed"];
        assert_eq!(says.iter().any(|words| log.contains(words)), !survives, "{log}");
    }
}

/// A server that has lost all that it was not told to flush when it is started anew, while no daemon is there.
#[test]
fn f17_a_daemon_that_ends_has_its_server_flush_and_one_that_is_killed_leaves_a_mark() {
    for (killed, more) in
        [(false, &[][..]), (true, &[]), (false, &["--isolate"]), (true, &["--sandbox", "off"])]
    {
        let dir = folder();
        let path = dir.path();
        let flushes = || {
            let asked = std::fs::read_to_string(path.join("asked")).unwrap();
            asked.lines().filter(|line| line.contains(" Flush ")).count()
        };
        let start = || nbdkit(path, &["--filter=log", "memory", "8M", "logfile=asked"]);
        let args = [&["--queues", "1", "--state-dir", "state"], more].concat();
        let Some(server) = start() else { return };
        let daemon = serve(path, &args);
        let mut device = connect(path, 1);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        assert!(crate::common::write(&device, &mut queue, 3, 7));
        assert_eq!(flushes(), 1, "the first request is one");
        if killed {
            daemon.kill();
        } else {
            daemon.stop();
            assert!(flushes() > 1, "{more:?}: none was sent at the end");
        }
        drop(server);
        let _server = start();
        let daemon = serve(path, &args);
        let flush = |queue: &mut BlkQueue<()>| {
            queue.flush(()).unwrap();
            crate::common::finish(queue).0
        };
        assert_eq!(flush(&mut queue), !killed, "{more:?}: {}", daemon.log());
        // Whoever begins afresh was answered nothing.
        drop((queue, device));
        let mut device = connect(path, 1);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        assert!(flush(&mut queue), "{more:?}: {}", daemon.log());
        drop((queue, device));
        daemon.stop();
        let left = crate::common::names(&path.join("state"));
        // What the server offered is kept for a start while it is away.
        let owed: Vec<_> = left.iter().filter(|name| !name.starts_with("known-")).collect();
        assert!(owed.is_empty(), "{more:?}: nothing is owed: {owed:?}");
    }
}

/// Nobody can come after the front-end of an inherited socket: the daemon ends by itself, in the same order.
#[test]
fn c63_a_disk_that_ends_by_itself_has_its_server_flush() {
    let dir = folder();
    let path = dir.path();
    let args = ["--filter=log", "memory", "8M", "logfile=asked"];
    let Some(_server) = nbdkit(path, &args) else { return };
    let flushes = || {
        let asked = std::fs::read_to_string(path.join("asked")).unwrap();
        asked.lines().filter(|line| line.contains(" Flush ")).count()
    };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let keep = |on: bool| {
        let flags = if on { rustix::io::FdFlags::CLOEXEC } else { rustix::io::FdFlags::empty() };
        rustix::io::fcntl_setfd(&theirs, flags).unwrap();
    };
    let fd = std::os::fd::AsRawFd::as_raw_fd(&theirs).to_string();
    let export = format!("nbd:unix:{}/n.sock", path.display());
    keep(false);
    let words = [&export, "--fd", &fd, "--queues", "1", "--state-dir", "state"];
    let mut daemon = Daemon::serve(path, &words);
    keep(true);
    let mut device = ringway_driver::Options::new().over(ours).unwrap();
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 3, 7));
    assert_eq!(flushes(), 1, "the first request is one");
    drop(queue);
    device.stop().unwrap();
    assert_eq!(daemon.wait().0.code(), Some(0), "{}", daemon.log());
    assert!(flushes() > 1, "none was sent at the end");
    // What the server offered is kept for a start while it is away.
    let left = crate::common::names(&path.join("state"));
    let owed: Vec<_> = left.iter().filter(|name| !name.starts_with("known-")).collect();
    assert!(owed.is_empty(), "nothing is owed: {owed:?}: {}", daemon.log());
}

#[test]
fn f17_a_pause_of_an_export_is_kept_or_refused() {
    let dir = folder();
    let path = dir.path();
    image(path);
    let Some(_server) = nbdkit(path, &["file", "disk.img"]) else { return };
    let args = ["--state-dir", "state", "--control", "ctl"];
    let daemon = serve(path, &args);
    let said = ctl(path, &["pause", "s"]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    daemon.kill();
    let daemon = serve(path, &args);
    assert!(
        daemon.log().contains("paused, as it was when it was served before"),
        "{}",
        daemon.log()
    );
    assert!(ctl(path, &["resume", "s"]).status.success());
    // Somebody takes the folder away.
    std::fs::remove_dir_all(path.join("state")).unwrap();
    let said = ctl(path, &["pause", "s"]);
    assert!(!said.status.success());
    assert!(text(&said.stderr).contains("would not outlive this daemon"), "{}", text(&said.stderr));
    assert!(!text(&ctl(path, &["list"]).stdout).contains("paused"));
    daemon.stop();
}

#[test]
fn f09_requests_that_a_server_fails_are_held_until_it_is_mended() {
    let dir = folder();
    let path = dir.path();
    image(path);
    let error = ["--filter=error", "file", "disk.img", "error-pread=EIO"];
    let file = format!("error-file={}/broken", path.display());
    let rate = ["error-pread-rate=100%", &file];
    let Some(_server) = nbdkit(path, &[&error[..], &rate].concat()) else { return };
    let _daemon = serve(path, &["--on-read-error", "hold", "--control", "ctl"]);
    let ctl = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl"]).args(args).current_dir(path);
        text(&run(command).stdout)
    };
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 3, 7));
    std::fs::write(path.join("broken"), "").unwrap();
    let buffer = device.pool().alloc(512).unwrap();
    queue.read(3 * 512, buffer, ()).unwrap();
    queue.submit().unwrap();
    until("the read is held", || ctl(&["list"]).contains("1 request is held"));
    std::fs::remove_file(path.join("broken")).unwrap();
    ctl(&["retry", "0"]);
    let (ok, bytes) = crate::common::finish(&mut queue);
    assert!(ok && bytes == [7; 512]);
}

#[test]
fn what_cannot_be_had_is_refused_with_the_reason_and_nothing_is_made() {
    let dir = folder();
    let path = dir.path();
    let here = path.display();
    std::fs::write(path.join("nbd:x"), vec![0; 1 << 20]).unwrap();
    let Some(_server) = nbdkit(
        path,
        &[
            "-e",
            "one",
            "--filter=exportname",
            "memory",
            "1M",
            "exportname-strict=true",
            "exportname=one",
            "exportname-list=explicit",
        ],
    ) else {
        return;
    };
    let before = snapshot(path);
    let good = format!("nbd:unix:{here}/n.sock:one");
    for (args, wanted) in [
        (&["nbd:x"][..], "neither unix: nor // follows nbd:"),
        (&["nbds://h/x"], "TLS"),
        (&["ndb://h/x"], "did you mean 'nbd:'"),
        (&["nbd://some.invalid/x"], "cannot look up the host 'some.invalid'"),
        (&["nbd:unix:/nowhere/x.sock"], "No such file or directory"),
        (&[&format!("nbd:unix:{here}/disk.img")], "Connection refused"),
        (&[&format!("nbd:unix:{here}/n.sock:two")], "no export 'two'. It has: 'one'"),
        (&[&good, "--cache", "none"], "--cache is writeback"),
        (&[&good, "--engine", "threads"], "leave --engine out"),
        (&[&good, "--size", "1M"], "leave --size out"),
        (&[&good, "--format", "qcow2"], "served as raw disks"),
        (&[&good, "--incoming"], "no lock"),
        (&[&good, "--block-size", "512", "--serial", "123456789012345678901"], "at most 20"),
    ] {
        let mut command = ringway();
        command.arg("serve").args(args).args(["--socket", "s"]).current_dir(path);
        let output = run(command);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{args:?}: {said}");
        assert_eq!(snapshot(path), before);
    }
    // A file of such a name.
    Daemon::serve(path, &["./nbd:x", "--socket", "s"]).stop();
    Daemon::serve(path, &[&good, "--socket", "s", "--read-only"]).stop();
}

#[test]
fn tools_know_exports() {
    let dir = folder();
    let path = dir.path();
    image(path);
    let Some(_server) = nbdkit(path, &["file", "disk.img"]) else { return };
    let export = format!("nbd:unix:{}/n.sock", path.display());
    let export = export.as_str();
    let tool = |args: &[&str]| {
        let mut command = ringway();
        command.args(args).current_dir(path);
        let output = run(command);
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        (output.status.code(), said)
    };
    let succeeds = |args: &[&str]| {
        let (status, said) = tool(args);
        assert_eq!(status, Some(0), "{args:?}: {said}");
        said
    };
    let fails = |args: &[&str], wanted: &str| {
        let (status, said) = tool(args);
        assert!(status == Some(1) && said.contains(wanted), "{args:?}: {status:?} {said}");
    };
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
    pattern::fill(&mut bytes[1 << 20..2 << 20], 1, MIB / 512, 7);
    std::fs::write(path.join("a.img"), &bytes).unwrap();
    fails(&["copy", "a.img", export], "Overwrite it with --force");
    succeeds(&["copy", "--force", "--verify", "a.img", export]);
    assert!(std::fs::read(path.join("disk.img")).unwrap() == bytes, "what was copied is there");
    succeeds(&["copy", "--verify", export, "b.img"]);
    assert!(std::fs::read(path.join("b.img")).unwrap() == bytes, "the copy is the export");
    succeeds(&["copy", export, "b.qcow2"]);
    let mut command = ringway();
    command.args(["copy", "--force", export, "b.img"]).current_dir(path);
    let said = text(&run(command).stderr);
    assert!(!said.contains("INFO") && !said.contains("front-end"), "{said}");
    fails(&["copy", export, export], "are the same");
    let (status, said) = tool(&["copy", "--from-format", "qcow2", export, "c.img"]);
    assert!(status == Some(2) && said.contains("leave out --from-format"), "{said}");
    succeeds(&["io", export, "-c", "write -P 0x5a 1M 64K", "-c", "flush"]);
    succeeds(&["io", "--read-only", export, "-c", "verify -P 0x5a 1M 64K"]);
    let info = succeeds(&["info", "--json", export]);
    for wanted in ["\"bytes\": 8388608", "\"NBD export\"", "\"write-zeroes\"", "\"flush\""] {
        assert!(info.contains(wanted), "{wanted}: {info}");
    }
    assert!(succeeds(&["info", export]).contains("server offers"));
    assert!(succeeds(&["doctor", export]).contains("nbd"));
    succeeds(&["bench", export, "--io-size", "1M", "--jobs", "2", "--quiet"]);
    fails(&["bench", export, "--rw", "write", "--io-size", "1M"], "Add --allow-write");
    let (status, said) = tool(&["info", "nbd:/nowhere"]);
    assert!(status == Some(2) && said.contains("neither unix: nor //"), "{said}");
    fails(&["info", "nbd:unix:/nowhere/n.sock"], "/nowhere/n.sock");
}

/// Servers with their words, and whether they tell where they have data.
const TELLING: &[(&str, &[&str], bool)] = &[
    (
        "nbdkit",
        &["-f", "-U", "n.sock", "--filter=log", "file", "disk.img", "logfile=DIR/reads"],
        true,
    ),
    // It serves one client at a time.
    ("qemu-nbd", SERVERS[4].1, true),
    ("qemu-storage-daemon", SERVERS[5].1, true),
    ("ringway", SERVERS[6].1, true),
    ("nbdkit", &["-f", "-U", "n.sock", "--no-sr", "file", "disk.img"], false),
    ("nbdkit", &["-f", "-U", "n.sock", "--filter=noextents", "file", "disk.img"], false),
];

/// An image of 64 MiB, of which 2 MiB are data. Its content.
fn sparse(dir: &Path) -> Vec<u8> {
    let mut bytes = vec![0; 64 << 20];
    let file = std::fs::File::create(dir.join("disk.img")).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for at in [MIB, 40 * MIB] {
        let data = &mut bytes[usize::try_from(at).unwrap()..][..1 << 20];
        pattern::fill(data, 1, at / 512, 7);
        std::os::unix::fs::FileExt::write_all_at(&file, data, at).unwrap();
    }
    bytes
}

fn tool(dir: &Path, args: &[&str]) -> (String, String) {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    let output = run(command);
    let (said, message) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{args:?}: {said} {message}");
    (said, message)
}

#[test]
fn f12_holes_of_an_export_are_not_read() {
    for &(program, args, tells) in TELLING {
        let dir = folder();
        let path = dir.path();
        let bytes = sparse(path);
        let args: Vec<String> =
            args.iter().map(|arg| arg.replace("DIR", path.to_str().unwrap())).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let Some(_server) = server(path, program, &args) else { continue };
        let name = if program == "nbdkit" { "" } else { ":d" };
        let export = format!("nbd:unix:{}/n.sock{name}", path.display());
        let (_, message) = tool(path, &["copy", "--verify", &export, "b.img"]);
        assert!(std::fs::read(path.join("b.img")).unwrap() == bytes, "{program}: {message}");
        if let Ok(log) = std::fs::read_to_string(path.join("reads")) {
            let at = |line: &str| -> Option<u64> {
                let hex = line.split_once("...")?.0.split_once("offset=0x")?.1;
                u64::from_str_radix(hex.split(' ').next()?, 16).ok()
            };
            let reads: Vec<u64> =
                log.lines().filter(|line| line.contains(" Read ")).filter_map(at).collect();
            let data = [MIB..2 * MIB, 40 * MIB..41 * MIB];
            let hit = |at: &u64| data.iter().any(|data| data.contains(at));
            assert!(!reads.is_empty() && reads.iter().all(hit), "{log}");
        }
        let (info, _) = tool(path, &["info", "--json", &export]);
        assert_eq!(info.contains("\"data_bytes\": 2097152"), tells, "{program}: {info}");
    }
}

#[test]
fn f12_a_server_that_lies_about_its_holes_is_read() {
    use std::io::{Read, Write};
    let dir = folder();
    let path = dir.path();
    let bytes = sparse(path);
    let Some(_server) = nbdkit(path, &["file", "disk.img"]) else { return };
    let listener = std::os::unix::net::UnixListener::bind(path.join("liar.sock")).unwrap();
    let real = path.join("n.sock");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut client, mut server) = (stream.unwrap(), UnixStream::connect(&real).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            });
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 20];
                while let Ok(got @ 1..) = server.read(&mut buffer) {
                    // Chunks of block status become some of a kind that nobody knows.
                    if buffer.starts_with(&[0x66, 0x8e, 0x33, 0xef]) && buffer[6..8] == [0, 5] {
                        buffer[7] = 99;
                    }
                    if client.write_all(&buffer[..got]).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    let export = format!("nbd:unix:{}/liar.sock", path.display());
    let (_, message) = tool(path, &["copy", &export, "b.img"]);
    assert!(
        message.contains("does not keep to the protocol") && message.contains("All of it"),
        "{message}"
    );
    assert!(std::fs::read(path.join("b.img")).unwrap() == bytes);
}

/// A name of this host that has to be looked up, and its address.
fn named() -> Option<(String, String)> {
    let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    let named = |line: &str| {
        let mut words = line.split('#').next()?.split_whitespace();
        let ip = words.next().filter(|ip| ip.starts_with("127."))?;
        Some((words.find(|name| *name != "localhost")?.to_owned(), ip.to_owned()))
    };
    hosts.lines().find_map(named)
}

/// Whoever connects to the port is connected to `n.sock`.
fn forward(dir: &Path, listener: std::net::TcpListener) {
    let socket = dir.join("n.sock");
    std::thread::spawn(move || {
        for client in listener.incoming() {
            // A server that is away has its clients go.
            let (Ok(client), Ok(server)) = (client, UnixStream::connect(&socket)) else { continue };
            let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &from, &mut &to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &server, &mut &client);
                let _ = client.shutdown(std::net::Shutdown::Both);
            });
        }
    });
}

#[test]
fn f13_a_host_is_looked_up_before_the_sandbox_and_found_again_in_it() {
    let Some((name, ip)) = named() else {
        skip(Need::HostName, "no address of /etc/hosts that is this host's has a name of its own");
        return;
    };
    let dir = folder();
    let path = dir.path();
    image(path);
    let Some(first) = nbdkit(path, &["file", "disk.img"]) else { return };
    let listener = std::net::TcpListener::bind((ip, 0)).unwrap();
    let export = format!("nbd://{name}:{}", listener.local_addr().unwrap().port());
    forward(path, listener);
    let args = [export.as_str(), "--socket", "s", "--cache", "writethrough", "--control", "ctl"];
    let daemon = Daemon::serve(path, &args);
    let (flushed, server) = meanwhile(path, |answered| {
        goes_on(answered, 50);
        drop(first);
        let second = nbdkit(path, &["file", "disk.img"]);
        goes_on(answered, 50);
        second
    });
    assert!(flushed, "{}", daemon.log());
    until("that is told", || daemon.log().contains("connected to the NBD server"));
    let mut command = ringway();
    let other = ["nbd://some.invalid/x", "--socket", "t"];
    command.args(["ctl", "--control", "ctl", "add"]).args(other).current_dir(path);
    let message = text(&run(command).stderr);
    assert!(
        message.contains("'some.invalid' was not looked up when this daemon started"),
        "{message}"
    );
    daemon.stop();
    tool(path, &["copy", &export, "b.img"]);
    let [disk, copy] = ["disk.img", "b.img"].map(|name| std::fs::read(path.join(name)).unwrap());
    assert!(disk == copy);
    drop(server);
}

#[test]
fn f13_all_addresses_of_a_host_are_tried() {
    let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else {
        skip(Need::HostName, "no address of IPv6");
        return;
    };
    let dir = folder();
    let path = dir.path();
    image(path);
    let Some(_server) = nbdkit(path, &["file", "disk.img"]) else { return };
    let port = listener.local_addr().unwrap().port();
    forward(path, listener);
    tool(path, &["info", &format!("nbd://[::1]:{port}")]);
    // Whoever has the same port of 127.0.0.1 would be tried first.
    if std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        tool(path, &["info", &format!("nbd://localhost:{port}")]);
    }
    let mut command = ringway();
    command.args(["info", "nbd://localhost:1/d"]).current_dir(path);
    let message = text(&run(command).stderr);
    assert!(message.contains("localhost:1 (tried: 127.0.0.1, ::1)"), "{message}");
}

/// What a server is asked for last may be with it for longer than it is waited for.
#[test]
fn e66_a_disk_whose_flush_is_still_with_its_server_is_not_called_drained() {
    let dir = folder();
    let path = dir.path();
    let words = [
        "get_size=echo 8M",
        "pread=head -c $3 /dev/zero",
        "pwrite=cat >/dev/null",
        "can_write=true",
    ];
    // A start flushes, too.
    let go = path.join("go");
    std::fs::write(&go, []).unwrap();
    let waits = format!("flush=while [ ! -e {} ]; do sleep 0.1; done", go.display());
    let flush = ["can_flush=true", &waits];
    let Some(_server) = nbdkit(path, &[&["eval"][..], &words, &flush].concat()) else { return };
    let daemon = serve(path, &["--control", "ctl"]);
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 0, 7), "{}", daemon.log());
    drop((queue, device));
    std::fs::remove_file(&go).unwrap();
    let removed = ctl(path, &["remove", "s", "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&removed.stdout).unwrap();
    assert_eq!(said["drained"], false, "{said}: {}", daemon.log());
    std::fs::write(&go, []).unwrap();
    daemon.stop();
}

/// The server is away with a write unanswered when the disk is removed. Whoever uses the export next, in the same
/// daemon, has it alone.
#[test]
fn f19_a_removed_disk_does_not_come_back_to_its_server() {
    let dir = folder();
    let path = dir.path();
    image(path);
    let slow = ["--filter=log", "--filter=delay", "file", "disk.img"];
    let first = nbdkit(path, &[&slow[..], &["delay-write=3600", "logfile=asked"]].concat());
    let Some(first) = first else { return };
    let daemon = serve(path, &["--control", "ctl"]);
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    let mut buffer = device.pool().alloc(512).unwrap();
    buffer.fill(7);
    queue.write(0, buffer, ()).unwrap();
    queue.submit().unwrap();
    let writes = |log: &str| {
        let asked = std::fs::read_to_string(path.join(log)).unwrap_or_default();
        asked.lines().filter(|line| line.contains(" Write ")).count()
    };
    until("the write is sent", || writes("asked") == 1);
    drop(first);
    // Its guest goes as well, and the disk then has its time for what is in flight.
    drop((queue, device));
    ctl(path, &["remove", "s"]);
    let tasks = || std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let is_supervisor = |task: std::io::Result<std::fs::DirEntry>| {
        let name = task.and_then(|task| std::fs::read_to_string(task.path().join("comm")));
        name.is_ok_and(|name| name == "nbd\n")
    };
    until("nobody connects any more", || !tasks().any(is_supervisor));
    let _server = nbdkit(path, &["--filter=log", "file", "disk.img", "logfile=again"]);
    std::fs::create_dir(path.join("next")).unwrap();
    let export = format!("nbd:unix:{}/n.sock", path.display());
    let added = ctl(path, &["add", &export, "--socket", "next/s", "--queues", "1"]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    let mut device = connect(&path.join("next"), 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 0, 9));
    queue.flush(()).unwrap();
    assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
    assert_eq!(crate::common::read(&device, &mut queue, 0), [9; 512]);
    drop((queue, device));
    daemon.stop();
    assert_eq!(writes("again"), 1);
}

/// A server of two disks of one size, started anew with them in another order: who names none gets another one.
#[test]
fn f20_neither_guest_nor_copy_goes_on_with_another_disk() {
    let dir = folder();
    let path = dir.path();
    for (name, byte) in [("vm1.img", 1), ("vm2.img", 2)] {
        std::fs::write(path.join(name), vec![byte; 8 << 20]).unwrap();
    }
    let limit = ["--format", "raw", "--bps", "2M", "--listen", "unix:n.sock"];
    let start = |disks: [&'static str; 2]| {
        server(path, "ringway", &[&["nbd"], &disks[..], &limit].concat())
    };
    let first = start(["vm1.img", "vm2.img"]);
    let daemon = serve(path, &[]);
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(crate::common::write(&device, &mut queue, 3, 7));
    queue.flush(()).unwrap();
    assert!(crate::common::finish(&mut queue).0);
    let export = format!("nbd:unix:{}/n.sock", path.display());
    let mut copy = ringway();
    copy.args(["copy", &export, "backup.img"]).current_dir(path);
    let copy = std::thread::spawn(move || run(copy));
    let begun = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().to_string_lossy().contains("backup.img")
    };
    until("the copy has begun", || std::fs::read_dir(path).unwrap().any(begun));
    drop(first);
    let other = start(["vm2.img", "vm1.img"]);
    let mut buffer = device.pool().alloc(512).unwrap();
    buffer.fill(8);
    queue.write(4 * 512, buffer, ()).unwrap();
    queue.submit().unwrap();
    until("that is told", || daemon.log().contains("gives the export 'vm2.img' now"));
    let copied = copy.join().unwrap();
    assert!(!copied.status.success(), "{}", text(&copied.stdout));
    drop(other);
    let _first = start(["vm1.img", "vm2.img"]);
    assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
    drop((queue, device));
    daemon.stop();
    let vm1 = std::fs::read(path.join("vm1.img")).unwrap();
    assert_eq!((vm1[3 * 512], vm1[4 * 512], vm1[5 * 512]), (7, 8, 1));
    assert!(std::fs::read(path.join("vm2.img")).unwrap().iter().all(|&byte| byte == 2));
}

/// A host that was started anew, or a daemon that was killed, while the server of one of its disks is away: the others
/// are served, and that one once the server is there.
#[test]
fn f22_a_server_that_is_away_keeps_no_other_disk_from_being_served() {
    for more in [&[][..], &["--isolate"], &["--sandbox", "off"]] {
        let dir = folder();
        let path = dir.path();
        std::fs::write(path.join("n.img"), vec![5; 8 << 20]).unwrap();
        let start = || nbdkit(path, &["file", "n.img"]);
        let disks = format!(
            "control = 'ctl'\nstate-dir = 'state'\n[[disk]]\nimage = 'disk.img'\nformat = 'raw'\nsocket = 'a'\n\
             [[disk]]\nimage = 'nbd:unix:{}/n.sock'\nsocket = 's'\nqueues = 2\n",
            path.display()
        );
        std::fs::write(path.join("c.toml"), disks).unwrap();
        let args = [&["--config", "c.toml"], more].concat();
        // Nobody knows it yet.
        let mut first = ringway();
        first.arg("serve").args(&args).current_dir(path);
        let refused = run(first);
        assert_eq!(refused.status.code(), Some(1), "{more:?}");
        assert!(text(&refused.stderr).contains("Does its server run?"), "{more:?}");
        let Some(server) = start() else { return };
        Daemon::serve(path, &args).stop();
        drop(server);
        Daemon::serve(path, &args).kill();
        let daemon = Daemon::serve(path, &args);
        let log = || daemon.log();
        assert!(log().contains("its NBD server is away: cannot connect to"), "{more:?}: {}", log());
        let mut other = ringway_driver::Options::new().connect(path.join("a")).unwrap();
        let mut others = other.queue().unwrap();
        assert!(crate::common::write(&other, &mut others, 0, 1), "{more:?}");
        let mut device = connect(path, 2);
        let mut queues = device.queues::<()>().unwrap();
        assert_eq!(device.capacity(), 8 << 20, "{more:?}: as it was");
        for queue in &mut queues {
            let buffer = device.pool().alloc(512).unwrap();
            queue.read(512, buffer, ()).unwrap();
            queue.submit().unwrap();
        }
        until("it is tried", || log().contains("its NBD server is away"));
        let _server = start();
        for queue in &mut queues {
            let (ok, bytes) = crate::common::finish(queue);
            assert!(ok && bytes == [5; 512], "{more:?}: {}", log());
        }
        assert!(crate::common::write(&device, &mut queues[0], 3, 7));
        queues[1].flush(()).unwrap();
        assert!(crate::common::finish(&mut queues[1]).0, "{more:?}: {}", log());
        drop((queues, device, others, other));
        daemon.stop();
        assert_eq!(std::fs::read(path.join("n.img")).unwrap()[3 * 512], 7, "{more:?}");
    }
}

/// While it was away the export has become another one: its disk waits, and is not served from that.
#[test]
fn f22_an_export_that_came_back_as_another_one_is_not_used() {
    let dir = folder();
    let path = dir.path();
    let args = ["--state-dir", "state", "--reconnect-timeout", "1"];
    let Some(server) = nbdkit(path, &["memory", "8M"]) else { return };
    serve(path, &args).stop();
    drop(server);
    let daemon = serve(path, &args);
    let server = nbdkit(path, &["memory", "16M"]);
    until("that is told", || daemon.log().contains("another size than before"));
    let mut device = connect(path, 1);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    assert!(!crate::common::write(&device, &mut queue, 3, 7), "{}", daemon.log());
    drop(server);
    // That the other one was asked for the first flush is no reason not to ask the right one.
    let _server = nbdkit(path, &["--filter=log", "memory", "8M", "logfile=asked"]);
    until("it is asked", || {
        std::fs::read_to_string(path.join("asked")).is_ok_and(|asked| asked.contains("Flush"))
    });
    until("it is used", || daemon.log().contains("connected to the NBD server again"));
    drop((queue, device));
    daemon.stop();
}

/// However many servers are silent, a start takes as long as with one.
#[test]
fn f22_silent_servers_are_waited_for_beside_each_other() {
    for more in [&[][..], &["--sandbox", "off"]] {
        let dir = folder();
        let path = dir.path();
        let names = ["a", "b", "c", "d"];
        let disk = |name: &str| {
            let at = path.display();
            format!(
                "[[disk]]\nimage = 'nbd:unix:{at}/{name}.sock'\nsocket = '{name}'\nqueues = 1\n"
            )
        };
        let disks = names.map(disk).concat();
        std::fs::write(path.join("c.toml"), format!("state-dir = 'state'\n{disks}")).unwrap();
        let args = [&["--config", "c.toml"], more].concat();
        let Some(server) = nbdkit(path, &["memory", "8M"]) else { return };
        let socket = |name: &str| path.join(format!("{name}.sock"));
        names.iter().for_each(|name| std::os::unix::fs::symlink("n.sock", socket(name)).unwrap());
        Daemon::serve(path, &args).stop();
        drop(server);
        // Of the connections that are there, and the most at a time.
        let counts = Arc::new(Mutex::new((0, 0)));
        for name in names {
            std::fs::remove_file(socket(name)).unwrap();
            let silent = UnixListener::bind(socket(name)).unwrap();
            let counts = Arc::clone(&counts);
            std::thread::spawn(move || {
                let (mut stream, _) = silent.accept().unwrap();
                let count = |more: i32| {
                    let mut counts = counts.lock().unwrap();
                    counts.0 += more;
                    counts.1 = counts.1.max(counts.0);
                };
                count(1);
                // Until it is given up.
                let _ = std::io::copy(&mut stream, &mut std::io::sink());
                count(-1);
            });
        }
        let daemon = Daemon::serve(path, &args);
        let log = daemon.log();
        assert_eq!(log.matches("its NBD server is away").count(), 4, "{more:?}: {log}");
        assert!(counts.lock().unwrap().1 > 1, "{more:?}: one after another: {log}");
        daemon.stop();
    }
}

/// A server that shakes hands and does not answer the first flush is away for its disk, and for no other one.
#[test]
fn e76_a_server_that_does_not_answer_the_first_flush_keeps_no_other_disk_from_being_served() {
    for more in [&[][..], &["--sandbox", "off"]] {
        let dir = folder();
        let path = dir.path();
        let hangs = path.join("hangs");
        let flush = format!("flush=while [ -e {} ]; do sleep 0.1; done", hangs.display());
        let words = ["eval", "get_size=echo 8388608", "pread=head -c $3 /dev/zero", &flush];
        let words =
            [&words[..], &["pwrite=cat > /dev/null", "can_flush=exit 0", "can_write=exit 0"]];
        let Some(_server) = nbdkit(path, &words.concat()) else { return };
        let disks = format!(
            "state-dir = 'state'\n[[disk]]\nimage = 'disk.img'\nformat = 'raw'\nsocket = 'a'\n\
             [[disk]]\nimage = 'nbd:unix:{}/n.sock'\nsocket = 's'\nqueues = 1\nresponse-timeout = 2\n",
            path.display()
        );
        std::fs::write(path.join("c.toml"), disks).unwrap();
        let args = [&["--config", "c.toml"], more].concat();
        Daemon::serve(path, &args).stop();
        std::fs::write(&hangs, "").unwrap();
        let daemon = Daemon::serve(path, &args);
        let log = || daemon.log();
        assert!(log().contains("its NBD server is away: its first flush"), "{more:?}: {}", log());
        let mut other = ringway_driver::Options::new().connect(path.join("a")).unwrap();
        let mut others = other.queue().unwrap();
        assert!(crate::common::write(&other, &mut others, 0, 1), "{more:?}");
        std::fs::remove_file(&hangs).unwrap();
        let mut device = connect(path, 1);
        let mut queue = device.queue().unwrap();
        assert!(crate::common::write(&device, &mut queue, 3, 7), "{more:?}: {}", log());
        drop((queue, device, others, other));
        daemon.stop();
    }
}

/// Whoever looks after guests is told of a server that is away where else it looks, not in the log alone.
#[test]
fn e84_a_server_that_is_away_is_shown_until_it_is_back() {
    for more in [&[][..], &["--isolate"]] {
        let dir = folder();
        let path = dir.path();
        let start = || nbdkit(path, &["memory", "8M"]);
        let Some(server) = start() else { return };
        let args = [&["--state-dir", "state", "--control", "ctl"][..], more].concat();
        let daemon = serve(path, &args);
        let mut events = BufReader::new(UnixStream::connect(path.join("ctl")).unwrap());
        events.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
        events.get_mut().write_all(b"{\"command\":\"events\"}\n").unwrap();
        let mut lines = events.lines().map(Result::unwrap);
        assert!(lines.next().is_some_and(|answer| answer.contains("\"ok\":true")));
        let mut event = |what: &str| {
            let word = format!("\"event\":\"{what}\"");
            lines.find(|line| line.contains(&word)).expect("it is told")
        };
        let said = |args: &[&str]| {
            let mut command = ringway();
            command.args(["ctl", "--control", "ctl"]).args(args).current_dir(path);
            text(&run(command).stdout)
        };
        let storage = |what: &str| {
            let answer: serde_json::Value = serde_json::from_str(&said(&[what, "--json"])).unwrap();
            answer["disks"][0]["storage"].clone()
        };
        let well = serde_json::json!({ "server_away": null, "flushes_fail": false });
        assert_eq!((storage("list"), storage("stats")), (well.clone(), well.clone()));
        let mut device = connect(path, 1);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0, "{more:?}");
        drop(server);
        assert!(event("server-away").contains("\"id\":0"));
        for what in ["list", "stats"] {
            assert!(storage(what)["server_away"].is_string(), "{more:?}: {}", storage(what));
        }
        assert!(said(&["list"]).contains("its NBD server is away, and requests wait"), "{more:?}");
        let mut top = ringway();
        top.args(["top", "--control", "ctl", "--once"]).current_dir(path);
        let shown = text(&run(top).stdout);
        assert!(shown.contains("no server"), "{more:?}: {shown}");
        let _server = start();
        event("server-back");
        assert_eq!((storage("list"), storage("stats")), (well.clone(), well), "{more:?}");
        drop((queue, device));
        daemon.stop();
    }
}
