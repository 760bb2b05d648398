//! The log of `ringway serve`, from outside: whatever becomes of it, disks are served, and the daemon
//! ends when it is told to.

use crate::common::{
    Daemon, PATIENCE, children, finish, folder, read, ringway, run, text, wait, write,
};
use ringway_driver::{Device, Options};
use ringway_testkit::{LateStore, Mounted};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

/// Two disks on one worker, with a control socket.
const TWO: &str = "workers = 1\ncontrol = 'ctl'\n[[disk]]\nimage = 'disk.img'\nsocket = 'a'\n\
                   [[disk]]\nimage = 'null:1G'\nsocket = 'b'\n";

fn two_disks(dir: &Path, more: &[&str]) -> Command {
    std::fs::write(dir.join("disks.toml"), TWO).unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "disks.toml"]).args(more).current_dir(dir);
    command
}

/// With the sandbox, without it, and with a process for each disk, whose log goes through the daemon's.
const VARIANTS: [&[&str]; 3] = [&[], &["--sandbox", "off"], &["--isolate"]];

/// In each of these ways, in a folder of its own.
fn in_each_variant(act: impl Fn(&Path, &[&str])) {
    for variant in VARIANTS {
        println!("serve {variant:?}");
        act(folder().path(), variant);
    }
}

/// A daemon whose log goes to `stderr`.
struct Mute(Child);

impl Mute {
    fn start(mut command: Command, stdout: Stdio, stderr: impl Into<Stdio>) -> Self {
        Self(command.stdout(stdout).stderr(stderr).spawn().expect("it starts"))
    }

