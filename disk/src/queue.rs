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
//! - `queue/issue.rs`: operations on their way to the engine.
//!
//! And what other requests need:
//!
//! - `queue/setup.rs`: how it begins, and what it is asked beside requests;
//! - `queue/scheduled.rs`: what the fast path hands on; `queue/merge.rs`: requests that are held and
//!   merged, by `ringway-scheduler`;
//! - `queue/slow_path.rs`: pieces, zeroing, flushes; `queue/slow_path/finish.rs`: how they end, and
//!   what went wrong;
//! - `queue/bounce.rs`: memory that the file takes in the place of the guest's;
//! - `queue/hold.rs`: requests that are held because the disk has failed them;
//! - `queue/late.rs`: writes that outlive their connection, and requests that wait for such;
//! - `queue/mapped.rs`, `queue/slow_path/mapped.rs`: disks whose image says where their clusters are;
//! - `queue/overdue.rs`: what has been in flight for too long.

mod arena;
mod bounce;
mod detours;
mod dispatch;
mod erases;
mod held;
mod hold;
mod issue;
mod late;
mod mapped;
mod merge;
mod overdue;
mod scheduled;
mod setup;
mod slots;
mod slow_path;
mod syncs;
mod watcher;

use crate::locks::Outliving;
use issue::Issuer;
pub use overdue::{Oldest, Overdue};
use ringway_aio::Engine;
use ringway_core::{Request, Status, injected};
use ringway_scheduler::Scheduler;
pub use slots::Finished;
use slots::{Slots, Stage};
use slow_path::SlowPath;
use std::sync::atomic::Ordering::Relaxed;
pub use watcher::Watcher;

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
    /// [`Op`](ringway_core::Op).
    fast: u8,
    slots: Slots<C>,
    issuer: Issuer,
    slow: SlowPath,
    /// None if the mode is bio.
    scheduler: Option<Box<Scheduler>>,
    /// What it had in flight when it was to stop.
    outliving: Outliving,
}

impl<C> DiskQueue<C> {
    /// Requests begun and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.in_use()
    }

    /// True if there are requests that only [`DiskQueue::retry`] will move.
    #[inline]
    #[must_use]
    pub fn has_deferred(&self) -> bool {
        self.issuer.has_backlog()
            || self.slow.has_waiting()
            || self.slow.syncs.has_some()
            || self.slow.erases.has_some()
            || self.slow.has_asked()
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
        let disk = &self.issuer.disk;
        if disk.judge(&slot.request, disk.open_to.load(Relaxed)).is_err() {
            return self.start_barred(engine, tag);
        }
        self.begin(engine, tag);
    }

    #[inline(always)]
    fn begin<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let slot = self.slots.get_mut(tag);
        let fast = self.fast & 1 << slot.request.op as u8 != 0;
        if fast && self.issuer.takes_directly(&slot.request) {
            slot.stage = Stage::Whole;
            self.issuer.issue_whole(engine, tag, &slot.request);
        } else {
            self.start_slow(engine, tag);
        }
    }

    /// Begins a request that must not be carried out, or not now, or while some write is late.
    #[cold]
    fn start_barred<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let (disk, request) = (&self.issuer.disk, &self.slots.get(tag).request);
        if let Err(status) = disk.authorise(request) {
            return self.refuse(tag, status);
        }
        match disk.await_turn(request.range, request.op.changes_disk()) {
            Some(turn) => self.slow.await_late(&mut self.slots, tag, turn),
            None => self.begin(engine, tag),
        }
    }

    /// Answers a request that must not be carried out.
    #[cold]
    fn refuse(&mut self, tag: u16, status: Status) {
        self.slots.stats.refused += 1;
        let finished = self.slots.retire(tag, status);
        self.slots.push_late(finished);
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

    /// Takes the result of a slot's operation; returns the answer if the request is done.
    #[inline]
    pub fn finish<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        self.issuer.give_back();
        let result = injected!(result, {
            let now = self.issuer.operation(&self.slots, tag);
            let write =
                matches!(now.op, ringway_aio::IoOp::Write | ringway_aio::IoOp::WriteDurable);
            (write, now.op == ringway_aio::IoOp::Sync, now.range.offset(), now.range.len())
        });
        let slot = self.slots.get(tag);
        if slot.stage == Stage::Whole && i64::from(result) == slot.request.range.len() as i64 {
            return Some(self.slots.retire(tag, Status::Ok));
        }
        self.finish_slow(engine, tag, result)
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
}
