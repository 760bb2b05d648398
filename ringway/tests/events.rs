//! `ringway ctl events` and the schema of the control socket, from outside.

use crate::common::{Daemon, PATIENCE, finish, folder, ringway, run, text, write};
use ringway_driver::{Device, Options};
use ringway_testkit::Mounted;
use ringway_testkit::raw::{F_VERSION_1, RawGuest};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// `ringway ctl events`, read on a thread of its own.
struct Events {
    child: Child,
    lines: Receiver<Value>,
    /// Those that came, to be compared with the schema.
    seen: Vec<Value>,
}

impl Events {
    fn of(dir: &Path) -> Self {
        let mut command = ringway();
        command.args(["ctl", "--control", "ctl", "events"]).current_dir(dir);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| {
                let _ = tell.send(serde_json::from_str(&line).unwrap());
            });
        });
        let mut events = Self { child, lines, seen: Vec::new() };
        // It hears what comes from now on once it hears anything: something happens until it does.
        let begun = Instant::now();
        loop {
            for change in ["pause", "resume"] {
                ctl(dir, &[change, "disk.img"]);
            }
            if let Ok(event) = events.lines.recv_timeout(Duration::from_millis(50)) {
                events.seen.push(event);
                break;
            }
            assert!(begun.elapsed() < PATIENCE);
        }
        ctl(dir, &["resize", "disk.img", "2M"]);
        events.wait_for("resized");
        events
    }

    /// The next event of this name; others may come before.
    #[track_caller]
    fn wait_for(&mut self, name: &str) -> Value {
        let begun = Instant::now();
        while let Ok(event) = self.lines.recv_timeout(PATIENCE.saturating_sub(begun.elapsed())) {
            self.seen.push(event.clone());
            if event["event"] == name {
                return event;
            }
        }
        panic!("no {name} in {:#?}", self.seen);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The published schema of one definition, with all others at hand.
fn validator(name: &str) -> jsonschema::Validator {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/control.schema.json");
    let mut schema: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    schema.as_object_mut().unwrap().remove("anyOf");
    schema["$ref"] = format!("#/$defs/{name}").into();
    jsonschema::validator_for(&schema).unwrap()
}

#[track_caller]
fn fits(name: &str, value: &Value) {
    let validator = validator(name);
    let errors: Vec<_> = validator.iter_errors(value).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{name}: {errors:?} in {value:#}");
}

/// An event has these fields beside those of all events, and fits the schema with each of them only.
#[track_caller]
fn has_fields(event: &Value, fields: &[&str]) {
    fits("Event", event);
    let common = ["version", "number", "time_us", "event"];
    let own = event.as_object().unwrap().keys().map(String::as_str);
    let mut own: Vec<_> = own.filter(|field| !common.contains(field)).collect();
    own.sort_unstable();
    assert_eq!(own, fields);
    // A disk is told where there is one.
    let needed = fields.iter().filter(|field| !["id", "image"].contains(field));
    for field in common.iter().chain(needed) {
        let mut less = event.clone();
        less.as_object_mut().unwrap().remove(*field);
        assert!(!validator("Event").is_valid(&less), "without {field}: {less}");
    }
}

fn ctl(dir: &Path, args: &[&str]) -> Value {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl", "--json"]).args(args).current_dir(dir);
    let output = run(command);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn connect(dir: &Path, socket: &str) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join(socket)).unwrap()
}

#[test]
fn what_happens_is_told_in_its_order() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl"];
    let daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    let device = connect(dir.path(), "s");
    let event = events.wait_for("connected");
    assert_eq!((&event["id"], &event["image"]), (&json!(0), &json!("disk.img")));
    drop(device);
    assert_eq!(events.wait_for("disconnected")["why"], Value::Null);
    // One that talks nonsense.
    let mut stream = UnixStream::connect(dir.path().join("s")).unwrap();
    stream.write_all(&[0xff; 64]).unwrap();
    assert!(events.wait_for("disconnected")["why"].is_string());
    drop(stream);
    ctl(dir.path(), &["pause", "disk.img"]);
    ctl(dir.path(), &["pause", "disk.img"]);
    ctl(dir.path(), &["resume", "disk.img"]);
    ctl(dir.path(), &["add", "null:1G", "--socket", "t"]);
    ctl(dir.path(), &["limit", "--group", "gold", "--create", "--iops", "500"]);
    ctl(dir.path(), &["limit", "disk.img", "--bps", "1M"]);
    // That only asks.
    ctl(dir.path(), &["limit", "disk.img"]);
    let event = events.wait_for("limits-changed");
    assert_eq!((&event["id"], &event["limit_group"]), (&Value::Null, &json!("gold")));
    assert_eq!(event["limits"], json!({"iops": 500}));
    let event = events.wait_for("limits-changed");
    assert_eq!((&event["id"], &event["limits"]), (&json!(0), &json!({"bps": 1 << 20})));
    ctl(dir.path(), &["resize", "disk.img", "3M"]);
    ctl(dir.path(), &["remove", "t"]);
    events.wait_for("removed");
    let last: Vec<_> = events.seen.iter().rev().take(7).rev().collect();
    let names: Vec<_> = last.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["paused", "resumed", "added", "limits-changed", "limits-changed", "resized", "removed"]
    );
    assert_eq!((&last[5]["from"], &last[5]["to"]), (&json!(2 << 20), &json!(3 << 20)));
    assert_eq!((&last[6]["id"], &last[6]["drained"]), (&json!(1), &json!(true)));
    let numbers: Vec<_> =
        events.seen.iter().map(|event| event["number"].as_u64().unwrap()).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{numbers:?}");
    daemon.stop();
    let status = crate::common::wait(&mut events.child, PATIENCE).unwrap();
    assert_eq!(status.code(), Some(1), "the daemon has ended");
}

