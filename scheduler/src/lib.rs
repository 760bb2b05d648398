//! An I/O scheduler for block requests: plug, sort, merge, or not, as measured.
//!
//! Floor 1a of the house. Three modes ([`SchedulerMode`]):
//!
//! - `bio`: each request by itself, at once. There is no scheduler at all;
//! - `request`: plugged, sorted by sector, neighbours merged, sent through a window
//!   ([`merge_queue`]);
//! - `auto`: whichever of the two carries more, found by trying ([`auto`]).
//!
//! Both ends of a ring use it: a disk (`ringway-disk`) and a front-end (`ringway-driver`). All
//! queues of a disk have one [`SharedPolicy`]; each has a [`Scheduler`], of which it is the
//! [`Owner`]. A request is known by its slot, a small number:
//!
//! ```
//! use ringway_core::{ByteRange, DataOp};
//! use ringway_scheduler::{Admitted, Kind, Limits, MERGED_MAX, Owner, Run};
//! use ringway_scheduler::{RunId, Scheduler, SchedulerMode, SharedPolicy};
//!
//! /// A queue to a disk: here one that only writes down what it is to do.
//! #[derive(Default)]
//! struct Queue {
//!     sent: Vec<(RunId, u64, u64)>,
//!     done: Vec<u16>,
//! }
//!
//! impl Owner for Queue {
//!     fn now(&self) -> u64 {
//!         0 // nanoseconds
//!     }
//!     fn bytes(&self, _slot: u16) -> u64 {
//!         4096
//!     }
//!     fn start_run(&mut self, run: Run<'_>) -> bool {
//!         self.sent.push((run.id(), run.range().offset(), run.range().len()));
//!         true // there is room for more
//!     }
//!     fn start_alone(&mut self, _slot: u16) {
//!         unreachable!("nothing fails here");
//!     }
//!     fn finish(&mut self, slot: u16) {
//!         self.done.push(slot);
//!     }
//! }
//!
//! let disk = SharedPolicy::new(SchedulerMode::Request);
//! let limits = Limits { max_bytes: MERGED_MAX, max_segments: 128 };
//! let mut scheduler = Scheduler::new(&disk, 64, limits);
//! let mut queue = Queue::default();
//! // A batch of reads of 4 KiB, out of order.
//! for (slot, offset) in [(0, 8192), (1, 0), (2, 4096)] {
//!     let range = ByteRange::new(offset, 4096).ok_or("beyond 64 bits")?;
//!     let kind = Kind::Data { op: DataOp::Read, range, segments: 1 };
//!     assert_eq!(scheduler.admit(&mut queue, slot, kind, 0), Admitted::Held);
//! }
//! scheduler.dispatch(&mut queue);
//! let (run, offset, bytes) = queue.sent[0];
//! assert_eq!((queue.sent.len(), offset, bytes), (1, 0, 12288)); // one operation
//! // The disk has carried out all of it.
//! scheduler.end_run(&mut queue, run, bytes);
//! assert_eq!(queue.done, [1, 2, 0]);
//! # Ok::<(), &str>(())
//! ```
//!
//! Pure logic: no system call, no clock, no guest memory. Times are passed in, in nanoseconds since
//! any moment that stays the same. All memory is taken at start.

pub mod auto;
pub mod merge_queue;
mod mode;
pub mod probe;
mod queue_policy;
mod scheduler;
mod shared_policy;
mod stats;

pub use auto::{Auto, Seen};
pub use merge_queue::{Limits, MERGED_MAX, MergeQueue, RunId};
pub use mode::{Policy, SchedulerMode, UnknownMode};
pub use probe::Probe;
pub use queue_policy::QueuePolicy;
pub use scheduler::{Admitted, Kind, Owner, Run, Scheduler, TURNS};
pub use shared_policy::{OnSwitch, SharedPolicy};
pub use stats::SchedulerStats;
