//! A thread of the real program panics (hazard E5): what that costs, and what not. In a release
//! no thread can be told to.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, text, write};
use ringway_driver::{BlkQueue, Device, Options};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `ringway serve ARGS`, told to panic at `place`, when it comes to it for the `count`-th time.
fn with_panic(dir: &Path, place: &str, args: &[&str]) -> Command {
    let mut command = ringway();
    command.env("RINGWAY_PANIC_POINT", place).arg("serve").args(args).current_dir(dir);
    command
}

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

/// A configuration of two disks, at `s` and `t`.
fn two_disks(dir: &Path) -> [&'static str; 2] {
    std::fs::write(dir.join("other.img"), vec![0; 1 << 20]).unwrap();
    let disk = |image, socket| format!("[[disk]]\nimage = '{image}'\nsocket = '{socket}'\n");
    std::fs::write(dir.join("two.toml"), disk("disk.img", "s") + &disk("other.img", "t")).unwrap();
    ["--config", "two.toml"]
}

/// `ringway ctl --control ctl ARGS`.
fn ctl(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    run(command)
}

/// Waits until the log says `what`.
fn hear(daemon: &Daemon, what: &str) {
    let begun = Instant::now();
    while !daemon.log().contains(what) {
        assert!(begun.elapsed() < PATIENCE, "no {what}:\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// It ends by itself, in order: status 1, no sockets left, and the reason in the log.
fn ends(mut daemon: Daemon, dir: &Path, why: &str) {
    let (status, _) = daemon.wait();
    assert_eq!(status.code(), Some(1), "{status}: {}", daemon.log());
    assert!(daemon.log().contains(why), "no {why}:\n{}", daemon.log());
    for socket in ["s", "t"] {
        assert!(!dir.join(socket).exists(), "{socket} is still there:\n{}", daemon.log());
    }
}

/// One request at a time until the disk is gone.
fn read_on(device: &Device, queue: &mut BlkQueue<()>) {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let buffer = device.pool().alloc(512).unwrap();
        let asked = queue.read(0, buffer, ()).is_ok() && queue.submit().is_ok();
        let answered = asked && queue.wait(Some(Duration::from_secs(20))).unwrap_or(false);
        if !answered || !queue.pop().is_ok_and(|done| done.is_some()) {
            return;
        }
    }
    panic!("it goes on and on");
}

#[test]
fn e05_a_worker_that_panics_ends_the_daemon_in_order() {
    for engine in ["io_uring", "threads", "linux-aio"] {
        let dir = folder();
        let slow = "[[disk]]\nimage = 'null:1G,latency=2000ms'\nsocket = 't'\n";
        let fast = format!("[[disk]]\nimage = 'disk.img'\nsocket = 's'\nengine = '{engine}'\n");
        let toml = format!("poll = 'never'\n{fast}{slow}");
        std::fs::write(dir.path().join("disks.toml"), toml).unwrap();
        // No worker but that of the disk that is asked all the time has as many turns.
        let args = ["--config", "disks.toml", "--control", "ctl"];
        let daemon = Daemon::start(with_panic(dir.path(), "worker:500", &args));
        let mut events = ringway();
        events.args(["ctl", "--control", "ctl", "events"]).current_dir(dir.path());
        let events = events.stdout(Stdio::piped()).spawn().unwrap();
        let neighbour = connect(dir.path(), "t");
        let mut device = neighbour;
        let mut slow = device.queue::<u64>().unwrap();
        for number in 0..8 {
            slow.read(number * 4096, device.pool().alloc(4096).unwrap(), number).unwrap();
        }
        slow.submit().unwrap();
        let mut victim = connect(dir.path(), "s");
        let mut queue = victim.queue().unwrap();
        read_on(&victim, &mut queue);
        let why = format!("worker {engine}/0 ends: it panicked: told to panic at worker");
        ends(daemon, dir.path(), &why);
        let done = slow.completions().filter(|done| done.is_ok()).count();
        assert_eq!(done, 8, "{engine}: the neighbour's requests were finished first");
        let events = text(&events.wait_with_output().unwrap().stdout).to_owned();
        assert!(events.contains("\"worker-failed\""), "{engine}: {events}");
    }
}

/// How far the call got is not known: its request fails, as by an error of the disk.
#[test]
fn e05_a_call_that_panics_fails_its_request_alone() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--engine", "threads", "--cache", "writeback"];
    let daemon = Daemon::start(with_panic(dir.path(), "io:1", &args));
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    queue.flush(()).unwrap();
    queue.submit().unwrap();
    assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
    assert!(!queue.pop().unwrap().unwrap().is_ok(), "nobody knows whether it was flushed");
    for _ in 0..2 {
        queue.flush(()).unwrap();
        queue.submit().unwrap();
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
        assert!(!queue.pop().unwrap().unwrap().is_ok(), "what was lost is lost");
    }
    assert_eq!(read(&device, &mut queue, 7), [0; 512], "and the others are well");
    hear(&daemon, "told to panic at io");
    daemon.stop();
}

#[test]
fn e05_a_helper_thread_of_an_engine_that_ends_is_noticed() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--engine", "threads", "--cache", "writeback"];
    let daemon = Daemon::start(with_panic(dir.path(), "io-thread:1", &args));
    let mut device = connect(dir.path(), "s");
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    queue.flush(()).unwrap();
    queue.submit().unwrap();
    let why = "worker threads/0 ends: its engine failed: one of its threads has panicked";
    ends(daemon, dir.path(), why);
}

