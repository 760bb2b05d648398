//! The scheduler of one queue: what becomes of a request that arrives, and of a run that is done.

use crate::merge_queue::{Limits, MergeQueue, RunId};
use crate::queue_policy::QueuePolicy;
use crate::shared_policy::SharedPolicy;
use crate::stats::SchedulerStats;
use ringway_core::{ByteRange, DataOp};

/// Turns between looks at the clock: a queue's turn takes microseconds, and a report is due every
/// [`REPORT_NS`](crate::auto::REPORT_NS).
pub const TURNS: u8 = 64;

/// What a scheduler has to know of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It moves data, one operation can carry it, and its neighbours may come along.
    Data {
        /// Only those of one kind are neighbours.
        op: DataOp,
        /// Where on the disk, in bytes; not empty.
        range: ByteRange,
        /// Pieces of its memory.
        segments: usize,
    },
    /// It overtakes nothing, and nothing is merged across it: a flush, a discard, zeroing.
    Barrier,
    /// It goes by itself, and orders nothing.
    Alone,
}

/// What becomes of a request that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a request that is not held has to be sent"]
pub enum Admitted {
    /// Send it now, by itself.
    Send,
    /// As [`Admitted::Send`], and tell of its end: [`Scheduler::finished`].
    SendTimed,
    /// It is held, and will be part of a run.
    Held,
}

/// The queue that a scheduler works for: it knows the requests by their slots, and the way to the
/// disk.
pub trait Owner {
    /// The time in nanoseconds, since any moment that stays the same for all queues of a disk.
    fn now(&self) -> u64;
    /// Bytes of the disk that a slot's request covers.
    fn bytes(&self, slot: u16) -> u64;
    /// Sends the requests of a run as one operation. False if there is no room for more just now;
    /// the run itself is taken either way.
    fn start_run(&mut self, run: Run<'_>) -> bool;
    /// A request of a merged operation did not get its bytes: it goes again, by itself.
    fn start_alone(&mut self, slot: u16);
    /// A request of a merged operation got all its bytes.
    fn finish(&mut self, slot: u16);
}

/// Requests that lie one behind the other on the disk, and go as one operation.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    queue: &'a MergeQueue,
    id: RunId,
}

impl<'a> Run<'a> {
    /// Its name, until its operation is over.
    #[must_use]
    pub fn id(self) -> RunId {
        self.id
    }

    /// What its operation is.
    #[must_use]
    pub fn op(self) -> DataOp {
        self.queue.op(self.id)
    }

    /// Where it is, in bytes.
    #[must_use]
    pub fn range(self) -> ByteRange {
        self.queue.range(self.id)
    }

    /// The first of its slots.
    #[must_use]
    pub fn first(self) -> u16 {
        self.queue.first(self.id)
    }

    /// Its slots, in the order of sectors.
    pub fn slots(self) -> impl Iterator<Item = u16> + 'a {
        self.queue.slots(self.id)
    }
}

/// The scheduler of one queue, for any mode but `bio` by order.
///
/// It holds requests by their slots and decides when they go. What a request is, and how it gets to
/// the disk, its [`Owner`] knows.
///
/// # Invariants
/// 1. `batch` is `None` unless a request was held since the last dispatch.
#[derive(Debug)]
pub struct Scheduler {
    policy: QueuePolicy,
    queue: MergeQueue,
    /// When requests of a probe were sent, by slot.
    sent: Box<[Option<u64>]>,
    /// When the first request that was held since the last dispatch came.
    batch: Option<u64>,
    turns: u8,
}

impl Scheduler {
    /// A scheduler for requests of slots below `depth`, on a disk of this policy. Allocates; call at
    /// start only.
    #[must_use]
    pub fn new(shared: &SharedPolicy, depth: u16, limits: Limits) -> Self {
        Self {
            policy: QueuePolicy::new(shared),
            queue: MergeQueue::new(depth, limits),
            sent: vec![None; depth.into()].into(),
            batch: None,
            turns: 0,
        }
    }

