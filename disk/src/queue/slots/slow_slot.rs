//! What only requests need that are more than one plain operation.

use crate::locks::Turn;
use crate::queue::held::HeldSlot;
use ringway_aio::IoOp;
use ringway_core::ByteRange;
use ringway_core::mem::{PoolPages, Segments};
use ringway_scheduler::RunId;

/// What only requests need that are more than one plain operation.
#[derive(Debug)]
pub(crate) struct SlowSlot {
    /// The operation in flight, unless the stage says that it is the request.
    pub(crate) op: IoOp,
    /// Where on the disk it is; empty for syncs.
    pub(crate) range: ByteRange,
    /// Where the image's map has that: in which file, and where in it.
    pub(crate) place: Option<(u8, ByteRange)>,
    /// What the image's client has to be told when an operation there is over.
    pub(crate) generation: u8,
    pub(crate) part: Segments,
    /// Bytes of the request that the operation in flight carries out.
    pub(crate) piece: u64,
    pub(crate) pages: Option<PoolPages>,
    pub(crate) lock: Option<ByteRange>,
    pub(crate) retries: u8,
    /// The guest's memory must not be given to the file.
    pub(crate) bounce: bool,
    pub(crate) counted: bool,
    /// The run whose operation is in flight in this slot, its first one.
    pub(crate) run: Option<RunId>,
    /// The disk has failed it, and it is held, or tried again.
    pub(crate) held: Option<HeldSlot>,
    /// Its turn among late writes: it waits for some, or others wait for it.
    pub(crate) late: Option<Turn>,
    /// Since when it has been seen in flight. Means nothing at [`Stage::Whole`].
    pub(crate) seen: Sighting,
}

/// When a request in flight was first seen by a scan, in the time of the caller; and whether it was
/// counted as overdue already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) since_ns: Option<u64>,
    pub(crate) counted: bool,
}

impl SlowSlot {
    pub(super) fn new(part: Segments) -> Self {
        Self {
            op: IoOp::Sync,
            range: ByteRange::default(),
            place: None,
            generation: 0,
            part,
            piece: 0,
            pages: None,
            lock: None,
            retries: 0,
            bounce: false,
            counted: false,
            run: None,
            held: None,
            late: None,
            seen: Sighting::default(),
        }
    }
}
