//! A block ring of a Xen guest, as a worker sees it (hot).
//!
//! ```text
//! ring → record → pages → worker          pop: a batch is taken, its data fetched in one call
//! worker → pages → guest → ring           publish: what was read goes to the guest in one call
//! ```
//!
//! Requests live in entries of the [`Record`] from the moment they are taken. Barriers wait here
//! until all before them is answered, and what comes after them stays in the ring.

mod barrier;
mod fetch;
mod flight;
mod leave;
mod setup;
mod step;

pub use setup::{AdoptError, QueueSetup};

use super::domain::Domain;
use super::host::{Direction, GrantCopy, Host};
use super::movement::{Chooser, Transfer};
use super::persistent::Persistent;
use super::record::types::RecordLost;
use super::record::{Kept, Record};
use flight::{BATCH, DataPlace, Flight, list_copies};
use ringway_core::mem::Pool;
use ringway_core::{Request, Status};
use ringway_export::{AnswerDue, Armed, Broken, Pop, QueueLifecycle, RequestQueue};
use ringway_ring::blkif::{self, Back};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::time::Instant;
use step::Barrier;

/// Memory for data on its way, in bytes, for each queue: 8 of the longest requests. It costs pages
/// once it is used. A request for which there is none waits, and all behind it.
const POOL_BYTES: usize = 8 << 20;

/// Pages of each queue that may stay mapped: as many as Linux's own back-end keeps for a ring.
const PERSISTENT_MAX: u32 = 1056;

/// The right to answer one request, or to go on with one that takes several steps.
#[derive(Debug)]
pub struct Token {
    entry: u16,
    due: AnswerDue,
}

impl Token {
    #[inline]
    fn new(entry: u16) -> Self {
        Self { entry, due: AnswerDue::default() }
    }
}

/// A block ring, its record, the pages of its requests, its event channel.
///
/// # Invariants
/// 1. An entry is in exactly one of: `free`, `left`, `waiting`, `ready`, `barrier`, a token that is
///    out, `done_reads`, `answered`.
/// 2. `ring_pages` keeps the ring mapped, and is dropped after it.
pub struct Queue<H: Host = Domain> {
    ring: Back,
    host: H,
    record: Record,
    /// Answers pushed, without wrapping.
    answers: u64,
    free: Vec<u16>,
    flights: Box<[Flight<H::Mapped>]>,
    /// Left by a predecessor, oldest first.
    left: VecDeque<u16>,
    /// Taken, and there is no memory for it.
    waiting: Option<u16>,
    /// With their data, in order.
    ready: VecDeque<u16>,
    barrier: Option<Barrier>,
    /// Tokens that are out.
    out: usize,
    /// Read from the disk, to be copied to the guest.
    done_reads: Vec<u16>,
    /// Answered, not yet published.
    answered: Vec<u16>,
    copies: Vec<GrantCopy>,
    /// The entry of each of `copies`.
    owners: Vec<u16>,
    grants: Vec<u32>,
    pool: Pool,
    pages: Persistent<H::Mapped>,
    chooser: Chooser,
    /// Pages moved in this batch.
    moved: u64,
    winding_down: bool,
    /// Its front-end has gone, and may have granted its pages to somebody else: nothing is written there.
    mute: bool,
    /// Pieces of the last request.
    effort: u32,
    calls: u64,
    _ring_pages: H::Mapped,
}

// SAFETY: the pointers in `copies` are scratch of one call; what they point to is owned by the queue.
unsafe impl<H: Host> Send for Queue<H> {}

impl<H: Host> Queue<H> {
    /// A queue on a new ring.
    ///
    /// # Errors
    /// [`AdoptError`]: what is wrong with the ring, or what the host says to memory.
    ///
    /// # Safety
    /// `setup.at` lies in `setup.ring_pages`, and there is no other back side.
    pub unsafe fn new(setup: QueueSetup<H>, mut record: Record) -> Result<Self, AdoptError> {
        // SAFETY: the caller vouches for it.
        let ring = unsafe { Back::new(setup.at, setup.offered)? };
        record.set_base(ring.published());
        Ok(Self::build(ring, setup, record, (Vec::new(), 0))?)
    }

    /// A queue on a ring that a predecessor has left, with its record.
    ///
    /// # Errors
    /// As [`Queue::new`], and that the record does not fit the ring.
    ///
    /// # Safety
    /// As of [`Queue::new`].
    pub unsafe fn adopt(setup: QueueSetup<H>, mut record: Record) -> Result<Self, AdoptError> {
        let taken = record.taken_of_ring();
        // SAFETY: the caller vouches for it.
        let ring = unsafe { Back::resumed(setup.at, setup.offered, taken)? };
        let left = record.recover(ring.published())?;
        let mut queue = Self::build(ring, setup, record, left)?;
        // The predecessor may have published answers and died before it rang.
        let _ = queue.host.notify();
        Ok(queue)
    }

