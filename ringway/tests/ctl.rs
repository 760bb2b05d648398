//! `ringway ctl` and the control socket, from outside: the real program under load.

use crate::common::{Daemon, PATIENCE, folder, ringway, run, text, threads, write};
use ringway_driver::{BlkQueue, Device, Options};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn connect(dir: &Path, socket: &str) -> Device {
    let options = Options::new().patience(PATIENCE).watch_config(true);
    options.connect(dir.join(socket)).unwrap()
}

/// `ringway ctl --control ctl ARGS`, run in `dir`.
fn ctl(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    run(command)
}

/// As [`ctl`]; it must succeed.
fn done(dir: &Path, args: &[&str]) -> String {
    let output = ctl(dir, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// As [`done`], with `--json`.
fn answer(dir: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&done(dir, &[args, &["--json"]].concat())).unwrap()
}

/// As [`ctl`]; it must be refused, with this in its message.
fn refused(dir: &Path, args: &[&str], what: &str) {
    let output = ctl(dir, args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output.stdout));
    let message = text(&output.stderr);
    assert!(message.contains(what), "{what}: {message}");
    assert!(message.starts_with("error: ") && message.lines().count() == 1, "{message}");
}

/// A client that speaks to the socket by hand.
struct Client(BufReader<UnixStream>);

impl Client {
    fn new(dir: &Path) -> Self {
        let stream = UnixStream::connect(dir.join("ctl")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn say(&mut self, line: &str) -> Value {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.hear()
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    fn is_closed(&mut self) -> bool {
        !matches!(self.0.read(&mut [0; 64]), Ok(1..))
    }
}

/// Reads and writes one disk without a pause and without an error until told to stop.
struct Load(Arc<AtomicBool>, std::thread::JoinHandle<u64>);

impl Load {
    fn start(device: Device, mut queue: BlkQueue<()>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Relaxed) {
                for sector in 0..16u64 {
                    let mut buffer = device.pool().alloc(512).unwrap();
                    buffer.fill(sector.to_le_bytes()[0]);
                    queue.write(sector * 512, buffer, ()).unwrap();
                    queue.read(sector * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
                }
                assert!(queue.wait_for(32, Some(PATIENCE)).unwrap(), "a request hangs");
                assert!(queue.completions().all(|done| done.is_ok()), "a request fails");
                rounds += 1;
            }
            rounds
        });
        Self(stop, thread)
    }

    fn stop(self) -> u64 {
        self.0.store(true, Relaxed);
        self.1.join().unwrap()
    }
}

#[test]
fn b12_disks_come_and_go_while_another_one_is_under_load() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--queues", "2"];
    let daemon = Daemon::serve(dir.path(), &args);
    let mut device = connect(dir.path(), "s");
    let queue = device.queue().unwrap();
    let load = Load::start(device, queue);
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let mut before = 0;
    for round in 1..=8u8 {
        let words = ["new.img", "--size", "2M", "--socket", "t", "--queues", "3"];
        let added = answer(dir.path(), &[&["add"][..], &words].concat());
        assert_eq!((&added["size"], &added["queues"]), (&json!(2 * MIB), &json!(3)));
        assert_eq!(added["id"], round, "a number is never given again");
        let mut device = connect(dir.path(), "t");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 9, round));
        let listed = answer(dir.path(), &["list"]);
        assert_eq!(listed["disks"].as_array().unwrap().len(), 2);
        assert_eq!(listed["disks"][1]["connected"], true);
        // In use, and asked for something that is not in flight yet.
        for _ in 0..32 {
            queue.read(0, device.pool().alloc(4096).unwrap(), ()).unwrap();
        }
        queue.submit().unwrap();
        let name = ["new.img", "t", listed["disks"][1]["image"].as_str().unwrap()];
        let removed = answer(dir.path(), &["remove", name[usize::from(round) % 3]]);
        assert_eq!((&removed["drained"], &removed["connected"]), (&json!(true), &json!(true)));
        assert!(!dir.path().join("t").exists(), "its socket file is gone");
        assert!(!device.is_connected());
        assert_eq!(std::fs::read(dir.path().join("new.img")).unwrap()[9 * 512], round);
        match round {
            2 => before = descriptors(),
            // Those of the last round may be closed a moment later; those of round 2 as well, but a
            // leak of each round outgrows that.
            8 => wait_until(|| descriptors() <= before),
            _ => {}
        }
    }
    assert!(load.stop() > 0);
    daemon.stop();
    assert!(!dir.path().join("ctl").exists(), "the control socket is gone");
}

