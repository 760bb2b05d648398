//! What a panic costs: the piece of work it happened in, where others are well without it.

use ringway_core::thread::panic_message;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Carries out a piece of work of `who`; `None` if it panicked, which is logged. What the work has
/// changed must be whole at any time, or be given up by the caller.
pub(super) fn survive<T>(who: &str, work: impl FnOnce() -> T) -> Option<T> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.inspect_err(|panic| tracing::error!("{who} panicked: {}", panic_message(&**panic))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_panics_comes_to_nothing() {
        assert_eq!(survive("this test", || 7), Some(7));
        assert_eq!(survive("this test", || -> u8 { panic!("as wanted") }), None);
    }
}
