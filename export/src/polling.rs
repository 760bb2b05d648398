//! How long to look for work before sleeping.
//!
//! Nothing here looks at a clock or sleeps: the worker does, and tells. All times are nanoseconds by
//! one clock of its choice.

mod budget;
mod disk;
mod guest;
mod spins;

use budget::Budget;
use disk::{DiskWaits, Plan, SleepCost};
use guest::GuestSpin;
pub(crate) use spins::Spins;
use std::time::Duration;

/// Whether a worker spins before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Spins where it pays: for guests as long as spinning has been winning lately, for disks as long
    /// as their past waits promise.
    Adaptive {
        /// The longest spin, for a guest or for a disk.
        max: Duration,
        /// The most CPU time that spinning may cost beyond what sleeping would have, in percent of the
        /// time that passes. Waits so short that sleeping would have cost as much are free.
        budget: u8,
    },
    /// Never sleeps.
    Always,
    /// Sleeps at once.
    Never,
}

impl Polling {
    /// The longest spin, unless told otherwise: a little more than a sleep and its wake-up cost.
    pub const MAX: Duration = Duration::from_micros(50);
    /// The budget of [`Polling::Adaptive`], unless told otherwise, in percent.
    pub const BUDGET: u8 = 50;
}

impl Default for Polling {
    /// Adaptive, within [`Polling::MAX`] and [`Polling::BUDGET`].
    fn default() -> Self {
        Self::Adaptive { max: Self::MAX, budget: Self::BUDGET }
    }
}

/// What to do after a turn that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Look again at once.
    Spin,
    /// Sleep, for so many nanoseconds at most if it says so.
    Sleep(Option<u64>),
    /// Sleep for so many nanoseconds at most, and ask for no kicks: the guest will hardly ask for
    /// anything meanwhile, and asking for a kick costs it one.
    Nap(u64),
}

/// Where a wait is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The worker spins, or is about to sleep.
    Awake,
    /// It sleeps until a timer wakes it at this time.
    Napping(u64),
    /// It slept until this time, when something else than a timer of ours woke it.
    Woken(u64),
}

/// One wait for work.
#[derive(Clone, Copy, Debug)]
struct Wait {
    since: u64,
    /// The class of waits for a disk; `None` if the guest has nothing in flight.
    disk: Option<usize>,
    phase: Phase,
    /// When the present spin began, and when it is to end.
    spin: (u64, u64),
    /// The clock, when it was last looked at in that spin.
    seen: u64,
}

/// Decides how the worker waits, and learns from how that went.
#[derive(Debug)]
pub(crate) struct Idle {
    polling: Polling,
    max: u64,
    cost: SleepCost,
    budget: Budget,
    guest: GuestSpin,
    disk: DiskWaits,
    turns: u32,
    wait: Wait,
    spinning: bool,
    /// The end of the wait is worth a look at the clock.
    accounted: bool,
    /// Waits for the disk begin with a sleep, so that the sleep may submit what is queued.
    defers: bool,
    deferred: u32,
}

/// Rounds between readings of the clock.
const CLOCK_EVERY: u32 = 8;

/// Between two readings the worker looks at its rings a few times. If that took longer than this it was
/// not running: somebody else needed the CPU, in this system or in the one below it.
const INTERRUPTED_NS: u64 = 200_000;

/// A request that comes while nobody listens waits no longer than this, in nanoseconds.
const NAP_UNHEARD_NS: u64 = 200_000;

/// One of so many submissions is made by itself although the next wait will begin with a sleep, to see
/// whether the disk is done at once.
const DEFERRED_TRIED: u32 = 32;

impl Idle {
    pub(crate) fn new(polling: Polling) -> Self {
        let (max, budget) = match polling {
            Polling::Adaptive { max, budget } => (max, budget),
            Polling::Always | Polling::Never => (Duration::ZERO, 0),
        };
        let wait = Wait { since: 0, disk: None, phase: Phase::Awake, spin: (0, 0), seen: 0 };
        Self {
            polling,
            max: u64::try_from(max.as_nanos()).unwrap_or(u64::MAX),
            cost: SleepCost::GUESS,
            budget: Budget::new(budget),
            guest: GuestSpin::new(),
            disk: DiskWaits::new(),
            turns: 0,
            wait,
            spinning: false,
            accounted: false,
            defers: false,
            deferred: 0,
        }
    }

    /// True if the worker polls for ever, so that no queue needs its doorbell.
    #[inline]
    pub(crate) fn never_sleeps(&self) -> bool {
        self.polling == Polling::Always
    }

    /// True if it is of use to know what a sleep costs.
    pub(crate) fn adapts(&self) -> bool {
        self.max > 0
    }

    /// A sleep costs so much: from its end until the worker runs, and in CPU time.
    pub(crate) fn calibrate(&mut self, latency: u64, cpu: u64) {
        self.cost = SleepCost::new(latency, cpu);
    }

    /// True if what is queued may wait for the sleep that follows, one system call for both.
    #[inline]
    pub(crate) fn may_defer(&mut self) -> bool {
        self.defers && {
            self.deferred = self.deferred.wrapping_add(1);
            self.deferred % DEFERRED_TRIED != 0
        }
    }

    /// True if waits for the disk begin with a sleep.
    #[inline]
    pub(crate) fn defers(&self) -> bool {
        self.defers
    }

    /// The disk was done as soon as something was submitted.
    #[inline]
    pub(crate) fn disk_was_prompt(&mut self) {
        self.defers = false;
    }