#[test]
fn a_daemon_may_begin_without_a_disk_and_lose_its_last() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["--control", "ctl"]);
    assert!(daemon.ready.contains("control socket"), "{}", daemon.ready);
    assert_eq!(answer(dir.path(), &["list"])["disks"], json!([]));
    let none = "no disks; `ringway ctl add` adds one\n";
    let list = done(dir.path(), &["list"]);
    assert!(list.starts_with(none), "{list}");
    assert!(list.contains(&format!("process {}", daemon.pid())), "{list}");
    assert!(done(dir.path(), &["stats"]).starts_with(none));
    // Engines that nobody has used before get their workers now.
    for (image, engine) in [("null:1G", "null"), ("sim:ram:1M", "sim:ram"), ("disk.img", "threads")]
    {
        let words = ["add", image, "--socket", "s", "--engine", "threads", "--cache", "writeback"];
        let words = if engine == "threads" { &words[..] } else { &words[..4] };
        let said = done(dir.path(), words);
        assert!(said.contains(engine), "{said}");
        let mut device = connect(dir.path(), "s");
        let mut queue = device.queue().unwrap();
        assert!(write(&device, &mut queue, 1, 1));
        let id = answer(dir.path(), &["list"])["disks"][0]["id"].to_string();
        let said = done(dir.path(), &["remove", &id]);
        assert!(said.contains("removed; a front-end was connected"), "{said}");
    }
    daemon.stop();
}

#[test]
fn a_disk_grows_and_shrinks_and_its_guest_hears_of_it() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    assert!(!write(&device, &mut queue, 4000, 7));
    let said = done(dir.path(), &["resize", "disk.img", "2M"]);
    assert!(said.contains("1 MiB → 2 MiB; the guest was told"), "{said}");
    assert!(device.config_changed().unwrap());
    assert_eq!(device.capacity(), 2 * MIB);
    assert!(write(&device, &mut queue, 4000, 7));
    refused(dir.path(), &["resize", "disk.img", "1M"], "--shrink");
    assert_eq!(dir.path().join("disk.img").metadata().unwrap().len(), 2 * MIB);
    let said = answer(dir.path(), &["resize", "disk.img", "1M", "--shrink"]);
    assert_eq!((&said["to"], &said["guest_notice"]), (&json!(MIB), &json!("yes")));
    assert!(!write(&device, &mut queue, 4000, 7));
    // The file was made longer by somebody else.
    std::fs::File::options()
        .write(true)
        .open(dir.path().join("disk.img"))
        .unwrap()
        .set_len(3 * MIB)
        .unwrap();
    assert!(done(dir.path(), &["resize", "0"]).contains("1 MiB → 3 MiB"));
    assert!(done(dir.path(), &["resize", "0"]).contains("3 MiB as before"));
    refused(dir.path(), &["resize", "0", "1000"], "multiple of");

    // Nobody is there, and somebody who does not listen.
    drop((queue, device));
    wait_until(|| answer(dir.path(), &["list"])["disks"][0]["connected"] == false);
    let said = done(dir.path(), &["resize", "disk.img", "4M"]);
    assert!(said.contains("no front-end is connected"), "{said}");
    let _device = Options::new().connect(dir.path().join("s")).unwrap();
    let said = done(dir.path(), &["resize", "disk.img", "5M"]);
    assert!(said.contains("the guest was NOT told"), "{said}");
    daemon.stop();
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_paused_disk_lets_its_guest_wait() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue::<()>().unwrap();
    assert!(done(dir.path(), &["pause", "disk.img"]).contains("paused"));
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["state"], "paused");
    queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
    assert!(!queue.wait(Some(Duration::from_millis(200))).unwrap(), "a paused disk answers");
    assert_eq!(answer(dir.path(), &["drain", "disk.img"])["state"], "paused");
    assert_eq!(answer(dir.path(), &["resume", "disk.img"])["state"], "serving");
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert!(queue.pop().unwrap().unwrap().is_ok());
    assert!(done(dir.path(), &["drain", "disk.img"]).contains("durable"));
    assert!(write(&device, &mut queue, 1, 1));
    daemon.stop();
}

