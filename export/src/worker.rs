//! The loop: the only file that sees both ring and disk (hot).
//!
//! A worker is one thread with one engine. It serves queues of one or more disks and shares nothing
//! with other workers on the way of a request. Commands arrive between turns; `control.rs` handles them.

mod control;
mod end;
mod hold;
mod limited;
mod queue;

use crate::command::{Alarm, Inbox, QueueId, Raise, Rouse};
use crate::memory::SharedMemory;
use crate::pinned::Pinned;
use crate::polling::{Idle, Spins};
use crate::pool::WorkerOptions;
use crate::queue::{Armed, Broken, QueueLifecycle};
use crate::sampler::Sampler;
use crate::stats::WorkerStats;
use control::Waiting;
use queue::WorkerQueue;
use ringway_aio::{Done, Engine, Reaped};
use ringway_core::mem::poison_epoch;
use ringway_core::{kill_point, panic_point};
use ringway_disk::DiskQueue;
use std::io;
use std::time::Instant;

/// Turns without a request before a queue goes back to being woken by its doorbell.
const IDLE_TURNS_MAX: u32 = 2000;

/// Turns between looks at the doorbells of sleeping queues while others keep the worker busy.
const LOOK_EVERY: u64 = 256;

/// Looks at the rings in between two turns while there is no work.
const LINGER: u32 = 4;

/// The doorbell of the inbox; queue *n* rings as *n* + 1.
const INBOX_BELL: u32 = 0;