#[test]
fn a_slow_disk_is_told_from_another_one_of_its_name() {
    let dir = folder();
    let args = ["--control", "ctl", "--overdue", "1", "disk.img", "--socket", "s"];
    let _daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    for socket in ["fast", "slow"] {
        let image = "null:1G,latency=2500ms";
        ctl(dir.path(), &["add", image, "--socket", socket, "--queues", "1"]);
    }
    let mut device = connect(dir.path(), "slow");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 0, 1));
    assert_eq!(events.wait_for("overdue")["id"], 2);
    assert_eq!(events.wait_for("in-time")["id"], 2);
}

#[test]
fn failures_and_a_slow_disk_are_told() {
    let dir = folder();
    let args = ["--control", "ctl", "--overdue", "1", "disk.img", "--socket", "s"];
    let _daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    ctl(dir.path(), &["add", "null:1G,latency=2500ms", "--socket", "slow", "--queues", "1"]);
    let mut device = connect(dir.path(), "slow");
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 0, 1));
    let event = events.wait_for("overdue");
    assert_eq!((&event["id"], &event["requests"]), (&json!(1), &json!(1)));
    assert_eq!(events.wait_for("in-time")["id"], 1);
    // Somebody cuts the image off under the daemon.
    let mut device = connect(dir.path(), "s");
    let mut queue = device.queue().unwrap();
    std::fs::File::options()
        .write(true)
        .open(dir.path().join("disk.img"))
        .unwrap()
        .set_len(0)
        .unwrap();
    queue.read(4096, device.pool().alloc(512).unwrap(), ()).unwrap();
    assert!(!finish(&mut queue).0);
    let event = events.wait_for("failed");
    let reported = ["operation", "count", "errno", "sector"].map(|field| event[field].clone());
    assert_eq!(reported, [json!("read"), json!(1), Value::Null, json!(8)]);
}

