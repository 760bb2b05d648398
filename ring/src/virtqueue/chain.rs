//! One chain of descriptors, copied out of shared memory once and judged afterwards.

use super::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, SplitMemory};
use ringway_core::Segment;
use ringway_core::mem::{Access, Segments, Translator};
use std::ptr::NonNull;

/// What is wrong with one chain. It costs the guest this chain and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// §2.7.5: an index of at least the queue size.
    #[error("descriptor index {0} is beyond the queue")]
    OutOfRange(u16),
    /// §2.7.5.1: longer than the queue; a loop looks like this.
    #[error("the chain is longer than its table, or a loop")]
    TooLong,
    /// A buffer without bytes.
    #[error("a descriptor has length zero")]
    ZeroLength,
    /// §2.7.4.2: a readable buffer after a writable one.
    #[error("a readable descriptor follows a writable one")]
    ReadableAfterWritable,
    /// §2.7.5: more than 2^32 bytes in one chain.
    #[error("the chain describes 4 GiB or more")]
    TooManyBytes,
    /// §2.7.5.3.1: an indirect table within an indirect table, with NEXT set, without bytes, of an
    /// odd length, or when INDIRECT_DESC was not negotiated.
    #[error("an indirect table is malformed")]
    BadIndirect,
    /// A table that is not in guest memory.
    #[error("an indirect table lies outside guest memory")]
    TableUnmapped,
}

/// A private copy of one chain: device-readable descriptors first, then device-writable ones.
///
/// # Invariants
/// 1. `descs.len() <= descs.capacity()`, which is fixed at start.
/// 2. The first `readable` descriptors are device-readable, the others device-writable; none is
///    empty, and their lengths add up to less than 2^32.
#[derive(Debug)]
pub struct Chain {
    descs: Vec<Desc>,
    readable: usize,
    bytes: u64,
    max: usize,
    /// Descriptors that were read of the last chain that was refused.
    refused: usize,
}

impl Chain {
    /// The most descriptors accepted in one indirect table. The specification binds a chain to the
    /// queue size, but Linux fills tables up to `seg_max + 2` whatever the queue size is.
    pub const INDIRECT_MAX: usize = 1026;

    /// An empty chain for a queue of `size`. Allocates; call at start only.
    #[must_use]
    pub fn for_queue(size: u16) -> Self {
        let max = usize::from(size).max(Self::INDIRECT_MAX);
        Self { descs: Vec::with_capacity(max), readable: 0, bytes: 0, max, refused: 0 }
    }

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

    /// How many descriptors were read for it, also if it was refused: what it has cost to walk. At
    /// most [`Chain::INDIRECT_MAX`] and the queue size together.
    #[inline]
    #[must_use]
    pub fn walked(&self) -> usize {
        // A chain that is accepted has at least one.
        if self.descs.is_empty() { self.refused } else { self.descs.len() }
    }

    /// Empties it because it is malformed; `more` descriptors were read besides those it has.
    #[cold]
    pub(super) fn refuse(&mut self, more: usize) {
        self.refused = self.descs.len() + more;
        self.clear();
    }

    /// Puts a chain together by hand (with the feature `assemble`, for tests and fuzzers): first what the device reads, then what
    /// it writes, as (address, length).
    ///
    /// # Errors
    /// As [`Chain`] checks what it reads from a ring.
    #[cfg(feature = "assemble")]
    pub fn assemble(
        &mut self,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> Result<(), ChainError> {
        self.clear();
        for &(addr, len) in readable {
            self.add(Desc { addr, len, flags: 0, next: 0 })?;
        }
        for &(addr, len) in writable {
            self.add(Desc { addr, len, flags: DESC_F_WRITE, next: 0 })?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.descs.clear();
        self.readable = 0;
        self.bytes = 0;
    }

    /// Notes which pages of all buffers are not known to a translator behind an IOMMU.
    #[cold]
    pub fn note_misses(&self, mem: &mut Translator) {
        for (descs, access) in [(self.readable(), Access::Read), (self.writable(), Access::Write)] {
            descs.iter().for_each(|desc| mem.note_misses(desc.addr, desc.len, access));
        }
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

    fn walk_indirect(&mut self, table: Desc, mem: &mut Translator) -> Result<(), ChainError> {
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
            self.add(desc)?;
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = usize::from(desc.next);
        }
        Err(ChainError::TooLong)
    }

    /// Copies an indirect table of a packed ring: all entries, in order. Flags other than WRITE are
    /// ignored there, and so are buffer ids (§2.8.7).
    pub(super) fn walk_packed_table(
        &mut self,
        table: Desc,
        mem: &mut Translator,
    ) -> Result<(), ChainError> {
        let table = Table::open(table, mem)?;
        for index in 0..table.entries {
            // The flags are the last field of a packed descriptor, where split ones have `next`.
            let desc = table.read(index, mem)?;
            self.add(Desc { flags: desc.next & DESC_F_WRITE, ..desc })?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn add(&mut self, desc: Desc) -> Result<(), ChainError> {
        if desc.len == 0 {
            return Err(ChainError::ZeroLength);
        }
        if self.descs.len() == self.max {
            return Err(ChainError::TooLong);
        }
        self.bytes += u64::from(desc.len);
        if self.bytes > u64::from(u32::MAX) {
            return Err(ChainError::TooManyBytes);
        }
        if desc.flags & DESC_F_WRITE == 0 {
            if self.readable != self.descs.len() {
                return Err(ChainError::ReadableAfterWritable);
            }
            self.readable += 1;
        }
        self.descs.push(desc);
        Ok(())
    }
}

/// An indirect table (§2.7.5.3, §2.8.7) of a plausible length.
struct Table {
    /// Where it is mapped, if it lies in one region.
    base: Option<*mut u8>,
    addr: u64,
    entries: usize,
}

impl Table {
    #[inline]
    fn open(table: Desc, mem: &mut Translator) -> Result<Self, ChainError> {
        let bytes = table.len as usize;
        let entries = bytes / size_of::<Desc>();
        let odd = !bytes.is_multiple_of(size_of::<Desc>());
        if bytes == 0 || odd || entries > Chain::INDIRECT_MAX {
            return Err(ChainError::BadIndirect);
        }
        let base = mem.one(table.addr, table.len);
        let base = base.filter(|base| (*base as usize).is_multiple_of(align_of::<Desc>()));
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
    let mut parts = unsafe { Segments::over(NonNull::from_mut(&mut room[..])) };
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
