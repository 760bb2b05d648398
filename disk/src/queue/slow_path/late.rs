//! Requests that wait for late writes ([`crate::late`]): in their slots, where nothing of them is under way.

use super::SlowPath;
use crate::locks::Turn;
use crate::queue::dispatch::Dispatch;
use crate::queue::slots::{Sighting, Slots, Stage};
use ringway_aio::Engine;

impl SlowPath {
    /// A request waits for a late write.
    pub(crate) fn await_late<C>(&mut self, slots: &mut Slots<C>, tag: u16, turn: Turn) {
        let (slot, slow) = slots.both(tag);
        (slot.stage, slow.seen, slow.late) = (Stage::Late, Sighting::default(), Some(turn));
        self.behind_late.push(tag);
    }

    /// Begins those that have waited for late writes and have none before them any more: `budget` of them look,
    /// once for each change of the list, in their order.
    #[inline]
    pub(super) fn retry_late<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, budget: usize) {
        if self.behind_late.is_empty() {
            return;
        }
        let to_look = self.behind_late.due_since(d.issuer.disk.late.changes());
        for _ in 0..to_look.min(budget) {
            let Some(tag) = self.behind_late.pop() else { break };
            self.end_wait_for_late(d, tag);
        }
    }

    #[cold]
    fn end_wait_for_late<C, E: Engine>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        if slow.late.is_some_and(|turn| disk.has_to_wait(&turn)) {
            self.behind_late.push(tag);
            return;
        }
        // One that was held begins anew.
        (slot.stage, slot.done) = (Stage::Part, 0);
        // The disk may have another size by now.
        if let Err(status) = disk.authorise(&slot.request) {
            return self.answer(d, tag, status);
        }
        go_to_storage(d, tag);
        self.start(d, tag);
    }

    /// True if all that waits does so for late writes, and none of it has to look at them now.
    pub(crate) fn awaits_late_only(&self) -> bool {
        self.waiting.is_empty() && !self.behind_late.has_to_look()
    }
}

/// A request whose turn it is may touch more than was asked for from now on.
pub(super) fn go_to_storage<C, E: Engine>(d: &mut Dispatch<'_, C, E>, tag: u16) {
    let (slot, slow) = d.slots.both(tag);
    if let Some(turn) = &mut slow.late {
        d.issuer.disk.change_late(turn, d.issuer.touched(slot.request.range));
    }
}
