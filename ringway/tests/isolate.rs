//! Disks with a process of their own: they look like others, and their end costs nobody else anything.

use crate::common::{Daemon, PATIENCE, children, folder, read, ringway, run, text, write};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::{Need, skip};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn options() -> Options {
    Options::new().patience(PATIENCE).reconnect(PATIENCE)
}

fn connect(dir: &Path, socket: &str) -> Device {
    options().connect(dir.join(socket)).unwrap()
}

fn ctl(dir: &Path, args: &[&str]) -> Result<Value, String> {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json"]).args(args).current_dir(dir);
    let output = run(command);
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(text(&output.stderr)),
    }
}

/// The number of the process of a disk.
fn process(dir: &Path, disk: usize) -> Option<i32> {
    let list = ctl(dir, &["list"]).unwrap();
    let number = list["disks"][disk]["process"].as_i64();
    number.map(|number| number.try_into().unwrap())
}

fn is_there(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

fn kill(process: i32, signal: i32) {
    // SAFETY: a process of the daemon's, which was there a moment ago.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

fn until(what: &str, so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Three disks: two with processes of their own, and one without.
fn three(dir: &Path) -> Daemon {
    for image in ["a.img", "b.img", "c.img"] {
        std::fs::write(dir.join(image), vec![0; 4 * MIB]).unwrap();
    }
    std::fs::write(
        dir.join("c.toml"),
        "control = 'ctl'\nisolate = true\n\
         [[disk]]\nimage = 'a.img'\nsocket = 'a'\nqueues = 2\n\
         [[disk]]\nimage = 'c.img'\nsocket = 'c'\nqueues = 1\nisolate = false\n\
         [[disk]]\nimage = 'b.img'\nsocket = 'b'\nqueues = 1\n",
    )
    .unwrap();
    Daemon::serve(dir, &["--config", "c.toml"])
}

/// A guest that writes each sector with a number of its own and reads it back, without a pause and
/// without an error, until it is told to stop.
struct Guest {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Guest {
    fn start(mut device: Device) -> Self {
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut written = [0u8; 64];
            while !stopped.load(SeqCst) {
                let round = counted.load(SeqCst);
                let sector = round % 64;
                let byte = round.to_le_bytes()[0] ^ round.to_le_bytes()[1];
                let at = usize::try_from(sector).unwrap();
                assert_eq!(read(&device, &mut queue, sector), [written[at]; 512], "lost");
                assert!(write(&device, &mut queue, sector, byte), "a write fails");
                written[at] = byte;
                counted.fetch_add(1, SeqCst);
            }
        });
        Self { stop, rounds, thread }
    }

    /// Waits until it has got so much further.
    fn goes_on(&self, by: u64) {
        let before = self.rounds.load(SeqCst);
        until("a guest stands still", || {
            assert!(!self.thread.is_finished(), "a guest has failed");
            self.rounds.load(SeqCst) >= before + by
        });
    }

    fn stop(self) {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap();
    }
}

#[test]
fn e06_isolated_disks_are_reached_as_others_are() {
    let dir = folder();
    let daemon = three(dir.path());
    let ctl = |args: &[&str]| ctl(dir.path(), args);
    let list = ctl(&["list"]).unwrap();
    let images: Vec<_> =
        (0..3).map(|at| list["disks"][at]["image"].as_str().unwrap().to_owned()).collect();
    assert!(images.iter().zip(["a.img", "c.img", "b.img"]).all(|(i, name)| i.ends_with(name)));
    let processes: Vec<_> = (0..3).map(|at| list["disks"][at]["process"].as_u64()).collect();
    assert!(processes[0].is_some() && processes[1].is_none() && processes[2].is_some());
    for (at, number) in [(0, 0), (1, 1), (2, 2)] {
        assert_eq!(list["disks"][at]["id"], number);
    }
    let mut devices: Vec<_> = ["a", "c", "b"].map(|socket| connect(dir.path(), socket)).into();
    let mut queues: Vec<BlkQueue<()>> = devices.iter_mut().map(|d| d.queue().unwrap()).collect();
    for (at, byte) in [(0, 7), (1, 8), (2, 9)] {
        assert!(write(&devices[at], &mut queues[at], 3, byte));
        assert_eq!(read(&devices[at], &mut queues[at], 3), [byte; 512]);
    }
    // One answer for all, and for one; queues name their workers.
    let stats = ctl(&["stats"]).unwrap();
    for at in 0..3 {
        let disk = &stats["disks"][at];
        assert_eq!((&disk["id"], &disk["counts"]["writes"]), (&at.into(), &1.into()));
        assert_eq!(disk["connected"], true);
        let worker = &disk["queues"][0]["worker"];
        let found = stats["workers"].as_array().unwrap().iter().find(|w| &w["worker"] == worker);
        assert!(found.is_some_and(|worker| worker["requests"].as_u64() >= Some(2)), "{stats}");
    }
    assert!(stats["disks"][2]["queues"][0]["worker"].as_str().unwrap().starts_with("2:"));
    let one = ctl(&["stats", "b"]).unwrap();
    assert_eq!(one["disks"].as_array().unwrap().len(), 1);
    assert_eq!(one["disks"][0]["id"], 2);

    // Changes.
    assert_eq!(ctl(&["pause", "a.img"]).unwrap()["state"], "paused");
    assert_eq!(ctl(&["list"]).unwrap()["disks"][0]["state"], "paused");
    let resumed = ctl(&["resume", "0"]).unwrap();
    assert_eq!((&resumed["state"], &resumed["id"]), (&"serving".into(), &0.into()));
    assert_eq!(ctl(&["drain", "b"]).unwrap()["id"], 2);
    let (name, root) = (dir.path().file_name().unwrap(), dir.path().parent().unwrap());
    let other = root.join(name).join("..").join(name).join("b.img");
    assert_eq!(ctl(&["drain", other.to_str().unwrap()]).unwrap()["id"], 2);
    let resized = ctl(&["resize", "b.img", "8M"]).unwrap();
    assert_eq!((&resized["to"], &resized["id"]), (&(8 * MIB).into(), &2.into()));
    let refused = ctl(&["resize", "b.img", "1M"]).unwrap_err();
    assert!(refused.contains("--shrink"), "{refused}");
    let refused = ctl(&["add", "a.img", "--socket", "d"]).unwrap_err();
    assert!(refused.contains("is served"), "{refused}");
    let added = ctl(&["add", "new.img", "--size", "2M", "--socket", "d"]).unwrap();
    assert_eq!((&added["id"], &added["state"]), (&3.into(), &"serving".into()));
    let its = i32::try_from(added["process"].as_i64().unwrap()).unwrap();
    assert!(is_there(its) && dir.path().join("d").exists());
    let here = ctl(&["add", "null:1G", "--socket", "e", "--isolate=false"]).unwrap();
    assert_eq!(here["process"], Value::Null);
    let removed = ctl(&["remove", "new.img"]).unwrap();
    assert_eq!((&removed["id"], &removed["drained"]), (&3.into(), &true.into()));
    assert!(
        !is_there(its) && !dir.path().join("d").exists() && dir.path().join("new.img").exists()
    );

    // For people, and in top.
    let mut top = ringway();
    top.args(["top", "--control", "ctl", "--once"]).current_dir(dir.path());
    let shown = text(&run(top).stdout);
    assert!(
        shown.contains("a.img") && shown.contains("b.img") && shown.contains("c.img"),
        "{shown}"
    );
    // Counts on demand: of the daemon and of each process.
    daemon.signal(libc::SIGUSR1);
    until("no counts", || daemon.log().matches("syscalls/I/O").count() == 3);

    drop((queues, devices));
    let (log, number) = (daemon.log(), processes[0].unwrap());
    assert!(log.lines().any(|line| line.contains("sandbox on") && line.contains("a.img")), "{log}");
    daemon.stop();
    until("a process stays", || !is_there(number.try_into().unwrap()));
    assert!(["a", "b", "c", "ctl"].iter().all(|socket| !dir.path().join(socket).exists()));
}

/// A word that is refused leaves a disk what it has taken for itself.
#[test]
fn e06_an_export_is_served_once_whatever_was_asked_of_its_disk() {
    let dir = folder();
    let dir = dir.path();
    let args = ["nbd", "disk.img", "--listen", "unix:n.sock", "--export", "d"];
    let _server = crate::common::nbd::server(dir, "ringway", &args).expect("our own is here");
    let export = format!("nbd:unix:{}:d", dir.join("n.sock").display());
    let args = [&export, "--socket", "s", "--control", "ctl", "--isolate"];
    let daemon = Daemon::serve(dir, &args);
    let twice = ["add", &export, "--socket", "t"];
    for again in [false, true] {
        let refused = ctl(dir, &twice).unwrap_err();
        assert!(refused.contains("is served already"), "{again}: {refused}");
        assert!(ctl(dir, &["snapshot", "0", "new"]).is_err());
    }
    daemon.stop();
}

#[test]
fn e06_a_killed_process_costs_its_disk_a_moment_and_others_nothing() {
    let dir = folder();
    let daemon = three(dir.path());
    let guests = ["a", "b", "c"].map(|socket| Guest::start(connect(dir.path(), socket)));
    guests.iter().for_each(|guest| guest.goes_on(50));
    let neighbour = process(dir.path(), 2).unwrap();
    for round in 1..=5 {
        let its = process(dir.path(), 0).unwrap();
        kill(its, libc::SIGKILL);
        until("it is not served again", || {
            process(dir.path(), 0).is_some_and(|process| process != its)
        });
        guests.iter().for_each(|guest| guest.goes_on(50));
        let list = ctl(dir.path(), &["list"]).unwrap();
        assert_eq!(list["disks"][0]["restarts"], round);
        assert_eq!(list["disks"][2]["restarts"], 0);
    }
    assert_eq!(process(dir.path(), 2), Some(neighbour));
    let log = daemon.log();
    assert_eq!(log.matches("its process has ended (killed by signal 9").count(), 5, "{log}");
    assert!(log.contains("it is served again"), "{log}");
    guests.into_iter().for_each(Guest::stop);
    daemon.stop();
}

/// A process takes orders from when the list names it: one that was asked before it was told to go would
/// end, and one that is named before has orders refused.
#[test]
fn e25_a_process_is_named_once_it_takes_orders() {
    let dir = folder();
    let daemon = three(dir.path());
    let mut line = BufReader::new(UnixStream::connect(dir.path().join("ctl")).unwrap());
    line.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    let mut say = |request: &str| -> Value {
        writeln!(line.get_mut(), "{request}").unwrap();
        let mut answer = String::new();
        line.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    };
    for round in 1..=5 {
        let its = process(dir.path(), 0).unwrap();
        kill(its, libc::SIGKILL);
        // Asked without a pause, so also between any two steps of its start.
        let begun = Instant::now();
        loop {
            let disk = say(r#"{"command":"list"}"#)["answer"]["disks"][0].clone();
            match disk["process"].as_i64() {
                Some(number) if number != i64::from(its) => break,
                Some(_) => {}
                None => assert_eq!(disk["state"], "restarting", "{disk}"),
            }
            assert!(begun.elapsed() < PATIENCE, "it is not served again: {disk}");
        }
        let answer = say(r#"{"command":"drain","disk":0}"#);
        assert_eq!(answer["ok"], true, "{answer}");
        let disk = say(r#"{"command":"list"}"#)["answer"]["disks"][0].clone();
        assert_eq!(disk["restarts"], round, "nothing has ended it: {disk}");
    }
    daemon.stop();
}

/// All that the daemon had ends with it, and the next one serves the same disks at once.
#[test]
fn e06_a_killed_daemon_leaves_nothing_that_keeps_the_next_one_away() {
    let dir = folder();
    let mut daemon = three(dir.path());
    let guests = ["a", "b", "c"].map(|socket| Guest::start(connect(dir.path(), socket)));
    for _ in 0..3 {
        guests.iter().for_each(|guest| guest.goes_on(20));
        let its = [0, 2].map(|disk| process(dir.path(), disk).unwrap());
        daemon.kill();
        let args = ["--config", "c.toml"];
        daemon = Daemon::serve(dir.path(), &args);
        until("a process stays", || its.iter().all(|&process| !is_there(process)));
        guests.iter().for_each(|guest| guest.goes_on(20));
    }
    // Signals from a terminal are for the daemon; a disk is stopped by its control socket.
    let its = process(dir.path(), 0).unwrap();
    kill(its, libc::SIGTERM);
    guests[0].goes_on(20);
    assert_eq!(process(dir.path(), 0), Some(its));
    guests.into_iter().for_each(Guest::stop);
    daemon.stop();
}

#[test]
fn e06_what_was_said_outlives_the_process() {
    let dir = folder();
    let daemon = three(dir.path());
    ctl(dir.path(), &["pause", "a"]).unwrap();
    ctl(dir.path(), &["resize", "a", "6M"]).unwrap();
    let its = process(dir.path(), 0).unwrap();
    kill(its, libc::SIGKILL);
    until("it is not served again", || process(dir.path(), 0).is_some_and(|p| p != its));
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert_eq!(list["disks"][0]["state"], "paused");
    assert_eq!(list["disks"][0]["size"], 6 * MIB);
    // A process that hears nothing keeps nobody waiting for long.
    let other = process(dir.path(), 2).unwrap();
    kill(other, libc::SIGSTOP);
    let begun = Instant::now();
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(list["disks"].as_array().unwrap().len(), 3);
    let stats = ctl(dir.path(), &["stats"]).unwrap();
    assert_eq!(stats["disks"].as_array().unwrap().len(), 3);
    kill(other, libc::SIGCONT);
    daemon.stop();
}

#[test]
fn e06_a_start_that_fails_leaves_nothing() {
    let dir = folder();
    std::fs::write(dir.path().join("taken"), "not a socket").unwrap();
    let config = "isolate = true\n\
                  [[disk]]\nimage = 'new.img'\nsize = '1M'\nsocket = 'a'\n\
                  [[disk]]\nimage = 'disk.img'\nsocket = 'taken'\n";
    std::fs::write(dir.path().join("c.toml"), config).unwrap();
    let before = crate::common::snapshot(dir.path());
    let serve = |args: &[&str]| {
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir.path());
        let output = run(command);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let error = serve(&["--config", "c.toml"]);
    assert!(error.contains("c.toml, line 6") && error.contains("it is not a socket"), "{error}");
    assert_eq!(error.matches("error:").count(), 1, "{error}");
    until("something stays", || crate::common::snapshot(dir.path()) == before);
    let error = serve(&["none.img", "--socket", "a", "--isolate"]);
    assert!(error.contains("none.img"), "{error}");
    // It says the same as a daemon that opens the disk itself.
    let odd = ["disk.img/inner", "--socket", "a"];
    let error = serve(&[&odd[..], &["--isolate"]].concat());
    assert!(error.contains("Not a directory"), "{error}");
    assert_eq!(error, serve(&odd));
    // A daemon that was not told to starts no processes.
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let refused = ctl(dir.path(), &["add", "null:1G", "--socket", "t", "--isolate"]).unwrap_err();
    assert!(refused.contains("start it with --isolate"), "{refused}");
    daemon.stop();
}

#[test]
fn e06_the_service_manager_hears_of_one_daemon() {
    let dir = folder();
    let news = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    news.set_nonblocking(true).unwrap();
    let mut command = ringway();
    command.args(["serve", "disk.img", "--socket", "s", "--isolate", "--stats"]);
    command.env("NOTIFY_SOCKET", dir.path().join("notify")).current_dir(dir.path());
    let daemon = Daemon::start(command);
    assert!(daemon.ready.contains("disk.img") && daemon.ready.contains("process "));
    let _device = connect(dir.path(), "s");
    let printed = daemon.stop();
    assert!(printed.contains("syscalls/I/O"), "{printed}");
    let mut heard = Vec::new();
    let mut buffer = [0; 64];
    while let Ok(got) = news.recv(&mut buffer) {
        heard.push(text(&buffer[..got]));
    }
    assert_eq!(heard, ["READY=1", "STOPPING=1"]);
}

#[test]
fn e06_another_user_serves_what_root_has_opened() {
    // SAFETY: it only tells.
    if unsafe { libc::geteuid() } != 0 {
        return skip(Need::Root, "to serve as another user");
    }
    let dir = folder();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let image = dir.path().join("disk.img");
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o600)).unwrap();
    let words = ["disk.img", "--socket", "s", "--control", "ctl", "--isolate", "--user", "nobody"];
    let daemon = Daemon::serve(dir.path(), &words);
    let guest = Guest::start(connect(dir.path(), "s"));
    guest.goes_on(5);
    let its = process(dir.path(), 0).unwrap();
    let owner = |process: i32| std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    assert!(owner(its).contains("Uid:\t65534\t65534\t65534\t65534"));
    assert_eq!(std::fs::metadata(dir.path().join("s")).unwrap().uid(), 65534);
    // It is opened again as it was at the start.
    kill(its, libc::SIGKILL);
    guest.goes_on(5);
    let its = process(dir.path(), 0).unwrap();
    assert!(owner(its).contains("Uid:\t65534\t65534\t65534\t65534"));
    // What is added is opened as that user.
    std::fs::write(dir.path().join("roots.img"), vec![0; MIB]).unwrap();
    let own = dir.path().join("own");
    std::fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(65534), None).unwrap();
    std::fs::set_permissions(dir.path().join("roots.img"), std::fs::Permissions::from_mode(0o600))
        .unwrap();
    let refused = ctl(dir.path(), &["add", "roots.img", "--socket", "own/t"]).unwrap_err();
    assert!(refused.contains("ermission"), "{refused}");
    ctl(dir.path(), &["add", "own/new.img", "--size", "1M", "--socket", "own/t"]).unwrap();
    assert_eq!(std::fs::metadata(own.join("new.img")).unwrap().uid(), 65534);
    guest.stop();
    daemon.stop();
}

/// A memory cgroup, where one can be made.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(bytes: usize) -> Option<Self> {
        let name = format!("ringway-test-{}-{bytes}", std::process::id());
        let old = Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists();
        let root = if old { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" };
        let folder = Path::new(root).join(name);
        std::fs::create_dir(&folder).ok()?;
        let cgroup = Self(folder);
        let limit = if old { "memory.limit_in_bytes" } else { "memory.max" };
        cgroup.set(limit, bytes)?;
        // Without swap, as far as there is any.
        let _ = cgroup.set(
            if old { "memory.memsw.limit_in_bytes" } else { "memory.swap.max" },
            if old { bytes } else { 0 },
        );
        Some(cgroup)
    }

    fn set(&self, file: &str, value: usize) -> Option<()> {
        std::fs::write(self.0.join(file), value.to_string()).ok()
    }

    fn take(&self, process: i32) {
        self.set("cgroup.procs", process.try_into().unwrap()).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Not while the last one of it ends.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What `ringway doctor` says of the daemon.
fn doctor(dir: &Path) -> Value {
    let mut command = ringway();
    command.args(["doctor", "--json", "--control", "ctl"]).current_dir(dir);
    serde_json::from_slice(&run(command).stdout).unwrap()
}

/// Reads into memory that was never touched until there is no more of it, or no daemon: how much.
fn fill(device: &mut Device) -> usize {
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    let mut held = Vec::new();
    while held.len() < 192 {
        let Some(buffer) = device.pool().alloc(MIB) else { break };
        if queue.read(0, buffer, ()).is_err() {
            break;
        }
        if !matches!(queue.wait(Some(PATIENCE)), Ok(true)) {
            break;
        }
        let Ok(Some(done)) = queue.pop() else { break };
        assert!(done.is_ok());
        held.push(done.into_buffer().unwrap());
    }
    held.len()
}

/// The memory of a guest counts for whoever touches it first, which is the daemon that reads into it.
#[test]
fn e06_memory_that_a_guest_makes_it_fill_ends_its_own_process_alone() {
    const LIMIT: usize = 64 * MIB;
    let Some(cgroup) = Cgroup::new(LIMIT) else {
        return skip(Need::MemoryCgroup, "none can be made here");
    };
    let dir = folder();
    for image in ["a.img", "b.img"] {
        std::fs::write(dir.path().join(image), vec![0; 4 * MIB]).unwrap();
    }
    let config = "control = 'ctl'\n\
                  [[disk]]\nimage = 'a.img'\nsocket = 'a'\nqueues = 1\n\
                  [[disk]]\nimage = 'b.img'\nsocket = 'b'\nqueues = 1\n";
    // Together: one guest ends both.
    std::fs::write(dir.path().join("c.toml"), config).unwrap();
    let mut daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    cgroup.take(daemon.pid().try_into().unwrap());
    let memory = |device: Options| device.memory(256 * MIB).connect(dir.path().join("a")).unwrap();
    let mut device = memory(Options::new().patience(PATIENCE));
    let report = doctor(dir.path());
    let guests = report["memory"][0]["guests_bytes"].as_u64().unwrap();
    assert!((256 * MIB as u64..260 * MIB as u64).contains(&guests), "{report}");
    assert_eq!(report["memory"][0]["limit_bytes"], LIMIT);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("that its reads may fill"), "{warnings}");
    let filled = fill(&mut device);
    drop(device);
    println!("one process, {} MiB: ended after {filled} MiB were read", LIMIT / MIB);
    assert!(filled < 64, "it lives although {filled} MiB were read");
    let (status, _) = daemon.wait();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    drop((daemon, cgroup));

    // Apart: it costs its own process, and its neighbour does not notice.
    let cgroup = Cgroup::new(LIMIT + 4096).expect("as before");
    std::fs::write(dir.path().join("c.toml"), format!("isolate = true\n{config}")).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    let neighbour = Guest::start(connect(dir.path(), "b"));
    neighbour.goes_on(20);
    let its = process(dir.path(), 0).unwrap();
    cgroup.take(its);
    let report = doctor(dir.path());
    assert_eq!(report["memory"].as_array().unwrap().len(), 3, "the daemon and two processes");
    assert_eq!(report["memory"][1]["process"], its);
    assert_eq!(report["memory"][1]["limit_bytes"], LIMIT + 4096);
    // It is started again outside of the limit, and the guest goes on where it was.
    let filled = fill(&mut memory(options()));
    assert_eq!(filled, 192, "its guest does not go on");
    assert!(!is_there(its), "it was not ended");
    neighbour.goes_on(20);
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert_eq!(
        (&list["disks"][0]["restarts"], &list["disks"][1]["restarts"]),
        (&1.into(), &0.into())
    );
    neighbour.stop();
    daemon.stop();
}

/// The process that starts those of disks.
fn spawner_of(daemon: &Daemon) -> u32 {
    let is_spawner = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "ringway-spawner")
    };
    children(daemon.pid()).into_iter().find(is_spawner).unwrap()
}

