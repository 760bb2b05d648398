//! What the control plane asks of a worker, between its turns.

use super::queue::{State, WorkerQueue};
use super::{IMAGE_BELL, Worker};
use crate::command::{Command, Findings, QueueFindings, QueueId, Rouse, Stopped};
use crate::memory::SharedMemory;
use crate::queue::QueueLifecycle;
use crate::stats::{QueueStats, WorkerStats};
use crate::totals::QueueTotals;
pub(super) use crate::waiting::Waiting;
use ringway_aio::Engine;
use ringway_core::mem::HostRange;
use ringway_disk::DiskStats;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

/// Commands between two turns: who answers one at once is soon asked for the next, and many front-ends
/// that ask without a pause would leave no turn to anybody's requests.
const COMMANDS_MAX: usize = 64;

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// Carries out what the control plane asked for; what is left has its turn after the next one.
    #[cold]
    pub(super) fn handle_commands(&mut self) {
        for _ in 0..COMMANDS_MAX {
            let Some(command) = self.inbox.next() else { return };
            match command {
                Command::Add { ring, disk, client, durable, alarm, reply } => {
                    let _ = reply.send(self.add(ring, disk, client, durable, alarm));
                }
                Command::Stop { id, reply } => self.stop(id, reply),
                Command::Settle { disk, end, reply } => {
                    self.waiting.push(Waiting::Settle { disk, end, reply });
                }
                Command::Flush { disk, reply } => self.flush(disk, reply),
                Command::Edit { id, edit, reply } => {
                    let mut wake = false;
                    if let Some(queue) = self.named(id) {
                        let stalled = queue.ring.is_stalled();
                        edit(&mut queue.ring);
                        wake = stalled && !queue.ring.is_stalled();
                        let memory = queue.ring.shared_memory();
                        queue.disk.watch_memory(memory.and_then(SharedMemory::watcher));
                    }
                    let _ = reply.send(());
                    if wake {
                        self.activate(id.place);
                    }
                }
                Command::Retry { disk, fail, reply } => {
                    let _ = reply.send(self.retry_held(&disk, fail));
                }
                Command::Unused { id, ranges, reply } => {
                    if self.named(id).is_some() {
                        self.waiting.push(Waiting::Unused { queue: id.place, ranges, reply });
                    } else {
                        let _ = reply.send(());
                    }
                }
                Command::SetDurable { id, durable, reply } => {
                    if let Some(queue) = self.named(id) {
                        queue.disk.set_durable_writes(durable);
                    }
                    let _ = reply.send(());
                }
                Command::AdoptLimits { disk, reply } => {
                    let queues = self.queues.iter_mut().flatten();
                    let its = queues.filter(|queue| Arc::ptr_eq(queue.disk.disk(), &disk));
                    its.for_each(WorkerQueue::adopt_limits);
                    let _ = reply.send(());
                }
                Command::QueueStats { id, reply } => {
                    let counts = self.named(id).map(|queue| queue.counts());
                    let _ = reply.send(counts.unwrap_or_default());
                }
                Command::Stats { spreads, reply } => {
                    let _ = reply.send(self.snapshot(spreads));
                }
                Command::Inspect { now_ns, limit_ns, rouse, reply } => {
                    let _ = reply.send(self.inspect(now_ns, limit_ns, rouse));
                }
                Command::Exit => self.exit = true,
            }
        }
    }

    /// The queue that has this name, unless it has stopped.
    fn named(&mut self, id: QueueId) -> Option<&mut WorkerQueue<Q>> {
        self.queues.get_mut(id.place as usize)?.as_mut().filter(|queue| queue.id == id)
    }

    fn stop(&mut self, id: QueueId, reply: SyncSender<Stopped<Q>>) {
        let queue = self.queues.get_mut(id.place as usize).and_then(Option::as_mut);
        if let Some(queue) = queue.filter(|queue| queue.id == id) {
            self.engine.unwatch(id.place + 1, queue.ring.doorbell());
            queue.state = State::Stopping;
            queue.ring.wind_down();
            if queue.ring.peer_is_gone() {
                queue.disk.drop_waiting(&mut self.engine);
            } else if !queue.ring.can_leave() {
                queue.lift_limits();
                queue.disk.hold_no_more(&mut self.engine);
            }
            queue.disk.outlive();
            self.waiting.push(Waiting::Stop { queue: id.place, reply });
            self.activate(id.place);
        }
    }

    /// Answers those whose requests have ended.
    #[cold]
    pub(super) fn answer_waiting(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            self.fail_held_for(at);
            self.begin_flush(at);
            if self.is_over(&self.waiting[at]) {
                match self.waiting.swap_remove(at) {
                    Waiting::Stop { queue, reply } => self.release(queue, &reply),
                    Waiting::Flush { flush, reply } => {
                        let _ = reply.send(self.end_flush(flush));
                    }
                    Waiting::Settle { reply, .. } | Waiting::Unused { reply, .. } => {
                        let _ = reply.send(());
                    }
                }
            } else {
                at += 1;
            }
        }
    }

    fn is_over(&self, waiting: &Waiting<Q>) -> bool {
        match waiting {
            Waiting::Stop { queue, .. } => {
                self.queues[*queue as usize].as_ref().is_none_or(WorkerQueue::is_at_rest)
            }
            Waiting::Flush { flush, .. } => flush.is_over(),
            Waiting::Unused { queue, ranges, .. } => {
                self.queues[*queue as usize].as_ref().is_none_or(|queue| !queue.uses(ranges))
            }
            // Nobody waits any more: the disk is as large as before.
            Waiting::Settle { disk, end, .. } if disk.capacity() > *end => true,
            Waiting::Settle { disk, end, .. } => {
                let mut queues = self.queues.iter().flatten();
                queues.all(|queue| {
                    !Arc::ptr_eq(queue.disk.disk(), disk) || !queue.disk.reaches_beyond(*end)
                })
            }
        }
    }

    /// Gives back the ring of a queue with nothing in flight.
    fn release(&mut self, id: u32, reply: &SyncSender<Stopped<Q>>) {
        let Some(mut queue) = self.queues[id as usize].take() else { return };
        queue.disk.leave_held(|token| queue.ring.leave(token));
        let (stats, totals) = (queue.counts(), queue.totals());
        // Before anybody knows that it has stopped: the next one begins where this one ends.
        queue.gate = None;
        let WorkerQueue { mut ring, mut disk, commands, .. } = queue;
        // What completed in this very turn was published at its end.
        let _ = ring.publish();
        disk.detach_image(&mut self.engine, IMAGE_BELL | id);
        self.engine.detach(disk.file());
        self.detach_commands(&commands);
        self.stats.gone.add(&stats);
        self.active.retain(|&active| active != id);
        self.name_memory();
        // First: whoever asked may let the disk go next, which is not for this thread to do.
        drop(disk);
        self.places.divide();
        let _ = reply.send(Stopped { ring, stats, totals });
    }

    /// Looks at every queue, and wakes those whose kick was lost.
    #[cold]
    fn inspect(&mut self, now_ns: u64, limit_ns: u64, rouse: Option<Rouse>) -> Findings {
        let mut found = Vec::with_capacity(self.queues.len());
        let mut wake = Vec::new();
        let asked = std::mem::replace(&mut self.requests_looked, self.stats.requests);
        let mut quiet = asked == self.stats.requests && self.waiting.is_empty();
        for (id, queue) in (0..).zip(&mut self.queues) {
            let Some(queue) = queue else { continue };
            let (lost_kicks, forgotten) = queue.find_lost_kicks();
            if forgotten {
                wake.push(id);
            }
            quiet &= !forgotten && queue.disk.in_flight() == 0 && !queue.disk.has_deferred();
            self.stats.lost_kicks += lost_kicks;
            let overdue = queue.disk.scan_overdue(now_ns, limit_ns);
            queue.overdue = overdue.requests;
            let disk = Arc::clone(queue.disk.disk());
            found.push(QueueFindings { disk, overdue, lost_kicks });
        }
        wake.into_iter().for_each(|id| self.activate(id));
        self.rouse = rouse.filter(|_| quiet);
        Findings { queues: found, quiet, thread: Some(rustix::thread::gettid()) }
    }

    /// Calls whoever has found this worker quiet.
    #[cold]
    pub(super) fn rouse(&mut self) {
        if let Some(rouse) = self.rouse.take() {
            rouse();
        }
    }

    fn snapshot(&self, spreads: bool) -> WorkerStats {
        let mut stats = self.stats.clone();
        self.batches.add_to(&mut stats.batches);
        self.harvests.add_to(&mut stats.harvests);
        stats.disk = DiskStats::default();
        stats.disk.add(&self.stats.gone);
        for queue in self.queues.iter().flatten() {
            stats.disk.add(&queue.counts());
            stats.queues.push(queue.report(spreads));
        }
        stats.engine = self.engine.counters();
        stats.turns = self.turns;
        stats.age = self.begun.elapsed();
        stats.cpu = thread_cpu_time();
        stats.spins = self.spins.count();
        stats.spun = self.spins.took().min(stats.cpu);
        stats
    }
}

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// True if the data or the answer of a request in flight lies in one of these ranges.
    fn uses(&self, ranges: &[HostRange]) -> bool {
        let memory = self.ring.shared_memory();
        let answers_into =
            |token: &Q::Token| memory.is_some_and(|memory| memory.answers_into(token, ranges));
        self.disk.uses(ranges, answers_into)
    }

    fn report(&self, spreads: bool) -> QueueStats {
        QueueStats {
            id: self.id,
            disk: Arc::clone(self.disk.disk()),
            queue_size: self.ring.depth(),
            in_flight: self.disk.in_flight(),
            overdue: self.overdue,
            held: self.disk.held(),
            broken: matches!(self.state, State::Broken),
            counts: self.counts(),
            latency: self.sampler.latency().filter(|_| spreads).cloned(),
            totals: self.totals(),
        }
    }

    fn totals(&self) -> QueueTotals {
        QueueTotals {
            durations: *self.sampler.durations(),
            kicks: self.kicks,
            calls: self.ring.calls(),
            lost_kicks: self.lost_kicks,
        }
    }
}

/// CPU time of the calling thread: what polling and work have cost together.
pub(super) fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is ours.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    if rc != 0 {
        return Duration::ZERO;
    }
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}
