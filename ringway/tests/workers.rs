//! What `ringway serve` does with its threads: pinning, files it may open, idleness.

mod common;

use common::{Daemon, PATIENCE, folder, read, ringway, run, text, threads};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

const NULL: [&str; 3] = ["null:1G", "--socket", "s"];

/// The CPUs this test may use.
fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

#[test]
fn workers_are_pinned_to_one_cpu_each_in_turn() {
    let cpus = allowed();
    let [a, .., b] = cpus[..] else { return skip(Need::Cpus, "there is one") };
    let list = format!("{b},{a}");
    let dir = folder();
    let args = ["--cpus", &list, "--workers", "3", "--queues", "4", "--engine", "threads"];
    let args = [&["disk.img", "--socket", "s", "--cache", "writeback"], &args[..]].concat();
    let daemon = Daemon::serve(dir.path(), &args);
    let shown = format!("3 workers on CPUs {b},{a}  ");
    assert!(daemon.ready.contains(&shown), "{}", daemon.ready);
    let both = if b == a + 1 { format!("{a}-{b}") } else { format!("{a},{b}") };
    let expected = [("worker-0", b), ("worker-1", a), ("worker-2", b)];
    let expected: BTreeMap<_, _> =
        expected.map(|(name, cpu)| (name.to_owned(), cpu.to_string())).into();
    // A thread bears the name of the one that made it, and has its CPUs, until it has seen to itself.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (mut pinned, mut of_calls) = (BTreeMap::new(), Vec::new());
        for thread in threads(daemon.pid()) {
            let (name, cpus) = (thread.name(), thread.field("Cpus_allowed_list"));
            if name.starts_with("worker-") {
                pinned.insert(name, cpus);
            } else if name.starts_with("io-") {
                of_calls.push(cpus);
            }
        }
        // Blocking calls leave the worker's CPU to it.
        if pinned == expected && of_calls.iter().all(|cpus| *cpus == both) {
            break;
        }
        assert!(Instant::now() < deadline, "workers on {pinned:?}, blocking calls on {of_calls:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.stop();
}

#[test]
fn a_list_of_cpus_is_as_many_workers_at_most() {
    let cpu = allowed()[0].to_string();
    let dir = folder();
    let args = [&NULL[..], &["--queues", "8", "--cpus", &cpu]].concat();
    let daemon = Daemon::serve(dir.path(), &args);
    assert!(daemon.ready.contains(&format!("1 worker on CPUs {cpu}")), "{}", daemon.ready);
    // Through a file as well.
    let toml = format!("cpus = '{cpu}'\n[[disk]]\nimage = 'null:1G'\nsocket = 't'\nqueues = 8\n");
    std::fs::write(dir.path().join("disks.toml"), toml).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "disks.toml"]);
    assert!(daemon.ready.contains(&format!("1 worker on CPUs {cpu}")), "{}", daemon.ready);
}

#[test]
fn a_cpu_that_cannot_be_used_is_named() {
    let refused = |list: &str| {
        let dir = folder();
        let mut command = ringway();
        command.args(["serve", "new.img", "--size", "1M", "--socket", "s", "--cpus", list]);
        let output = run({
            command.current_dir(dir.path());
            command
        });
        assert!(!output.status.success());
        assert!(!dir.path().join("new.img").exists(), "nothing was made");
        text(&output.stderr)
    };
    let error = refused("1000");
    assert!(error.contains("CPU 1000 does not exist. CPUs that can be used: "), "{error}");
    let error = refused("0-");
    assert!(error.contains("'0-' is not a CPU"), "{error}");
    let [a, .., b] = allowed()[..] else { return skip(Need::Cpus, "there is one") };
    // A child may run where the thread may that made it.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut set = CpuSet::new();
            set.set(a);
            sched_setaffinity(None, &set).unwrap();
            let error = refused(&b.to_string());
            assert!(error.contains(&format!("CPU {b} is not allowed")), "{error}");
            assert!(error.contains(&format!("can be used: {a}\n")), "{error}");
        });
    });
}

#[test]
fn as_many_files_can_be_open_as_the_host_allows() {
    let dir = folder();
    let mut command = Command::new("sh");
    let script = "ulimit -Sn 40 && exec \"$@\"";
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ringway"), "serve"]);
    command.args([&NULL[..], &["--queues", "64"]].concat()).current_dir(dir.path());
    let daemon = Daemon::start(command);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let limits = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let words: Vec<_> = limits.split_whitespace().collect();
    assert_eq!(words[0], words[1], "soft and hard: {limits}");
    // 64 queues have 128 descriptors.
    let mut device = Options::new().queues(64).patience(PATIENCE).connect(dir.path().join("s"));
    let device = device.as_mut().unwrap();
    assert_eq!(device.queues::<()>().unwrap().len(), 64);
    daemon.stop();
}

/// Nanoseconds on a CPU, and turns on one, of all threads of a process.
fn spent(pid: u32) -> (u64, u64) {
    let mut sum = (0, 0);
    for thread in threads(pid) {
        let text = std::fs::read_to_string(thread.path.join("schedstat")).unwrap_or_default();
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let [cpu, _, turns] = numbers[..] else { continue };
        sum = (sum.0 + cpu, sum.1 + turns);
    }
    sum
}

#[test]
fn a_daemon_without_load_sleeps() {
    if !PathBuf::from("/proc/self/schedstat").exists() {
        return skip(Need::SchedStat, "this kernel keeps none");
    }
    for poll in ["adaptive", "never"] {
        let dir = folder();
        let args = ["disk.img", "--socket", "s", "--queues", "8", "--poll", poll];
        let daemon = Daemon::serve(dir.path(), &args);
        let mut device =
            Options::new().queues(8).patience(PATIENCE).connect(dir.path().join("s")).unwrap();
        let mut queues: Vec<_> = device.queues().unwrap();
        for round in 0..4000 {
            let _ = read(&device, &mut queues[round % 8], 7);
        }
        // A moment for the last answer, then a second in which nothing happens at all but the
        // watchdog's looks, ten a second. On a busy machine the moment may be some seconds.
        let mut seconds = Vec::new();
        let sleeps = (0..10).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            let before = spent(daemon.pid());
            std::thread::sleep(Duration::from_secs(1));
            let after = spent(daemon.pid());
            let (cpu_ms, turns) = ((after.0 - before.0) / 1_000_000, after.1 - before.1);
            seconds.push((cpu_ms, turns));
            turns <= 60 && cpu_ms <= 20
        });
        assert!(sleeps, "{poll}: ms of CPU and wake-ups in seconds without load: {seconds:?}");
        daemon.stop();
    }
}