/// With a helper or without one: the kernel keeps no record of a spawner that has ended, nor does the
/// spawner of a process that nobody asks for any more.
#[test]
fn what_has_ended_is_no_zombie() {
    for sandbox in ["on", "off"] {
        let dir = folder();
        let args = ["disk.img", "--socket", "s", "--isolate", "--control", "ctl"];
        let daemon = Daemon::serve(dir.path(), &[&args[..], &["--sandbox", sandbox]].concat());
        let spawner = spawner_of(&daemon);
        assert_eq!(children(spawner).len(), 1, "the disk's");
        let add = ["add", "disk.img/inner", "--socket", "t", "--isolate"];
        let refused = ctl(dir.path(), &add).unwrap_err();
        assert!(refused.contains("Not a directory"), "{refused}");
        until("the process of a disk is a zombie", || children(spawner).len() == 1);
        kill(spawner as i32, libc::SIGKILL);
        until("the spawner is a zombie", || !children(daemon.pid()).contains(&spawner));
        drop(connect(dir.path(), "s"));
        daemon.stop();
    }
}

/// Nobody finds out only when a disk is not served again.
#[test]
fn e06_the_end_of_what_starts_processes_is_told_and_ends_nothing() {
    let dir = folder();
    let daemon = three(dir.path());
    let guests = ["a", "b", "c"].map(|socket| Guest::start(connect(dir.path(), socket)));
    guests.iter().for_each(|guest| guest.goes_on(10));
    let mut events = BufReader::new(UnixStream::connect(dir.path().join("ctl")).unwrap());
    events.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    events.get_mut().write_all(b"{\"command\":\"events\"}\n").unwrap();
    let mut lines = events.lines().map(Result::unwrap);
    assert!(lines.next().is_some_and(|answer| answer.contains("\"ok\":true")));
    kill(spawner_of(&daemon) as i32, libc::SIGKILL);
    let message = "the process that starts others for disks has ended";
    until("it is not told", || daemon.log().contains(message));
    let event: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!((&event["event"], &event["id"]), (&"spawner-ended".into(), &Value::Null));
    guests.iter().for_each(|guest| guest.goes_on(10));
    let add = ["add", "disk.img", "--socket", "t", "--isolate"];
    let refused = ctl(dir.path(), &add).unwrap_err();
    assert!(refused.contains("start the daemon anew"), "{refused}");
    // A disk whose process ends now stays away, and says why; the others do not notice.
    let [a, b, c] = guests;
    a.stop();
    kill(process(dir.path(), 0).unwrap(), libc::SIGKILL);
    until("nobody says why", || daemon.log().contains("cannot be served again yet"));
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert_eq!(list["disks"][0]["state"], "restarting");
    [&b, &c].iter().for_each(|guest| guest.goes_on(10));
    assert_eq!(daemon.log().matches(message).count(), 1, "it is told once");
    b.stop();
    c.stop();
    daemon.stop();
}