#[test]
fn stats_tell_of_disks_queues_and_workers() {
    let dir = folder();
    let args = ["null:1G", "--socket", "s", "--control", "ctl", "--queues", "2", "--workers", "1"];
    let daemon = Daemon::serve(dir.path(), &args);
    let mut device = Options::new().queues(2).connect(dir.path().join("s")).unwrap();
    let mut queues = device.queues().unwrap();
    for sector in 0..200 {
        assert!(write(&device, &mut queues[1], sector, 1));
    }
    assert!(!write(&device, &mut queues[0], 1 << 40, 1));
    let first = answer(dir.path(), &["stats"]);
    let (disk, worker) = (&first["disks"][0], &first["workers"][0]);
    assert_eq!(disk["counts"]["writes"], 200);
    assert_eq!(disk["counts"]["written_bytes"], 200 * 512);
    assert_eq!(disk["counts"]["errors"], 1);
    assert_eq!((&disk["in_flight"], &disk["connected"]), (&json!(0), &json!(true)));
    assert_eq!(disk["queues"][1]["counts"]["writes"], 200);
    assert_eq!(disk["queues"][1]["worker"], "null/0");
    let timed = &disk["latency"]["writes"];
    assert!(timed["count"].as_u64() >= Some(3), "{timed}");
    assert!(timed["p50"].as_u64() > Some(0) && timed["max"].as_u64() >= timed["p99"].as_u64());
    assert_eq!((&worker["requests"], &worker["queues"]), (&json!(201), &json!(2)));
    assert_eq!((&worker["answers"], &worker["batches"]["p50"]), (&json!(true), &json!(1)));
    for field in ["age_us", "cpu_us", "turns", "syscalls"] {
        assert!(worker[field].as_u64() > Some(0), "{field}: {worker}");
    }
    // For those who want the latencies of the last second.
    let reply = Client::new(dir.path()).say(r#"{"command":"stats","disk":0,"buckets":true}"#);
    let writes = &reply["answer"]["disks"][0]["latency"]["writes"];
    let buckets = writes["buckets"].as_array().unwrap();
    let sum: u64 = buckets.iter().map(|bucket| bucket[1].as_u64().unwrap()).sum();
    assert_eq!(sum, writes["count"].as_u64().unwrap());
    assert!(buckets.is_sorted_by_key(|bucket| bucket[0].as_u64()));
    // Counts of queues that are gone stay with the disk; one that is left has no latencies.
    drop((queues, device));
    wait_until(|| answer(dir.path(), &["stats"])["disks"][0]["queues"] == json!([]));
    let last = answer(dir.path(), &["stats", "null:1G"]);
    assert_eq!(last["disks"][0]["counts"]["writes"], 200);
    assert!(last["uptime_us"].as_u64() > first["uptime_us"].as_u64());
    let table = done(dir.path(), &["stats"]);
    for word in ["null:1G", "null/0", "200", "100 KiB", "spinning", "lost kicks"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    // Where no terminal says how wide it is, the environment may.
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "stats"]).env("COLUMNS", "80");
    command.current_dir(dir.path());
    let narrow = text(&run(command).stdout);
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    assert!(narrow.contains("(no room for: ") && narrow.contains("held"), "{narrow}");
    refused(dir.path(), &["stats", "nobody"], "there is no disk 'nobody'");
    daemon.stop();
}

