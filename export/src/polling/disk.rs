//! How long a disk lets a worker wait, and what to do meanwhile.

/// What a sleep costs on this host, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SleepCost {
    /// From what ends it until the worker runs.
    pub(super) latency: u64,
    /// CPU time of going to sleep and waking up.
    pub(super) cpu: u64,
}

impl SleepCost {
    /// Until it has been measured.
    pub(super) const GUESS: Self = Self { latency: 10_000, cpu: 3_000 };

    /// What was measured, within reason: the host may have been busy with something else. On a virtual
    /// machine a sleep may take 20 us of CPU time, as the processor is given up and asked for again.
    pub(super) fn new(latency: u64, cpu: u64) -> Self {
        Self { latency: latency.clamp(1_000, 100_000), cpu: cpu.clamp(500, 50_000) }
    }

    /// A timer was due, and so much later the worker ran.
    pub(super) fn learn(&mut self, late: u64) {
        let late = late.min(4 * self.latency);
        *self = Self::new((15 * self.latency + late) / 16, self.cpu);
    }
}

/// What to do in a wait, in nanoseconds from its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Sleep, and be awake at this time; 0 to be awake from the beginning.
    pub(super) awake_from: u64,
    /// Spin until then, and sleep after it; 0 to sleep without a spin.
    pub(super) spin_until: u64,
}

/// Buckets of waits: eight for each power of two, beginning with 2^9 ns and ending with 2^24.
const BUCKETS: usize = 8 * 15;
const FIRST_LOG: u32 = 9;

/// Waits from one plan to the next, and how many it is made from: twice as many at most, older ones
/// count half.
const PLAN_EVERY: u32 = 32;
const REMEMBERED: u32 = 256;

/// The shortest sleep before a spin, in nanoseconds.
const NAP_MIN_NS: u64 = 10_000;

/// A microsecond by which a request is done sooner is worth so many of the CPU's.
const LATENCY_WORTH: u64 = 2;

/// A guest that asked for nothing in so many waits is expected to ask for nothing in the next.
const LEFT_ALONE: u32 = 64;

/// Numbers of requests in flight that are told apart: 1, 2 and 3, 4 to 7, ...
const CLASSES: usize = 6;

/// Waits for a disk with about the same number of requests in flight.
#[derive(Clone, Debug)]
struct Class {
    counts: [u16; BUCKETS],
    total: u32,
    until_plan: u32,
    plan: Plan,
    /// So many more waits must end without a request of the guest, before none is expected.
    to_prove: u32,
}

/// All waits for disks, by how many requests are in flight.
#[derive(Debug)]
pub(super) struct DiskWaits {
    classes: [Class; CLASSES],
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1 << FIRST_LOG);
    let log = ns.ilog2();
    // Three bits behind the highest one.
    let place = u64::from(log - FIRST_LOG) << 3 | (ns >> (log - 3) & 7);
    usize::try_from(place).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The shortest wait of a bucket.
fn begin_of(bucket: usize) -> u64 {
    let (log, part) = (bucket / 8, (bucket % 8) as u64);
    (8 + part) << (FIRST_LOG as usize + log - 3)
}

fn middle_of(bucket: usize) -> u64 {
    u64::midpoint(begin_of(bucket), begin_of(bucket + 1))
}

impl Class {
    const NEW: Self = Self {
        counts: [0; BUCKETS],
        total: 0,
        until_plan: PLAN_EVERY,
        plan: Plan { awake_from: 0, spin_until: 0 },
        to_prove: LEFT_ALONE,
    };

    fn record(&mut self, ns: u64, cost: SleepCost, max: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.until_plan -= 1;
        if self.until_plan == 0 {
            self.until_plan = PLAN_EVERY;
            self.plan = self.best(cost, max);
            if self.total >= REMEMBERED {
                self.counts.iter_mut().for_each(|count| *count /= 2);
                self.total = self.counts.iter().map(|&count| u32::from(count)).sum();
            }
        }
    }

    /// The plan that gains most, by what the waits were like: a wait that ends while the worker spins
    /// gains what waking up takes. What spinning costs is the time it takes, less a sleep that is saved,
    /// and more if it was in vain. No plan but to sleep if none gains enough.
    fn best(&self, cost: SleepCost, max: u64) -> Plan {
        let used = |&bucket: &usize| self.counts[bucket] > 0;
        let (Some(first), Some(last)) = ((0..BUCKETS).find(used), (0..BUCKETS).rev().find(used))
        else {
            return Plan::default();
        };
        // A tenth of what waking up costs all of them.
        let mut most = (u64::from(self.total) * cost.latency / 10) as i64;
        let mut plan = Plan::default();
        for from in first..=last {
            let awake_from = begin_of(from);
            let naps = awake_from >= cost.latency + NAP_MIN_NS;
            let awake_from = if naps { awake_from } else { 0 };
            if from > first && !naps {
                continue;
            }
            let late: u64 = self.counts[from..].iter().map(|&count| u64::from(count)).sum();
            let (mut later, mut won, mut spun) = (late, 0, 0);
            // What is in the last bucket may take for ever.
            for until in from..=last.min(BUCKETS - 2) {
                let long = begin_of(until + 1) - awake_from;
                if long > max {
                    break;
                }
                let count = u64::from(self.counts[until]);
                later -= count;
                won += count;
                spun += count * (middle_of(until) - awake_from);
                let saved = if naps { 0 } else { won * cost.cpu };
                let in_vain = later * (long + if naps { cost.cpu } else { 0 });
                let gain =
                    (LATENCY_WORTH * won * cost.latency + saved) as i64 - (spun + in_vain) as i64;
                if gain > most {
                    most = gain;
                    plan = Plan { awake_from, spin_until: awake_from + long };
                }
            }
        }
        plan
    }
}