/// What opens files for the process of one disk has ended: it is listed for that disk until it has another process.
#[test]
fn e86_the_end_of_what_opens_files_for_a_disks_process_is_told() {
    let dir = folder();
    let daemon = three(dir.path());
    let guests = ["a", "b", "c"].map(|socket| Guest::start(connect(dir.path(), socket)));
    let mut events = BufReader::new(UnixStream::connect(dir.path().join("ctl")).unwrap());
    events.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    events.get_mut().write_all(b"{\"command\":\"events\"}\n").unwrap();
    let mut lines = events.lines().map(Result::unwrap);
    assert!(lines.next().is_some_and(|answer| answer.contains("\"ok\":true")));
    let its = process(dir.path(), 0).unwrap();
    let is_helper = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "ringway-helper"
    };
    let helper =
        children(u32::try_from(its).unwrap()).into_iter().find(is_helper).expect("it has one");
    kill(helper as i32, libc::SIGKILL);
    let event: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!((&event["event"], &event["id"]), (&"helper-ended".into(), &0.into()));
    let lacks = || ctl(dir.path(), &["list"]).unwrap()["daemon"]["lacks"].clone();
    until("it is not listed", || lacks().as_array().is_some_and(|all| all.len() == 1));
    let said = lacks()[0].as_str().unwrap().to_owned();
    assert!(said.contains("a.img: ") && said.contains("(ringway-helper)"), "{said}");
    guests.iter().for_each(|guest| guest.goes_on(10));
    // Others have theirs.
    assert!(ctl(dir.path(), &["add", "null:1G", "--socket", "t", "--isolate"]).is_ok());
    kill(its, libc::SIGKILL);
    until("it lacks it for ever", || lacks() == Value::Null);
    guests.into_iter().for_each(|guest| {
        guest.goes_on(10);
        guest.stop();
    });
    daemon.stop();
}

