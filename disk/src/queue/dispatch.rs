//! What a step of a request needs: its slot, the way to the disk, the engine.

use super::issue::Issuer;
use super::slots::Slots;
use ringway_aio::Engine;
use ringway_core::Status;

/// A queue's slots and issuer, with the engine at hand.
#[derive(Debug)]
pub(crate) struct Dispatch<'a, C, E> {
    pub(crate) slots: &'a mut Slots<C>,
    pub(crate) issuer: &'a mut Issuer,
    pub(crate) engine: &'a mut E,
}

impl<C, E: Engine> Dispatch<'_, C, E> {
    /// Hands what a slot is to do now to the engine.
    pub(crate) fn issue(&mut self, tag: u16) {
        self.issuer.issue(self.engine, self.slots, tag);
    }

    /// Answers a request without an operation of the engine.
    #[cold]
    pub(crate) fn answer(&mut self, tag: u16, status: Status) {
        let finished = self.slots.retire(tag, status);
        self.slots.push_late(finished);
    }

    /// The disk failed a request, where it has got to.
    #[cold]
    pub(crate) fn note_failure(&self, tag: u16, errno: Option<i32>) {
        let slot = self.slots.get(tag);
        let offset = slot.request.range.offset() + slot.done;
        self.issuer.disk.incidents.failed(slot.request.op, errno, offset);
    }
}
