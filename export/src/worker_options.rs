//! How a worker works, whatever its engine.

use crate::polling::Polling;

/// How a worker works, whatever its engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerOptions {
    /// Whether it spins before it sleeps.
    pub polling: Polling,
    /// Whether guest memory is pinned for engines that gain by it. Only for guests without a
    /// balloon and without free page reporting.
    pub pin_memory: bool,
    /// Whether it times one request of many, for [`crate::QueueStats::latency`].
    pub sample_latency: bool,
}