#[test]
fn only_its_owner_can_connect() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mode = dir.path().join("ctl").metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A second daemon leaves it alone.
    let mut command = ringway();
    command.args(["serve", "null:1G", "--socket", "t", "--control", "ctl"]).current_dir(dir.path());
    let output = run(command);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("another process is listening"));
    assert!(!dir.path().join("t").exists());
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["id"], 0);
    daemon.stop();
}

#[test]
fn requests_that_make_no_sense_are_answered() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut client = Client::new(dir.path());
    for (line, kind, what) in [
        ("nonsense", "malformed", "not a JSON object"),
        ("[]", "malformed", "not a JSON object"),
        ("{}", "malformed", "names no command"),
        (r#"{"command":7}"#, "malformed", "names no command"),
        (r#"{"command":"xyzzy"}"#, "unknown-command", "'xyzzy'; there are list, stats"),
        (r#"{"command":"resise"}"#, "unknown-command", "(did you mean 'resize'?)"),
        (r#"{"command":"list","version":2}"#, "version", "speaks version 1"),
        (r#"{"command":"list","disk":"x"}"#, "malformed", "unknown field `disk`"),
        (r#"{"command":"pause"}"#, "malformed", "missing field `disk`"),
        (r#"{"command":"pause","disk":9}"#, "no-such-disk", "'9'"),
        (r#"{"command":"resize","disk":0,"size":"10X"}"#, "malformed", "'10X' is not a size"),
        (r#"{"command":"resize","disk":0,"size":512}"#, "not-meant", "loses"),
        (r#"{"command":"add","disk":{"image":"/x"}}"#, "malformed", "no socket"),
        (r#"{"command":"add","disk":{"image":"x","socket":"/y"}}"#, "malformed", "absolute"),
        (
            r#"{"command":"add","disk":{"image":"/x","quues":3}}"#,
            "malformed",
            "unknown field `quues` (did you mean 'queues'?)",
        ),
        (
            r#"{"command":"add","disk":{"image":"/no/x","socket":"/no/y"}}"#,
            "failed",
            "its folder does not exist",
        ),
    ] {
        let reply = client.say(line);
        assert_eq!((&reply["ok"], &reply["version"]), (&json!(false), &json!(1)), "{line}");
        assert_eq!(reply["error"]["kind"], kind, "{line}: {reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(what), "{line}: {message}");
    }
    let reply = client.say(r#"{"command":"list","version":1,"id":[1,"a"]}"#);
    assert_eq!((&reply["ok"], &reply["id"]), (&json!(true), &json!([1, "a"])));
    // The same image or socket twice, in words for people.
    let root = dir.path().canonicalize().unwrap().display().to_string();
    for (image, socket, what) in
        [("disk.img", "t", "is served already, at "), ("b", "s", "is taken")]
    {
        let disk =
            json!({ "image": format!("{root}/{image}"), "socket": format!("{root}/{socket}") });
        let reply = client.say(&json!({ "command": "add", "disk": disk }).to_string());
        assert_eq!(reply["error"]["kind"], "failed", "{reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains(what), "{reply}");
    }
    assert!(!dir.path().join("t").exists() && !dir.path().join("b").exists());
    daemon.stop();
}

#[test]
fn a_hostile_client_keeps_nobody_waiting() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    // A line without an end.
    let mut endless = Client::new(dir.path());
    let stream = endless.0.get_mut();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(&vec![b' '; 70 << 10]);
    assert_eq!(endless.hear()["error"]["kind"], "malformed");
    assert!(endless.is_closed());
    // Half a request, and questions without end whose answers nobody reads.
    let mut half = Client::new(dir.path());
    half.0.get_mut().write_all(b"{\"command\"").unwrap();
    let unread = UnixStream::connect(dir.path().join("ctl")).unwrap();
    unread.set_nonblocking(true).unwrap();
    let line = b"{\"command\":\"stats\"}\n".repeat(1000);
    for _ in 0..100 {
        let _ = (&unread).write(&line);
    }
    let begun = Instant::now();
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["id"], 0);
    assert!(begun.elapsed() < PATIENCE, "it waited for the others");
    // More clients than there is room for: the one that was silent longest goes.
    let mut silent: Vec<_> = (0..40).map(|_| Client::new(dir.path())).collect();
    assert_eq!(silent[39].say(r#"{"command":"list"}"#)["ok"], true);
    assert!(silent[0].is_closed());
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["id"], 0);
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().count();
    assert!(threads < 120, "{threads} threads");
    daemon.stop();
}

#[test]
fn ctl_says_what_is_wrong() {
    let dir = folder();
    refused(dir.path(), &["list"], "there is no socket at ctl");
    std::fs::write(dir.path().join("file"), "").unwrap();
    let mut command = ringway();
    command.args(["ctl", "list"]).current_dir(dir.path()).env_remove("RINGWAY_CONTROL");
    let unnamed = run(command);
    assert!(text(&unnamed.stderr).contains("add --control PATH"));
    assert!(text(&unnamed.stderr).contains("RINGWAY_CONTROL"));
    assert_eq!(unnamed.status.code(), Some(2), "wrong usage");
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    refused(dir.path(), &["add", "x.img"], "add --socket PATH");
    refused(dir.path(), &["remove", "x.img"], "there is no disk 'x.img'");
    let mut command = ringway();
    command.args(["ctl", "list"]).current_dir(dir.path()).env("RINGWAY_CONTROL", "ctl");
    assert!(text(&run(command).stdout).contains("disk.img"));
    daemon.kill();
    refused(dir.path(), &["list"], "no one listens at ctl");
}

#[test]
fn the_control_socket_can_be_named_in_the_file() {
    let dir = folder();
    std::fs::write(dir.path().join("conf.toml"), "control = 'ctl'\n").unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "conf.toml"]);
    assert_eq!(answer(dir.path(), &["list"])["disks"], json!([]));
    daemon.stop();
}

/// `--cpus` and `--lock-wait` count for disks that come later, too, and a daemon that waits for an
/// image does everything else meanwhile.
#[test]
fn added_disks_are_pinned_and_waited_for() {
    let dir = folder();
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let cpus: Vec<_> = cpus.take(2).map(|cpu| cpu.to_string()).collect();
    let daemon = Daemon::serve(
        dir.path(),
        &[
            "null:1G",
            "--socket",
            "s",
            "--control",
            "ctl",
            "--queues",
            "1",
            "--cpus",
            &cpus.join(","),
        ],
    );
    let held = std::fs::File::create(dir.path().join("held.img")).unwrap();
    held.set_len(MIB).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    let words = ["add", "held.img", "--socket", "t", "--queues", "4", "--engine", "threads"];
    refused(dir.path(), &words, "held.img");
    std::thread::scope(|scope| {
        let patient = [&words[..], &["--lock-wait", "60"]].concat();
        let path = dir.path();
        let added = scope.spawn(move || answer(path, &patient));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!added.is_finished());
        done(dir.path(), &["add", "null:1G", "--socket", "u", "--queues", "2"]);
        drop(held);
        assert_eq!(added.join().unwrap()["size"], MIB);
    });
    connect(dir.path(), "t");
    // One or two of the null disks' engine, as many of the other one's, in turn.
    let mut expected = [&cpus[..], &cpus].concat();
    expected.sort();
    // A thread bears another name, and has all CPUs, until it has seen to itself.
    wait_until(|| {
        let workers = threads(daemon.pid()).into_iter();
        let workers = workers.filter(|thread| thread.name().starts_with("worker-"));
        let mut pinned: Vec<_> = workers.map(|one| one.field("Cpus_allowed_list")).collect();
        pinned.sort();
        pinned == expected
    });
    daemon.stop();
}

/// What is a path where `ctl` is called means that file, not one of the same name where the daemon is.
#[test]
fn a_disk_of_the_same_name_elsewhere_is_left_alone() {
    let (dir, elsewhere) = (folder(), folder());
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let length = || dir.path().join("disk.img").metadata().unwrap().len();
    let whole = length();
    std::fs::write(elsewhere.path().join("disk.img"), vec![0; 1 << 20]).unwrap();
    let socket = dir.path().join("ctl").display().to_string();
    let from = |folder: &Path, args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", &socket]).args(args).current_dir(folder);
        run(command)
    };
    for args in [&["resize", "disk.img", "512K", "--shrink"][..], &["pause", "disk.img"]] {
        let output = from(elsewhere.path(), args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output.stdout));
        assert!(text(&output.stderr).contains("there is no disk"), "{}", text(&output.stderr));
    }
    assert_eq!(length(), whole);
    // By its name where there is no such file, by its number, by the way to it.
    let path = dir.path().join("disk.img").display().to_string();
    std::fs::remove_file(elsewhere.path().join("disk.img")).unwrap();
    std::fs::write(elsewhere.path().join("0"), "a file of this name").unwrap();
    for disk in ["disk.img", "0", &path] {
        assert_eq!(from(elsewhere.path(), &["drain", disk]).status.code(), Some(0), "{disk}");
    }
    assert_eq!(from(dir.path(), &["drain", "s"]).status.code(), Some(0), "its socket");
    daemon.stop();
}

#[test]
fn what_is_no_control_socket_is_told_apart() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    for (path, what) in
        [("disk.img", "disk.img is no socket"), ("s", "is this the socket of a disk?")]
    {
        let mut command = ringway();
        command.args(["ctl", "--control", path, "list"]).current_dir(dir.path());
        let message = text(&run(command).stderr);
        assert!(message.contains(what) && message.lines().count() == 1, "{message}");
    }
    let mut command = ringway();
    command.args(["ctl", "list"]).current_dir(dir.path()).env("RINGWAY_CONTROL", "");
    assert!(text(&run(command).stderr).contains("no daemon named"));
    // Programs get the kind of a refusal.
    let output = ctl(dir.path(), &["--json", "limit", "nope"]);
    assert_eq!(output.status.code(), Some(1));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["error"]["kind"], "no-such-disk");
    assert!(said["error"]["message"].as_str().unwrap().contains("'nope'"), "{said}");
    // A place that is taken is told with whose it is; a size that an image has not, too.
    let socket = dir.path().join("s").display().to_string();
    let image = dir.path().join("disk.img").display().to_string();
    refused(dir.path(), &["add", "null:1G", "--socket", &socket], "disk.img, which is served");
    done(dir.path(), &["remove", "disk.img"]);
    let output = ctl(dir.path(), &["add", &image, "--socket", "s", "--size", "1G"]);
    assert!(output.status.success());
    let warning = text(&output.stderr);
    assert!(warning.contains("--size 1 GiB") && warning.contains("has 1 MiB"), "{warning}");
    daemon.stop();
}

/// Answers and requests are text, and names need not be.
#[test]
fn names_that_are_no_text_spoil_no_answer_and_no_command() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let dir = folder();
    let dir = dir.path();
    let odd = |name: &'static [u8]| OsStr::from_bytes(name);
    std::fs::write(dir.join(odd(b"\xffdisk")), vec![0; 1 << 20]).unwrap();
    let mut command = ringway();
    command.args(["serve", "--control", "ctl", "--socket"]).args([odd(b"\xffs"), odd(b"\xffdisk")]);
    command.current_dir(dir);
    let daemon = Daemon::start(command);
    let disks = answer(dir, &["list"]);
    assert_eq!(disks["disks"].as_array().unwrap().len(), 1, "{disks}");
    assert!(disks["disks"][0]["socket"].as_str().unwrap().ends_with("\u{fffd}s"), "{disks}");
    for args in [
        &[odd(b"add"), odd(b"\xffdisk"), odd(b"--socket"), odd(b"t")][..],
        &[odd(b"add"), odd(b"disk"), odd(b"--socket"), odd(b"\xff")],
        &[odd(b"snapshot"), odd(b"0"), odd(b"\xff")],
        &[odd(b"commit"), odd(b"0"), odd(b"--snapshot"), odd(b"\xff")],
    ] {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("is not UTF-8"), "{args:?}: {said}");
    }
    daemon.stop();
}

/// Where two disks are called so, both are named, and none is taken.
#[test]
fn a_disk_is_known_by_the_name_of_its_image_or_socket_and_by_its_serial_number() {
    for isolate in [false, true] {
        let dir = folder();
        for (name, image) in [("one", "vm1.img"), ("two", "vm1.img"), ("three", "vm3.img")] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join(image), vec![0; 1 << 20]).unwrap();
        }
        let disk = |image: &str, socket: &str, serial: &str| {
            let folder = image.split('/').next().unwrap();
            let image = format!("[[disk]]\nimage = '{image}'\nformat = 'raw'\n");
            format!(
                "{image}socket = '{folder}/{socket}'\nserial = '{serial}'\nisolate = {isolate}\n"
            )
        };
        let one = disk("one/vm1.img", "a.sock", "ROOT");
        let (two, three) =
            (disk("two/vm1.img", "b.sock", "1"), disk("three/vm3.img", "c.sock", "2"));
        let file = ["control = 'ctl'\n", &one, &two, &three];
        std::fs::write(dir.path().join("c.toml"), file.concat()).unwrap();
        let daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
        for (word, id) in [
            ("a.sock", 0),
            ("b.sock", 1),
            ("vm3.img", 2),
            ("ROOT", 0),
            ("1", 1),
            ("one/vm1.img", 0),
            ("one/../two/vm1.img", 1),
        ] {
            assert_eq!(answer(dir.path(), &["drain", word])["id"], id, "{word}, {isolate}");
        }
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "pause", "vm1.img"]).current_dir(dir.path());
        let said = text(&run(command).stderr);
        for words in ["one/vm1.img at ", "a.sock (number 0)", "two/vm1.img at ", "(number 1)"] {
            assert!(said.contains(words), "{isolate}: {said}");
        }
        daemon.stop();
    }
}

#[test]
fn names_with_line_breaks_stay_in_their_line_and_sizes_that_cannot_be_are_told_in_words() {
    let dir = folder();
    let name = "two\nlines\u{1b}[31m.img";
    std::fs::rename(dir.path().join("disk.img"), dir.path().join(name)).unwrap();
    let daemon =
        Daemon::serve(dir.path(), &[name, "--format", "raw", "--socket", "s", "--control", "ctl"]);
    let said = |args: &[&str]| {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir.path());
        let output = run(command);
        text(&output.stdout) + &text(&output.stderr)
    };
    let list = said(&["list"]);
    assert!(list.contains("two\\nlines\\u{1b}[31m.img") && !list.contains('\u{1b}'), "{list}");
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["image"], name, "for programs as it is");
    for size in ["8E", "9223372036854775807"] {
        let said = said(&["resize", "0", size]);
        assert!(!said.contains("os error") && said.lines().count() == 1, "{size}: {said}");
    }
    assert!(said(&["resize", "0", "8E"]).contains("takes no file as long as that"));
    daemon.stop();
}
