//! What a queue of a disk counts: plain integers.

use ringway_core::{Op, Request};
use ringway_scheduler::SchedulerStats;

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
    /// Bytes of writes that were given to the file to be durable when they are done, whatever came of
    /// them: at least as many as guests without a write cache have written.
    pub durable_bytes: u64,
    /// Syncs of the file: of flushes, and after discards and write-zeroes of guests without a write
    /// cache.
    pub syncs: u64,
    /// Requests that ended in an error.
    pub errors: u64,
    /// Those of them that were answered so without asking the disk: the guest's mistakes.
    pub refused: u64,
    /// Requests that went through bounce buffers.
    pub bounced: u64,
    /// Requests that took more than one operation because of their size.
    pub split: u64,
    /// Operations begun again after a short transfer, EINTR or EAGAIN.
    pub continued: u64,
    /// Requests that a look has found in flight for longer than its limit.
    pub overdue: u64,
    /// Requests that were held because the disk had failed them, whatever became of them.
    pub held: u64,
    /// Times that requests were taken from a ring, one or more of them at a time.
    pub batches: u64,
    /// Times that requests of a queue began to wait for a limit.
    pub throttled: u64,
    /// Nanoseconds in which they waited.
    pub throttled_ns: u64,
    /// What the request path did.
    pub path: SchedulerStats,
}

impl DiskStats {
    /// Requests that the disk failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.errors - self.refused
    }

    /// Counts a request that is done and neither read nor wrote. Returns the bytes it put into the guest's
    /// memory.
    #[inline(never)]
    pub(crate) fn count_other(&mut self, request: &Request) -> u64 {
        match request.op {
            Op::Read | Op::Write => {
                debug_assert!(false, "reads and writes have counts of their own")
            }
            Op::Flush => self.flushes += 1,
            Op::Discard | Op::WriteZeroes => self.erases += 1,
            Op::GetId => return request.segments.bytes(),
        }
        0
    }

    /// Adds the counts of another queue.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.erases += other.erases;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.durable_bytes += other.durable_bytes;
        self.syncs += other.syncs;
        self.errors += other.errors;
        self.refused += other.refused;
        self.bounced += other.bounced;
        self.split += other.split;
        self.continued += other.continued;
        self.overdue += other.overdue;
        self.held += other.held;
        self.batches += other.batches;
        self.throttled += other.throttled;
        self.throttled_ns += other.throttled_ns;
        self.path.add(&other.path);
    }
}
