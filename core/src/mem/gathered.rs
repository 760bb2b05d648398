//! Memory of a guest that lies in pieces, mapped once more so that they adjoin.
//!
//! A guest behind an IOMMU has rings whose I/O virtual addresses adjoin, and the memory behind them does
//! not. Whoever reads and writes a ring does so by its addresses, and need not know.

use super::error::MappingError;
use super::map::GuestMap;
use super::mapping::Mapping;
use super::page::page_size;
use super::quota::{Kind, Quota, Taken};
use std::sync::Arc;

/// A piece of a guest's memory that was mapped once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// First address where the pieces adjoin.
    here: usize,
    /// First address in the map of the guest's memory.
    there: usize,
    bytes: usize,
}

/// Pieces of a guest's memory at addresses that adjoin: what is written at either address of a byte is
/// read at the other. Unmapped when dropped.
#[derive(Debug)]
pub struct Gathered {
    mapping: Mapping,
    skip: usize,
    pieces: Vec<Piece>,
    /// Their part of a quota, until they are unmapped.
    _taken: Taken,
}

impl Gathered {
    /// Where the first byte is.
    #[must_use]
    pub fn at(&self) -> *mut u8 {
        self.mapping.at(self.skip)
    }

    /// The pieces: first address here, first address in the map of the guest's memory, and bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.pieces.iter().map(|piece| (piece.here, piece.there, piece.bytes))
    }

    /// As [`Mapping::is_lost`].
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

impl GuestMap {
    /// Maps pieces of this memory, each of so many bytes at an address of ours, so that they adjoin. It takes
    /// part of `quota`.
    ///
    /// # Errors
    /// [`MappingError`]: pieces that do not meet at the borders of pages, huge pages, a peer that has too many,
    /// memory that is not in this map.
    pub fn gather(
        &self,
        quota: &Arc<Quota>,
        pieces: &[(*mut u8, u64)],
    ) -> Result<Gathered, MappingError> {
        let page = page_size();
        // Each in one region: what adjoins here by chance is another file, or another part of one.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let mut end_of_region = 0;
        for &(at, bytes) in pieces {
            let bad = || MappingError::BadRange { offset: at as u64, len: bytes };
            let mut at = at as usize;
            let mut left = usize::try_from(bytes).map_err(|_| bad())?;
            if left == 0 {
                return Err(bad());
            }
            while left > 0 {
                let (unit, end) = self.unit_of(at).ok_or_else(bad)?;
                if unit != page {
                    return Err(MappingError::HugePages { page: unit });
                }
                let bytes = left.min(end - at);
                match runs.last_mut() {
                    Some((first, len)) if *first + *len == at && end == end_of_region => {
                        *len += bytes
                    }
                    _ => runs.push((at, bytes)),
                }
                (at, left, end_of_region) = (at + bytes, left - bytes, end);
            }
        }
        let meet =
            |pair: &[(usize, usize)]| (pair[0].0 + pair[0].1) % page == 0 && pair[1].0 % page == 0;
        if runs.is_empty() || !runs.windows(2).all(meet) {
            return Err(MappingError::NotPages { page });
        }
        let taken = quota.take(Kind::Pieces, runs.len() as u64)?;
        let whole = |&(at, bytes): &(usize, usize)| {
            let first = at - at % page;
            (first, (at + bytes).next_multiple_of(page) - first)
        };
        let pages: Vec<(usize, usize)> = runs.iter().map(whole).collect();
        // SAFETY: each run lies in mappings of this map whose unit is a page.
        let mapping = unsafe { Mapping::of_pages(quota, &pages)? };
        let skip = runs[0].0 % page;
        let mut here = mapping.at(skip) as usize;
        let pieces = runs.into_iter().map(|(there, bytes)| {
            here += bytes;
            Piece { here: here - bytes, there, bytes }
        });
        Ok(Gathered { skip, pieces: pieces.collect(), mapping, _taken: taken })
    }

