//! How requests that do not go straight get into the ring and back.

use super::{Ask, Parcel, Slot, TURNS};
use crate::completion::{Completion, Data};
use crate::error::{Error, Refusal, Rejected};
use crate::queue::{BlkQueue, reject};
use ringway_ring::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, status_of};
use ringway_ring::virtqueue::{NoRoom, Used};
use std::time::Duration;

impl<C> BlkQueue<C> {
    /// Takes a request that does not go straight into the ring. It was judged.
    #[inline(never)]
    pub(in crate::queue) fn start_other(
        &mut self,
        ask: Ask,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let way = self.way.as_mut().expect("requests go aside only if there is a way");
        if way.taken() >= way.slots.len() {
            return reject(Refusal::Full, ctx, data);
        }
        let tag = way.tags.acquire().expect("as many tags as slots");
        self.stats.queued += 1;
        way.bytes += data.bytes();
        way.slots[usize::from(tag)] = Slot { ask, ctx: Some(ctx), data, probed: None };
        way.fresh.push(tag);
        Ok(())
    }

    /// Counts a request that goes straight, for the choice of the path.
    #[cold]
    pub(in crate::queue) fn count(&mut self, head: u16) {
        if let (Some(way), Some(flight)) = (&mut self.way, &self.flights[usize::from(head)]) {
            way.bytes += flight.data.bytes();
        }
    }

    /// [`BlkQueue::submit`] for all queues but those that are sound and have bio by order.
    #[cold]
    pub(in crate::queue) fn submit_other(&mut self) -> Result<(), Error> {
        if let Some(fault) = self.fault {
            return Err(fault.into());
        }
        self.turn();
        let in_flight = usize::from(self.in_flight());
        if let Some(way) = self.way.as_mut() {
            let waiting = way.fresh.len() + way.late.len();
            way.plug_fresh(in_flight.saturating_sub(waiting));
        }
        self.send_held();
        self.show();
        self.choose_straight();
        Ok(())
    }

    /// Requests go straight while the path is bio and nobody looks at them, unless they would overtake
    /// those that wait.
    fn choose_straight(&mut self) {
        let Some(way) = self.way.as_ref() else { return };
        let straight = !way.follower.plugs() && !way.follower.probes() && !way.waits();
        self.plain_max = if straight { self.limits.size_max } else { 0 };
        self.aside = !straight || way.sent > 0 || !way.late.is_empty();
    }

    /// Puts into the ring what may go and fits.
    fn send_held(&mut self) {
        loop {
            let Some(way) = self.way.as_mut() else { return };
            let Some(parcel) = way.out.pop_front().or_else(|| way.next_parcel()) else { return };
            if let Err(why) = self.send(parcel) {
                debug_assert_eq!(why, NoRoom::Full, "a request that was judged fits in the ring");
                if let Some(way) = self.way.as_mut() {
                    way.out.push_front(parcel);
                }
                return;
            }
        }
    }

    /// Makes a chain of a parcel.
    fn send(&mut self, parcel: Parcel) -> Result<(), NoRoom> {
        let Self { way: Some(way), ring, slots, scratch, guest_delta, .. } = self else {
            return Ok(());
        };
        let head = ring.next_head().ok_or(NoRoom::Full)?;
        let (ask, mut tag) = match parcel {
            Parcel::Alone(tag) => (way.slots[usize::from(tag)].ask, Some(tag)),
            Parcel::Run(run) => {
                let (first, range) = (way.requests.first(run), way.requests.range(run));
                let kind = way.slots[usize::from(first)].ask.kind;
                (Ask { kind, offset: range.offset(), len: range.len(), flags: None }, Some(first))
            }
        };
        let (header, status) = slots.fill(head, ask.kind, ask.sector());
        scratch.clear();
        scratch.push(header);
        if let Some(flags) = ask.flags {
            // Judged when it was queued.
            let sectors = u32::try_from(ask.len / 512).unwrap_or(u32::MAX);
            scratch.push(slots.fill_erase(head, ask.offset / 512, sectors, flags));
        }
        while let Some(one) = tag {
            // Neighbours on the disk are none in memory: each buffer is a piece of its own.
            let buffers = way.slots[usize::from(one)].data.as_slice();
            scratch.extend(buffers.iter().map(|buffer| buffer.piece(*guest_delta)));
            tag = match parcel {
                Parcel::Alone(_) => None,
                Parcel::Run(_) => way.requests.after(one),
            };
        }
        scratch.push(status);
        let written = matches!(ask.kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_GET_ID);
        let (readable, writable) = scratch.split_at(if written { 1 } else { scratch.len() - 1 });
        let added = ring.add(readable, writable)?;
        debug_assert_eq!(added, head, "the header is where the chain is");
        way.chains[usize::from(head)] = Some(parcel);
        way.sent += 1;
        Ok(())
    }

