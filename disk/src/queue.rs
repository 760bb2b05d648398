//! One worker's hand on a disk: slots, and the way of a request through them (hot).
//!
//! ```text
//! let tag = queue.acquire()?;                    // no slot free: leave the request in the ring
//! fill(queue.request_mut(tag));
//! queue.start(&mut engine, tag, context);        // bounds → alignment → engine
//! …
//! if let Some(done) = queue.finish(&mut engine, tag, result) { answer(done) }
//! while let Some(done) = queue.take_late() { answer(done) }
//! queue.unplug(&mut engine);                     // once a turn, after the last start
//! ```
//!
//! The fast path is here: one request, one operation of the engine. Its parts:
//!
//! - `queue/slots.rs`: the room for each request, and its answer;
//! - `queue/issue.rs`: operations on their way to the engine;
//! - `queue/merge.rs`: requests that are held and merged, by `ringway-scheduler`;
//! - `queue/slow_path.rs`: pieces, zeroing, flushes; `queue/slow_path/finish.rs`: how they end, and
//!   what went wrong;
//! - `queue/bounce.rs`: memory that the file takes in the place of the guest's;
//! - `queue/hold.rs`: requests that are held because the disk has failed them;
//! - `queue/mapped.rs`, `queue/slow_path/mapped.rs`: disks whose image says where their clusters are;
//! - `queue/overdue.rs`: what has been in flight for too long.

mod arena;
mod bounce;
mod detours;
mod dispatch;
mod held;
mod hold;
mod issue;
mod mapped;
mod merge;
mod overdue;
mod slots;
mod slow_path;
mod watcher;

use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::stats::DiskStats;
use dispatch::Dispatch;
use issue::Issuer;
use merge::DiskOwner;
pub use overdue::{Oldest, Overdue};
use ringway_aio::{Engine, FileId, Limits};
use ringway_core::mem::HostRange;
use ringway_core::{Op, Request, Status, injected};
use ringway_scheduler::{Admitted, Kind, Scheduler};
pub use slots::Finished;
use slots::{Sighting, Slots, Stage};
use slow_path::SlowPath;
use std::io;
use std::sync::Arc;
use std::time::Duration;
pub use watcher::Watcher;

/// The most segments of a request: what `preadv2` takes (IOV_MAX).
const SEGMENTS_MAX: usize = 1024;

/// Slots for the requests of one ring on one worker.
///
/// # Invariants
/// 1. A tag is either free, or being filled, or in exactly one of: the engine, the issuer's backlog,
///    those that wait on the slow path, a run of the scheduler. The first tag of a run in flight
///    stands for the run in engine or backlog.
/// 2. `fast` says of reads and writes what scheduler and locks allow.
#[derive(Debug)]
pub struct DiskQueue<C> {
    /// The operations that take the fast path if the file takes them as they are: a bit for each
    /// [`Op`].
    fast: u8,
    slots: Slots<C>,
    issuer: Issuer,
    slow: SlowPath,
    /// None if the mode is bio.
    scheduler: Option<Box<Scheduler>>,
}

impl<C> DiskQueue<C> {
    /// `depth` slots on `disk`, whose file the engine knows as `file`. Operations carry the tag
    /// `tag_base | slot`; the low 16 bits of `tag_base` are 0. Allocates; call at start only.
    ///
    /// # Errors
    /// What the host says to mapping the bounce pool.
    pub fn new(
        disk: Arc<Disk>,
        limits: &Limits,
        file: FileId,
        tag_base: u64,
        depth: u16,
    ) -> io::Result<Self> {
        let slow = SlowPath::new(&disk, depth)?;
        let issuer = Issuer::new(disk, limits, file, tag_base, depth);
        let most =
            Limits { max_segments: limits.max_segments.min(SEGMENTS_MAX), ..issuer.limits.clone() };
        let scheduler = merge::scheduler(&issuer.disk, &most, depth);
        let slots = Slots::new(depth, SEGMENTS_MAX)?;
        let mut queue = Self { fast: 0, slots, issuer, slow, scheduler };
        queue.choose_fast();
        Ok(queue)
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.issuer.disk
    }

    /// The file, as the engine knows it.
    #[must_use]
    pub fn file(&self) -> FileId {
        self.issuer.file()
    }

    /// From now on every write is durable before it completes (no write cache, or no FLUSH
    /// negotiated; VIRTIO 1.2 §5.2.6.2). `unsafe` disks ignore it.
    pub fn set_durable_writes(&mut self, durable: bool) {
        self.issuer.durable_writes = durable && self.issuer.disk.cache != CacheMode::Unsafe;
    }

