//! The guest's view of its memory, translated to ours.

use super::{Mapping, Segment, Segments};
use std::sync::Arc;

/// One piece of guest memory, mapped here.
#[derive(Clone, Debug)]
pub struct Region {
    /// First guest-physical address.
    pub guest: u64,
    /// The same byte in the address space of the process that owns the guest (QEMU's, say); the
    /// addresses of rings are given in it.
    pub user: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where it is mapped here.
    pub mapping: Arc<Mapping>,
}

/// Why a table of regions was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MapError {
    /// A region without bytes.
    #[error("memory region {0} is empty")]
    Empty(usize),
    /// Its end does not fit in 64 bits.
    #[error("memory region {0} wraps around the end of the address space")]
    Wraps(usize),
    /// It is longer than what is mapped for it.
    #[error("memory region {0} is longer than its mapping")]
    TooLong(usize),
    /// Two regions claim the same address.
    #[error("two memory regions overlap at guest address {0:#x}")]
    Overlap(u64),
}

/// The memory of a guest: regions that do not overlap, sorted by guest address.
///
/// # Invariants
/// 1. No region is empty, wraps, overlaps another, or is longer than its mapping.
/// 2. Regions are sorted by `guest`.
#[derive(Debug, Default)]
pub struct GuestMap {
    regions: Vec<Region>,
}

impl GuestMap {
    /// Checks and sorts a table of regions (vhost-user SET_MEM_TABLE and ADD_MEM_REG).
    ///
    /// # Errors
    /// [`MapError`] says which region cannot be.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, MapError> {
        for (i, region) in regions.iter().enumerate() {
            if region.len == 0 {
                return Err(MapError::Empty(i));
            }
            if region.guest.checked_add(region.len).is_none()
                || region.user.checked_add(region.len).is_none()
            {
                return Err(MapError::Wraps(i));
            }
            if region.len > region.mapping.len() as u64 {
                return Err(MapError::TooLong(i));
            }
        }
        regions.sort_by_key(|region| region.guest);
        for pair in regions.windows(2) {
            if pair[0].guest + pair[0].len > pair[1].guest {
                return Err(MapError::Overlap(pair[1].guest));
            }
        }
        Ok(Self { regions })
    }

    /// The regions, sorted by guest address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Our address of `len` bytes at `user`, an address in the owner's process, if they lie in one
    /// region.
    #[must_use]
    pub fn user_to_host(&self, user: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user)?;
            if offset >= region.len || len > region.len - offset {
                return None;
            }
            Some(region.mapping.at(usize::try_from(offset).ok()?))
        })
    }

    /// True if the memory behind a region has vanished (its file was cut short): what is read
    /// there now is zeroes of ours, and the connection must end.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_poisoned())
    }

    fn find(&self, guest: u64) -> Option<&Region> {
        let after = self.regions.partition_point(|region| region.guest <= guest);
        let region = &self.regions[after.checked_sub(1)?];
        (guest - region.guest < region.len).then_some(region)
    }
}

/// Translates guest addresses, remembering the region used last.
///
/// Each queue has its own, so that nothing is shared between workers but the read-only map.
///
/// # Invariants
/// 1. `start`, `len` and `host` describe a region of `map`, or `len` is 0.
#[derive(Debug)]
pub struct Translator {
    start: u64,
    len: u64,
    host: *mut u8,
    map: Arc<GuestMap>,
}

// SAFETY: `host` points into a mapping that `map` keeps alive, on whatever thread.
unsafe impl Send for Translator {}

impl Translator {
    /// A translator for `map`.
    #[must_use]
    pub fn new(map: Arc<GuestMap>) -> Self {
        Self { start: 0, len: 0, host: std::ptr::null_mut(), map }
    }

