//! Memory for the segment lists of many slots: one mapping, whose pages cost nothing until a list
//! grows long, and which goes back to the host as a whole.

use ringway_core::Segment;
use ringway_core::mem::{Mapping, Segments};
use std::io;
use std::ptr::NonNull;

/// Room for lists of a fixed length.
///
/// # Invariants
/// 1. Lists `0..next` have been handed out; list *i* has its `each` segments to itself.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Mapping,
    each: usize,
    next: usize,
}

impl Arena {
    /// Room for `lists` lists of `each` segments. Maps them; call at start only.
    pub(crate) fn new(lists: usize, each: usize) -> io::Result<Self> {
        let bytes = lists.max(1) * each * size_of::<Segment>();
        Ok(Self { memory: Mapping::anonymous(bytes)?, each, next: 0 })
    }

    /// The next list.
    ///
    /// # Safety
    /// The list must not outlive the arena.
    pub(crate) unsafe fn list(&mut self) -> Segments {
        let bytes = self.each * size_of::<Segment>();
        let at = self.next * bytes;
        assert!(at + bytes <= self.memory.len(), "more lists than there is room for");
        self.next += 1;
        let first = NonNull::new(self.memory.at(at).cast::<Segment>()).expect("mapped memory");
        // SAFETY: fresh anonymous memory reads as zeroes, which are empty segments; each list has
        // its own part (Arena invariant 1), and the caller keeps the arena.
        unsafe { Segments::over(NonNull::slice_from_raw_parts(first, self.each)) }
    }
}
