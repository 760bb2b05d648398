//! From guest addresses to ours (hot). How a translator begins, and how it looks up what is not in the
//! regions used last, or behind an IOMMU: `translator/lookup.rs`.

mod lookup;

use super::iotlb::{Access, Iotlb, Miss};
use super::map::GuestMap;
use crate::request::{Segment, Segments};
use std::ptr::NonNull;
use std::sync::Arc;

/// Missing pages that it names at a time.
pub const MISSES_MAX: usize = 64;

/// Translates guest addresses, remembering the regions used last: one for what is a single piece, such
/// as headers, answers and tables of descriptors, and one for data. Front-ends in user space have these in
/// different regions, and a guest of more than 3 GiB has both on either side of a hole.
///
/// Each queue has its own, so that nothing is shared between workers but the read-only map.
///
/// # Invariants
/// 1. `single` and `data` describe a region of `map` each, or a translation for reading and writing of
///    `iommu`, or nothing.
#[derive(Debug)]
pub struct Translator {
    single: Seen,
    data: Seen,
    map: Arc<GuestMap>,
    iommu: Option<Box<BehindIommu>>,
}

/// Guest addresses that follow one another here, too.
#[derive(Clone, Copy, Debug)]
struct Seen {
    start: u64,
    len: u64,
    host: *mut u8,
}

impl Seen {
    const NOTHING: Self = Self { start: 0, len: 0, host: std::ptr::null_mut() };

    /// Where `len` bytes at `guest` are, if all of them are here.
    #[inline]
    fn find(&self, guest: u64, len: u32) -> Option<NonNull<u8>> {
        let offset = guest.wrapping_sub(self.start);
        let len = u64::from(len);
        if len <= self.len && offset <= self.len - len {
            // `offset <= self.len`, which is the length of a mapping, a usize.
            #[allow(clippy::cast_possible_truncation)]
            return NonNull::new(self.host.wrapping_add(offset as usize));
        }
        None
    }
}

/// What a translator needs if guest addresses are I/O virtual addresses.
#[derive(Debug)]
struct BehindIommu {
    table: Iotlb,
    missed: Vec<Miss>,
}

// SAFETY: `single` and `data` point into mappings that `map` keeps alive, on whatever thread.
unsafe impl Send for Translator {}

impl Translator {
    /// Our address of `len` bytes at guest address `guest`, if they lie in one region. The device
    /// only reads them.
    #[inline]
    #[must_use]
    pub fn one(&mut self, guest: u64, len: u32) -> Option<NonNull<u8>> {
        self.one_for(guest, len, Access::Read)
    }

    /// As [`Translator::one`], for what the device does there.
    #[inline]
    #[must_use]
    pub fn one_for(&mut self, guest: u64, len: u32, access: Access) -> Option<NonNull<u8>> {
        match self.single.find(guest, len) {
            Some(at) => Some(at),
            None => self.single_elsewhere(guest, len, access),
        }
    }

    /// Where `guest` is if it lies where the last single piece was, null otherwise: for prefetching.
    #[inline]
    #[must_use]
    pub fn guess(&self, guest: u64) -> *const u8 {
        let Seen { start, len, host } = self.single;
        let offset = guest.wrapping_sub(start);
        // `offset < len`, which is the length of a mapping, a usize.
        #[allow(clippy::cast_possible_truncation)]
        if offset < len { host.wrapping_add(offset as usize) } else { std::ptr::null() }
    }

    /// Appends our segments for `len` bytes at guest address `guest`; they may run over several
    /// regions that adjoin. Returns false if some byte is not guest memory, or not for this access,
    /// or `out` is full.
    #[inline]
    #[must_use]
    pub fn resolve(&mut self, guest: u64, len: u32, access: Access, out: &mut Segments) -> bool {
        let base = match self.data.find(guest, len) {
            Some(base) => Some(base),
            None => self.data_elsewhere(guest, len, access),
        };
        match base {
            Some(base) => out.push(Segment { base: base.as_ptr(), len: len as usize }),
            None => self.resolve_straddling(guest, len, access, out),
        }
    }
}
