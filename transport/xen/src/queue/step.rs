//! What is known of a barrier under way.

/// How far a barrier has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// All before it is to be answered, then made durable.
    First,
    /// Its data is written.
    Write,
    /// Its data is made durable.
    Last,
}

/// A barrier, with all before it taken from the ring and nothing behind it.
#[derive(Debug)]
pub(super) struct Barrier {
    pub(super) entry: u16,
    pub(super) step: Step,
    /// The step is with the worker.
    pub(super) under_way: bool,
}

impl Barrier {
    pub(super) fn new(entry: u16) -> Self {
        Self { entry, step: Step::First, under_way: false }
    }
}
