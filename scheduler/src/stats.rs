//! What the paths count: plain integers.

/// What a queue's paths have counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests that went by [`crate::merge_queue`].
    pub plugged: u64,
    /// Operations they went in.
    pub runs: u64,
    /// Requests that went along in the operation of another one.
    pub merged: u64,
    /// Merged operations that failed or fell short and were carried out request by request.
    pub split: u64,
    /// Requests that were sent because their deadline had passed.
    pub expired: u64,
}

impl SchedulerStats {
    /// Adds the counts of another queue.
    pub fn add(&mut self, other: &Self) {
        self.plugged += other.plugged;
        self.runs += other.runs;
        self.merged += other.merged;
        self.split += other.split;
        self.expired += other.expired;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_is_added_to_its_own() {
        let one = SchedulerStats { plugged: 2, runs: 3, merged: 5, split: 7, expired: 11 };
        let mut sum = SchedulerStats { plugged: 10, runs: 20, merged: 30, split: 40, expired: 50 };
        sum.add(&one);
        assert_eq!(
            sum,
            SchedulerStats { plugged: 12, runs: 23, merged: 35, split: 47, expired: 61 }
        );
    }
}
