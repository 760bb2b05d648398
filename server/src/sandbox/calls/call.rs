//! One system call of a list.

/// A system call and what it may be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Call {
    pub(in super::super) number: i64,
    pub(in super::super) name: &'static str,
    pub(in super::super) rule: Rule,
}

/// When a call is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Rule {
    Always,
    /// An argument, of 32 bits, is one of these.
    OneOf(u8, Vec<u32>),
    /// These bits of an argument are set and these are not.
    Bits {
        argument: u8,
        set: u64,
        clear: u64,
    },
    /// The first argument is the first value, the third one of the others.
    Both(u32, Vec<u32>),
    /// This argument, or what is in its lower half, is 0. All else is answered with ENOSYS.
    Zero(u8),
    /// Answered with ENOSYS: the C library asks, and does well without.
    Refused,
}

impl Call {
    pub(in super::super) fn is_allowed(&self) -> bool {
        self.rule != Rule::Refused
    }
}
