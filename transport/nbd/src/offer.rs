//! What a client is told of a disk before it chooses it.

use crate::protocol::{BLOCK_MIN, offers};
use ringway_core::Geometry;

/// A disk as a client can choose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its name.
    pub name: String,
    /// A client that names none gets it.
    pub nameless: bool,
    /// What people read in lists; empty for nothing.
    pub description: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Offsets and lengths should be multiples of this, in bytes, a power of two.
    pub min_block: u32,
    /// The block size that it likes best, in bytes, a power of two.
    pub preferred_block: u32,
    /// It refuses what changes it.
    pub read_only: bool,
    /// It gives space back.
    pub trims: bool,
}

impl Offer {
    /// A disk of this shape, for clients that name it.
    #[must_use]
    pub fn new(name: &str, description: &str, geometry: &Geometry) -> Self {
        Self {
            name: name.to_owned(),
            nameless: false,
            description: description.to_owned(),
            bytes: geometry.capacity,
            min_block: geometry.logical_block.max(BLOCK_MIN),
            preferred_block: preferred_block(geometry),
            read_only: geometry.read_only,
            trims: geometry.discard && !geometry.read_only,
        }
    }

    /// Its transmission flags.
    pub(crate) fn flags(&self) -> u16 {
        use offers as o;
        let always = o::HAS_FLAGS | o::SEND_FLUSH | o::SEND_DF | o::CAN_MULTI_CONN | o::SEND_CACHE;
        if self.read_only {
            return always | o::READ_ONLY;
        }
        let trim = if self.trims { o::SEND_TRIM } else { 0 };
        always | o::SEND_FUA | o::SEND_WRITE_ZEROES | o::SEND_FAST_ZERO | trim
    }
}

/// At least a page, which no cache splits; at most what a power of two can say.
fn preferred_block(geometry: &Geometry) -> u32 {
    let block = geometry.physical_block.max(geometry.logical_block).max(4096);
    if block.is_power_of_two() { block.max(BLOCK_MIN) } else { 4096 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            capacity: 1 << 20,
            logical_block: 512,
            physical_block: 512,
            optimal_io: 0,
            read_only: false,
            discard: true,
            discard_granularity: 512,
        }
    }

    #[test]
    fn a_disk_that_is_only_read_offers_nothing_that_changes_it() {
        let plain = Offer::new("a", "", &geometry());
        assert_eq!(plain.flags(), 0b1101_1110_1101);
        let read_only = Offer::new("a", "", &Geometry { read_only: true, ..geometry() });
        assert_eq!(read_only.flags(), 0b0101_1000_0111);
        assert!(!read_only.trims);
        let kept = Offer::new("a", "", &Geometry { discard: false, ..geometry() });
        assert_eq!(kept.flags(), plain.flags() & !offers::SEND_TRIM);
    }

    #[test]
    fn the_preferred_block_is_a_power_of_two_and_a_page_at_least() {
        for (physical, preferred) in
            [(512, 4096), (4096, 4096), (65536, 65536), (3000, 4096), (12288, 4096)]
        {
            let shape = Geometry { physical_block: physical, ..geometry() };
            assert_eq!(Offer::new("", "", &shape).preferred_block, preferred);
            assert_eq!(Offer::new("", "", &shape).min_block, 512);
        }
    }
}