    /// Its neighbour's guest goes and comes back, and has its disk.
    fn serves(&mut self, dir: &Path) {
        for byte in [0x21, 0x43] {
            let mut device = connect(dir, "a");
            let mut queue = device.queue().unwrap();
            assert!(write(&device, &mut queue, 1, byte));
            assert_eq!(read(&device, &mut queue, 1), [byte; 512]);
        }
        assert_eq!(self.0.try_wait().unwrap(), None, "it lives");
    }

    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.0.id()).unwrap();
        // SAFETY: our own child, not waited for yet.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    fn status(&mut self) -> ExitStatus {
        wait(&mut self.0, PATIENCE).expect("it does not end")
    }

    /// Ends it in order: nothing of it is left.
    fn stop(mut self, dir: &Path) {
        self.signal(libc::SIGTERM);
        assert_eq!(self.status().code(), Some(0));
        for socket in ["a", "b", "ctl"] {
            assert!(!dir.join(socket).exists(), "{socket} is left behind");
        }
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Front-ends that go at once; and some that say something that cannot be.
fn storm(dir: &Path, socket: &str, cycles: usize) {
    for cycle in 0..cycles {
        let Ok(mut socket) = UnixStream::connect(dir.join(socket)) else {
            panic!("nobody listens after {cycle} connections");
        };
        if cycle % 3 == 0 {
            // It may have been disconnected already.
            let _ = socket.write_all(&[0xff; 12]);
        }
    }
}

/// A pipe that is full: its ends to read and to write.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[b'.'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

#[test]
fn e01_a_full_log_ends_nothing() {
    in_each_variant(|dir, variant| {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut daemon = Mute::start(two_disks(dir, variant), Stdio::null(), full);
        daemon.serves(dir);
        storm(dir, "b", 300);
        daemon.serves(dir);
        daemon.stop(dir);
    });
}

/// A log on a file system that is full for a while. What is missing in the end is told.
#[test]
fn e01_a_log_that_was_full_goes_on() {
    in_each_variant(a_log_that_was_full_goes_on);
}

fn a_log_that_was_full_goes_on(dir: &Path, variant: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mount = match Mounted::in_memory(folder.path().join("small"), 64 << 10) {
        Ok(mount) => mount,
        Err(lack) => return lack.skip(),
    };
    let ballast = mount.path().join("ballast");
    let log = File::options().create_new(true).append(true).open(mount.path().join("log")).unwrap();
    let mut filler = File::create(&ballast).unwrap();
    while filler.write_all(&[0; 4096]).is_ok() {}
    let mut command = two_disks(dir, variant);
    command.arg("-v");
    let mut daemon = Mute::start(command, Stdio::null(), log);
    daemon.serves(dir);
    chatter(dir, "b", 20_000);
    daemon.serves(dir);
    // Now there is room, but not for all.
    drop(filler);
    std::fs::remove_file(&ballast).unwrap();
    daemon.serves(dir);
    daemon.stop(dir);
    let written = std::fs::read_to_string(mount.path().join("log")).unwrap();
    let sandbox = if variant.contains(&"off") { "sandbox off" } else { "sandbox on" };
    assert!(written.contains(sandbox), "{variant:?}: the first lines waited: {written}");
}

#[test]
fn e02_a_log_without_a_reader_ends_nothing() {
    in_each_variant(|dir, variant| {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        let mut daemon = Mute::start(two_disks(dir, variant), Stdio::null(), writer);
        daemon.serves(dir);
        storm(dir, "b", 300);
        daemon.signal(libc::SIGUSR1);
        daemon.serves(dir);
        daemon.stop(dir);
    });
}

/// Asks `times` for features: a line each in a log that is told everything.
fn chatter(dir: &Path, socket: &str, times: usize) {
    let mut socket = UnixStream::connect(dir.join(socket)).unwrap();
    for _ in 0..times {
        // GET_FEATURES, version 1, no payload.
        socket.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        socket.read_exact(&mut [0; 20]).unwrap();
    }
}

/// Nobody reads the log, from the first line on; nor what is printed.
#[test]
fn e03_a_log_whose_reader_stalls_stops_nobody() {
    in_each_variant(|dir, variant| {
        let (reader, writer) = full_pipe();
        let mut command = two_disks(dir, variant);
        command.args(["-v", "--stats"]);
        let output = writer.try_clone().unwrap();
        let mut daemon = Mute::start(command, output.into(), writer);
        daemon.serves(dir);
        chatter(dir, "b", 20_000);
        daemon.signal(libc::SIGUSR1);
        storm(dir, "b", 300);
        daemon.serves(dir);
        daemon.stop(dir);
        drop(reader);
    });
}

/// A reader that comes back is told how much it has missed.
#[test]
fn e03_a_reader_that_comes_back_is_told_what_it_missed() {
    in_each_variant(a_reader_that_comes_back_is_told_what_it_missed);
}

fn a_reader_that_comes_back_is_told_what_it_missed(dir: &Path, variant: &[&str]) {
    let (reader, writer) = full_pipe();
    let mut command = two_disks(dir, variant);
    command.args(["-v"]);
    let mut daemon = Mute::start(command, Stdio::null(), writer);
    daemon.serves(dir);
    chatter(dir, "b", 20_000);
    let read = std::thread::spawn(move || {
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).map(|_| text)
    });
    daemon.serves(dir);
    daemon.stop(dir);
    let text = read.join().unwrap().unwrap();
    let lost = text.lines().find(|line| line.contains("log lines were lost here"));
    let lost = lost.unwrap_or_else(|| panic!("{text}"));
    let count = lost.split_whitespace().find_map(|word| word.parse::<usize>().ok()).unwrap();
    let said = text.matches("GET_FEATURES").count();
    assert!(said > 0 && count + said > 20_000, "{said} of 20,000 said, and {count} lost");
    assert!(text.trim_end().ends_with("stopped"), "{}", &text[text.len() - 200..]);
}

#[test]
fn e04_a_storm_of_connections_leaves_a_short_log() {
    in_each_variant(a_storm_of_connections_leaves_a_short_log);
}

fn a_storm_of_connections_leaves_a_short_log(dir: &Path, variant: &[&str]) {
    let mut daemon = Daemon::start(two_disks(dir, variant));
    let mut device = connect(dir, "a");
    let mut queue = device.queue().unwrap();
    // The way from the log to whoever reads it is the same; this one takes long.
    for round in 0..if variant.is_empty() { 20u8 } else { 5 } {
        storm(dir, "b", 1000);
        assert!(write(&device, &mut queue, 1, round), "{}", daemon.log());
        assert_eq!(read(&device, &mut queue, 1), [round; 512]);
    }
    drop((queue, device));
    let log = daemon.log();
    // Ten a minute of each kind: connected, disconnected, ended. It may take minutes.
    println!("{} lines, {} bytes", log.lines().count(), log.len());
    assert!(log.lines().count() < 200, "{log}");
    daemon.signal(libc::SIGTERM);
    daemon.wait();
    let (log, message) = (daemon.log(), "lines were left out: front-ends that connected");
    let count = log.lines().filter(|line| line.contains(message)).count();
    assert!(count > 0 && log.lines().count() < 220, "what is left out is told at the end: {log}");
}