    /// From now on `watcher` is told of the memory that is written, also for requests in flight.
    pub fn watch_memory(&mut self, watcher: Option<Watcher>) {
        self.slots.watcher = watcher;
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            path: self.scheduler.as_ref().map(|scheduler| scheduler.stats()).unwrap_or_default(),
            durable_bytes: self.issuer.durable_bytes,
            ..self.slots.stats
        }
    }

    /// Requests begun and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.in_use()
    }

    /// Counts a request that was answered with an error before it could be started.
    #[cold]
    pub fn count_refused(&mut self) {
        self.slots.stats.errors += 1;
        self.slots.stats.refused += 1;
    }

    /// Bytes of bounce memory in use; 0 when nothing is in flight.
    #[must_use]
    pub fn bounce_bytes(&self) -> usize {
        self.slow.bounce_bytes()
    }

    /// True if there are requests that only [`DiskQueue::retry`] will move.
    #[inline]
    #[must_use]
    pub fn has_deferred(&self) -> bool {
        self.issuer.has_backlog() || self.slow.has_waiting()
    }

    /// Takes a slot; `None` means leave the request in the ring.
    #[inline]
    pub fn acquire(&mut self) -> Option<u16> {
        self.slots.acquire()
    }

    /// Gives back a slot that was not started.
    #[inline]
    pub fn abandon(&mut self, tag: u16) {
        self.slots.abandon(tag);
    }

    /// The request of a slot, to be filled before [`DiskQueue::start`].
    #[inline]
    pub fn request_mut(&mut self, tag: u16) -> &mut Request {
        &mut self.slots.get_mut(tag).request
    }

    /// Begins the request in slot `tag`; `context` comes back with the answer.
    ///
    /// # Safety
    /// The request's segments must stay valid memory until the answer was taken, and for a read
    /// nobody relies on their content until then.
    #[inline]
    pub unsafe fn start<E: Engine>(&mut self, engine: &mut E, tag: u16, context: C) {
        let slot = self.slots.get_mut(tag);
        slot.context = Some(context);
        slot.done = 0;
        if let Err(status) = self.issuer.disk.authorise(&slot.request) {
            return self.refuse(tag, status);
        }
        let fast = self.fast & 1 << slot.request.op as u8 != 0;
        if fast && self.issuer.takes_directly(&slot.request) {
            slot.stage = Stage::Whole;
            self.issuer.issue_whole(engine, tag, &slot.request);
        } else {
            self.start_slow(engine, tag);
        }
    }

    /// Answers a request that must not be carried out.
    #[cold]
    fn refuse(&mut self, tag: u16, status: Status) {
        self.slots.stats.refused += 1;
        let finished = self.slots.retire(tag, status);
        self.slots.push_late(finished);
    }

    /// Begins a request that is merged or timed, or not one plain operation.
    #[inline(never)]
    fn start_slow<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let in_flight = self.in_flight() - 1;
        let (slot, slow) = self.slots.both(tag);
        slow.seen = Sighting::default();
        let kind = merge::kind(&self.issuer, self.slow.needs_locks(), &slot.request);
        let mut timed = false;
        if self.scheduler.is_some() {
            slot.stage = Stage::Run;
            match self.admit(engine, tag, kind, in_flight) {
                Admitted::Held => return,
                Admitted::SendTimed => timed = true,
                Admitted::Send => {}
            }
        }
        if matches!(kind, Kind::Data { .. }) && self.issuer.image.is_none() {
            self.slots.get_mut(tag).stage = if timed { Stage::Probe } else { Stage::Whole };
            self.issuer.issue(engine, &self.slots, tag);
        } else {
            let Self { slots, issuer, slow, .. } = self;
            slow.start(&mut Dispatch { slots, issuer, engine }, tag);
        }
        if timed {
            // The probe may have seen enough.
            self.choose_fast();
        }
    }

    #[inline(always)]
    fn admit<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        kind: Kind,
        in_flight: usize,
    ) -> Admitted {
        let (mut owner, scheduler) = self.owner(engine);
        let Some(scheduler) = scheduler else { return Admitted::Send };
        let admitted = scheduler.admit(&mut owner, tag, kind, in_flight);
        owner.take_scattered(scheduler);
        admitted
    }

    /// Sends what may go of the requests that are held. Call once a turn, after the last
    /// [`DiskQueue::start`].
    #[inline]
    pub fn unplug<E: Engine>(&mut self, engine: &mut E) {
        let Some(scheduler) = &mut self.scheduler else { return };
        let follow = scheduler.turn();
        if scheduler.holds() {
            self.dispatch_held(engine);
        }
        if follow {
            self.follow_policy();
        }
    }

    #[inline(never)]
    fn dispatch_held<E: Engine>(&mut self, engine: &mut E) {
        if let (mut owner, Some(scheduler)) = self.owner(engine) {
            scheduler.dispatch(&mut owner);
            owner.take_scattered(scheduler);
        }
    }

    /// Takes up the policy that is chosen now.
    #[cold]
    fn follow_policy(&mut self) {
        let Some(scheduler) = &mut self.scheduler else { return };
        let (disk, stats) = (&self.issuer.disk, &self.slots.stats);
        scheduler.follow(&disk.policy, disk.now(), || {
            (stats.reads + stats.writes, stats.read_bytes + stats.written_bytes)
        });
        self.choose_fast();
    }

    /// Which operations may take the fast path.
    fn choose_fast(&mut self) {
        // Where an image has its clusters is looked up.
        let idle = self.issuer.image.is_none()
            && self.scheduler.as_ref().is_none_or(|scheduler| scheduler.is_idle());
        let ops = [(Op::Read, idle), (Op::Write, idle && !self.slow.needs_locks())];
        self.fast = ops.into_iter().filter(|&(_, may)| may).map(|(op, _)| 1 << op as u8).sum();
    }

    /// When to come back although nothing rings: `None` if there is nothing that time moves.
    #[must_use]
    pub fn wake_in(&self) -> Option<Duration> {
        let scheduler = self.scheduler.as_ref().filter(|scheduler| scheduler.holds());
        let at = scheduler.and_then(|scheduler| scheduler.wake_at()).unwrap_or(u64::MAX);
        let at = at.min(self.slow.held.due_ns);
        let left = || Duration::from_nanos(at.saturating_sub(self.issuer.disk.now()));
        (at != u64::MAX).then(left)
    }

    /// Takes the result of a slot's operation; returns the answer if the request is done.
    #[inline]
    pub fn finish<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let result = injected!(result, {
            let now = self.issuer.operation(&self.slots, tag);
            let write =
                matches!(now.op, ringway_aio::IoOp::Write | ringway_aio::IoOp::WriteDurable);
            (write, now.op == ringway_aio::IoOp::Sync, now.range.offset(), now.range.len())
        });
        let slot = self.slots.get(tag);
        if slot.stage == Stage::Whole && i64::from(result) == slot.request.range.len().cast_signed()
        {
            return Some(self.slots.retire(tag, Status::Ok));
        }
        self.finish_slow(engine, tag, result)
    }

    /// Takes the result of an operation that was not simply all of a request.
    #[cold]
    fn finish_slow<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let stage = self.slots.get(tag).stage;
        let (mut owner, scheduler) = self.owner(engine);
        if let Some(scheduler) = scheduler {
            if stage == Stage::Run && owner.end_run(scheduler, tag, result) {
                return owner.answer;
            }
            if stage == Stage::Probe {
                scheduler.finished(tag, || owner.dispatch.issuer.disk.now());
            }
        }
        owner.slow.finish(&mut owner.dispatch, tag, result)
    }

    /// The queue as its scheduler sees it, and the scheduler.
    fn owner<'a, E: Engine>(
        &'a mut self,
        engine: &'a mut E,
    ) -> (DiskOwner<'a, C, E>, Option<&'a mut Scheduler>) {
        let dispatch = Dispatch { slots: &mut self.slots, issuer: &mut self.issuer, engine };
        let owner = DiskOwner { dispatch, slow: &mut self.slow, answer: None };
        (owner, self.scheduler.as_deref_mut())
    }

    /// The next answer that no operation brought.
    #[inline]
    pub fn take_late(&mut self) -> Option<Finished<C>> {
        self.slots.take_late()
    }

    /// True if [`DiskQueue::take_late`] would give one.
    #[inline]
    #[must_use]
    pub fn has_late(&self) -> bool {
        self.slots.has_late()
    }

    /// Tries again what the engine or the bounce pool had no room for, `budget` requests at most,
    /// so that other queues have their turn. Call once a turn while
    /// [`DiskQueue::has_deferred`].
    #[cold]
    pub fn retry<E: Engine>(&mut self, engine: &mut E, budget: usize) {
        if self.issuer.retry(engine, &self.slots, budget) {
            let (mut owner, _) = self.owner(engine);
            owner.slow.retry(&mut owner.dispatch, budget);
        }
    }

    /// True if a request is in flight that reaches beyond `end` bytes. Looks at every slot.
    #[must_use]
    pub fn reaches_beyond(&self, end: u64) -> bool {
        self.slots.reaches_beyond(end)
    }

    /// True if a request is in flight, or done and not taken, whose data lies in one of these ranges
    /// of memory, or whose context says so. Looks at every slot.
    #[must_use]
    pub fn uses(&self, ranges: &[HostRange], by: impl Fn(&C) -> bool) -> bool {
        self.slots.uses(ranges, by)
    }
}
