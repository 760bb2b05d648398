//! One queue of a worker: from its ring to its disk (hot). How it waits, rests and ends: `queue/rest.rs`.

mod rest;

use crate::command::Raise;
use crate::queue::{Broken, Pop, QueueLifecycle, RequestQueue};
use crate::queue_commands::QueueCommands;
use crate::queue_id::QueueId;
use crate::sampler::Sampler;
use ringway_aio::Engine;
use ringway_disk::DiskQueue;
use ringway_throttle::{Gate, Throttled};
use std::ops::ControlFlow;

/// Turns without a request before a queue goes back to being woken by its doorbell.
pub(super) const IDLE_TURNS_MAX: u32 = 2000;

/// Requests taken from one queue before they are submitted and the next queue has its turn. The disk
/// begins with the first of a batch only when the last has been prepared, so a full queue goes in
/// several batches; smaller ones would cost a system call more often.
const BUDGET: usize = 16;

/// The same while a disk that takes its time has nothing of the queue: it begins with these while the
/// others are being prepared.
const BUDGET_FIRST: usize = 2;

/// And then as many times what it has: it is still busy with that when the next ones come.
const BUDGET_RAMP: usize = 2;

/// What requests taken from one queue may cost before the next one has its turn, in units of about
/// 100 ns: a descriptor to read, translate and hand to the kernel, or 4 KiB, which may be copied from
/// the page cache within the submission. Sixteen requests of 4 KiB cost 64 of them.
///
/// A request is taken whole, so a turn costs at most one unit less than this and the dearest request
/// there can be: 1026 descriptors of an indirect table and as many as the ring has, and its bytes. What
/// a turn took too much is taken off the next ones, so that a queue has no more than this of each turn
/// in the long run, whatever its requests are like.
const BUDGET_COST: u64 = 512;

/// Bytes that cost as much as a descriptor, as a power of two.
const UNIT_BYTES_LOG: u32 = 12;

/// The longest debt: a single huge request must not keep its queue waiting for long.
const DEBT_MAX: u64 = 16 * BUDGET_COST;

/// One queue and its hand on a disk.
pub(super) struct WorkerQueue<Q: RequestQueue> {
    pub(super) id: QueueId,
    pub(super) ring: Q,
    pub(super) disk: DiskQueue<Q::Token>,
    pub(super) state: State,
    /// In the worker's list of active queues.
    pub(super) active: bool,
    pub(super) idle_turns: u32,
    /// The last requests were still in flight after the harvest that followed their submission.
    pub(super) lasting: bool,
    pub(super) alarm: Raise,
    pub(super) sampler: Sampler,
    /// Times its doorbell was found rung.
    pub(super) kicks: u64,
    /// Kicks that were found lost.
    pub(super) lost_kicks: u64,
    /// Requests that the last look found overdue.
    pub(super) overdue: usize,
    /// The last look found requests although it rested, when so many kicks had come.
    pub(super) forgotten: Option<u64>,
    /// What the last turns cost beyond [`BUDGET_COST`].
    debt: u64,
    /// The limits of its disk, if it has some.
    pub(super) gate: Option<Box<Gate>>,
    /// Times that it took requests from its ring.
    pub(super) batches: u64,
    /// How its requests have waited for limits that it has no more.
    pub(super) throttled: Throttled,
    /// It is to stop, and its limit lets no more of the backlog pass: that stays where it is.
    pub(super) leaves_backlog: bool,
    /// Those of a transport that has some.
    pub(super) commands: QueueCommands,
}

/// Whether a queue takes new requests.
pub(super) enum State {
    Running,
    /// As `Running`, within limits.
    Limited,
    /// The guest broke it: what is in flight ends, nothing new begins.
    Broken,
    /// As soon as nothing is in flight the ring goes back to whoever asked.
    Stopping,
}

impl State {
    pub(super) fn takes_requests(&self) -> bool {
        matches!(self, Self::Running | Self::Limited)
    }

