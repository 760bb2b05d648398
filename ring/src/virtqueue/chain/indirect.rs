//! How a chain begins, indirect tables (§2.7.5.3, §2.8.7), and what else few chains need.

use super::{Chain, Sums};
use crate::virtqueue::chain_error::ChainError;
use crate::virtqueue::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use ringway_core::Segment;
use ringway_core::mem::{Access, Segments, Translator};
use std::ptr::NonNull;

impl Chain {
    /// The most descriptors accepted in one indirect table. The specification binds a chain to the
    /// queue size, but Linux fills tables up to `seg_max + 2` whatever the queue size is.
    pub const INDIRECT_MAX: usize = 1026;

    /// An empty chain for a queue of `size`. Allocates; call at start only.
    #[must_use]
    pub fn for_queue(size: u16) -> Self {
        let max = usize::from(size).max(Self::INDIRECT_MAX);
        let descs = Vec::with_capacity(max);
        Self { descs, sums: Sums::default(), max, refused: 0 }
    }

    /// Empties it because it is malformed; `more` descriptors were read besides those it has.
    #[cold]
    pub(in crate::virtqueue) fn refuse(&mut self, more: usize) {
        self.refused = self.descs.len() + more;
        self.settle(Sums::default());
    }

    /// The same while it is walked: the descriptor behind those of `sums` is wrong.
    #[cold]
    pub(super) fn refuse_walk(&mut self, sums: Sums, error: ChainError) -> Result<(), ChainError> {
        self.settle(sums);
        self.refuse(1);
        Err(error)
    }

    /// Puts a chain together by hand (with the feature `assemble`, for tests and fuzzers): first what the
    /// device reads, then what it writes, as (address, length).
    ///
    /// # Errors
    /// As [`Chain`] checks what it reads from a ring.
    #[cfg(any(test, feature = "assemble"))]
    pub fn assemble(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> Result<(), ChainError> {
        let mut sums = Sums::default();
        self.settle(sums);
        for &(addr, len) in readable {
            self.add(&mut sums, Desc { addr, len, flags: 0, next: 0 })?;
        }
        for &(addr, len) in writable {
            self.add(&mut sums, Desc { addr, len, flags: DESC_F_WRITE, next: 0 })?;
        }
        self.settle(sums);
        Ok(())
    }

    /// Notes which pages of all buffers are not known to a translator behind an IOMMU: that of the last byte that
    /// is written before all others, of which there may be more than are noted. It is where a status is.
    #[cold]
    pub fn note_misses(&self, mem: &mut Translator) {
        let status = self.writable().last();
        let status = status.and_then(|desc| desc.addr.checked_add(desc.len.checked_sub(1)?.into()));
        if let Some(at) = status {
            mem.note_misses(at, 1, Access::Write);
        }
        for (descs, access) in [(self.readable(), Access::Read), (self.writable(), Access::Write)] {
            descs.iter().for_each(|desc| mem.note_misses(desc.addr, desc.len, access));
        }
    }

    /// Ends a walk with a descriptor that says where the others are.
    pub(super) fn walk_table(
        &mut self,
        mut sums: Sums,
        table: Desc,
        mem: &mut Translator,
        indirect: bool,
    ) -> Result<(), ChainError> {
        let walked = if !indirect || table.flags & DESC_F_NEXT != 0 {
            Err(ChainError::BadIndirect)
        } else {
            self.add_table(&mut sums, table, mem)
        };
        match walked {
            Ok(()) => self.settle(sums),
            Err(error) => return self.refuse_walk(sums, error),
        }
        Ok(())
    }

    fn add_table(
        &mut self,
        sums: &mut Sums,
        table: Desc,
        mem: &mut Translator,
    ) -> Result<(), ChainError> {
        let table = Table::open(table, mem)?;
        let mut index = 0;
        for _ in 0..table.entries {
            if index >= table.entries {
                return Err(ChainError::OutOfRange(u16::try_from(index).unwrap_or(u16::MAX)));
            }
            let desc = table.read(index, mem)?;
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Err(ChainError::BadIndirect);
            }
            self.add(sums, desc)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = usize::from(desc.next);
        }
        Err(ChainError::TooLong)
    }

