//! The dirty log: which pages of guest memory the device has written (vhost-user, "Migration").
//!
//! While a guest is migrated its front-end copies memory again and again, each time only the pages
//! that were marked since. It clears a mark *before* it copies the page. So a mark is made after the
//! write it stands for, and before the queue can stop: a page is copied once more rather than once
//! too seldom.

use super::message::Message;
use ringway_core::Segment;
use ringway_core::mem::{GuestMap, Mapping, MappingError, Quota};
use ringway_export::PeerEventfd;
use ringway_ring::virtio_blk::StatusByte;
use ringway_ring::virtqueue::{Areas, Format, Unpublished};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, fence};

/// Bytes of guest memory that one bit stands for (VHOST_LOG_PAGE).
const PAGE: u64 = 0x1000;

/// Bytes of an element of the split used ring, and of a packed descriptor (VIRTIO 1.2 §2.7.8, §2.8.13).
const USED_ELEM: u64 = 8;
const PACKED_DESC: u64 = 16;

/// Why a log was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum LogError {
    #[error("SET_LOG_BASE without LOG_SHMFD: the log must be shared memory with a descriptor")]
    NotShared,
    #[error("the dirty log: {0}")]
    Mapping(#[from] MappingError),
    #[error(
        "the dirty log has {have} bytes, but memory up to guest address {end:#x} needs {need}. The \
             front-end must send a larger one with SET_LOG_BASE first"
    )]
    TooSmall { have: u64, need: u64, end: u64 },
}

/// The log of a connection, shared by its queues and its front-end: one bit a page.
#[derive(Debug)]
pub(super) struct LogArea {
    mapping: Mapping,
}

impl LogArea {
    /// The log that a SET_LOG_BASE message describes: size and offset in bytes, and a file.
    pub(super) fn of(message: &mut Message, quota: &Arc<Quota>) -> Result<Self, LogError> {
        let file = message.take_fd().ok_or(LogError::NotShared)?;
        let mapping = Mapping::of_peer(quota, &File::from(file), message.u64(8), message.u64(0))?;
        Ok(Self { mapping })
    }

    /// Checks that there is a bit for every page below the guest address `end`.
    pub(super) fn check_covers(&self, end: u64) -> Result<(), LogError> {
        let (have, need) = (self.mapping.len() as u64, end.div_ceil(PAGE).div_ceil(8));
        if need <= have { Ok(()) } else { Err(LogError::TooSmall { have, need, end }) }
    }

    /// Marks the pages of `len` bytes at guest address `guest`; what is beyond the log is left out.
    ///
    /// The fence stands between the write and the look at the mark: either the look finds that the
    /// front-end has cleared it, or the front-end's copy, made after clearing, has the write.
    fn mark(&self, guest: u64, len: u64) {
        let Some(more) = len.checked_sub(1) else { return };
        let (first, last) = (guest / PAGE, guest.saturating_add(more) / PAGE);
        fence(SeqCst);
        for at in first / 8..(last / 8 + 1).min(self.mapping.len() as u64) {
            let low = if at == first / 8 { 0xff << (first % 8) } else { 0xff };
            let high = if at == last / 8 { 0xff >> (7 - last % 8) } else { 0xff };
            // Below the length of the mapping, a usize; masks of eight bits.
            #[allow(clippy::cast_possible_truncation)]
            let (at, bits) = (at as usize, (low & high & 0xff_u32) as u8);
            // SAFETY: `at` is in the mapping; other threads and the front-end only use atomics.
            let byte = unsafe { AtomicU8::from_ptr(self.mapping.at(at)) };
            if byte.load(Relaxed) & bits != bits {
                byte.fetch_or(bits, Release);
            }
        }
    }
}

/// A region as a queue needs it: from our address to the guest's.
#[derive(Clone, Copy, Debug)]
struct Span {
    host: usize,
    len: usize,
    guest: u64,
}

/// What one queue needs to mark what it writes. It never changes while the queue has it.
#[derive(Debug)]
pub(super) struct QueueLog {
    area: Arc<LogArea>,
    /// Sorted by host address.
    spans: Box<[Span]>,
    format: Format,
    /// Where the ring is written, as logged; `None` if writes to the ring are not to be logged. For
    /// a packed ring: the descriptors and the device area.
    ring: Option<(u64, u64)>,
    bell: Option<Arc<PeerEventfd>>,
    bell_lost: AtomicBool,
}

