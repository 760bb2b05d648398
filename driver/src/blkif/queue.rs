//! One request queue over a block ring (hot).
//!
//! ```text
//! queue.read(offset, buffer, ctx)?;            // as many as you like; nothing is visible yet
//! queue.submit()?;                             // one index store, at most one notification
//! while let Some(done) = queue.pop()? { … }    // ctx, status and buffer come back
//! queue.wait(None)?;                           // sleep until there is something to pop
//! ```

use super::cut::cut;
use crate::completion::{Completion, Data, QueueStats};
use crate::error::{Error, Refusal};
use crate::link::{Link, Wake};
use crate::memory::{Buffer, Memory};
use crate::rejected::Rejected;
use ringway_ring::blkif::{
    Armed, Ask, BackFault, Command, DIRECT_SEGMENTS_MAX, Front, GrantPiece, NoRoom, PAGE_BYTES,
    Response, With, pieces_to_bytes,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request in flight.
#[derive(Debug)]
struct Flight<C> {
    ctx: C,
    data: Data,
    /// The page that lists its pieces, if one does.
    list: Option<u32>,
}

/// One request queue, as [`crate::BlkQueue`] but over a block ring. It belongs to one thread at a
/// time and can be moved to another.
///
/// `C` is the caller's context, handed back with the completion. Nothing is allocated after the queue
/// was made. Dropping a queue with requests in flight gives up their buffers for good, because the
/// back end may still write to them. [`Completion::used_len`] is always 0: the protocol does not say.
///
/// # Invariants
/// 1. `flights[id]` is `Some` exactly for the requests in flight in `ring`; this side does not touch
///    the memory of their buffers and lists.
/// 2. `lists` holds the pages for lists that no request in flight has: as many as the ring has slots
///    less those, if the back end takes lists at all.
#[derive(Debug)]
pub struct BlkifQueue<C> {
    // Before the memory it lies in.
    ring: Front,
    flights: Box<[Option<Flight<C>>]>,
    lists: Vec<u32>,
    /// Room for the pieces of a request.
    scratch: Vec<GrantPiece>,
    /// The most pieces of a request.
    most: usize,
    stats: QueueStats,
    fault: Option<BackFault>,
    memory: Arc<Memory>,
    link: Arc<Link>,
}

// SAFETY: the ring lies in `memory`, which the queue keeps alive, on whatever thread.
unsafe impl<C: Send> Send for BlkifQueue<C> {}

impl<C> BlkifQueue<C> {
    pub(super) fn new(
        ring: Front,
        memory: Arc<Memory>,
        lists: Vec<u32>,
        indirect_segments: u16,
        link: Arc<Link>,
    ) -> Self {
        let most = usize::from(indirect_segments).max(DIRECT_SEGMENTS_MAX);
        Self {
            flights: (0..ring.size()).map(|_| None).collect(),
            ring,
            lists,
            scratch: Vec::with_capacity(most),
            most,
            stats: QueueStats::default(),
            fault: None,
            memory,
            link,
        }
    }

    /// Queues a read of the whole buffer from byte `offset` of the disk.
    ///
    /// # Errors
    /// [`Rejected`] gives everything back and says why; nothing was queued.
    #[inline]
    pub fn read(&mut self, offset: u64, buffer: Buffer, ctx: C) -> Result<(), Rejected<C>> {
        self.transfer(Command::Read, offset, Data::One(buffer), ctx)
    }

    /// Queues a write of the whole buffer to byte `offset` of the disk.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    #[inline]
    pub fn write(&mut self, offset: u64, buffer: Buffer, ctx: C) -> Result<(), Rejected<C>> {
        self.transfer(Command::Write, offset, Data::One(buffer), ctx)
    }

    /// Queues a write that is carried out after all before it and before all after it, and is durable
    /// when it is done. 44 KiB at most: a barrier is never indirect.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    pub fn write_barrier(
        &mut self,
        offset: u64,
        buffer: Buffer,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        self.transfer(Command::WriteBarrier, offset, Data::One(buffer), ctx)
    }

    /// Queues a read into several buffers, in order.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    pub fn read_vectored(
        &mut self,
        offset: u64,
        buffers: Vec<Buffer>,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        self.transfer(Command::Read, offset, Data::Many(buffers), ctx)
    }

    /// Queues a write from several buffers, in order.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    pub fn write_vectored(
        &mut self,
        offset: u64,
        buffers: Vec<Buffer>,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        self.transfer(Command::Write, offset, Data::Many(buffers), ctx)
    }

    /// Queues a flush: every write completed before becomes durable.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    pub fn flush(&mut self, ctx: C) -> Result<(), Rejected<C>> {
        let ask = Ask { command: Command::Flush, sector: 0, with: With::Pieces(&[]) };
        let pushed = self.ring.push(ask);
        self.hold(pushed, ctx, Data::None, None)
    }

    /// Queues a discard of `len` bytes from `offset`: they may read back as anything.
    ///
    /// # Errors
    /// As [`BlkifQueue::read`].
    pub fn discard(&mut self, offset: u64, len: u64, ctx: C) -> Result<(), Rejected<C>> {
        if (offset | len) & 511 != 0 {
            return reject(Refusal::Misaligned { offset, len }, ctx, Data::None);
        }
        let (command, with) = (Command::Discard { secure: false }, With::Sectors(len / 512));
        let pushed = self.ring.push(Ask { command, sector: offset / 512, with });
        self.hold(pushed, ctx, Data::None, None)
    }

    /// Shows the queued requests to the back end: one index store and, if it sleeps, one
    /// notification.
    ///
    /// # Errors
    /// [`Error::BlkifBack`] if the back end has broken the rules of the ring before.
    #[inline]
    pub fn submit(&mut self) -> Result<(), Error> {
        if let Some(fault) = self.fault {
            return Err(fault.into());
        }
        if self.ring.publish() {
            self.stats.kicks += 1;
            self.link.kick();
        }
        Ok(())
    }

    /// Takes the next completion, if there is one. Never blocks.
    ///
    /// # Errors
    /// [`Error::BlkifBack`] if the back end breaks the rules of the ring.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Completion<C>>, Error> {
        match self.ring.pop_response() {
            Ok(answer) => Ok(answer.map(|answer| self.finish(answer))),
            Err(fault) => Err(self.broken(fault)),
        }
    }

    /// The completions that are there now. Ends early if the back end breaks the rules of the ring;
    /// the next [`BlkifQueue::submit`] says so.
    #[inline]
    pub fn completions(&mut self) -> impl Iterator<Item = Completion<C>> + '_ {
        std::iter::from_fn(move || self.pop().ok().flatten())
    }

    /// Submits, then sleeps until there is a completion to pop. False if the time is up or nothing is
    /// in flight. The time is rounded up to milliseconds.
    ///
    /// # Errors
    /// [`Error::BlkifBack`] if the back end breaks the rules of the ring.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        self.wait_for(1, timeout)
    }

    /// As [`BlkifQueue::wait`], until `count` completions are there (or all that are in flight, if
    /// these are fewer).
    ///
    /// # Errors
    /// As [`BlkifQueue::wait`].
    pub fn wait_for(&mut self, count: u32, timeout: Option<Duration>) -> Result<bool, Error> {
        self.submit()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        while self.ring.in_flight() > 0 {
            let armed = self.ring.arm(count).map_err(|fault| self.broken(fault))?;
            if armed == Armed::WorkArrived {
                return Ok(true);
            }
            self.stats.sleeps += 1;
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if self.link.sleep(left)? != Wake::Called {
                return self.ring.has_responses(1).map_err(|fault| self.broken(fault));
            }
        }
        Ok(false)
    }

    /// Requests queued and not popped yet.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.ring.in_flight()
    }

    /// The most requests that can be in flight.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    #[cfg(test)]
    pub(super) fn link(&self) -> Arc<Link> {
        Arc::clone(&self.link)
    }

    /// Counters since the queue was made.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        QueueStats { completed: self.stats.queued - u64::from(self.in_flight()), ..self.stats }
    }

    #[inline]
    fn transfer(
        &mut self,
        command: Command,
        offset: u64,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let buffers = match &data {
            Data::None => &[],
            Data::One(buffer) => std::slice::from_ref(buffer),
            Data::Many(buffers) => &buffers[..],
        };
        self.scratch.clear();
        if let Err(why) = cut(buffers, &self.memory, offset, self.most, &mut self.scratch) {
            return reject(why, ctx, data);
        }
        let sector = offset / 512;
        if self.scratch.len() > DIRECT_SEGMENTS_MAX {
            return self.transfer_listed(command, sector, data, ctx);
        }
        let pushed = self.ring.push(Ask { command, sector, with: With::Pieces(&self.scratch) });
        self.hold(pushed, ctx, data, None)
    }

    /// An indirect request of the pieces in `scratch`.
    #[inline(never)]
    fn transfer_listed(
        &mut self,
        command: Command,
        sector: u64,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let Some(&list) = self.lists.last() else {
            return reject(Refusal::Full, ctx, data);
        };
        let bytes = pieces_to_bytes(&self.scratch);
        let page = self.memory.at(list as usize * PAGE_BYTES);
        // SAFETY: the page is mapped and no request in flight has it (invariants 1 and 2); at most 512
        // pieces fit in it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page, bytes.len()) };
        // At most 512.
        #[allow(clippy::cast_possible_truncation)]
        let with = With::Pages { segments: self.scratch.len() as u16, pages: &[list] };
        let pushed = self.ring.push(Ask { command, sector, with });
        if pushed.is_ok() {
            self.lists.pop();
        }
        self.hold(pushed, ctx, data, Some(list))
    }

    /// Remembers a request until its completion, or gives it back if it was not added.
    #[inline]
    fn hold(
        &mut self,
        pushed: Result<u16, NoRoom>,
        ctx: C,
        data: Data,
        list: Option<u32>,
    ) -> Result<(), Rejected<C>> {
        match pushed {
            Ok(id) => {
                self.stats.queued += 1;
                let flight = &mut self.flights[usize::from(id)];
                debug_assert!(flight.is_none(), "request {id} is in flight already");
                *flight = Some(Flight { ctx, data, list });
                Ok(())
            }
            Err(why) => reject(no_room(why), ctx, data),
        }
    }

    #[inline]
    fn finish(&mut self, answer: Response) -> Completion<C> {
        let flight = self.flights[usize::from(answer.id)].take();
        let Flight { ctx, data, list } = flight.expect("invariant 1: the ring checks ids");
        self.lists.extend(list);
        Completion { ctx, status: answer.status, used_len: 0, data }
    }

    #[cold]
    fn broken(&mut self, fault: BackFault) -> Error {
        self.fault = Some(fault);
        fault.into()
    }
}

#[cold]
fn no_room(why: NoRoom) -> Refusal {
    match why {
        NoRoom::Full => Refusal::Full,
        NoRoom::Segments { segments, .. } => {
            Refusal::TooManySegments { have: segments, max: DIRECT_SEGMENTS_MAX }
        }
        NoRoom::Kind(_) => Refusal::TooManySegments {
            have: DIRECT_SEGMENTS_MAX + 1, // only a barrier can be too long for a list
            max: DIRECT_SEGMENTS_MAX,
        },
    }
}

#[cold]
fn reject<C>(why: Refusal, ctx: C, data: Data) -> Result<(), Rejected<C>> {
    Err(Rejected { why, ctx, data })
}

impl<C> Drop for BlkifQueue<C> {
    fn drop(&mut self) {
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            flight.data.abandon();
        }
    }
}
