//! Whether requests of a disk wait for its limits, for whoever tells people of it. Queues only leave a
//! mark.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// A mark is as good as new for so long: queues that wait look several times a second.
const FRESH_NS: u64 = 100_000_000;

/// So long after the last request that waited a disk is still at its limit.
const LATELY_NS: u64 = 1_000_000_000;

/// What the queues of a disk share of it.
#[derive(Debug, Default)]
pub(crate) struct AtLimit {
    /// When requests have waited last, in the disk's time; 0 if they never have.
    last_ns: AtomicU64,
    /// That was not taken yet.
    untold: AtomicBool,
}

impl AtLimit {
    /// Requests wait. True if that is to be reported, and was not asked for before.
    pub(crate) fn mark(&self, now_ns: u64) -> bool {
        // Others write it too: a line that is only read costs them nothing.
        let last = self.last_ns.load(Relaxed);
        if last == 0 || now_ns.saturating_sub(last) >= FRESH_NS {
            self.last_ns.store(now_ns.max(1), Relaxed);
        }
        !self.untold.load(Relaxed) && !self.untold.swap(true, SeqCst)
    }

    /// Requests have waited a short while ago.
    pub(crate) fn is_so(&self, now_ns: u64) -> bool {
        let last = self.last_ns.load(Relaxed);
        last > 0 && now_ns.saturating_sub(last) < LATELY_NS
    }

    pub(crate) fn is_untold(&self) -> bool {
        self.untold.load(SeqCst)
    }

    pub(crate) fn take(&self) -> bool {
        self.untold.swap(false, SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_to_be_told_once_until_somebody_has_taken_it() {
        let at_limit = AtLimit::default();
        assert!(!at_limit.is_so(0) && !at_limit.is_untold());
        assert_eq!((0..1000).filter(|&now| at_limit.mark(now)).count(), 1);
        assert!(at_limit.is_so(LATELY_NS / 2) && at_limit.is_untold() && at_limit.take());
        assert!(at_limit.is_so(LATELY_NS / 2) && !at_limit.is_untold() && !at_limit.take());
        // The first mark was at 1 ns; the others came too soon to be written down.
        assert!(at_limit.is_so(LATELY_NS) && !at_limit.is_so(LATELY_NS + 1));
        assert!(at_limit.mark(5 * LATELY_NS) && at_limit.is_so(5 * LATELY_NS + FRESH_NS));
    }
}
