//! How long requests take: one of many is timed, so that clocks cost next to nothing.
//!
//! At most one request of a queue is timed at a time: the last of a batch, whose start is the end of
//! that batch, until its own answer, whatever operation of the engine brought it. While none is
//! timed, a queue pays one comparison per request and one per completion.

use crate::latency::Latency;
use crate::totals::{Durations, OPERATIONS, record};
use ringway_core::Op;
use std::time::Instant;

/// Requests from one that is timed to the next. A prime, so that guests with a rhythm are not always
/// met at the same beat.
const EVERY: u32 = 61;

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
mod tests;
