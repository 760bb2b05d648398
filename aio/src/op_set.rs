//! All operations, and sets of them: what an engine offers.

use crate::operation::IoOp;

impl IoOp {
    /// All operations, for tables and tests.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteDurable,
        Self::Sync,
        Self::PunchHole,
        Self::ZeroRange,
        Self::Discard,
    ];
}

/// A set of [`IoOp`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSet(u16);

impl OpSet {
    /// Every operation.
    pub const ALL: Self = Self((1 << IoOp::ALL.len()) - 1);

    /// The set without `op`.
    #[must_use]
    pub const fn without(self, op: IoOp) -> Self {
        Self(self.0 & !(1 << op as u16))
    }

    /// True if `op` is in the set.
    #[must_use]
    pub const fn has(self, op: IoOp) -> bool {
        self.0 & (1 << op as u16) != 0
    }
}
