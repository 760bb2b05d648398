//! The way of requests that do not go straight into the ring: plugged, merged, probed.
//!
//! ```text
//! read, flush… ─► fresh ─┄ submit ┄─► plug ─┄ held ┄─► one chain for a run ───────► take_back
//!                             └──────────────────────► one chain for a request ─┘      │
//! pop ◄─── late ◄─── a completion for each request ◄──────────────────────────────────┘
//! ```
//!
//! A queue whose path is bio knows none of this: its requests go into the ring at once, as in
//! `queue.rs`. The ways in are marked cold, so that the straight way is laid out first. What the paths do is in the crate `ringway-path`; here it meets rings and buffers.

use super::{BlkQueue, reject};
use crate::completion::{Completion, Data};
use crate::error::{Error, Refusal, Rejected};
use ringway_core::{ByteRange, Status, TagList};
use ringway_path::{
    DataOp, Follower, Limits, MERGED_MAX, Path, PathBoard, PathKind, PathStats, RequestPath, RunId,
};
use ringway_ring::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, status_of};
use ringway_ring::virtqueue::{NoRoom, Used};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Turns between looks at the clock: a turn takes microseconds, a look every 20 ms is meant.
pub(super) const TURNS: u8 = 64;

/// The path of one device, shared by its queues.
#[derive(Debug)]
pub(crate) struct Board {
    path: PathBoard,
    /// When its clock began.
    begun: Instant,
}

