//! Requests that wait for late writes ([`crate::late`]): in their slots, where nothing of them has begun.

use super::SlowPath;
use crate::queue::dispatch::{Dispatch, mark_late};
use crate::queue::slots::{Sighting, Slots, Stage};
use ringway_aio::Engine;

impl SlowPath {
    /// A request waits for a late write.
    pub(crate) fn await_late<C>(&mut self, slots: &mut Slots<C>, tag: u16) {
        let (slot, slow) = slots.both(tag);
        slot.stage = Stage::Late;
        slow.seen = Sighting::default();
        self.awaiting_late += 1;
        self.waiting.push_back(tag);
    }

    /// Begins a request that has waited for a late write, if none is in its way.
    #[cold]
    pub(super) fn end_wait_for_late<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        if disk.is_late(d.issuer.touched(slot.request.range)) {
            self.waiting.push_back(tag);
            return;
        }
        self.awaiting_late -= 1;
        slot.stage = Stage::Part;
        // The disk may have another size by now.
        if let Err(status) = disk.authorise(&slot.request) {
            return d.answer(tag, status);
        }
        if self.outlives {
            mark_late(d.issuer, slot, slow);
        }
        self.start(d, tag);
    }

    pub(crate) fn awaits_late_only(&self) -> bool {
        self.waiting.len() == self.awaiting_late
    }
}
