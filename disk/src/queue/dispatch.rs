//! What a step of a request needs: its slot, the way to the disk, the engine.

use super::issue::Issuer;
use super::slots::{Sighting, Slot, Slots, SlowSlot, Stage};
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

    /// A request is over: nobody has to wait for it.
    #[inline]
    pub(crate) fn leave_late(&mut self, tag: u16) {
        let (_, slow) = self.slots.both(tag);
        if let Some(turn) = slow.late.take() {
            self.issuer.disk.end_late(&turn);
        }
    }

    /// The disk failed a request, where it has got to.
    #[cold]
    pub(crate) fn note_failure(&self, tag: u16, errno: Option<i32>) {
        let slot = self.slots.get(tag);
        let offset = slot.request.range.offset() + slot.done;
        self.issuer.disk.incidents.failed(slot.request.op, errno, offset);
    }
}

/// Others wait for this request from now on, if it is a write that storage may have.
#[cold]
pub(crate) fn mark_late<C>(issuer: &Issuer, slot: &mut Slot<C>, slow: &mut SlowSlot) {
    let request = &slot.request;
    // Writes that wait or are held have their turns.
    if !request.op.changes_disk() || request.range.is_empty() || slow.late.is_some() {
        return;
    }
    if slot.stage == Stage::Whole {
        // Its end is to be noticed.
        slot.stage = Stage::Watched;
        slow.seen = Sighting::default();
    }
    slow.late = Some(issuer.disk.begin_late(issuer.touched(request.range)));
}
