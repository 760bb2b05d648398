//! What workers count: plain integers, read by asking the worker.

use crate::command::QueueId;
use crate::latency::Latency;
use crate::totals::QueueTotals;
use hdrhistogram::Histogram;
use ringway_aio::Counters;
use ringway_disk::{Disk, DiskStats};
use std::sync::Arc;
use std::time::Duration;

/// The largest batch that is told apart from larger ones.
const BATCH_MAX: u64 = 4096;

/// The counts of one worker.
#[derive(Clone, Debug)]
pub struct WorkerStats {
    /// Chains taken from rings.
    pub requests: u64,
    /// Requests started per submission, of submissions that had any.
    pub batches: Histogram<u64>,
    /// Completions found per harvest, of harvests that found any (origin O2).
    pub harvests: Histogram<u64>,
    /// Times the worker slept.
    pub sleeps: u64,
    /// Calls that could not be delivered.
    pub lost_calls: u64,
    /// Kicks that never came although requests did.
    pub lost_kicks: u64,
    /// What the engine counted.
    pub engine: Counters,
    /// What the disk queues counted, those that are gone included.
    pub disk: DiskStats,
    /// The part of `disk` that belongs to queues that are gone.
    pub gone: DiskStats,
    /// Rounds of its loop.
    pub turns: u64,
    /// The part of `turns` that found nothing, and was followed by another one without a sleep.
    pub spins: u64,
    /// The part of `cpu` that went to those: their number, at the average of the few that were timed.
    pub spun: Duration,
    /// How long it has been there.
    pub age: Duration,
    /// CPU time it has used, spinning included.
    pub cpu: Duration,
    /// The queues it serves now.
    pub queues: Vec<QueueStats>,
}

/// One queue, as its worker sees it.
#[derive(Clone, Debug)]
pub struct QueueStats {
    /// Its name there.
    pub id: QueueId,
    /// The disk it belongs to.
    pub disk: Arc<Disk>,
    /// Descriptors of its ring.
    pub queue_size: u16,
    /// Requests begun and not answered.
    pub in_flight: usize,
    /// Those of them that the last look found overdue: see [`crate::Handle::ask_inspect`].
    pub overdue: usize,
    /// Those of them that are held, and not being tried again: see [`ringway_disk::ErrorPolicy`].
    pub held: usize,
    /// Its guest has broken it.
    pub broken: bool,
    /// What it has counted since it was started.
    pub counts: DiskStats,
    /// How long its requests took, if the worker takes samples and spreads were asked for.
    pub latency: Option<Latency>,
    /// Beside `counts`, since it was started.
    pub totals: QueueTotals,
}

impl Default for WorkerStats {
    /// Nothing counted. All memory the histograms will ever need is taken here.
    fn default() -> Self {
        let empty = Histogram::new_with_bounds(1, BATCH_MAX, 3).expect("the bounds are sound");
        Self {
            requests: 0,
            batches: empty.clone(),
            harvests: empty,
            sleeps: 0,
            lost_calls: 0,
            lost_kicks: 0,
            engine: Counters::default(),
            disk: DiskStats::default(),
            gone: DiskStats::default(),
            turns: 0,
            spins: 0,
            spun: Duration::ZERO,
            age: Duration::ZERO,
            cpu: Duration::ZERO,
            queues: Vec::new(),
        }
    }
}

impl WorkerStats {
    /// Requests completed.
    #[must_use]
    pub fn completed(&self) -> u64 {
        let d = &self.disk;
        d.reads + d.writes + d.flushes + d.erases + d.errors
    }

    /// System calls of the engine per completed request.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn syscalls_per_io(&self) -> f64 {
        self.engine.syscalls as f64 / self.completed().max(1) as f64
    }

    /// Adds the counts of another worker.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        // Both have the same bounds.
        let _ = self.batches.add(&other.batches);
        let _ = self.harvests.add(&other.harvests);
        self.sleeps += other.sleeps;
        self.lost_calls += other.lost_calls;
        self.lost_kicks += other.lost_kicks;
        self.engine.queued += other.engine.queued;
        self.engine.syscalls += other.engine.syscalls;
        self.engine.sleeps += other.engine.sleeps;
        self.disk.add(&other.disk);
        self.gone.add(&other.gone);
        self.turns += other.turns;
        self.spins += other.spins;
        self.spun += other.spun;
        self.age = self.age.max(other.age);
        self.cpu += other.cpu;
        self.queues.extend_from_slice(&other.queues);
    }
}