#[test]
fn e05_a_session_that_panics_costs_its_connection() {
    let dir = folder();
    let daemon =
        Daemon::start(with_panic(dir.path(), "session:20", &["disk.img", "--socket", "s"]));
    // The first connection has fewer messages than two.
    for _ in 0..4 {
        if let Ok(mut device) = Options::new().patience(PATIENCE).connect(dir.path().join("s")) {
            if let Ok(mut queue) = device.queue::<()>() {
                if queue.flush(()).is_ok() {
                    let _ = queue.submit();
                    let _ = queue.wait(Some(Duration::from_secs(5)));
                }
            }
        }
    }
    hear(&daemon, "a session panicked, its connection ends: told to panic at session");
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 3, 0x33), "the next one is served");
    daemon.stop();
}

/// What is in flight when a session panics is answered, in the guest's memory, before the connection
/// ends: nothing is written to it afterwards.
#[test]
fn e05_a_session_that_panics_drains_its_queues() {
    let dir = folder();
    let disk = ["null:1G,latency=1000ms", "--socket", "s"];
    // More messages than a connection begins with.
    let daemon = Daemon::start(with_panic(dir.path(), "session:60", &disk));
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue::<u64>().unwrap();
    for number in 0..8 {
        queue.read(number * 4096, device.pool().alloc(4096).unwrap(), number).unwrap();
    }
    let begun = Instant::now();
    queue.submit().unwrap();
    let mut messages = 0;
    // It is on, so that nothing has to be done for it.
    while device.set_writeback(true).is_ok() {
        messages += 1;
        assert!(messages < 60, "it goes on and on");
    }
    hear(&daemon, "a session panicked, its connection ends: told to panic at session");
    assert!(messages > 0 && begun.elapsed() >= Duration::from_millis(900), "{messages} messages");
    let done = queue.completions().filter(|done| done.is_ok()).count();
    assert_eq!(done, 8, "they were answered before the connection ended");
    drop((queue, device));
    daemon.stop();
}

/// Nobody knows what is in flight: the disk cannot be served again, so the daemon ends, whether its
/// front-end has gone or the disk is being removed. Its neighbour's requests are finished first.
#[test]
fn e05_a_stop_that_panics_ends_the_daemon_in_order() {
    for removed in [false, true] {
        // Queues are stopped for some messages too; in the middle of one it is the connection's panic.
        let last = (1..50).find(|&count| stop_that_panics(count, removed));
        assert!(last.is_some(), "the last stop is never reached");
    }
}

