//! How requests travel from a queue to its disk.
//!
//! Floor 1a of the house. Three ways, after origin O3:
//!
//! - [`bio`]: straight through, each request by itself;
//! - [`request`]: plugged, sorted by sector, neighbours merged, sent through a window;
//! - [`auto`]: whichever of the two carries more, found by trying.
//!
//! Pure logic: no system call, no clock, no guest memory. Times are passed in, in nanoseconds since
//! any moment that stays the same. All memory is taken at start.

pub mod auto;
pub mod bio;
mod kind;
pub mod request;
mod stats;

pub use auto::{Auto, Seen};
pub use bio::Probe;
pub use kind::{Path, PathKind, UnknownPath};
pub use request::{Limits, RequestPath, RunId};
pub use stats::PathStats;
