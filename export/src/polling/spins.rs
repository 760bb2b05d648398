//! Turns that found nothing: how many, and how long they took.

use std::time::{Duration, Instant};

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
        if self.timer.is_some() || self.count % TIMED_EVERY == 0 {
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
}
