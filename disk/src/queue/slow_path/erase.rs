//! Erasing by the file itself: few operations of a disk at a time, whatever its queues. A file system may take long for
//! each, and they go to threads that all disks share.

use super::SlowPath;
use crate::queue::dispatch::Dispatch;
use ringway_aio::Engine;
use ringway_core::Status;

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
