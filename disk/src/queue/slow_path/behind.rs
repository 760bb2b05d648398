//! Which requests of a queue wait for late writes, and when they look whether they have to.

use std::collections::VecDeque;

/// The requests of a queue that wait for late writes.
///
/// # Invariants
/// 1. `tags` are of slots in flight at `Stage::Late`, none of which has anything under way.
#[derive(Debug)]
pub(super) struct BehindLate {
    tags: VecDeque<u16>,
    /// The changes of the list that `to_look` is about.
    changes: u64,
    /// So many of them, from the first one on, have not looked at the list since.
    to_look: usize,
}

impl BehindLate {
    /// For a queue of `depth` slots. Allocates; call at start only.
    pub(super) fn new(depth: u16) -> Self {
        Self { tags: VecDeque::with_capacity(depth.into()), changes: 0, to_look: 0 }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    /// Any of them, which waits no more.
    pub(super) fn pop(&mut self) -> Option<u16> {
        self.to_look = self.to_look.saturating_sub(1);
        self.tags.pop_front()
    }

    pub(super) fn push(&mut self, tag: u16) {
        self.tags.push_back(tag);
    }

    /// How many, from the first one on, have to look at the list, which has changed so often.
    pub(super) fn due_since(&mut self, changes: u64) -> usize {
        if changes != self.changes {
            (self.changes, self.to_look) = (changes, self.tags.len());
        }
        self.to_look
    }

    /// True if some have not looked since the last change that was heard of.
    pub(super) fn has_to_look(&self) -> bool {
        self.to_look > 0
    }
}