    /// The map it translates for.
    #[must_use]
    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Our address of `len` bytes at guest address `guest`, if they lie in one region.
    #[inline]
    #[must_use]
    pub fn one(&mut self, guest: u64, len: u32) -> Option<*mut u8> {
        let offset = guest.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            // `offset < self.len`, which is the length of a mapping, a usize.
            #[allow(clippy::cast_possible_truncation)]
            return Some(self.host.wrapping_add(offset as usize));
        }
        self.one_uncached(guest, len)
    }

    /// Where `guest` is if it lies in the region used last, null otherwise: for prefetching.
    #[inline]
    #[must_use]
    pub fn guess(&self, guest: u64) -> *const u8 {
        let offset = guest.wrapping_sub(self.start);
        // `offset < self.len`, which is the length of a mapping, a usize.
        #[allow(clippy::cast_possible_truncation)]
        if offset < self.len { self.host.wrapping_add(offset as usize) } else { std::ptr::null() }
    }

    #[inline(never)]
    fn one_uncached(&mut self, guest: u64, len: u32) -> Option<*mut u8> {
        let region = self.map.find(guest)?;
        let offset = guest - region.guest;
        if u64::from(len) > region.len - offset {
            return None;
        }
        (self.start, self.len, self.host) = (region.guest, region.len, region.mapping.at(0));
        Some(region.mapping.at(usize::try_from(offset).ok()?))
    }

    /// Appends our segments for `len` bytes at guest address `guest`; they may run over several
    /// regions that adjoin. Returns false if some byte is not guest memory or `out` is full.
    #[inline]
    #[must_use]
    pub fn resolve(&mut self, guest: u64, len: u32, out: &mut Segments) -> bool {
        match self.one(guest, len) {
            Some(base) => out.push(Segment { base, len: len as usize }),
            None => self.resolve_straddling(guest, len, out),
        }
    }

    #[cold]
    fn resolve_straddling(&mut self, guest: u64, len: u32, out: &mut Segments) -> bool {
        let Some(end) = guest.checked_add(u64::from(len)) else { return false };
        let mut at = guest;
        while at < end {
            let Some(region) = self.map.find(at) else { return false };
            let offset = at - region.guest;
            let take = (region.len - offset).min(end - at);
            let (Ok(offset), Ok(size)) = (usize::try_from(offset), usize::try_from(take)) else {
                return false;
            };
            if !out.push(Segment { base: region.mapping.at(offset), len: size }) {
                return false;
            }
            at += take;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(guest: u64, len: usize) -> Region {
        let mapping = Arc::new(Mapping::anonymous(len).unwrap());
        Region { guest, user: guest.wrapping_add(0x1000_0000), len: len as u64, mapping }
    }

    #[test]
    fn refuses_tables_that_cannot_be() {
        let page = 4096;
        assert_eq!(
            GuestMap::new(vec![Region { len: 0, ..region(0, page) }]).unwrap_err(),
            MapError::Empty(0)
        );
        assert_eq!(
            GuestMap::new(vec![region(u64::MAX - 100, page)]).unwrap_err(),
            MapError::Wraps(0)
        );
        assert_eq!(
            GuestMap::new(vec![Region { len: 8192, ..region(0, page) }]).unwrap_err(),
            MapError::TooLong(0)
        );
        assert_eq!(
            GuestMap::new(vec![region(4095, page), region(0, page)]).unwrap_err(),
            MapError::Overlap(4095)
        );
    }

    #[test]
    fn translates_within_and_over_regions() {
        let map = Arc::new(
            GuestMap::new(vec![region(4096, 4096), region(0, 4096), region(16384, 4096)]).unwrap(),
        );
        let mut t = Translator::new(Arc::clone(&map));
        let first = t.one(0, 1).unwrap();
        assert_eq!(t.one(4095, 1), Some(first.wrapping_add(4095)));
        assert_eq!(t.one(4095, 2), None);
        assert_eq!(t.one(8192, 1), None);
        assert_eq!(t.one(u64::MAX, 1), None);
        let mut out = Segments::with_capacity(8);
        assert!(t.resolve(4000, 200, &mut out), "a buffer over two regions works");
        assert_eq!(out.as_slice().iter().map(|s| s.len).collect::<Vec<_>>(), [96, 104]);
        out.clear();
        assert!(!t.resolve(8000, 400, &mut out), "a hole is not memory");
        assert!(!t.resolve(u64::MAX - 5, 100, &mut out));
    }

    #[test]
    fn ring_addresses_stay_in_one_region() {
        let map = GuestMap::new(vec![region(0, 4096), region(4096, 4096)]).unwrap();
        assert!(map.user_to_host(0x1000_0000, 4096).is_some());
        assert!(map.user_to_host(0x1000_0001, 4096).is_none());
        assert!(map.user_to_host(0x1000_0000 - 1, 1).is_none());
        assert!(map.user_to_host(u64::MAX, 1).is_none());
    }
}
