//! The clock of a disk.

#[cfg(feature = "manual-clock")]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Nanoseconds since a disk was opened. With the feature `manual-clock` a test can stop it.
#[derive(Debug)]
pub(crate) struct Clock {
    begun: Instant,
    /// The time a test has set; `u64::MAX` if none has.
    #[cfg(feature = "manual-clock")]
    set: AtomicU64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            begun: Instant::now(),
            #[cfg(feature = "manual-clock")]
            set: AtomicU64::new(u64::MAX),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        #[cfg(feature = "manual-clock")]
        if self.set.load(Relaxed) != u64::MAX {
            return self.set.load(Relaxed);
        }
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    #[cfg(feature = "manual-clock")]
    pub(crate) fn set(&self, ns: u64) {
        self.set.store(ns, Relaxed);
    }
}
