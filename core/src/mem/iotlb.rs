//! What a device behind an IOMMU may reach: I/O virtual addresses and where they are here.

/// Bytes of the smallest range an IOMMU maps.
pub const IOMMU_PAGE: u64 = 4096;

/// What the device does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// What the IOMMU lets the device do to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission(u8);

impl Permission {
    /// Read and write.
    pub const BOTH: Self = Self(3);

    /// As the vhost-user protocol puts it: 1 read, 2 write, 3 both. `None` for anything else.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits >= 1 && bits <= 3 { Some(Self(bits)) } else { None }
    }

    /// True if `access` is allowed.
    const fn allows(self, access: Access) -> bool {
        let bit = match access {
            Access::Read => 1,
            Access::Write => 2,
        };
        self.0 & bit != 0
    }

    /// True if all is allowed that `other` allows.
    const fn includes(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A range that the IOMMU maps to adjoining memory of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// First I/O virtual address.
    pub first: u64,
    /// Last I/O virtual address.
    pub last: u64,
    /// Our address of the first byte.
    pub host: *mut u8,
    /// What the device may do to it.
    pub permission: Permission,
}

// SAFETY: a translation is addresses; whoever follows them answers for it.
unsafe impl Send for Translation {}
// SAFETY: as above.
unsafe impl Sync for Translation {}

impl Translation {
    /// Our address of `iova`, which lies in the range.
    #[must_use]
    pub fn at(&self, iova: u64) -> *mut u8 {
        debug_assert!(self.first <= iova && iova <= self.last);
        // The range is mapped here, so its length is a usize.
        #[allow(clippy::cast_possible_truncation)]
        self.host.wrapping_add((iova - self.first) as usize)
    }

    fn part(&self, first: u64, last: u64) -> Self {
        Self { first, last, host: self.at(first), permission: self.permission }
    }

    /// True if `next` goes on where this one ends, here as well as there.
    fn adjoins(&self, next: &Self) -> bool {
        self.last.checked_add(1) == Some(next.first)
            && self.at(self.last).wrapping_add(1) == next.host
            && self.permission == next.permission
    }
}

/// A page that the device needs and that is not known, or not for this access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// First I/O virtual address of the page.
    pub page: u64,
    /// What the device wants to do there.
    pub access: Access,
}

impl Miss {
    /// The page that holds `iova`.
    #[must_use]
    pub const fn of(iova: u64, access: Access) -> Self {
        Self { page: iova & !(IOMMU_PAGE - 1), access }
    }
}

/// Memory of ours: first and last address.
pub type HostRange = (usize, usize);

/// A table of translations: the device's own translation cache (device IOTLB).
///
/// # Invariants
/// 1. Ranges do not overlap and are sorted.
#[derive(Debug)]
pub struct Iotlb {
    ranges: Vec<Translation>,
    max: usize,
}

impl Iotlb {
    /// An empty table for `max` ranges. Allocates; call at start only.
    #[must_use]
    pub fn with_capacity(max: usize) -> Self {
        // Room for the rest of a range that is cut in two.
        Self { ranges: Vec::with_capacity(max + 2), max }
    }

    /// How many ranges it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// True if it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// True if no further range fits.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.ranges.len() >= self.max
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// The range that holds `iova`.
    #[must_use]
    pub fn find(&self, iova: u64) -> Option<&Translation> {
        let range = &self.ranges[self.ranges.partition_point(|range| range.last < iova)..];
        range.first().filter(|range| range.first <= iova)
    }

    /// The range that holds `iova` if it allows `access`.
    #[must_use]
    pub fn find_for(&self, iova: u64, access: Access) -> Option<&Translation> {
        self.find(iova).filter(|range| range.permission.allows(access))
    }