/// What a [`QueueLog`] is made for.
#[derive(Debug)]
pub(super) struct Logged<'a> {
    pub(super) map: &'a GuestMap,
    pub(super) format: Format,
    /// The ring, if it is known where it is.
    pub(super) areas: Option<Areas>,
    /// Under which guest address writes to the device area are logged, if they are.
    pub(super) log_at: Option<u64>,
    /// That address is an I/O virtual one. The log has guest-physical ones: the ring's own place says
    /// which.
    pub(super) behind_iommu: bool,
    /// Rung when marks were made (SET_LOG_FD).
    pub(super) bell: Option<Arc<PeerEventfd>>,
}

impl QueueLog {
    /// # Errors
    /// [`LogError::TooSmall`] if some page that the queue may write has no bit.
    pub(super) fn new(area: &Arc<LogArea>, about: Logged<'_>) -> Result<Self, LogError> {
        check_memory(area, about.map)?;
        let regions = about.map.regions();
        let mut spans: Vec<Span> = regions
            .iter()
            .map(|r| Span { host: r.mapping.at(0) as usize, len: r.mapping.len(), guest: r.guest })
            .collect();
        spans.sort_by_key(|span| span.host);
        let mut log = Self {
            area: Arc::clone(area),
            spans: spans.into_boxed_slice(),
            format: about.format,
            ring: None,
            bell: about.bell,
            bell_lost: AtomicBool::new(false),
        };
        if let (Some(areas), Some(device)) = (about.areas, about.log_at) {
            let physical = about.behind_iommu.then(|| log.guest_of(areas.device)).flatten();
            let device = physical.unwrap_or(device);
            let bytes = about.format.area_bytes().2 as u64;
            area.check_covers(device.saturating_add(bytes))?;
            log.ring = log.guest_of(areas.desc).map(|descs| (descs, device));
        }
        Ok(log)
    }

    /// True once the log has vanished because its file was cut short.
    pub(super) fn is_lost(&self) -> bool {
        self.area.mapping.is_lost()
    }

    fn guest_of(&self, host: *const u8) -> Option<u64> {
        let after = self.spans.partition_point(|span| span.host <= host as usize);
        let span = self.spans[after.checked_sub(1)?];
        let offset = host as usize - span.host;
        (offset < span.len).then_some(span.guest + offset as u64)
    }

    /// The device has read data into this memory.
    pub(super) fn read_into(&self, segments: &[Segment]) {
        for segment in segments {
            // What was resolved lies in one region; nothing else is handed out.
            if let Some(guest) = self.guest_of(segment.base) {
                self.area.mark(guest, segment.len as u64);
            }
        }
    }

    /// The device has written an answer.
    pub(super) fn answered(&self, status_at: &StatusByte) {
        if let Some(guest) = status_at.address().and_then(|at| self.guest_of(at.as_ptr())) {
            self.area.mark(guest, 1);
        }
    }

    /// The device has published these entries of the used ring, or these packed descriptors.
    pub(super) fn published(&self, places: Unpublished) {
        if places.count == 0 {
            return;
        }
        if let Some((descs, device)) = self.ring {
            let (first, size) = (u64::from(places.first), u64::from(self.format.size));
            let here = u64::from(places.count).min(size - first);
            let around = u64::from(places.count) - here;
            let (base, each) =
                if self.format.packed { (descs, PACKED_DESC) } else { (device + 4, USED_ELEM) };
            self.area.mark(base + each * first, each * here);
            self.area.mark(base, each * around);
            if !self.format.packed {
                // The used index.
                self.area.mark(device + 2, 2);
            }
        }
        self.signal();
    }

    /// The device has written what it wants to be told: flags, event index, event structure.
    pub(super) fn wished(&self) {
        if let Some((_, device)) = self.ring {
            self.area.mark(device, 4);
            if !self.format.packed && self.format.event_idx {
                self.area.mark(device + 4 + USED_ELEM * u64::from(self.format.size), 2);
            }
        }
    }

    /// The ring may have been written by a device that did not live to mark it: all of it counts.
    pub(super) fn taken_over(&self) {
        self.published(Unpublished { first: 0, count: self.format.size });
        self.wished();
    }

    fn signal(&self) {
        if let Some(bell) = &self.bell {
            if !self.bell_lost.load(Relaxed) && bell.signal().is_err() {
                // As for the bells of queues.
                self.bell_lost.store(true, Relaxed);
            }
        }
    }
}

