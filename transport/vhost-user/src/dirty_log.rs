//! The dirty log: which pages of guest memory the device has written (vhost-user, "Migration").
//!
//! While a guest is migrated its front-end copies memory again and again, each time only the pages
//! that were marked since. It clears a mark *before* it copies the page. So a mark is made after the
//! write it stands for, and before the queue can stop: a page is copied once more rather than once
//! too seldom.

use super::message::Message;
use super::ring_place::RingPlace;
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
const USED_ELEM: usize = 8;
const PACKED_DESC: usize = 16;

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

/// Where a ring is written. For a packed ring these are the descriptors and the device area.
#[derive(Clone, Copy, Debug)]
struct RingMarks {
    /// Our address of the descriptors.
    descs: usize,
    device: DeviceArea,
}

/// Where the device area is.
#[derive(Clone, Copy, Debug)]
enum DeviceArea {
    /// At this address, as it is logged.
    Guest(u64),
    /// At this one of ours, which says where in the guest's memory.
    Here(usize),
}

/// What one queue needs to mark what it writes. It never changes while the queue has it.
#[derive(Debug)]
pub(super) struct QueueLog {
    area: Arc<LogArea>,
    /// Sorted by host address.
    spans: Box<[Span]>,
    format: Format,
    /// Where the ring is written; `None` if that is not to be logged.
    ring: Option<RingMarks>,
    bell: Option<Arc<PeerEventfd>>,
    bell_lost: AtomicBool,
}

/// What a [`QueueLog`] is made for.
#[derive(Debug)]
pub(super) struct Logged<'a> {
    pub(super) map: &'a GuestMap,
    pub(super) format: Format,
    /// Where its ring is.
    pub(super) place: &'a RingPlace,
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
        let pieces = about.place.pieces().filter_map(|(host, there, len)| {
            let guest = guest_of(&spans, there)?;
            Some(Span { host, len, guest })
        });
        let pieces: Vec<Span> = pieces.collect();
        spans.extend(pieces);
        spans.sort_by_key(|span| span.host);
        let mut log = Self {
            area: Arc::clone(area),
            spans: spans.into_boxed_slice(),
            format: about.format,
            ring: None,
            bell: about.bell,
            bell_lost: AtomicBool::new(false),
        };
        if let Some(at) = about.log_at {
            let Areas { desc, device, .. } = about.place.areas;
            let device = if about.behind_iommu {
                DeviceArea::Here(device as usize)
            } else {
                area.check_covers(at.saturating_add(about.format.area_bytes().2 as u64))?;
                DeviceArea::Guest(at)
            };
            log.ring = Some(RingMarks { descs: desc as usize, device });
        }
        Ok(log)
    }

    /// True once the log has vanished because its file was cut short.
    pub(super) fn is_lost(&self) -> bool {
        self.area.mapping.is_lost()
    }

    /// Marks what is at these bytes of ours, as far as it is the guest's memory.
    fn mark_here(&self, mut host: usize, mut len: usize) {
        while len > 0 {
            let Some(span) = span_of(&self.spans, host) else { break };
            let offset = host - span.host;
            let bytes = len.min(span.len - offset);
            self.area.mark(span.guest + offset as u64, bytes as u64);
            (host, len) = (host + bytes, len - bytes);
        }
    }

    /// Marks bytes of the device area.
    fn mark_device(&self, area: DeviceArea, offset: usize, len: usize) {
        match area {
            DeviceArea::Guest(at) => self.area.mark(at + offset as u64, len as u64),
            DeviceArea::Here(at) => self.mark_here(at + offset, len),
        }
    }

    /// The device has read data into this memory.
    pub(super) fn read_into(&self, segments: &[Segment]) {
        for segment in segments {
            self.mark_here(segment.base as usize, segment.len);
        }
    }

    /// The device has written an answer.
    pub(super) fn answered(&self, status_at: &StatusByte) {
        if let Some(at) = status_at.address() {
            self.mark_here(at.as_ptr() as usize, 1);
        }
    }

    /// The device has published these entries of the used ring, or these packed descriptors.
    pub(super) fn published(&self, places: Unpublished) {
        if places.count == 0 {
            return;
        }
        if let Some(RingMarks { descs, device }) = self.ring {
            let (first, size) = (usize::from(places.first), usize::from(self.format.size));
            let here = usize::from(places.count).min(size - first);
            let around = usize::from(places.count) - here;
            if self.format.packed {
                self.mark_here(descs + PACKED_DESC * first, PACKED_DESC * here);
                self.mark_here(descs, PACKED_DESC * around);
            } else {
                self.mark_device(device, 4 + USED_ELEM * first, USED_ELEM * here);
                self.mark_device(device, 4, USED_ELEM * around);
                // The used index.
                self.mark_device(device, 2, 2);
            }
        }
        self.signal();
    }

    /// The device has written what it wants to be told: flags, event index, event structure.
    pub(super) fn wished(&self) {
        if let Some(RingMarks { device, .. }) = self.ring {
            self.mark_device(device, 0, 4);
            if !self.format.packed && self.format.event_idx {
                self.mark_device(device, 4 + USED_ELEM * usize::from(self.format.size), 2);
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

/// The span that holds our address `host`. They are sorted and do not overlap.
fn span_of(spans: &[Span], host: usize) -> Option<Span> {
    let after = spans.partition_point(|span| span.host <= host);
    let span = spans[after.checked_sub(1)?];
    (host - span.host < span.len).then_some(span)
}

/// The guest's address of what is at ours.
fn guest_of(spans: &[Span], host: usize) -> Option<u64> {
    span_of(spans, host).map(|span| span.guest + (host - span.host) as u64)
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
        let place = &RingPlace::whole(areas);
        let about = Logged { map: &map, format, place, log_at, behind_iommu, bell: None };
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
        let guest = |at: *mut u8| guest_of(&log.spans, at as usize);
        for region in map.regions() {
            assert_eq!(guest(region.mapping.at(0)), Some(region.guest));
            assert_eq!(guest(region.mapping.at(0xffff)), Some(region.guest + 0xffff));
        }
        let highest = map.regions().iter().max_by_key(|region| region.mapping.at(0)).unwrap();
        assert_eq!(guest(highest.mapping.at(0xffff).wrapping_add(1)), None);
        let lowest = map.regions().iter().min_by_key(|region| region.mapping.at(0)).unwrap();
        assert_eq!(guest(lowest.mapping.at(0).wrapping_sub(1)), None);
    }
}
