//! How long timed requests took.

use hdrhistogram::Histogram;
use ringway_core::Op;

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

    pub(crate) fn of(&mut self, op: Op) -> Option<&mut Histogram<u32>> {
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