/// Checks that a log has a bit for every page of guest memory.
///
/// # Errors
/// [`LogError::TooSmall`].
pub(super) fn check_memory(area: &LogArea, map: &GuestMap) -> Result<(), LogError> {
    area.check_covers(map.regions().last().map_or(0, |region| region.guest + region.len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_core::mem::Region;

    fn area(bytes: usize) -> Arc<LogArea> {
        Arc::new(LogArea { mapping: Mapping::anonymous(bytes).unwrap() })
    }

    fn marked(area: &LogArea) -> Vec<u64> {
        let bit = |page: u64| {
            let at = usize::try_from(page / 8).unwrap();
            // SAFETY: within the mapping, which no other thread touches.
            unsafe { area.mapping.at(at).read() >> (page % 8) & 1 != 0 }
        };
        (0..8 * area.mapping.len() as u64).filter(|&page| bit(page)).collect()
    }

    #[test]
    fn exactly_the_touched_pages_are_marked() {
        for (guest, len, pages) in [
            (0, 0, 0..0),
            (0, 1, 0..1),
            (4095, 1, 0..1),
            (4095, 2, 0..2),
            (7 * PAGE, PAGE, 7..8),
            (7 * PAGE + 1, PAGE, 7..9),
            (3 * PAGE, 30 * PAGE, 3..33),
            (60 * PAGE, 1 << 40, 60..64),
            (64 * PAGE, 1, 0..0),
            (u64::MAX, 1, 0..0),
            (u64::MAX - 5, u64::MAX, 0..0),
        ] {
            let area = area(8);
            area.mark(guest, len);
            assert_eq!(marked(&area), pages.collect::<Vec<_>>(), "{len} bytes at {guest:#x}");
        }
    }

    #[test]
    fn a_log_covers_memory_to_its_last_page() {
        let area = area(2);
        assert!(area.check_covers(0).is_ok() && area.check_covers(16 * PAGE).is_ok());
        assert!(area.check_covers(16 * PAGE + 1).is_err() && area.check_covers(u64::MAX).is_err());
    }

    /// A log of a queue of 1024 entries in the second of two regions, and that memory.
    fn ring_log(packed: bool) -> (GuestMap, QueueLog) {
        let region = |guest, user| {
            let mapping = Arc::new(Mapping::anonymous(1 << 16).unwrap());
            Region { guest, user, len: 1 << 16, mapping }
        };
        let map = GuestMap::new(vec![region(0x10_0000, 0), region(0x20_0000, 1 << 20)]).unwrap();
        let at = |offset| map.regions()[1].mapping.at(offset);
        let format = Format { packed, size: 1024, event_idx: true, indirect: false };
        let areas = Areas { desc: at(0), driver: at(0x8000), device: at(0xa000) };
        let log_at = Some(0x20_a000);
        let behind_iommu = false;
        let about =
            Logged { map: &map, format, areas: Some(areas), log_at, behind_iommu, bell: None };
        let log = QueueLog::new(&area(4096), about).unwrap();
        (map, log)
    }

    #[test]
    fn ring_entries_are_marked_around_the_end_of_the_ring() {
        for packed in [false, true] {
            // 1024 packed descriptors are four pages. The used ring, of more than two, has its index in the
            // first one.
            for (first, count, descs, used) in [
                (1020, 0, vec![], vec![]),
                (1020, 8, vec![0x200, 0x203], vec![0x20a, 0x20b, 0x20c]),
                (512, 2, vec![0x202], vec![0x20a, 0x20b]),
                (1023, 1, vec![0x203], vec![0x20a, 0x20b, 0x20c]),
                (1000, 324, vec![0x200, 0x201, 0x203], vec![0x20a, 0x20b, 0x20c]),
                (0, 1024, vec![0x200, 0x201, 0x202, 0x203], vec![0x20a, 0x20b, 0x20c]),
            ] {
                let (_map, log) = ring_log(packed);
                log.published(Unpublished { first, count });
                let expected = if packed { descs } else { used };
                assert_eq!(marked(&log.area), expected, "{count} from {first}, packed: {packed}");
            }
            let (_map, log) = ring_log(packed);
            log.wished();
            // The event index is behind the last entry, the event structure is all of the area.
            let expected = if packed { vec![0x20a] } else { vec![0x20a, 0x20c] };
            assert_eq!(marked(&log.area), expected, "packed: {packed}");
        }
    }

    #[test]
    fn only_what_lies_in_guest_memory_has_a_guest_address() {
        let (map, log) = ring_log(false);
        for region in map.regions() {
            assert_eq!(log.guest_of(region.mapping.at(0)), Some(region.guest));
            assert_eq!(log.guest_of(region.mapping.at(0xffff)), Some(region.guest + 0xffff));
        }
        let highest = map.regions().iter().max_by_key(|region| region.mapping.at(0)).unwrap();
        assert_eq!(log.guest_of(highest.mapping.at(0xffff).wrapping_add(1)), None);
        let lowest = map.regions().iter().min_by_key(|region| region.mapping.at(0)).unwrap();
        assert_eq!(log.guest_of(lowest.mapping.at(0).wrapping_sub(1)), None);
    }
}