/// One thread's engine and queues.
///
/// # Invariants
/// 1. WorkerQueue *n* has the engine's tags `n << 16 | slot`; it goes only when none of them is in flight.
pub struct Worker<E: Engine, Q: QueueLifecycle> {
    engine: E,
    queues: Vec<Option<WorkerQueue<Q>>>,
    active: Vec<u32>,
    waiting: Vec<Waiting<Q>>,
    inbox: Inbox<Q>,
    reaped: Reaped,
    idle: Idle,
    pinned: Option<Pinned>,
    sample_latency: bool,
    turns: u64,
    spins: Spins,
    begun: Instant,
    poison_seen: u64,
    stats: WorkerStats,
    exit: bool,
    /// Who is to be called at the next request: whoever looked and found nothing to look after.
    rouse: Option<Rouse>,
    /// Requests there had been at the last look.
    requests_looked: u64,
}

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// A worker without queues.
    ///
    /// # Errors
    /// What the host says to listening to the inbox.
    pub fn new(mut engine: E, inbox: Inbox<Q>, options: &WorkerOptions) -> io::Result<Self> {
        engine.watch(INBOX_BELL, inbox.doorbell())?;
        let depth = engine.limits().depth as usize;
        Ok(Self {
            engine,
            queues: Vec::new(),
            active: Vec::with_capacity(64),
            waiting: Vec::new(),
            inbox,
            reaped: Reaped::with_capacity(depth, 256),
            idle: Idle::new(options.polling),
            pinned: options.pin_memory.then(Pinned::default),
            sample_latency: options.sample_latency,
            turns: 0,
            spins: Spins::default(),
            begun: Instant::now(),
            poison_seen: poison_epoch(),
            stats: WorkerStats::default(),
            exit: false,
            rouse: None,
            requests_looked: 0,
        })
    }

    /// Works until told to exit.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    pub fn run(mut self) -> io::Result<()> {
        let outcome = self.work().inspect_err(|_| self.give_up());
        self.take_down(false);
        outcome
    }

    fn work(&mut self) -> io::Result<()> {
        while !self.exit {
            let worked = self.turn()?;
            if worked {
                self.idle.reset();
            } else if self.keeps_spinning() {
                self.spins.spun(self.turns);
                self.linger();
            } else if self.arm_all() == Armed::Quiet {
                self.sleep()?;
            }
        }
        Ok(())
    }

    #[inline]
    fn keeps_spinning(&mut self) -> bool {
        let (queues, active) = (&self.queues, &self.active);
        let in_flight = |id: u32| queues[id as usize].as_ref().is_some_and(WorkerQueue::is_at_work);
        self.idle.keep_spinning(|| active.iter().any(|&id| in_flight(id)))
    }

    /// Looks at the rings only, a few times: most turns without work find none in the next either.
    #[inline]
    fn linger(&mut self) {
        for _ in 0..LINGER {
            std::hint::spin_loop();
            for &id in &self.active {
                if self.queues[id as usize].as_ref().is_some_and(|queue| queue.ring.has_work()) {
                    return;
                }
            }
        }
    }

    /// One round: rings → disks → engine → rings. True if anything moved.
    fn turn(&mut self) -> io::Result<bool> {
        let popped = self.pop_batch();
        kill_point!(Submitting);
        self.engine.submit()?;
        kill_point!(Submitted);
        panic_point!("worker");
        // Right after the submission: a fast disk may be done already (origin O2).
        let completed = self.reap_batch();
        self.publish();
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(LOOK_EVERY) {
            self.engine.poll_doorbells()?;
            self.tend_held();
        }
        let commanded = self.inbox.is_pending();
        if commanded {
            self.handle_commands();
        }
        if poison_epoch() != self.poison_seen {
            self.check_memory();
        }
        if !self.waiting.is_empty() {
            self.answer_waiting();
        }
        // A command is work: the one to exit must not be slept over.
        Ok(commanded || popped + completed > 0)
    }

    /// Takes requests from every active ring, at most `BUDGET` of each.
    fn pop_batch(&mut self) -> usize {
        let mut popped = 0;
        let mut at = 0;
        // Another queue is first each turn: the engine's last free place goes to each in turn.
        if self.active.len() > 1 {
            self.active.rotate_left(1);
        }
        while let Some(&id) = self.active.get(at) {
            let Some(queue) = self.queues[id as usize].as_mut() else {
                self.active.swap_remove(at);
                continue;
            };
            let taken = queue.pop_batch(&mut self.engine);
            queue.disk.unplug(&mut self.engine);
            popped += taken;
            queue.idle_turns = if taken > 0 { 0 } else { queue.idle_turns.saturating_add(1) };
            if queue.idle_turns > IDLE_TURNS_MAX && !self.idle.never_sleeps() && queue.put_to_rest()
            {
                queue.active = false;
                self.active.swap_remove(at);
                continue;
            }
            at += 1;
        }
        if popped > 0 {
            self.stats.requests += popped as u64;
            self.stats.batches.saturating_record(popped as u64);
            if self.rouse.is_some() {
                self.rouse();
            }
        }
        popped
    }

    /// Collects what completed, then acts on it.
    fn reap_batch(&mut self) -> usize {
        self.reaped.clear();
        let count = self.engine.reap(&mut self.reaped);
        for &Done { tag, result } in &self.reaped.done {
            // The tag is queue << 16 | slot (Worker invariant 1).
            #[allow(clippy::cast_possible_truncation)]
            let (queue, slot) = ((tag >> 16) as usize, tag as u16);
            kill_point!(Completed);
            if let Some(queue) = self.queues[queue].as_mut()
                && let Some(done) = queue.disk.finish(&mut self.engine, slot, result)
            {
                queue.sampler.done(done.tag);
                queue.ring.complete(done.context, done.status, done.written);
            }
        }
        if count > 0 {
            self.stats.harvests.saturating_record(count as u64);
        }
        for at in 0..self.reaped.rung.len() {
            if let Some(queue) = self.reaped.rung[at].checked_sub(1) {
                if let Some(Some(queue)) = self.queues.get_mut(queue as usize) {
                    queue.kicks += 1;
                }
                self.activate(queue);
            }
        }
        count
    }

    /// Makes the answers of every active queue visible.
    fn publish(&mut self) {
        for &id in &self.active {
            let Some(queue) = self.queues[id as usize].as_mut() else { continue };
            while let Some(done) = queue.disk.take_late() {
                queue.sampler.done(done.tag);
                queue.ring.complete(done.context, done.status, done.written);
            }
            if queue.idle_turns == 0 {
                queue.lasting = queue.disk.in_flight() > 0;
            }
            if queue.ring.publish().is_err() {
                self.stats.lost_calls += 1;
            }
        }
    }

    /// Puts a queue on the active list.
    fn activate(&mut self, id: u32) {
        if let Some(Some(queue)) = self.queues.get_mut(id as usize)
            && !queue.active
        {
            queue.active = true;
            queue.idle_turns = 0;
            queue.ring.disarm();
            self.active.push(id);
        }
    }

    /// Drain, re-arm, look again, for all active queues: `Quiet` only if every one is.
    fn arm_all(&mut self) -> Armed {
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

    /// Nobody else had anything to do, so no queue has_backlog them a turn. True if one did.
    fn forgive_debts(&mut self) -> bool {
        let (queues, active) = (&mut self.queues, &self.active);
        let debts =
            active.iter().filter_map(|&id| queues[id as usize].as_mut().map(WorkerQueue::forgive));
        debts.fold(false, |any, owed| any | owed)
    }

    /// Sleeps for kicks, completions and commands alike.
    fn sleep(&mut self) -> io::Result<()> {
        let (queues, active) = (&mut self.queues, &self.active);
        let wake_in = |&id: &u32| queues[id as usize].as_mut().and_then(WorkerQueue::wake_in);
        let patience = active.iter().filter_map(wake_in);
        self.stats.sleeps += 1;
        self.engine.wait(patience.min())?;
        self.idle.woke();
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

    #[cold]
    fn add(
        &mut self,
        ring: Q,
        disk: std::sync::Arc<ringway_disk::Disk>,
        durable: bool,
        alarm: Raise,
    ) -> io::Result<QueueId> {
        let at = self.queues.iter().position(Option::is_none).unwrap_or(self.queues.len());
        let id = u32::try_from(at).map_err(io::Error::other)?;
        let file = self.engine.attach(disk.file())?;
        let limits = self.engine.limits().clone();
        let mut disk = DiskQueue::new(disk, &limits, file, u64::from(id) << 16, ring.depth())
            .inspect_err(|_| self.engine.detach(file))?;
        disk.set_durable_writes(durable);
        disk.watch_memory(ring.shared_memory().and_then(SharedMemory::watcher));
        self.engine.watch(id + 1, ring.doorbell()).inspect_err(|_| self.engine.detach(file))?;
        self.queues.resize_with(self.queues.len().max(at + 1), || None);
        self.make_room();
        let mut queue = WorkerQueue::new(ring, disk, alarm, Sampler::new(self.sample_latency));
        queue.adopt_limits();
        self.queues[at] = Some(queue);
        self.name_memory();
        self.rouse();
        // Requests may have been there before the doorbell was watched.
        self.activate(id);
        // And its memory may have vanished while the control plane held it.
        self.check_memory();
        Ok(QueueId(id))
    }

    /// All of them may be active, and all bells ring: an engine may look twice before it tells.
    #[cold]
    fn make_room(&mut self) {
        let (queues, bells) = (self.queues.len(), 1 + self.queues.len());
        self.active.reserve(queues.saturating_sub(self.active.len()));
        self.reaped.rung.reserve((2 * bells).saturating_sub(self.reaped.rung.len()));
    }

    /// Tells the engine which guests' memory the present queues use, if it is to be pinned.
    #[cold]
    fn name_memory(&mut self) {
        if let Some(pinned) = &mut self.pinned {
            let memory =
                self.queues.iter().flatten().filter_map(|queue| queue.ring.shared_memory());
            let maps = memory.map(SharedMemory::map);
            pinned.update(&mut self.engine, maps);
        }
    }

    /// Some peer cut its memory short: find out whose queue it was.
    #[cold]
    fn check_memory(&mut self) {
        self.poison_seen = poison_epoch();
        for queue in self.queues.iter_mut().flatten() {
            if queue.ring.shared_memory().is_some_and(SharedMemory::is_gone) {
                // Told even if the queue was broken before: the whole connection must go.
                queue.state = queue.state.broken();
                (queue.alarm)(Alarm::Broken(Broken::MemoryGone));
            }
        }
    }
}

#[cfg(test)]
mod tests;
