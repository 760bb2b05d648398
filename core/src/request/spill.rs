//! Where the items of a list go that do not fit inline.

use std::ptr::NonNull;

/// Where a list goes that does not fit inline.
#[derive(Debug)]
pub(super) enum Spill<T> {
    Own(Box<[T]>),
    /// Lent by whoever made the list, who keeps it valid and to itself.
    Lent(NonNull<[T]>),
}

// SAFETY: lent memory is used by this list alone, on whatever thread.
unsafe impl<T: Send> Send for Spill<T> {}

impl<T> std::ops::Deref for Spill<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Self::Own(spill) => spill,
            // SAFETY: whoever lent it keeps it valid and touches it through this list only.
            Self::Lent(spill) => unsafe { spill.as_ref() },
        }
    }
}

impl<T> std::ops::DerefMut for Spill<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Own(spill) => spill,
            // SAFETY: as for `deref`.
            Self::Lent(spill) => unsafe { spill.as_mut() },
        }
    }
}
