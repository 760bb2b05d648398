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
    spin: Duration,
    since: Option<Instant>,
    spins: u32,
}

/// The shortest spin worth its clock readings.
const SPIN_MIN: Duration = Duration::from_micros(4);

/// Rounds between readings of the clock.
const CLOCK_EVERY: u32 = 8;

impl Idle {
    pub(crate) fn new(polling: Polling) -> Self {
        Self { polling, spin: Duration::ZERO, since: None, spins: 0 }
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

    /// There was no work: true to look again at once, false to sleep.
    #[inline]
    pub(crate) fn keep_spinning(&mut self) -> bool {
        match self.polling {
            Polling::Always => true,
            Polling::Never => false,
            Polling::Adaptive { .. } => {
                self.spins = self.spins.wrapping_add(1);
                if self.since.is_some() && !self.spins.is_multiple_of(CLOCK_EVERY) {
                    return true;
                }
                let now = Instant::now();
                let since = *self.since.get_or_insert(now);
                now - since < self.spin
            }
        }
    }

    /// Something ended the sleep: would a longer spin have caught it?
    pub(crate) fn woke(&mut self) {
        let Polling::Adaptive { max } = self.polling else { return };
        let Some(since) = self.since.take() else { return };
        let idle = since.elapsed();
        self.spin = if idle <= max {
            (self.spin * 2).clamp(SPIN_MIN.min(max), max)
        } else if self.spin > SPIN_MIN {
            self.spin / 2
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
        assert!(!idle.keep_spinning(), "no spin before it has proved itself");
        for _ in 0..40 {
            idle.since = Some(Instant::now());
            idle.woke();
        }
        assert_eq!(idle.spin, max);
        idle.polling = Polling::Adaptive { max: Duration::ZERO };
        for _ in 0..64 {
            idle.since = Instant::now().checked_sub(Duration::from_millis(1));
            idle.woke();
        }
        assert_eq!(idle.spin, Duration::ZERO);
    }
}
