//! Limits, from outside: options, files, `ctl limit`, and what becomes of a guest that asks for more.
//! A byte a second lets one request pass, and the next one long after a test has ended.

use crate::common::{Daemon, PATIENCE, finish, folder, ringway, run, text, wait};
use ringway_driver::{BlkQueue, Device, Options};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

fn ctl(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.args(["ctl", "--control", "ctl"]).args(args).current_dir(dir);
    run(command)
}

#[track_caller]
fn answer(dir: &Path, args: &[&str]) -> Value {
    let output = ctl(dir, &[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn refused(dir: &Path, args: &[&str], what: &str) {
    let output = ctl(dir, args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output.stdout));
    let message = text(&output.stderr);
    assert!(message.contains(what), "{what}: {message}");
    assert!(message.starts_with("error: ") && message.lines().count() == 1, "{message}");
}

/// A guest with one queue, whose first request has passed and whose second one waits.
fn throttled(dir: &Path, socket: &str) -> (Device, BlkQueue<()>) {
    let options = Options::new().patience(PATIENCE).reconnect(PATIENCE);
    let mut device = options.connect(dir.join(socket)).unwrap();
    let mut queue = device.queue().unwrap();
    ask(&device, &mut queue);
    assert!(finish(&mut queue).0);
    ask(&device, &mut queue);
    queue.submit().unwrap();
    waits(&mut queue);
    (device, queue)
}

fn ask(device: &Device, queue: &mut BlkQueue<()>) {
    queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
}

#[track_caller]
fn waits(queue: &mut BlkQueue<()>) {
    assert!(!queue.wait(Some(Duration::from_millis(300))).unwrap(), "its limit does not hold");
}

#[test]
fn a23_a_throttled_disk_is_drained_paused_and_released() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--bps", "1", "--queues", "1"];
    let daemon = Daemon::serve(dir.path(), &args);
    let (device, mut queue) = throttled(dir.path(), "s");
    let stats = answer(dir.path(), &["stats"]);
    assert_eq!(stats["disks"][0]["in_flight"], 0, "what waits is in the ring");
    // Its worker counts from when it has seen that the request has to wait.
    let begun = Instant::now();
    let counted = |stats: &Value| stats["disks"][0]["counts"]["throttled_us"].as_u64().unwrap();
    while counted(&answer(dir.path(), &["stats"])) <= 200_000 {
        assert!(begun.elapsed() < PATIENCE, "{stats}");
    }
    assert_eq!(answer(dir.path(), &["drain", "s"])["state"], "serving");
    assert_eq!(answer(dir.path(), &["pause", "s"])["state"], "paused");
    assert_eq!(answer(dir.path(), &["resume", "s"])["state"], "serving");
    assert_eq!(answer(dir.path(), &["resize", "s", "2M"])["to"], 2 << 20);
    // The queue has begun anew, but what it had taken still counts.
    waits(&mut queue);
    assert_eq!(answer(dir.path(), &["limit", "s", "--lift"])["limits"], json!({}));
    assert!(finish(&mut queue).0, "who waits is served at once");
    (0..50).for_each(|_| {
        ask(&device, &mut queue);
        assert!(finish(&mut queue).0);
    });
    answer(dir.path(), &["limit", "s", "--bps", "1"]);
    ask(&device, &mut queue);
    assert!(finish(&mut queue).0, "a limit begins with an empty bucket");
    ask(&device, &mut queue);
    queue.submit().unwrap();
    waits(&mut queue);
    drop((queue, device));
    daemon.stop();
}

/// As an event, in the list, in the counts and as metrics; also of a disk with a process of its own.
#[test]
fn a_disk_at_its_limit_is_seen() {
    for more in [&[][..], &["--isolate"]] {
        let dir = folder();
        let args = ["disk.img", "--socket", "s", "--control", "ctl", "--bps", "1", "--queues", "1"];
        let args = [&args[..], &["--metrics", "unix:m"], more].concat();
        let daemon = Daemon::serve(dir.path(), &args);
        assert_eq!(answer(dir.path(), &["list"])["disks"][0]["at_limit"], false);
        let mut events = UnixStream::connect(dir.path().join("ctl")).unwrap();
        events.set_read_timeout(Some(PATIENCE)).unwrap();
        events.write_all(b"{\"command\":\"events\"}\n").unwrap();
        let mut lines = BufReader::new(events).lines().map(|line| line.unwrap());
        assert!(lines.next().unwrap().contains("\"ok\":true"));
        let (_device, _queue) = throttled(dir.path(), "s");
        let event = lines.find(|line| line.contains("\"event\":\"limit-reached\"")).unwrap();
        assert!(event.contains("\"image\":\"disk.img\""), "{event}");
        assert_eq!(answer(dir.path(), &["list"])["disks"][0]["at_limit"], true);
        let list = text(&ctl(dir.path(), &["list"]).stdout);
        assert!(list.contains("serving, at its limit"), "{list}");
        let counts = &answer(dir.path(), &["stats"])["disks"][0]["counts"];
        assert_eq!(counts["throttled"], 1, "it has waited since: {counts}");
        let top = ringway_top(dir.path());
        assert!(top["disks"][0]["rates"]["throttled"].as_f64().unwrap() > 0.5, "{top}");
        let mut scraped = String::new();
        let mut metrics = UnixStream::connect(dir.path().join("m")).unwrap();
        metrics.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        metrics.read_to_string(&mut scraped).unwrap();
        let value = |name: &str| -> f64 {
            let line = scraped.lines().find(|line| line.starts_with(name)).unwrap();
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        assert_eq!(value("ringway_disk_throttled_total{"), 1.0);
        assert!(value("ringway_disk_throttled_seconds_total{") > 0.3);
        let begun = Instant::now();
        while !daemon.log().contains("its guest has reached a limit") {
            assert!(begun.elapsed() < PATIENCE, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.stop();
    }
}

/// One queue has always more to write than may pass; nothing has the flushes of another one wait for ever.
#[test]
fn a23_flushes_pass_while_another_queue_is_full_of_writes_that_wait() {
    const DEPTH: u16 = 32;
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--iops", "50", "--queues", "2"];
    for workers in ["1", "2"] {
        let daemon = Daemon::serve(dir.path(), &[&args[..], &["--workers", workers]].concat());
        let options = Options::new().queues(2).patience(PATIENCE).reconnect(PATIENCE);
        let mut device = options.connect(dir.path().join("s")).unwrap();
        let mut queues = device.queues().unwrap().into_iter();
        let (mut full, mut flushed) = (queues.next().unwrap(), queues.next().unwrap());
        let (mut written, mut flushes) = (0, 0);
        flushed.flush(()).unwrap();
        flushed.submit().unwrap();
        let begun = Instant::now();
        while flushes < 20 {
            assert!(begun.elapsed() < PATIENCE, "{flushes} flushes, {written} writes");
            while full.in_flight() < DEPTH {
                full.write(0, device.pool().alloc(512).unwrap(), ()).unwrap();
            }
            full.wait(Some(Duration::from_millis(10))).unwrap();
            while let Some(done) = full.pop().unwrap() {
                assert!(done.is_ok());
                written += 1;
            }
            while let Some(done) = flushed.pop().unwrap() {
                assert!(done.is_ok());
                flushes += 1;
                flushed.flush(()).unwrap();
                flushed.submit().unwrap();
            }
        }
        println!(
            "{workers} workers: {flushes} flushes beside {written} writes in {:?}",
            begun.elapsed()
        );
        drop((full, flushed, queues, device));
        daemon.stop();
    }
}

#[test]
fn a23_a_daemon_with_a_throttled_guest_stops_in_order() {
    let dir = folder();
    let args = ["null:1G", "--socket", "s", "--bps", "1", "--queues", "1"];
    let mut daemon = Daemon::serve(dir.path(), &args);
    let (_device, _queue) = throttled(dir.path(), "s");
    let begun = Instant::now();
    daemon.signal(libc::SIGTERM);
    let (status, _) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for its limit");
}

#[test]
fn limits_are_changed_word_by_word_and_shown() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--iops", "500", "--iops-max"];
    let args = [&args[..], &["1000", "--iops-max-length", "5", "--bps-write", "10M"]].concat();
    let daemon = Daemon::serve(dir.path(), &args);
    let limits = || answer(dir.path(), &["list"])["disks"][0]["limits"].clone();
    let begun = json!({"iops": 500, "iops-max": 1000, "iops-max-length": 5, "bps-write": 10 << 20});
    assert_eq!(limits(), begun);
    let list = text(&ctl(dir.path(), &["list"]).stdout);
    assert!(list.contains("iops 500 (max 1000 for 5 s), bps-write 10 MiB"), "{list}");
    assert_eq!(answer(dir.path(), &["limit", "s"])["limits"], begun, "nothing was to change");
    let changed = answer(dir.path(), &["limit", "s", "--iops", "800", "--bps-write", "none"]);
    assert_eq!(changed["limits"], json!({"iops": 800, "iops-max": 1000, "iops-max-length": 5}));
    assert_eq!(limits(), changed["limits"]);
    for (words, what) in [
        (&["--iops", "2000"][..], "iops-max = 1000 is below iops = 2000"),
        (&["--iops", "none"], "iops-max needs iops"),
        (&["--bps", "0"], "bps = 0: nothing would ever pass"),
        (&["--bps-read", "99999999999999999"], "the highest is 1000000000000000"),
        (&["--iops-max-length", "99999999999999"], "give a lower or a shorter burst"),
        (&["--group", "gold"], "there is no limit group 'gold': add it"),
    ] {
        refused(dir.path(), &[&["limit", "s"], words].concat(), what);
        assert_eq!(limits(), changed["limits"], "{words:?}: nothing is changed");
    }
    let lifted = answer(dir.path(), &["limit", "s", "--lift", "--bps", "1G"]);
    assert_eq!(lifted["limits"], json!({"bps": 1 << 30}));
    let top = ringway_top(dir.path());
    assert_eq!(top["disks"][0]["limits"], json!({"bps": 1 << 30}));
    assert_eq!(top["disks"][0]["rates"]["throttled"], 0.0);
    let said = text(&ctl(dir.path(), &["limit", "s", "--lift"]).stdout);
    assert!(said.ends_with("disk.img: no limits\n"), "{said}");
    daemon.stop();
}

fn ringway_top(dir: &Path) -> Value {
    let mut command = ringway();
    let args = ["top", "--control", "ctl", "--json", "--interval", "200ms"];
    command.args(args).current_dir(dir);
    let output = run(command);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
}

#[test]
fn a24_groups_are_named_in_a_file_joined_left_and_changed() {
    let dir = folder();
    std::fs::write(
        dir.path().join("c.toml"),
        "control = 'ctl'\n\
         [[limit-group]]\nname = 'gold'\nlimits = { iops = 5000, iops-max = 9000 }\n\
         [[disk]]\nimage = 'null:1G'\nsocket = 'a'\nqueues = 1\nlimit-group = 'gold'\n\
         limits = { bps = '100M' }\n\
         [[disk]]\nimage = 'null:2G'\nsocket = 'b'\nqueues = 1\n",
    )
    .unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    let list = answer(dir.path(), &["list"]);
    assert_eq!(list["disks"][0]["limit_group"], "gold");
    let gold = json!({"name": "gold", "limits": {"iops": 5000, "iops-max": 9000}, "disks": [0]});
    assert_eq!(list["limit_groups"], json!([gold]));
    let shown = text(&ctl(dir.path(), &["list"]).stdout);
    assert!(shown.contains("bps 100 MiB, group gold") && shown.contains("limit group"), "{shown}");
    refused(dir.path(), &["limit", "b", "--group", "glod"], "'glod' (did you mean 'gold'?)");
    refused(dir.path(), &["limit", "--group", "gold", "--create"], "'gold' already");
    refused(dir.path(), &["limit", "--group", "silver"], "there is no limit group 'silver'");
    refused(dir.path(), &["limit", "--group", "gold", "--iops", "0"], "nothing would ever pass");
    // A group that lets nothing pass any more holds its disks, one by one as they join.
    answer(dir.path(), &["limit", "--group", "tight", "--create", "--bps", "1"]);
    assert_eq!(answer(dir.path(), &["limit", "b", "--group", "tight"])["group"], "tight");
    let (_device, mut queue) = throttled(dir.path(), "b");
    let changed = answer(dir.path(), &["limit", "--group", "tight", "--bps", "1G"]);
    assert_eq!(changed["limits"], json!({"bps": 1 << 30}));
    assert!(finish(&mut queue).0, "who waits is served at once");
    assert_eq!(answer(dir.path(), &["limit", "b", "--group", "none"])["group"], Value::Null);
    let words = ["add", "null:3G", "--socket", "d", "--queues", "1", "--limit-group"];
    refused(dir.path(), &[&words[..], &["tigth"]].concat(), "'tigth' (did you mean 'tight'?)");
    let added = answer(dir.path(), &[&words[..], &["tight"]].concat());
    assert_eq!(added["limit_group"], "tight");
    let list = answer(dir.path(), &["list"]);
    let disks = |at: usize| list["limit_groups"][at]["disks"].clone();
    assert_eq!((disks(0), disks(1)), (json!([0]), json!([added["id"]])));
    // Only what nobody shares any more can be removed.
    let remove = ["limit", "--group", "tight", "--remove"];
    refused(dir.path(), &remove, "'tight' is shared by null:3G");
    answer(dir.path(), &["remove", "null:3G"]);
    assert_eq!(answer(dir.path(), &remove)["removed"], true);
    refused(dir.path(), &remove, "there is no limit group 'tight'");
    assert_eq!(answer(dir.path(), &["list"])["limit_groups"].as_array().unwrap().len(), 1);
    let both = ctl(dir.path(), &["limit", "b", "--group", "gold", "--remove"]);
    assert_eq!(both.status.code(), Some(2), "{}", text(&both.stderr));
    daemon.stop();
}

#[test]
fn mistakes_in_limits_are_told_and_nothing_is_begun() {
    let dir = folder();
    let serve = |args: &[&str], code: i32, what: &str| {
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir.path());
        let output = run(command);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(message.contains(what), "{what}: {message}");
        assert!(!dir.path().join("s").exists());
    };
    let disk = ["disk.img", "--socket", "s"];
    serve(&[&disk[..], &["--iops", "0"]].concat(), 2, "iops = 0: nothing would ever pass");
    serve(&[&disk[..], &["--bps-max", "5"]].concat(), 2, "bps-max needs bps");
    serve(&[&disk[..], &["--iosp", "5"]].concat(), 2, "--iops");
    serve(&[&disk[..], &["--limit-group", "gold"]].concat(), 1, "no limit group 'gold'");
    let file = |text: &str, what: &str| {
        std::fs::write(dir.path().join("c.toml"), text).unwrap();
        serve(&["--config", "c.toml"], 1, what);
    };
    let disk = "[[disk]]\nimage = 'disk.img'\nsocket = 's'\n";
    file(
        &format!("{disk}limits = {{ iosp = 5 }}\n"),
        "line 4: unknown field `iosp` (did you mean 'iops'?)",
    );
    file(
        &format!("{disk}limits = {{ iops = 5, iops-max = 4 }}\n"),
        "line 4: iops-max = 4 is below",
    );
    file(
        &format!("{disk}limit-group = 'gold'\n"),
        "c.toml, line 1: there is no limit group 'gold'",
    );
    let group = "[[limit-group]]\nname = 'gold'\nlimits = { iops = 5 }\n";
    file(&format!("{group}{group}{disk}"), "line 4: there are two limit groups 'gold'");
    file(
        &format!("{group}{disk}limit-group = 'glod'\n"),
        "line 4: there is no limit group 'glod' (did",
    );
}

#[test]
fn a23_isolated_disks_have_limits_of_their_own() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--control", "ctl", "--queues", "1", "--isolate"];
    let daemon = Daemon::serve(dir.path(), &args);
    assert_eq!(answer(dir.path(), &["limit", "s", "--bps", "1"])["limits"], json!({"bps": 1}));
    let (_device, mut queue) = throttled(dir.path(), "s");
    refused(dir.path(), &["limit", "s", "--group", "gold"], "shares no limits with others");
    // They are not forgotten with the process.
    let process = || answer(dir.path(), &["list"])["disks"][0]["process"].as_i64();
    let before = process().unwrap();
    // SAFETY: a process of the daemon's, which was there a moment ago.
    assert_eq!(unsafe { libc::kill(before.try_into().unwrap(), libc::SIGKILL) }, 0);
    let begun = Instant::now();
    while process().is_none_or(|now| now == before) {
        assert!(begun.elapsed() < PATIENCE, "it is not started again");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(answer(dir.path(), &["list"])["disks"][0]["limits"], json!({"bps": 1}));
    answer(dir.path(), &["limit", "s", "--lift"]);
    assert!(finish(&mut queue).0);
    daemon.stop();
    let mut command = ringway();
    let args = ["serve", "null:1G", "--socket", "t", "--isolate", "--limit-group", "gold"];
    let mut child = command.args(args).current_dir(dir.path()).spawn().unwrap();
    assert_eq!(wait(&mut child, PATIENCE).and_then(|status| status.code()), Some(1));
}
