//! How long to spin for a guest that has nothing in flight.

/// The shortest spin worth its clock readings, in nanoseconds.
pub(super) const SPIN_MIN_NS: u64 = 4_000;

/// So many spins that found nothing are judged together.
const LOST_JUDGED: u32 = 16;

/// Waits without a spin after spins that hardly ever found anything, at first and at most.
const HELD_OFF: (u32, u32) = (64, 4096);

/// Grows while a longer spin would have found the guest's next request, and shrinks while not. If spins
/// find nothing all the same, there are none for a while: the guest may need the CPU to ask.
#[derive(Debug)]
pub(super) struct GuestSpin {
    ns: u64,
    /// Waits that began with a spin, and those of them that found nothing, since the last judgement.
    begun: u32,
    lost: u32,
    /// Of these, those that ended soon after the spin.
    soon: u32,
    /// Waits still to pass without a spin, and how many it will be the next time.
    held_off: u32,
    hold_off: u32,
}

impl GuestSpin {
    pub(super) fn new() -> Self {
        Self { ns: 0, begun: 0, lost: 0, soon: 0, held_off: 0, hold_off: HELD_OFF.0 }
    }

    /// A wait begins: how long to spin in it.
    #[inline]
    pub(super) fn begin(&mut self) -> u64 {
        if self.held_off > 0 {
            self.held_off -= 1;
            return 0;
        }
        self.begun = self.begun.wrapping_add(u32::from(self.ns > 0));
        self.ns
    }

    /// A sleep ended a wait of `idle` nanoseconds, after a spin if it `spun`; spins are no longer than
    /// `max`. True if spins have just been given up: the guest asks soon, but hardly ever while the worker
    /// spins, as if it needed the same CPU.
    pub(super) fn woke(&mut self, idle: u64, spun: bool, max: u64) -> bool {
        if self.held_off > 0 {
            return false;
        }
        self.ns = if idle <= max {
            (self.ns * 2).clamp(SPIN_MIN_NS.min(max), max)
        } else if self.ns > SPIN_MIN_NS {
            self.ns / 2
        } else {
            0
        };
        self.lost += u32::from(spun);
        self.soon += u32::from(spun && idle <= max);
        self.lost == LOST_JUDGED && self.judge()
    }

    #[cold]
    fn judge(&mut self) -> bool {
        // Less than one in five found something.
        let found_nothing = self.begun < self.lost + self.lost / 4;
        let asked_soon = self.soon > self.lost / 2;
        if found_nothing {
            self.held_off = self.hold_off;
            self.hold_off = (self.hold_off * 2).min(HELD_OFF.1);
            self.ns = 0;
        } else {
            self.hold_off = HELD_OFF.0;
        }
        (self.begun, self.lost, self.soon) = (0, 0, 0);
        found_nothing && asked_soon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50_000;

    #[test]
    fn the_spin_grows_while_it_would_win_and_shrinks_to_nothing() {
        let mut spin = GuestSpin::new();
        assert_eq!(spin.begin(), 0, "no spin before it has proved itself");
        for _ in 0..8 {
            spin.begin();
            spin.woke(MAX, false, MAX);
        }
        assert_eq!(spin.begin(), MAX);
        for _ in 0..8 {
            spin.woke(MAX + 1, false, MAX);
        }
        assert_eq!(spin.begin(), 0);
        spin.woke(0, false, 0);
        assert_eq!(spin.begin(), 0, "a limit of nothing");
    }

    /// A guest that seldom asks needs no CPU of the worker's, though spinning for it is given up.
    #[test]
    fn a_guest_that_seldom_asks_does_not_seem_to_need_the_cpu() {
        let mut spin = GuestSpin::new();
        for turn in 0..20_000 {
            let long = spin.begin();
            let idle = if turn % 64 == 0 { 10_000 } else { 1_000_000 };
            assert!(!spin.woke(idle, long > 0, MAX), "{turn}");
        }
    }

    /// The guest asks as soon as the worker sleeps, because both have one CPU.
    #[test]
    fn spins_that_never_win_are_given_up_for_longer_and_longer() {
        let mut spin = GuestSpin::new();
        let (mut spun, mut given_up, waits) = (0, 0, 20_000);
        for _ in 0..waits {
            let long = spin.begin();
            spun += u32::from(long > 0);
            given_up += u32::from(spin.woke(long + 3_000, long > 0, MAX));
        }
        // After 64, 128, … and 4096 waits, and after that many each time.
        assert!((7..12).contains(&given_up), "{given_up}");
        assert!(spun > 0 && spun < waits / 50, "{spun} of {waits} waits began with a spin");
        // It has a CPU of its own again: after some waits, spins win, and stay.
        let mut won = 0;
        for _ in 0..10_000 {
            match spin.begin() {
                10_000.. => won += 1,
                long => assert!(!spin.woke(10_000, long > 0, MAX)),
            }
        }
        assert!(won > 5_000, "{won}");
    }
}
