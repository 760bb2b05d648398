//! Parts of a list of segments, and the bytes in them.

use super::{INLINE, Segment, Segments};

impl Segments {
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
