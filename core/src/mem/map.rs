//! The guest's view of its memory, translated to ours.

use super::iotlb::{Access, IOMMU_PAGE, Iotlb, Miss, Permission, Translation};
use super::mapping::Mapping;
use super::segment::{Segment, Segments};
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

    /// True if all bytes of a translation lie in one region.
    #[must_use]
    pub fn holds(&self, translation: &Translation) -> bool {
        self.regions.iter().any(|region| {
            let (start, host) = (region.mapping.at(0) as u64, translation.host as u64);
            let offset = host.checked_sub(start);
            let more = translation.last.checked_sub(translation.first);
            offset
                .zip(more)
                .is_some_and(|(offset, more)| offset < region.len && more < region.len - offset)
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

/// Translations that a [`Translator`] behind an IOMMU keeps.
const TRANSLATIONS: usize = 4096;

/// Missing pages that it names at a time.
pub const MISSES_MAX: usize = 64;

/// Translates guest addresses, remembering the region used last.
///
/// Each queue has its own, so that nothing is shared between workers but the read-only map.
///
/// # Invariants
/// 1. `start`, `len` and `host` describe a region of `map`, or a translation for reading and writing
///    of `iommu`, or `len` is 0.
#[derive(Debug)]
pub struct Translator {
    start: u64,
    len: u64,
    host: *mut u8,
    map: Arc<GuestMap>,
    iommu: Option<Box<BehindIommu>>,
}

/// What a translator needs if guest addresses are I/O virtual addresses.
#[derive(Debug)]
struct BehindIommu {
    table: Iotlb,
    missed: Vec<Miss>,
}

impl BehindIommu {
    fn miss(&mut self, iova: u64, access: Access) {
        let miss = Miss::of(iova, access);
        if self.missed.len() < MISSES_MAX && !self.missed.contains(&miss) {
            self.missed.push(miss);
        }
    }
}

// SAFETY: `host` points into a mapping that `map` keeps alive, on whatever thread.
unsafe impl Send for Translator {}

impl Translator {
    /// A translator for `map`.
    #[must_use]
    pub fn new(map: Arc<GuestMap>) -> Self {
        Self { start: 0, len: 0, host: std::ptr::null_mut(), map, iommu: None }
    }

    /// A translator for a device behind an IOMMU: it knows what it is taught with
    /// [`Translator::learn`] and names what it misses.
    #[must_use]
    pub fn behind_iommu(map: Arc<GuestMap>) -> Self {
        let table = Iotlb::with_capacity(TRANSLATIONS);
        let missed = Vec::with_capacity(MISSES_MAX);
        Self { iommu: Some(Box::new(BehindIommu { table, missed })), ..Self::new(map) }
    }

    /// From now on this is so. Without an IOMMU it means nothing, and neither does a translation to
    /// memory that is not in the map.
    pub fn learn(&mut self, translation: Translation) {
        self.len = 0;
        if let Some(iommu) = self.iommu.as_mut().filter(|_| self.map.holds(&translation)) {
            iommu.table.insert(translation);
        }
    }

    /// From now on nothing is known of `first..=last`.
    pub fn forget(&mut self, first: u64, last: u64) {
        self.len = 0;
        if let Some(iommu) = &mut self.iommu {
            if iommu.table.is_full() {
                // Cutting a range in two would make one more of them.
                iommu.table.clear();
            }
            iommu.table.remove(first, last);
        }
    }

    /// Pages that were needed since this was emptied last and are not known, at most
    /// [`MISSES_MAX`]. Always empty without an IOMMU.
    #[inline]
    pub fn missed(&mut self) -> Option<&mut Vec<Miss>> {
        self.iommu.as_mut().map(|iommu| &mut iommu.missed).filter(|missed| !missed.is_empty())
    }

    /// Adds the pages of `len` bytes at `guest` that are not known to those that are missed.
    #[cold]
    pub fn note_misses(&mut self, guest: u64, len: u32, access: Access) {
        let Some(iommu) = &mut self.iommu else { return };
        let mut at = guest;
        let Some(last) = u64::from(len).checked_sub(1).and_then(|n| guest.checked_add(n)) else {
            return;
        };
        while iommu.missed.len() < MISSES_MAX {
            let end = match iommu.table.find_for(at, access) {
                Some(range) => range.last,
                None => {
                    iommu.miss(at, access);
                    at | (IOMMU_PAGE - 1)
                }
            };
            if end >= last {
                return;
            }
            at = end + 1;
        }
    }

    /// The map it translates for.
    #[must_use]
    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Our address of `len` bytes at guest address `guest`, if they lie in one region. The device
    /// only reads them.
    #[inline]
    #[must_use]
    pub fn one(&mut self, guest: u64, len: u32) -> Option<*mut u8> {
        self.one_for(guest, len, Access::Read)
    }

    /// As [`Translator::one`], for what the device does there.
    #[inline]
    #[must_use]
    pub fn one_for(&mut self, guest: u64, len: u32, access: Access) -> Option<*mut u8> {
        let offset = guest.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            // `offset < self.len`, which is the length of a mapping, a usize.
            #[allow(clippy::cast_possible_truncation)]
            return Some(self.host.wrapping_add(offset as usize));
        }
        self.one_uncached(guest, len, access)
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
    fn one_uncached(&mut self, guest: u64, len: u32, access: Access) -> Option<*mut u8> {
        if self.iommu.is_some() {
            return self.one_by_iommu(guest, len, access);
        }
        let region = self.map.find(guest)?;
        let offset = guest - region.guest;
        if u64::from(len) > region.len - offset {
            return None;
        }
        (self.start, self.len, self.host) = (region.guest, region.len, region.mapping.at(0));
        Some(region.mapping.at(usize::try_from(offset).ok()?))
    }

    #[cold]
    fn one_by_iommu(&mut self, guest: u64, len: u32, access: Access) -> Option<*mut u8> {
        let iommu = self.iommu.as_mut()?;
        let more = u64::from(len).saturating_sub(1);
        let last = guest.checked_add(more)?;
        let found = iommu.table.find_for(guest, access).copied();
        let Some(range) = found.filter(|range| last <= range.last) else {
            // Perhaps all of it is known, only not as one piece.
            self.note_misses(guest, len, access);
            return None;
        };
        if range.permission == Permission::BOTH {
            // A range of 2^64 bytes does not exist: it is mapped here.
            (self.start, self.len, self.host) =
                (range.first, (range.last - range.first).saturating_add(1), range.host);
        }
        Some(range.at(guest))
    }

    /// Appends our segments for `len` bytes at guest address `guest`; they may run over several
    /// regions that adjoin. Returns false if some byte is not guest memory, or not for this access,
    /// or `out` is full.
    #[inline]
    #[must_use]
    pub fn resolve(&mut self, guest: u64, len: u32, access: Access, out: &mut Segments) -> bool {
        match self.one_for(guest, len, access) {
            Some(base) => out.push(Segment { base, len: len as usize }),
            None => self.resolve_straddling(guest, len, access, out),
        }
    }

    #[cold]
    fn resolve_straddling(
        &mut self,
        guest: u64,
        len: u32,
        access: Access,
        out: &mut Segments,
    ) -> bool {
        if let Some(iommu) = &self.iommu {
            return resolve_by_iommu(&iommu.table, guest, len, access, out);
        }
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

/// As [`Translator::resolve`], from a table. What is missed was noted before.
fn resolve_by_iommu(
    table: &Iotlb,
    guest: u64,
    len: u32,
    access: Access,
    out: &mut Segments,
) -> bool {
    let Some(end) = guest.checked_add(u64::from(len)) else { return false };
    let mut at = guest;
    while at < end {
        let Some(range) = table.find_for(at, access) else { return false };
        let take = (end - at).min((range.last - at).saturating_add(1));
        let Ok(size) = usize::try_from(take) else { return false };
        if !out.push(Segment { base: range.at(at), len: size }) {
            return false;
        }
        at += take;
    }
    true
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
        assert!(t.resolve(4000, 200, Access::Read, &mut out), "a buffer over two regions works");
        assert_eq!(out.as_slice().iter().map(|s| s.len).collect::<Vec<_>>(), [96, 104]);
        out.clear();
        assert!(!t.resolve(8000, 400, Access::Read, &mut out), "a hole is not memory");
        assert!(!t.resolve(u64::MAX - 5, 100, Access::Read, &mut out));
    }

    #[test]
    fn a22_behind_an_iommu_only_what_is_allowed_is_reached() {
        let map = Arc::new(GuestMap::new(vec![region(0, 16384)]).unwrap());
        let host = |offset| map.regions()[0].mapping.at(offset);
        let teach = |t: &mut Translator, page: u64, at: usize, bits: u8| {
            let permission = Permission::from_bits(bits).unwrap();
            let last = page + 4095;
            t.learn(Translation { first: page, last, host: host(at), permission });
        };
        let mut t = Translator::behind_iommu(Arc::clone(&map));
        // The guest's own addresses mean nothing.
        assert_eq!(t.one(0, 1), None);
        assert_eq!(t.missed().map(std::mem::take).unwrap(), [Miss::of(0, Access::Read)]);
        teach(&mut t, 0x10_0000, 8192, 1);
        teach(&mut t, 0x10_1000, 0, 3);
        assert_eq!(t.one(0x10_0005, 1), Some(host(8197)));
        assert_eq!(t.one_for(0x10_0005, 1, Access::Write), None, "read-only");
        assert_eq!(t.missed().unwrap().len(), 1);
        t.missed().unwrap().clear();
        let stranger = std::ptr::from_mut(&mut 0u8);
        let permission = Permission::BOTH;
        t.learn(Translation { first: 0x20_0000, last: 0x20_0000, host: stranger, permission });
        assert_eq!(t.one(0x20_0000, 1), None, "memory that is not the guest's");
        t.missed().unwrap().clear();
        // Over the seam: in two pieces, if it only reads.
        let mut out = Segments::with_capacity(8);
        assert!(t.resolve(0x10_0ff0, 32, Access::Read, &mut out));
        assert_eq!(
            out.as_slice().iter().map(|s| s.base).collect::<Vec<_>>(),
            [host(12272), host(0)]
        );
        assert!(t.missed().is_none(), "all of it was known");
        out.clear();
        assert!(!t.resolve(0x10_0ff0, 32, Access::Write, &mut out));
        assert_eq!(*t.missed().unwrap(), [Miss::of(0x10_0000, Access::Write)]);
        t.missed().unwrap().clear();
        // What was used last is not remembered beyond its end.
        assert!(t.one_for(0x10_1000, 4096, Access::Write).is_some());
        t.forget(0x10_1800, 0x10_18ff);
        assert!(t.one(0x10_1000, 8).is_some() && t.one(0x10_1800, 8).is_none());
        assert!(t.one(0x10_1900, 8).is_some());
        t.forget(0, u64::MAX);
        assert!(t.one(0x10_0000, 1).is_none() && t.one(0x10_1000, 1).is_none());
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
