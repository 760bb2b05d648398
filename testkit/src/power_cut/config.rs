//! What a seed stands for, and what seeds have done.

use super::Faults;
use ringway_disk::{Alignment, CacheMode, SchedulerMode};

/// The disk's number in the content of its sectors.
pub(super) const DISK: u64 = 3;
/// Requests of one queue at a time.
pub(super) const DEPTH: u16 = 6;
/// Memory of one request, in bytes: the longest one at an odd address.
pub(super) const ROOM: usize = 3 * 4096;

/// What a seed stands for; printed when it fails.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How the disk is opened.
    pub cache: CacheMode,
    /// What the disk asks of buffers and offsets, in bytes.
    pub alignment: Alignment,
    /// Discards go to it as to a block device.
    pub block_device: bool,
    /// Size in blocks of 4096 bytes.
    pub blocks: u64,
    /// Queues, each with its own engine.
    pub queues: usize,
    /// Requests of the guests in one life.
    pub requests: u64,
    /// The chance, of a thousand, that requests keep to blocks of 4096 bytes.
    pub whole_blocks: u16,
    /// The guest switches its write cache off and on.
    pub toggles: bool,
    /// How requests travel.
    pub path: SchedulerMode,
    /// The most that a step of a life takes, in nanoseconds: deadlines and trials of paths go by it.
    pub step_ns: u64,
    /// Lives: after each cut the disk is opened again on what was found.
    pub lives: u32,
    /// What fails.
    pub faults: Faults,
}

/// What seeds have done: a campaign that reaches nothing proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Power cuts.
    pub cuts: u64,
    /// Of them, with requests in flight.
    pub cuts_in_flight: u64,
    /// Requests answered with success.
    pub done: u64,
    /// Requests answered with an error.
    pub failed: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// Writes whose answer promised that they are durable.
    pub durable: u64,
    /// Requests that went through bounce buffers.
    pub bounced: u64,
    /// Operations begun again after a fault.
    pub continued: u64,
    /// Requests that went along in the operation of another one.
    pub merged: u64,
    /// Lives in which a path that was chosen by trying took requests both ways.
    pub both_ways: u64,
    /// Sectors found after a cut.
    pub sectors: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.cuts += more.cuts;
        self.cuts_in_flight += more.cuts_in_flight;
        self.done += more.done;
        self.failed += more.failed;
        self.flushes += more.flushes;
        self.durable += more.durable;
        self.bounced += more.bounced;
        self.continued += more.continued;
        self.merged += more.merged;
        self.both_ways += more.both_ways;
        self.sectors += more.sectors;
    }
}