    /// True if some byte of `new` is known and is elsewhere, or is allowed more than `new` says.
    #[must_use]
    pub fn contradicts(&self, new: &Translation) -> bool {
        self.overlapping(new.first, new.last).any(|range| {
            let first = range.first.max(new.first);
            range.at(first) != new.at(first) || !new.permission.includes(range.permission)
        })
    }

    /// The ranges that overlap `first..=last`.
    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = &Translation> {
        let from = self.ranges.partition_point(|range| range.last < first);
        self.ranges[from..].iter().take_while(move |range| range.first <= last)
    }

    /// Adds a range, in the place of what overlaps it. A full table forgets everything first: it is
    /// a cache.
    pub fn insert(&mut self, mut new: Translation) {
        if self.is_full() {
            self.clear();
        }
        self.remove(new.first, new.last);
        let mut at = self.ranges.partition_point(|range| range.last < new.first);
        if at > 0 && self.ranges[at - 1].adjoins(&new) {
            at -= 1;
            let before = self.ranges.remove(at);
            (new.first, new.host) = (before.first, before.host);
        }
        if self.ranges.get(at).is_some_and(|after| new.adjoins(after)) {
            new.last = self.ranges.remove(at).last;
        }
        self.ranges.insert(at, new);
    }

    /// Forgets `first..=last`; what a range has beyond it stays.
    pub fn remove(&mut self, first: u64, last: u64) {
        let from = self.ranges.partition_point(|range| range.last < first);
        let to = from + self.ranges[from..].partition_point(|range| range.first <= last);
        if from == to {
            return;
        }
        let (head, tail) = (self.ranges[from], self.ranges[to - 1]);
        let before = (head.first < first).then(|| head.part(head.first, first - 1));
        let after = (tail.last > last).then(|| tail.part(last + 1, tail.last));
        // In place, so that a table at its capacity does not grow: at most one more than was there.
        self.ranges.drain(from..to);
        for rest in [after, before].into_iter().flatten() {
            self.ranges.insert(from, rest);
        }
    }

    /// Where the known bytes of `first..=last` are.
    #[must_use]
    pub fn hosts(&self, first: u64, last: u64) -> Vec<HostRange> {
        let host = |range: &Translation| {
            let (first, last) = (range.first.max(first), range.last.min(last));
            (range.at(first) as usize, range.at(last) as usize)
        };
        self.overlapping(first, last).map(host).collect()
    }

    /// The pieces of memory that `len` bytes at `iova` lie in, the known ones, and pages of those
    /// that are not known for `access`, each up to `max`.
    #[must_use]
    pub fn pieces(&self, iova: u64, len: u64, access: Access, max: usize) -> Pieces {
        let mut found = Pieces::default();
        let Some(last) = len.checked_sub(1).and_then(|more| iova.checked_add(more)) else {
            return found;
        };
        let mut at = iova;
        while found.known.len() < max && found.missed.len() < max {
            let end = match self.find_for(at, access) {
                Some(range) => {
                    let end = range.last.min(last);
                    found.known.push((range.at(at), end - at + 1));
                    end
                }
                None => {
                    let miss = Miss::of(at, access);
                    found.missed.push(miss);
                    (miss.page + (IOMMU_PAGE - 1)).min(last)
                }
            };
            if end == last {
                break;
            }
            at = end + 1;
        }
        found
    }
}

