//! Memory for files that take only some.
//!
//! It begins with a page where a file wants any multiple at all. Less is enough for direct I/O, but on a
//! virtual disk clusters that were read into memory that begins elsewhere were written three times as slowly
//! (docs/performance.md).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The least that memory is a multiple of where it is for direct I/O.
const PAGE: usize = 4096;

/// Zeroed bytes at a multiple of some unit.
///
/// # Invariants
/// 1. `at` is memory of `layout`, ours until this is dropped.
#[derive(Debug)]
pub(crate) struct Aligned {
    at: NonNull<u8>,
    layout: Layout,
}

impl Aligned {
    /// So many bytes, more than none; `unit` is a power of two.
    pub(crate) fn new(bytes: usize, unit: usize) -> Self {
        let unit = if unit > 1 { unit.max(PAGE) } else { 1 };
        let layout = Layout::from_size_align(bytes.max(1), unit).expect("a unit of a file");
        // SAFETY: it is not empty.
        let at = unsafe { alloc_zeroed(layout) };
        Self { at: NonNull::new(at).unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }

    /// So many bytes of it, whatever they hold, at a multiple of `unit`: other memory, if it has not as
    /// much.
    pub(crate) fn room(&mut self, bytes: usize, unit: u32) -> &mut [u8] {
        // At most a page or so.
        let unit = unit.max(1) as usize;
        if self.layout.size() < bytes || self.layout.align() < unit {
            *self = Self::new(bytes, unit);
        }
        &mut self[..bytes]
    }
}

impl Default for Aligned {
    fn default() -> Self {
        Self::new(1, 1)
    }
}

// SAFETY: memory that nobody else has (Aligned invariant 1).
unsafe impl Send for Aligned {}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory of ours (Aligned invariant 1).
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout (Aligned invariant 1).
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_direct_io_begins_with_a_page() {
        for unit in [512, 1024, 4096, 8192] {
            let mut memory = Aligned::default();
            for bytes in [1, 512, 4096, 65536, 65537, 1 << 21] {
                let at = memory.room(bytes, unit).as_ptr() as usize;
                assert!(at % PAGE.max(unit as usize) == 0, "{unit} {bytes}");
            }
        }
    }
}
