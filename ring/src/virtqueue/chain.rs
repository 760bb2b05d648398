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
/// 2. The first `sums.readable` descriptors are device-readable, the others device-writable; none is
///    empty, and their lengths add up to `sums.bytes`, less than 2^32; those of the readable ones to
///    `sums.readable_bytes`. `sums.count` is `descs.len()`.
#[derive(Debug)]
pub struct Chain {
    descs: Vec<Desc>,
    sums: Sums,
    max: usize,
    /// Descriptors that were read of the last chain that was refused.
    refused: usize,
}

/// What the descriptors of a chain add up to. Whoever adds some has it beside the chain, where it is in
/// registers, and says [`Chain::settle`] when it is done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    count: usize,
    readable: usize,
    bytes: u64,
    readable_bytes: u64,
}

impl Chain {
    /// The device-readable descriptors.
    #[inline]
    #[must_use]
    pub fn readable(&self) -> &[Desc] {
        &self.descs[..self.sums.readable]
    }

    /// The device-writable descriptors.
    #[inline]
    #[must_use]
    pub fn writable(&self) -> &[Desc] {
        &self.descs[self.sums.readable..]
    }

    /// How many bytes the device may read.
    #[inline]
    #[must_use]
    pub fn readable_bytes(&self) -> u64 {
        self.sums.readable_bytes
    }

    /// How many bytes the device may write.
    #[inline]
    #[must_use]
    pub fn writable_bytes(&self) -> u64 {
        self.sums.bytes - self.sums.readable_bytes
    }

    /// How many descriptors were read for it, also if it was refused: what it has cost to walk. At
    /// most [`Chain::INDIRECT_MAX`] and the queue size together.
    #[inline]
    #[must_use]
    pub fn walked(&self) -> usize {
        // A chain that is accepted has at least one.
        if self.descs.is_empty() { self.refused } else { self.descs.len() }
    }

    /// The chain is what was added beside these sums.
    #[inline]
    pub(super) fn settle(&mut self, sums: Sums) {
        self.sums = sums;
        debug_assert!(sums.count <= self.max);
        // SAFETY: there is room for `max` (Chain invariant 1), and each place below `count` was written
        // when it was counted (`add`).
        unsafe { self.descs.set_len(sums.count) };
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
        let mut sums = Sums::default();
        let (mut index, size) = (head, ring.size());
        // A chain visits each descriptor of the queue at most once.
        for _ in 0..size {
            if index >= size {
                return self.refuse_walk(sums, ChainError::OutOfRange(index));
            }
            // SAFETY: `index` is in the table, which is mapped and aligned (SplitMemory
            // invariant 1). Volatile: the driver may write at the same time; only the copy is used.
            let desc = unsafe { ring.desc(index).read_volatile() };
            if desc.flags & DESC_F_INDIRECT != 0 {
                return self.walk_table(sums, desc, mem, indirect);
            }
            if let Err(error) = self.add(&mut sums, desc) {
                return self.refuse_walk(sums, error);
            }
            if desc.flags & DESC_F_NEXT == 0 {
                self.settle(sums);
                return Ok(());
            }
            index = desc.next;
        }
        self.refuse_walk(sums, ChainError::TooLong)
    }

    /// Adds a descriptor behind those that are counted in `sums`.
    #[inline(always)]
    pub(super) fn add(&mut self, sums: &mut Sums, desc: Desc) -> Result<(), ChainError> {
        if desc.len == 0 {
            return Err(ChainError::ZeroLength);
        }
        let count = sums.count;
        if count >= self.max {
            return Err(ChainError::TooLong);
        }
        sums.bytes += u64::from(desc.len);
        if sums.bytes > u64::from(u32::MAX) {
            return Err(ChainError::TooManyBytes);
        }
        if desc.flags & DESC_F_WRITE == 0 {
            if sums.readable != count {
                return Err(ChainError::ReadableAfterWritable);
            }
            sums.readable = count + 1;
            sums.readable_bytes = sums.bytes;
        }
        // SAFETY: there is room for more than `count` (Chain invariant 1), and a `Desc` is plain data.
        unsafe { self.descs.as_mut_ptr().add(count).write(desc) };
        sums.count = count + 1;
        Ok(())
    }
}
