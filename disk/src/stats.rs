//! What a queue of a disk counts: plain integers.

use ringway_path::PathStats;

/// What a queue has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Requests read from the disk.
    pub reads: u64,
    /// Requests written to the disk.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards and write-zeroes.
    pub erases: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that ended in an error.
    pub errors: u64,
    /// Requests that went through bounce buffers.
    pub bounced: u64,
    /// Requests that took more than one operation because of their size.
    pub split: u64,
    /// Operations begun again after a short transfer, EINTR or EAGAIN.
    pub continued: u64,
    /// Requests that a look has found in flight for longer than its limit.
    pub overdue: u64,
    /// What the request path did.
    pub path: PathStats,
}

impl DiskStats {
    /// Adds the counts of another queue.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.erases += other.erases;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.errors += other.errors;
        self.bounced += other.bounced;
        self.split += other.split;
        self.continued += other.continued;
        self.overdue += other.overdue;
        self.path.add(&other.path);
    }
}
