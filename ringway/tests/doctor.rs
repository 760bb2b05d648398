//! `ringway doctor`, and the counts that SIGUSR1 asks for, from outside.

use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, snapshot, text, write};
use ringway_driver::Options;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs the doctor in `dir`: exit status and standard output. Nothing may change.
fn doctor(dir: &Path, args: &[&str]) -> (i32, String) {
    let before = snapshot(dir);
    let mut command = ringway();
    command.arg("doctor").args(args).current_dir(dir);
    let output = run(command);
    assert_eq!(text(&output.stderr), "", "{args:?}");
    assert_eq!(snapshot(dir), before, "something was created or changed: {args:?}");
    (output.status.code().unwrap(), text(&output.stdout))
}

fn json(dir: &Path, args: &[&str]) -> (i32, Value) {
    let (status, text) = doctor(dir, &[&["--json"], args].concat());
    (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}:\n{text}")))
}

/// What `serve` says to an image it refuses.
fn refusal(dir: &Path, image: &str) -> String {
    let mut command = ringway();
    command.args(["serve", image, "--socket", "refused"]).current_dir(dir);
    let output = run(command);
    assert_eq!(output.status.code(), Some(1));
    text(&output.stderr).trim_start_matches("error: ").trim_end().to_owned()
}

#[test]
fn json_has_all_keys() {
    let dir = folder();
    let (status, report) = json(dir.path(), &["disk.img"]);
    assert_eq!(status, 0, "{report:#}");
    for pointer in [
        "/version",
        "/host/kernel",
        "/host/cpus",
        "/host/memlock_bytes",
        "/host/huge_pages",
        "/host/landlock_abi",
        "/host/seccomp",
        "/host/programs",
        "/engines/0/why",
        "/io_uring/features",
        "/image/file_system/name",
        "/image/o_direct/works",
        "/image/o_direct/origin",
        "/image/logical_block",
        "/image/physical_block",
        "/image/optimal_io",
        "/image/discard",
        "/image/discard_granularity",
        "/image/device",
        "/image/in_use_by",
        "/image/choice/engine_why",
        "/image/choice/cache_why",
        "/image/choice/workers_why",
        "/image/error",
        "/warnings",
    ] {
        assert!(report.pointer(pointer).is_some(), "{pointer}: {report:#}");
    }
    assert_eq!(report["image"]["kind"], "file");
    assert_eq!(report["image"]["bytes"], 1 << 20);
    let names: Vec<_> = report["engines"].as_array().unwrap().iter().map(|e| &e["name"]).collect();
    assert_eq!(names, ["io_uring", "linux-aio", "threads"]);
    let (status, report) = json(dir.path(), &[]);
    assert_eq!((status, &report["image"]), (0, &Value::Null));
}

#[test]
fn the_choice_is_the_one_serve_makes() {
    let dir = folder();
    let (_, report) = json(dir.path(), &["disk.img"]);
    let choice = &report["image"]["choice"];
    let said = |what: &str| choice[what].as_str().unwrap().to_owned();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    for what in ["engine", "cache"] {
        let fact = format!("{what} {} ({})", said(what), said(&format!("{what}_why")));
        assert!(daemon.ready.contains(&fact), "{fact}: {}", daemon.ready);
    }
    let queues = format!(" {} queue", choice["queues"]);
    assert!(daemon.ready.contains(&queues), "{queues}: {}", daemon.ready);
}

