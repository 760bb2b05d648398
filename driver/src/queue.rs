//! One request queue (hot).
//!
//! ```text
//! queue.read(offset, buffer, ctx)?;            // as many as you like; nothing is visible yet
//! queue.submit()?;                             // one index store, at most one kick
//! while let Some(done) = queue.pop()? { … }    // ctx, status and buffer come back
//! queue.wait(None)?;                           // sleep until there is something to pop
//! ```
//!
//! The fast path is here: one request, one chain. What the scheduler has to know of takes the slow
//! path (`queue/slow_path.rs`), and waits and is merged in `queue/merge.rs`.

mod check;
mod limits;
mod merge;
mod policy;
mod slow_path;
#[cfg(test)]
mod tests;
mod vectored;
mod wait;
mod wire;

use crate::completion::{Completion, Data, QueueStats};
use crate::error::{Error, Refusal};
use crate::headers::Headers;
use crate::link::Link;
use crate::memory::{Buffer, Memory};
use crate::rejected::{Rejected, reject};
pub(crate) use limits::QueueLimits;
use merge::MergeState;
pub(crate) use policy::DevicePolicy;
use ringway_ring::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, status_of,
};
use ringway_ring::virtqueue::{DeviceFault, Driver, NoRoom, Piece, Used, prefetch};
use ringway_scheduler::Policy;
use std::sync::Arc;
use wire::WireRequest;

/// A request in flight.
#[derive(Debug)]
struct Flight<C> {
    ctx: C,
    data: Data,
    status_at: *const u8,
}

/// One request queue. It belongs to one thread at a time and can be moved to another.
///
/// `C` is the caller's context, handed back with the completion. Nothing is allocated after the queue
/// was made. Dropping a queue with requests in flight gives up their buffers for good, because the
/// server may still write to them.
///
/// # Invariants
/// 1. `flights[head]` is `Some` exactly for the chains in flight in `ring` that `merge` does not know;
///    the memory of their buffers and slots is not touched by this side, and their `status_at` is
///    readable.
/// 2. `slow_pop` while `merge` knows chains in flight.
#[derive(Debug)]
pub struct BlkQueue<C> {
    ring: Driver,
    headers: Headers,
    flights: Box<[Option<Flight<C>>]>,
    guest_delta: u64,
    limits: QueueLimits,
    /// Buffers up to this length take the fast path: `limits.size_max`, or 0 if none may.
    fast_max: u32,
    /// Completions take the slow path: not all that comes back took the fast one.
    slow_pop: bool,
    /// Submissions take the slow path: something may be merged, or there is a fault.
    slow_submit: bool,
    /// Room for the pieces of a vectored request.
    scratch: Vec<Piece>,
    /// The status byte of the request queued last: of the one that comes back, if there is but one.
    last: *const u8,
    stats: QueueStats,
    fault: Option<DeviceFault>,
    /// None if the mode is bio.
    merge: Option<Box<MergeState<C>>>,
    memory: Arc<Memory>,
    link: Arc<Link>,
}

// SAFETY: ring and slots lie in `memory`, which the queue keeps alive; the addresses in `flights`
// point there too, or the caller of `raw` vouches for them.
unsafe impl<C: Send> Send for BlkQueue<C> {}

impl<C> BlkQueue<C> {
    pub(crate) fn new(
        ring: Driver,
        headers: Headers,
        limits: QueueLimits,
        memory: Arc<Memory>,
        link: Arc<Link>,
        policy: Arc<DevicePolicy>,
    ) -> Self {
        let merge = MergeState::new(policy, ring.size(), &limits);
        let merges = merge.as_ref().is_some_and(|merge| merge.merges());
        Self {
            fast_max: if merges { 0 } else { limits.size_max },
            slow_pop: merges,
            slow_submit: merge.is_some(),
            merge,
            flights: (0..ring.size()).map(|_| None).collect(),
            scratch: Vec::with_capacity(limits.seg_max + 2),
            guest_delta: memory.guest_delta(),
            last: std::ptr::null(),
            stats: QueueStats::default(),
            fault: None,
            ring,
            headers,
            limits,
            memory,
            link,
        }
    }

