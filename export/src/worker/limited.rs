//! A queue of a disk that has limits. What may not pass yet stays in the ring; its worker sleeps until
//! it may, and asks for no kicks meanwhile.

use super::queue::{State, WorkerQueue};
use crate::clock::now_ns;
use crate::queue::QueueLifecycle;
use ringway_aio::Engine;
use ringway_disk::DiskStats;
use ringway_throttle::Gate;
use std::time::Duration;

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// Takes over the limits of its disk, which may be others than before, or none.
    #[cold]
    pub(super) fn adopt_limits(&mut self) {
        let now = now_ns();
        self.throttled_ns = self.throttled_before(now);
        self.gate = Gate::new(self.disk.disk().limits()).map(Box::new);
        self.state = match (&self.state, &self.gate) {
            (State::Running | State::Limited, Some(_)) => State::Limited,
            (State::Running | State::Limited, None) => State::Running,
            (State::Broken, _) => State::Broken,
            (State::Stopping, _) => State::Stopping,
        };
    }

    fn throttled_before(&self, now: u64) -> u64 {
        let gate = self.gate.as_ref().map_or(0, |gate| gate.throttled_ns(now));
        self.throttled_ns + gate
    }

    /// What it has counted.
    pub(super) fn counts(&self) -> DiskStats {
        DiskStats { throttled_ns: self.throttled_before(now_ns()), ..self.disk.stats() }
    }

    /// Requests of a queue that has limits, is broken or stops.
    #[cold]
    pub(super) fn pop_limited<E: Engine>(&mut self, engine: &mut E) -> usize {
        let takes = match (&self.state, &mut self.gate) {
            (State::Limited, Some(gate)) => {
                let wanted = self.ring.has_work() || self.ring.backlog() > 0;
                gate.open(wanted, now_ns)
            }
            // What a predecessor left has to be taken now; it is paid for by what comes after it.
            _ => self.has_backlog(),
        };
        if !takes {
            return 0;
        }
        let popped = self.take_batch::<E, true>(engine);
        if let Some(gate) = &mut self.gate {
            gate.settle(now_ns);
        }
        popped
    }

    /// Nothing more may be taken in this turn. A queue that stops takes what it has to.
    pub(super) fn is_used_up(&self) -> bool {
        let open = self.gate.as_ref().is_none_or(|gate| gate.is_open());
        !open && matches!(self.state, State::Limited)
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
        let limited = matches!(self.state, State::Limited);
        let gate = self.gate.as_mut().filter(|_| limited)?;
        gate.wait(now_ns()).map(Duration::from_nanos)
    }
}