/// One that asks for as much as it can, next to one that asks for one thing at a time: processes share
/// nothing but the host, so each has queues, slots and engines for itself. Judged by counts.
#[test]
fn e06_a_greedy_disk_leaves_its_neighbours_what_is_theirs() {
    let dir = folder();
    let daemon = three(dir.path());
    let mut device = connect(dir.path(), "a");
    let neighbour = Guest::start(connect(dir.path(), "b"));
    let reads = |disk: usize| {
        let stats = ctl(dir.path(), &["stats"]).unwrap();
        stats["disks"][disk]["counts"]["reads"].as_u64().unwrap()
    };
    neighbour.goes_on(10);
    let mut queue: BlkQueue<()> = device.queue().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, asked) = (Arc::clone(&stop), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&asked);
    let greedy = std::thread::spawn(move || {
        let mut idle: Vec<_> = (0..32).map(|_| device.pool().alloc(32768).unwrap()).collect();
        while !stopped.load(SeqCst) {
            while let Some(buffer) = idle.pop() {
                queue.read(0, buffer, ()).unwrap();
            }
            queue.wait(Some(Duration::from_millis(100))).unwrap();
            while let Some(done) = queue.pop().unwrap() {
                assert!(done.is_ok());
                idle.push(done.into_buffer().unwrap());
                counted.fetch_add(1, SeqCst);
            }
        }
    });
    // While the greedy one has thousands carried out the neighbour goes on, and so does the disk that
    // the daemon serves itself.
    let plain = Guest::start(connect(dir.path(), "c"));
    for _ in 0..5 {
        let before = asked.load(SeqCst);
        neighbour.goes_on(20);
        plain.goes_on(20);
        until("the greedy one stands still", || asked.load(SeqCst) >= before + 200);
    }
    assert!(reads(0) >= 1000 && reads(2) >= 110);
    // Nor do limits of the greedy one reach anybody else: it waits, for a byte a second, alone.
    ctl(dir.path(), &["limit", "a", "--bps", "1"]).unwrap();
    let before = asked.load(SeqCst);
    neighbour.goes_on(50);
    plain.goes_on(50);
    // What was under way when it was limited has ended, and no second round has begun.
    assert!(asked.load(SeqCst) - before <= 64, "it is not limited");
    ctl(dir.path(), &["limit", "a", "--lift"]).unwrap();
    let before = asked.load(SeqCst);
    until("it stays limited", || asked.load(SeqCst) > before + 200);
    stop.store(true, SeqCst);
    greedy.join().unwrap();
    neighbour.stop();
    plain.stop();
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert!((0..3).all(|disk| list["disks"][disk]["restarts"] == 0), "{list}");
    daemon.stop();
}