    /// Queues a read of the whole buffer from byte `offset` of the disk.
    ///
    /// # Errors
    /// [`Rejected`] gives everything back and says why; nothing was queued.
    #[inline(always)]
    pub fn read(&mut self, offset: u64, buffer: Buffer, ctx: C) -> Result<(), Rejected<C>> {
        if !self.takes_fast_path(offset, &buffer) {
            return self.start_checked(VIRTIO_BLK_T_IN, offset, Data::One(buffer), ctx);
        }
        let Some(head) = self.ring.next_head() else {
            return reject(Refusal::Full, ctx, Data::One(buffer));
        };
        let (header, status) = self.headers.fill(head, VIRTIO_BLK_T_IN, offset / 512);
        let added = self.ring.add(&[header], &[buffer.piece(self.guest_delta), status]);
        self.hold(added, ctx, Data::One(buffer))
    }

    /// Queues a write of the whole buffer to byte `offset` of the disk.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    #[inline(always)]
    pub fn write(&mut self, offset: u64, buffer: Buffer, ctx: C) -> Result<(), Rejected<C>> {
        if !self.takes_fast_path(offset, &buffer) {
            return self.start_checked(VIRTIO_BLK_T_OUT, offset, Data::One(buffer), ctx);
        }
        let Some(head) = self.ring.next_head() else {
            return reject(Refusal::Full, ctx, Data::One(buffer));
        };
        let (header, status) = self.headers.fill(head, VIRTIO_BLK_T_OUT, offset / 512);
        let added = self.ring.add(&[header, buffer.piece(self.guest_delta)], &[status]);
        self.hold(added, ctx, Data::One(buffer))
    }

