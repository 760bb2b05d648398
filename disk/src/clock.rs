//! The clock of a disk.

use rustix::time::{ClockId, clock_gettime};
#[cfg(feature = "manual-clock")]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Nanoseconds since the host was started, which every process counts alike. With the feature `manual-clock` a test can
/// stop it.
#[derive(Debug)]
pub(crate) struct Clock {
    /// The time a test has set; `u64::MAX` if none has.
    #[cfg(feature = "manual-clock")]
    set: AtomicU64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            #[cfg(feature = "manual-clock")]
            set: AtomicU64::new(u64::MAX),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        #[cfg(feature = "manual-clock")]
        if self.set.load(Relaxed) != u64::MAX {
            return self.set.load(Relaxed);
        }
        let now = clock_gettime(ClockId::Boottime);
        // Neither is negative.
        (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
    }

    #[cfg(feature = "manual-clock")]
    pub(crate) fn set(&self, ns: u64) {
        self.set.store(ns, Relaxed);
    }
}