#[test]
fn what_a_killed_daemon_had_in_flight_is_told_by_the_next() {
    let dir = folder();
    // Requests to its second disk take longer than its life.
    let args = ["--control", "ctl", "disk.img", "--socket", "s"];
    let slow = ["add", "null:1G,latency=60000ms", "--socket", "slow", "--queues", "1"];
    let daemon = Daemon::serve(dir.path(), &args);
    ctl(dir.path(), &slow);
    let front = Options::new().patience(PATIENCE).reconnect(PATIENCE);
    let mut device = front.connect(dir.path().join("slow")).unwrap();
    let mut queue = device.queue().unwrap();
    for sector in 0..3 {
        queue.read(sector * 512, device.pool().alloc(512).unwrap(), ()).unwrap();
    }
    queue.submit().unwrap();
    let begun = Instant::now();
    while in_flight(dir.path()) < 3 {
        assert!(begun.elapsed() < PATIENCE, "they are never in flight");
    }
    drop(daemon);
    let _daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    ctl(dir.path(), &slow);
    let event = events.wait_for("recovered");
    assert_eq!(
        (&event["id"], &event["queue"], &event["requests"]),
        (&json!(1), &json!(0), &json!(3))
    );
}

/// Requests that the disks of the daemon have in hand.
fn in_flight(dir: &Path) -> u64 {
    let stats = ctl(dir, &["stats"]);
    let disks = stats["disks"].as_array().unwrap().iter();
    disks.map(|disk| disk["in_flight"].as_u64().unwrap_or(0)).sum()
}

#[test]
fn the_end_of_an_isolated_disks_process_is_told() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--isolate"];
    let _daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    let device = connect(dir.path(), "s");
    assert_eq!(events.wait_for("connected")["id"], 0);
    let process = ctl(dir.path(), &["list"])["disks"][0]["process"].as_i64().unwrap();
    let process = i32::try_from(process).unwrap();
    // SAFETY: the process of this test's own daemon.
    unsafe { libc::kill(process, libc::SIGKILL) };
    assert_eq!(events.wait_for("process-ended")["process"], process);
    assert_ne!(events.wait_for("restarted")["process"], process);
    drop(device);
}

#[test]
fn a_broken_queue_is_told() {
    let dir = folder();
    let _daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut events = Events::of(dir.path());
    let socket = UnixStream::connect(dir.path().join("s")).unwrap();
    let mut guest = RawGuest::start(socket, 2, 64, F_VERSION_1);
    events.wait_for("connected");
    // More requests than there are descriptors.
    guest.set_avail_index(1, 65);
    guest.kick(1);
    let event = events.wait_for("broken");
    has_fields(&event, &["id", "image", "queue", "why"]);
    let reported = ["id", "image", "queue"].map(|field| event[field].clone());
    assert_eq!(reported, [json!(0), json!("disk.img"), json!(1)]);
    let why = event["why"].as_str().unwrap();
    assert!(!why.is_empty() && !why.contains('\n'), "{why}");
}

/// Each request costs this disk a seek, so merging wins sooner or later, whatever else the host does: the
/// guest reads on until that is told.
#[test]
fn a_changed_path_is_told() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--workers", "1"];
    let _daemon = Daemon::serve(dir.path(), &args);
    let mut events = Events::of(dir.path());
    ctl(dir.path(), &["add", "sim:hdd:1G", "--socket", "slow", "--queues", "1"]);
    let mut device = connect(dir.path(), "slow");
    let mut queue = device.queue().unwrap();
    let changed = |events: &mut Events| {
        events.seen.extend(events.lines.try_iter());
        events.seen.iter().find(|event| event["event"] == "path-changed").cloned()
    };
    let (begun, mut next) = (Instant::now(), 0);
    let mut buffers: Vec<_> = (0..32).map(|_| device.pool().alloc(4096).unwrap()).collect();
    let event = loop {
        if let Some(event) = changed(&mut events) {
            break event;
        }
        assert!(begun.elapsed() < PATIENCE, "it never changes");
        while let Some(buffer) = buffers.pop() {
            queue.read(next % (1 << 30), buffer, ()).unwrap();
            next += 4096;
        }
        queue.submit().unwrap();
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
        while let Some(done) = queue.pop().unwrap() {
            assert!(done.is_ok());
            buffers.push(done.into_buffer().unwrap());
        }
    };
    has_fields(&event, &["id", "image", "path"]);
    assert_eq!((&event["id"], &event["path"]), (&json!(1), &json!("request")));
    assert!(event["image"].as_str().unwrap().starts_with("sim:hdd:"), "{event}");
}