/// What a file says of its disks may be said beside it; a disk that says something else keeps it.
#[test]
fn isolate_is_said_beside_a_file_too() {
    let dir = folder();
    std::fs::write(
        dir.path().join("c.toml"),
        "control = 'ctl'\n\
         [[disk]]\nimage = 'null:1G'\nsocket = 'a'\nqueues = 1\n\
         [[disk]]\nimage = 'null:2G'\nsocket = 'b'\nqueues = 1\nisolate = false\n",
    )
    .unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "c.toml", "--isolate"]);
    let apart = |disk| process(dir.path(), disk).is_some();
    assert_eq!((apart(0), apart(1)), (true, false));
    ctl(dir.path(), &["reload"]).unwrap();
    assert_eq!((apart(0), apart(1)), (true, false));
    daemon.stop();
    // The other way round.
    let file = std::fs::read_to_string(dir.path().join("c.toml")).unwrap();
    std::fs::write(dir.path().join("c.toml"), format!("isolate = true\n{file}")).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "c.toml", "--isolate=false"]);
    assert_eq!((apart(0), apart(1)), (false, false));
    daemon.stop();
    std::fs::write(dir.path().join("x.toml"), "[xen]\nqueues = 1\n").unwrap();
    let mut command = ringway();
    command.args(["serve", "--config", "x.toml", "--isolate"]).current_dir(dir.path());
    let output = run(command);
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), error.matches("error:").count()), (Some(2), 1), "{error}");
    assert!(error.contains("--isolate is for disks with sockets"), "{error}");
}

