//! What disks, queues and workers have done, as people read it.

use crate::happened::NO_DISKS;
use ringway_control::protocol::{Counts, Latencies, Spread, Stats, WorkerStatsOf};
use ringway_control::size::Size;
use ringway_terminal::short::time;
use ringway_terminal::table;
use std::fmt::Write as _;

/// What a narrow terminal leaves out first.
const LEAST_OF_STATS: [&str; 14] = [
    "ring",
    "erases",
    "refused",
    "flushes",
    "throttled",
    "done/harvest",
    "lost kicks",
    "worker",
    "req/submit",
    "sleeps",
    "syscalls",
    "p90",
    "p99.9",
    "held",
];

/// What is counted of disks and of queues.
const COUNTED: [&str; 10] = [
    "reads",
    "read",
    "writes",
    "written",
    "flushes",
    "erases",
    "refused",
    "failed",
    "held",
    "throttled",
];

/// The tables for what disks, queues and workers have done.
pub(super) fn stats(stats: &Stats) -> String {
    let mut text = String::new();
    if stats.disks.is_empty() {
        text = format!("{NO_DISKS}\n");
    }
    let disks = stats.disks.iter().map(|disk| {
        let mut cells =
            vec![disk.id.to_string(), disk.image.clone(), in_flight(disk.in_flight, disk.overdue)];
        cells.extend(counts(&disk.counts));
        cells
    });
    let header = [&["disk", "image", "in flight"], &COUNTED[..]].concat();
    section(&mut text, 2, &header, disks.collect());

    let queues = stats.disks.iter().flat_map(|disk| {
        disk.queues.iter().map(|queue| {
            let name = format!("{}/{}", disk.id, queue.queue);
            let mut cells = vec![name, queue.worker.clone(), queue.queue_size.to_string()];
            let state = if queue.broken { "broken" } else { "" };
            cells.push(format!("{}{state}", in_flight(queue.in_flight, queue.overdue)));
            cells.extend(counts(&queue.counts));
            cells
        })
    });
    let header = [&["queue", "worker", "ring", "in flight"], &COUNTED[..]].concat();
    section(&mut text, 2, &header, queues.collect());

    let failures = stats.disks.iter().flat_map(|disk| {
        disk.failures.iter().map(|failures| {
            vec![
                format!("{} {}", disk.id, failures.operation),
                failures.error.clone(),
                failures.count.to_string(),
                failures.sector.map_or("-".into(), |sector| sector.to_string()),
            ]
        })
    });
    section(&mut text, 2, &["failed", "error", "times", "last sector"], failures.collect());

    let timed = stats.disks.iter().filter_map(|disk| Some((disk.id, disk.latency.as_ref()?)));
    let rows = timed.flat_map(|(id, latency)| latencies(id, latency));
    section(
        &mut text,
        1,
        &["latency", "timed", "p50", "p90", "p99", "p99.9", "max"],
        rows.collect(),
    );
    let header = [
        "worker",
        "queues",
        "requests",
        "req/submit",
        "done/harvest",
        "syscalls",
        "sleeps",
        "lost kicks",
        "CPU",
        "spinning",
    ];
    section(&mut text, 1, &header, stats.workers.iter().map(worker).collect());
    text
}

/// How many requests are in flight, and how many of them for too long.
fn in_flight(all: usize, overdue: usize) -> String {
    match overdue {
        0 => all.to_string(),
        _ => format!("{all} ({overdue} overdue)"),
    }
}

/// A table, if there is anything in it; its first `words` columns hold words.
pub(super) fn section(text: &mut String, words: usize, header: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let gap = if text.is_empty() { "" } else { "\n" };
    // What a line is about stays.
    let least = LEAST_OF_STATS.into_iter().filter(|name| *name != header[0]).collect::<Vec<_>>();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{gap}{}", table::fitting(words, header, rows, &least));
}

fn counts(counts: &Counts) -> Vec<String> {
    vec![
        counts.reads.to_string(),
        Size(counts.read_bytes).to_string(),
        counts.writes.to_string(),
        Size(counts.written_bytes).to_string(),
        counts.flushes.to_string(),
        counts.erases.to_string(),
        // A daemon of before does not tell them apart.
        counts.refused.to_string(),
        counts.errors.saturating_sub(counts.refused).to_string(),
        counts.held.to_string(),
        format!("{:.1} s", counts.throttled_us as f64 / 1e6),
    ]
}

fn latencies(disk: u64, latency: &Latencies) -> Vec<Vec<String>> {
    let kinds =
        [("reads", &latency.reads), ("writes", &latency.writes), ("others", &latency.others)];
    let row = |(kind, spread): (&str, &Spread)| {
        let mut cells = vec![format!("{disk} {kind}"), spread.count.to_string()];
        cells.extend(
            [spread.p50, spread.p90, spread.p99, spread.p999, spread.max].map(|ns| time(ns as f64)),
        );
        cells
    };
    kinds.into_iter().filter(|(_, spread)| spread.count > 0).map(row).collect()
}

fn worker(worker: &WorkerStatsOf) -> Vec<String> {
    let share = |part: u64, whole: u64| match whole {
        0 => "-".into(),
        _ => format!("{:.0} %", 100.0 * part as f64 / whole as f64),
    };
    if !worker.answers {
        return vec![worker.worker.clone(), "does not answer".into()];
    }
    vec![
        worker.worker.clone(),
        worker.queues.to_string(),
        worker.requests.to_string(),
        worker.batches.p50.to_string(),
        worker.harvests.p50.to_string(),
        worker.syscalls.to_string(),
        worker.sleeps.to_string(),
        worker.lost_kicks.to_string(),
        share(worker.cpu_us, worker.age_us),
        share(worker.spin_us, worker.age_us),
    ]
}
