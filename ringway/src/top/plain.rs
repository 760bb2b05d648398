//! The figures as plain tables: for pipes, scripts, and people without a terminal.

use super::columns::{self, COLUMNS, PICTURE_OF_WORKER, WORKERS, percent, time};
use super::figures::{Effort, Figures, WorkerFigures};
use crate::happened::NO_DISKS;
use ringway_terminal::short::age;
use ringway_terminal::table;

/// All disks with their queues, and all workers.
pub(super) fn text(figures: &Figures) -> String {
    let head = COLUMNS.each_ref().map(|column| column.title);
    let lines = figures.disks.iter().flat_map(|disk| {
        let queues = disk.queues.iter().map(columns::queue);
        std::iter::once(columns::disk(disk)).chain(queues)
    });
    let words = COLUMNS.iter().take_while(|column| column.words).count();
    let lines: Vec<_> = lines.map(Vec::from).collect();
    let disks = match lines.is_empty() {
        true => NO_DISKS.to_owned(),
        false => table::fitting(words, &head, lines, &columns::least(&COLUMNS)),
    };
    let words = |at: &usize| *at != PICTURE_OF_WORKER;
    let shown: Vec<usize> = (0..WORKERS.len()).filter(words).collect();
    let workers = figures.workers.iter().map(|one| {
        let cells = worker(one);
        shown.iter().map(|&at| cells[at].clone()).collect()
    });
    let heads: Vec<_> = shown.iter().map(|&at| WORKERS[at].title).collect();
    let least = columns::least(&WORKERS);
    let workers = match figures.workers.is_empty() {
        true => String::new(),
        false => table::fitting(1, &heads, workers.collect(), &least) + "\n\n",
    };
    let up = age(figures.daemon.uptime_us);
    format!(
        "{disks}\n\n{workers}ringway {}, process {}, up for {up}\n",
        figures.daemon.version, figures.daemon.pid
    )
}

/// The line of a worker.
pub(super) fn worker(worker: &WorkerFigures) -> [String; WORKERS.len()] {
    let mean = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
    let rate = |value: Option<f64>| value.map_or("-".into(), ringway_terminal::short::count);
    let effort = worker.effort.as_ref();
    let part = |of: fn(&Effort) -> f64| effort.map_or("-".into(), |effort| percent(of(effort)));
    let name = match worker.answers {
        true => worker.worker.clone(),
        false => format!("{} does not answer", worker.worker),
    };
    [
        name,
        worker.queues.to_string(),
        rate(worker.requests_s),
        // The place of the picture.
        String::new(),
        part(|effort| effort.working),
        part(|effort| effort.spinning),
        part(|effort| effort.asleep),
        rate(worker.sleeps_s),
        mean(effort.and_then(|effort| effort.requests_per_submit)),
        mean(effort.and_then(|effort| effort.completions_per_harvest)),
        worker.harvests.p99.map_or("-".into(), |most| most.to_string()),
        mean(effort.and_then(|effort| effort.syscalls_per_io)),
    ]
}

/// Latencies of one kind of requests, in words.
pub(super) fn latencies(latency: &super::buckets::Percentiles) -> String {
    let [p50, p99, p999, max] = [latency.p50, latency.p99, latency.p999, latency.max].map(time);
    format!("p50 {p50}  p99 {p99}  p99.9 {p999}  max {max}  ({} timed)", latency.count)
}
