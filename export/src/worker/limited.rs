//! A queue of a disk that has limits. What may not pass yet stays in the ring; its worker sleeps until
//! it may, and asks for no kicks meanwhile.

use super::queue::{State, WorkerQueue};
use crate::clock::now_ns;
use crate::queue::QueueLifecycle;
use ringway_aio::Engine;
use ringway_disk::DiskStats;
use ringway_throttle::{Gate, Throttled};
use std::time::Duration;

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// Takes over the limits of its disk, which may be others than before, or none.
    #[cold]
    pub(super) fn adopt_limits(&mut self) {
        let now = now_ns();
        self.throttled = self.throttled_before(now);
        // What the old one leaves to its disk is known to the new one.
        self.gate = None;
        self.gate = Gate::new(self.disk.disk().limits()).map(Box::new);
        if matches!(self.state, State::Stopping) && !self.ring.can_leave() {
            self.lift_limits();
        }
        self.state = match (&self.state, &self.gate) {
            (State::Running | State::Limited, Some(_)) => State::Limited,
            (State::Running | State::Limited, None) => State::Running,
            (State::Broken, _) => State::Broken,
            (State::Stopping, _) => State::Stopping,
        };
    }

    /// It stops and can leave nothing to anybody: what a predecessor left is carried out at once, and the disk pays for it
    /// later. Of a queue that was killed with its daemon that is one ring of requests at most. Whoever forges more
    /// than the disk can have had in flight has the rest of it left in the record.
    #[cold]
    pub(super) fn lift_limits(&mut self) {
        if let Some(gate) = &mut self.gate {
            gate.lift(now_ns());
        }
    }

    fn throttled_before(&self, now: u64) -> Throttled {
        let gate = self.gate.as_ref().map(|gate| gate.throttled(now)).unwrap_or_default();
        self.throttled.and(gate)
    }

    /// What it has counted.
    pub(super) fn counts(&self) -> DiskStats {
        let Throttled { times, ns } = self.throttled_before(now_ns());
        let batches = self.batches;
        DiskStats { batches, throttled: times, throttled_ns: ns, ..self.disk.stats() }
    }

    /// Requests of a queue that has limits, is broken or stops.
    #[cold]
    pub(super) fn pop_limited<E: Engine>(&mut self, engine: &mut E) -> usize {
        let stops = matches!(self.state, State::Stopping);
        let wanted = match stops {
            true => self.has_backlog(),
            false => self.ring.has_work() || self.ring.backlog() > 0,
        };
        let takes = match (&self.state, &mut self.gate) {
            (State::Limited | State::Stopping, Some(gate)) => {
                let mut looked = false;
                let opens = gate.open(wanted, || {
                    looked = true;
                    now_ns()
                });
                if looked && gate.is_closed() {
                    self.disk.disk().mark_at_limit();
                }
                opens && (wanted || !stops)
            }
            _ => stops && wanted,
        };
        if stops {
            // What a predecessor left and does not pass yet stays in the record.
            self.leaves_backlog = wanted && !takes;
        }
        if !takes {
            return 0;
        }
        let popped = self.take_batch::<E, true>(engine);
        if let Some(gate) = &mut self.gate {
            gate.settle(now_ns);
        }
        popped
    }

    /// Nothing more may be taken in this turn.
    pub(super) fn is_used_up(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| !gate.is_open())
    }

    /// The request in slot `tag` was taken.
    pub(super) fn charge(&mut self, tag: u16) {
        if let Some(gate) = &mut self.gate {
            let request = self.disk.request_mut(tag);
            gate.take(request.op, request.range.len());
        }
    }

    /// True while its requests wait for a limit.
    pub(super) fn is_throttled(&self) -> bool {
        let closed = self.gate.as_ref().is_some_and(|gate| gate.is_closed());
        closed && matches!(self.state, State::Limited)
    }

    /// In how long its worker has to look at it, although nothing rings.
    pub(super) fn throttled_for(&mut self) -> Option<Duration> {
        let limited = matches!(self.state, State::Limited | State::Stopping);
        let gate = self.gate.as_mut().filter(|_| limited)?;
        gate.wait(now_ns()).map(Duration::from_nanos)
    }
}