/// True if it was the last stop of the connection, the `count`-th of all.
fn stop_that_panics(count: u32, removed: bool) -> bool {
    let dir = folder();
    let slow = "[[disk]]\nimage = 'null:1G,latency=500ms'\nsocket = 't'\n";
    let toml = format!("control = 'ctl'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n{slow}");
    std::fs::write(dir.path().join("disks.toml"), toml).unwrap();
    let place = format!("stopping:{count}");
    let daemon = Daemon::start(with_panic(dir.path(), &place, &["--config", "disks.toml"]));
    let place = dir.path().join("t");
    let Ok(mut neighbour) = Options::new().patience(PATIENCE).connect(place) else { return false };
    let Ok(mut queue) = neighbour.queue::<u64>() else { return false };
    let ask = |queue: &mut BlkQueue<u64>| {
        for number in 0..8 {
            queue.read(number * 4096, neighbour.pool().alloc(4096).unwrap(), number).unwrap();
        }
        queue.submit().unwrap();
    };
    ask(&mut queue);
    let begun = Instant::now();
    let stats = || text(&ctl(dir.path(), &["--json", "stats"]).stdout).replace(' ', "");
    while !stats().contains(r#""in_flight":8"#) {
        assert!(begun.elapsed() < PATIENCE, "{}", stats());
        if daemon.log().contains("told to panic") {
            // That was a stop of the neighbour's.
            return false;
        }
        // A busy machine may need longer than the disk to see them in flight.
        queue.completions().for_each(|done| assert!(done.is_ok()));
        if queue.in_flight() == 0 {
            ask(&mut queue);
        }
    }
    let victim = Options::new().patience(PATIENCE).connect(dir.path().join("s"));
    let victim = victim.map(|mut device| (device.queue::<()>().is_ok(), device));
    if removed {
        ctl(dir.path(), &["remove", "disk.img"]);
    }
    drop(victim);
    hear(&daemon, "told to panic at stopping");
    hear(&daemon, "panicked, ");
    let was_last = daemon.log().contains("stopping queues panicked, the disk is served no more");
    if was_last {
        ends(daemon, dir.path(), "told to panic at stopping");
    } else {
        assert!(queue.wait_for(8, Some(PATIENCE)).unwrap(), "{}", daemon.log());
        daemon.stop();
    }
    let done = queue.completions().filter(|done| done.is_ok()).count();
    assert_eq!(done, 8, "the neighbour's requests were finished first");
    was_last
}

#[test]
fn e05_a_disk_s_thread_that_panics_ends_the_daemon_in_order() {
    let dir = folder();
    let args = two_disks(dir.path());
    let daemon = Daemon::start(with_panic(dir.path(), "disk:1", &args));
    let _client = std::os::unix::net::UnixStream::connect(dir.path().join("s")).unwrap();
    ends(daemon, dir.path(), "told to panic at disk");
}

/// What it waits for is not lost.
#[test]
fn e05_the_thread_that_waits_for_front_ends_outlives_panics() {
    let dir = folder();
    let args = two_disks(dir.path());
    // It has come by for both disks, and for some of what the first front-end says.
    let daemon = Daemon::start(with_panic(dir.path(), "sessions:9", &args));
    for _ in 0..5 {
        for socket in ["s", "t"] {
            let mut device = connect(dir.path(), socket);
            let mut queue = device.queue().unwrap();
            assert_eq!(read(&device, &mut queue, 7), [0; 512]);
        }
    }
    hear(&daemon, "the thread that waits for front-ends panicked: told to panic at sessions");
    daemon.stop();
}

#[test]
fn e05_the_control_socket_outlives_panics() {
    let args = ["disk.img", "--socket", "s", "--control", "ctl"];
    for (place, who) in
        [("control:1", "the control socket"), ("control-client:1", "a control client's thread")]
    {
        let dir = folder();
        let daemon = Daemon::start(with_panic(dir.path(), place, &args));
        assert_ne!(ctl(dir.path(), &["list"]).status.code(), Some(0), "{place}");
        hear(&daemon, &format!("{who} panicked: told to panic"));
        let again = ctl(dir.path(), &["list"]);
        assert_eq!(again.status.code(), Some(0), "{place}: {}", text(&again.stderr));
        daemon.stop();
    }
}

