//! The slow path of a queue: requests, submissions and completions that the scheduler has to know of.

use super::merge::MergeState;
use super::merge::owner::RingSide;
use super::wire::WireRequest;
use crate::completion::{Completion, Data};
use crate::error::{Error, Refusal};
use crate::queue::BlkQueue;
use crate::rejected::{Rejected, reject};
use ringway_ring::virtio_blk::status_of;
use ringway_ring::virtqueue::Used;
use std::time::Duration;

impl<C> BlkQueue<C> {
    /// Takes a request that does not take the fast path into the ring. It was judged.
    #[inline(never)]
    pub(super) fn start_slow(
        &mut self,
        wire: WireRequest,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let merge = self.merge.as_mut().expect("only a queue that merges has a slow path");
        if let Err((data, ctx)) = merge.push(wire, data, ctx) {
            return reject(Refusal::Full, ctx, data);
        }
        self.stats.queued += 1;
        Ok(())
    }

    /// Counts a request on the fast path, for the choice of the policy.
    #[cold]
    pub(super) fn count(&mut self, head: u16) {
        if let (Some(merge), Some(flight)) = (&mut self.merge, &self.flights[usize::from(head)]) {
            merge.count(flight.data.bytes());
        }
    }

    /// [`BlkQueue::submit`] for all queues but those that are sound and never merge.
    #[cold]
    pub(super) fn submit_slow(&mut self) -> Result<(), Error> {
        if let Some(fault) = self.fault {
            return Err(fault.into());
        }
        self.turn();
        let in_flight = usize::from(self.in_flight());
        self.with_merge(|merge, side| merge.admit_fresh(side, in_flight));
        self.with_merge(MergeState::dispatch);
        self.show();
        self.choose_path();
        Ok(())
    }

    /// What the scheduler holds, with the ring at hand.
    fn with_merge(&mut self, act: impl FnOnce(&mut MergeState<C>, RingSide<'_>)) {
        let Self { merge: Some(merge), ring, headers, scratch, guest_delta, .. } = self else {
            return;
        };
        act(merge, RingSide { ring, headers, scratch, guest_delta: *guest_delta });
    }

    /// Which path new requests take, and completions.
    fn choose_path(&mut self) {
        let Some(merge) = self.merge.as_ref() else { return };
        let fast = merge.allows_fast_path();
        self.fast_max = if fast { self.limits.size_max } else { 0 };
        self.slow_pop = !fast || merge.has_completions();
    }

    /// Takes back a chain that the fast path does not know.
    fn take_back(&mut self, used: Used) {
        // SAFETY: the status byte of the head's slot, in memory that the queue keeps. Volatile: the
        // device wrote it.
        let status = status_of(unsafe { self.headers.status_at(used.head).read_volatile() });
        self.with_merge(|merge, side| merge.take_back(side, used.head, status, used.len));
    }

    /// [`BlkQueue::pop`] while not all that comes back took the fast path.
    #[cold]
    pub(super) fn pop_slow(&mut self) -> Result<Option<Completion<C>>, Error> {
        loop {
            if let Some(done) = self.merge.as_mut().and_then(|merge| merge.pop_late()) {
                return Ok(Some(done));
            }
            let Some(used) = self.ring.pop_used().map_err(|fault| self.broken(fault))? else {
                self.turn();
                // What came back has made room.
                self.dispatch_waiting();
                return Ok(None);
            };
            if self.flights[usize::from(used.head)].is_some() {
                return Ok(Some(self.finish(used)));
            }
            self.take_back(used);
        }
    }

    /// Sends what waited and may go now.
    pub(super) fn dispatch_waiting(&mut self) {
        if self.fault.is_none() && self.merge.as_ref().is_some_and(|merge| merge.waits()) {
            self.with_merge(MergeState::dispatch);
            self.show();
        }
    }

    /// Takes all that came back off the ring.
    pub(super) fn collect(&mut self) -> Result<(), Error> {
        while let Some(used) = self.ring.pop_used().map_err(|fault| self.broken(fault))? {
            if self.flights[usize::from(used.head)].is_none() {
                self.take_back(used);
                continue;
            }
            let done = self.finish(used);
            if let Some(merge) = self.merge.as_mut() {
                merge.push_late(done);
            }
        }
        Ok(())
    }

    /// Completions that came back along with others and were not popped yet.
    pub(super) fn late(&self) -> usize {
        self.merge.as_ref().map_or(0, |merge| merge.late())
    }

    /// For loops that also wait for other things: when to call [`BlkQueue::submit`] or
    /// [`BlkQueue::pop`] again even if the server does not call. `None` in the mode bio, and if
    /// nothing is held back.
    #[must_use]
    pub fn wake_in(&self) -> Option<Duration> {
        self.merge.as_ref().filter(|merge| merge.waits()).and_then(|merge| merge.wake_in())
    }

    /// Follows the policy of the device now and then, if it may change.
    #[cold]
    pub(super) fn turn(&mut self) {
        if self.merge.as_mut().is_some_and(|merge| merge.turn()) {
            self.follow_policy();
        }
    }

    /// The next turn follows the policy: a while has passed.
    pub(super) fn follow_soon(&mut self) {
        if let Some(merge) = self.merge.as_mut() {
            merge.follow_soon();
        }
    }

    #[cold]
    fn follow_policy(&mut self) {
        let done = self.stats.queued - u64::from(self.in_flight());
        let Self { merge: Some(merge), flights, .. } = self else { return };
        merge.follow(done, || flights.iter().flatten().map(|flight| flight.data.bytes()).sum());
    }
}
