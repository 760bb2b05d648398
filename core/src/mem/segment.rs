//! Pieces of memory that take part in one transfer (hot). Parts of such lists, and the bytes in them:
//! `segment/bytes.rs`.

mod bytes;

use std::ptr::NonNull;

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
    spill: Spill,
}

/// Where a list goes that does not fit inline.
#[derive(Debug)]
enum Spill {
    Own(Box<[Segment]>),
    /// Lent by whoever made the list, who keeps it valid and to itself.
    Lent(NonNull<[Segment]>),
}

// SAFETY: lent memory is used by this list alone, on whatever thread.
unsafe impl Send for Spill {}

impl std::ops::Deref for Spill {
    type Target = [Segment];
    fn deref(&self) -> &[Segment] {
        match self {
            Self::Own(spill) => spill,
            // SAFETY: whoever lent it keeps it valid and touches it through this list only.
            Self::Lent(spill) => unsafe { spill.as_ref() },
        }
    }
}

impl std::ops::DerefMut for Spill {
    fn deref_mut(&mut self) -> &mut [Segment] {
        match self {
            Self::Own(spill) => spill,
            // SAFETY: as for `deref`.
            Self::Lent(spill) => unsafe { spill.as_mut() },
        }
    }
}

impl Segments {
    /// An empty list that can hold `max` segments. Allocates; call at start only.
    #[must_use]
    pub fn with_capacity(max: usize) -> Self {
        Self::new(Spill::Own(vec![Segment::EMPTY; max.max(INLINE)].into_boxed_slice()))
    }

    /// An empty list that keeps what does not fit inline in `spill`, at least four segments.
    ///
    /// # Safety
    /// `spill` stays valid, and is touched through this list only, as long as the list exists.
    #[must_use]
    pub unsafe fn over(spill: NonNull<[Segment]>) -> Self {
        debug_assert!(spill.len() >= INLINE);
        Self::new(Spill::Lent(spill))
    }

    fn new(spill: Spill) -> Self {
        Self { count: 0, bytes: 0, inline: [Segment::EMPTY; INLINE], spill }
    }

    /// The most segments this list can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.spill.len()
    }

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

    #[inline(never)]
    fn push_spill(&mut self, segment: Segment) -> bool {
        if self.count == INLINE {
            self.spill[..INLINE].copy_from_slice(&self.inline);
        }
        match self.spill.get_mut(self.count) {
            Some(place) => {
                *place = segment;
                true
            }
            None => false,
        }
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