/// A cgroup of version 2 that is delegated as systemd does it; `None` where none can be made.
struct Delegated(PathBuf);

impl Delegated {
    fn new(name: &str) -> Option<Self> {
        let root = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].into_iter().map(Path::new);
        let root = root.into_iter().find(|root| root.join("cgroup.controllers").exists())?;
        let folder = root.join(format!("ringway-{name}-{}", std::process::id()));
        std::fs::create_dir(&folder).ok()?;
        let made = Self(folder);
        let mark =
            rustix::fs::setxattr(&made.0, "user.delegate", b"1", rustix::fs::XattrFlags::empty());
        mark.ok().map(|()| made)
    }

    /// Whether memory can be limited in it.
    fn has_memory(&self) -> bool {
        let root = self.0.parent().unwrap().join("cgroup.subtree_control");
        // Where nobody has asked for it yet.
        let _ = std::fs::write(root, "+memory");
        std::fs::read_to_string(self.0.join("cgroup.controllers")).unwrap().contains("memory")
    }

    /// `ringway ARGS`, begun in it.
    fn command(&self, dir: &Path, args: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new("sh");
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        command.args(["-c", enter]).arg(&self.0).arg(env!("CARGO_BIN_EXE_ringway")).args(args);
        command.current_dir(dir).stdin(std::process::Stdio::null());
        command
    }

    /// The cgroup of a process, within this one.
    fn of(&self, process: u32) -> String {
        let all = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
        let own = all.lines().find_map(|line| line.strip_prefix("0::")).unwrap().to_owned();
        let name = self.0.file_name().unwrap().to_str().unwrap();
        own.split_once(name).unwrap_or_else(|| panic!("{own}")).1.to_owned()
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        for _ in 0..100 {
            for inner in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
                let _ = std::fs::remove_dir(inner.path());
            }
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whoever delegates a cgroup to the daemon has one for each process of a disk in it.
#[test]
fn e06_isolated_disks_have_cgroups_of_their_own() {
    let Some(cgroup) = Delegated::new("own") else {
        return skip(Need::MemoryCgroup, "no cgroup of version 2 can be made here");
    };
    let dir = folder();
    let args = ["serve", "disk.img", "--socket", "s", "--isolate", "--control", "ctl"];
    let daemon = Daemon::start(cgroup.command(dir.path(), &args));
    assert_eq!(cgroup.of(daemon.pid()), "/daemon");
    assert_eq!(cgroup.of(spawner_of(&daemon)), "/daemon");
    let place = |disk| cgroup.of(process(dir.path(), disk).unwrap().try_into().unwrap());
    assert_eq!(place(0), "/disk-1");
    let guest = Guest::start(connect(dir.path(), "s"));
    guest.goes_on(5);
    let its = process(dir.path(), 0).unwrap();
    kill(its, libc::SIGKILL);
    guest.goes_on(5);
    until("it is not served again", || process(dir.path(), 0).is_some_and(|now| now != its));
    assert_eq!(place(0), "/disk-1");
    ctl(dir.path(), &["add", "b.img", "--size", "1M", "--socket", "t"]).unwrap();
    assert_eq!(place(1), "/disk-2");
    ctl(dir.path(), &["remove", "b.img"]).unwrap();
    // It is taken away when something happens that the spawner hears of.
    let add = ["add", "disk.img/inner", "--socket", "t"];
    until("the cgroup stays", || {
        ctl(dir.path(), &add).unwrap_err();
        !cgroup.0.join("disk-2").exists()
    });
    assert!(!daemon.log().contains("share one cgroup"), "{}", daemon.log());
    if !cgroup.has_memory() {
        let add = ["add", "c.img", "--size", "1M", "--socket", "t", "--memory-max", "64M"];
        let refused = ctl(dir.path(), &add).unwrap_err();
        assert!(refused.contains("has no memory controller"), "{refused}");
    }
    guest.stop();
    daemon.stop();
}

/// What is asked for and cannot be had is an error; what is not asked for is told once.
#[test]
fn memory_max_needs_a_process_and_a_cgroup() {
    let dir = folder();
    let refuse = |args: &[&str], status, what: &str| {
        let mut command = ringway();
        command.args(["serve", "disk.img", "--socket", "s"]).args(args).current_dir(dir.path());
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(what), "{said}");
    };
    refuse(&["--memory-max", "1G"], 1, "this one has none of its own: add isolate = true");
    refuse(&["--isolate", "--memory-max", "1M"], 2, "give 32 MiB at least");
    let Some(cgroup) = Delegated::new("none") else {
        return skip(Need::MemoryCgroup, "no cgroup of version 2 can be made here");
    };
    rustix::fs::removexattr(&cgroup.0, "user.delegate").unwrap();
    let args = ["serve", "disk.img", "--socket", "s", "--isolate", "--control", "ctl"];
    let daemon = Daemon::start(cgroup.command(dir.path(), &args));
    assert_eq!(daemon.log().matches("share one cgroup").count(), 1, "{}", daemon.log());
    assert_eq!(cgroup.of(daemon.pid()), "");
    let add = ["add", "c.img", "--size", "1M", "--socket", "t", "--memory-max", "64M"];
    let refused = ctl(dir.path(), &add).unwrap_err();
    assert!(refused.contains("is not delegated to it. docs/operating.md"), "{refused}");
    assert!(!dir.path().join("c.img").exists());
    daemon.stop();
}