/// It reads its file again, finds nothing new, and goes on.
#[test]
fn sighup_ends_nothing() {
    let dir = folder();
    let daemon = Daemon::start(two_disks(dir.path(), &[]));
    daemon.signal(libc::SIGHUP);
    let begun = Instant::now();
    while !daemon.log().contains("the configuration was read again") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(connect(dir.path(), "a"));
    daemon.stop();
    assert!(!dir.path().join("a").exists());
}

/// Each kind of failure has its line, with error, count and sector; and its own counter.
#[test]
fn e07_errors_of_the_disk_are_told() {
    for variant in [&[][..], &["--isolate"]] {
        errors_of_the_disk_are_told(variant);
    }
}

fn errors_of_the_disk_are_told(variant: &[&str]) {
    let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let image = store.path().display().to_string();
    let args = [&image, "--socket", "s", "--control", "ctl", "--cache", "none", "--path", "bio"];
    let args = [&args[..], &["--on-enospc", "report"], variant].concat();
    let daemon = Daemon::serve(dir.path(), &args);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    let log = |wanted: usize| {
        let begun = Instant::now();
        loop {
            let log = daemon.log();
            let lines: Vec<_> = log.lines().filter(|line| line.contains("failed: ")).collect();
            if lines.len() >= wanted || begun.elapsed() > PATIENCE {
                return lines.into_iter().map(str::to_owned).collect::<Vec<_>>();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    store.set_error(Some(libc::ENOSPC));
    assert!(!write(&device, &mut queue, 8, 1));
    let lines = log(1);
    let [line] = &lines[..] else { panic!("{lines:?}") };
    for word in ["write failed: No space left on device (os error 28)", "errno=28", "sector=8"] {
        assert!(line.contains(word), "{word}: {line}");
    }
    assert!(line.contains(&image), "{line}");
    for number in 1..64 {
        assert!(!write(&device, &mut queue, 8 + number % 4, 1));
    }
    store.set_error(Some(libc::EIO));
    assert!(!write(&device, &mut queue, 16, 1));
    let lines = log(2);
    let [_, line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("write failed: Input/output error (os error 5)"), "{line}");
    assert!(line.contains("count=1 ") && line.contains("sector=16"), "{line}");
    store.set_error(None);
    assert!(write(&device, &mut queue, 8, 7));

    // Beyond the end: the guest's mistake, and no line.
    assert!(!write(&device, &mut queue, 1 << 20, 1));
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json", "stats"]).current_dir(dir.path());
    let stats: serde_json::Value = serde_json::from_slice(&run(command).stdout).unwrap();
    let disk = &stats["disks"][0];
    let counts = &disk["counts"];
    assert_eq!((&counts["failed"], &counts["refused"]), (&65.into(), &1.into()), "{counts}");
    assert_eq!(counts["errors"], 66);
    let failures = &disk["failures"];
    assert_eq!(failures[0]["operation"], "write");
    assert_eq!((&failures[0]["errno"], &failures[0]["count"]), (&28.into(), &64.into()));
    assert_eq!((&failures[1]["errno"], &failures[1]["sector"]), (&5.into(), &16.into()));
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "stats"]).current_dir(dir.path());
    let table = text(&run(command).stdout);
    assert!(table.contains("No space left on device"), "{table}");
    assert_eq!(log(2).len(), 2, "the rest is told at the minute's end, or at the daemon's");
    drop((queue, device));
    let lines = failures_at_the_end(daemon);
    let enospc: Vec<_> = lines.iter().filter(|line| line.contains("errno=28")).collect();
    assert_eq!((enospc.len(), counted(&enospc)), (2, 64), "all are counted: {lines:?}");
    assert_eq!(lines.len(), 3, "{lines:?}");
}

/// Stops a daemon. The lines of its log that tell of failures.
fn failures_at_the_end(mut daemon: Daemon) -> Vec<String> {
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().0.code(), Some(0), "{}", daemon.log());
    let log = daemon.log();
    log.lines().filter(|line| line.contains("failed: ")).map(str::to_owned).collect()
}

