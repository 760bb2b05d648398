//! The scheduler's side of a disk queue: a run becomes one operation, in the room of its first slot.
//!
//! ```text
//! start ─► admit ─┄ held ┄─► unplug ─► start_run ─► engine ─► end_run ─► finish, or start_alone
//! ```
//!
//! A queue whose mode is bio knows none of this. When requests go, and with whom, is decided by
//! [`Scheduler`].

use super::dispatch::Dispatch;
use super::issue::Issuer;
use super::slots::{Finished, Stage};
use super::slow_path::SlowPath;
use super::slow_path::finish::was_sync;
use crate::disk::Disk;
use ringway_aio::{Engine, Limits};
use ringway_core::{Op, Request, Status};
use ringway_scheduler::{Kind, MERGED_MAX, Owner, Run, Scheduler, SchedulerMode};

/// A queue's scheduler; `None` if its disk never merges. Allocates; call at start only.
pub(crate) fn scheduler(disk: &Disk, limits: &Limits, depth: u16) -> Option<Box<Scheduler>> {
    if disk.policy.mode() == SchedulerMode::Bio {
        return None;
    }
    let max_bytes = MERGED_MAX.min(limits.max_bytes.into());
    let limits = ringway_scheduler::Limits { max_bytes, max_segments: limits.max_segments };
    Some(Box::new(Scheduler::new(&disk.policy, depth, limits)))
}

/// What a request is to the scheduler. What the file does not take as it is goes by itself, and so do
/// writes that need a lock.
#[inline]
pub(crate) fn kind(issuer: &Issuer, needs_locks: bool, request: &Request) -> Kind {
    let (op, range) = (request.op, request.range);
    if !op.moves_data() {
        return if op == Op::GetId { Kind::Alone } else { Kind::Barrier };
    }
    let locks = needs_locks && op.changes_disk();
    // Trying out what merging gains is for raw images; what is synced has more to do than its operation.
    let alone = (issuer.image.is_some() && issuer.disk.policy.mode() != SchedulerMode::Request)
        || (issuer.syncs_changes() && op.changes_disk());
    if locks || alone || range.is_empty() || !issuer.takes_directly(request) {
        return Kind::Alone;
    }
    Kind::Data { op: issuer.data_op(op), range, segments: request.segments.len() }
}

/// A disk queue without its scheduler, as that sees it.
pub(crate) struct DiskOwner<'a, C, E> {
    pub(crate) dispatch: Dispatch<'a, C, E>,
    pub(crate) slow: &'a mut SlowPath,
    /// The first answer of a run; the others are kept with the slots.
    pub(crate) answer: Option<Finished<C>>,
}

impl<C, E: Engine> Owner for DiskOwner<'_, C, E> {
    fn now(&self) -> u64 {
        self.dispatch.issuer.disk.now()
    }

    fn bytes(&self, slot: u16) -> u64 {
        self.dispatch.slots.get(slot).request.range.len()
    }

    /// What the engine has no room for waits in its backlog.
    fn start_run(&mut self, run: Run<'_>) -> bool {
        let d = &mut self.dispatch;
        let first = run.first();
        let (_, slow) = d.slots.both(first);
        (slow.op, slow.range, slow.run) = (run.op().into(), run.range(), Some(run.id()));
        slow.part.clear();
        for slot in run.slots() {
            d.slots.append_segments(slot, first);
        }
        debug_assert_eq!(d.slots.slow(first).part.bytes(), run.range().len());
        if d.issuer.image.is_some() && !self.slow.place_run(d, first) {
            self.slow.scattered.push_back(first);
            return true;
        }
        d.issue(first);
        true
    }

    fn start_alone(&mut self, slot: u16) {
        self.slow.restart(&mut self.dispatch, slot);
    }

    fn finish(&mut self, slot: u16) {
        self.dispatch.leave_late(slot);
        let finished = self.dispatch.slots.retire(slot, Status::Ok);
        match self.answer {
            None => self.answer = Some(finished),
            Some(_) => self.dispatch.slots.push_late(finished),
        }
    }
}

impl<C, E: Engine> DiskOwner<'_, C, E> {
    /// Runs that an image's map does not have in one piece: each of their requests goes by itself.
    pub(crate) fn take_scattered(&mut self, scheduler: &mut Scheduler) {
        while let Some(first) = self.slow.scattered.pop_front() {
            if !self.end_run(scheduler, first, 0) {
                self.start_alone(first);
            }
        }
    }

    /// Takes the result of a run's operation, which is with its first slot. False if it was the
    /// operation of one request, which has to end as any other.
    pub(crate) fn end_run(&mut self, scheduler: &mut Scheduler, first: u16, result: i32) -> bool {
        self.slow.leave_place(&mut self.dispatch, first);
        let (slot, slow) = self.dispatch.slots.both(first);
        let run = slow.run.take().expect("a run is in flight in its first slot");
        if scheduler.end_single(run).is_some() {
            slot.stage = Stage::Whole;
            return false;
        }
        if let Ok(errno) = i32::try_from(-i64::from(result)) {
            if was_sync(self.dispatch.issuer.disk.cache, slow.op, errno) {
                let offset = slow.range.offset();
                let disk = &self.dispatch.issuer.disk;
                disk.flush_has_failed();
                disk.incidents.failed(Op::Write, Some(errno), offset);
            }
        }
        // What has moved has moved from the beginning on.
        scheduler.end_run(self, run, u64::try_from(result).unwrap_or(0));
        true
    }
}