/// What [`Iotlb::pieces`] found.
#[derive(Debug, Default)]
pub struct Pieces {
    /// Address and length in bytes of each known piece, in order.
    pub known: Vec<(*mut u8, u64)>,
    /// Pages that are not known.
    pub missed: Vec<Miss>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, last: u64, host: usize) -> Translation {
        let host = std::ptr::without_provenance_mut(host);
        Translation { first, last, host, permission: Permission::BOTH }
    }

    fn listed(table: &Iotlb) -> Vec<(u64, u64, usize)> {
        table.ranges.iter().map(|r| (r.first, r.last, r.host as usize)).collect()
    }

    #[test]
    fn adjoining_ranges_become_one_and_are_cut_again() {
        let mut table = Iotlb::with_capacity(8);
        table.insert(range(0x2000, 0x2fff, 0x9000));
        table.insert(range(0x4000, 0x4fff, 0xb000));
        table.insert(range(0x3000, 0x3fff, 0xa000));
        assert_eq!(listed(&table), [(0x2000, 0x4fff, 0x9000)]);
        assert_eq!(table.hosts(0x2800, 0x37ff), [(0x9800, 0xa7ff)]);
        table.remove(0x3000, 0x3fff);
        assert_eq!(listed(&table), [(0x2000, 0x2fff, 0x9000), (0x4000, 0x4fff, 0xb000)]);
        assert!(table.find(0x3000).is_none() && table.find(0x2fff).is_some());
        assert!(table.find(0x1fff).is_none() && table.find(0x5000).is_none());
        // Elsewhere, it does not adjoin.
        table.insert(range(0x3000, 0x3fff, 0x1_0000));
        assert_eq!(table.len(), 3);
        table.remove(0, u64::MAX);
        assert!(table.is_empty());
    }

    #[test]
    fn a_full_table_starts_over_and_never_grows() {
        let mut table = Iotlb::with_capacity(4);
        let capacity = table.ranges.capacity();
        for at in 0..1000u64 {
            table.insert(range(at << 13, (at << 13) + 0xfff, 0x1000));
            assert!(table.len() <= 4);
        }
        table.clear();
        table.insert(range(0, u64::MAX >> 1, 0));
        for at in 0..1000u64 {
            table.remove(at << 13, (at << 13) + 0xfff);
            if table.is_full() {
                table.clear();
                table.insert(range(0, u64::MAX >> 1, 0));
            }
        }
        assert_eq!(table.ranges.capacity(), capacity);
    }

    #[test]
    fn a_translation_that_differs_is_noticed() {
        let mut table = Iotlb::with_capacity(8);
        table.insert(range(0x1000, 0x2fff, 0x5000));
        assert!(!table.contradicts(&range(0x1000, 0x1fff, 0x5000)));
        assert!(!table.contradicts(&range(0x2000, 0x3fff, 0x6000)));
        assert!(table.contradicts(&range(0x2000, 0x3fff, 0x7000)), "elsewhere");
        let narrower = Translation {
            permission: Permission::from_bits(1).unwrap(),
            ..range(0x1000, 0x1fff, 0x5000)
        };
        assert!(table.contradicts(&narrower));
        assert!(!table.contradicts(&range(0x3000, 0x3fff, 0)), "not known yet");
    }

    #[test]
    fn pieces_name_what_is_known_and_what_is_missed() {
        let mut table = Iotlb::with_capacity(8);
        table.insert(range(0x1000, 0x1fff, 0x5000));
        table.insert(Translation {
            permission: Permission::from_bits(1).unwrap(),
            ..range(0x3000, 0x3fff, 0x9000)
        });
        let found = table.pieces(0x1800, 0x2000, Access::Read, 64);
        let known: Vec<_> = found.known.iter().map(|&(at, len)| (at as usize, len)).collect();
        assert_eq!(known, [(0x5800, 0x800), (0x9000, 0x800)]);
        assert_eq!(found.missed, [Miss::of(0x2000, Access::Read)]);
        let found = table.pieces(0x1800, 0x2000, Access::Write, 64);
        let pages: Vec<_> = found.missed.iter().map(|miss| miss.page).collect();
        assert_eq!(pages, [0x2000, 0x3000], "a page for reading is not one for writing");
        // A wrap is nothing, and a huge range ends at the bound.
        let found = table.pieces(u64::MAX, 2, Access::Read, 64);
        assert!(found.known.is_empty() && found.missed.is_empty());
        assert_eq!(table.pieces(0x10_0000, 1 << 40, Access::Read, 64).missed.len(), 64);
    }
}
