//! What workers count: plain integers, read by asking the worker.

use ringway_aio::Counters;
use ringway_disk::DiskStats;

/// The counts of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// Chains taken from rings.
    pub requests: u64,
    /// Times completions were found.
    pub harvests: u64,
    /// Completions found.
    pub completions: u64,
    /// Times the worker slept.
    pub sleeps: u64,
    /// Calls that could not be delivered.
    pub lost_calls: u64,
    /// What the engine counted.
    pub engine: Counters,
    /// What the disk queues counted, those that are gone included.
    pub disk: DiskStats,
    /// The part of `disk` that belongs to queues that are gone.
    pub gone: DiskStats,
}
