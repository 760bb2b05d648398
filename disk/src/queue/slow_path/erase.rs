//! Erasing by the file itself: few operations of a disk at a time, whatever its queues. A file system may take long for
//! each, and they go to threads that all disks share.

use super::SlowPath;
use crate::disk::Disk;
use crate::queue::dispatch::Dispatch;
use ringway_aio::Engine;
use ringway_core::Status;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

/// Discards and zeroings of a disk that its file is asked for at a time.
const ERASES_MAX: u32 = 4;

impl Disk {
    fn begin_erase(&self) -> bool {
        let one_more = |erases| (erases < ERASES_MAX).then_some(erases + 1);
        self.erases.fetch_update(SeqCst, SeqCst, one_more).is_ok()
    }

    fn end_erases(&self, count: u32) {
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
    pub(super) waiting: VecDeque<u16>,
    /// With the engine, or in its backlog.
    under_way: u32,
}

impl Erases {
    /// For a queue of `depth` slots. Allocates; call at start only.
    pub(super) fn new(depth: u16) -> Self {
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

impl SlowPath {
    /// Hands an erasure to the engine that is ready in its slot, behind those that wait.
    pub(super) fn issue_erase<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        self.erases.waiting.push_back(tag);
        self.tend_erases(d);
    }

    /// Begins those that may. Once a turn while some wait.
    pub(crate) fn tend_erases<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        // Before looking: what changes afterwards rings.
        self.note_sleep();
        while let Some(&tag) = self.erases.waiting.front() {
            if !d.issuer.disk.begin_erase() {
                break;
            }
            self.erases.waiting.pop_front();
            self.erases.under_way += 1;
            d.issue(tag);
        }
        self.note_sleep();
    }

    /// One has ended, in whatever way.
    pub(super) fn end_erase<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        self.erases.under_way -= 1;
        d.issuer.disk.end_erases(1);
        self.tend_erases(d);
    }

    /// Nobody waits for those that have not begun.
    pub(super) fn drop_erases<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>) {
        while let Some(tag) = self.erases.waiting.pop_front() {
            self.answer(d, tag, Status::IoError);
        }
    }
}