#[test]
fn the_table_is_plain_when_nobody_watches() {
    let dir = folder();
    let (status, table) = doctor(dir.path(), &["disk.img"]);
    assert_eq!(status, 0);
    assert!(table.is_ascii() && !table.contains('\x1b'), "{table:?}");
    for part in ["Host", "Engines", "io_uring", "Disk disk.img", "O_DIRECT", "auto", "Warnings"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert!(table.lines().all(|line| line.trim_end() == line), "{table:?}");
}

/// Each engine that works for the disk at each depth, by figures of this very run; nobody who uses the disk is
/// disturbed.
#[test]
fn engines_are_measured_on_a_disk_that_nobody_uses() {
    let dir = folder();
    let dir = dir.path();
    std::fs::write(dir.join("disk.img"), vec![7; 4 << 20]).unwrap();
    let (status, report) = json(dir, &["--measure=20ms", "disk.img"]);
    assert_eq!(status, 0, "{report}");
    let direct = report["image"]["choice"]["cache"] == "none";
    let works =
        |engine: &&Value| engine["usable"] == true && (direct || engine["name"] != "linux-aio");
    let engines = report["engines"].as_array().unwrap().iter().filter(works);
    let engines: Vec<_> = engines.map(|engine| engine["name"].clone()).collect();
    let measured = report["measured"].as_array().unwrap();
    let found: Vec<_> =
        measured.iter().map(|m| (m["engine"].clone(), m["depth"].as_u64())).collect();
    let of = |depth| engines.iter().map(move |name| (name.clone(), Some(depth)));
    assert_eq!(found, of(1).chain(of(32)).collect::<Vec<_>>());
    for one in measured {
        let of = |key: &str| one[key].as_f64().unwrap();
        assert!(0.0 < of("iops_min") && of("iops_min") <= of("iops"), "{one}");
        assert!(of("iops") <= of("iops_max") && of("cpu_ns") > 0.0, "{one}");
    }
    let (_, table) = doctor(dir, &["--measure=10ms", "disk.img"]);
    assert!(table.contains("verdict") && table.is_ascii(), "{table}");
    let said = |args: &[&str], words: &str| {
        let mut command = ringway();
        let output = run({
            command.arg("doctor").args(args).current_dir(dir);
            command
        });
        let text = text(&output.stderr);
        assert!(!output.status.success() && text.contains(words), "{args:?}: {text}");
    };
    said(&["--measure", "null:1G"], "files and block devices");
    std::fs::File::create(dir.join("hole.img")).unwrap().set_len(4 << 20).unwrap();
    said(&["--measure", "hole.img"], "hole");
    said(&["--measure=1ms", "disk.img"], "too short");
    said(&["--measure"], "IMAGE");
    let _daemon = Daemon::serve(dir, &["disk.img", "--socket", "s"]);
    let (status, table) = doctor(dir, &["--measure=10ms", "disk.img"]);
    assert!(status == 1 && !table.contains("verdict"), "{table}");
    assert!(table.contains("not served") && table.contains("in use"), "{table}");
}

#[test]
fn what_serve_refuses_is_refused_in_the_same_words() {
    let dir = folder();
    let path = dir.path();
    std::fs::write(path.join("empty.img"), []).unwrap();
    std::fs::write(path.join("odd.img"), [0; 1000]).unwrap();
    std::fs::create_dir(path.join("sub")).unwrap();
    for image in ["missing.img", "no/missing.img", "empty.img", "odd.img", "sub", "null:0"] {
        let why = refusal(path, image);
        let (status, report) = json(path, &[image]);
        assert_eq!((status, report["image"]["error"].as_str()), (1, Some(&*why)), "{image}");
        assert_eq!(report["image"]["choice"], Value::Null, "{image}");
        let (status, table) = doctor(path, &[image]);
        assert!(status == 1 && table.contains(&why), "{image}: {table}");
    }
    let (status, report) = json(path, &["null:big"]);
    assert_eq!(status, 1);
    assert!(report["image"]["error"].as_str().unwrap().contains("'big' is not a size"));
}

#[test]
fn disks_without_a_file_can_be_looked_at() {
    let dir = folder();
    for (name, kind, engine) in
        [("null:1G", "null", "null"), ("sim:hdd:1G", "simulation", "sim:hdd")]
    {
        let (status, report) = json(dir.path(), &[name]);
        let image = &report["image"];
        assert_eq!((status, &image["bytes"]), (0, &Value::from(1 << 30)), "{report:#}");
        assert_eq!((&image["kind"], &image["choice"]["engine"]), (&kind.into(), &engine.into()));
    }
}

#[test]
fn sizes_that_cost_something_are_told_with_the_remedy() {
    let dir = folder();
    std::fs::write(dir.path().join("odd.img"), [0; 1536]).unwrap();
    let (status, report) = json(dir.path(), &["odd.img"]);
    assert_eq!(status, 0, "{report:#}");
    let warnings = report["warnings"].as_array().unwrap();
    // Whether O_DIRECT or only the block size suffers depends on the disk below.
    assert!(
        warnings.iter().any(|w| {
            let about = w["about"].as_str().unwrap();
            ["size", "O_DIRECT", "block size"].contains(&about) && w["to_do"] != ""
        }),
        "{report:#}"
    );
}

#[test]
fn a_disk_that_is_being_served_stays_so() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s"]);
    let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 1, 0x11));
    for _ in 0..3 {
        let (status, report) = json(dir.path(), &["disk.img"]);
        let holder = format!("process {} (ringway)", daemon.pid());
        assert_eq!(status, 1);
        assert_eq!(report["image"]["in_use_by"], *holder, "{report:#}");
        let error = report["image"]["error"].as_str().unwrap();
        assert!(error.contains(&format!("in use by {holder}")), "{error}");
        // The facts are there all the same.
        assert_eq!(report["image"]["bytes"], 1 << 20);
    }
    assert!(refusal(dir.path(), "disk.img").contains("in use by process"), "it is locked still");
    assert_eq!(read(&device, &mut queue, 1), [0x11; 512]);
    daemon.stop();
    let (status, report) = json(dir.path(), &["disk.img"]);
    assert_eq!((status, &report["image"]["in_use_by"]), (0, &Value::Null));
}

#[test]
fn sigusr1_prints_counts_and_serving_goes_on() {
    for engine in ["threads", "auto"] {
        let dir = folder();
        let args = ["disk.img", "--socket", "s", "--workers", "1", "--engine", engine];
        let daemon = Daemon::serve(dir.path(), &args);
        let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
        let mut queue = device.queue().unwrap();
        for round in 1..=20u8 {
            assert!(write(&device, &mut queue, 3, round));
            daemon.signal(libc::SIGUSR1);
            assert_eq!(read(&device, &mut queue, 3), [round; 512]);
        }
        let deadline = Instant::now() + PATIENCE;
        // Signals that come close together may count as one.
        while !daemon.log().contains("requests per submission") {
            assert!(Instant::now() < deadline, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        let log = daemon.log();
        for part in
            ["written", "bounced", "split", "syscalls/I/O", "completions per harvest", "p99.99"]
        {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert!(write(&device, &mut queue, 4, 0x44));
        daemon.stop();
    }
}

#[test]
fn sigusr1_keeps_a_log_for_machines_readable() {
    let dir = folder();
    let daemon = Daemon::serve(dir.path(), &["null:1G", "--socket", "s", "--log-format", "json"]);
    daemon.signal(libc::SIGUSR1);
    let deadline = Instant::now() + PATIENCE;
    while !daemon.log().contains("syscalls_per_io") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let log = daemon.log();
    daemon.stop();
    for line in log.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    }
}