/// The sum of what lines count.
fn counted(lines: &[&String]) -> u64 {
    let count = |line: &&String| {
        let mut fields = line.split_whitespace();
        fields.find_map(|word| word.strip_prefix("count=")?.parse::<u64>().ok()).unwrap()
    };
    lines.iter().map(count).sum()
}

/// The real program's reads and flushes fail: by what the host says, by the two kinds of cache, and the
/// flushes that follow a failed one are told apart from it.
#[test]
fn e07_reads_and_flushes_that_fail_are_told() {
    let ways = [
        ("none", "io_uring", "on"),
        ("writeback", "threads", "off"),
        ("none", "io_uring", "isolated"),
        ("writeback", "threads", "isolated"),
    ];
    for (cache, engine, sandbox) in ways {
        let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
        let store = match LateStore::mount(mount.path(), 1 << 20) {
            Ok(store) => store,
            Err(lack) => return lack.skip(),
        };
        let image = store.path().display().to_string();
        let args = [&image, "--socket", "s", "--cache", cache, "--engine", engine];
        let variant: &[_] =
            if sandbox == "isolated" { &["--isolate"] } else { &["--sandbox", sandbox] };
        let daemon = Daemon::serve(dir.path(), &[&args, variant].concat());
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        store.set_read_error(Some(libc::EIO));
        for sector in 24..30 {
            let buffer = device.pool().alloc(512).unwrap();
            queue.read(sector * 512, buffer, ()).unwrap();
            assert!(!finish(&mut queue).0, "{cache}");
        }
        store.set_read_error(None);
        assert!(write(&device, &mut queue, 8, 7));
        store.set_sync_error(Some(libc::EIO));
        for _ in 0..5 {
            queue.flush(()).unwrap();
            assert!(!finish(&mut queue).0, "{cache}");
        }
        drop((queue, device));
        let lines = failures_at_the_end(daemon);
        let of = |word: &str| lines.iter().filter(|line| line.contains(word)).collect::<Vec<_>>();
        let reads = of("read failed: Input/output error (os error 5)");
        assert_eq!(counted(&reads), 6, "{cache}: {lines:?}");
        assert!(reads.iter().all(|line| line.contains("errno=5 ") && line.contains(&image)));
        assert!(reads.last().unwrap().contains("sector=29"), "{cache}: {lines:?}");
        let flushes = of("flush failed: Input/output error (os error 5)");
        assert!(flushes.iter().all(|line| !line.contains("sector=")), "{cache}: {lines:?}");
        let later = of("flush failed: an earlier one has failed");
        assert!(later.iter().all(|line| !line.contains("errno=")), "{cache}: {lines:?}");
        assert_eq!((counted(&flushes), counted(&later)), (1, 4), "{cache}: {lines:?}");
        assert_eq!(lines.len(), reads.len() + flushes.len() + later.len(), "{cache}: {lines:?}");
    }
}

/// It waits, as before; whoever wonders why finds it in the log, once for each connection.
#[test]
fn a_second_client_of_a_held_disk_is_told_of() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(!daemon.log().contains("another front-end waits"), "{}", daemon.log());
    let waiting = [(); 3].map(|()| UnixStream::connect(dir.path().join("s")).unwrap());
    let begun = Instant::now();
    while !daemon.log().contains("another front-end waits for this disk") {
        assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(write(&device, &mut queue, 1, 9), "the first one has its disk");
    drop((waiting, queue, device));
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert_eq!(read(&device, &mut queue, 1), [9; 512]);
    drop((queue, device));
    daemon.stop();
}

/// The kernel keeps no record of a helper that was killed.
#[test]
fn a_dead_helper_is_no_zombie() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let children = || children(daemon.pid());
    let [helper] = children()[..] else { panic!("{:?}", children()) };
    // SAFETY: a child of our child, which lives.
    assert_eq!(unsafe { libc::kill(helper as i32, libc::SIGKILL) }, 0);
    let begun = Instant::now();
    while !children().is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{helper} is a zombie");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(connect(dir.path(), "s"));
    daemon.stop();
}