    /// Copies an indirect table of a packed ring, which is a chain of its own: all entries, in order.
    /// Flags other than WRITE are ignored there, and so are buffer ids (§2.8.7). After an error it has
    /// those before the wrong one.
    pub(in crate::virtqueue) fn walk_packed_table(
        &mut self,
        table: Desc,
        mem: &mut Translator,
    ) -> Result<(), ChainError> {
        let mut sums = Sums::default();
        let walked = self.add_packed_table(&mut sums, table, mem);
        self.settle(sums);
        walked
    }

    fn add_packed_table(
        &mut self,
        sums: &mut Sums,
        table: Desc,
        mem: &mut Translator,
    ) -> Result<(), ChainError> {
        let table = Table::open(table, mem)?;
        for index in 0..table.entries {
            // The flags are the last field of a packed descriptor, where split ones have `next`.
            let desc = table.read(index, mem)?;
            self.add(sums, Desc { flags: desc.next & DESC_F_WRITE, ..desc })?;
        }
        Ok(())
    }
}

/// An indirect table (§2.7.5.3, §2.8.7) of a plausible length.
struct Table {
    /// Where it is mapped, if it lies in one region.
    base: Option<NonNull<u8>>,
    addr: u64,
    entries: usize,
}

impl Table {
    #[inline]
    fn open(table: Desc, mem: &mut Translator) -> Result<Self, ChainError> {
        let bytes = table.len as usize;
        let entries = bytes / size_of::<Desc>();
        let odd = bytes % size_of::<Desc>() != 0;
        if bytes == 0 || odd || entries > Chain::INDIRECT_MAX {
            return Err(ChainError::BadIndirect);
        }
        let base = mem.one(table.addr, table.len);
        let base = base.filter(|base| base.addr().get() % align_of::<Desc>() == 0);
        Ok(Self { base, addr: table.addr, entries })
    }

    /// Copies an entry, once.
    #[inline]
    fn read(&self, index: usize, mem: &mut Translator) -> Result<Desc, ChainError> {
        debug_assert!(index < self.entries);
        let at = index * size_of::<Desc>();
        match self.base {
            // SAFETY: the table lies in one mapped region and the entry in the table; `open` checked
            // the alignment. Volatile: the driver may write at the same time; only the copy is used.
            #[allow(clippy::cast_ptr_alignment)]
            Some(base) => Ok(unsafe { base.add(at).cast::<Desc>().read_volatile() }),
            None => {
                let addr = self.addr.checked_add(at as u64);
                read_straddling(addr.ok_or(ChainError::TableUnmapped)?, mem)
            }
        }
    }
}

/// Reads a descriptor that is unaligned or lies over the seam of two regions, byte by byte.
#[cold]
fn read_straddling(addr: u64, mem: &mut Translator) -> Result<Desc, ChainError> {
    let mut room = [Segment::EMPTY; 16];
    // SAFETY: the list does not outlive `room`, which nothing else touches.
    let mut parts = unsafe { Segments::over(NonNull::from(&mut room[..])) };
    if !mem.resolve(addr, 16, Access::Read, &mut parts) {
        return Err(ChainError::TableUnmapped);
    }
    let mut bytes = [0; 16];
    // SAFETY: `resolve` only names mapped guest memory; `bytes` is our own.
    unsafe { parts.gather(0, &mut bytes) };
    let word = |range: std::ops::Range<usize>| {
        bytes[range].iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte))
    };
    // Each field is as wide as the bytes it is made of.
    #[allow(clippy::cast_possible_truncation)]
    let desc = Desc {
        addr: word(0..8),
        len: word(8..12) as u32,
        flags: word(12..14) as u16,
        next: word(14..16) as u16,
    };
    Ok(desc)
}
