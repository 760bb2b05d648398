//! What a flow does with each piece, and how its ends are counted.

/// The two ends.
pub(in crate::copy) const SRC: usize = 0;
pub(in crate::copy) const DST: usize = 1;

/// What to do with each piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::copy) enum Mode {
    Copy {
        /// The destination reads as zeroes where nothing was written.
        fresh: bool,
        /// Zeroes among the data are looked for.
        find_zeroes: bool,
    },
    Compare,
}
