//! Pieces of memory that take part in one transfer (hot). How lists of them begin: `segment/setup.rs`;
//! parts of lists, and the bytes in them: `segment/bytes.rs`.

mod bytes;
mod setup;
mod spill;

use spill::Spill;

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
