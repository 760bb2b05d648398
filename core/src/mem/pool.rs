//! Page-aligned memory of our own, for data that must not go straight to guest memory.

use super::mapping::Mapping;
use super::page::page_size;
use std::io;

/// A fixed amount of memory, handed out in contiguous runs of units.
///
/// Units are aligned to max(page size, 4096) (origin O4): the kernel takes such buffers whole,
/// while a buffer that is only 512-byte aligned is split at page ends. The memory is one mapping
/// and costs no page until it is used.
///
/// # Invariants
/// 1. Bit *i* of `used` is set while unit *i* is part of a [`PoolPages`] that was not given back.
#[derive(Debug)]
pub struct Pool {
    memory: Mapping,
    unit: usize,
    used: Vec<bool>,
    in_use: usize,
}

/// A contiguous run of units of a [`Pool`]; give it back with [`Pool::release`].
#[derive(Debug)]
#[must_use = "pages that are dropped are lost to the pool"]
pub struct PoolPages {
    first: usize,
    units: usize,
    base: *mut u8,
    len: usize,
}

// SAFETY: the pages are ours alone until they are given back, on whatever thread.
unsafe impl Send for PoolPages {}

impl PoolPages {
    /// The first byte, aligned to [`Pool::unit`].
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes, a multiple of [`Pool::unit`].
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A run always holds at least one unit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bytes.
    ///
    /// # Safety
    /// No I/O on these pages may be in flight.
    pub unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the run is ours alone (Pool invariant 1) and the caller vouches for the kernel.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl Pool {
    /// A pool of at least `bytes` bytes. Maps them; call at start only.
    ///
    /// # Errors
    /// What the kernel says to the mapping.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let unit = page_size().max(4096);
        let units = bytes.div_ceil(unit).max(1);
        let memory = Mapping::anonymous(units * unit)?;
        Ok(Self { memory, unit, used: vec![false; units], in_use: 0 })
    }

    /// The size and alignment of one unit, in bytes.
    #[must_use]
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// The size of the pool, in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.used.len() * self.unit
    }

    /// How many bytes are handed out.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.in_use * self.unit
    }

    /// Takes a contiguous run of at least `bytes` bytes; `None` means wait.
    pub fn acquire(&mut self, bytes: usize) -> Option<PoolPages> {
        let units = bytes.div_ceil(self.unit).max(1);
        let mut run = 0;
        for i in 0..self.used.len() {
            run = if self.used[i] { 0 } else { run + 1 };
            if run == units {
                let first = i + 1 - units;
                self.used[first..=i].fill(true);
                self.in_use += units;
                let base = self.memory.at(first * self.unit);
                return Some(PoolPages { first, units, base, len: units * self.unit });
            }
        }
        None
    }

    /// Takes a run back.
    // By value: the run can not be used after it was given back.
    #[allow(clippy::needless_pass_by_value)]
    pub fn release(&mut self, pages: PoolPages) {
        let run = &mut self.used[pages.first..pages.first + pages.units];
        debug_assert!(run.iter().all(|&used| used), "pages are given back once");
        run.fill(false);
        self.in_use -= pages.units;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_aligned_disjoint_and_reused() {
        let mut pool = Pool::new(8 * 4096).unwrap();
        assert_eq!(pool.unit() % 4096, 0);
        let unit = pool.unit();
        let units = pool.capacity() / unit;
        let a = pool.acquire(1).unwrap();
        let b = pool.acquire((units - 1) * unit).unwrap();
        assert_eq!(a.base() as usize % unit, 0);
        assert_eq!(b.base() as usize, a.base() as usize + unit);
        assert!(pool.acquire(1).is_none());
        pool.release(a);
        let c = pool.acquire(unit).unwrap();
        assert_eq!(pool.in_use(), pool.capacity());
        pool.release(b);
        pool.release(c);
        assert_eq!(pool.in_use(), 0);
    }
}
