//! How a worker waits: what it does when a turn found nothing (hot where it spins).

use super::Worker;
use super::control::thread_cpu_time;
use super::queue::{IDLE_TURNS_MAX, WorkerQueue};
use crate::clock::{nanos, since};
use crate::cpu::leave_cpu;
use crate::polling::Next;
use crate::queue::{Armed, QueueLifecycle};
use ringway_aio::Engine;
use ringway_core::{kill_point, mem::poison_epoch};
use std::io;
use std::time::{Duration, Instant};

/// Sleeps that a worker takes when it starts, to learn what they cost, and how long they are.
const SLEEPS_TRIED: usize = 8;
const SLEEP_TRIED: Duration = Duration::from_micros(50);

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    #[inline]
    pub(super) fn what_next(&mut self) -> Next {
        let (queues, active, begun) = (&self.queues, &self.active, self.begun);
        self.idle.next(|| since(begun), || at_work(queues, active))
    }

    /// True if what was taken can be submitted by the sleep that follows: the disk is slow, and there
    /// is nothing else to do.
    #[inline]
    pub(super) fn may_defer(&mut self) -> bool {
        self.idle.may_defer() && {
            let (queues, active) = (&self.queues, &self.active);
            let has_work =
                |&id: &u32| queues[id as usize].as_ref().is_some_and(|queue| queue.ring.has_work());
            !active.iter().any(has_work) && !self.inbox.is_pending()
        }
    }

    /// Requests were taken and submitted, and some are done: are all?
    #[cold]
    pub(super) fn note_prompt_disk(&mut self) {
        if at_work(&self.queues, &self.active) == 0 {
            self.idle.disk_was_prompt();
        }
    }

    /// Drain, re-arm, look again, for all active queues: `Quiet` only if every one is.
    pub(super) fn arm_all(&mut self) -> Armed {
        if self.inbox.is_pending() || self.forgive_debts() {
            return Armed::WorkArrived;
        }
        let mut all = Armed::Quiet;
        for &id in &self.active {
            let Some(queue) = self.queues[id as usize].as_mut() else { continue };
            if queue.arm() == Armed::WorkArrived {
                all = Armed::WorkArrived;
            }
        }
        // Memory that vanished under the last look must not be slept over: nobody may kick again.
        if poison_epoch() != self.poison_seen {
            return Armed::WorkArrived;
        }
        all
    }

    /// Sleeps a few times by a timer, to see what that costs on this host. What rings ends it.
    #[cold]
    pub(super) fn calibrate(&mut self) -> io::Result<()> {
        let (mut lates, mut cpus) = (Vec::new(), Vec::new());
        for _ in 0..SLEEPS_TRIED {
            let (before, cpu) = (Instant::now(), thread_cpu_time());
            self.engine.wait(Some(SLEEP_TRIED))?;
            let (took, cpu) = (before.elapsed(), thread_cpu_time().saturating_sub(cpu));
            if let Some(late) = took.checked_sub(SLEEP_TRIED) {
                lates.push(late);
                cpus.push(cpu);
            }
        }
        if let (Some(late), Some(cpu)) = (middle(lates), middle(cpus)) {
            self.idle.calibrate(nanos(late), nanos(cpu));
        }
        Ok(())
    }

    /// Nobody else had anything to do, so no queue owes them a turn. True if one did.
    fn forgive_debts(&mut self) -> bool {
        let (queues, active) = (&mut self.queues, &self.active);
        let debts =
            active.iter().filter_map(|&id| queues[id as usize].as_mut().map(WorkerQueue::forgive));
        debts.fold(false, |any, owed| any | owed)
    }

    /// True if guests were called in few of the sleeps since this was last asked. Whoever sleeps until it is
    /// called asks after the call, on whatever CPU; whoever does not looks for answers meanwhile, and needs
    /// one.
    #[cold]
    fn guests_stay_awake(&mut self) -> bool {
        let calls = self.queues.iter().flatten().map(|queue| queue.ring.calls()).sum();
        self.guest_calls.were_few(calls, self.stats.sleeps)
    }

    /// Sleeps for kicks, completions and commands alike. Submits first: what the last turn was asked to
    /// begin after its own submission (an image's answer, a held request) must not be slept over.
    pub(super) fn sleep(&mut self, at_most: Option<Duration>) -> io::Result<()> {
        let (queues, active) = (&mut self.queues, &self.active);
        let wake_in = |&id: &u32| queues[id as usize].as_mut().and_then(WorkerQueue::wake_in);
        let timeout = active.iter().filter_map(wake_in).chain(at_most).min();
        self.stats.sleeps += 1;
        kill_point!(Submitting);
        self.engine.submit_and_wait(timeout)?;
        kill_point!(Submitted);
        self.unsubmitted = false;
        if self.idle.woke(|| since(self.begun)) && self.guests_stay_awake() {
            leave_cpu();
        }
        for at in 0..self.active.len() {
            if let Some(queue) = self.queues[self.active[at] as usize].as_mut() {
                queue.ring.disarm();
                if queue.disk.held() > 0 {
                    queue.disk.tend_held(&mut self.engine);
                }
                // A sleep says as much as many turns: an idle queue rests after a few of them.
                queue.idle_turns = queue.idle_turns.saturating_add(IDLE_TURNS_MAX / 16);
            }
        }
        Ok(())
    }
}

/// How many requests the disks have to do for queues that are active.
fn at_work<Q: QueueLifecycle>(queues: &[Option<WorkerQueue<Q>>], active: &[u32]) -> usize {
    let of = |&id: &u32| queues[id as usize].as_ref().map_or(0, WorkerQueue::at_work);
    active.iter().map(of).sum()
}

/// The one in the middle: a sleep in which something else happened says nothing.
fn middle(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}
