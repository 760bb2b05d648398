//! What waiting awake may cost, and what it costs others.

/// The most that is saved up, in nanoseconds of time that has passed: a pause is no leave to spin for
/// long afterwards.
const SAVED_NS: u64 = 20_000_000;

/// A worker that was not interrupted for so long gets half of what it lost back, in nanoseconds.
const RECOVERY_NS: u64 = 100_000_000;

/// Interruptions within that time that mean that others need the CPU, in nanoseconds: a tenth of it.
const LOST_NS: u64 = RECOVERY_NS / 10;
/// So often halved, nothing worth mentioning is left.
const HALVINGS_MAX: u32 = 6;

/// CPU time for waiting awake, beyond what sleeping would have cost. It comes with the time that
/// passes, so that in the long run no more than a share of a CPU is spent; a debt is paid first.
#[derive(Debug)]
pub(super) struct Budget {
    percent: u64,
    /// In nanoseconds; below 0 it is a debt.
    left: i64,
    /// Until when time has been turned into budget.
    counted: u64,
    /// For how long others have interrupted spins, and since when that is counted.
    lost: u64,
    lost_since: u64,
    /// The CPU is wanted by others: the share is halved so often.
    halvings: u32,
    /// When that was changed.
    halved: u64,
}

impl Budget {
    pub(super) fn new(percent: u8) -> Self {
        let (lost, lost_since, left, counted, halvings, halved) = Default::default();
        let percent = percent.min(100).into();
        Self { percent, left, counted, lost, lost_since, halvings, halved }
    }

    /// How long the worker may spin from `now` on, if `wanted` is how long it would like to: all of it,
    /// or as much as can ever be saved up, or not at all. Part of a spin would find nothing and use up
    /// what is there, so that there would never be enough for a whole one, which may be free.
    #[inline]
    pub(super) fn room(&mut self, now: u64, wanted: u64) -> u64 {
        if self.left >= wanted as i64 && self.halvings == 0 {
            wanted
        } else {
            self.room_counted(now, wanted)
        }
    }

    #[cold]
    fn room_counted(&mut self, now: u64, wanted: u64) -> u64 {
        let passed = now.saturating_sub(self.counted).min(SAVED_NS);
        self.counted = now;
        let share = |ns: u64| (ns * self.percent / 100) >> self.halvings;
        let most = share(SAVED_NS);
        self.left = (self.left + share(passed) as i64).min(most as i64);
        self.recover(now);
        let wanted = wanted.min(most);
        if self.left >= wanted as i64 { wanted } else { 0 }
    }

    /// Gives back what was taken by [`Budget::halve`], in time.
    #[inline]
    pub(super) fn recover(&mut self, now: u64) {
        if self.halvings > 0 && now.saturating_sub(self.halved) > RECOVERY_NS {
            self.halvings -= 1;
            self.halved = now;
        }
    }

    /// So many nanoseconds were spent.
    pub(super) fn spend(&mut self, ns: u64) {
        self.left = self.left.saturating_sub_unsigned(ns);
    }

    /// While it spun the worker was interrupted for others, for so many nanoseconds: if that happens
    /// all the time, they get their CPU. Something short now and then says nothing.
    #[cold]
    pub(super) fn interrupted(&mut self, now: u64, ns: u64) {
        if now.saturating_sub(self.lost_since) > RECOVERY_NS {
            (self.lost, self.lost_since) = (0, now);
        }
        self.lost += ns;
        if self.lost >= LOST_NS {
            self.lost = 0;
            self.halve(now);
        }
    }

    fn halve(&mut self, now: u64) {
        self.halvings = (self.halvings + 1).min(HALVINGS_MAX);
        self.halved = now;
        self.left = self.left.min(0);
        self.counted = now;
    }

    /// What is left of `ns` while others want the CPU.
    #[inline]
    pub(super) fn reduced(&self, ns: u64) -> u64 {
        ns >> self.halvings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_share_of_the_time_that_has_passed_may_be_spent() {
        let mut budget = Budget::new(20);
        assert_eq!(budget.room(0, 50_000), 0, "nothing at first");
        assert_eq!(budget.room(MS, MS), 0, "not enough, and part of it is of no use");
        assert_eq!(budget.room(MS, MS / 5), MS / 5);
        budget.spend(MS / 5);
        assert_eq!(budget.room(MS, 50_000), 0);
        // More was spent than there was.
        budget.spend(MS);
        assert_eq!((budget.room(5 * MS, 1), budget.room(6 * MS + 1000, 200)), (0, 200));
        // A long pause is worth as much as a short one.
        assert_eq!(budget.room(1000 * MS, 100 * MS), 20 * MS / 5);
        let mut none = Budget::new(0);
        assert_eq!(none.room(1000 * MS, 50_000), 0);
    }

    #[test]
    fn a_cpu_that_others_want_is_left_to_them_for_a_while() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.room(MS, 50_000), 50_000);
        for halvings in 1..10 {
            budget.halve(MS);
            assert_eq!(budget.reduced(64_000), 64_000 >> halvings.min(6));
        }
        assert_eq!(budget.room(MS, 50_000), 0, "what was saved is gone, too");
        assert_eq!(budget.room(2 * MS, 50_000), 0);
        assert_eq!(budget.room(2 * MS, MS >> 6), MS >> 6);
        budget.spend(MS >> 6);
        // A budget so small that it never affords more is spent on what it does afford.
        let mut small = Budget::new(1);
        assert_eq!(small.room(1000 * MS, 50 * MS), SAVED_NS / 100);
        let mut now = 2 * MS;
        for left in (0..6).rev() {
            now += RECOVERY_NS + 1;
            budget.room(now, 1);
            assert_eq!(budget.reduced(64_000), 64_000 >> left);
        }
    }
    #[test]
    fn whoever_is_interrupted_for_a_moment_goes_on() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.room(MS, 50_000), 50_000);
        // One time in twenty, for ten seconds.
        let mut now = MS;
        for _ in 0..500 {
            now += 20 * MS;
            budget.interrupted(now, MS);
            assert_eq!((budget.reduced(64_000), budget.room(now, 50_000)), (64_000, 50_000));
        }
        // Half of the time.
        for _ in 0..100 {
            now += 6 * MS;
            budget.interrupted(now, 3 * MS);
        }
        assert_eq!(budget.reduced(64_000), 1_000);
    }
}