    /// In which units the region is mapped that has the byte at `at`, and where it ends.
    fn unit_of(&self, at: usize) -> Option<(usize, usize)> {
        self.regions().iter().find_map(|region| {
            let (start, len) = (region.mapping.at(0) as usize, usize::try_from(region.len).ok()?);
            (start..start + len).contains(&at).then(|| (region.mapping.unit(), start + len))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;
    use std::fs::File;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;
    const PAGES: usize = 16;

    fn memory(flags: u32, bytes: usize) -> Option<(File, GuestMap)> {
        // SAFETY: a new descriptor that nobody else owns, or an error.
        let file = unsafe {
            let fd = libc::memfd_create(c"gathered".as_ptr(), flags);
            (fd >= 0).then(|| File::from_raw_fd(fd))?
        };
        file.set_len(bytes as u64).unwrap();
        let mapping = Arc::new(Mapping::of_file(&file, 0, bytes as u64).unwrap());
        let region = Region { guest: 0, user: 0, len: bytes as u64, mapping };
        Some((file, GuestMap::new(vec![region]).unwrap()))
    }

    fn at(map: &GuestMap, offset: usize) -> *mut u8 {
        map.regions()[0].mapping.at(offset)
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs memfd and mremap")]
    fn a28_pieces_adjoin_and_are_the_same_memory() {
        let (_file, map) = memory(0, PAGES * PAGE).unwrap();
        let quota = Arc::new(Quota::default());
        // The rest of page 9 from byte 256 on, page 3, pages 4 and 5 in two pieces, the beginning of page 0.
        let asked = [
            (9 * PAGE + 256, PAGE - 256),
            (3 * PAGE, PAGE),
            (4 * PAGE, 100),
            (4 * PAGE + 100, 2 * PAGE - 100),
            (0, 77),
        ];
        let pieces = asked.map(|(offset, bytes)| (at(&map, offset), bytes as u64));
        let gathered = map.gather(&quota, &pieces).unwrap();
        let mut to = gathered.at();
        assert_eq!(to as usize % PAGE, 256);
        let mut seen = 1u8;
        for (offset, bytes) in asked {
            let from = at(&map, offset);
            for byte in 0..bytes {
                // SAFETY: both are mapped, and nobody else touches them.
                unsafe {
                    from.wrapping_add(byte).write_volatile(seen);
                    assert_eq!(to.read_volatile(), seen);
                    to.write_volatile(!seen);
                    assert_eq!(from.wrapping_add(byte).read_volatile(), !seen);
                }
                to = to.wrapping_add(1);
                seen = seen.wrapping_add(1);
            }
        }
        let found: Vec<_> = gathered.pieces().map(|(_, there, bytes)| (there, bytes)).collect();
        let run = |offset, bytes| (at(&map, offset) as usize, bytes);
        assert_eq!(found, [run(9 * PAGE + 256, PAGE - 256), run(3 * PAGE, 3 * PAGE), run(0, 77)]);
        assert_eq!(gathered.pieces().next().unwrap().0, gathered.at() as usize);
        // The old places stay as they are.
        drop(gathered);
        // SAFETY: as above.
        unsafe { at(&map, 3 * PAGE).write_volatile(5) };
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs memfd and mremap")]
    fn a28_pieces_that_cannot_adjoin_are_refused() {
        let (_file, map) = memory(0, PAGES * PAGE).unwrap();
        let quota = Arc::new(Quota::default());
        let gather = |asked: &[(usize, u64)]| {
            let pieces: Vec<_> = asked
                .iter()
                .map(|&(offset, bytes)| (at(&map, 0).wrapping_add(offset), bytes))
                .collect();
            map.gather(&quota, &pieces).map(drop).unwrap_err()
        };
        for odd in [[(0, 4095), (2 * PAGE, 4096)], [(0, 4096), (2 * PAGE + 1, 8)]] {
            assert!(matches!(gather(&odd), MappingError::NotPages { page: PAGE }), "{odd:?}");
        }
        for outside in
            [[(0, 4096), (PAGES * PAGE, 4096)], [(0, 4096), (15 * PAGE, 4097)], [(0, 0), (PAGE, 1)]]
        {
            assert!(matches!(gather(&outside), MappingError::BadRange { .. }), "{outside:?}");
        }
        assert!(matches!(gather(&[]), MappingError::NotPages { .. }));
        // Nothing of what was refused is still counted.
        let all = [(at(&map, 0), 4096), (at(&map, 2 * PAGE), 4096)];
        let many: Vec<Gathered> =
            std::iter::from_fn(|| map.gather(&quota, &all).ok()).take(100).collect();
        assert_eq!(many.len(), 100);
    }

    /// Nothing smaller than a huge page can be mapped of one, and whoever tried would lose what is beside it.
    #[test]
    #[cfg_attr(miri, ignore = "needs memfd")]
    fn a28_huge_pages_are_refused_in_words_that_can_be_followed() {
        const HUGE: usize = 2 << 20;
        let Some((_file, map)) = memory(libc::MFD_HUGETLB, 2 * HUGE) else { return };
        let pieces = [(at(&map, HUGE), 4096), (at(&map, 0), 4096)];
        let error = map.gather(&Arc::new(Quota::default()), &pieces).unwrap_err();
        assert!(matches!(error, MappingError::HugePages { page: HUGE }), "{error}");
        assert!(error.to_string().contains("hugetlb=on"), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs memfd and signals")]
    fn a28_pieces_of_a_file_that_is_cut_short_are_zeroes_and_known_to_be_lost() {
        let (file, map) = memory(0, PAGES * PAGE).unwrap();
        let pieces = [(at(&map, 9 * PAGE), 4096), (at(&map, 3 * PAGE), 4096)];
        let gathered = map.gather(&Arc::new(Quota::default()), &pieces).unwrap();
        assert!(!gathered.is_lost());
        file.set_len(0).unwrap();
        // SAFETY: mapped, and nobody else touches it.
        unsafe {
            assert_eq!(gathered.at().wrapping_add(PAGE).read_volatile(), 0);
            gathered.at().write_volatile(1);
        }
        assert!(gathered.is_lost() && !map.is_lost());
    }

    /// Of each file the first half is shared: what lies behind it is of no concern to us.
    #[test]
    #[cfg_attr(miri, ignore = "needs memfd and mremap")]
    fn a28_regions_that_adjoin_here_by_chance_stay_themselves() {
        let half = PAGES / 2 * PAGE;
        let (mut files, mut regions) = (Vec::new(), Vec::<Region>::new());
        let (first, second) = loop {
            assert!(files.len() < 1000, "two of them adjoin");
            let (file, _) = memory(0, PAGES * PAGE).unwrap();
            let mapping = Arc::new(Mapping::of_file(&file, 0, half as u64).unwrap());
            let guest = (regions.len() * half) as u64;
            files.push(file);
            regions.push(Region { guest, user: guest, len: half as u64, mapping });
            let start = |index: usize| regions[index].mapping.at(0) as usize;
            let last = regions.len() - 1;
            let mut pairs = (0..last).flat_map(|other| [(other, last), (last, other)]);
            if let Some(pair) = pairs.find(|&(a, b)| start(a) + half == start(b)) {
                break pair;
            }
        };
        let map = GuestMap::new(regions).unwrap();
        let at = |region: usize, offset| map.regions()[region].mapping.at(offset);
        let quota = Arc::new(Quota::default());
        let (end, far) = (at(first, half - PAGE), at(second, 4 * PAGE));
        let page = PAGE as u64;
        // In two pieces, and in one that goes over the border.
        for asked in [
            &[(end, page), (at(second, 0), page), (far, page)][..],
            &[(end, 2 * page), (far, page)],
        ] {
            let gathered = map.gather(&quota, asked).unwrap();
            let found: Vec<_> = gathered.pieces().map(|(_, there, bytes)| (there, bytes)).collect();
            assert_eq!(found, [end, at(second, 0), far].map(|at| (at as usize, PAGE)));
            // SAFETY: both are mapped, and nobody else touches them.
            unsafe {
                at(second, 0).write_volatile(0x5a);
                assert_eq!(gathered.at().wrapping_add(PAGE).read_volatile(), 0x5a);
                gathered.at().wrapping_add(PAGE).write_volatile(0x77);
                assert_eq!(at(second, 0).read_volatile(), 0x77);
            }
            let mut beyond = [1];
            files[first].read_exact_at(&mut beyond, half as u64).unwrap();
            assert_eq!(beyond, [0], "what the guest does not share");
        }
    }
}
