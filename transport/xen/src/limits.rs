//! What a guest can bear: how much of its memory a front-end may come to hold for one disk.
//!
//! A front-end with persistent grants keeps pages of its own for every segment of every request that
//! its rings can hold, from the start and for good: four rings of 16 pages with 32 segments are 256
//! MiB. What is offered is chosen so that the most that a front-end can take of it is a small part of
//! the guest's memory. Without persistent grants it keeps nothing.

use super::gntdev::MAP_MAX;
use ringway_ring::blkif::{INDIRECT_SEGMENTS_MAX, RING_ORDER_MAX};

/// The most segments of an indirect request that are offered: 1 MiB. More would let one request have
/// all memory of its queue.
pub(super) const INDIRECT_SEGMENTS: u16 = 256;

const _: () = assert!(INDIRECT_SEGMENTS <= INDIRECT_SEGMENTS_MAX);
const _: () = assert!(INDIRECT_SEGMENTS as usize <= MAP_MAX);

/// The part of a guest's memory that one disk may take: a sixteenth.
const PART: u64 = 16;

/// Bytes of a page, and so of a segment.
const PAGE: u64 = 4096;

/// Requests in a ring of one page, and segments of a request that is not indirect.
const REQUESTS: u64 = 32;
const SEGMENTS: u16 = 11;

/// What Linux takes of indirect segments, if it is not told otherwise: offering fewer costs speed.
const SEGMENTS_USED: u16 = 32;

/// What is offered of what costs a guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestLimits {
    /// Rings have up to 2^this pages.
    pub(super) ring_order: u32,
    /// Segments of an indirect request.
    pub(super) indirect_segments: u16,
    /// Persistent grants.
    pub(super) persistent: bool,
}

impl GuestLimits {
    /// All there is; persistent grants as is wished.
    pub(super) const fn all(persistent: bool) -> Self {
        Self { ring_order: RING_ORDER_MAX, indirect_segments: INDIRECT_SEGMENTS, persistent }
    }

    /// What a guest with so many bytes of memory can bear, for a disk with so many rings. If its
    /// memory is not known, all there is.
    ///
    /// Segments beyond what Linux takes go first, then long rings, then persistent grants: they are
    /// a way to save work, and not worth having fewer rings or small requests.
    pub(super) fn bearable(queues: u16, persistent: bool, memory: Option<u64>) -> Self {
        let all = Self::all(persistent);
        let (Some(memory), true) = (memory, persistent) else { return all };
        let fits = |limits: &Self| limits.held_max(queues) <= memory / PART;
        let few = Self { indirect_segments: SEGMENTS_USED, ..all };
        let shorter = (0..=RING_ORDER_MAX).rev().map(|ring_order| Self { ring_order, ..few });
        let mut choices = std::iter::once(all).chain(shorter);
        choices.find(fits).unwrap_or(Self::all(false))
    }

    /// The most memory that a front-end can come to hold, in bytes.
    pub(super) fn held_max(self, queues: u16) -> u64 {
        if !self.persistent {
            return 0;
        }
        let segments = u64::from(self.indirect_segments.max(SEGMENTS));
        // The pages in which an indirect request names its segments, 512 in each, are kept as well.
        let pages = segments + segments.div_ceil(512);
        u64::from(queues) * (REQUESTS << self.ring_order) * pages * PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn chosen(queues: u16, mib: u64) -> (u32, u16, bool) {
        let limits = GuestLimits::bearable(queues, true, Some(mib * MIB));
        (limits.ring_order, limits.indirect_segments, limits.persistent)
    }

    /// Row B15: what a guest with 320 MiB died of is not offered to it.
    #[test]
    fn b15_what_a_guest_cannot_bear_is_not_offered() {
        // 4 rings of 16 pages with 32 segments.
        let deadly = GuestLimits { ring_order: 4, indirect_segments: 32, persistent: true };
        assert!(deadly.held_max(4) >= 256 * MIB);
        assert_eq!(chosen(4, 320), (0, 32, true));
        assert_eq!(chosen(4, 128), (4, 256, false), "without persistent grants nothing is kept");
        assert_eq!(chosen(1, 128), (0, 32, true));
        assert_eq!(chosen(4, 1024), (1, 32, true));
        assert_eq!(chosen(4, 4096), (3, 32, true));
        assert_eq!(chosen(4, 8192), (4, 32, true));
        assert_eq!(chosen(4, 65_536), (4, 256, true));
        for queues in [1, 2, 4, 16, u16::MAX] {
            for shift in 0..24 {
                let memory = (1 << shift) * MIB;
                let limits = GuestLimits::bearable(queues, true, Some(memory));
                assert!(limits.held_max(queues) <= memory / 16, "{queues} rings, {memory} bytes");
            }
        }
    }

    #[test]
    fn all_is_offered_where_nothing_is_known_or_kept() {
        assert_eq!(GuestLimits::bearable(4, true, None), GuestLimits::all(true));
        assert_eq!(GuestLimits::bearable(4, false, Some(MIB)), GuestLimits::all(false));
    }
}
