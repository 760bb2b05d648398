//! The clock by which limits count: workers and groups of disks have the same.

use std::sync::LazyLock;
use std::time::Instant;

static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Nanoseconds since this was asked first.
pub(crate) fn now_ns() -> u64 {
    u64::try_from(BEGUN.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
