//! What a queue has counted beside its disk's requests: durations in few buckets, kicks, calls. Small, so
//! that it can be asked for often, and kept when a queue has gone.

use ringway_core::Op;

/// Operations that durations are told apart by.
pub const OPERATIONS: [&str; 4] = ["read", "write", "flush", "erase"];

/// The upper ends of the buckets of durations, in nanoseconds; what is longer is in one more.
pub const DURATION_BOUNDS_NS: [u64; 19] = [
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    5_000_000_000,
    30_000_000_000,
];

const BUCKETS: usize = DURATION_BOUNDS_NS.len() + 1;

/// How long the timed requests of one operation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    /// How many are in each bucket; the last one is for those beyond all bounds.
    pub buckets: [u64; BUCKETS],
    /// All of them together.
    pub sum_ns: u64,
}

impl Durations {
    fn record(&mut self, nanos: u64) {
        self.buckets[DURATION_BOUNDS_NS.partition_point(|&bound| bound < nanos)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanos);
    }

    fn add(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(all, more)| *all += more);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }
}

/// Totals of one queue, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueTotals {
    /// In the order of [`OPERATIONS`]; nothing unless requests are timed.
    pub durations: [Durations; OPERATIONS.len()],
    /// Times a guest's doorbell was found rung.
    pub kicks: u64,
    /// Times a guest was called.
    pub calls: u64,
    /// Kicks that never came although requests did.
    pub lost_kicks: u64,
}

impl QueueTotals {
    /// Adds those of another queue.
    pub fn add(&mut self, other: &Self) {
        self.durations.iter_mut().zip(&other.durations).for_each(|(all, more)| all.add(more));
        self.kicks += other.kicks;
        self.calls += other.calls;
        self.lost_kicks += other.lost_kicks;
    }
}

/// Notes how long a request took. A question for the disk's name is none of those that are told.
pub(crate) fn record(durations: &mut [Durations; OPERATIONS.len()], op: Op, nanos: u64) {
    let at = match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Flush => 2,
        Op::Discard | Op::WriteZeroes => 3,
        Op::GetId => return,
    };
    durations[at].record(nanos);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_first_bucket_that_reaches_it() {
        let mut durations = [Durations::default(); 4];
        for nanos in [0, 5_000, 5_001, 10_000, 30_000_000_000, 30_000_000_001] {
            record(&mut durations, Op::Write, nanos);
        }
        record(&mut durations, Op::GetId, 1);
        let [read, write, ..] = durations;
        assert_eq!((read, write.buckets[..3].to_vec()), (Durations::default(), vec![2, 2, 0]));
        assert_eq!(write.buckets[17..], [0, 1, 1]);
        assert_eq!(write.sum_ns, 60_000_020_002);
        assert!(DURATION_BOUNDS_NS.is_sorted());
        let one = QueueTotals { durations, kicks: 1, calls: 2, lost_kicks: 3 };
        let mut all = one;
        all.add(&one);
        assert_eq!((all.kicks, all.calls, all.lost_kicks), (2, 4, 6));
        assert_eq!((all.durations[1].buckets[0], all.durations[1].sum_ns), (4, 120_000_040_004));
    }
}
