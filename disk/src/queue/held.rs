//! The requests of a queue that are held because the disk has failed them.

use crate::holding::is_no_space;
use std::collections::VecDeque;
use std::time::Duration;

/// How often requests for which there was no space are tried again by themselves. Only the oldest one
/// of a queue is, and the others follow if it succeeds: a full file system takes long to say no.
pub(crate) const RETRY_EVERY: Duration = Duration::from_secs(3);

/// What is known of a request that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldSlot {
    /// When it failed first, in the disk's time.
    pub(crate) since_ns: u64,
    /// The latest error; 0 if the host told none.
    pub(crate) errno: i32,
    /// It is being tried again.
    pub(crate) tried: bool,
}

impl HeldSlot {
    /// It is tried again by itself.
    pub(crate) fn by_itself(&self) -> bool {
        is_no_space(self.errno)
    }
}

/// The requests of a queue that wait to be tried again.
///
/// # Invariants
/// 1. `parked` holds tags of slots in flight that have no operation with the engine, and neither
///    pages nor a lock: nothing but time and commands moves them. Oldest first.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) parked: VecDeque<u16>,
    /// When to look at them again, in the disk's time; `u64::MAX` if only a command moves them.
    pub(crate) due_ns: u64,
    /// When the oldest one is tried again by itself.
    pub(crate) retry_ns: u64,
    /// Nothing is held any more: what fails is reported.
    pub(crate) closed: bool,
}

impl Held {
    /// For a queue of `depth` slots. Allocates; call at start only.
    pub(crate) fn new(depth: u16) -> Self {
        let parked = VecDeque::with_capacity(depth.into());
        Self { parked, due_ns: u64::MAX, retry_ns: u64::MAX, closed: false }
    }
}
