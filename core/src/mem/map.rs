//! The guest's memory: regions of its addresses, mapped here.

use super::iotlb::Translation;
use super::mapping::Mapping;
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
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// True if memory of both may be the same: they map parts of one file.
    #[must_use]
    pub fn shares(&self, other: &Self) -> bool {
        let of_other = |mapping: &Mapping| {
            other.regions.iter().any(|region| region.mapping.is_of_the_file_of(mapping))
        };
        self.regions.iter().any(|region| of_other(&region.mapping))
    }

    /// The region in which `guest` lies.
    pub(super) fn find(&self, guest: u64) -> Option<&Region> {
        let after = self.regions.partition_point(|region| region.guest <= guest);
        let region = &self.regions[after.checked_sub(1)?];
        (guest - region.guest < region.len).then_some(region)
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
    fn ring_addresses_stay_in_one_region() {
        let map = GuestMap::new(vec![region(0, 4096), region(4096, 4096)]).unwrap();
        assert!(map.user_to_host(0x1000_0000, 4096).is_some());
        assert!(map.user_to_host(0x1000_0001, 4096).is_none());
        assert!(map.user_to_host(0x1000_0000 - 1, 1).is_none());
        assert!(map.user_to_host(u64::MAX, 1).is_none());
    }
}
