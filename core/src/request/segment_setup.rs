//! How a list of segments begins, in memory of its own or in what is lent to it, and how it goes there.

use super::spill::Spill;
use super::{INLINE, Segment, Segments};
use std::ptr::NonNull;

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

    fn new(spill: Spill<Segment>) -> Self {
        Self { count: 0, bytes: 0, inline: [Segment::EMPTY; INLINE], spill }
    }

    /// The most segments this list can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.spill.len()
    }

    #[inline(never)]
    pub(super) fn push_spill(&mut self, segment: Segment) -> bool {
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
}
