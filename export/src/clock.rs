//! Nanoseconds: of the clock by which limits count, which all have in common, and of a worker's own.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Nanoseconds since this was asked first.
pub(crate) fn now_ns() -> u64 {
    since(*BEGUN)
}

/// Nanoseconds since something began.
#[inline]
pub(crate) fn since(begun: Instant) -> u64 {
    nanos(begun.elapsed())
}

/// In nanoseconds.
#[inline]
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
