//! How a queue of a worker waits, rests and ends.

use super::{State, WorkerQueue};
use crate::command::Alarm;
use crate::queue::{Armed, Broken, QueueLifecycle};
use std::time::Duration;

/// How long to sleep when requests wait for something that rings no bell of their worker: a range
/// being written by another one.
const DEFERRED_SLEEP: Duration = Duration::from_micros(50);

/// The same while all of them wait for late writes.
const LATE_SLEEP: Duration = Duration::from_millis(2);

impl<Q: QueueLifecycle> WorkerQueue<Q> {
    /// How many requests the disk has to do for it.
    pub(in crate::worker) fn at_work(&self) -> usize {
        self.disk.in_flight().saturating_sub(self.disk.held())
    }

    /// True if the disk has something to do for it.
    pub(in crate::worker) fn is_at_work(&self) -> bool {
        self.at_work() > 0
    }

    /// True if a queue that is to stop may: nothing is under way, and nothing has to be taken before.
    /// Held requests are left where a successor finds them, and all that waits behind them is, too, as
    /// is what its limit does not let pass.
    #[cold]
    pub(in crate::worker) fn is_at_rest(&self) -> bool {
        let leaves = self.disk.held() > 0 || self.leaves_backlog || !self.has_backlog();
        if Q::HAS_COMMANDS && !self.commands.are_done() {
            return false;
        }
        leaves && !self.is_at_work() && !self.disk.has_late()
    }

    /// True if the queue must not stop yet: what a killed predecessor left in flight is taken first,
    /// within its limits, unless it waits for translations, which need not come. It stays in the record then.
    #[cold]
    pub(in crate::worker) fn has_backlog(&self) -> bool {
        matches!(self.state, State::Stopping) && self.ring.backlog() > 0 && !self.ring.is_stalled()
    }

    /// In how long the worker has to look at it, although nothing rings.
    #[inline]
    pub(in crate::worker) fn wake_in(&mut self) -> Option<Duration> {
        if self.disk.has_to_look() {
            let late = self.disk.awaits_late_only();
            return Some(if late { LATE_SLEEP } else { DEFERRED_SLEEP });
        }
        let limit = if self.gate.is_some() { self.throttled_for() } else { None };
        match (limit, self.disk.wake_in()) {
            (Some(limit), Some(disk)) => Some(limit.min(disk)),
            (limit, disk) => limit.or(disk),
        }
    }

    pub(in crate::worker) fn arm(&mut self) -> Armed {
        // Only an active queue's answers are published, and nothing rings for those that are made here.
        if self.disk.has_late() || (Q::HAS_COMMANDS && self.commands.refused) {
            return Armed::WorkArrived;
        }
        // Whose requests wait for a limit needs no kicks.
        if !self.state.takes_requests() || self.is_throttled() {
            return Armed::Quiet;
        }
        match self.ring.arm() {
            // All slots taken: the next completion brings us back, not a kick.
            Ok(Armed::WorkArrived) if self.disk.in_flight() == usize::from(self.ring.depth()) => {
                Armed::Quiet
            }
            Ok(armed) => armed,
            Err(broken) => {
                self.break_off(broken);
                Armed::Quiet
            }
        }
    }

    /// True if the queue can leave the active list: its doorbell brings it back.
    #[cold]
    pub(in crate::worker) fn put_to_rest(&mut self) -> bool {
        self.idle_turns = 0;
        let resting = !matches!(self.state, State::Stopping) && !self.is_throttled();
        resting && self.disk.in_flight() == 0 && self.arm() == Armed::Quiet
    }

    /// Looks whether the ring of a queue that rests holds requests: the queue has to be activated
    /// then, if the second value is true. Their kick may be on its way; if it still has not come by
    /// the next look, it is counted as lost.
    #[cold]
    pub(in crate::worker) fn find_lost_kicks(&mut self) -> (u64, bool) {
        let lost = self.forgotten.take() == Some(self.kicks);
        self.lost_kicks += u64::from(lost);
        let rests = !self.active && self.state.takes_requests();
        let forgotten = rests && self.ring.has_work();
        if forgotten {
            self.forgotten = Some(self.kicks);
        }
        (u64::from(lost), forgotten)
    }

    #[cold]
    pub(super) fn break_off(&mut self, broken: Broken) {
        if self.state.takes_requests() {
            self.state = State::Broken;
            (self.alarm)(Alarm::Broken(broken));
        }
    }
}