/// The limit is the disk's: what its guest has it fill ends its own process, as often as it does.
#[test]
fn e06_a_disk_has_no_more_memory_than_its_own_limit() {
    let Some(cgroup) = Delegated::new("memory").filter(Delegated::has_memory) else {
        return skip(Need::MemoryCgroup, "memory is not limited by cgroups of version 2 here");
    };
    let dir = folder();
    let toml = "control = 'ctl'\nisolate = true\n\
                [[disk]]\nimage = 'disk.img'\nsocket = 'a'\nqueues = 1\nmemory-max = '64M'\n\
                [[disk]]\nimage = 'b.img'\nsize = '4M'\nsocket = 'b'\nqueues = 1\n";
    std::fs::write(dir.path().join("c.toml"), toml).unwrap();
    let daemon = Daemon::start(cgroup.command(dir.path(), &["serve", "--config", "c.toml"]));
    let max = std::fs::read_to_string(cgroup.0.join("disk-1/memory.max")).unwrap();
    assert_eq!(max.trim(), (64 * MIB).to_string());
    let neighbour = Guest::start(connect(dir.path(), "b"));
    neighbour.goes_on(20);
    let its = process(dir.path(), 0).unwrap();
    let mut device =
        Options::new().patience(PATIENCE).memory(256 * MIB).connect(dir.path().join("a")).unwrap();
    let filled = fill(&mut device);
    assert!(filled < 64, "it lives although {filled} MiB were read");
    until("it was not ended", || !is_there(its));
    neighbour.goes_on(20);
    drop(device);
    let list = ctl(dir.path(), &["list"]).unwrap();
    assert_eq!(list["disks"][1]["restarts"], 0);
    until("it is not served again", || process(dir.path(), 0).is_some());
    neighbour.stop();
    daemon.stop();
}

/// A disk is served, its process dies, and meanwhile the name of its image, or of what that is based on, leads
/// elsewhere: nothing else is served in its place, and nothing made.
#[test]
fn c50_a_process_that_is_started_again_serves_the_same_image_or_none() {
    type Act = fn(&Path);
    fn rename(dir: &Path, from: &str, to: &str) {
        std::fs::rename(dir.join(from), dir.join(to)).unwrap();
    }
    fn link(dir: &Path, to: &str) {
        let _ = std::fs::remove_file(dir.join("link"));
        std::os::unix::fs::symlink(to, dir.join("link")).unwrap();
    }
    let raw: &[&str] = &["made.img", "--format", "raw", "--size", "4M"];
    let clone: &[&str] = &["c.qcow2", "--base", "base", "--base-format", "raw"];
    let cases: [(&str, &[&str], Act, Act); 6] = [
        ("moved", raw, |d| rename(d, "made.img", "away"), |d| rename(d, "away", "made.img")),
        (
            "replaced",
            raw,
            |d| {
                rename(d, "made.img", "away");
                rename(d, "other", "made.img");
            },
            |d| rename(d, "away", "made.img"),
        ),
        ("linked", &["link", "--format", "raw"], |d| link(d, "other"), |d| link(d, "real")),
        ("a clone", clone, |d| rename(d, "c.qcow2", "away"), |d| rename(d, "away", "c.qcow2")),
        (
            "a base",
            clone,
            |d| {
                rename(d, "base", "away");
                rename(d, "other", "base");
            },
            |d| rename(d, "away", "base"),
        ),
        (
            "a snapshot",
            clone,
            |d| {
                rename(d, "c.qcow2", "away");
                rename(d, "snap", "c.qcow2");
            },
            |d| {
                rename(d, "c.qcow2", "snap");
                rename(d, "away", "c.qcow2");
            },
        ),
    ];
    for (what, image, act, undo) in cases {
        let dir = folder();
        let dir = dir.path();
        for name in ["base", "other", "real"] {
            std::fs::write(dir.join(name), vec![0; 4 * MIB]).unwrap();
        }
        link(dir, "real");
        let args = [image, &["--socket", "s", "--control", "ctl", "--isolate"]].concat();
        let daemon = Daemon::serve(dir, &args);
        let mut device = connect(dir, "s");
        let mut queue = device.queue().unwrap();
        if what == "a snapshot" {
            ctl(dir, &["snapshot", "0", "snap"]).unwrap();
            // From the new image it is served again.
            let its = process(dir, 0).unwrap();
            kill(its, libc::SIGKILL);
            until("it is not served again", || process(dir, 0).is_some_and(|p| p != its));
        }
        assert!(write(&device, &mut queue, 3, 7), "{what}");
        act(dir);
        let names = || {
            let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
            let mut all: Vec<_> = all.filter(|name| name != "s").collect();
            all.sort();
            all
        };
        let before = names();
        kill(process(dir, 0).unwrap(), libc::SIGKILL);
        until(&format!("{what}: {}", daemon.log()), || {
            daemon.log().contains("it cannot be served again yet")
        });
        assert!(daemon.log().contains("its name back"), "{what}: {}", daemon.log());
        assert_eq!(names(), before, "{what}");
        let list = ctl(dir, &["list"]).unwrap();
        assert_ne!(list["disks"][0]["state"], "serving", "{what}: {list}");
        undo(dir);
        assert!(read(&device, &mut queue, 3).iter().all(|byte| *byte == 7), "{what}");
        assert!(write(&device, &mut queue, 4, 8), "{what}");
        daemon.stop();
    }
}

