//! One chain of descriptors, copied out of shared memory once and judged afterwards (hot). How it begins,
//! and tables of descriptors beside the ring: `chain/indirect.rs`.

mod indirect;

use super::chain_error::ChainError;
use super::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use super::split_memory::SplitMemory;
use ringway_core::mem::Translator;

/// A private copy of one chain: device-readable descriptors first, then device-writable ones.
///
/// # Invariants
/// 1. `descs.len() <= max <= descs.capacity()`, which is fixed at start.
/// 2. The first `readable` descriptors are device-readable, the others device-writable; none is
///    empty, and their lengths add up to `bytes`, less than 2^32; those of the readable ones to
///    `readable_bytes`.
#[derive(Debug)]
pub struct Chain {
    descs: Vec<Desc>,
    readable: usize,
    bytes: u64,
    readable_bytes: u64,
    max: usize,
    /// Descriptors that were read of the last chain that was refused.
    refused: usize,
}

impl Chain {
    /// The device-readable descriptors.
    #[inline]
    #[must_use]
    pub fn readable(&self) -> &[Desc] {
        &self.descs[..self.readable]
    }

    /// The device-writable descriptors.
    #[inline]
    #[must_use]
    pub fn writable(&self) -> &[Desc] {
        &self.descs[self.readable..]
    }

    /// How many bytes the device may read.
    #[inline]
    #[must_use]
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// How many bytes the device may write.
    #[inline]
    #[must_use]
    pub fn writable_bytes(&self) -> u64 {
        self.bytes - self.readable_bytes
    }

    /// How many descriptors were read for it, also if it was refused: what it has cost to walk. At
    /// most [`Chain::INDIRECT_MAX`] and the queue size together.
    #[inline]
    #[must_use]
    pub fn walked(&self) -> usize {
        // A chain that is accepted has at least one.
        if self.descs.is_empty() { self.refused } else { self.descs.len() }
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.descs.clear();
        self.readable = 0;
        self.bytes = 0;
        self.readable_bytes = 0;
    }

    /// Copies the chain that starts at `head`. All or nothing: after an error the chain is empty.
    #[inline]
    pub(super) fn walk(
        &mut self,
        ring: &SplitMemory,
        head: u16,
        mem: &mut Translator,
        indirect: bool,
    ) -> Result<(), ChainError> {
        self.clear();
        let result = self.walk_direct(ring, head, mem, indirect);
        if result.is_err() {
            self.refuse(1);
        }
        result
    }

    #[inline]
    fn walk_direct(
        &mut self,
        ring: &SplitMemory,
        head: u16,
        mem: &mut Translator,
        indirect: bool,
    ) -> Result<(), ChainError> {
        let mut index = head;
        // A chain visits each descriptor of the queue at most once.
        for _ in 0..ring.size() {
            if index >= ring.size() {
                return Err(ChainError::OutOfRange(index));
            }
            // SAFETY: `index` is in the table, which is mapped and aligned (SplitMemory
            // invariant 1). Volatile: the driver may write at the same time; only the copy is used.
            let desc = unsafe { ring.desc(index).read_volatile() };
            if desc.flags & DESC_F_INDIRECT != 0 {
                if !indirect || desc.flags & DESC_F_NEXT != 0 {
                    return Err(ChainError::BadIndirect);
                }
                return self.walk_indirect(desc, mem);
            }
            self.add(desc)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(ChainError::TooLong)
    }

    #[inline]
    pub(super) fn add(&mut self, desc: Desc) -> Result<(), ChainError> {
        if desc.len == 0 {
            return Err(ChainError::ZeroLength);
        }
        let count = self.descs.len();
        if count >= self.max {
            return Err(ChainError::TooLong);
        }
        self.bytes += u64::from(desc.len);
        if self.bytes > u64::from(u32::MAX) {
            return Err(ChainError::TooManyBytes);
        }
        if desc.flags & DESC_F_WRITE == 0 {
            if self.readable != count {
                return Err(ChainError::ReadableAfterWritable);
            }
            self.readable = count + 1;
            self.readable_bytes = self.bytes;
        }
        // SAFETY: there is room for more than `count` (Chain invariant 1), and a `Desc` is plain data.
        unsafe {
            self.descs.as_mut_ptr().add(count).write(desc);
            self.descs.set_len(count + 1);
        }
        Ok(())
    }
}