    fn build(
        ring: Back,
        setup: QueueSetup<H>,
        record: Record,
        (left, answers): (Vec<u16>, u64),
    ) -> io::Result<Self> {
        let slots = ring.size() as usize;
        let pieces = usize::from(setup.offered.indirect_segments).max(blkif::DIRECT_SEGMENTS_MAX);
        let flight =
            |_| Flight { place: DataPlace::None, failed: false, held: vec![0; pieces].into() };
        let mut free = Vec::with_capacity(slots);
        // At most 512 slots.
        #[allow(clippy::cast_possible_truncation)]
        free.extend((0..slots as u16).rev().filter(|entry| !left.contains(entry)));
        // A piece has a sector at least, and what is copied lies in the pool.
        let copies = (slots.max(BATCH) * pieces).min(POOL_BYTES / 512);
        let cap = if setup.persistent { PERSISTENT_MAX } else { 0 };
        Ok(Self {
            ring,
            host: setup.host,
            record,
            answers,
            free,
            flights: (0..slots).map(flight).collect(),
            left: left.into(),
            waiting: None,
            ready: VecDeque::with_capacity(BATCH),
            barrier: None,
            out: 0,
            done_reads: Vec::with_capacity(slots),
            answered: Vec::with_capacity(slots),
            copies: Vec::with_capacity(copies),
            owners: Vec::with_capacity(copies),
            grants: Vec::with_capacity(pieces),
            pool: Pool::new(POOL_BYTES)?,
            pages: Persistent::new(cap),
            chooser: Chooser::new(setup.movement, setup.persistent),
            moved: 0,
            winding_down: false,
            mute: false,
            effort: 0,
            calls: 0,
            _ring_pages: setup.ring_pages,
        })
    }

    /// The guest's rings are over: nobody is to go on from the record.
    pub fn discard_record(&self) {
        self.record.discard();
    }

    /// Serves again after it was stopped.
    pub fn resume(&mut self) {
        self.winding_down = false;
    }

    /// Its front-end has gone while requests may be with the disk: what comes of them is told to nobody.
    pub(crate) fn mute(&mut self) {
        self.mute = true;
    }

    /// Bytes of memory that hold data on its way; 0 when nothing is in flight.
    #[must_use]
    pub fn bytes_in_use(&self) -> usize {
        self.pool.in_use()
    }

    /// The guest's pages that stay mapped.
    #[must_use]
    pub fn pages_mapped(&self) -> usize {
        self.pages.len()
    }

    // ---- from the worker to the ring ----

    /// Answers a request; its place is free again.
    fn answer(&mut self, entry: u16, status: Status) {
        self.let_go(entry);
        self.record.answer(entry, self.answers);
        self.answers += 1;
        self.ring.push(blkif::Token::from_parts(self.record.token(entry)), status);
        self.answered.push(entry);
    }

    /// Gives back the memory of a request's data.
    #[inline]
    fn let_go(&mut self, entry: u16) {
        let flight = &mut self.flights[usize::from(entry)];
        let begun = self.chooser.measures().then(Instant::now);
        let transfer = match std::mem::replace(&mut flight.place, DataPlace::None) {
            DataPlace::None => None,
            DataPlace::Pages(pages) => {
                self.pool.release(pages);
                None
            }
            DataPlace::Mapped(mapped) => {
                drop(mapped);
                Some(Transfer::Map)
            }
            DataPlace::Held(count) => {
                flight.held[..count].iter().for_each(|&place| self.pages.release(place));
                Some(Transfer::Persistent)
            }
        };
        if let (Some(begun), Some(transfer)) = (begun, transfer) {
            self.chooser.cost(transfer, begun.elapsed(), 0);
        }
    }

    /// Copies what was read to the guest, then answers.
    fn deliver(&mut self) {
        let begun = self.chooser.measures().then(Instant::now);
        for at in 0..self.done_reads.len() {
            let entry = self.done_reads[at];
            if let DataPlace::Pages(pages) = &self.flights[usize::from(entry)].place {
                let pieces = self.record.kept(entry).2;
                list_copies(&mut self.copies, Direction::ToGuest, pages, pieces);
                self.owners.resize(self.copies.len(), entry);
            }
        }
        self.copy(Direction::ToGuest);
        if let Some(begun) = begun {
            self.chooser.cost(Transfer::Copy, begun.elapsed(), 0);
        }
        for at in 0..self.done_reads.len() {
            let entry = self.done_reads[at];
            let failed = self.flights[usize::from(entry)].failed;
            self.answer(entry, if failed { Status::IoError } else { Status::Ok });
        }
        self.done_reads.clear();
    }
}

