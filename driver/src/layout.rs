//! Where the parts of a queue lie in the shared memory.

use crate::Options;
use crate::headers::Headers;
use crate::info::DiskInfo;
use ringway_ring::virtqueue::{Format, Tables};

/// Two cache lines: the parts of a queue that different sides write never share one, nor a pair that
/// the hardware fetches together.
const APART: usize = 128;

/// Where the parts of one queue lie in the shared memory, in bytes from the queue's start.
pub(crate) struct Layout {
    pub(crate) driver: usize,
    pub(crate) device: usize,
    pub(crate) headers: usize,
    pub(crate) tables: usize,
    pub(crate) bytes: usize,
}

impl Layout {
    pub(crate) fn new(format: Format, entries: u16) -> Self {
        let size = format.size;
        let (desc_bytes, driver_bytes, device_bytes) = format.area_bytes();
        let driver = desc_bytes.next_multiple_of(APART);
        let device = (driver + driver_bytes).next_multiple_of(APART);
        let headers = (device + device_bytes).next_multiple_of(APART);
        let tables = headers + Headers::bytes(size).next_multiple_of(APART);
        // From page to page, so that tables of queues lie apart as well.
        let bytes = (tables + Tables::bytes(size, entries)).next_multiple_of(4096);
        Self { driver, device, headers, tables, bytes }
    }
}

/// The most descriptors of one chain: header, buffers, status. Never more than the queue size
/// (§2.7.5.3.1).
pub(crate) fn chain_max(options: &Options, info: &DiskInfo) -> u16 {
    let seg_max = info.seg_max.map_or(u16::MAX, |max| u16::try_from(max).unwrap_or(u16::MAX));
    seg_max.min(options.max_buffers).saturating_add(2).min(options.queue_size)
}
