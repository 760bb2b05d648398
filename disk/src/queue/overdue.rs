//! Requests that take too long: found by scanning now and then, at no cost to those that do not.
//!
//! A request on the fast path bears no time. The first scan that sees it writes one down beside the
//! slot and takes it off the fast path, so that its end clears the mark; each further scan compares.
//! What is found is therefore a little younger than the request.

use super::DiskQueue;
use super::slots::{Sighting, Slots, Stage};
use ringway_core::{ByteRange, Op};

impl<C> DiskQueue<C> {
    /// Looks for requests that have been in flight for `limit_ns` or longer: in the engine, held by
    /// the scheduler, or waiting for bounce memory or a lock. `now_ns` is of any clock that only goes
    /// forward, always the same one. Takes time by the depth of the queue; call it every few seconds.
    #[cold]
    pub fn scan_overdue(&mut self, now_ns: u64, limit_ns: u64) -> Overdue {
        let found = scan(&mut self.slots, now_ns, limit_ns);
        self.mark_old(now_ns);
        found
    }
}

/// What a scan has found in one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    /// Requests in flight for longer than the limit.
    pub requests: usize,
    /// Those of them that no scan has counted before.
    pub new: usize,
    /// The oldest of them.
    pub oldest: Option<Oldest>,
}

/// A request that has been in flight for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// What it is to do.
    pub op: Op,
    /// Where on the disk; empty for flushes.
    pub range: ByteRange,
    /// For how long it has been seen, in nanoseconds.
    pub age_ns: u64,
}

impl Overdue {
    /// Adds what was found in another queue.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.new += other.new;
        let age = |oldest: &Option<Oldest>| oldest.map_or(0, |oldest| oldest.age_ns);
        if age(&other.oldest) > age(&self.oldest) {
            self.oldest = other.oldest;
        }
    }
}

/// Scans the slots of a queue, at a time of the caller's clock.
pub(crate) fn scan<C>(slots: &mut Slots<C>, now_ns: u64, limit_ns: u64) -> Overdue {
    let mut found = Overdue::default();
    for (slot, slow) in slots.in_flight() {
        if slow.held.is_some_and(|held| !held.tried) {
            // It waits for its operator, not for the disk.
            continue;
        }
        if slot.stage == Stage::Whole {
            slot.stage = Stage::Watched;
            slow.seen = Sighting::default();
        }
        let since = *slow.seen.since_ns.get_or_insert(now_ns);
        let age_ns = now_ns.saturating_sub(since);
        if age_ns < limit_ns {
            continue;
        }
        let (op, range) = (slot.request.op, slot.request.range);
        let new = usize::from(!slow.seen.counted);
        slow.seen.counted = true;
        let oldest = Some(Oldest { op, range, age_ns });
        found.add(&Overdue { requests: 1, new, oldest });
    }
    slots.stats.overdue += found.new as u64;
    found
}
