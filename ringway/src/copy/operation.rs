//! What a flow asks of its ends.

/// Names an operation: a slot of the flow, and a part of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) slot: u32,
    pub(super) part: u32,
}

impl Ticket {
    /// The flush that goes with a checkpoint.
    pub(super) const SYNC: Self = Self { slot: u32::MAX >> 1, part: 0 };

    /// As an engine's tag; its top bit is clear.
    pub(super) fn tag(self) -> u64 {
        u64::from(self.slot) << 32 | u64::from(self.part)
    }

    pub(super) fn of_tag(tag: u64) -> Self {
        // Both halves were u32.
        #[allow(clippy::cast_possible_truncation)]
        Self { slot: (tag >> 32) as u32, part: tag as u32 }
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Read,
    Write,
    /// The range reads as zeroes afterwards, and takes no space where that can be had.
    Zero,
}

/// One operation: `len` bytes from `offset`; for transfers the memory from `at` within the slot's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub(super) ticket: Ticket,
    pub(super) verb: Verb,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) at: usize,
}