#[test]
fn e31_a_daemon_ends_after_the_removals_that_are_under_way() {
    for isolate in ["--isolate=false", "--isolate"] {
        let dir = folder();
        let dir = dir.path();
        let args =
            ["null:64M,latency=3000ms", "--socket", "s", "--control", "ctl", "--queues", "1"];
        let args = [&args[..], &[isolate]].concat();
        let mut daemon = Daemon::serve(dir, &args);
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| {
                let mut device = Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap();
                let mut queue = device.queue().unwrap();
                write(&device, &mut queue, 3, 7)
            });
            until("the write is not in flight", || {
                ctl(dir, &["stats"]).unwrap()["disks"][0]["in_flight"] == 1
            });
            let removal = scope.spawn(|| ctl(dir, &["remove", "0"]));
            until("it is not removed", || {
                ctl(dir, &["list"]).unwrap()["disks"][0]["state"] == "leaving"
            });
            daemon.signal(libc::SIGTERM);
            let (status, _) = daemon.wait();
            assert_eq!(status.code(), Some(0), "{isolate}: {}", daemon.log());
            assert!(guest.join().unwrap(), "{isolate}: {}", daemon.log());
            let removed = removal.join().unwrap();
            assert_eq!(removed.unwrap()["drained"], true, "{isolate}: {}", daemon.log());
        });
    }
}

/// A disk is removed while its process is being started again: that has said that it is ready, and hears that it is
/// to end instead of that it is to serve.
#[test]
fn c63_a_clone_goes_with_a_disk_that_is_removed_before_it_is_served_again() {
    use ringway_control::config::{DaemonArgs, DiskArgs};
    use std::os::fd::AsRawFd;
    for removed in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let clone = ["top.qcow2", "--base", "disk.img", "--base-format", "raw", "--socket", "s"];
        Daemon::serve(dir, &[&clone[..], &["--ephemeral"]].concat()).kill();
        assert!(dir.join("top.qcow2").exists());
        let disk: DiskArgs = serde_json::from_value(serde_json::json!({
            "image": dir.join("top.qcow2"), "base": dir.join("disk.img"), "base-format": "raw",
            "socket": dir.join("s"), "ephemeral": true, "lock-wait": 30,
        }))
        .unwrap();
        let daemon = DaemonArgs { state_dir: Some(dir.join("state")), ..DaemonArgs::default() };
        let setup = serde_json::json!({
            "disk": disk, "daemon": daemon, "added": false, "commanded": true, "sampled": false,
            "name": "top.qcow2", "files": { "images": [], "others": [] }, "log_format": null,
            "log_level": null,
        });
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
        let mut command = ringway();
        let number = theirs.as_raw_fd().to_string();
        let mut process = command.args(["serve", "--isolated", &number]).spawn().unwrap();
        drop(theirs);
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        ours.write_all(format!("{setup}\n").as_bytes()).unwrap();
        let mut ear = BufReader::new(ours.try_clone().unwrap());
        let mut said = String::new();
        ear.read_line(&mut said).unwrap();
        assert!(said.contains("Ready"), "{said}");
        ours.write_all(format!("{{\"Stop\":{removed}}}\n").as_bytes()).unwrap();
        said.clear();
        ear.read_line(&mut said).unwrap();
        assert!(said.contains("Stopped") && said.contains("\"clear\":true"), "{said}");
        assert!(crate::common::wait(&mut process, PATIENCE).is_some(), "it does not end");
        assert_eq!(dir.join("top.qcow2").exists(), !removed);
        assert!(!dir.join("s").exists());
    }
}

/// Nobody is there to delete the clone: its process was killed, and cannot be started again without the base.
#[test]
fn c63_a_clone_that_a_removal_leaves_behind_is_told_of() {
    let dir = folder();
    let dir = dir.path();
    let clone = ["top.qcow2", "--base", "disk.img", "--base-format", "raw", "--socket", "s"];
    let more = ["--ephemeral", "--isolate", "--control", "ctl", "--state-dir", "state"];
    let daemon = Daemon::serve(dir, &[&clone[..], &more].concat());
    std::fs::rename(dir.join("disk.img"), dir.join("away.img")).unwrap();
    kill(process(dir, 0).unwrap(), libc::SIGKILL);
    until("it cannot be served again", || daemon.log().contains("cannot be served"));
    let error = ctl(dir, &["remove", "0"]).unwrap_err();
    assert!(error.contains("could not end it in order"), "{error}");
    let log = daemon.log();
    assert!(log.contains("its clone is ephemeral and was not deleted"), "{log}");
    assert!(dir.join("top.qcow2").exists());
    daemon.stop();
}

/// The front-end has moved a ring out of its memory meanwhile, so its queues cannot start: the disk is paused no more
/// all the same, also for the next process.
#[test]
fn a_resume_whose_queues_cannot_start_is_not_undone_by_the_next_process() {
    use ringway_testkit::raw::{F_VERSION_1, RawGuest, halves, request, words};
    let dir = folder();
    let dir = dir.path();
    let args = ["disk.img", "--format", "raw", "--socket", "s", "--control", "ctl", "--isolate"];
    let daemon = Daemon::serve(dir, &[&args[..], &["--state-dir", "state"]].concat());
    let guest = RawGuest::start(UnixStream::connect(dir.join("s")).unwrap(), 1, 64, F_VERSION_1);
    ctl(dir, &["pause", "0"]).unwrap();
    let mut address = halves(&[0, 0]);
    address.extend(words(&[1 << 40, 1 << 40, 1 << 40, 0]));
    guest.client.acked(request::SET_VRING_ADDR, &address, &[]).unwrap();
    ctl(dir, &["resume", "0"]).unwrap();
    drop(guest);
    let state = || ctl(dir, &["list"]).unwrap()["disks"][0]["state"].clone();
    until("it is served", || state() == "serving");
    let first = process(dir, 0).unwrap();
    kill(first, libc::SIGKILL);
    until("another process serves it", || process(dir, 0).is_some_and(|now| now != first));
    assert_eq!(state(), "serving", "{}", daemon.log());
    let mut device = connect(dir, "s");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 0, 1));
    drop((queue, device));
    daemon.stop();
}
