//! What a queue has to do with syncs of its disk: who waits for which, and whether the one under way is its own. What is
//! done with them: `slow_path/sync.rs`.

use crate::disk::Disk;
use std::collections::VecDeque;

/// No time at which anything is due.
pub(crate) const NEVER: u64 = u64::MAX;

/// What a queue has to do with syncs of its disk.
///
/// # Invariants
/// 1. `joined` holds tags of slots in flight of which nothing is with the engine, and the syncs that they wait for,
///    in their order.
#[derive(Debug)]
pub(crate) struct Syncs {
    pub(crate) joined: VecDeque<(u16, u64)>,
    /// The slot in which the sync is under way, if this queue has the turn.
    pub(crate) owner: Option<u16>,
    /// When that is begun again, in the disk's time.
    pub(crate) again_ns: u64,
}

impl Syncs {
    /// For a queue of `depth` slots. Allocates; call at start only.
    pub(crate) fn new(depth: u16) -> Self {
        let joined = VecDeque::with_capacity(depth.into());
        Self { joined, owner: None, again_ns: NEVER }
    }

    /// True if some wait for a sync.
    pub(crate) fn waits(&self) -> bool {
        !self.joined.is_empty()
    }

    /// True if `tend_syncs` may have something to do.
    #[inline]
    pub(crate) fn has_some(&self) -> bool {
        !self.joined.is_empty() || self.again_ns != NEVER
    }

    /// When to look at them although nothing rings, in the disk's time.
    pub(crate) fn due_ns(&self) -> u64 {
        self.again_ns
    }

    /// Nobody will hear how the sync ends that this queue has begun, if it has.
    pub(crate) fn abandon(&mut self, disk: &Disk) {
        if self.owner.take().is_some() {
            // If the host tells of a loss, it has told it here.
            disk.flush_has_failed();
            disk.turn.end();
        }
    }
}
