//! Pieces of memory that take part in one transfer.

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

    /// Keeps the first `count` segments.
    pub fn truncate(&mut self, count: usize) {
        while self.count > count {
            self.bytes -= self.as_slice()[self.count - 1].len as u64;
            // A list that shrinks back to the inline room is found there again (invariant 1).
            if self.count == INLINE + 1 {
                self.inline.copy_from_slice(&self.spill[..INLINE]);
            }
            self.count -= 1;
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

    /// Appends to `out` the `len` bytes that begin `skip` bytes into this list.
    /// Returns false if `out` is full or the list is shorter.
    #[must_use]
    pub fn slice_into(&self, skip: u64, len: u64, out: &mut Segments) -> bool {
        let (mut skip, mut left) = (skip, len);
        for segment in self.as_slice() {
            if left == 0 {
                break;
            }
            let whole = segment.len as u64;
            if skip >= whole {
                skip -= whole;
                continue;
            }
            let take = (whole - skip).min(left);
            // `skip` and `take` are at most `segment.len`, so both fit in usize.
            #[allow(clippy::cast_possible_truncation)]
            let piece =
                Segment { base: segment.base.wrapping_add(skip as usize), len: take as usize };
            if !out.push(piece) {
                return false;
            }
            skip = 0;
            left -= take;
        }
        left == 0
    }

    /// Copies bytes from `src` into the listed memory, beginning `skip` bytes in.
    /// Returns how many were copied.
    ///
    /// # Safety
    /// Every listed segment must be valid for writes, and `src` must not overlap them.
    pub unsafe fn scatter(&self, skip: u64, src: &[u8]) -> usize {
        let mut done = 0;
        self.each_piece(skip, src.len() as u64, |piece| {
            // SAFETY: the caller vouches for the segment; the piece lies in it and in `src`.
            unsafe {
                std::ptr::copy_nonoverlapping(src.as_ptr().add(done), piece.base, piece.len);
            }
            done += piece.len;
        });
        done
    }

    /// Copies bytes from the listed memory, beginning `skip` bytes in, to `dst`.
    /// Returns how many were copied.
    ///
    /// # Safety
    /// Every listed segment must be valid for reads, and `dst` must not overlap them.
    pub unsafe fn gather(&self, skip: u64, dst: &mut [u8]) -> usize {
        let mut done = 0;
        self.each_piece(skip, dst.len() as u64, |piece| {
            // SAFETY: the caller vouches for the segment; the piece lies in it and in `dst`.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.base, dst.as_mut_ptr().add(done), piece.len);
            }
            done += piece.len;
        });
        done
    }

    /// Writes zeroes to the listed memory from `skip` bytes in to its end.
    ///
    /// # Safety
    /// Every listed segment must be valid for writes.
    pub unsafe fn zero_from(&self, skip: u64) {
        self.each_piece(skip, u64::MAX, |piece| {
            // SAFETY: the caller vouches for the segment, and the piece lies in it.
            unsafe { std::ptr::write_bytes(piece.base, 0, piece.len) };
        });
    }

    fn each_piece(&self, skip: u64, len: u64, mut each: impl FnMut(Segment)) {
        let (mut skip, mut left) = (skip, len);
        for segment in self.as_slice() {
            let whole = segment.len as u64;
            if skip >= whole {
                skip -= whole;
                continue;
            }
            let take = (whole - skip).min(left);
            // `skip` and `take` are at most `segment.len`, so both fit in usize.
            #[allow(clippy::cast_possible_truncation)]
            let (from, size) = (skip as usize, take as usize);
            each(Segment { base: segment.base.wrapping_add(from), len: size });
            left -= take;
            if left == 0 {
                break;
            }
            skip = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(memory: &mut [u8], piece: usize) -> Segments {
        let mut segments = Segments::with_capacity(64);
        for chunk in memory.chunks_mut(piece) {
            assert!(segments.push(Segment { base: chunk.as_mut_ptr(), len: chunk.len() }));
        }
        segments
    }

    #[test]
    fn spills_beyond_the_inline_room_and_stops_at_the_bound() {
        let mut segments = Segments::with_capacity(6);
        for len in 1..=6 {
            assert!(segments.push(Segment { base: std::ptr::null_mut(), len }));
        }
        assert!(!segments.push(Segment::EMPTY));
        let lens: Vec<_> = segments.as_slice().iter().map(|s| s.len).collect();
        assert_eq!(lens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(segments.bytes(), 21);
        segments.truncate(5);
        assert_eq!((segments.bytes(), segments.as_slice().len()), (15, 5));
        segments.truncate(2);
        assert_eq!((segments.bytes(), segments.as_slice().len()), (3, 2));
    }

    #[test]
    fn scatter_and_gather_walk_the_same_bytes() {
        for piece in [1, 3, 7, 16] {
            let mut memory = vec![0u8; 40];
            let segments = list(&mut memory, piece);
            let data: Vec<u8> = (1..=20).collect();
            // SAFETY: the segments lie in `memory`, which lives on and is not otherwise touched.
            unsafe {
                assert_eq!(segments.scatter(5, &data), 20);
                let mut back = [0u8; 20];
                assert_eq!(segments.gather(5, &mut back), 20);
                assert_eq!(back[..], data[..]);
                segments.zero_from(20);
                assert_eq!(segments.gather(0, &mut [0; 64]), 40);
            }
            assert_eq!(memory[5..20], data[..15]);
            assert!(memory[20..].iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn a_slice_of_a_list_names_the_same_bytes() {
        let mut memory: Vec<u8> = (0..100).collect();
        let segments = list(&mut memory, 9);
        let mut part = Segments::with_capacity(64);
        assert!(segments.slice_into(13, 50, &mut part));
        let mut back = [0u8; 50];
        // SAFETY: the segments lie in `memory`.
        assert_eq!(unsafe { part.gather(0, &mut back) }, 50);
        assert!(back.iter().copied().eq(13..63));
        assert!(!segments.slice_into(90, 11, &mut Segments::with_capacity(8)));
    }
}