#[test]
fn what_became_of_a_new_configuration_and_the_end_of_a_group_are_told() {
    let dir = folder();
    let dir = dir.path();
    let one = "control = 'ctl'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n";
    let say = |config: &str| std::fs::write(dir.join("c.toml"), config).unwrap();
    say(one);
    let daemon = Daemon::serve(dir, &["--config", "c.toml"]);
    let mut events = Events::of(dir);
    say(&format!("{one}limits = {{ iops = 100 }}\n[[disk]]\nimage = 'null:1G'\nsocket = 't'\n"));
    let done = ctl(dir, &["reload"]);
    let mut event = events.wait_for("reloaded");
    let fields = [
        "added",
        "deleted",
        "dry_run",
        "failed",
        "left",
        "limited",
        "policies",
        "removed",
        "unchanged",
    ];
    has_fields(&event, &fields);
    let of_all = |(field, _): &(String, Value)| fields.contains(&field.as_str());
    let said: serde_json::Map<_, _> =
        std::mem::take(event.as_object_mut().unwrap()).into_iter().filter(of_all).collect();
    assert_eq!(Value::Object(said), done, "as the command was answered");
    assert_eq!((&done["added"], &done["limited"]), (&json!(["null:1G"]), &json!(["disk.img"])));
    // By a signal, which has no answer.
    say(&format!("{one}iopps = 3\n"));
    daemon.signal(libc::SIGHUP);
    let event = events.wait_for("reload-failed");
    has_fields(&event, &["why"]);
    let why = event["why"].as_str().unwrap();
    assert!(why.contains("c.toml") && why.contains("iopps"), "{why}");

    ctl(dir, &["limit", "--group", "gold", "--create", "--iops", "500"]);
    ctl(dir, &["limit", "--group", "gold", "--remove"]);
    let event = events.wait_for("limit-group-removed");
    has_fields(&event, &["limit_group"]);
    assert_eq!(event["limit_group"], "gold");
}

/// An image with this many MiB of data, which a clone of it has to copy.
fn base(dir: &Path, mib: usize) {
    std::fs::write(dir.join("base.raw"), vec![0x5a; mib << 20]).unwrap();
    let mut command = ringway();
    command.args(["create", "clone.qcow2", "--backing", "../base.raw", "--backing-format", "raw"]);
    let made = run_in(&mut command, &dir.join("small"));
    assert!(made.status.success(), "{}", text(&made.stderr));
}

fn run_in(command: &mut std::process::Command, dir: &Path) -> std::process::Output {
    command.current_dir(dir).output().unwrap()
}

const CLONE: [&str; 8] =
    ["add", "small/clone.qcow2", "--format", "qcow2", "--backing-root", ".", "--socket", "q"];

