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

/// Spins from one that is timed to the next.
const TIMED_EVERY: u64 = 128;

/// A spin takes some hundred nanoseconds; one that took longer than this was preempted.
const TIMED_MAX: Duration = Duration::from_micros(50);

/// Rounds that found nothing: how many, and how long they took, by timing few of them. Rounds that
/// find work never look at a clock for it.
#[derive(Debug, Default)]
pub(crate) struct Spins {
    count: u64,
    timed: u64,
    timed_took: Duration,
    /// When the one that is being timed began, and at which turn.
    timer: Option<(Instant, u64)>,
}

impl Spins {
    /// Turn number `turn` found nothing, and the next one follows at once.
    #[inline]
    pub(crate) fn spun(&mut self, turn: u64) {
        self.count += 1;
        if self.timer.is_some() || self.count.is_multiple_of(TIMED_EVERY) {
            self.time(turn);
        }
    }

    /// Times from the end of one turn to that of the next, if that found nothing either.
    #[cold]
    fn time(&mut self, turn: u64) {
        let Some((since, before)) = self.timer.take() else {
            self.timer = Some((Instant::now(), turn));
            return;
        };
        let took = since.elapsed();
        if turn == before.wrapping_add(1) && took < TIMED_MAX {
            self.timed += 1;
            self.timed_took += took;
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// How long all of them took, going by those that were timed.
    pub(crate) fn took(&self) -> Duration {
        let nanos =
            self.timed_took.as_nanos() * u128::from(self.count) / u128::from(self.timed.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_spins_is_told_from_few_of_them() {
        let mut spins = Spins::default();
        // No two of these follow one another: work came in between, whose time is not theirs.
        for turn in 0..10 * TIMED_EVERY {
            spins.spun(2 * turn);
        }
        assert_eq!((spins.count(), spins.timed, spins.took()), (1280, 0, Duration::ZERO));
        for turn in 0..100 * TIMED_EVERY {
            spins.spun(turn);
        }
        // One in 128; any may have been preempted.
        assert!((50..=100).contains(&spins.timed), "{}", spins.timed);
        let each = spins.timed_took / u32::try_from(spins.timed).unwrap();
        let all = each * u32::try_from(spins.count()).unwrap();
        assert!(spins.took() >= all && spins.took() < all + Duration::from_micros(20));
    }

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