impl DiskWaits {
    pub(super) fn new() -> Self {
        Self { classes: [Class::NEW; CLASSES] }
    }

    /// Which waits are like those with so many requests in flight, at least 1.
    pub(super) fn class(in_flight: usize) -> usize {
        (in_flight.max(1).ilog2() as usize).min(CLASSES - 1)
    }

    /// What to do in a wait of this class.
    pub(super) fn plan(&self, class: usize) -> Plan {
        self.classes[class].plan
    }

    /// True if guests asked for nothing in the last waits of this class.
    pub(super) fn is_left_alone(&self, class: usize) -> bool {
        self.classes[class].to_prove == 0
    }

    /// A wait of this class was ended by the disk, or else by a request.
    pub(super) fn note_end(&mut self, class: usize, completed: bool) {
        let to_prove = &mut self.classes[class].to_prove;
        *to_prove = if completed { to_prove.saturating_sub(1) } else { LEFT_ALONE };
    }

    /// A wait of this class took so long; the longest spin is `max`.
    pub(super) fn record(&mut self, class: usize, ns: u64, cost: SleepCost, max: u64) {
        self.classes[class].record(ns, cost, max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: SleepCost = SleepCost { latency: 20_000, cpu: 3_000 };
    const MAX: u64 = 50_000;

    fn plan_for(waits: impl IntoIterator<Item = u64>, cost: SleepCost, max: u64) -> Plan {
        let mut disk = DiskWaits::new();
        waits.into_iter().for_each(|ns| disk.record(0, ns, cost, max));
        assert_eq!(disk.plan(1), Plan::default(), "other depths know nothing of it");
        disk.plan(0)
    }

    #[test]
    fn buckets_follow_one_another() {
        for at in 0..BUCKETS - 1 {
            let (begin, end) = (begin_of(at), begin_of(at + 1));
            assert_eq!((bucket(begin), bucket(end - 1), bucket(end)), (at, at, at + 1));
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
        let classes = [1, 2, 3, 4, 32, 4096].map(DiskWaits::class);
        assert_eq!(classes, [0, 1, 1, 2, 5, 5]);
    }

    #[test]
    fn a_fast_disk_is_spun_for_and_nothing_is_planned_from_nothing() {
        let plan = plan_for([9_000; 64], COST, MAX);
        assert!(plan.awake_from == 0 && (9_000..12_000).contains(&plan.spin_until), "{plan:?}");
        assert_eq!(plan_for([9_000; 31], COST, MAX), Plan::default(), "too few");
        assert_eq!(plan_for([9_000; 64], COST, 0), Plan::default(), "no spin is allowed");
    }

    #[test]
    fn a_slow_and_steady_disk_is_slept_for_until_shortly_before() {
        let waits = (0..256).map(|n| 300_000 + n % 8 * 1_000);
        let plan = plan_for(waits, COST, MAX);
        assert!((250_000..=300_000).contains(&plan.awake_from), "{plan:?}");
        assert!(plan.spin_until > 307_000 && plan.spin_until - plan.awake_from <= MAX, "{plan:?}");
    }

    #[test]
    fn waits_that_nobody_can_tell_are_slept_for() {
        // As many long ones as short ones, evenly up to 4 ms.
        let waits = (0..512).map(|n| n * 2_654_435_761 % 4_000_000);
        assert_eq!(plan_for(waits, COST, MAX), Plan::default());
        // A spin as long as the wait is no gain where waking up costs next to nothing.
        let cheap = SleepCost { latency: 1_000, cpu: 500 };
        let waits = (0..512).map(|n| 10_000 + n * 2_654_435_761 % 30_000);
        assert_eq!(plan_for(waits, cheap, MAX), Plan::default());
    }

    #[test]
    fn of_two_kinds_of_waits_the_short_ones_are_spun_for() {
        // A cache that hits three times of four, and a disk behind it.
        let waits = (0..512).map(|n| if n % 4 == 3 { 4_000_000 } else { 8_000 });
        let plan = plan_for(waits, COST, MAX);
        assert!(plan.awake_from == 0 && (8_000..12_000).contains(&plan.spin_until), "{plan:?}");
    }

    #[test]
    fn the_cost_of_a_sleep_is_learned_and_one_late_timer_says_little() {
        let mut cost = SleepCost::new(0, 0);
        assert_eq!((cost.latency, cost.cpu), (1_000, 500));
        (0..200).for_each(|_| cost.learn(30_000));
        assert!((29_000..=30_000).contains(&cost.latency), "{cost:?}");
        cost.learn(1_000_000_000);
        assert!(cost.latency < 36_000, "{cost:?}");
    }
}
