//! How an offered disk is: its queues, and what they have counted.

use super::{Export, lock};
use crate::latency::Latency;
use crate::queue::QueueLifecycle;
use crate::stats::{QueueStats, WorkerStats};
use crate::totals::QueueTotals;
use ringway_disk::DiskStats;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// One queue that runs.
#[derive(Clone, Debug)]
pub struct QueueReport {
    /// Its number.
    pub queue: usize,
    /// The worker that serves it, by its number in the disk's pool.
    pub worker: usize,
    /// What the worker says of it.
    pub stats: QueueStats,
}

/// A disk and its queues.
#[derive(Clone, Debug)]
pub struct ExportReport {
    /// A front-end is connected.
    pub connected: bool,
    /// What is wrong with it.
    pub front_end: Option<String>,
    /// No requests are taken.
    pub paused: bool,
    /// The guest's write cache is on.
    pub writeback: bool,
    /// Queues of ended connections wait for a stuck disk.
    pub stuck: bool,
    /// All queues are in the counts: those of one that is being stopped, or whose worker did not answer,
    /// are missing for a while.
    pub complete: bool,
    /// The counts of all queues, those that were stopped included.
    pub counts: DiskStats,
    /// The same beside requests.
    pub totals: QueueTotals,
    /// Requests that predecessors had left in flight.
    pub recovered: u64,
    /// Latencies of the queues that run, if workers take samples.
    pub latency: Option<Latency>,
    /// The queues that run.
    pub queues: Vec<QueueReport>,
}

impl<Q: QueueLifecycle> Export<Q> {
    /// True while a front-end is connected: its socket, or both sides' states in xenstore.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        lock(&self.inboxes).iter().any(|inbox| inbox.is_attended())
    }

    /// How it is, by what the workers of its pool have said, in their order; `None` is one that did
    /// not answer.
    #[must_use]
    pub fn report(&self, workers: &[Option<WorkerStats>]) -> ExportReport {
        let stuck = !self.is_clear();
        // A queue is in one of these, or is being stopped.
        let (running, (counts, totals), complete) = {
            let (running, gone) = (lock(&self.running), lock(&self.gone));
            (running.clone(), *gone, self.stopping.load(SeqCst) == 0)
        };
        let mut report = ExportReport {
            connected: self.is_connected(),
            front_end: None,
            paused: self.is_paused(),
            writeback: self.may_write_back() && self.writeback(),
            stuck,
            complete,
            counts,
            totals,
            recovered: self.recovered.load(Relaxed),
            latency: None,
            queues: Vec::new(),
        };
        for (queue, worker, id) in running {
            let said = workers.get(worker).and_then(Option::as_ref);
            let Some(stats) = said.and_then(|said| said.queues.iter().find(|stats| stats.id == id))
            else {
                report.complete = false;
                continue;
            };
            report.counts.add(&stats.counts);
            report.totals.add(&stats.totals);
            if let Some(latency) = &stats.latency {
                report.latency.get_or_insert_default().add(latency);
            }
            report.queues.push(QueueReport { queue, worker, stats: stats.clone() });
        }
        report.queues.sort_by_key(|queue| queue.queue);
        let mut stats = report.queues.iter().map(|queue| &queue.stats);
        let unused = report.complete
            && !report.queues.is_empty()
            && stats.all(|stats| stats.counts.batches == 0);
        report.front_end = lock(&self.front_end).trouble(unused);
        report
    }
}
