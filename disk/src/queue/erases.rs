//! Erasures of a queue whose disk takes few at a time. What is done with them: `slow_path/erase.rs`.

use crate::disk::Disk;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

/// Discards and zeroings of a disk that its file is asked for at a time.
const ERASES_MAX: u32 = 4;

impl Disk {
    pub(crate) fn begin_erase(&self) -> bool {
        let one_more = |erases| (erases < ERASES_MAX).then_some(erases + 1);
        self.erases.fetch_update(SeqCst, SeqCst, one_more).is_ok()
    }

    pub(crate) fn end_erases(&self, count: u32) {
        self.erases.fetch_sub(count, SeqCst);
        self.turn.wake();
    }
}

/// Those of a queue.
///
/// # Invariants
/// 1. `waiting` holds tags of slots in flight whose operation is ready and not with the engine.
#[derive(Debug)]
pub(crate) struct Erases {
    pub(crate) waiting: VecDeque<u16>,
    /// With the engine, or in its backlog.
    pub(crate) under_way: u32,
}

impl Erases {
    /// For a queue of `depth` slots. Allocates; call at start only.
    pub(crate) fn new(depth: u16) -> Self {
        Self { waiting: VecDeque::with_capacity(depth.into()), under_way: 0 }
    }

    /// True if some wait until others have ended.
    #[inline]
    pub(crate) fn has_some(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Nobody will hear how those end that are under way.
    pub(crate) fn abandon(&mut self, disk: &Disk) {
        disk.end_erases(std::mem::take(&mut self.under_way));
    }
}
