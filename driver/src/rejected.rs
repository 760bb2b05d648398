//! A request that goes back to its caller.

use crate::completion::Data;
use crate::error::Refusal;

/// A request that was not queued, with all that belongs to it.
pub struct Rejected<C> {
    /// Why.
    pub why: Refusal,
    /// The caller's context.
    pub ctx: C,
    /// The caller's buffers.
    pub data: Data,
}

/// A request that was not queued.
#[cold]
pub(crate) fn reject<C>(why: Refusal, ctx: C, data: Data) -> Result<(), Rejected<C>> {
    Err(Rejected { why, ctx, data })
}

impl<C> std::fmt::Debug for Rejected<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rejected").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<C> std::fmt::Display for Rejected<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.why.fmt(f)
    }
}

impl<C> std::error::Error for Rejected<C> {}
