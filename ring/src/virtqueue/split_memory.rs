//! A split virtqueue in memory, as its device and its driver side touch it (hot). What is judged at the
//! start: `split_memory/setup.rs`.

mod setup;

use super::layout::{Desc, UsedElem, avail_bytes, used_bytes};
use crate::shared::{AtomicU16, u16_at};

/// Typed pointers into a split virtqueue, shared by its device and its driver side.
///
/// # Invariants
/// 1. The three parts are mapped, aligned and long enough for `size` entries while this exists.
/// 2. `size` is a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitMemory {
    desc: *mut Desc,
    avail: *mut u16,
    used: *mut u8,
    size: u16,
}

impl SplitMemory {
    #[inline]
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Index of ring entry `counter`, which counts without end.
    #[inline]
    fn entry(&self, counter: u16) -> usize {
        usize::from(counter & (self.size - 1))
    }

    #[inline]
    pub(super) fn desc(&self, index: u16) -> *mut Desc {
        debug_assert!(index < self.size);
        self.desc.wrapping_add(usize::from(index))
    }

    #[inline]
    fn avail_word(&self, index: usize) -> &AtomicU16 {
        debug_assert!(2 * index < avail_bytes(self.size));
        // SAFETY: the word lies in the available ring, which is mapped and aligned to 2 bytes
        // (invariant 1); both sides only touch it atomically.
        unsafe { u16_at(self.avail.add(index)) }
    }

    /// `avail.flags`.
    #[inline]
    pub(super) fn avail_flags(&self) -> &AtomicU16 {
        self.avail_word(0)
    }

    /// `avail.idx`.
    #[inline]
    pub(super) fn avail_idx(&self) -> &AtomicU16 {
        self.avail_word(1)
    }

    /// `avail.ring[counter mod size]`.
    #[inline]
    pub(super) fn avail_ring(&self, counter: u16) -> &AtomicU16 {
        self.avail_word(2 + self.entry(counter))
    }

    /// `avail.used_event`.
    #[inline]
    pub(super) fn used_event(&self) -> &AtomicU16 {
        self.avail_word(2 + usize::from(self.size))
    }

    #[inline]
    fn used_word(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset < used_bytes(self.size) && offset % 2 == 0);
        // SAFETY: the word lies in the used ring, which is mapped and aligned to 4 bytes
        // (invariant 1); both sides only touch it atomically.
        unsafe { u16_at(self.used.add(offset).cast()) }
    }

    /// `used.flags`.
    #[inline]
    pub(super) fn used_flags(&self) -> &AtomicU16 {
        self.used_word(0)
    }

    /// `used.idx`.
    #[inline]
    pub(super) fn used_idx(&self) -> &AtomicU16 {
        self.used_word(2)
    }

    /// `used.avail_event`.
    #[inline]
    pub(super) fn avail_event(&self) -> &AtomicU16 {
        self.used_word(4 + size_of::<UsedElem>() * usize::from(self.size))
    }

    /// `used.ring[counter mod size]`.
    #[inline]
    pub(super) fn used_ring(&self, counter: u16) -> *mut UsedElem {
        self.used.wrapping_add(4 + size_of::<UsedElem>() * self.entry(counter)).cast()
    }
}

/// The test of §2.7.10: does moving an index from `old` to `new` pass `event`?
#[inline]
#[must_use]
pub const fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests;
