//! Who is told of written memory: the dirty log of a migration.

use ringway_core::{Op, Request, Segment};

/// What a [`Watcher`] calls.
type Callback = dyn FnMut(&[Segment]) + Send;

/// Learns which memory was written for a request, after the write and before the answer.
pub struct Watcher(Box<Callback>);

impl Watcher {
    /// `written` gets the memory of each request that may have written to it. Called on the way of
    /// every request: it must not block.
    #[must_use]
    pub fn new(written: impl FnMut(&[Segment]) + Send + 'static) -> Self {
        Self(Box::new(written))
    }

    /// A request that failed may have written a part: all of its memory counts.
    #[cold]
    pub(crate) fn tell(&mut self, request: &Request) {
        if matches!(request.op, Op::Read | Op::GetId) {
            (self.0)(request.segments.as_slice());
        }
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}
