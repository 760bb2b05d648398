//! Ranges of bytes beside each other: what only unaligned requests and locks ask.

use super::ByteRange;

impl ByteRange {
    /// The smallest range with both ends on multiples of `align` (a power of two) that holds this
    /// one; `None` if it would leave 64 bits.
    #[must_use]
    pub const fn widened(self, align: u64) -> Option<Self> {
        let start = self.offset & !(align - 1);
        match self.end().checked_add(align - 1) {
            Some(end) => Some(Self { offset: start, len: (end & !(align - 1)) - start }),
            None => None,
        }
    }

    /// True if the two ranges share a byte.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}
