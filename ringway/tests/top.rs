//! `ringway top`, from outside: tables and JSON of a daemon under load, and the screen in a terminal.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text, wait};
use ringway_driver::{BlkQueue, Device, Options};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

fn serve(dir: &Path) -> Daemon {
    let disk = ["disk.img", "--socket", "s", "--control", "ctl", "--workers", "1"];
    Daemon::serve(dir, &[&disk[..], &["--queues", "1", "--path", "request"]].concat())
}

fn connect(dir: &Path) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap()
}

/// `ringway top --control ctl ARGS`, run in `dir`.
fn top(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["top", "--control", "ctl"]).args(args).current_dir(dir);
    run(command)
}

/// Reads 16 neighbours of 4 KiB at a time until told to stop.
fn load(mut device: Device, stop: &AtomicBool) {
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    while !stop.load(Relaxed) {
        for at in 0..16 {
            queue.read(at * 4096, device.pool().alloc(4096).unwrap(), ()).unwrap();
        }
        assert!(queue.wait_for(16, Some(PATIENCE)).unwrap(), "a request hangs");
        assert!(queue.completions().all(|done| done.is_ok()));
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_daemon_under_load_is_told_in_figures() {
    let dir = folder();
    let _daemon = serve(dir.path());
    let device = connect(dir.path());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || load(device, stop));
        let json = top(dir.path(), &["--json", "--interval", "2s"]);
        let table = top(dir.path(), &["--once", "--interval", "300ms"]);
        stop.store(true, Relaxed);
        assert_eq!(json.status.code(), Some(0), "{}", text(&json.stderr));
        let found: Value = serde_json::from_str(&text(&json.stdout)).unwrap();
        assert!(number(&found["seconds"]) >= 1.9);
        let disk = &found["disks"][0];
        assert_eq!((&disk["state"], &disk["connected"]), (&"serving".into(), &true.into()));
        assert_eq!(
            (&disk["path"]["kind"], &disk["path"]["in_use"]),
            (&"request".into(), &"request".into())
        );
        let rates = &disk["rates"];
        let iops = number(&rates["iops"]);
        assert!(iops > 0.0 && iops == number(&rates["reads_s"]), "{rates}");
        assert!((number(&rates["read_mb_s"]) / (iops * 4096.0 / 1e6) - 1.0).abs() < 1e-6);
        assert!(number(&rates["merged_s"]) > 0.0, "neighbours go together: {rates}");
        // The timed ones are those of merged operations as well.
        let timed = number(&disk["latency"]["count"]);
        assert!(timed >= (iops * 2.0 / 100.0).floor(), "{timed} timed of {iops} IOPS");
        assert!(number(&disk["reads"]["p50"]) > 1000.0, "less than a microsecond: {disk}");
        let queue = &disk["queues"][0];
        assert_eq!(queue["rates"]["reads_s"], rates["reads_s"], "it is the only one");
        let effort = &found["workers"][0];
        let parts = ["working", "spinning", "asleep"].map(|part| number(&effort[part]));
        assert!(parts.iter().all(|part| (0.0..=1.0).contains(part)), "{effort}");
        assert!((parts.iter().sum::<f64>() - 1.0).abs() < 1e-6 && parts[0] > 0.0, "{effort}");
        let batch = number(&effort["requests_per_submit"]);
        assert!(batch > 1.0 && batch <= 16.0, "{effort}");
        assert!(number(&effort["syscalls_per_io"]) < 1.0, "{effort}");

        assert_eq!(table.status.code(), Some(0), "{}", text(&table.stderr));
        let said = text(&table.stdout);
        let line = said.lines().find(|line| line.contains("0 disk.img")).unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words[2..4], ["connected", "request"], "{said}");
        for what in ["queue 0", "p99.9", "req/submit", "spinning", "/0 "] {
            assert!(said.contains(what), "{what}: {said}");
        }
    });
}

#[test]
fn a_disk_without_a_front_end_is_said_to_be_serving_and_a_paused_one_paused() {
    let dir = folder();
    let _daemon = serve(dir.path());
    let state = || {
        // Not a terminal: as with --once.
        let said = text(&top(dir.path(), &["--interval", "100ms"]).stdout);
        let line = said.lines().find(|line| line.contains("0 disk.img")).map(str::to_owned);
        let line = line.unwrap_or_else(|| panic!("{said}"));
        line.split_whitespace().nth(2).map(str::to_owned)
    };
    assert_eq!(state().as_deref(), Some("serving"));
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "pause", "disk.img"]).current_dir(dir.path());
    assert!(run(command).status.success());
    assert_eq!(state().as_deref(), Some("paused"));
}

