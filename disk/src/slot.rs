//! The room kept for a request: what every request needs, and what only rare ones do.

use crate::overdue::Mark;
use ringway_aio::IoOp;
use ringway_core::mem::{PoolPages, Segments};
use ringway_core::{ByteRange, Request};
use ringway_scheduler::RunId;

/// The room kept for one request.
///
/// # Invariants
/// 1. While its tag is acquired and `context` is `Some`, the request's segments belong to the slot
///    and, if an operation is queued, to the engine.
#[derive(Debug)]
pub(crate) struct Slot<C> {
    pub(crate) request: Request,
    pub(crate) context: Option<C>,
    pub(crate) stage: Stage,
    /// Bytes of the request's range that are done.
    pub(crate) done: u64,
}

impl<C> Slot<C> {
    pub(crate) fn new(request: Request) -> Self {
        Self { request, context: None, stage: Stage::Whole, done: 0 }
    }
}

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The whole request is one operation on the guest's memory.
    Whole,
    /// As `Whole`, and timed.
    Probe,
    /// As `Whole`, and met by a look for overdue requests.
    Watched,
    /// The whole request is held, or goes along in a merged operation.
    Run,
    /// A part of the request, on the guest's memory.
    Part,
    /// A part of a read, into bounce pages.
    BounceRead,
    /// A part of a write or of zeroing, from bounce pages.
    BounceWrite,
    /// The blocks around an unaligned write are read into bounce pages.
    ModifyRead,
    /// A hole is punched, a range zeroed or discarded.
    Erase,
    /// What was done is made durable.
    Sync,
}

impl Stage {
    /// The operation is the request itself.
    #[inline]
    pub(crate) const fn is_request(self) -> bool {
        matches!(self, Self::Whole | Self::Probe | Self::Watched)
    }
}

/// The part of a slot that only rare requests use.
#[derive(Debug)]
pub(crate) struct Cold {
    /// The operation in flight, unless the stage says that it is the request.
    pub(crate) op: IoOp,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) part: Segments,
    /// Bytes of the request that the operation in flight carries out.
    pub(crate) piece: u64,
    pub(crate) pages: Option<PoolPages>,
    pub(crate) lock: Option<ByteRange>,
    pub(crate) retries: u8,
    /// The guest's memory must not be given to the file.
    pub(crate) bounce: bool,
    pub(crate) counted: bool,
    /// This is the one sync of a cached disk that is under way.
    pub(crate) syncing: bool,
    /// The run whose operation is in flight in this slot, its first one.
    pub(crate) run: Option<RunId>,
    /// When a timed operation began, in nanoseconds of the disk's clock.
    pub(crate) probed: u64,
    /// Since when it has been seen in flight. Means nothing at [`Stage::Whole`].
    pub(crate) mark: Mark,
}

impl Cold {
    pub(crate) fn new(part: Segments) -> Self {
        Self {
            op: IoOp::Sync,
            offset: 0,
            len: 0,
            part,
            piece: 0,
            pages: None,
            lock: None,
            retries: 0,
            bounce: false,
            counted: false,
            syncing: false,
            run: None,
            probed: 0,
            mark: Mark::default(),
        }
    }
}
