//! Serves a disk to a guest: rings on one hand, a disk on the other.
//!
//! Floor 2 of the house. `worker.rs` is the loop and the only file that sees both a ring and a
//! disk; `vhost_user/` is the control plane of that transport.

mod command;
mod export;
mod pinned;
mod polling;
mod pool;
mod queue;
mod ring_bell;
mod stats;
pub mod vhost_user;
mod worker;

pub use command::{Handle, Inbox, LaneId, Stopped, command_channel};
pub use export::{Export, ExportOptions};
pub use polling::Polling;
pub use pool::{Pool, PoolOptions, usable_engines};
pub use queue::{Pop, RequestQueue};
pub use stats::WorkerStats;
pub use worker::Worker;
