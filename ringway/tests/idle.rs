//! A daemon without load sleeps: none of its threads, nor its helper's, wakes for anything (hazard E8).

mod common;

use common::{Daemon, PATIENCE, children, folder, read, threads, write};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// How long to watch: `RINGWAY_IDLE_SECONDS`, or ten seconds.
fn watched() -> Duration {
    let seconds = std::env::var("RINGWAY_IDLE_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}

/// How long a daemon may take to fall asleep: three looks of the watchdog, and some.
const SETTLING: Duration = Duration::from_secs(6);
/// How often to watch before a daemon is said to wake for nothing.
const TRIES: usize = 4;

/// A process and all that descend from it: the daemon, its helper, and what starts processes of disks, with
/// these and their helpers.
fn family(pid: u32) -> Vec<u32> {
    std::iter::once(pid).chain(children(pid).into_iter().flat_map(family)).collect()
}

/// How often each thread has given a CPU up, by itself or not.
fn switches(pids: &[u32]) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for pid in pids {
        for thread in threads(*pid) {
            let count = ["voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"]
                .map(|name| thread.field(name).parse::<u64>().unwrap());
            let name = format!("{} of {}", thread.name(), thread.path.display());
            found.insert(name, count.iter().sum());
        }
    }
    found
}

/// No thread wakes while this watches. On a busy machine something may be late, once or twice.
fn sleeps(daemon: &Daemon, when: &str) {
    let mut woken = Vec::new();
    for _ in 0..TRIES {
        woken = who_wakes(daemon, when);
        if woken.is_empty() {
            return;
        }
        println!("{when}: {woken:?}");
    }
    panic!("{when}: each time somebody wakes, at last {woken:?}");
}

/// Which threads wake, and how often.
fn who_wakes(daemon: &Daemon, when: &str) -> Vec<(String, u64)> {
    let pids = family(daemon.pid());
    std::thread::sleep(SETTLING);
    let before = switches(&pids);
    std::thread::sleep(watched());
    let after = switches(&pids);
    // Threads that have ended since are not judged; these stay.
    for lasting in ["ringway of", "ringway-helper", "worker-", "sessions", "session-"] {
        let judged =
            after.keys().any(|name| name.starts_with(lasting) && before.contains_key(name));
        assert!(judged, "{when}: no {lasting} among {:?}", after.keys());
    }
    let times = after.into_iter().map(|(thread, count)| {
        let times = count - before.get(&thread).unwrap_or(&0);
        (thread, times)
    });
    times
        // Workers of the kernel's own, for io_uring: the last one of a ring looks every five seconds
        // whether it may end, and never does (Linux 6.18).
        .filter(|(thread, times)| *times > 0 && !thread.starts_with("iou-wrk"))
        .collect()
}

/// Writes a configuration of so many disks, with these engines in turn: their sockets.
fn configure(dir: &Path, disks: usize, engines: &[&str], isolate: bool) -> Vec<String> {
    let mut toml = format!("control = 'ctl'\nisolate = {isolate}\n");
    let mut sockets = Vec::new();
    for (number, engine) in engines.iter().cycle().take(disks).enumerate() {
        let image = format!("disk-{number}.img");
        std::fs::write(dir.join(&image), vec![0; 1 << 20]).unwrap();
        toml += &format!(
            "[[disk]]\nimage = '{image}'\nsocket = 's{number}'\nqueues = 2\nengine = '{engine}'\n\
             cache = '{}'\n",
            // Without O_DIRECT the kernel would carry requests out while they are submitted.
            if *engine == "linux-aio" { "none" } else { "writeback" }
        );
        sockets.push(format!("s{number}"));
    }
    std::fs::write(dir.join("disks.toml"), toml).unwrap();
    sockets
}

/// Disks with a connected front-end each: connected, after a load, and disconnected.
fn wakes_for_nothing(disks: usize, engines: &[&str], isolate: bool) {
    let dir = folder();
    let sockets = configure(dir.path(), disks, engines, isolate);
    let daemon = Daemon::serve(dir.path(), &["--config", "disks.toml"]);
    if isolate {
        // Each with a thread that has nothing to do.
        let workers = |pid: &u32| threads(*pid).iter().any(|t| t.name().starts_with("worker-"));
        assert_eq!(family(daemon.pid()).iter().filter(|pid| workers(pid)).count(), disks);
    }
    let connect = |socket: &String| {
        Options::new().queues(2).patience(PATIENCE).connect(dir.path().join(socket)).unwrap()
    };
    let mut devices: Vec<_> = sockets.iter().map(connect).collect();
    let mut queues: Vec<_> =
        devices.iter_mut().map(|device| device.queues::<()>().unwrap()).collect();
    // A client of the control socket that says nothing.
    let _client = std::os::unix::net::UnixStream::connect(dir.path().join("ctl")).unwrap();
    sleeps(&daemon, "connected");
    for round in 0..4000 {
        let at = round % devices.len();
        let queue = &mut queues[at][round / devices.len() % 2];
        if round % 4 == 0 {
            assert!(write(&devices[at], queue, 5, 0x55));
        }
        let _ = read(&devices[at], queue, 7);
    }
    sleeps(&daemon, "after a load");
    // Lost in the sleep or not: whoever asks is served.
    let last = disks - 1;
    assert!(write(&devices[last], &mut queues[last][1], 5, 0x57));
    assert_eq!(read(&devices[last], &mut queues[last][0], 5), [0x57; 512]);
    drop((queues, devices));
    sleeps(&daemon, "disconnected");
    daemon.stop();
}

#[test]
fn e08_a_daemon_without_load_wakes_for_nothing_io_uring() {
    wakes_for_nothing(20, &["io_uring"], false);
}

#[test]
fn e08_a_daemon_without_load_wakes_for_nothing_linux_aio() {
    let dir = folder();
    let mut direct = std::fs::File::options();
    direct.read(true).custom_flags(libc::O_DIRECT);
    if direct.open(dir.path().join("disk.img")).is_err() {
        return skip(Need::Direct, "this folder takes no O_DIRECT");
    }
    wakes_for_nothing(20, &["linux-aio"], false);
}

#[test]
fn e08_a_daemon_without_load_wakes_for_nothing_threads() {
    wakes_for_nothing(20, &["threads"], false);
}

/// Neither the daemon nor what starts its processes, nor a process of a disk, nor any of their helpers.
#[test]
fn e08_a_daemon_with_isolated_disks_wakes_for_nothing() {
    wakes_for_nothing(6, &["io_uring", "threads"], true);
}

/// What a process holds: threads, descriptors, and memory of its own in KiB.
fn held(pids: &[u32]) -> [u64; 3] {
    let mut sum = [0; 3];
    for pid in pids {
        let count = |what| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let kib = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        let here = [count("task") as u64, count("fd") as u64, kib("RssAnon:") + kib("VmPTE:")];
        sum.iter_mut().zip(here).for_each(|(sum, here)| *sum += here);
    }
    sum
}

/// The same once threads that were needed for a moment have ended, which is later on a busy machine.
fn held_in_the_end(pids: &[u32]) -> [u64; 3] {
    let mut last = held(pids);
    for _ in 0..TRIES {
        std::thread::sleep(SETTLING);
        let now = held(pids);
        if now[0] == last[0] {
            return now;
        }
        last = now;
    }
    last
}

/// How many disks to connect: `RINGWAY_IDLE_DISKS`, or forty.
fn many() -> usize {
    std::env::var("RINGWAY_IDLE_DISKS").ok().and_then(|s| s.parse().ok()).unwrap_or(40)
}

/// What a disk with four queues costs, whether its front-end does anything or not.
#[test]
fn e08_a_connected_disk_that_is_idle_costs_little() {
    const QUEUES: u16 = 4;
    let dir = folder();
    let disks = many();
    let mut toml = "workers = 2\n".to_owned();
    for number in 0..disks {
        let image = dir.path().join(format!("{number}.img"));
        std::fs::File::create(image).unwrap().set_len(1 << 20).unwrap();
        toml += &format!(
            "[[disk]]\nimage = '{number}.img'\nsocket = 's{number}'\nqueues = {QUEUES}\nengine = 'io_uring'\n"
        );
    }
    std::fs::write(dir.path().join("disks.toml"), toml).unwrap();
    let daemon = Daemon::serve(dir.path(), &["--config", "disks.toml"]);
    let pids = family(daemon.pid());
    let offered = held(&pids);
    let connect = |number: usize| {
        let options = Options::new().queues(QUEUES).patience(PATIENCE).memory(1 << 16);
        let mut device = options.connect(dir.path().join(format!("s{number}"))).unwrap();
        let queues = device.queues::<()>().unwrap();
        (device, queues)
    };
    let mut connected: Vec<_> = (0..disks / 2).map(connect).collect();
    let half = held_in_the_end(&pids);
    connected.extend((disks / 2..disks).map(connect));
    let all = held_in_the_end(&pids);
    println!("offered: {offered:?}, half connected: {half:?}, all connected: {all:?}");
    let each = |n: usize| (all[n] - half[n]) as f64 / (disks - disks / 2) as f64;
    let [descriptors, memory] = [each(1), each(2)];
    println!("each connection: {descriptors} descriptors, {memory} KiB");
    assert_eq!(all[0], half[0], "threads, of one half and of all");
    assert!(descriptors <= 11.0, "each connection");
    assert!(memory <= 256.0, "each connection: {memory} KiB");
    sleeps(&daemon, "all connected");
    drop(connected);
    daemon.stop();
}
