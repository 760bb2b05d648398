//! The way of requests that do not go straight into the ring: plugged, merged, probed.
//!
//! ```text
//! read, flush… ─► fresh ─┄ submit ┄─► plug ─┄ held ┄─► one chain for a run ───────► take_back
//!                             └──────────────────────► one chain for a request ─┘      │
//! pop ◄─── late ◄─── a completion for each request ◄──────────────────────────────────┘
//! ```
//!
//! A queue whose path is bio knows none of this: its requests go into the ring at once, as in
//! `queue.rs`. The ways in are marked cold, so that the straight way is laid out first. What the paths do is in the
//! crate `ringway-scheduler`; here it meets buffers, and in `way/travel.rs` the ring.

mod travel;

use crate::completion::{Completion, Data};
use ringway_core::{ByteRange, DataOp, Status, TagList};
use ringway_ring::virtio_blk::{VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use ringway_scheduler::{
    Limits, MERGED_MAX, MergeQueue, Policy, QueuePolicy, RunId, SchedulerMode, SchedulerStats,
    SharedPolicy,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Turns between looks at the clock: a turn takes microseconds, a look every 20 ms is meant.
pub(super) const TURNS: u8 = 64;

/// The path of one device, shared by its queues.
#[derive(Debug)]
pub(crate) struct Board {
    path: SharedPolicy,
    /// When its clock began.
    begun: Instant,
}

impl Board {
    pub(crate) fn new(kind: SchedulerMode) -> Self {
        Self { path: SharedPolicy::new(kind), begun: Instant::now() }
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
    follower: QueuePolicy,
    requests: MergeQueue,
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
        if board.path.mode() == SchedulerMode::Bio {
            return None;
        }
        let count = usize::from(depth);
        let limits = Limits { max_bytes: MERGED_MAX, max_segments: segments };
        let slot = || Slot { ask: Ask::default(), ctx: None, data: Data::None, probed: None };
        Some(Box::new(Self {
            follower: QueuePolicy::new(&board.path),
            requests: MergeQueue::new(depth, limits),
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

    pub(super) fn stats(&self) -> SchedulerStats {
        self.requests.stats()
    }

    pub(super) fn path(&self) -> (Policy, u64) {
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
fn with(requests: &MergeQueue, run: RunId, merged: u16, longest: u16) -> (u16, u16) {
    let count = u16::try_from(requests.slots(run).count()).unwrap_or(u16::MAX);
    (merged + u16::from(count > 1), longest.max(count))
}

/// Where a request lies; its bounds were judged when it was queued.
fn range_of(ask: &Ask) -> Option<ByteRange> {
    ByteRange::new(ask.offset, ask.len)
}

#[cfg(test)]
mod tests;