#[test]
fn what_is_done_with_an_image_is_told() {
    let dir = folder();
    let dir = dir.path();
    std::fs::create_dir(dir.join("small")).unwrap();
    base(dir, 32);
    let _daemon = Daemon::serve(dir, &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut events = Events::of(dir);
    ctl(dir, &CLONE);
    // It would take half a minute.
    ctl(dir, &["flatten", "q", "--bps", "1K"]);
    let event = events.wait_for("job-started");
    has_fields(&event, &["id", "image", "job", "total_bytes"]);
    assert_eq!((&event["id"], &event["job"]), (&json!(1), &json!("flatten")));
    assert_eq!(event["total_bytes"], 32 << 20);
    ctl(dir, &["flatten", "q", "--cancel"]);
    let event = events.wait_for("job-cancelled");
    has_fields(&event, &["copied_bytes", "id", "image", "job"]);
    let first = event["copied_bytes"].as_u64().unwrap();
    assert!(first < 32 << 20, "{first}");
    ctl(dir, &["flatten", "q", "--wait"]);
    let event = events.wait_for("job-done");
    has_fields(&event, &["blackout_us", "copied_bytes", "id", "image", "job"]);
    assert_eq!(event["copied_bytes"].as_u64(), Some((32 << 20) - first));
    let answer = ctl(dir, &["snapshot", "q", "small/new.qcow2"]);
    let event = events.wait_for("snapshot-taken");
    has_fields(&event, &["blackout_us", "id", "image", "snapshot"]);
    assert_eq!(event["snapshot"], answer["snapshot"]);
}

/// Where there is no room, requests are held, and an image cannot take in what it is based on.
#[test]
fn what_a_full_file_system_does_is_told() {
    let dir = folder();
    let dir = dir.path();
    let small = match Mounted::in_memory(dir.join("small"), 1 << 20) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    base(dir, 8);
    let _daemon = Daemon::serve(dir, &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut events = Events::of(dir);
    ctl(dir, &CLONE);
    ctl(dir, &["flatten", "q"]);
    let event = events.wait_for("job-failed");
    has_fields(&event, &["copied_bytes", "error", "id", "image", "job"]);
    assert!(event["error"].as_str().unwrap().contains("No space left"), "{event}");
    let sparse = std::fs::File::create_new(small.path().join("sparse.img")).unwrap();
    sparse.set_len(4 << 20).unwrap();
    let sparse = ["add", "small/sparse.img", "--socket", "p", "--queues", "1", "--cache"];
    ctl(dir, &[&sparse[..], &["writeback"]].concat());
    let mut device = connect(dir, "p");
    let mut queue = device.queue::<()>().unwrap();
    let mut big = device.pool().alloc(2 << 20).unwrap();
    big.fill(1);
    queue.write(0, big, ()).unwrap();
    queue.submit().unwrap();
    let event = events.wait_for("held");
    fits("Event", &event);
    assert_eq!((&event["id"], &event["held"]["errno"]), (&json!(2), &json!(libc::ENOSPC)));
    small.set_room(64 << 20);
    assert!(finish(&mut queue).0, "it is tried again");
    has_fields(&events.wait_for("released"), &["id", "image"]);
}

/// Where each kind of event is read through the control socket; of one that is not, why.
const READ_IN: [(&str, &str); 33] = [
    ("added", "events.rs"),
    ("removed", "events.rs"),
    ("connected", "events.rs"),
    ("disconnected", "events.rs"),
    ("broken", "events.rs"),
    ("recovered", "events.rs"),
    ("resized", "events.rs"),
    ("snapshot-taken", "events.rs"),
    ("job-started", "events.rs"),
    ("job-done", "events.rs"),
    ("job-cancelled", "events.rs"),
    ("job-failed", "events.rs"),
    ("paused", "events.rs"),
    ("resumed", "events.rs"),
    ("path-changed", "events.rs"),
    ("failed", "events.rs"),
    ("server-away", "remote.rs"),
    ("server-back", "remote.rs"),
    ("held", "events.rs"),
    ("released", "events.rs"),
    ("limits-changed", "events.rs"),
    ("limit-group-removed", "events.rs"),
    ("limit-reached", "limits.rs"),
    ("overdue", "events.rs"),
    ("in-time", "events.rs"),
    ("process-ended", "events.rs"),
    ("restarted", "events.rs"),
    ("reloaded", "events.rs"),
    ("reload-failed", "events.rs"),
    ("worker-failed", "panics.rs"),
    ("spawner-ended", "isolate.rs"),
    ("helper-ended", "sandbox.rs"),
    // A reader that is a thousand events behind: the socket takes most of them from the daemon.
    ("lost", "../../server/src/events.rs"),
];

/// A new kind of event needs a test and a line of the manual.
#[test]
fn each_kind_of_event_is_read_by_a_test_and_has_its_line_in_the_manual() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).unwrap();
    let schema: Value =
        serde_json::from_str(&read("../docs/control.schema.json".as_ref())).unwrap();
    let kinds = schema["$defs"]["Event"]["oneOf"].as_array().unwrap().iter();
    let kinds = kinds.map(|kind| kind["properties"]["event"]["const"].as_str().unwrap());
    assert_eq!(kinds.collect::<Vec<_>>(), READ_IN.map(|(kind, _)| kind));
    let manual = read("../docs/control.md".as_ref());
    let rows: String = manual.lines().filter(|line| line.starts_with("| `")).collect();
    for (kind, file) in READ_IN {
        assert!(rows.contains(&format!("`{kind}`")), "{kind}: no line in control.md");
        let test = read(&Path::new("tests").join(file));
        let test = test.split("const READ_IN").next().unwrap();
        let name: String =
            kind.split('-').map(|word| word[..1].to_uppercase() + &word[1..]).collect();
        let read = [format!("{kind}\\\""), format!("\"{kind}\""), format!("Happened::{name} {{")];
        assert!(read.iter().any(|word| test.contains(word)), "{kind}: not in {file}");
    }
}

