//! `ringway serve --path`: merged where it was asked for, chosen where it was not.

use crate::common::{Daemon, PATIENCE, folder, says};
use ringway_driver::{BlkQueue, Device, Options};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const LEN: u64 = 4096;
const DEPTH: u64 = 32;

fn connect(dir: &Path) -> Device {
    Options::new().patience(PATIENCE).memory(1 << 20).connect(dir.join("s")).unwrap()
}

/// The figures of the table row that follows the heading.
fn row<'a>(stats: &'a str, heading: &str, name: &str) -> Vec<&'a str> {
    let from = stats.find(heading).unwrap_or_else(|| panic!("no {heading}:\n{stats}"));
    let line = stats[from..].lines().find(|line| line.contains(name));
    line.unwrap_or_else(|| panic!("no {name}:\n{stats}")).split_whitespace().collect()
}

/// Reads one behind the other, `DEPTH` in flight, until `enough`.
fn stream(device: &Device, queue: &mut BlkQueue<u64>, mut enough: impl FnMut(u64) -> bool) {
    let blocks = device.capacity() / LEN;
    let (mut next, mut in_flight) = (0, 0);
    let mut buffers: Vec<_> = (0..DEPTH).map(|_| device.pool().alloc(4096).unwrap()).collect();
    let begun = Instant::now();
    loop {
        if !enough(next) {
            for buffer in buffers.drain(..).rev() {
                queue.read(next % blocks * LEN, buffer, next).unwrap();
                (next, in_flight) = (next + 1, in_flight + 1);
            }
        }
        if in_flight == 0 {
            return;
        }
        queue.submit().unwrap();
        assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
        while let Some(done) = queue.pop().unwrap() {
            assert!(done.is_ok());
            in_flight -= 1;
            buffers.push(done.into_buffer().unwrap());
        }
        // What a disk would gain is measured again and again, as long as others keep the CPUs busy.
        assert!(begun.elapsed() < 4 * PATIENCE, "it never comes");
    }
}

#[test]
fn neighbours_are_merged_on_request_and_counted() {
    for (path, merges) in [("request", true), ("bio", false)] {
        let dir = folder();
        let args = ["disk.img", "--socket", "s", "--stats", "--workers", "1", "--path", path];
        let daemon = Daemon::serve(dir.path(), &args);
        assert!(daemon.ready.contains(&format!("path {path}")), "{}", daemon.ready);
        let mut device = connect(dir.path());
        let mut queue = device.queue().unwrap();
        stream(&device, &mut queue, |next| next >= 200);
        drop((queue, device));
        let stats = daemon.stop();
        let [_, plugged, merged, operations, ..] = row(&stats, "plugged", "/0")[..] else {
            panic!("{stats}")
        };
        let [plugged, merged, operations] =
            [plugged, merged, operations].map(|word| word.parse::<u64>().unwrap());
        assert_eq!((plugged >= 200, merged > 0), (merges, merges), "{stats}");
        assert_eq!(plugged, merged + operations, "{stats}");
        assert_eq!(row(&stats, "in use", "disk.img")[1..], [path, path, "0"], "{stats}");
    }
}

/// The guest's load decides how often it does: a line for each would fill a log.
#[test]
fn e82_auto_takes_up_merging_on_a_slow_disk_which_is_counted_and_logged_on_request() {
    for verbose in [false, true] {
        let dir = folder();
        let dir = dir.path();
        let args = ["sim:hdd:1G", "--socket", "s", "--control", "ctl", "--workers", "1", "--stats"];
        let more = if verbose { &["-v"][..] } else { &[] };
        let mut daemon = Daemon::serve(dir, &[&args[..], more].concat());
        let mut device = connect(dir);
        let mut queue = device.queue().unwrap();
        let asked = |args: &[&str]| says(dir, &[args, &["--control", "ctl"]].concat(), 0, &[]);
        let path = || {
            let said: Value = serde_json::from_str(&asked(&["ctl", "stats", "--json"])).unwrap();
            said["disks"][0]["path"].clone()
        };
        let mut looked = Instant::now();
        stream(&device, &mut queue, |_| {
            let due = looked.elapsed() > Duration::from_millis(50);
            if due {
                looked = Instant::now();
            }
            due && path()["switches"] != 0 && (!verbose || daemon.log().contains("path request"))
        });
        drop((queue, device));
        let path = path();
        assert_eq!(path["kind"], "auto");
        let shown = asked(&["top", "--once", "--interval", "100ms"]);
        let in_use = format!("auto: {}", path["in_use"].as_str().unwrap());
        assert!(shown.contains(&in_use), "{in_use}: {shown}");
        daemon.signal(libc::SIGTERM);
        let (_, stats) = daemon.wait();
        assert_ne!(row(&stats, "in use", "sim:hdd:")[3], "0", "{stats}");
        let log = daemon.log();
        let lines: Vec<_> = log.lines().filter(|line| line.contains(": path ")).collect();
        assert_eq!(lines.is_empty(), !verbose, "{log}");
        assert!(lines.iter().all(|line| line.contains("DEBUG")), "{log}");
    }
}