impl<H: Host> RequestQueue for Queue<H> {
    type Token = Token;

    #[inline]
    fn pop(&mut self, request: &mut Request) -> Result<Pop<Token>, Broken> {
        if self.ready.is_empty() && self.barrier.is_none() {
            self.stage()?;
        }
        if self.record.is_lost() {
            return Err(Broken::rule(RecordLost));
        }
        let Some(entry) = self.ready.pop_front() else {
            self.effort = 1;
            return Ok(self.pop_barrier(request));
        };
        self.out += 1;
        // Each piece has a grant of its own, to look up and to copy or map.
        let pieces = self.record.kept(entry).2.len();
        self.effort = u32::try_from(pieces).unwrap_or(u32::MAX).max(1);
        if self.flights[usize::from(entry)].failed {
            return Ok(Pop::Refused(Token::new(entry), Status::IoError));
        }
        if let (Kept::Refused(status), ..) = self.record.kept(entry) {
            return Ok(Pop::Refused(Token::new(entry), status));
        }
        self.fill(entry, request);
        Ok(Pop::Request(Token::new(entry)))
    }

    #[inline]
    fn effort(&self) -> u32 {
        self.effort
    }

    #[inline]
    fn complete(&mut self, token: Token, status: Status, _written: u32) {
        let Token { entry, due } = token;
        due.settle();
        self.out -= 1;
        if self.mute {
            self.let_go(entry);
            return self.free.push(entry);
        }
        if self.barrier.is_some() && self.goes_on(entry, status) {
            return;
        }
        let flight = &self.flights[usize::from(entry)];
        let copied = matches!(flight.place, DataPlace::Pages(_));
        if status == Status::Ok && copied && self.record.kept(entry).0 == Kept::Read {
            self.done_reads.push(entry);
        } else {
            self.answer(entry, status);
        }
    }

    #[inline]
    fn publish(&mut self) -> io::Result<()> {
        if !self.done_reads.is_empty() {
            self.deliver();
        }
        if self.answered.is_empty() {
            return Ok(());
        }
        if self.record.is_lost() {
            // Which requests these answers belong to was read from it.
            return Err(io::Error::other(RecordLost));
        }
        let wants_call = self.ring.publish();
        self.free.append(&mut self.answered);
        if !wants_call {
            return Ok(());
        }
        self.calls += 1;
        self.host.notify()
    }

    #[inline]
    fn has_work(&self) -> bool {
        !self.ready.is_empty()
            || self.barrier_is_ready()
            || (self.barrier.is_none() && self.waiting.is_none() && self.ring.has_work())
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        self.host.hush();
        let armed = self.ring.arm().map_err(Broken::rule)?;
        if !self.ready.is_empty() || !self.left.is_empty() || self.barrier_is_ready() {
            return Ok(Armed::WorkArrived);
        }
        // An answer brings us back: it frees memory, or lets a barrier go on.
        if (self.barrier.is_some() || self.waiting.is_some()) && self.out > 0 {
            return Ok(Armed::Quiet);
        }
        match armed {
            blkif::Armed::Quiet if self.waiting.is_none() => Ok(Armed::Quiet),
            _ => Ok(Armed::WorkArrived),
        }
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

impl<H: Host> QueueLifecycle for Queue<H> {
    fn doorbell(&self) -> RawFd {
        self.host.doorbell()
    }

    /// Of a front-end that has gone nothing more is begun.
    fn backlog(&self) -> usize {
        if self.mute {
            return 0;
        }
        let single = usize::from(self.waiting.is_some()) + usize::from(self.barrier.is_some());
        self.left.len() + self.ready.len() + single
    }

    fn wind_down(&mut self) {
        self.winding_down = true;
    }

    fn can_leave(&self) -> bool {
        true
    }

    fn leave(&mut self, token: Token) {
        let Token { entry, due } = token;
        due.settle();
        self.set_aside(entry);
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn depth(&self) -> u16 {
        // At most 512 slots.
        #[allow(clippy::cast_possible_truncation)]
        let depth = self.ring.size() as u16;
        depth
    }
}

#[cfg(test)]
mod tests;