#[test]
fn readers_of_events_keep_nobody_waiting() {
    let dir = folder();
    let _daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let subscribe = || {
        let mut stream = UnixStream::connect(dir.path().join("ctl")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"{\"command\":\"events\",\"id\":7}\n").unwrap();
        let mut lines = BufReader::new(stream);
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        (serde_json::from_str::<Value>(&line).unwrap(), lines)
    };
    let readers: Vec<_> = (0..8).map(|_| subscribe()).collect();
    for (answer, _) in &readers {
        assert_eq!(answer, &json!({"version": 1, "id": 7, "ok": true, "answer": {}}));
    }
    let (refused, _) = subscribe();
    assert_eq!(refused["error"]["kind"], "busy");
    // Nobody reads; everything goes on, and others are served.
    for _ in 0..40 {
        ctl(dir.path(), &["pause", "disk.img"]);
        ctl(dir.path(), &["resume", "disk.img"]);
    }
    drop(readers);
    let begun = Instant::now();
    while subscribe().0["ok"] != true {
        assert!(begun.elapsed() < PATIENCE, "their places are free again");
    }
}

#[test]
fn what_is_said_fits_the_published_schema() {
    let dir = folder();
    let _daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--control", "ctl"]);
    let mut events = Events::of(dir.path());
    let _device = connect(dir.path(), "s");
    let mut client = BufReader::new(UnixStream::connect(dir.path().join("ctl")).unwrap());
    let added = json!({"image": "null:1G", "socket": dir.path().join("t"), "queues": 2});
    for request in [
        json!({"command": "list"}),
        json!({"command": "stats", "buckets": true, "version": 1, "id": [1]}),
        json!({"command": "stats", "histograms": true, "disk": 0}),
        json!({"command": "add", "disk": added}),
        json!({"command": "resize", "disk": "disk.img", "size": "4M"}),
        json!({"command": "drain", "disk": 0}),
        json!({"command": "pause", "disk": 0}),
        json!({"command": "resume", "disk": 0}),
        json!({"command": "remove", "disk": 1}),
        json!({"command": "events"}),
    ] {
        fits("Request", &request);
        client.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        let mut line = String::new();
        client.read_line(&mut line).unwrap();
        let reply: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(reply["ok"], true, "{request}: {reply}");
        fits("Reply", &reply);
        fits(&format!("answer.{}", request["command"].as_str().unwrap()), &reply["answer"]);
    }
    events.wait_for("removed");
    events.seen.iter().for_each(|event| fits("Event", event));
    for wrong in [
        json!({"command": "fly"}),
        json!({"command": "resize"}),
        json!({"command": "list", "disk": 0}),
        json!({"command": "add", "disk": {"image": "a", "quues": 1}}),
    ] {
        assert!(!validator("Request").is_valid(&wrong), "{wrong}");
    }
    assert!(!validator("Event").is_valid(&json!({"version": 1, "number": 1, "time_us": 1})));
}