    /// There was work, `completed` if some of it came from the disk.
    #[inline]
    pub(crate) fn reset(&mut self, completed: bool, clock: impl FnOnce() -> u64) {
        let spinning = std::mem::take(&mut self.spinning);
        if self.accounted {
            self.end(spinning, completed, clock());
        }
    }

    /// There was no work. `in_flight` is what the disk has to do, asked when the wait begins.
    #[inline]
    pub(crate) fn next(
        &mut self,
        clock: impl FnOnce() -> u64,
        in_flight: impl FnOnce() -> usize,
    ) -> Next {
        match self.polling {
            Polling::Always => Next::Spin,
            Polling::Never => {
                self.defers |= in_flight() > 0;
                Next::Sleep(None)
            }
            Polling::Adaptive { .. } => {
                self.turns = self.turns.wrapping_add(1);
                if !self.spinning {
                    self.begin(clock(), in_flight())
                } else if self.turns % CLOCK_EVERY == 0 {
                    self.go_on(clock())
                } else {
                    Next::Spin
                }
            }
        }
    }

    #[inline]
    fn begin(&mut self, now: u64, in_flight: usize) -> Next {
        self.wait =
            Wait { since: now, disk: None, phase: Phase::Awake, spin: (now, now), seen: now };
        self.accounted = false;
        if in_flight > 0 {
            return self.begin_for_disk(now, in_flight);
        }
        let wanted = self.guest.begin().min(self.budget.reduced(self.max));
        if wanted > 0 { self.spin(now, now + wanted) } else { Next::Sleep(None) }
    }

    #[cold]
    fn begin_for_disk(&mut self, now: u64, in_flight: usize) -> Next {
        let class = DiskWaits::class(in_flight);
        self.wait.disk = Some(class);
        self.accounted = true;
        let Plan { awake_from, spin_until } = self.disk.plan(class);
        let next = if awake_from == 0 {
            self.spin(now, now + spin_until)
        } else {
            let due = awake_from.saturating_sub(self.cost.latency);
            // A nap that no spin follows would be one more sleep.
            let spins = self.budget.room(now, spin_until.saturating_sub(awake_from)) > 0;
            if !spins {
                Next::Sleep(None)
            } else {
                self.wait.phase = Phase::Napping(now + due);
                let heard = due > NAP_UNHEARD_NS || !self.disk.is_left_alone(class);
                if heard { Next::Sleep(Some(due)) } else { Next::Nap(due) }
            }
        };
        self.defers = next != Next::Spin;
        next
    }

    /// Spins until `until`, as far as the budget goes.
    #[inline]
    fn spin(&mut self, now: u64, until: u64) -> Next {
        let room = self.budget.room(now, until.saturating_sub(now));
        self.spinning = room > 0;
        self.wait.spin = (now, now + room);
        self.wait.seen = now;
        if room > 0 { Next::Spin } else { Next::Sleep(None) }
    }

    fn go_on(&mut self, now: u64) -> Next {
        let spun = self.spun(now);
        if now < self.wait.spin.1 {
            // Those that were shorter than a sleep cost nothing.
            self.accounted |= spun > self.cost.cpu;
            return Next::Spin;
        }
        self.budget.spend(spun);
        self.spinning = false;
        Next::Sleep(None)
    }

    /// How long it has been spinning, and whether it was interrupted since it last looked at the clock.
    #[inline]
    fn spun(&mut self, now: u64) -> u64 {
        let before = std::mem::replace(&mut self.wait.seen, now);
        if now.saturating_sub(before) > INTERRUPTED_NS {
            self.budget.interrupted(now, now - before);
            return before - self.wait.spin.0;
        }
        now - self.wait.spin.0
    }

    /// Something ended the sleep. True if the guest seems to need the CPU that the worker is on.
    pub(crate) fn woke(&mut self, clock: impl FnOnce() -> u64) -> bool {
        if !self.adapts() {
            return false;
        }
        let now = clock();
        self.budget.recover(now);
        let wait = self.wait;
        match (wait.disk, wait.phase) {
            (None, _) => {
                let (begun, end) = wait.spin;
                let idle = (now - wait.since).saturating_sub(self.cost.latency);
                return self.guest.woke(idle, end > begun, self.budget.reduced(self.max));
            }
            (Some(class), Phase::Napping(due)) if now >= due => {
                self.cost.learn(now - due);
                let until = wait.since + self.disk.plan(class).spin_until;
                self.wait.phase = Phase::Awake;
                self.spin(now, until);
            }
            (Some(_), _) => self.wait.phase = Phase::Woken(now),
        }
        false
    }

    /// The end of a wait that is worth knowing about.
    #[cold]
    fn end(&mut self, spinning: bool, completed: bool, now: u64) {
        self.accounted = false;
        let Wait { since, disk, phase, .. } = self.wait;
        if let Some(class) = disk {
            self.disk.note_end(class, completed);
        }
        let mut took = now - since;
        match phase {
            Phase::Woken(at) => took = (at - since).saturating_sub(self.cost.latency),
            // It went to sleep, and did not: there was work already.
            Phase::Napping(_) => return,
            Phase::Awake if spinning => {
                let spun = self.spun(now);
                self.budget.spend(spun.saturating_sub(self.cost.cpu));
            }
            // It did not spin, or in vain, which has been paid for.
            Phase::Awake => {}
        }
        // A request of the guest ends it as well as the disk: sleeping costs as much in either case.
        if let Some(class) = disk {
            self.disk.record(class, took, self.cost, self.budget.reduced(self.max));
        }
    }
}

#[cfg(test)]
mod tests;