    /// True if requests that move data need not be shown to it for now: nothing is merged, and
    /// nobody looks.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.policy.plugs() && !self.policy.probes()
    }

    /// True if new requests are held and merged.
    #[must_use]
    pub fn merges(&self) -> bool {
        self.policy.plugs()
    }

    /// True if requests are held.
    #[inline]
    #[must_use]
    pub fn holds(&self) -> bool {
        self.queue.holds()
    }

    /// What was counted.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        self.queue.stats()
    }

    /// The request of `slot` has arrived, while `in_flight` others of its queue are under way.
    /// Before a barrier all that is held is sent.
    pub fn admit(
        &mut self,
        owner: &mut impl Owner,
        slot: u16,
        kind: Kind,
        in_flight: usize,
    ) -> Admitted {
        let Kind::Data { op, range, segments } = kind else {
            if kind == Kind::Barrier && self.queue.holds() {
                self.dispatch_all(owner);
            }
            return Admitted::Send;
        };
        if self.policy.plugs() {
            let now = *self.batch.get_or_insert_with(|| owner.now());
            self.queue.plug(slot, op, range, segments, now);
            return Admitted::Held;
        }
        if !self.policy.probes() {
            return Admitted::Send;
        }
        self.policy.started(op, range, in_flight);
        self.sent[usize::from(slot)] = Some(owner.now());
        Admitted::SendTimed
    }

    /// A request that went by itself is done; the clock is read if that is to be known.
    pub fn finished(&mut self, slot: u16, now: impl FnOnce() -> u64) {
        if let Some(sent) = self.sent[usize::from(slot)].take() {
            self.policy.finished(now().saturating_sub(sent));
        }
    }

    /// Sends what may go now of what is held. Call once a turn, after the last
    /// [`Scheduler::admit`], and when an operation's end may have made room.
    pub fn dispatch(&mut self, owner: &mut impl Owner) {
        let plugs = self.policy.plugs();
        let now = self.batch.take().unwrap_or_else(|| if plugs { owner.now() } else { 0 });
        loop {
            // Where nothing is merged any more nothing has to wait any more.
            let next = if plugs { self.queue.next(now) } else { self.queue.next_of_all() };
            let Some(id) = next else { return };
            if !owner.start_run(Run { queue: &self.queue, id }) {
                return;
            }
        }
    }

    /// Sends all that is held, for what must not overtake it.
    #[cold]
    fn dispatch_all(&mut self, owner: &mut impl Owner) {
        self.batch = None;
        while let Some(id) = self.queue.next_of_all() {
            let _ = owner.start_run(Run { queue: &self.queue, id });
        }
    }

    /// When to call [`Scheduler::dispatch`] again even if no operation has ended by then: `None` if
    /// nothing is held, or if only an operation's end makes room.
    #[must_use]
    pub fn wake_at(&self) -> Option<u64> {
        self.queue.wake_at()
    }

    /// A run that was sent and is not over.
    #[must_use]
    pub fn run(&self, id: RunId) -> Run<'_> {
        Run { queue: &self.queue, id }
    }

    /// The operation of a run is over. If it was the operation of one request, that slot ends as if
    /// it had never been held.
    pub fn end_single(&mut self, id: RunId) -> Option<u16> {
        let first = self.queue.first(id);
        if self.queue.after(first).is_some() {
            return None;
        }
        self.queue.done(id);
        Some(first)
    }

    /// The merged operation of a run is over: it moved the first `moved` bytes. Requests that did not
    /// get all of theirs go again, each by itself, so that only those fail that have to.
    pub fn end_run(&mut self, owner: &mut impl Owner, id: RunId, moved: u64) {
        let mut left = moved;
        if moved < self.queue.range(id).len() {
            self.queue.was_split();
        }
        let first = self.queue.first(id);
        self.queue.done(id);
        let mut next = Some(first);
        while let Some(slot) = next {
            // Before the slot is free for another request.
            next = self.queue.after(slot);
            let bytes = owner.bytes(slot);
            if bytes <= left {
                left -= bytes;
                owner.finish(slot);
            } else {
                left = 0;
                owner.start_alone(slot);
            }
        }
    }

    /// Counts a turn of the queue. True if [`Scheduler::follow`] is to be called.
    #[inline]
    pub fn turn(&mut self) -> bool {
        if !self.policy.adapts() {
            return false;
        }
        self.turns = self.turns.wrapping_add(1);
        self.turns % TURNS == 0
    }

    /// Has the next turn call [`Scheduler::follow`]: a while has passed.
    pub fn follow_soon(&mut self) {
        self.turns = TURNS - 1;
    }

    /// Takes up the policy that is in use now, reports what was seen, begins another probe. `done`:
    /// requests and bytes read and written since the queue was made.
    #[cold]
    pub fn follow(&mut self, shared: &SharedPolicy, now: u64, done: impl FnOnce() -> (u64, u64)) {
        if self.policy.is_due(now) {
            self.policy.report(shared, now, done(), self.queue.stats());
        }
        self.policy.follow(shared);
    }
}

#[cfg(test)]
mod tests;
