//! The requests that do not take the fast path, and how they get into the ring: the front-end as its
//! scheduler sees it.

use crate::completion::{Completion, Data};
use crate::headers::Headers;
use crate::queue::policy::DevicePolicy;
use crate::queue::wire::WireRequest;
use ringway_core::{Status, TagList};
use ringway_ring::virtqueue::{Driver, NoRoom, Piece};
use ringway_scheduler::{Kind, Owner, Run, RunId, Scheduler};
use std::collections::VecDeque;

/// A request that is held, or in a chain that the fast path does not know.
#[derive(Debug)]
pub(super) struct SlowRequest<C> {
    pub(super) wire: WireRequest,
    pub(super) ctx: Option<C>,
    pub(super) data: Data,
}

/// What becomes one chain.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outgoing {
    /// The request of a slot.
    Alone(u16),
    /// All requests of a run.
    Run(RunId),
}

/// The requests of a queue that do not take the fast path.
///
/// # Invariants
/// 1. A slot that is acquired in `tags` has its request: it is fresh, held by the scheduler, or in an
///    [`Outgoing`] in `out` or in `chains`, and in one of them only.
/// 2. `chains[head]` is `Some` exactly for the chains in flight that the fast path does not know.
///    There are `sent` of them, `merged` of which, and of those in `out`, are runs of several.
#[derive(Debug)]
pub(super) struct SlowRequests<C> {
    pub(super) slots: Box<[SlowRequest<C>]>,
    pub(super) tags: TagList,
    /// What the ring had no room for, in order.
    pub(super) out: VecDeque<Outgoing>,
    pub(super) chains: Box<[Option<Outgoing>]>,
    pub(super) sent: u16,
    pub(super) merged: u16,
    /// No run on its way has more requests.
    pub(super) longest: u16,
    /// The most bytes of a piece.
    pub(super) size_max: u32,
    /// Completions that [`BlkQueue::pop`](crate::BlkQueue::pop) hands out next.
    pub(super) late: VecDeque<Completion<C>>,
}

impl<C> SlowRequests<C> {
    /// A request is done: its slot is free, its completion waits.
    pub(super) fn complete(&mut self, tag: u16, status: Status, used_len: u32) {
        let slot = &mut self.slots[usize::from(tag)];
        let ctx = slot.ctx.take().expect("invariant 1: a request in flight has its context");
        let data = std::mem::take(&mut slot.data);
        self.tags.release(tag);
        self.late.push_back(Completion { ctx, status, used_len, data });
    }

    /// What a request is to the scheduler. Its bounds were judged when it was queued.
    pub(super) fn kind(&self, tag: u16) -> Kind {
        let SlowRequest { wire, data, .. } = &self.slots[usize::from(tag)];
        match wire.data_op().zip(wire.range()) {
            Some((op, range)) => Kind::Data { op, range, segments: data.pieces(self.size_max) },
            None if wire.is_barrier() => Kind::Barrier,
            None => Kind::Alone,
        }
    }

    pub(super) fn abandon(&mut self, tag: u16) {
        std::mem::take(&mut self.slots[usize::from(tag)].data).abandon();
    }
}

/// Where chains are made.
#[derive(Debug)]
pub(in crate::queue) struct RingSide<'a> {
    pub(in crate::queue) ring: &'a mut Driver,
    pub(in crate::queue) headers: &'a mut Headers,
    pub(in crate::queue) scratch: &'a mut Vec<Piece>,
    pub(in crate::queue) guest_delta: u64,
}

/// A queue without its scheduler, as that sees it.
pub(super) struct RingOwner<'a, C> {
    pub(super) requests: &'a mut SlowRequests<C>,
    pub(super) side: RingSide<'a>,
    pub(super) policy: &'a DevicePolicy,
    /// Bytes that the device says it wrote to the memory of a run whose end this is.
    pub(super) written: u32,
}

impl<C> Owner for RingOwner<'_, C> {
    fn now(&self) -> u64 {
        self.policy.now()
    }

    fn bytes(&self, slot: u16) -> u64 {
        self.requests.slots[usize::from(slot)].wire.len
    }

    fn start_run(&mut self, run: Run<'_>) -> bool {
        let count = u16::try_from(run.slots().count()).unwrap_or(u16::MAX);
        self.requests.merged += u16::from(count > 1);
        self.requests.longest = self.requests.longest.max(count);
        // Nothing overtakes what waits for room.
        let sent = self.requests.out.is_empty() && self.try_send(run);
        if !sent {
            self.requests.out.push_back(Outgoing::Run(run.id()));
        }
        sent
    }

    fn start_alone(&mut self, slot: u16) {
        self.requests.out.push_back(Outgoing::Alone(slot));
    }

    fn finish(&mut self, slot: u16) {
        let bytes = u32::try_from(self.bytes(slot)).unwrap_or(u32::MAX);
        let share = self.written.min(bytes);
        self.written -= share;
        self.requests.complete(slot, Status::Ok, share + 1);
    }
}

impl<C> RingOwner<'_, C> {
    pub(super) fn send(&mut self, what: Outgoing, scheduler: &Scheduler) -> Result<(), NoRoom> {
        match what {
            Outgoing::Alone(tag) => {
                let wire = self.requests.slots[usize::from(tag)].wire;
                self.send_chain(what, wire, std::iter::once(tag))
            }
            Outgoing::Run(id) => self.send_run(scheduler.run(id)),
        }
    }

    fn try_send(&mut self, run: Run<'_>) -> bool {
        let sent = self.send_run(run);
        debug_assert_ne!(sent, Err(NoRoom::NoPieces), "a request that was judged fits in the ring");
        sent.is_ok()
    }

    fn send_run(&mut self, run: Run<'_>) -> Result<(), NoRoom> {
        let kind = self.requests.slots[usize::from(run.first())].wire.kind;
        let (offset, len) = (run.range().offset(), run.range().len());
        let wire = WireRequest { kind, offset, len, flags: None };
        self.send_chain(Outgoing::Run(run.id()), wire, run.slots())
    }

    /// Makes one chain with the buffers of these slots.
    fn send_chain(
        &mut self,
        what: Outgoing,
        wire: WireRequest,
        tags: impl Iterator<Item = u16>,
    ) -> Result<(), NoRoom> {
        let RingSide { ring, headers, scratch, guest_delta } = &mut self.side;
        let head = ring.next_head().ok_or(NoRoom::Full)?;
        let (header, status) = headers.fill(head, wire.kind, wire.sector());
        scratch.clear();
        scratch.push(header);
        if let Some(flags) = wire.flags {
            // Judged when it was queued.
            let sectors = u32::try_from(wire.len / 512).unwrap_or(u32::MAX);
            scratch.push(headers.fill_erase(head, wire.offset / 512, sectors, flags));
        }
        for tag in tags {
            // Neighbours on the disk are none in memory: each buffer has pieces of its own.
            let buffers = self.requests.slots[usize::from(tag)].data.as_slice();
            let size_max = self.requests.size_max;
            scratch.extend(buffers.iter().flat_map(|buffer| buffer.pieces(*guest_delta, size_max)));
        }
        scratch.push(status);
        let split = if wire.is_written_by_device() { 1 } else { scratch.len() - 1 };
        let (readable, writable) = scratch.split_at(split);
        let added = ring.add(readable, writable)?;
        debug_assert_eq!(added, head, "the header is where the chain is");
        self.requests.chains[usize::from(head)] = Some(what);
        self.requests.sent += 1;
        Ok(())
    }
}
