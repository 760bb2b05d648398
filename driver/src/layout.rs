//! Where the parts of a queue lie in the shared memory.

use crate::Options;
use crate::info::DiskInfo;
use crate::slots::Slots;
use ringway_ring::virtqueue::{Tables, avail_bytes, desc_bytes, used_bytes};

/// Two cache lines: the parts of a queue that different sides write never share one, nor a pair that
/// the hardware fetches together.
const APART: usize = 128;

/// Where the parts of one queue lie in the shared memory, in bytes from the queue's start.
pub(crate) struct Layout {
    pub(crate) avail: usize,
    pub(crate) used: usize,
    pub(crate) slots: usize,
    pub(crate) tables: usize,
    pub(crate) bytes: usize,
}

impl Layout {
    pub(crate) fn new(size: u16, entries: u16) -> Self {
        let avail = desc_bytes(size).next_multiple_of(APART);
        let used = (avail + avail_bytes(size)).next_multiple_of(APART);
        let slots = (used + used_bytes(size)).next_multiple_of(APART);
        let tables = slots + Slots::bytes(size).next_multiple_of(APART);
        // From page to page, so that tables of queues lie apart as well.
        let bytes = (tables + Tables::bytes(size, entries)).next_multiple_of(4096);
        Self { avail, used, slots, tables, bytes }
    }
}

/// The most descriptors of one chain: header, buffers, status. Never more than the queue size
/// (§2.7.5.3.1).
pub(crate) fn chain_max(options: &Options, info: &DiskInfo) -> u16 {
    let seg_max = info.seg_max.map_or(u16::MAX, |max| u16::try_from(max).unwrap_or(u16::MAX));
    seg_max.min(options.max_buffers).saturating_add(2).min(options.queue_size)
}
