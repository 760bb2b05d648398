//! What the paths count: plain integers.

/// What a queue's paths have counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathStats {
    /// Requests that went by [`crate::request`].
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

impl PathStats {
    /// Adds the counts of another queue.
    pub fn add(&mut self, other: &Self) {
        self.plugged += other.plugged;
        self.runs += other.runs;
        self.merged += other.merged;
        self.split += other.split;
        self.expired += other.expired;
    }
}
