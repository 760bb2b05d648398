//! How requests travel from a queue to its disk.
//!
//! Floor 1a of the house. Three ways, after origin O3:
//!
//! - [`bio`]: straight through, each request by itself;
//! - [`request`]: plugged, sorted by sector, neighbours merged, sent through a window;
//! - [`auto`]: whichever of the two carries more, found by trying.
//!
//! Both ends of a ring use it: a disk (`ringway-disk`) and a front-end (`ringway-driver`). A queue has
//! a [`RequestPath`] and a [`Follower`]; all queues of a disk have one [`PathBoard`].
//!
//! Pure logic: no system call, no clock, no guest memory. Times are passed in, in nanoseconds since
//! any moment that stays the same. All memory is taken at start.

pub mod auto;
pub mod bio;
mod board;
mod follower;
mod kind;
pub mod request;
mod stats;

pub use auto::{Auto, Seen};
pub use bio::Probe;
pub use board::{OnSwitch, PathBoard};
pub use follower::Follower;
pub use kind::{DataOp, Path, PathKind, UnknownPath};
pub use request::{Limits, MERGED_MAX, RequestPath, RunId};
pub use stats::PathStats;
