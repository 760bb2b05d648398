//! Waits on a clock of the test's own.

use super::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

/// A turn that finds nothing, from the end of a sleep until the worker runs, and CPU time of a sleep.
const TURN: u64 = 150;
const LATE: u64 = 20_000;
const CPU: u64 = 3_000;

/// A worker, and what waiting costs it.
struct Bed {
    idle: Idle,
    now: u64,
    /// CPU time beyond what sleeping would have cost.
    extra: u64,
    sleeps: u64,
    /// Those of them in which no kick would be heard.
    naps: u64,
    /// From the end of waits until that was noticed.
    late: u64,
    /// The guest gets on only while the worker sleeps.
    shares_cpu: bool,
    /// CPU time of a sleep.
    cpu: u64,
}

impl Bed {
    fn new(polling: Polling) -> Self {
        let mut idle = Idle::new(polling);
        idle.calibrate(LATE, CPU);
        Self {
            idle,
            now: SECOND,
            extra: 0,
            sleeps: 0,
            naps: 0,
            late: 0,
            shares_cpu: false,
            cpu: CPU,
        }
    }

    /// On a host where a sleep takes so much CPU time.
    fn with_sleeps_of(mut self, cpu: u64) -> Self {
        self.idle.calibrate(LATE, cpu);
        Self { cpu, ..self }
    }

    fn adaptive(max_us: u64, budget: u8) -> Self {
        Self::new(Polling::Adaptive { max: Duration::from_micros(max_us), budget })
    }

    /// A wait of `takes` nanoseconds for a disk that has so much to do, or for a guest.
    fn wait(&mut self, in_flight: usize, takes: u64) {
        self.wait_until(in_flight > 0, in_flight, takes);
    }

    /// The same; `completed` if the disk ends it, the guest if not.
    fn wait_until(&mut self, completed: bool, in_flight: usize, takes: u64) {
        let mut due = self.now + takes;
        let mut spun_from = None;
        while self.now < due {
            let now = self.now;
            let next = self.idle.next(|| now, || in_flight);
            self.naps += u64::from(matches!(next, Next::Nap(_)));
            match next {
                Next::Spin => {
                    spun_from.get_or_insert(now);
                    self.now += TURN;
                    due += if self.shares_cpu { TURN } else { 0 };
                }
                Next::Sleep(_) | Next::Nap(_) => {
                    let at_most = match next {
                        Next::Nap(ns) => Some(ns),
                        Next::Sleep(ns) => ns,
                        Next::Spin => None,
                    };
                    self.extra += spun_from.take().map_or(0, |from| now - from);
                    self.sleeps += 1;
                    self.now = due.min(at_most.map_or(due, |ns| now + ns)) + LATE;
                    self.idle.woke(|| self.now);
                }
            }
        }
        let spun = spun_from.map_or(0, |from| self.now - from);
        self.extra += spun.saturating_sub(self.cpu);
        self.late += self.now - due;
        self.idle.reset(completed, || self.now);
        // What was found has to be dealt with.
        self.now += 1_000;
    }

    /// So many waits of this kind; how late each was noticed on average, and after how many sleeps.
    fn waits(&mut self, number: u64, in_flight: usize, takes: impl Fn(u64) -> u64) -> (u64, f64) {
        (self.sleeps, self.late) = (0, 0);
        (0..number).for_each(|n| self.wait(in_flight, takes(n)));
        // Exact: they are few.
        #[allow(clippy::cast_precision_loss)]
        let sleeps = self.sleeps as f64 / number as f64;
        (self.late / number, sleeps)
    }

    fn assert_within_budget(&self, percent: u64, what: &str) {
        let (elapsed, extra) = (self.now - SECOND, self.extra);
        // What was saved up before, and the last spin, which ends a little late.
        let most = (elapsed + 20 * MS) * percent / 100 + CLOCK_EVERY as u64 * TURN + CPU;
        assert!(extra <= most, "{what}: {extra} ns of spinning in {elapsed}, {percent} %");
    }
}