#[test]
fn a_daemon_without_a_disk_is_told_what_adds_one() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["--control", "ctl"]);
    let said = text(&top(dir.path(), &["--once", "--interval", "100ms"]).stdout);
    assert!(said.starts_with("no disks; `ringway ctl add` adds one\n\n"), "{said}");
    assert!(said.contains(&format!("process {}", daemon.pid())), "{said}");
}

#[test]
fn what_is_wrong_is_said_at_once() {
    let dir = folder();
    for (args, status, what) in [
        (&["--once"][..], 1, "there is no socket at ctl"),
        (&["--interval", "1ms"], 2, "not between"),
        (&["--sort", "colour"], 2, "iops, mb, latency, name"),
    ] {
        let output = top(dir.path(), args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(what), "{what}: {said}");
    }
}

/// `ringway top` in a terminal of its own, and the other end of that.
fn in_terminal(dir: &Path) -> (Child, File) {
    let size = libc::winsize { ws_row: 30, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // Neither end may live on in a child of another test.
    let master = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY)
        .open("/dev/ptmx")
        .expect("a terminal");
    // SAFETY: plain calls on a descriptor of ours; the new one is for us alone.
    let slave = unsafe {
        assert_eq!(libc::unlockpt(master.as_raw_fd()), 0);
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        let slave = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags);
        assert!(slave >= 0, "no terminal");
        assert_eq!(libc::ioctl(slave, libc::TIOCSWINSZ, &raw const size), 0);
        OwnedFd::from_raw_fd(slave)
    };
    let mut command = ringway();
    command.args(["top", "--control", "ctl", "--interval", "100ms"]).current_dir(dir);
    command.env("TERM", "xterm-256color").env_remove("NO_COLOR");
    command.stdin(slave.try_clone().unwrap()).stdout(slave).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    drop(command);
    (child, master)
}

/// `ringway top` in a terminal of 120 by 30 characters.
struct Screen {
    child: Child,
    keys: File,
    output: Receiver<Vec<u8>>,
    /// What came after what was expected last.
    rest: Vec<u8>,
}

impl Screen {
    fn new(dir: &Path) -> Self {
        let (child, master) = in_terminal(dir);
        let mut screen = master.try_clone().unwrap();
        let (tell, output) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The last one to leave a terminal makes reads of it fail.
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                if tell.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keys: master, output, rest: Vec::new() }
    }

    /// Waits until this was written since the last time.
    fn expect(&mut self, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        let mut bytes = std::mem::take(&mut self.rest);
        loop {
            if let Some(at) = bytes.windows(what.len()).position(|part| part == what.as_bytes()) {
                self.rest = bytes.split_off(at + what.len());
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let more = self.output.recv_timeout(left);
            bytes.extend(more.unwrap_or_else(|_| panic!("no {what:?} in {:?}", text(&bytes))));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_screen_shows_disks_outlives_the_daemon_and_leaves_the_terminal_as_it_was() {
    let dir = folder();
    let daemon = serve(dir.path());
    let mut screen = Screen::new(dir.path());
    screen.expect("\u{1b}[?1049h");
    screen.expect("disk.img");
    let device = connect(dir.path());
    screen.expect("connected");
    drop(device);
    daemon.kill();
    // White on red: nothing else is.
    screen.expect("LOST, trying again");
    let daemon = serve(dir.path());
    // All of the title is drawn anew, because its colour changes.
    screen.expect(&format!("process {}", daemon.pid()));
    screen.press("h");
    // Blanks that were there before are not drawn again.
    screen.expect("words");
    // Any key closes the help, and does nothing else.
    screen.press("xq");
    screen.expect("\u{1b}[?1049l");
    let status = wait(&mut screen.child, PATIENCE).expect("it ends");
    assert_eq!(status.code(), Some(0));

    let mut screen = Screen::new(dir.path());
    screen.expect("disk.img");
    let pid = i32::try_from(screen.child.id()).unwrap();
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    screen.expect("\u{1b}[?1049l");
    let status = wait(&mut screen.child, Duration::from_secs(60)).expect("it ends");
    assert_eq!(status.code(), Some(128 + libc::SIGTERM));
}

/// Its window is closed, and nobody tells it: it does not go on without a screen.
#[test]
fn it_ends_with_its_terminal() {
    let dir = folder();
    let _daemon = serve(dir.path());
    let (mut child, mut master) = in_terminal(dir.path());
    let (mut seen, mut bytes) = (Vec::new(), [0; 4096]);
    while !seen.windows(8).any(|part| part == b"disk.img") {
        let count = master.read(&mut bytes).unwrap();
        seen.extend_from_slice(&bytes[..count]);
    }
    drop(master);
    let status = wait(&mut child, PATIENCE);
    if status.is_none() {
        child.kill().unwrap();
    }
    assert_eq!(status.expect("it ends").code(), Some(128 + libc::SIGHUP));
}
