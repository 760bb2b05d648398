//! How fast an image is copied: how much at a time, and when the next part is due.

use crate::ask::Pulled;
use ringway_core::host::Instant;
use std::time::Duration;

/// So much is copied at a time. A first write of a guest waits for it at most.
const PORTION: u64 = 2 << 20;

/// With a limit, a portion is what may be copied in a part of a second.
const PORTIONS_A_SECOND: u64 = 8;

/// How fast a copy may be, and how far it is.
#[derive(Debug)]
pub struct CopyRate {
    bps: Option<u64>,
    begun: Instant,
    due: Instant,
    /// So many bytes of the disk are done with.
    pub done: u64,
    /// So many were copied.
    pub copied: u64,
}

impl CopyRate {
    /// For at most `bps` bytes in a second.
    #[must_use]
    pub fn new(bps: Option<u64>) -> Self {
        let now = Instant::now();
        Self { bps, begun: now, due: now, done: 0, copied: 0 }
    }

    /// When the next portion is due.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Copies the next portion: from where on, and how many bytes.
    ///
    /// # Errors
    /// As `copy`.
    pub fn next<E>(&mut self, copy: impl FnOnce(u64, u64) -> Result<Pulled, E>) -> Result<(), E> {
        let portion = |bps: u64| (bps / PORTIONS_A_SECOND).clamp(1, PORTION);
        self.begun = Instant::now();
        let pulled = copy(self.done, self.bps.map_or(PORTION, portion))?;
        self.passed(pulled);
        Ok(())
    }

    fn passed(&mut self, pulled: Pulled) {
        self.done = pulled.next;
        self.copied += pulled.copied;
        if let Some(bps) = self.bps {
            let nanos = u128::from(pulled.read) * 1_000_000_000 / u128::from(bps.max(1));
            let took = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            // What was not copied meanwhile is not made up for.
            self.due = self.due.max(self.begun) + took;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_kept_and_nothing_is_made_up_for() {
        let mut rate = CopyRate::new(Some(8 << 20));
        let begun = rate.due();
        for nth in 1..=4u64 {
            let copy = |at, most| {
                assert_eq!((at, most), ((nth - 1) << 20, 1 << 20));
                Ok::<_, ()>(Pulled { next: nth << 20, read: 1 << 20, copied: 1 << 19 })
            };
            rate.next(copy).unwrap();
            assert!(rate.due() >= begun + Duration::from_millis(125) * u32::try_from(nth).unwrap());
        }
        assert_eq!((rate.done, rate.copied), (4 << 20, 2 << 20));
        // What comes late does not come faster afterwards.
        rate.due = begun;
        rate.begun = begun + Duration::from_secs(10);
        rate.passed(Pulled { next: 5 << 20, read: 1 << 20, copied: 0 });
        assert_eq!(rate.due(), begun + Duration::from_millis(10_125));
        // Zeroes cost nothing, and without a limit nothing is waited for.
        rate.passed(Pulled { next: 6 << 20, read: 0, copied: 0 });
        assert_eq!(rate.due(), begun + Duration::from_millis(10_125));
        let mut rate = CopyRate::new(None);
        let begun = rate.due();
        rate.next(|_, most| Ok::<_, ()>(Pulled { next: most, read: most, copied: most })).unwrap();
        assert_eq!((rate.due(), rate.done), (begun, PORTION));
    }
}
