//! How many disks of a group want more than they get: so many have to share.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Disks are counted anew in each window. Longer than the longest time between two looks of one that
/// waits ([`super::gate::RECHECK_NS`]).
const WINDOW_NS: u64 = 200_000_000;

/// The disks that have waited in this window, and in the one before it.
#[derive(Debug, Default)]
pub(crate) struct Waiting(AtomicU64);

/// When a disk was counted last.
#[derive(Debug)]
pub(crate) struct Seen(AtomicU32);

impl Default for Seen {
    fn default() -> Self {
        Self(AtomicU32::new(u32::MAX))
    }
}

/// The window's number: after 27 years it begins anew.
#[allow(clippy::cast_possible_truncation)]
fn window(now: u64) -> u32 {
    (now / WINDOW_NS) as u32
}

/// The counts of the window before and of this one.
fn counts(word: u64, window: u32) -> (u16, u16) {
    #[allow(clippy::cast_possible_truncation)]
    let (at, before, this) = ((word >> 32) as u32, (word >> 16) as u16, word as u16);
    match window.wrapping_sub(at) {
        0 => (before, this),
        1 => (this, 0),
        _ => (0, 0),
    }
}

impl Waiting {
    /// A disk waits.
    pub(crate) fn mark(&self, now: u64, seen: &Seen) {
        let window = window(now);
        if seen.0.load(Relaxed) == window || seen.0.swap(window, Relaxed) == window {
            return;
        }
        let _ = self.0.fetch_update(Relaxed, Relaxed, |word| {
            let (before, this) = counts(word, window);
            let this = this.saturating_add(1);
            Some(u64::from(window) << 32 | u64::from(before) << 16 | u64::from(this))
        });
    }

    /// How many share: at least one.
    pub(crate) fn sharers(&self, now: u64) -> u64 {
        let (before, this) = counts(self.0.load(Relaxed), window(now));
        before.max(this).max(1).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_counts_once_in_a_window_and_is_forgotten_after_the_next() {
        let (waiting, a, b) = (Waiting::default(), Seen::default(), Seen::default());
        let at = |window: u64| window * WINDOW_NS + 1;
        assert_eq!(waiting.sharers(at(0)), 1);
        (0..5).for_each(|_| waiting.mark(at(7), &a));
        assert_eq!(waiting.sharers(at(7)), 1);
        waiting.mark(at(7), &b);
        assert_eq!(waiting.sharers(at(7)), 2);
        assert_eq!(waiting.sharers(at(8)), 2);
        waiting.mark(at(8), &b);
        assert_eq!((waiting.sharers(at(8)), waiting.sharers(at(9))), (2, 1));
        assert_eq!(waiting.sharers(at(1000)), 1);
    }
}
