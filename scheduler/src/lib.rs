//! How requests travel from a queue to its disk.
//!
//! Floor 1a of the house. Three ways, after origin O3:
//!
//! - [`bio`]: straight through, each request by itself;
//! - [`request`]: plugged, sorted by sector, neighbours merged, sent through a window;
//! - [`auto`]: whichever of the two carries more, found by trying.
//!
//! Both ends of a ring use it: a disk (`ringway-disk`) and a front-end (`ringway-driver`). A queue has
//! a [`MergeQueue`] and a [`QueuePolicy`]; all queues of a disk have one [`SharedPolicy`].
//!
//! Pure logic: no system call, no clock, no guest memory. Times are passed in, in nanoseconds since
//! any moment that stays the same. All memory is taken at start.

pub mod auto;
pub mod merge_queue;
mod mode;
pub mod probe;
mod queue_policy;
mod shared_policy;
mod stats;

pub use auto::{Auto, Seen};
pub use merge_queue::{Limits, MERGED_MAX, MergeQueue, RunId};
pub use mode::{DataOp, Policy, SchedulerMode, UnknownMode};
pub use probe::Probe;
pub use queue_policy::QueuePolicy;
pub use shared_policy::{OnSwitch, SharedPolicy};
pub use stats::SchedulerStats;
