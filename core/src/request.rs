//! What a guest may ask of a disk and with which memory, what it is answered, and the small numbers that
//! requests are found by while they are in flight (hot). Ranges beside each other: `request/ranges.rs`. How lists of
//! memory begin: `request/segment_setup.rs`; parts of them, and the bytes in them: `request/segment_bytes.rs`.

mod ranges;
mod segment_bytes;
mod segment_setup;
mod spill;

use crate::geometry::SECTOR_BYTES;
use spill::Spill;

/// The kinds of request a disk understands.
///
/// One vocabulary for all transports: virtio-blk, Xen's blkif and ublk are translated to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Disk to memory.
    Read,
    /// Memory to disk.
    Write,
    /// Make every write completed before this request durable.
    Flush,
    /// The guest no longer needs the range; it may read back as anything.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// Copy the disk's serial (20 bytes, zero padded) to memory.
    GetId,
}

impl Op {
    /// True for every operation that changes the disk: the ones a read-only disk refuses.
    #[must_use]
    pub const fn changes_disk(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }

    /// True if the operation moves bytes between guest memory and the disk.
    #[must_use]
    pub const fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// An operation that moves data between memory and a disk. Only those of one kind are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DataOp {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
    /// To the disk, and durable before it is done.
    WriteDurable,
}

/// The answer to a request, as a guest can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done, all of it.
    Ok,
    /// The request is well formed but could not be carried out.
    IoError,
    /// The same, because the host has no room for what was to be written. A guest whose protocol has no word
    /// for it sees an I/O error.
    NoSpace,
    /// The disk does not offer this operation, or the request is malformed in a reserved field.
    Unsupported,
}

/// A range of bytes on a disk. `offset + len` never overflows.
///
/// # Invariants
/// 1. `offset.checked_add(len)` is `Some`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ByteRange {
    offset: u64,
    len: u64,
}

impl ByteRange {
    /// A range of `len` bytes from `offset`; `None` if its end does not fit in 64 bits.
    #[must_use]
    pub const fn new(offset: u64, len: u64) -> Option<Self> {
        if offset.checked_add(len).is_some() { Some(Self { offset, len }) } else { None }
    }

    /// A range of `bytes` from a 512-byte `sector`; `None` if its end does not fit in 64 bits.
    #[must_use]
    pub const fn from_sector(sector: u64, bytes: u64) -> Option<Self> {
        match sector.checked_mul(SECTOR_BYTES) {
            Some(offset) => Self::new(offset, bytes),
            None => None,
        }
    }

    /// First byte.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.len
    }

    /// True if the range holds no byte.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// One past the last byte.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }

    /// True if both ends are multiples of `align`, a power of two.
    #[must_use]
    pub const fn is_aligned(self, align: u64) -> bool {
        (self.offset | self.len) & (align - 1) == 0
    }
}

/// How many segments a [`Segments`] keeps beside its length, without going to its spill memory.
const INLINE: usize = 4;

/// A piece of memory: `len` bytes from `base`. Laid out as `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// First byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

const _: () = assert!(size_of::<Segment>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<Segment>() == align_of::<libc::iovec>());

// SAFETY: a segment is an address and a length; whoever follows the address answers for it.
unsafe impl Send for Segment {}

impl Segment {
    /// Nothing at all.
    pub const EMPTY: Self = Self { base: std::ptr::null_mut(), len: 0 };
}

/// A list of segments of bounded length. Few stay inline; more go to memory taken at start.
///
/// # Invariants
/// 1. `spill.len()` is the bound; a list of more than `INLINE` segments lies wholly in `spill`.
/// 2. `bytes` is the sum of the lengths of the listed segments.
#[derive(Debug)]
pub struct Segments {
    count: usize,
    bytes: u64,
    inline: [Segment; INLINE],
    spill: Spill<Segment>,
}

impl Segments {
    /// Forgets all segments.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.bytes = 0;
    }

    /// Appends a segment; returns false, and changes nothing, if the list is full.
    #[inline]
    #[must_use]
    pub fn push(&mut self, segment: Segment) -> bool {
        if self.count < INLINE {
            self.inline[self.count] = segment;
        } else if !self.push_spill(segment) {
            return false;
        }
        self.count += 1;
        self.bytes += segment.len as u64;
        true
    }

    /// The segments, in order.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        if self.count <= INLINE { &self.inline[..self.count] } else { &self.spill[..self.count] }
    }

    /// Sum of the lengths, in bytes.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of segments.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// True if there is no segment.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// One request, in the form every layer below the wire understands.
///
/// `segments` is the guest memory the data comes from or goes to; for [`Op::Read`] and [`Op::Write`]
/// its total equals `range.len()`.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// For [`Op::WriteZeroes`]: the space may be given back to the host.
    pub unmap: bool,
    /// For [`Op::WriteZeroes`] without that: all of the range has space afterwards, not only what had some before.
    pub allocate: bool,
    /// Where on the disk, in bytes. Empty for [`Op::Flush`] and [`Op::GetId`].
    pub range: ByteRange,
    /// Where in memory.
    pub segments: Segments,
}

impl Request {
    /// An empty request with room for `max_segments` pieces of memory. Allocates; call at start only.
    #[must_use]
    pub fn with_capacity(max_segments: usize) -> Self {
        Self::with_segments(Segments::with_capacity(max_segments))
    }

    /// An empty request with this list of segments.
    #[must_use]
    pub fn with_segments(segments: Segments) -> Self {
        let (op, range) = (Op::Flush, ByteRange::default());
        Self { op, unmap: false, allocate: false, range, segments }
    }
}

/// A free list of tags `0..count`. All memory is taken at start.
///
/// A tag names a slot: the room kept for one request while it is in flight. An empty list means
/// "wait": the request stays where it is, in the ring.
///
/// # Invariants
/// 1. `free` holds each tag that is not handed out exactly once.
#[derive(Debug)]
pub struct TagList {
    free: Vec<u16>,
    count: u16,
}

impl TagList {
    /// A list with the tags `0..count`, all free; the lowest is handed out first, and a tag for the
    /// first time only while all lower ones are.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self { free: (0..count).rev().collect(), count }
    }

    /// Takes a tag, the one freed last: its memory is the warmest.
    #[inline]
    pub fn acquire(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives a tag back.
    #[inline]
    pub fn release(&mut self, tag: u16) {
        debug_assert!(tag < self.count, "tag {tag} was never handed out");
        debug_assert!(!self.free.contains(&tag), "tag {tag} is free already");
        self.free.push(tag);
    }

    /// How many tags are handed out.
    #[must_use]
    pub fn in_use(&self) -> usize {
        usize::from(self.count) - self.free.len()
    }

    /// How many tags there are.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }
}

#[cfg(test)]
mod tests;
