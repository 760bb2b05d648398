//! How long to look for work before sleeping.

use std::time::{Duration, Instant};

/// Whether a worker spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Spins as long as spinning has been winning lately, at most this long.
    Adaptive {
        /// The longest spin.
        max: Duration,
    },
    /// Never sleeps.
    Always,
    /// Sleeps at once.
    Never,
}

impl Default for Polling {
    /// Adaptive, up to 50 µs: a little more than a sleep and its wake-up cost.
    fn default() -> Self {
        Self::Adaptive { max: Duration::from_micros(50) }
    }
}

/// Measures idle times and adapts the spin to them.
#[derive(Debug)]
pub(crate) struct Idle {
    polling: Polling,
    /// How long to spin for a guest, and for a disk.
    spin: [Duration; 2],
    /// When the last work was done, and whether the disk had any left then.
    since: Option<(Instant, bool)>,
    spins: u32,
}

/// The longest spin while the disk is at work. It rings when it is done, so that spinning saves no
/// more than the wake-up; a disk that takes longer than two of those is slept for.
const DISK_SPIN_MAX: Duration = Duration::from_micros(8);

/// The shortest spin worth its clock readings.
const SPIN_MIN: Duration = Duration::from_micros(4);

/// Rounds between readings of the clock.
const CLOCK_EVERY: u32 = 8;

impl Idle {
    pub(crate) fn new(polling: Polling) -> Self {
        Self { polling, spin: [Duration::ZERO; 2], since: None, spins: 0 }
    }

    /// True if the worker polls for ever, so that no queue needs its doorbell.
    #[inline]
    pub(crate) fn never_sleeps(&self) -> bool {
        self.polling == Polling::Always
    }

    /// There was work.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.since = None;
    }

    /// There was no work: true to look again at once, false to sleep. `disk_at_work` is asked when the
    /// idle time begins.
    #[inline]
    pub(crate) fn keep_spinning(&mut self, disk_at_work: impl FnOnce() -> bool) -> bool {
        match self.polling {
            Polling::Always => true,
            Polling::Never => false,
            Polling::Adaptive { .. } => {
                self.spins = self.spins.wrapping_add(1);
                if self.since.is_some() && !self.spins.is_multiple_of(CLOCK_EVERY) {
                    return true;
                }
                let now = Instant::now();
                let (since, disk) = *self.since.get_or_insert_with(|| (now, disk_at_work()));
                now - since < self.spin[usize::from(disk)]
            }
        }
    }

    /// Something ended the sleep: would a longer spin have caught it?
    pub(crate) fn woke(&mut self) {
        let Polling::Adaptive { max } = self.polling else { return };
        let Some((since, disk)) = self.since.take() else { return };
        let max = if disk { max.min(DISK_SPIN_MAX) } else { max };
        let (idle, spin) = (since.elapsed(), &mut self.spin[usize::from(disk)]);
        *spin = if idle <= max {
            (*spin * 2).clamp(SPIN_MIN.min(max), max)
        } else if *spin > SPIN_MIN {
            *spin / 2
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spin_grows_while_it_would_win_and_shrinks_to_nothing() {
        let max = Duration::from_secs(3600);
        let mut idle = Idle::new(Polling::Adaptive { max });
        assert!(!idle.keep_spinning(|| false), "no spin before it has proved itself");
        for _ in 0..40 {
            idle.since = Some((Instant::now(), false));
            idle.woke();
        }
        assert_eq!(idle.spin, [max, Duration::ZERO], "each kind of waiting for itself");
        idle.polling = Polling::Adaptive { max: Duration::ZERO };
        for _ in 0..64 {
            idle.since = Instant::now().checked_sub(Duration::from_millis(1)).map(|t| (t, false));
            idle.woke();
        }
        assert_eq!(idle.spin, [Duration::ZERO; 2]);
    }

    #[test]
    fn a_slow_disk_is_slept_for_and_a_fast_one_spun_for() {
        let mut idle = Idle::new(Polling::default());
        for _ in 0..8 {
            idle.since = Instant::now().checked_sub(2 * DISK_SPIN_MAX).map(|t| (t, true));
            idle.woke();
        }
        assert_eq!(idle.spin[1], Duration::ZERO);
        // Whatever the clock does in between, that is less than an hour.
        idle.polling = Polling::Adaptive { max: Duration::from_secs(3600) };
        for _ in 0..1000 {
            idle.since = Some((Instant::now(), true));
            idle.woke();
        }
        assert!(idle.spin[1] <= DISK_SPIN_MAX);
    }
}
