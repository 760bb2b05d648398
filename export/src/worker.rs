//! The loop: the only file that sees both ring and disk (hot).
//!
//! A worker is one thread with one engine. It serves queues of one or more disks and shares nothing
//! with other workers on the way of a request. Commands arrive between turns; `control.rs` handles them.
//! `queues.rs` is how a worker begins, and takes queues in.

mod commands;
mod control;
mod end;
mod flush;
mod hold;
mod limited;
mod queue;
mod queues;
mod wait;

use crate::clock::since;
use crate::command::{Inbox, Rouse};
use crate::cpu::GuestCalls;
use crate::pinned::Pinned;
use crate::polling::{Idle, Next, Spins};
use crate::queue::{Armed, QueueLifecycle};
use crate::small_counts::SmallCounts;
use crate::stats::WorkerStats;
use crate::waiting::note_flush;
use control::Waiting;
use queue::{IDLE_TURNS_MAX, WorkerQueue};
use ringway_aio::{Done, Engine, Reaped};
use ringway_core::mem::poison_epoch;
use ringway_core::{kill_point, panic_point};
use ringway_disk::{Disk, Places};
use std::io;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Turns between looks at the doorbells of sleeping queues while others keep the worker busy, where an engine does not
/// see them by itself.
const DOORBELLS_EVERY: u64 = 256;

/// Requests taken and operations ended after which it looks, however few turns that took: a turn of many full queues is a
/// long time. A look is a system call, which is little beside these.
const DOORBELLS_AFTER: usize = 64;

/// Looks at the rings in between two turns while there is no work.
const LINGER: u32 = 4;

/// The doorbell of the inbox; queue *n* rings as *n* + 1.
const INBOX_BELL: u32 = 0;

/// With this bit rings the thread of the image of queue *n*.
const IMAGE_BELL: u32 = 1 << 31;

/// One thread's engine and queues.
///
/// # Invariants
/// 1. Queue *n* has the engine's tags `n << 16 | slot`; it goes only when none of them is in flight. The tags of
///    its commands are `n << 32 | tag`, those of flushes of the worker's own (`flush.rs`) are beyond any queue's.
pub struct Worker<E: Engine, Q: QueueLifecycle> {
    engine: E,
    queues: Vec<Option<WorkerQueue<Q>>>,
    active: Vec<u32>,
    waiting: Vec<Waiting<Q>>,
    /// Queues so far.
    taken_in: u64,
    /// Disks that it has or had queues of.
    known: Vec<Weak<Disk>>,
    /// The engine's, divided among these.
    places: Places,
    inbox: Inbox<Q>,
    reaped: Reaped,
    idle: Idle,
    /// What was taken last is queued and not submitted: the sleep that follows does it.
    unsubmitted: bool,
    pinned: Option<Pinned>,
    sample_latency: bool,
    turns: u64,
    /// Requests taken and operations ended since the last look at the doorbells.
    unlooked: usize,
    spins: Spins,
    guest_calls: GuestCalls,
    begun: Instant,
    poison_seen: u64,
    stats: WorkerStats,
    /// Those of `stats.batches` and `stats.harvests` that are small.
    batches: SmallCounts,
    harvests: SmallCounts,
    exit: bool,
    /// Who is to be called at the next request: whoever looked and found nothing to look after.
    rouse: Option<Rouse>,
    /// Requests there had been at the last look.
    requests_looked: u64,
}

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    fn work(&mut self) -> io::Result<()> {
        if self.idle.adapts() {
            self.calibrate()?;
        }
        while !self.exit {
            if self.turn()? {
                continue;
            }
            match self.what_next() {
                Next::Spin => {
                    self.spins.spun(self.turns);
                    self.linger();
                }
                Next::Nap(ns) => self.sleep(Some(Duration::from_nanos(ns)))?,
                Next::Sleep(at_most) => {
                    if self.arm_all() == Armed::Quiet {
                        self.sleep(at_most.map(Duration::from_nanos))?;
                    }
                }
            }
        }
        Ok(())
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

    /// One round: rings → disks → engine → rings. True if anything moved, and false as well if what
    /// was taken may be submitted by the sleep that follows.
    fn turn(&mut self) -> io::Result<bool> {
        let popped = self.pop_batch();
        if popped > 0 {
            self.idle.reset(false, || since(self.begun));
        }
        self.unsubmitted = popped > 0 && !self.unsubmitted && self.may_defer();
        if !self.unsubmitted {
            kill_point!(Submitting);
            self.engine.submit()?;
            kill_point!(Submitted);
        }
        panic_point!("worker");
        // Right after the submission: a fast disk may be done already (origin O2).
        let completed = self.reap_batch();
        if completed > 0 {
            self.idle.reset(true, || since(self.begun));
            if popped > 0 && self.idle.defers() {
                self.note_prompt_disk();
            }
        }
        let answered = Q::HAS_COMMANDS && self.take_results();
        self.publish();
        self.turns = self.turns.wrapping_add(1);
        self.unlooked += popped + completed;
        let looks = self.turns % DOORBELLS_EVERY == 0;
        if looks || self.unlooked >= DOORBELLS_AFTER {
            self.unlooked = 0;
            self.engine.poll_doorbells()?;
        }
        if looks {
            self.tend_held();
        }
        let commanded = self.inbox.is_pending();
        if commanded {
            self.idle.reset(false, || since(self.begun));
            self.handle_commands();
        }
        if poison_epoch() != self.poison_seen {
            self.check_memory();
        }
        if !self.waiting.is_empty() {
            self.answer_waiting();
        }
        let moved = completed > 0 || (popped > 0 && !self.unsubmitted);
        // A command is work: the one to exit must not be slept over.
        Ok(commanded || moved || answered)
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
            self.batches.record(popped, &mut self.stats.batches);
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
            let Some(Some(queue)) = self.queues.get_mut(queue) else {
                note_flush(&mut self.waiting, tag, result);
                continue;
            };
            if let Some(done) = queue.disk.finish(&mut self.engine, slot, result) {
                queue.sampler.done(done.tag);
                queue.ring.complete(done.context, done.status, done.written);
            }
        }
        if count > 0 {
            self.harvests.record(count, &mut self.stats.harvests);
        }
        for at in 0..self.reaped.rung.len() {
            let bell = self.reaped.rung[at];
            if bell & IMAGE_BELL != 0 {
                self.take_answers(bell & !IMAGE_BELL);
            } else if let Some(queue) = bell.checked_sub(1) {
                if let Some(Some(queue)) = self.queues.get_mut(queue as usize) {
                    queue.kicks += 1;
                }
                self.activate(queue);
            }
        }
        count
    }

    /// The thread of a queue's image has something to say.
    #[cold]
    fn take_answers(&mut self, id: u32) {
        if let Some(Some(queue)) = self.queues.get_mut(id as usize) {
            queue.disk.take_answers(&mut self.engine);
        }
        // Answers are published with those of the active queues.
        self.activate(id);
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
            if Q::HAS_COMMANDS {
                queue.send_commands(id, &mut self.engine);
            }
        }
    }

    /// Puts a queue on the active list.
    fn activate(&mut self, id: u32) {
        if let Some(Some(queue)) = self.queues.get_mut(id as usize) {
            if !queue.active {
                queue.active = true;
                queue.idle_turns = 0;
                queue.ring.disarm();
                self.active.push(id);
            }
        }
    }
}

#[cfg(test)]
mod tests;
