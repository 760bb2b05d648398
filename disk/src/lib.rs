//! An opened disk: probing, slots, bounds, bounce buffers, durability. Knows no guest.
//!
//! Floor 1c of the house. [`open()`] is the only place that probes the host and makes choices;
//! [`Disk`] is what came of it, shared by all workers; a [`DiskQueue`] is one worker's hand on it. An
//! engine of `ringway-aio` carries out the operations:
//!
//! ```
//! use ringway_aio::{Engine, Reaped, Threads, ThreadsSetup};
//! use ringway_core::mem::{Mapping, Segment};
//! use ringway_core::{ByteRange, Op, Status};
//! use ringway_disk::{CacheMode, DiskQueue, OpenOptions, Source, open};
//! use std::sync::Arc;
//!
//! let folder = tempfile::tempdir()?;
//! let mut options = OpenOptions::new(Source::Path(folder.path().join("disk.raw")));
//! options.create_bytes = Some(1 << 20);
//! options.cache = Some(CacheMode::Writeback);
//! let disk = Arc::new(open(&options)?);
//!
//! let mut engine = Threads::new(ThreadsSetup { depth: 64, threads: 2, cached_inline: false })?;
//! let file = engine.attach(&disk.file())?;
//! let limits = engine.limits().clone();
//! let mut queue = DiskQueue::new(disk, &limits, file, 0, 32)?; // 32 slots
//!
//! let memory = Mapping::anonymous(4096)?;
//! let slot = queue.acquire().ok_or("all slots are taken")?;
//! let request = queue.request_mut(slot);
//! request.op = Op::Read;
//! request.range = ByteRange::new(65536, 4096).ok_or("beyond 64 bits")?;
//! request.segments.clear();
//! request.segments.push(Segment { base: memory.at(0), len: 4096 });
//! // SAFETY: the memory is kept until the answer is there, and nobody else uses it.
//! unsafe { queue.start(&mut engine, slot, "a context") };
//! queue.unplug(&mut engine); // once for all that were started
//!
//! let mut reaped = Reaped::with_capacity(64, 0);
//! let answer = 'answer: loop {
//!     engine.submit()?;
//!     engine.reap(&mut reaped);
//!     for done in reaped.done.drain(..) {
//!         let slot = (done.tag & 0xffff) as u16;
//!         if let Some(answer) = queue.finish(&mut engine, slot, done.result) {
//!             break 'answer answer;
//!         }
//!     }
//!     engine.wait(None)?;
//! };
//! assert_eq!((answer.context, answer.status), ("a context", Status::Ok));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod active;
mod at_limit;
mod choices;
mod clock;
mod commit;
mod custom;
mod disk;
mod durability;
mod error_policy;
mod flatten;
mod held;
mod holding;
mod incidents;
mod late;
mod locks;
mod mapped;
mod memory_file;
mod new_image;
pub mod open;
mod parts;
mod places;
mod queue;
mod resize;
mod snapshot;
mod state;
mod stats;
pub mod storage;
mod unmapped;

pub use choices::{Alignment, CacheMode, EngineKind, OwnEngine, SimModel, UnknownWord};
pub use commit::{LockedBase, NotCommitted, NotLocked};
pub use custom::CustomDisk;
pub use disk::Disk;
pub use error_policy::{ErrorPolicy, OnError};
pub use flatten::{NotFlattened, Replaced};
pub use holding::HeldRequests;
pub use incidents::{Detours, FailedOp, Failures, Incidents, OnIncident};
pub use new_image::{Backing, BackingError, NewFile, is_named_qcow2};
pub use open::{
    Base, BaseExport, ForeignFormat, LockError, NewOverlay, NotWritable, OpenError, OpenOptions,
    OtherKind, OverlayError, Qcow2, Report, Source, lock_image, open, probe, reopen_for_writing,
    unlock_image,
};
pub use parts::Parts;
pub use places::{Places, Share};
pub use queue::{DiskQueue, Finished, Oldest, Overdue, Watcher};
pub use resize::ResizeError;
pub use ringway_image::{ImageClient, read_as_stored};
pub use ringway_scheduler::{OnSwitch, Policy, SchedulerMode, SchedulerStats, SharedPolicy};
pub use snapshot::{Beneath, NewTop, NoSnapshot, OverlayShape, WithoutJournal};
pub use state::{
    STATE_BYTES, STATE_EXPORT_AT, STATE_FILE_BYTES, STATE_FLUSH_FAILED, STATE_FLUSHING, STATE_KEPT,
    STATE_PAUSED,
};
pub use stats::DiskStats;
pub use unmapped::Unmapped;