#[test]
fn e05_the_helper_outlives_panics() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl"];
    // The second image: the first is opened before the daemon is there.
    std::fs::write(dir.path().join("other.img"), vec![0; 1 << 20]).unwrap();
    let daemon = Daemon::start(with_panic(dir.path(), "helper-open:2", &args));
    let add = ["add", "other.img", "--socket", "t"];
    let refused = ctl(dir.path(), &add);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stdout));
    assert!(text(&refused.stderr).contains("panicked over it"), "{}", text(&refused.stderr));
    let again = ctl(dir.path(), &add);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    daemon.stop();
    // And whatever it is asked for first: the daemon starts, or says why not and leaves nothing.
    for count in 1..20 {
        let (dir, place) = (folder(), format!("helper:{count}"));
        let mut command = with_panic(dir.path(), &place, &args);
        command.args(["--overdue", "0"]);
        let mut child = command.stdout(std::process::Stdio::piped());
        child = child.stderr(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        let begun = Instant::now();
        let started = loop {
            if child.try_wait().unwrap().is_some() {
                break false;
            }
            if dir.path().join("ctl").exists() && ctl(dir.path(), &["list"]).status.success() {
                break true;
            }
            assert!(begun.elapsed() < PATIENCE, "{place}: neither started nor ended");
        };
        if started {
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(count > 2, "it asks the helper for something before it is there");
            return;
        }
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{place}: {said}");
        assert!(said.contains("panicked over it"), "{place}: {said}");
        assert!(!dir.path().join("s").exists() && !dir.path().join("ctl").exists(), "{place}");
    }
    panic!("it never starts");
}

/// Reads one behind the other on a disk that seeks, 32 in flight, until the log says `what`: merging
/// carries more of them, and the disk changes its path.
fn read_in_order(dir: &Path, socket: &str, daemon: &Daemon, what: &str) {
    let mut device = connect(dir, socket);
    let mut queue = device.queue::<()>().unwrap();
    let (begun, mut looked, mut next) = (Instant::now(), Instant::now(), 0);
    loop {
        while queue.in_flight() < 32 {
            let buffer = device.pool().alloc(4096).unwrap();
            queue.read(next % 100_000 * 4096, buffer, ()).unwrap();
            next += 1;
        }
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
        while queue.pop().unwrap().is_some() {}
        if looked.elapsed() > Duration::from_millis(50) {
            looked = Instant::now();
            if daemon.log().contains(what) {
                return;
            }
        }
        assert!(begun.elapsed() < PATIENCE, "no {what}:\n{}", daemon.log());
    }
}

/// The first word of a disk that it gets costs it a panic; it tells of the next disk all the same.
#[test]
fn e05_who_tells_of_paths_outlives_panics() {
    let dir = folder();
    let disk = |socket| format!("[[disk]]\nimage = 'sim:hdd:1G'\nsocket = '{socket}'\n");
    let file = format!("log-level = 'debug'\n{}{}", disk("s"), disk("t"));
    std::fs::write(dir.path().join("two.toml"), file).unwrap();
    let daemon = Daemon::start(with_panic(dir.path(), "paths:1", &["--config", "two.toml"]));
    let why = "the thread that tells of paths panicked: told to panic at paths";
    read_in_order(dir.path(), "s", &daemon, why);
    assert!(!daemon.log().contains(": path "), "{}", daemon.log());
    read_in_order(dir.path(), "t", &daemon, ": path request (");
    daemon.stop();
}

#[test]
fn e05_the_watchdog_and_the_counts_outlive_panics() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--overdue", "1"];
    let daemon = Daemon::start(with_panic(dir.path(), "watchdog:1", &args));
    hear(&daemon, "the watchdog panicked: told to panic at watchdog");
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 3, 0x33));
    daemon.stop();
    let daemon = Daemon::start(with_panic(dir.path(), "news:1", &args));
    daemon.signal(libc::SIGUSR1);
    hear(&daemon, "the answer to SIGUSR1 panicked: told to panic at news");
    daemon.signal(libc::SIGUSR1);
    hear(&daemon, "requests per submission");
    daemon.stop();
}