    /// Queues a read into several buffers, in order.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    pub fn read_vectored(
        &mut self,
        offset: u64,
        buffers: Vec<Buffer>,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        self.start_checked(VIRTIO_BLK_T_IN, offset, Data::Many(buffers), ctx)
    }

    /// Queues a write from several buffers, in order.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    pub fn write_vectored(
        &mut self,
        offset: u64,
        buffers: Vec<Buffer>,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        self.start_checked(VIRTIO_BLK_T_OUT, offset, Data::Many(buffers), ctx)
    }

    /// Queues a flush: every write completed before becomes durable.
    ///
    /// # Errors
    /// As [`BlkQueue::read`]; [`Refusal::NotOffered`] if every write is durable anyway.
    pub fn flush(&mut self, ctx: C) -> Result<(), Rejected<C>> {
        if !self.limits.flush {
            return reject(Refusal::NotOffered("flush (FLUSH)"), ctx, Data::None);
        }
        if self.fast_max == 0 {
            let wire = WireRequest { kind: VIRTIO_BLK_T_FLUSH, ..WireRequest::default() };
            return self.start_slow(wire, Data::None, ctx);
        }
        let Some(head) = self.ring.next_head() else {
            return reject(Refusal::Full, ctx, Data::None);
        };
        let (header, status) = self.headers.fill(head, VIRTIO_BLK_T_FLUSH, 0);
        let added = self.ring.add(&[header], &[status]);
        self.hold(added, ctx, Data::None)
    }

    /// Queues a discard of `len` bytes from `offset`: they may read back as anything.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    pub fn discard(&mut self, offset: u64, len: u64, ctx: C) -> Result<(), Rejected<C>> {
        let Some(max) = self.limits.discard_sectors else {
            return reject(Refusal::NotOffered("discard (DISCARD)"), ctx, Data::None);
        };
        self.erase(VIRTIO_BLK_T_DISCARD, (offset, len), max, 0, ctx)
    }

    /// Queues a write of `len` zero bytes to `offset`; with `unmap` their space may be freed.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        len: u64,
        unmap: bool,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let Some(max) = self.limits.write_zeroes_sectors else {
            let why = Refusal::NotOffered("write zeroes (WRITE_ZEROES)");
            return reject(why, ctx, Data::None);
        };
        let flags = if unmap { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
        self.erase(VIRTIO_BLK_T_WRITE_ZEROES, (offset, len), max, flags, ctx)
    }

    /// Queues a read of the serial number, padded with zeroes, into a buffer of 20 bytes.
    ///
    /// # Errors
    /// As [`BlkQueue::read`].
    pub fn get_id(&mut self, buffer: Buffer, ctx: C) -> Result<(), Rejected<C>> {
        if buffer.bytes() != VIRTIO_BLK_ID_BYTES {
            return reject(Refusal::IdBuffer(buffer.len()), ctx, Data::One(buffer));
        }
        if !buffer.is_in(&self.memory) {
            return reject(Refusal::ForeignBuffer, ctx, Data::One(buffer));
        }
        if self.fast_max == 0 {
            let wire = WireRequest { kind: VIRTIO_BLK_T_GET_ID, ..WireRequest::default() };
            return self.start_slow(wire, Data::One(buffer), ctx);
        }
        let Some(head) = self.ring.next_head() else {
            return reject(Refusal::Full, ctx, Data::One(buffer));
        };
        let (header, status) = self.headers.fill(head, VIRTIO_BLK_T_GET_ID, 0);
        let added = self.ring.add(&[header], &[buffer.piece(self.guest_delta), status]);
        self.hold(added, ctx, Data::One(buffer))
    }

    /// Queues a chain of any layout, for tests: what the device reads (header included), what it
    /// writes (status byte included), and where the status byte is in our address space. It goes
    /// into the ring at once in every mode.
    ///
    /// # Errors
    /// [`Rejected`], if the chain does not fit.
    ///
    /// # Safety
    /// Until the completion is popped, the device may access the pieces, nothing else may use that
    /// memory, and `status_at` must be readable.
    pub unsafe fn raw(
        &mut self,
        readable: &[Piece],
        writable: &[Piece],
        status_at: *const u8,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let added = self.ring.add(readable, writable);
        let head = added.unwrap_or(0);
        self.hold(added, ctx, Data::None)?;
        if let Some(flight) = &mut self.flights[usize::from(head)] {
            flight.status_at = status_at;
        }
        Ok(())
    }

    /// Shows the queued requests to the server: one index store and, if it sleeps, one kick. With the
    /// policy request they are merged first, and some may wait; they are sent by [`BlkQueue::pop`]
    /// and by the functions that wait as well.
    ///
    /// # Errors
    /// [`Error::Device`] if the server has broken the rules of the queue before.
    #[inline(always)]
    pub fn submit(&mut self) -> Result<(), Error> {
        if self.slow_submit {
            return self.submit_slow();
        }
        self.show();
        Ok(())
    }

    #[inline(always)]
    fn show(&mut self) {
        if self.ring.publish() {
            self.stats.kicks += 1;
            self.link.kick();
        }
    }

    /// Takes the next completion, if there is one. Never blocks.
    ///
    /// # Errors
    /// [`Error::Device`] if the server breaks the rules of the queue.
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<Completion<C>>, Error> {
        if self.slow_pop {
            return self.pop_slow();
        }
        match self.ring.pop_used() {
            Ok(Some(used)) => Ok(Some(self.finish(used))),
            Ok(None) => {
                prefetch(self.last);
                if self.slow_submit {
                    self.turn();
                }
                Ok(None)
            }
            Err(fault) => Err(self.broken(fault)),
        }
    }

    /// The completions that are there now. Ends early if the server breaks the rules of the queue;
    /// the next [`BlkQueue::submit`] says so.
    #[inline]
    pub fn completions(&mut self) -> impl Iterator<Item = Completion<C>> + '_ {
        std::iter::from_fn(move || self.pop().ok().flatten())
    }

    /// Requests queued and not popped yet.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        let chains = self.ring.in_flight();
        self.merge.as_ref().map_or(chains, |merge| merge.in_flight(chains))
    }

    /// The policy in use, as it was chosen; short trials of another one do not show.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.merge.as_ref().map_or(Policy::Bio, |merge| merge.policy().0)
    }

    /// How often the policy of the device was changed ([`SchedulerMode::Auto`](crate::SchedulerMode::Auto)).
    #[must_use]
    pub fn policy_switches(&self) -> u64 {
        self.merge.as_ref().map_or(0, |merge| merge.policy().1)
    }

    /// Queue size in descriptors. A request takes one where indirect tables are in use, otherwise
    /// one for each buffer and two more; with the policy request it takes one until it is sent.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// The most buffers of a vectored request.
    #[must_use]
    pub fn max_buffers(&self) -> usize {
        self.limits.seg_max
    }

    /// Counters since the queue was made.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        QueueStats {
            completed: self.stats.queued - u64::from(self.in_flight()),
            path: self.merge.as_ref().map(|merge| merge.stats()).unwrap_or_default(),
            ..self.stats
        }
    }

    /// True while the server is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Remembers a request until its completion, or gives it back if it was not added.
    #[inline(always)]
    fn hold(&mut self, added: Result<u16, NoRoom>, ctx: C, data: Data) -> Result<(), Rejected<C>> {
        match added {
            Ok(head) => {
                self.stats.queued += 1;
                let status_at = self.headers.status_at(head);
                self.last = status_at;
                let flight = &mut self.flights[usize::from(head)];
                debug_assert!(flight.is_none(), "chain {head} is in flight already");
                *flight = Some(Flight { ctx, data, status_at });
                if self.slow_submit {
                    self.count(head);
                }
                Ok(())
            }
            Err(why) => reject(no_room(why), ctx, data),
        }
    }

    #[inline(always)]
    fn finish(&mut self, used: Used) -> Completion<C> {
        let flight = self.flights[usize::from(used.head)].take();
        let Flight { ctx, data, status_at } = flight.expect("invariant 1: the ring checks heads");
        // SAFETY: `status_at` is readable until the completion is popped (invariant 1). Volatile:
        // the device wrote it.
        let status = status_of(unsafe { status_at.read_volatile() });
        Completion { ctx, status, used_len: used.len, data }
    }

    /// True if nothing is wrong with a request for one buffer, and it may take the fast path.
    #[inline]
    fn takes_fast_path(&self, offset: u64, buffer: &Buffer) -> bool {
        let len = buffer.bytes();
        (offset | u64::from(len)) & 511 == 0
            && len.wrapping_sub(1) < self.fast_max
            && buffer.is_in(&self.memory)
    }

    fn erase(
        &mut self,
        kind: u32,
        (offset, len): (u64, u64),
        max: u32,
        flags: u32,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let why = match u32::try_from(len / 512) {
            _ if (offset | len) & 511 != 0 => Refusal::Misaligned { offset, len },
            Ok(0) => Refusal::Empty,
            Ok(sectors) if sectors <= max && self.fast_max == 0 => {
                let wire = WireRequest { kind, offset, len, flags: Some(flags) };
                return self.start_slow(wire, Data::None, ctx);
            }
            Ok(sectors) if sectors <= max => match self.ring.next_head() {
                None => Refusal::Full,
                Some(head) => {
                    let (header, status) = self.headers.fill(head, kind, 0);
                    let range = self.headers.fill_erase(head, offset / 512, sectors, flags);
                    let added = self.ring.add(&[header, range], &[status]);
                    return self.hold(added, ctx, Data::None);
                }
            },
            _ => Refusal::EraseTooLong { sectors: len / 512, max },
        };
        reject(why, ctx, Data::None)
    }

    #[cold]
    fn broken(&mut self, fault: DeviceFault) -> Error {
        (self.fault, self.slow_submit) = (Some(fault), true);
        fault.into()
    }
}

#[cold]
fn no_room(why: NoRoom) -> Refusal {
    match why {
        NoRoom::TooLong { pieces, max } => {
            Refusal::TooManySegments { have: pieces.saturating_sub(2), max: max.saturating_sub(2) }
        }
        NoRoom::Full => Refusal::Full,
        NoRoom::NoPieces => Refusal::Empty,
    }
}

impl<C> Drop for BlkQueue<C> {
    fn drop(&mut self) {
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            flight.data.abandon();
        }
        if let Some(merge) = &mut self.merge {
            merge.give_up().for_each(drop);
        }
    }
}
