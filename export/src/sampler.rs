//! How long requests take: one of many is timed, so that clocks cost next to nothing.
//!
//! At most one request of a queue is timed at a time: the last of a batch, whose start is the end of
//! that batch, until its own answer, whatever operation of the engine brought it. While none is
//! timed, a queue pays one comparison per request and one per completion.

use crate::totals::{Durations, OPERATIONS, record};
use hdrhistogram::Histogram;
use ringway_core::Op;
use std::time::Instant;

/// Requests from one that is timed to the next. A prime, so that guests with a rhythm are not always
/// met at the same beat.
const EVERY: u32 = 61;

/// What latencies are told apart from one another, in nanoseconds: a little over nothing, and a
/// minute. Longer ones count as a minute.
const RANGE_NS: (u64, u64) = (256, 60_000_000_000);

/// Latencies of timed requests, in nanoseconds: from the end of the batch in which they were taken
/// from the ring to being answered.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Reads.
    pub reads: Histogram<u32>,
    /// Writes.
    pub writes: Histogram<u32>,
    /// Flushes, discards and write-zeroes.
    pub others: Histogram<u32>,
}

impl Latency {
    /// Nothing timed. All memory it will ever need is taken here: 30 KiB.
    #[must_use]
    pub fn new() -> Self {
        let (low, high) = RANGE_NS;
        let empty = Histogram::new_with_bounds(low, high, 2).expect("the bounds are sound");
        Self { reads: empty.clone(), writes: empty.clone(), others: empty }
    }

    /// Adds what another queue has timed.
    pub fn add(&mut self, other: &Self) {
        // All have the same bounds.
        let _ = self.reads.add(&other.reads);
        let _ = self.writes.add(&other.writes);
        let _ = self.others.add(&other.others);
    }

    fn of(&mut self, op: Op) -> Option<&mut Histogram<u32>> {
        match op {
            Op::Read => Some(&mut self.reads),
            Op::Write => Some(&mut self.writes),
            Op::Flush | Op::Discard | Op::WriteZeroes => Some(&mut self.others),
            Op::GetId => None,
        }
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new()
    }
}

/// The request being timed.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// Its slot, or [`NONE`].
    slot: u32,
    op: Op,
    /// Requests still to pass before the next one is timed.
    left: u32,
    since: Instant,
    latency: Option<Box<Latency>>,
    durations: [Durations; OPERATIONS.len()],
}

/// No slot has this number.
const NONE: u32 = u32::MAX;
/// So many requests that counting them down is not worth avoiding.
const NEVER: u32 = u32::MAX;

impl Sampler {
    /// One that times, or one that never does.
    pub(crate) fn new(on: bool) -> Self {
        Self {
            slot: NONE,
            op: Op::GetId,
            left: if on { 0 } else { NEVER },
            since: Instant::now(),
            latency: on.then(Box::default),
            durations: Default::default(),
        }
    }

    /// What was timed, if anything ever is.
    pub(crate) fn latency(&self) -> Option<&Latency> {
        self.latency.as_deref()
    }

    /// The same in few buckets.
    pub(crate) fn durations(&self) -> &[Durations; OPERATIONS.len()] {
        &self.durations
    }

    /// A batch of `count` requests has begun, the last of them being `op` in `slot`.
    #[inline]
    pub(crate) fn begun(&mut self, count: u32, slot: u16, op: impl FnOnce() -> Op) {
        match self.left.checked_sub(count) {
            Some(left) => self.left = left,
            None => self.begin(slot, op()),
        }
    }

    #[cold]
    fn begin(&mut self, slot: u16, op: Op) {
        if self.latency.is_none() {
            self.left = NEVER;
        } else if self.slot == NONE {
            (self.slot, self.op, self.left) = (slot.into(), op, EVERY - 1);
            self.since = Instant::now();
        }
    }

    /// The request in `slot` was answered.
    #[inline]
    pub(crate) fn done(&mut self, slot: u16) {
        if u32::from(slot) == self.slot {
            self.end();
        }
    }

    #[cold]
    fn end(&mut self) {
        self.slot = NONE;
        if let Some(histogram) = self.latency.as_mut().and_then(|latency| latency.of(self.op)) {
            let nanos = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            histogram.saturating_record(nanos);
            record(&mut self.durations, self.op, nanos);
        }
    }

    /// A slot was taken anew: whatever was timed in it ended without being seen.
    #[inline]
    pub(crate) fn taken(&mut self, slot: u16) {
        if u32::from(slot) == self.slot {
            self.slot = NONE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_of_many_is_timed() {
        let mut sampler = Sampler::new(true);
        for round in 0..2 * EVERY {
            sampler.taken(3);
            sampler.begun(1, 3, || if round < EVERY { Op::Read } else { Op::Write });
            sampler.done(4);
            sampler.done(3);
        }
        let latency = sampler.latency().unwrap();
        assert_eq!((latency.reads.len(), latency.writes.len(), latency.others.len()), (1, 1, 0));
        let timed = sampler.durations().map(|one| one.buckets.iter().sum::<u64>());
        assert_eq!(timed, [1, 1, 0, 0]);
        let mut sum = Latency::new();
        sum.add(latency);
        sum.add(latency);
        assert_eq!(sum.reads.len(), 2);
    }

    #[test]
    fn a_request_whose_end_nobody_saw_is_forgotten() {
        let mut sampler = Sampler::new(true);
        sampler.begun(1, 3, || Op::Read);
        sampler.taken(3);
        sampler.done(3);
        assert_eq!(sampler.latency().unwrap().reads.len(), 0);
    }

    #[test]
    fn one_that_is_off_never_looks_at_a_clock() {
        let mut sampler = Sampler::new(false);
        for slot in 0..1000 {
            sampler.begun(16, slot, || Op::Read);
            sampler.done(slot);
            assert_eq!(sampler.slot, NONE);
        }
        assert!(sampler.latency().is_none());
    }
}