fn noise(n: u64) -> u64 {
    (n ^ n >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33
}

#[test]
fn a_fast_disk_is_spun_for_without_a_sleep() {
    let mut bed = Bed::adaptive(50, 50);
    bed.waits(100, 1, |n| 8_000 + noise(n) % 1_000);
    let (late, sleeps) = bed.waits(1000, 1, |n| 8_000 + noise(n) % 1_000);
    assert!(late < 1_000 && sleeps < 0.05, "{late} ns late, {sleeps} sleeps");
    assert!(!bed.idle.may_defer(), "what is spun for is submitted before");
}

#[test]
fn a_slow_and_steady_disk_is_slept_for_and_noticed_in_time() {
    for least in [70_000, 300_000] {
        let mut bed = Bed::adaptive(50, 50);
        let takes = |n| least + noise(n) % (least / 20);
        bed.waits(200, 1, takes);
        let (late, sleeps) = bed.waits(1000, 1, takes);
        let measured = format!("{least}: {late} ns late, {sleeps} sleeps");
        assert!(late < LATE / 5 && (0.9..1.1).contains(&sleeps), "{measured}");
        // One in many is submitted alone, to see whether the disk is still slow.
        let deferred = (0..320).filter(|_| bed.idle.may_defer()).count();
        assert_eq!(deferred, 310);
    }
}

/// A kick that nobody asks for costs the guest nothing; but whoever asks while the disk is at work is
/// heard.
#[test]
fn a_guest_that_asks_for_one_thing_at_a_time_need_not_kick() {
    let mut bed = Bed::adaptive(50, 50);
    let takes = |n| 70_000 + noise(n) % 3_000;
    bed.waits(200, 1, takes);
    let naps = bed.naps;
    bed.waits(100, 1, takes);
    assert!(bed.naps > naps + 90, "{}", bed.naps - naps);
    // The disk is at work, and something else comes.
    let ask = |bed: &mut Bed| {
        let now = bed.now;
        bed.idle.next(|| now, || 1);
        bed.now += 20_000;
        bed.idle.woke(|| bed.now);
        bed.idle.reset(false, || bed.now);
    };
    ask(&mut bed);
    let naps = bed.naps;
    bed.waits(64, 1, takes);
    assert_eq!(bed.naps, naps, "it is heard for a while");
    bed.waits(64, 1, takes);
    assert!(bed.naps > naps + 50);
    // Long sleeps hear everything.
    let mut bed = Bed::adaptive(50, 50);
    bed.waits(500, 1, |n| 300_000 + noise(n) % 10_000);
    assert_eq!(bed.naps, 0);
}

#[test]
fn a_guest_that_asks_again_before_the_disk_is_done_is_awaited() {
    let mut bed = Bed::adaptive(50, 50);
    // It is called while the disk goes on, and asks for more soon after.
    let asks = |bed: &mut Bed| {
        bed.wait_until(false, 16, 15_000 + noise(bed.now) % 2_000);
        bed.now += 200_000;
    };
    (0..64).for_each(|_| asks(&mut bed));
    (bed.sleeps, bed.late) = (0, 0);
    (0..1000).for_each(|_| asks(&mut bed));
    assert!(bed.sleeps < 20 && bed.late < 1000 * 1_000, "{} sleeps, {}", bed.sleeps, bed.late);
    bed.assert_within_budget(50, "asks again");
}

#[test]
fn a_disk_of_which_nothing_is_known_is_slept_for() {
    let mut bed = Bed::adaptive(50, 100);
    let (late, sleeps) = bed.waits(1000, 1, |n| 20_000 + noise(n) % (5 * MS));
    assert!(sleeps == 1.0 && late == LATE, "{late} ns late, {sleeps} sleeps");
    assert_eq!(bed.extra, 0);
}

#[test]
fn the_limit_of_a_spin_holds_for_the_disk_too() {
    let takes = |n| 70_000 + noise(n) % 30_000;
    for (max, most) in [(0, 0), (5, 6_500), (40, 41_500)] {
        let mut bed = Bed::adaptive(max, 100);
        for n in 0..1000 {
            let before = bed.extra;
            bed.wait(1, takes(n));
            assert!(bed.extra - before <= most, "{} ns of {max} us", bed.extra - before);
        }
    }
}

#[test]
fn no_trace_makes_it_spin_more_than_its_budget() {
    type Trace = (&'static str, fn(u64) -> (usize, u64));
    let traces: [Trace; 7] = [
        ("steady", |_| (1, 60_000)),
        ("two kinds", |n| (1, if noise(n) % 4 == 0 { 4 * MS } else { 8_000 })),
        ("kinds that take turns", |n| (1, if n / 300 % 2 == 0 { 45_000 } else { 200_000 })),
        ("bursts", |n| (0, if n % 50 == 0 { 100 * MS } else { 12_000 })),
        ("noise", |n| (usize::try_from(n % 9).unwrap(), 500 + noise(n) % 100_000)),
        ("a guest just in time", |_| (0, 49_000)),
        ("a guest just too late", |_| (0, 51_000)),
    ];
    for (what, trace) in traces {
        for percent in [0, 1, 5, 20, 50, 100] {
            for shares_cpu in [false, true] {
                let mut bed = Bed::adaptive(50, percent);
                bed.shares_cpu = shares_cpu;
                for n in 0..5000 {
                    let (in_flight, takes) = trace(n);
                    bed.wait(in_flight, takes);
                }
                bed.assert_within_budget(percent.into(), what);
            }
        }
    }
}

/// It knows the plan, and answers right after it.
#[test]
fn a_disk_that_knows_the_plan_costs_the_budget_at_most() {
    for percent in [0, 5, 50] {
        let mut bed = Bed::adaptive(50, percent);
        for n in 0..20_000 {
            let Plan { awake_from, spin_until } = bed.idle.disk.plan(0);
            let before = noise(n) % 3 == 0 && awake_from > 1_000;
            bed.wait(1, if before { awake_from - 500 } else { spin_until.max(30_000) + 500 });
        }
        bed.assert_within_budget(percent.into(), "a hostile disk");
    }
}

#[test]
fn a_guest_that_asks_at_once_is_awaited_at_no_cost() {
    let mut bed = Bed::adaptive(50, 1);
    bed.waits(100, 0, |_| 1_000);
    let (late, sleeps) = bed.waits(1000, 0, |_| 1_000);
    assert!(late < 2 * TURN && sleeps == 0.0, "{late} ns late, {sleeps} sleeps");
    assert_eq!(bed.extra, 0, "sleeping would have cost more");
}

/// A virtual machine: to sleep and wake up takes 18 us of CPU time, and the client of a null disk asks
/// 22 us after it was answered. Taking a sleep for cheaper than it is would cost a fifth of the requests.
#[test]
fn sleeps_that_cost_much_leave_room_to_spin() {
    let mut bed = Bed::adaptive(50, 20).with_sleeps_of(18_000);
    bed.waits(100, 0, |_| 22_000);
    let (late, sleeps) = bed.waits(10_000, 0, |n| 21_000 + noise(n) % 2_000);
    assert!(sleeps < 0.001 && late < 2_000, "{sleeps} sleeps, {late} ns late");
    bed.assert_within_budget(20, "a client that sleeps");
    // Where a sleep is cheap the same client is slept for now and then.
    let mut bed = Bed::adaptive(50, 20).with_sleeps_of(3_000);
    bed.waits(100, 0, |_| 22_000);
    let (_, sleeps) = bed.waits(10_000, 0, |n| 21_000 + noise(n) % 2_000);
    assert!(sleeps > 0.5, "{sleeps} sleeps");
    bed.assert_within_budget(20, "a client that sleeps, cheaply");
}

/// Others want the CPU for a moment: what is left of the spin is half as long, and long enough. Were it
/// cut twice, or begun with what little there is of a budget, each spin would be in vain.
#[test]
fn a_spin_that_is_cut_once_still_finds_what_comes_in_time() {
    let mut bed = Bed::adaptive(50, 20).with_sleeps_of(18_000);
    bed.waits(1000, 0, |_| 18_000);
    bed.idle.budget.interrupted(bed.now, 10 * MS);
    assert_eq!(bed.idle.budget.reduced(50_000), 25_000);
    let (_, sleeps) = bed.waits(1000, 0, |_| 18_000);
    assert!(sleeps < 0.1, "{sleeps} sleeps");
    bed.assert_within_budget(20, "once interrupted");
}

#[test]
fn nobody_is_awaited_who_does_not_come() {
    let mut bed = Bed::adaptive(50, 100);
    bed.waits(1000, 0, |_| 10_000);
    let extra = bed.extra;
    let (_, sleeps) = bed.waits(100, 0, |_| SECOND);
    assert!(sleeps == 1.0 && bed.extra - extra < 110_000, "{sleeps}, {}", bed.extra - extra);
    let extra = bed.extra;
    bed.waits(100, 0, |_| SECOND);
    assert_eq!(bed.extra, extra);
}

/// The worker and its guest have one CPU, and no timer interrupts anybody.
#[test]
fn a_guest_on_the_same_cpu_gets_it() {
    let mut bed = Bed::adaptive(50, 100);
    bed.shares_cpu = true;
    bed.waits(10_000, 0, |_| 2_000);
    let (elapsed, extra) = (bed.now - SECOND, bed.extra);
    assert!(extra < elapsed / 25, "{extra} ns of spinning in {elapsed}");
}

/// Somebody else runs for three milliseconds while it spins.
#[test]
fn whoever_is_interrupted_spins_less_for_a_while() {
    let mut bed = Bed::adaptive(50, 100);
    bed.waits(1000, 0, |_| 20_000);
    assert!(bed.waits(100, 0, |_| 20_000).1 < 0.1, "it spins");
    // Nothing comes of one of them.
    for interruption in 0..24 {
        if interruption == 3 {
            assert!(bed.waits(100, 0, |_| 20_000).1 < 0.1, "it spins");
        }
        for _ in 0..CLOCK_EVERY {
            assert_eq!(bed.idle.next(|| bed.now, || 0), Next::Spin);
        }
        bed.now += 3 * MS;
        while bed.idle.next(|| bed.now, || 0) == Next::Spin {
            bed.now += TURN;
        }
        bed.idle.woke(|| bed.now);
        bed.idle.reset(false, || bed.now);
        bed.waits(10, 0, |_| 1_000);
    }
    assert!(bed.waits(100, 0, |_| 20_000).1 > 0.9, "its share is small now");
    // 100 ms later it gets half of it back, and so on.
    for _ in 0..8 {
        bed.wait(0, 110 * MS);
        bed.waits(20, 0, |_| 20_000);
    }
    assert!(bed.waits(1000, 0, |_| 20_000).1 < 0.1, "it spins again");
}

#[test]
fn the_other_ways_to_poll_ask_for_no_time() {
    let no_clock = || panic!("nobody asks");
    let mut always = Idle::new(Polling::Always);
    assert_eq!(always.next(no_clock, || 1), Next::Spin);
    always.reset(true, no_clock);
    assert!(always.never_sleeps() && !always.may_defer());
    let mut never = Idle::new(Polling::Never);
    assert_eq!(never.next(no_clock, || 1), Next::Sleep(None));
    never.woke(no_clock);
    never.reset(true, no_clock);
    assert!(never.may_defer(), "the sleep may submit");
    never.disk_was_prompt();
    assert!(!never.may_defer());
    assert_eq!(never.next(no_clock, || 0), Next::Sleep(None));
    assert!(!never.may_defer(), "there was no disk to wait for");
}
