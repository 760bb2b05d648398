//! Requests that are merged, timed, or not one plain operation: what the fast path hands on.

use super::dispatch::Dispatch;
use super::merge::DiskOwner;
use super::slots::{Finished, Sighting, Stage};
use super::{DiskQueue, merge};
use ringway_aio::Engine;
use ringway_core::Op;
use ringway_scheduler::{Admitted, Kind, Scheduler};
use std::time::Duration;

impl<C> DiskQueue<C> {
    /// Begins a request that is merged or timed, or not one plain operation.
    #[inline(never)]
    pub(super) fn start_slow<E: Engine>(&mut self, engine: &mut E, tag: u16) {
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
            let mut dispatch = Dispatch { slots, issuer, engine };
            if !slow.read_placed(&mut dispatch, tag) {
                slow.start(&mut dispatch, tag);
            }
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

    #[inline(never)]
    pub(super) fn dispatch_held<E: Engine>(&mut self, engine: &mut E) {
        if let (mut owner, Some(scheduler)) = self.owner(engine) {
            scheduler.dispatch(&mut owner);
            owner.take_scattered(scheduler);
        }
    }

    /// Takes up the policy that is chosen now.
    #[cold]
    pub(super) fn follow_policy(&mut self) {
        let Some(scheduler) = &mut self.scheduler else { return };
        let (disk, stats) = (&self.issuer.disk, &self.slots.stats);
        scheduler.follow(&disk.policy, disk.now(), || {
            (stats.reads + stats.writes, stats.read_bytes + stats.written_bytes)
        });
        self.choose_fast();
    }

    /// Which operations may take the fast path.
    pub(super) fn choose_fast(&mut self) {
        // Where an image has its clusters is looked up.
        let idle = self.issuer.image.is_none()
            && self.scheduler.as_ref().is_none_or(|scheduler| scheduler.is_idle());
        let writes = idle && !self.slow.needs_locks() && !self.issuer.syncs_changes();
        let ops = [(Op::Read, idle), (Op::Write, writes)];
        self.fast = ops.into_iter().filter(|&(_, may)| may).map(|(op, _)| 1 << op as u8).sum();
    }

    /// When to come back although nothing rings: `None` if there is nothing that time moves.
    #[must_use]
    pub fn wake_in(&self) -> Option<Duration> {
        let scheduler = self.scheduler.as_ref().filter(|scheduler| scheduler.holds());
        let at = scheduler.and_then(|scheduler| scheduler.wake_at()).unwrap_or(u64::MAX);
        let held = &self.slow.held;
        let due_ns = if held.parked.is_empty() { u64::MAX } else { held.due_ns };
        let at = at.min(due_ns).min(self.slow.syncs.due_ns());
        let left = || Duration::from_nanos(at.saturating_sub(self.issuer.disk.now()));
        (at != u64::MAX).then(left)
    }

    /// Takes the result of an operation that was not simply all of a request.
    #[cold]
    pub(super) fn finish_slow<E: Engine>(
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
    pub(super) fn owner<'a, E: Engine>(
        &'a mut self,
        engine: &'a mut E,
    ) -> (DiskOwner<'a, C, E>, Option<&'a mut Scheduler>) {
        let dispatch = Dispatch { slots: &mut self.slots, issuer: &mut self.issuer, engine };
        let owner = DiskOwner { dispatch, slow: &mut self.slow, answer: None };
        (owner, self.scheduler.as_deref_mut())
    }

    /// Tries again what the engine or the bounce pool had no room for, `budget` requests at most,
    /// so that other queues have their turn. Call once a turn while
    /// [`DiskQueue::has_deferred`].
    #[cold]
    pub fn retry<E: Engine>(&mut self, engine: &mut E, budget: usize) {
        let has_room = self.issuer.retry(engine, &self.slots, budget);
        let (mut owner, _) = self.owner(engine);
        // They lie in memory: an engine that sees doorbells only now and then does not have them wait.
        if owner.slow.has_asked() {
            owner.slow.take_answers(&mut owner.dispatch);
        }
        if owner.slow.syncs.has_some() {
            owner.slow.tend_syncs(&mut owner.dispatch);
        }
        if owner.slow.erases.has_some() {
            owner.slow.tend_erases(&mut owner.dispatch);
        }
        if has_room {
            owner.slow.retry(&mut owner.dispatch, budget);
        }
    }
}