    /// Takes back a chain that did not go straight.
    fn take_back(&mut self, used: Used) {
        let way = self.way.as_mut().expect("a chain is known to flights or to the way");
        let parcel = way.chains[usize::from(used.head)].take();
        let parcel = parcel.expect("invariant 2: the ring checks heads");
        way.sent -= 1;
        // SAFETY: the status byte of the head's slot, in memory that the queue keeps. Volatile: the
        // device wrote it.
        let status = status_of(unsafe { self.slots.status_at(used.head).read_volatile() });
        match parcel {
            Parcel::Alone(tag) => way.complete(tag, status, used.len),
            Parcel::Run(run) => way.end_run(run, status, used.len),
        }
    }

    /// [`BlkQueue::pop`] while not all that comes back went straight.
    #[cold]
    pub(in crate::queue) fn pop_other(&mut self) -> Result<Option<Completion<C>>, Error> {
        loop {
            if let Some(done) = self.way.as_mut().and_then(|way| way.late.pop_front()) {
                return Ok(Some(done));
            }
            let Some(used) = self.ring.pop_used().map_err(|fault| self.broken(fault))? else {
                self.turn();
                // What came back has made room.
                self.go_on();
                return Ok(None);
            };
            if self.flights[usize::from(used.head)].is_some() {
                return Ok(Some(self.finish(used)));
            }
            self.take_back(used);
        }
    }

    /// Sends what waited and may go now.
    pub(in crate::queue) fn go_on(&mut self) {
        if self.fault.is_none() && self.way.as_ref().is_some_and(|way| way.waits()) {
            self.send_held();
            self.show();
        }
    }

    /// Takes all that came back off the ring.
    pub(in crate::queue) fn collect(&mut self) -> Result<(), Error> {
        while let Some(used) = self.ring.pop_used().map_err(|fault| self.broken(fault))? {
            if self.flights[usize::from(used.head)].is_none() {
                self.take_back(used);
                continue;
            }
            let done = self.finish(used);
            if let Some(way) = self.way.as_mut() {
                way.late.push_back(done);
            }
        }
        Ok(())
    }

    /// Completions that came back along with others and were not popped yet.
    pub(in crate::queue) fn late(&self) -> usize {
        self.way.as_ref().map_or(0, |way| way.late.len())
    }

    /// For loops that also wait for other things: when to call [`BlkQueue::submit`] or
    /// [`BlkQueue::pop`] again even if the server does not call. `None` on the path bio, and if
    /// nothing is held back.
    #[must_use]
    pub fn wake_in(&self) -> Option<Duration> {
        self.way.as_ref().filter(|way| way.waits()).and_then(|way| way.wake_in())
    }

    /// Looks at the clock now and then, if the path may change.
    #[cold]
    pub(in crate::queue) fn turn(&mut self) {
        let Some(way) = self.way.as_mut().filter(|way| way.follower.adapts()) else { return };
        way.turns = way.turns.wrapping_add(1);
        if way.turns.is_multiple_of(TURNS) {
            self.look();
        }
    }

    /// The next turn looks at the clock: a while has passed.
    pub(in crate::queue) fn look_soon(&mut self) {
        if let Some(way) = self.way.as_mut() {
            way.turns = TURNS - 1;
        }
    }

    /// Takes up the path that is chosen now, reports what was seen, begins another probe.
    #[cold]
    fn look(&mut self) {
        let queued = self.stats.queued;
        let in_flight = u64::from(self.in_flight());
        let Some(way) = self.way.as_mut() else { return };
        let now = way.board.now();
        if way.follower.is_due(now) {
            let straight = self.flights.iter().flatten().map(|flight| flight.data.bytes());
            let slots = way.slots.iter().map(|slot| slot.data.bytes());
            let late = way.late.iter().map(|done| done.data.bytes());
            let not_done = straight.chain(slots).chain(late).sum::<u64>();
            let done = (queued - in_flight, way.bytes - not_done);
            way.follower.report(&way.board.path, now, done, way.requests.stats());
        }
        way.follower.follow(&way.board.path);
    }
}
