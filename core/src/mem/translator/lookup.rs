//! Looking addresses up: in the regions of a map, or in the translations that an IOMMU has given.

use super::{BehindIommu, MISSES_MAX, Seen, Translator};
use crate::mem::iotlb::{Access, IOMMU_PAGE, Iotlb, Miss, Permission, Translation};
use crate::mem::map::GuestMap;
use crate::request::{Segment, Segments};
use std::ptr::NonNull;
use std::sync::Arc;

/// Translations that a [`Translator`] behind an IOMMU keeps.
const TRANSLATIONS: usize = 4096;

impl BehindIommu {
    fn miss(&mut self, iova: u64, access: Access) {
        let miss = Miss::of(iova, access);
        if self.missed.len() < MISSES_MAX && !self.missed.contains(&miss) {
            self.missed.push(miss);
        }
    }
}

impl Translator {
    /// A translator for `map`.
    #[must_use]
    pub fn new(map: Arc<GuestMap>) -> Self {
        Self { single: Seen::NOTHING, data: Seen::NOTHING, map, iommu: None }
    }

    /// The map it translates for.
    #[must_use]
    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
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
        (self.single, self.data) = (Seen::NOTHING, Seen::NOTHING);
        if let Some(iommu) = self.iommu.as_mut().filter(|_| self.map.holds(&translation)) {
            iommu.table.insert(translation);
        }
    }

    /// From now on nothing is known of `first..=last`.
    pub fn forget(&mut self, first: u64, last: u64) {
        (self.single, self.data) = (Seen::NOTHING, Seen::NOTHING);
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

    /// Where a single piece is that is not where the last one was.
    #[cold]
    #[inline(never)]
    pub(super) fn single_elsewhere(
        &mut self,
        guest: u64,
        len: u32,
        access: Access,
    ) -> Option<NonNull<u8>> {
        if let Some(at) = self.data.find(guest, len) {
            // These seldom move.
            self.single = self.data;
            return Some(at);
        }
        let (at, seen) = self.look_up(guest, len, access)?;
        self.single = seen.unwrap_or(self.single);
        Some(at)
    }

    /// Where data is that is not where the last was.
    #[inline(never)]
    pub(super) fn data_elsewhere(
        &mut self,
        guest: u64,
        len: u32,
        access: Access,
    ) -> Option<NonNull<u8>> {
        if let Some(at) = self.single.find(guest, len) {
            // Both are kept: data may be here and there by turns.
            if self.data.len == 0 {
                self.data = self.single;
            }
            return Some(at);
        }
        let (at, seen) = self.look_up(guest, len, access)?;
        self.data = seen.unwrap_or(self.data);
        Some(at)
    }

    /// Where it is, by all that is known, and what is to be remembered of that.
    fn look_up(
        &mut self,
        guest: u64,
        len: u32,
        access: Access,
    ) -> Option<(NonNull<u8>, Option<Seen>)> {
        if self.iommu.is_some() {
            return self.look_up_by_iommu(guest, len, access);
        }
        let region = self.map.find(guest)?;
        let seen = Seen { start: region.guest, len: region.len, host: region.mapping.at(0) };
        Some((seen.find(guest, len)?, Some(seen)))
    }

    #[cold]
    fn look_up_by_iommu(
        &mut self,
        guest: u64,
        len: u32,
        access: Access,
    ) -> Option<(NonNull<u8>, Option<Seen>)> {
        let iommu = self.iommu.as_mut()?;
        let more = u64::from(len).saturating_sub(1);
        let last = guest.checked_add(more)?;
        let found = iommu.table.find_for(guest, access).copied();
        let Some(range) = found.filter(|range| last <= range.last) else {
            // Perhaps all of it is known, only not as one piece.
            self.note_misses(guest, len, access);
            return None;
        };
        let seen = (range.permission == Permission::BOTH).then(|| Seen {
            start: range.first,
            // A range of 2^64 bytes does not exist: it is mapped here.
            len: (range.last - range.first).saturating_add(1),
            host: range.host,
        });
        Some((NonNull::new(range.at(guest))?, seen))
    }

    #[cold]
    pub(super) fn resolve_straddling(
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
    use crate::mem::Region;
    use crate::mem::mapping::Mapping;

    fn region(guest: u64, len: usize) -> Region {
        let mapping = Arc::new(Mapping::anonymous(len).unwrap());
        Region { guest, user: guest.wrapping_add(0x1000_0000), len: len as u64, mapping }
    }

    #[test]
    fn translates_within_and_over_regions() {
        let map = Arc::new(
            GuestMap::new(vec![region(4096, 4096), region(0, 4096), region(16384, 4096)]).unwrap(),
        );
        let mut t = Translator::new(Arc::clone(&map));
        let first = t.one(0, 1).unwrap().as_ptr();
        assert_eq!(t.one(4095, 1), NonNull::new(first.wrapping_add(4095)));
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

    /// Headers in one region, data in another, or on both sides of a hole: what is remembered of either
    /// is used for the other, and no two regions become one.
    #[test]
    fn regions_of_headers_and_of_data_are_remembered_apart() {
        let map = Arc::new(
            GuestMap::new(vec![region(0, 8192), region(1 << 20, 8192), region(1 << 32, 4096)])
                .unwrap(),
        );
        let at = |guest: u64| {
            let region = map.regions().iter().rfind(|region| region.guest <= guest).unwrap();
            region.mapping.at(usize::try_from(guest - region.guest).unwrap())
        };
        let mut t = Translator::new(Arc::clone(&map));
        let mut out = Segments::with_capacity(8);
        for round in 0..8u64 {
            for (header, data) in [(16, 1 << 20), (24, 4096), (8100, 1 << 32), (1 << 32, 100)] {
                let (header, data) = (header, data + round);
                assert_eq!(t.one(header, 1), NonNull::new(at(header)));
                out.clear();
                assert!(t.resolve(data, 512, Access::Write, &mut out));
                assert_eq!(out.as_slice()[0].base, at(data));
                assert_eq!(t.guess(header), at(header).cast_const());
            }
            // What is remembered ends where its region does.
            assert_eq!(t.one(8000, 512), None);
            out.clear();
            assert!(!t.resolve(8000, 512, Access::Read, &mut out));
        }
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
        assert_eq!(t.one(0x10_0005, 1), NonNull::new(host(8197)));
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
}
