//! What a worker does with requests of a queue that are held.

use super::DiskQueue;
use ringway_aio::Engine;
use ringway_core::Request;
use ringway_core::mem::HostRange;

impl<C> DiskQueue<C> {
    /// Requests that are held because the disk has failed them: in flight, with nothing under way.
    /// Their guest waits for them ([`ErrorPolicy`](crate::ErrorPolicy)).
    #[inline]
    #[must_use]
    pub fn held(&self) -> usize {
        self.slow.held.parked.len()
    }

    /// Does what is due with held requests: reports those that have been held for too long, tries
    /// those again for which there was no space. Call it when [`DiskQueue::wake_in`] is over, and now
    /// and then while [`DiskQueue::held`] is not 0.
    #[cold]
    pub fn tend_held<E: Engine>(&mut self, engine: &mut E) {
        let (mut owner, _) = self.owner(engine);
        owner.slow.tend_held(&mut owner.dispatch);
    }

    /// Tries all held requests again, in their order; how many. Those that fail once more are held
    /// again.
    #[cold]
    pub fn try_held<E: Engine>(&mut self, engine: &mut E) -> usize {
        let (mut owner, _) = self.owner(engine);
        owner.slow.try_held(&mut owner.dispatch, |_| true)
    }

    /// Has held requests fail of which `which` says so; how many. The answers are late ones
    /// ([`DiskQueue::take_late`]).
    #[cold]
    pub fn fail_held<E: Engine>(
        &mut self,
        engine: &mut E,
        which: impl Fn(&Request, &C) -> bool,
    ) -> usize {
        let (mut owner, _) = self.owner(engine);
        owner.slow.fail_held(&mut owner.dispatch, which)
    }

    /// Has held requests fail whose data lies in one of these ranges of memory, or whose context
    /// says so.
    #[cold]
    pub fn fail_held_in<E: Engine>(
        &mut self,
        engine: &mut E,
        ranges: &[HostRange],
        by: impl Fn(&C) -> bool,
    ) -> usize {
        self.fail_held(engine, |request, context| {
            by(context) || super::slots::touches(&request.segments, ranges)
        })
    }

    /// From now on nothing is held: what is tried once more, and what fails is reported.
    #[cold]
    pub fn hold_no_more<E: Engine>(&mut self, engine: &mut E) {
        self.slow.held.closed = true;
        self.try_held(engine);
    }

    /// Drops what waits: requests that are held, or that wait for pages or for a lock. Nothing is held from now
    /// on. They get answers ([`DiskQueue::take_late`]), which nobody waits for.
    #[cold]
    pub fn drop_waiting<E: Engine>(&mut self, engine: &mut E) {
        self.slow.held.closed = true;
        let (mut owner, _) = self.owner(engine);
        owner.slow.drop_waiting(&mut owner.dispatch);
    }

    /// Gives back the contexts of all held requests, oldest first, for whoever serves the guest next.
    /// Nobody answers them here. Call it before the queue is dropped.
    #[cold]
    pub fn leave_held(&mut self, mut leave: impl FnMut(C)) {
        while let Some(tag) = self.slow.held.parked.pop_front() {
            let (slot, slow) = self.slots.both(tag);
            if let Some(turn) = slow.late.take() {
                self.issuer.disk.end_late(&turn);
            }
            if let Some(held) = slow.held.take() {
                let what = (slot.request.op, slot.request.range);
                self.issuer.disk.leave_held(held.errno, what, held.since_ns);
            }
            if let Some(context) = slot.context.take() {
                leave(context);
            }
            self.slots.free(tag);
        }
    }
}
