//! A guest's memory twice: mapped, as the code under test sees it, and as plain bytes for the oracle.

use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use std::sync::Arc;

/// First address and length of each region. The rings lie in the first one. The next three adjoin
/// at odd addresses, so that alignment here and there differ; the last one ends where 64 bits do.
pub const REGIONS: [(u64, usize); 5] =
    [(RINGS, 8192), (0, 8192), (0x2000, 6145), (0x3801, 8192), (u64::MAX - 4096, 4096)];
/// The first address of the region with the rings.
pub const RINGS: u64 = 0x10_0000;

/// Guest memory as bytes: nothing but look-ups, one byte at a time.
#[derive(Clone)]
pub struct Bytes(Vec<(u64, Vec<u8>)>);

impl Bytes {
    fn new() -> Self {
        Self(REGIONS.iter().map(|&(start, len)| (start, vec![0; len])).collect())
    }

    /// The region and the offset of an address. Wider than addresses are, so that nothing wraps.
    fn place(&self, addr: u128) -> Option<(usize, usize)> {
        self.0.iter().enumerate().find_map(|(i, (start, bytes))| {
            let offset = usize::try_from(addr.checked_sub(u128::from(*start))?).ok()?;
            (offset < bytes.len()).then_some((i, offset))
        })
    }

    pub fn get(&self, addr: u128) -> Option<u8> {
        self.place(addr).map(|(region, offset)| self.0[region].1[offset])
    }

    pub fn set(&mut self, addr: u128, byte: u8) {
        let (region, offset) = self.place(addr).expect("the oracle writes to guest memory only");
        self.0[region].1[offset] = byte;
    }

    /// A little-endian number of `len` bytes; `None` if one of them is not memory.
    pub fn number(&self, addr: u128, len: u8) -> Option<u64> {
        (0..len)
            .rev()
            .try_fold(0, |word, i| Some(word << 8 | u64::from(self.get(addr + u128::from(i))?)))
    }

    pub fn set_number(&mut self, addr: u64, word: u64, len: u8) {
        for (i, byte) in (0..len).zip(word.to_le_bytes()) {
            self.set(u128::from(addr) + u128::from(i), byte);
        }
    }

    /// First address and content of each region.
    pub fn regions(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.0.iter().map(|(start, bytes)| (*start, bytes.as_slice()))
    }

    /// How many bytes from `addr` lie in its region; `None` if it is not memory.
    pub fn room(&self, addr: u128) -> Option<u64> {
        self.place(addr).map(|(region, offset)| (self.0[region].1.len() - offset) as u64)
    }
}

/// Both views of the memory. The driver writes to both; the code under test and the oracle to one
/// each, and at the end they must be equal.
pub struct Memory {
    map: Arc<GuestMap>,
    pub bytes: Bytes,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let regions = REGIONS
            .iter()
            .map(|&(guest, len)| Region {
                guest,
                user: 0,
                len: len as u64,
                mapping: Arc::new(Mapping::anonymous(len).expect("a little memory")),
            })
            .collect();
        let map = Arc::new(GuestMap::new(regions).expect("a proper table of regions"));
        Self { map, bytes: Bytes::new() }
    }

    pub fn translator(&self) -> Translator {
        Translator::new(Arc::clone(&self.map))
    }

    /// Our address of a byte in the first region.
    pub fn ring_host(&self, addr: u64) -> *mut u8 {
        self.translator().one(addr, 1).expect("the rings are in guest memory").as_ptr()
    }

    /// The driver writes; bytes that are not memory are left out.
    pub fn write(&mut self, addr: u64, bytes: &[u8]) {
        let mut to = self.translator();
        for (i, &byte) in (0u64..).zip(bytes) {
            let Some(at) = addr.checked_add(i) else { break };
            if let Some(host) = to.one(at, 1) {
                // SAFETY: a mapped byte of guest memory; no reference to it exists.
                unsafe { host.write_volatile(byte) };
                self.bytes.set(u128::from(at), byte);
            }
        }
    }

    pub fn write_number(&mut self, addr: u64, word: u64, len: usize) {
        self.write(addr, &word.to_le_bytes()[..len]);
    }

    /// The guest address of a piece of our memory, if all of it is guest memory.
    pub fn guest_of(&self, base: *const u8, len: usize) -> Option<u64> {
        self.map.regions().iter().find_map(|region| {
            let offset = (base as usize).checked_sub(region.mapping.at(0) as usize)? as u64;
            (offset < region.len && len as u64 <= region.len - offset)
                .then_some(region.guest + offset)
        })
    }

    /// Panics where the two views differ.
    pub fn assert_equal(&self) {
        for region in self.map.regions() {
            let len = usize::try_from(region.len).expect("a small region");
            // SAFETY: the region is mapped for its whole length, and nobody writes meanwhile.
            let mapped = unsafe { std::slice::from_raw_parts(region.mapping.at(0), len) };
            let (_, plain) =
                self.bytes.regions().find(|(start, _)| *start == region.guest).unwrap();
            if mapped != plain {
                let at = mapped.iter().zip(plain).position(|(a, b)| a != b).unwrap();
                panic!(
                    "guest memory at {:#x} holds {:#04x}, the oracle says {:#04x}",
                    region.guest + at as u64,
                    mapped[at],
                    plain[at]
                );
            }
        }
    }
}