    pub(super) fn broken(&self) -> Self {
        match self {
            Self::Running | Self::Limited | Self::Broken => Self::Broken,
            Self::Stopping => Self::Stopping,
        }
    }
}

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// A queue that runs, and is not active yet.
    pub(super) fn new(
        id: QueueId,
        ring: Q,
        disk: DiskQueue<Q::Token>,
        alarm: Raise,
        sampler: Sampler,
    ) -> Self {
        let state = State::Running;
        let (active, idle_turns, lasting, kicks) = (false, 0, false, 0);
        let (overdue, forgotten) = (0, None);
        Self {
            id,
            ring,
            disk,
            state,
            active,
            idle_turns,
            lasting,
            alarm,
            sampler,
            kicks,
            lost_kicks: 0,
            overdue,
            forgotten,
            debt: 0,
            gate: None,
            batches: 0,
            throttled: Throttled::default(),
            leaves_backlog: false,
            commands: QueueCommands::default(),
        }
    }

    /// Forgets what earlier turns cost too much; true if there was something.
    pub(super) fn forgive(&mut self) -> bool {
        std::mem::take(&mut self.debt) > 0
    }

    /// Takes requests from the ring and starts them. Returns how many chains were taken.
    #[inline]
    pub(super) fn pop_batch<E: Engine>(&mut self, engine: &mut E) -> usize {
        if self.disk.has_deferred() {
            self.disk.retry(engine, BUDGET);
        }
        if !matches!(self.state, State::Running) {
            return self.pop_limited(engine);
        }
        self.take_batch::<E, false>(engine)
    }

    /// A batch of requests, within its limits if `LIMITED`.
    #[inline]
    pub(super) fn take_batch<E: Engine, const LIMITED: bool>(&mut self, engine: &mut E) -> usize {
        let (mut popped, mut cost, mut last) = (0, self.debt, None);
        let budget = if self.lasting {
            (BUDGET_RAMP * self.disk.in_flight()).clamp(BUDGET_FIRST, BUDGET)
        } else {
            BUDGET
        };
        while popped < budget && cost < BUDGET_COST && !(LIMITED && self.is_used_up()) {
            // No slot free: the request stays in the ring.
            let Some(tag) = self.disk.acquire() else { break };
            match self.ring.pop(self.disk.request_mut(tag)) {
                Ok(Pop::Request(token)) => {
                    cost += self.disk.request_mut(tag).range.len() >> UNIT_BYTES_LOG;
                    if LIMITED {
                        self.charge(tag);
                    }
                    self.sampler.taken(tag);
                    last = Some(tag);
                    // SAFETY: the ring resolved the segments in guest memory that stays mapped
                    // until the queue has nothing in flight and its ring was given back.
                    unsafe { self.disk.start(engine, tag, token) };
                }
                other => {
                    if self.not_begun(tag, other).is_break() {
                        break;
                    }
                }
            }
            cost += u64::from(self.ring.effort());
            popped += 1;
        }
        self.debt = cost.saturating_sub(BUDGET_COST).min(DEBT_MAX);
        // While answers wait, one of them may be of the slot's last request: its end is not ours.
        if let Some(tag) = last.filter(|_| !self.disk.has_late()) {
            // At most BUDGET.
            #[allow(clippy::cast_possible_truncation)]
            self.sampler.begun(popped as u32, tag, || self.disk.request_mut(tag).op);
        }
        self.batches += u64::from(popped > 0);
        popped
    }

    /// What was popped is nothing to begin: goes on if it was a chain.
    #[inline(never)]
    fn not_begun(&mut self, tag: u16, popped: Result<Pop<Q::Token>, Broken>) -> ControlFlow<()> {
        self.disk.abandon(tag);
        match popped {
            Ok(Pop::Refused(token, status)) => {
                self.disk.count_refused();
                self.ring.complete(token, status, 0);
                return ControlFlow::Continue(());
            }
            // A request is begun where it is popped.
            Ok(Pop::Request(_) | Pop::Empty) => {}
            Err(broken) => self.break_off(broken),
        }
        ControlFlow::Break(())
    }
}
