//! That syncs have failed, for all who have to know.

use std::sync::atomic::AtomicBool;

/// What is known of syncs that have failed.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    /// One has, of the image's thread or of a queue.
    pub(crate) failed: AtomicBool,
    /// Whoever serves the image next knows it, whatever its header says.
    pub(crate) kept: AtomicBool,
}
