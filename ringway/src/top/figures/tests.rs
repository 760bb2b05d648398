//! Rates and percentiles of answers made up here: a daemon with two disks.

use super::super::fixture::{Fixture, sample};
use super::*;

fn figures(cases: &[Fixture]) -> Figures {
    let mut samples = Samples::default();
    cases.iter().for_each(|case| samples.push(sample(case)));
    samples.figures().unwrap()
}

#[test]
fn rates_are_the_difference_of_two_answers_by_the_time_between_them() {
    let then = Fixture { uptime_us: 5_000_000, reads: 1000, writes: 500, ..Fixture::default() };
    let now = Fixture { uptime_us: 7_000_000, reads: 21_000, writes: 10_500, kicks: 40, ..then };
    assert!(figures(&[then]).disks[0].rates.is_none(), "one answer makes no rate");
    let figures = figures(&[then, now]);
    assert_eq!(figures.seconds, Some(2.0));
    let rates = figures.disks[0].rates.as_ref().unwrap();
    assert_eq!((rates.reads_s, rates.writes_s, rates.iops), (10_000.0, 5000.0, 15_000.0));
    assert_eq!((rates.read_mb_s, rates.write_mb_s), (40.96, 20.48));
    assert_eq!((rates.kicks_s, rates.calls_s), (20.0, 0.0));
    let queue = figures.disks[0].queues[0].rates.as_ref().unwrap();
    assert_eq!(queue.iops, 15_000.0);
    assert_eq!(figures.disks[1].rates.as_ref().unwrap().iops, 0.0);
}

#[test]
fn latencies_are_those_of_the_window() {
    // 1000 slow ones long ago, then 2000 fast ones.
    let mut cases = vec![Fixture { slow: 1000, ..Fixture::default() }];
    for second in 1..=12 {
        let reads = second * 1000;
        let fast = second * 200;
        let uptime_us = second * 1_000_000;
        cases.push(Fixture { uptime_us, reads, fast, slow: 1000, ..Fixture::default() });
    }
    let figures = figures(&cases);
    assert_eq!(figures.latency_window_seconds, Some(10.0));
    let latency = &figures.disks[0].latency;
    assert_eq!((latency.count, latency.p50, latency.p999), (2000, Some(8191), Some(8191)));
    assert_eq!(figures.disks[0].writes.count, 0);
}

#[test]
fn a_worker_divides_its_time_into_work_spins_and_sleep() {
    let then = Fixture { uptime_us: 1_000_000, ..Fixture::default() };
    let now = Fixture {
        uptime_us: 2_000_000,
        cpu_us: 600_000,
        spin_us: 200_000,
        requests: 1000,
        syscalls: 250,
        batches: 100,
        ..Fixture::default()
    };
    let figures = figures(&[then, now]);
    let effort = figures.workers[0].effort.as_ref().unwrap();
    assert_eq!((effort.spinning, effort.asleep), (0.2, 0.4));
    assert!((effort.working - 0.4).abs() < 1e-9);
    assert_eq!(effort.syscalls_per_io, Some(0.25));
    assert_eq!(effort.requests_per_submit, Some(10.0));
    assert_eq!(effort.completions_per_harvest, None, "there were none");
    let of_disk = figures.disks[0].effort.as_ref().unwrap();
    assert_eq!(of_disk.spinning, 0.2);
    assert!(figures.disks[1].effort.is_none(), "it has no queues, so no worker");
}

#[test]
fn another_daemon_at_the_same_place_begins_anew() {
    let then = Fixture { uptime_us: 9_000_000, reads: 50, ..Fixture::default() };
    let other = Fixture { uptime_us: 9_500_000, reads: 60, pid: 2, ..Fixture::default() };
    let later = Fixture { uptime_us: 10_500_000, reads: 70, pid: 2, ..Fixture::default() };
    assert!(figures(&[then, other]).disks[0].rates.is_none());
    assert_eq!(figures(&[then, other, later]).disks[0].rates.as_ref().unwrap().iops, 10.0);
}

#[test]
fn a_queue_that_was_started_anew_counts_from_nothing() {
    let then =
        Fixture { uptime_us: 1_000_000, reads: 500, kicks: 100, fast: 9, ..Fixture::default() };
    let now = Fixture { uptime_us: 2_000_000, reads: 80, kicks: 10, fast: 2, ..Fixture::default() };
    let figures = figures(&[then, now]);
    let queue = figures.disks[0].queues[0].rates.as_ref().unwrap();
    assert_eq!((queue.iops, queue.kicks_s), (80.0, 10.0));
    assert_eq!(figures.disks[0].queues[0].latency.count, 2);
}
