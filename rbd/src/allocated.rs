//! Where an image has data: asked of the cluster in windows, as they are needed.

use crate::error::RbdError;
use crate::image::Image;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

/// What is asked for at a time: 256 objects of the usual size, of at most as many ranges as it has sectors of
/// 4 KiB.
const WINDOW: u64 = 1 << 30;

/// Where an image has data, from its beginning to its end. All else reads as zeroes.
#[derive(Debug)]
pub struct Allocated {
    image: Arc<Image>,
    bytes: u64,
    /// What was asked for last, and its data: ascending, none of it empty.
    window: Range<u64>,
    data: Vec<Range<u64>>,
}

impl Allocated {
    /// Of an image as it is now. What is written meanwhile may be missed.
    ///
    /// # Errors
    /// What the cluster says.
    pub fn new(image: &Arc<Image>) -> Result<Self, RbdError> {
        let bytes = image.bytes()?;
        Ok(Self { image: Arc::clone(image), bytes, window: 0..0, data: Vec::new() })
    }

    /// Where the first data at or behind `at` begins; `None` if there is none. May wait for the cluster.
    ///
    /// # Errors
    /// What the cluster says.
    pub fn next_data(&mut self, mut at: u64) -> Result<Option<u64>, RbdError> {
        while at < self.bytes {
            self.load_window(at)?;
            match next_in(&self.data, at) {
                Some(data) => return Ok(Some(data.start.max(at))),
                None => at = self.window.end,
            }
        }
        Ok(None)
    }

    /// Where the data at `at` ends, as far as it was looked at: what follows may be data, too.
    ///
    /// # Errors
    /// What the cluster says.
    pub fn next_hole(&mut self, at: u64) -> Result<u64, RbdError> {
        if at < self.bytes {
            self.load_window(at)?;
        }
        let data = next_in(&self.data, at).filter(|data| data.start <= at);
        Ok(data.map_or(at, |data| data.end))
    }

    fn load_window(&mut self, at: u64) -> Result<(), RbdError> {
        if self.window.contains(&at) {
            return Ok(());
        }
        let start = at / WINDOW * WINDOW;
        let window = start..self.bytes.min(start + WINDOW);
        self.window = 0..0;
        self.data.clear();
        let (opened, found) = (&self.image.opened, ptr::from_mut(&mut self.data));
        let (len, whole) = (window.end - window.start, 0);
        // SAFETY: the image is open; `note` is called with the list, before this returns, by one thread at a
        // time.
        let rc = unsafe {
            (opened.library.rbd_diff_iterate2)(
                opened.image,
                ptr::null(),
                window.start,
                len,
                // What a clone has of its parent is its data.
                1,
                whole,
                note,
                found.cast(),
            )
        };
        RbdError::check(rc, "learn where the image has data")?;
        self.data.sort_unstable_by_key(|data| data.start);
        self.window = window;
        Ok(())
    }
}

/// The first that does not end before `at`, of ranges that do not overlap.
fn next_in(data: &[Range<u64>], at: u64) -> Option<&Range<u64>> {
    data.get(data.partition_point(|data| data.end <= at))
}

/// `rbd_diff_iterate2`'s: a range that is there, or is there no more.
///
/// # Safety
/// `list` is a `Vec<Range<u64>>` that nobody else uses until this returns.
unsafe extern "C" fn note(offset: u64, len: usize, exists: c_int, list: *mut c_void) -> c_int {
    if exists != 0 && len > 0 {
        // SAFETY: passed on to the caller.
        let list = unsafe { &mut *list.cast::<Vec<Range<u64>>>() };
        list.push(offset..offset.saturating_add(len as u64));
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_as_they_lie() {
        let mut list: Vec<Range<u64>> = Vec::new();
        let into = ptr::from_mut(&mut list).cast();
        for (offset, len, exists) in [(10, 10, 1), (20, 5, 1), (30, 10, 0), (40, 60, 1), (7, 0, 1)]
        {
            // SAFETY: the list is there, and this test's alone.
            assert_eq!(unsafe { note(offset, len, exists, into) }, 0);
        }
        assert_eq!(list, [10..20, 20..25, 40..100]);
        let next: Vec<_> = [0, 10, 19, 20, 25, 99].map(|at| next_in(&list, at)).into();
        let [a, b, c] = [Some(&list[0]), Some(&list[1]), Some(&list[2])];
        assert_eq!(next, [a, a, a, b, c, c]);
        assert_eq!(next_in(&list, 100), None);
    }
}
