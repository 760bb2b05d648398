//! Parts of the memory of operations (hot).

use ringway_core::Segment;

/// Appends the `len` bytes that begin `skip` bytes into `segments`.
#[inline]
pub(crate) fn push(pieces: &mut Vec<libc::iovec>, segments: &[Segment], skip: u64, len: u64) {
    each_piece(segments, skip, len, |base, iov_len| {
        pieces.push(libc::iovec { iov_base: base.cast(), iov_len });
    });
}

/// Copies bytes to the place that begins `at` bytes into `segments`.
///
/// # Safety
/// The memory is valid for writes.
pub(crate) unsafe fn fill(segments: &[Segment], at: u64, bytes: &[u8]) {
    let mut done = 0;
    // SAFETY: passed on to the caller; the pieces have as many bytes together.
    each_piece(segments, at, bytes.len() as u64, |base, len| unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), base, len);
        done += len;
    });
}

/// Zeroes `len` bytes that begin `at` bytes into `segments`.
///
/// # Safety
/// As for [`fill`].
pub(crate) unsafe fn zero(segments: &[Segment], at: u64, len: u64) {
    // SAFETY: passed on to the caller.
    let act = |base: *mut u8, len| unsafe { std::ptr::write_bytes(base, 0, len) };
    each_piece(segments, at, len, act);
}

#[inline]
fn each_piece(segments: &[Segment], skip: u64, len: u64, mut act: impl FnMut(*mut u8, usize)) {
    let (mut skip, mut left) = (skip, len);
    for segment in segments {
        let whole = segment.len as u64;
        if skip >= whole {
            skip -= whole;
            continue;
        }
        let take = (whole - skip).min(left);
        if take == 0 {
            break;
        }
        // Both are at most `segment.len`.
        #[allow(clippy::cast_possible_truncation)]
        act(segment.base.wrapping_add(skip as usize), take as usize);
        (skip, left) = (0, left - take);
    }
}
