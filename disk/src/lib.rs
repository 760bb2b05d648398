//! An opened disk: probing, slots, bounds, bounce buffers, durability. Knows no guest.
//!
//! Floor 1b of the house. [`open()`] is the only place that probes the host and makes choices;
//! [`Disk`] is what came of it, shared by all workers; a [`DiskQueue`] is one worker's hand on it.

mod choices;
mod clock;
mod disk;
mod durability;
mod extent;
mod incidents;
mod locks;
pub mod open;
mod parts;
mod queue;
mod resize;
mod simulated;
mod state;
mod stats;

pub use choices::{Alignment, CacheMode, EngineKind, SimModel, UnknownWord};
pub use disk::Disk;
pub use incidents::{Detours, FailedOp, Failures, Incidents, OnIncident};
pub use open::{
    ForeignFormat, LockError, OpenError, OpenOptions, Report, Source, lock_image, open, probe,
    unlock_image,
};
pub use parts::Parts;
pub use queue::{DiskQueue, Finished, Oldest, Overdue, SEGMENTS_MAX, Watcher};
pub use resize::ResizeError;
pub use ringway_scheduler::{OnSwitch, Policy, SchedulerMode, SchedulerStats, SharedPolicy};
pub use simulated::Simulated;
pub use state::{STATE_BYTES, STATE_FLUSH_FAILED, STATE_FLUSHING, STATE_PAUSED};
pub use stats::DiskStats;