impl Board {
    pub(crate) fn new(kind: PathKind) -> Self {
        Self { path: PathBoard::new(kind), begun: Instant::now() }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What was asked for, in words of the wire.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ask {
    /// `VIRTIO_BLK_T_…`
    pub(super) kind: u32,
    /// First byte on the disk.
    pub(super) offset: u64,
    /// Bytes of the disk.
    pub(super) len: u64,
    /// Of a discard or write-zeroes.
    pub(super) flags: Option<u32>,
}

impl Ask {
    /// What the header says; 0 where it means nothing (VIRTIO 1.2 §5.2.6).
    fn sector(&self) -> u64 {
        if self.data_op().is_some() { self.offset / 512 } else { 0 }
    }

    fn data_op(&self) -> Option<DataOp> {
        match self.kind {
            VIRTIO_BLK_T_IN => Some(DataOp::Read),
            VIRTIO_BLK_T_OUT => Some(DataOp::Write),
            _ => None,
        }
    }
}

/// Room for a request.
#[derive(Debug)]
struct Slot<C> {
    ask: Ask,
    ctx: Option<C>,
    data: Data,
    /// When it was sent, in nanoseconds, if that is to be known.
    probed: Option<u64>,
}

/// What becomes one chain.
#[derive(Clone, Copy, Debug)]
enum Parcel {
    /// The request of a slot.
    Alone(u16),
    /// All requests of a run.
    Run(RunId),
}

/// What a queue needs for any path but bio by order.
///
/// # Invariants
/// 1. A slot that is acquired in `tags` has its request: in `fresh`, held by `requests`, or in a
///    [`Parcel`] in `out` or in `chains`, and in one of them only.
/// 2. `chains[head]` is `Some` exactly for the chains in flight that `flights` does not know. There
///    are `sent` of them, `merged` of which, and of the parcels in `out`, are runs of several.
#[derive(Debug)]
pub(super) struct Way<C> {
    board: Arc<Board>,
    follower: Follower,
    requests: RequestPath,
    slots: Box<[Slot<C>]>,
    tags: TagList,
    /// Queued since the last [`BlkQueue::submit`], in order.
    fresh: Vec<u16>,
    /// Parcels that the ring had no room for, in order.
    out: VecDeque<Parcel>,
    chains: Box<[Option<Parcel>]>,
    sent: u16,
    merged: u16,
    /// No run on its way has more requests.
    longest: u16,
    /// Completions that [`BlkQueue::pop`] hands out next.
    late: VecDeque<Completion<C>>,
    turns: u8,
    /// Bytes of all requests that were queued.
    bytes: u64,
}

impl<C> Way<C> {
    /// Allocates; call at start only. `segments`: the most buffers of a merged request.
    pub(super) fn new(board: Arc<Board>, depth: u16, segments: usize) -> Option<Box<Self>> {
        if board.path.kind() == PathKind::Bio {
            return None;
        }
        let count = usize::from(depth);
        let limits = Limits { max_bytes: MERGED_MAX, max_segments: segments };
        let slot = || Slot { ask: Ask::default(), ctx: None, data: Data::None, probed: None };
        Some(Box::new(Self {
            follower: Follower::new(&board.path),
            requests: RequestPath::new(depth, limits),
            slots: (0..depth).map(|_| slot()).collect(),
            tags: TagList::new(depth),
            fresh: Vec::with_capacity(count),
            out: VecDeque::with_capacity(count),
            chains: vec![None; count].into(),
            sent: 0,
            merged: 0,
            longest: 1,
            // Those of all slots, and of all chains that went straight before the path changed.
            late: VecDeque::with_capacity(2 * count),
            turns: 0,
            bytes: 0,
            board,
        }))
    }

    /// True if new requests are plugged.
    pub(super) fn plugs(&self) -> bool {
        self.follower.plugs()
    }

    /// Requests queued and not popped, `chains` of the ring included.
    pub(super) fn in_flight(&self, chains: u16) -> u16 {
        let straight = usize::from(chains - self.sent);
        u16::try_from(straight + self.taken()).unwrap_or(u16::MAX)
    }

    /// Slots that are in use, and completions that take up the room of one.
    fn taken(&self) -> usize {
        self.tags.in_use() + self.late.len()
    }

    pub(super) fn stats(&self) -> PathStats {
        self.requests.stats()
    }

    pub(super) fn path(&self) -> (Path, u64) {
        (self.board.path.chosen(), self.board.path.switches())
    }

    /// True if requests wait for something before they are sent, [`BlkQueue::submit`] not counted.
    fn waits(&self) -> bool {
        self.requests.holds() || !self.out.is_empty()
    }

    /// True if each chain is one request, and brings one completion.
    pub(super) fn is_one_by_one(&self) -> bool {
        self.merged == 0 && self.late.is_empty() && !self.waits()
    }

    /// How many chains have to come back before there can be `count` completions.
    pub(super) fn chains_for(&self, count: usize) -> u16 {
        if self.waits() {
            // What comes back makes room for what waits.
            return 1;
        }
        let chains = count.saturating_sub(self.late.len()).div_ceil(self.longest.into());
        u16::try_from(chains).unwrap_or(u16::MAX)
    }

    /// How long what is held may wait at most, unless something has to come back first anyway.
    fn wake_in(&self) -> Option<Duration> {
        if !self.out.is_empty() {
            return None;
        }
        let at = self.requests.wake_at()?;
        Some(Duration::from_nanos(at.saturating_sub(self.board.now())))
    }

    /// What was submitted is plugged, or goes as it is.
    fn plug_fresh(&mut self, in_flight: usize) {
        let Self { fresh, follower, requests, slots, out, board, merged, longest, .. } = self;
        let now = if follower.plugs() || follower.probes() { board.now() } else { 0 };
        for (behind, tag) in fresh.drain(..).enumerate() {
            let slot = &mut slots[usize::from(tag)];
            if let Some((op, range)) = slot.ask.data_op().zip(range_of(&slot.ask)) {
                if follower.plugs() {
                    requests.plug(tag, op, range, slot.data.count(), now);
                    continue;
                }
                if follower.probes() {
                    follower.started(op, range, in_flight + behind);
                    slot.probed = Some(now);
                }
            } else if slot.ask.kind != VIRTIO_BLK_T_GET_ID {
                // It overtakes nothing, and nothing is merged across it.
                while let Some(run) = requests.next_of_all() {
                    (*merged, *longest) = with(requests, run, *merged, *longest);
                    out.push_back(Parcel::Run(run));
                }
            }
            out.push_back(Parcel::Alone(tag));
        }
    }

    /// The next parcel that may go by what is held.
    fn next_parcel(&mut self) -> Option<Parcel> {
        if !self.requests.holds() {
            return None;
        }
        let run = if self.follower.plugs() {
            self.requests.next(self.board.now())?
        } else {
            // The path is bio again: nothing has to wait any more.
            self.requests.next_of_all()?
        };
        (self.merged, self.longest) = with(&self.requests, run, self.merged, self.longest);
        Some(Parcel::Run(run))
    }

    /// A request is done: its slot is free, its completion waits.
    fn complete(&mut self, tag: u16, status: Status, used_len: u32) {
        let slot = &mut self.slots[usize::from(tag)];
        let ctx = slot.ctx.take().expect("invariant 1: a request in flight has its context");
        let data = std::mem::take(&mut slot.data);
        if let Some(sent) = slot.probed.take() {
            self.follower.finished(self.board.now().saturating_sub(sent));
        }
        self.tags.release(tag);
        self.late.push_back(Completion { ctx, status, used_len, data });
    }

    /// A merged request is done: each of its requests, or none if it failed; then they go again, one
    /// by one, so that only those fail that have to.
    fn end_run(&mut self, run: RunId, status: Status, used_len: u32) {
        let first = self.requests.first(run);
        let mut next = self.requests.after(first);
        self.requests.done(run);
        if next.is_none() {
            return self.complete(first, status, used_len);
        }
        self.merged -= 1;
        if self.merged == 0 {
            self.longest = 1;
        }
        if status != Status::Ok {
            self.requests.was_split();
        }
        // The status byte is not data.
        let mut left = used_len.saturating_sub(1);
        let mut slot = Some(first);
        while let Some(tag) = slot {
            if status == Status::Ok {
                let len = self.slots[usize::from(tag)].ask.len;
                let share = left.min(u32::try_from(len).unwrap_or(u32::MAX));
                left -= share;
                self.complete(tag, status, share + 1);
            } else {
                self.out.push_back(Parcel::Alone(tag));
            }
            slot = next;
            next = slot.and_then(|slot| self.requests.after(slot));
        }
    }

    /// Gives up the buffers that the server may still write to; all contexts come back.
    pub(super) fn give_up(&mut self) -> impl Iterator<Item = C> + '_ {
        let Self { chains, slots, requests, late, .. } = self;
        for parcel in chains.iter_mut().filter_map(Option::take) {
            match parcel {
                Parcel::Alone(tag) => slots[usize::from(tag)].abandon(),
                Parcel::Run(run) => {
                    requests.slots(run).for_each(|tag| slots[usize::from(tag)].abandon());
                }
            }
        }
        let late = late.drain(..).map(|done| done.ctx);
        slots.iter_mut().filter_map(|slot| slot.ctx.take()).chain(late)
    }
}

impl<C> Slot<C> {
    fn abandon(&mut self) {
        std::mem::take(&mut self.data).abandon();
    }
}

/// `merged` and `longest` once `run` is on its way as well.
fn with(requests: &RequestPath, run: RunId, merged: u16, longest: u16) -> (u16, u16) {
    let count = u16::try_from(requests.slots(run).count()).unwrap_or(u16::MAX);
    (merged + u16::from(count > 1), longest.max(count))
}

/// Where a request lies; its bounds were judged when it was queued.
fn range_of(ask: &Ask) -> Option<ByteRange> {
    ByteRange::new(ask.offset, ask.len)
}

impl<C> BlkQueue<C> {
    /// Takes a request that does not go straight into the ring. It was judged.
    #[inline(never)]
    pub(super) fn start_other(&mut self, ask: Ask, data: Data, ctx: C) -> Result<(), Rejected<C>> {
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
    pub(super) fn count(&mut self, head: u16) {
        if let (Some(way), Some(flight)) = (&mut self.way, &self.flights[usize::from(head)]) {
            way.bytes += flight.data.bytes();
        }
    }

    /// [`BlkQueue::submit`] for all queues but those that are sound and have bio by order.
    #[cold]
    pub(super) fn submit_other(&mut self) -> Result<(), Error> {
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
    pub(super) fn pop_other(&mut self) -> Result<Option<Completion<C>>, Error> {
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
    pub(super) fn go_on(&mut self) {
        if self.fault.is_none() && self.way.as_ref().is_some_and(|way| way.waits()) {
            self.send_held();
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
            if let Some(way) = self.way.as_mut() {
                way.late.push_back(done);
            }
        }
        Ok(())
    }

    /// Completions that came back along with others and were not popped yet.
    pub(super) fn late(&self) -> usize {
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
    pub(super) fn turn(&mut self) {
        let Some(way) = self.way.as_mut().filter(|way| way.follower.adapts()) else { return };
        way.turns = way.turns.wrapping_add(1);
        if way.turns.is_multiple_of(TURNS) {
            self.look();
        }
    }

    /// The next turn looks at the clock: a while has passed.
    pub(super) fn look_soon(&mut self) {
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

#[cfg(test)]
mod tests;
