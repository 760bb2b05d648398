//! What passes by a clock of the test: rates, bursts, shares of a group, the largest numbers.
#![allow(missing_docs)]

use proptest::prelude::*;
use ringway_core::Op;
use ringway_throttle::{Gate, LimitKind, Member, RATE_MAX, Rate, Rates, Throttle};
use std::sync::Arc;

const SECOND: u64 = 1_000_000_000;

fn rates(kind: LimitKind, rate: Rate) -> Rates {
    let mut rates = Rates::default();
    rates[kind] = rate;
    rates
}

fn avg(kind: LimitKind, avg: u64) -> Rates {
    rates(kind, Rate { avg: Some(avg), ..Rate::default() })
}

/// A queue that always has requests, on a worker that wakes late.
struct Queue {
    gate: Gate,
    wakes: u64,
    op: Op,
    bytes: u64,
    /// It has requests for a part of the time only: one every so many nanoseconds.
    every: Option<u64>,
    asked: u64,
    passed: u64,
}

impl Queue {
    fn new(members: Vec<Arc<Member>>, op: Op, bytes: u64) -> Self {
        let gate = Gate::new(members).expect("there are limits");
        Self { gate, wakes: 0, op, bytes, every: None, asked: 0, passed: 0 }
    }

    /// One turn of its worker; it looks again a little later if it was taken from.
    fn turn(&mut self, now: u64, late: u64) {
        if let Some(every) = self.every {
            let due = now / every + 1;
            if self.asked >= due {
                self.gate.open(false, || now);
                self.wakes = due * every;
                return;
            }
        }
        if !self.gate.open(true, || now) {
            self.wakes = now + self.gate.wait(now).expect("closed") + late;
            return;
        }
        let mut taken = 0;
        while taken < 16 && self.gate.is_open() && self.every.is_none_or(|_| taken < 1) {
            self.gate.take(self.op, self.bytes);
            taken += 1;
        }
        (self.passed, self.asked) = (self.passed + taken, self.asked + taken);
        self.gate.settle(|| now);
        self.wakes = now + taken * 20;
    }
}

/// Runs the queues, each when it wakes, for so long from `begun` on.
fn run(queues: &mut [Queue], begun: u64, time: u64, late: u64) {
    queues.iter_mut().for_each(|queue| queue.wakes = queue.wakes.max(begun));
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    loop {
        let next = queues.iter_mut().min_by_key(|queue| queue.wakes).expect("there are some");
        if next.wakes >= begun + time {
            return;
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        next.turn(next.wakes, (random >> 33) % late.max(1));
    }
}

fn within(percent: f64, found: u64, wanted: u64, rest: u64) -> bool {
    found.abs_diff(wanted) as f64 <= wanted as f64 * percent / 100.0 + rest as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// 100 to 1,000,000 a second, one to four queues: a tenth of a second's worth at once, then the
    /// rate, within one percent.
    #[test]
    fn the_rate_holds_whoever_asks(
        rate in prop_oneof![100u64..1000, 1000u64..30_000, 30_000u64..=1_000_000],
        queues in 1usize..=4,
        late in 1u64..300_000,
        begun in 0..u64::MAX / 4,
    ) {
        let member = Member::alone(&avg(LimitKind::Iops, rate)).unwrap();
        let one = || Queue::new(vec![Arc::clone(&member)], Op::Read, 4096);
        let mut queues: Vec<_> = (0..queues).map(|_| one()).collect();
        let time = (100_000 * SECOND / rate).clamp(SECOND / 4, 5 * SECOND);
        run(&mut queues, begun, time, late);
        let passed = queues.iter().map(|queue| queue.passed).sum();
        let wanted = rate * (time + SECOND / 10) / SECOND;
        prop_assert!(within(0.6, passed, wanted, 2 + queues.len() as u64), "{passed} of {wanted}");
    }

    /// The same in bytes, for requests of many sizes.
    #[test]
    fn the_rate_of_bytes_holds_whatever_the_sizes(
        rate in prop_oneof![4096u64..1 << 20, 1u64 << 20..1 << 34],
        sizes in proptest::collection::vec(1u64..2048, 1..5),
        late in 1u64..300_000,
    ) {
        let member = Member::alone(&avg(LimitKind::BpsWrite, rate)).unwrap();
        let one = |sectors: &u64| Queue::new(vec![Arc::clone(&member)], Op::Write, sectors * 512);
        let mut queues: Vec<_> = sizes.iter().map(one).collect();
        let time = 5 * SECOND;
        run(&mut queues, SECOND, time, late);
        let passed: u64 = queues.iter().map(|queue| queue.passed * queue.bytes).sum();
        let wanted = rate * 51 / 10;
        // Each may have passed the one it has credit for, one in advance, and what remains of them.
        let rest = 3 * queues.iter().map(|queue| queue.bytes).sum::<u64>();
        prop_assert!(within(0.6, passed, wanted, rest), "{passed} of {wanted}");
    }

    /// A burst is as fast as was asked for, and lasts until as much as `max` times `max-length` is
    /// in the bucket.
    #[test]
    fn bursts_are_as_long_as_was_asked_for(
        rate in 100u64..2000,
        factor in 2u64..20,
        length in 2u64..8,
        queues in 1usize..=4,
    ) {
        let max = rate * factor;
        let burst = Rate { avg: Some(rate), max: Some(max), max_length: Some(length) };
        let member = Member::alone(&rates(LimitKind::IopsRead, burst)).unwrap();
        let one = || Queue::new(vec![Arc::clone(&member)], Op::Read, 4096);
        let mut queues: Vec<_> = (0..queues).map(|_| one()).collect();
        for second in 0..3 * length {
            run(&mut queues, SECOND + second * SECOND, SECOND, 1000);
            let passed = queues.iter().map(|queue| queue.passed).sum();
            let so_fast = max * (second + 1) + max / 10;
            let wanted = so_fast.min(rate * (second + 1) + max * length);
            let rest = 4 + 2 * queues.len() as u64;
            prop_assert!(within(1.0, passed, wanted, rest), "{second}: {passed} of {wanted}");
        }
    }

    /// Disks that all want more than they get have equal parts, however many queues they have and
    /// whatever they ask for; one that wants less gets that, and the others share what it leaves.
    #[test]
    fn disks_of_a_group_have_equal_parts(
        rate in prop_oneof![100u64..1000, 1000u64..100_000],
        queues in proptest::collection::vec(1usize..=4, 2..5),
        sizes in proptest::collection::vec(1u64..16, 4),
        in_bytes in any::<bool>(),
        late in 1u64..200_000,
        with_light in any::<bool>(),
    ) {
        let bytes = |disk: usize| if in_bytes { sizes[disk] * 4096 } else { 4096 };
        let (kind, unit) = if in_bytes { (LimitKind::Bps, 65536) } else { (LimitKind::Iops, 1) };
        let throttle = Arc::new(Throttle::new(&avg(kind, rate * unit)).unwrap());
        let mut all = Vec::new();
        for (disk, &queues) in queues.iter().enumerate() {
            let member = Member::of_group(&throttle);
            all.extend((0..queues).map(|_| Queue::new(vec![Arc::clone(&member)], Op::Read, bytes(disk))));
        }
        let heavy = all.len();
        if with_light {
            let mut light = Queue::new(vec![Member::of_group(&throttle)], Op::Read, 4096);
            // A tenth of an equal part.
            light.every = Some(SECOND * 10 * (queues.len() as u64 + 1) / rate);
            all.push(light);
        }
        // Who shares is known after the first looks.
        run(&mut all, SECOND, 2 * SECOND, late);
        let before: Vec<u64> = all.iter().map(|queue| queue.passed).collect();
        run(&mut all, 3 * SECOND, 10 * SECOND, late);
        let passed = |at: usize| (all[at].passed - before[at]) * if in_bytes { all[at].bytes } else { 1 };
        let mut parts = Vec::new();
        let mut at = 0;
        for &queues in &queues {
            parts.push((at..at + queues).map(passed).sum::<u64>());
            at += queues;
        }
        let light = if with_light { passed(heavy) } else { 0 };
        let (total, wanted) = (parts.iter().sum::<u64>() + light, rate * unit * 10);
        let largest = if in_bytes { 16 * 4096 } else { 1 };
        prop_assert!(within(2.0, total, wanted, 20 * largest), "{total} of {wanted}: {parts:?} {light}");
        let equal = (total - light) / queues.len() as u64;
        for part in &parts {
            prop_assert!(within(5.0, *part, equal, 4 * largest), "{parts:?}, equal {equal}, {light}");
        }
        if with_light {
            let asked = 10 * SECOND / all[heavy].every.unwrap();
            prop_assert!(within(5.0, light / largest.min(4096), asked, 2), "{light} of {asked}");
        }
    }

    /// Nothing overflows, whatever the numbers.
    #[test]
    fn the_largest_numbers_do_no_harm(
        rate in prop_oneof![Just(1u64), Just(RATE_MAX), 1u64..=RATE_MAX],
        burst in prop_oneof![Just(RATE_MAX), 1u64..=RATE_MAX],
        bytes in prop_oneof![Just(u64::MAX), Just(0u64), any::<u64>()],
        size in prop_oneof![Just(1u64), 1u64..=RATE_MAX],
        now in prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()],
        in_group in any::<bool>(),
    ) {
        let mut all = Rates::default();
        for kind in LimitKind::ALL {
            all[kind] = Rate { avg: Some(rate), max: Some(burst.max(rate)), max_length: Some(1) };
        }
        all.iops_size = Some(size);
        let member = match in_group {
            true => Member::of_group(&Arc::new(Throttle::new(&all).unwrap())),
            false => Member::alone(&all).unwrap(),
        };
        let mut gate = Gate::new(vec![member]).unwrap();
        for round in 0..20u64 {
            let now = now.saturating_add(round);
            if gate.open(true, || now) {
                gate.take(Op::Read, bytes);
                gate.take(Op::Discard, bytes);
                gate.settle(|| now);
            } else {
                prop_assert!(gate.wait(now).is_some_and(|wait| wait <= SECOND / 10));
            }
        }
    }
}

/// As QEMU counts: a request that is larger than `iops-size` is several, in parts.
#[test]
fn large_requests_count_several_times() {
    let mut rates = avg(LimitKind::IopsWrite, 1000);
    rates.iops_size = Some(4096);
    let mut queue = [Queue::new(vec![Member::alone(&rates).unwrap()], Op::Write, 10 * 1024)];
    run(&mut queue, SECOND, 10 * SECOND, 1000);
    let passed = queue[0].passed;
    assert!(within(0.5, passed, 10_100 * 2 / 5, 2), "{passed}");
}

/// A limit of writes does not keep reads waiting, but those behind a write that waits; flushes are no
/// writes.
#[test]
fn reads_do_not_wait_for_the_limit_of_writes() {
    let member = Member::alone(&avg(LimitKind::BpsWrite, 1000)).unwrap();
    let mut gate = Gate::new(vec![member]).unwrap();
    let mut pass = |op| {
        let passed = gate.open(true, || SECOND);
        if passed {
            gate.take(op, 100_000);
            gate.settle(|| SECOND);
        }
        passed
    };
    assert!(pass(Op::Write), "the first one passes, whatever it costs");
    assert!((0..1000).all(|_| pass(Op::Read) && pass(Op::Flush)), "nothing else is limited");
    assert!(pass(Op::Write), "one is taken before anybody knows what it is");
    assert!(!pass(Op::Read), "and then the queue waits");
}

/// Each has the disk write what its cache has: a guest that asks for nothing else is held to a limit of requests, too.
#[test]
fn a_limit_of_all_requests_counts_flushes() {
    let member = Member::alone(&avg(LimitKind::Iops, 1000)).unwrap();
    let mut queue = [Queue::new(vec![member], Op::Flush, 0)];
    run(&mut queue, SECOND, 10 * SECOND, 1000);
    let passed = queue[0].passed;
    assert!(within(0.5, passed, 10_100, 2), "{passed}");
}

/// What a queue does not use is not lost for long, and a queue without requests takes nothing.
#[test]
fn a_queue_below_its_limit_never_waits() {
    let member = Member::alone(&avg(LimitKind::Iops, 1000)).unwrap();
    let mut gates: Vec<_> = (0..4).map(|_| Gate::new(vec![Arc::clone(&member)]).unwrap()).collect();
    for at in 0..20_000u64 {
        // 900 a second in all.
        let now = SECOND + at * SECOND / 900;
        let gate = &mut gates[(at % 4) as usize];
        assert!(gate.open(true, || now), "request {at}");
        gate.take(Op::Read, 4096);
        gate.settle(|| now);
    }
    assert_eq!(gates.iter().map(|gate| gate.throttled(u64::MAX).ns).sum::<u64>(), 0);
}

/// Equal turns for the queues of one disk: none is starved by the others.
#[test]
fn queues_of_a_disk_take_turns() {
    let member = Member::alone(&avg(LimitKind::Iops, 100)).unwrap();
    let one = || Queue::new(vec![Arc::clone(&member)], Op::Read, 4096);
    let mut queues: Vec<_> = (0..4).map(|_| one()).collect();
    run(&mut queues, SECOND, 20 * SECOND, 100_000);
    for queue in &queues {
        assert!(within(5.0, queue.passed, 2010 / 4, 2), "{}", queue.passed);
    }
}

/// One request of a group's member that costs days does so to its own disk.
#[test]
fn a_huge_request_costs_its_own_disk_only() {
    let throttle = Arc::new(Throttle::new(&avg(LimitKind::Bps, 1 << 20)).unwrap());
    let one = |op, bytes| Queue::new(vec![Member::of_group(&throttle)], op, bytes);
    let mut queues = [one(Op::Discard, 1 << 40), one(Op::Read, 4096)];
    run(&mut queues, SECOND, 20 * SECOND, 1000);
    assert_eq!(queues[0].passed, 1);
    let read = queues[1].passed * 4096;
    assert!(read > 8 << 20, "{read} bytes in 20 s at a part of 512 KiB a second");
}

/// A guest that restarts its queue as often as it can has no more than one that does not: what it was
/// given in advance is not forgotten with the queue, of a disk alone and in a group.
#[test]
fn a23_a_queue_that_begins_anew_gets_nothing_in_advance() {
    for kind in [
        LimitKind::BpsWrite,
        LimitKind::IopsWrite,
        LimitKind::BpsRead,
        LimitKind::Iops,
        LimitKind::Bps,
    ] {
        let units = if kind.counts_requests() { 1 } else { 1 << 20 };
        let op = if kind == LimitKind::BpsRead { Op::Read } else { Op::Write };
        let alone = Member::alone(&avg(kind, 4 * units)).unwrap();
        let throttle = Arc::new(Throttle::new(&avg(kind, 4 * units)).unwrap());
        for member in [alone, Member::of_group(&throttle)] {
            let mut passed = 0;
            // A hundred of them at a time, each of which begins anew every millisecond.
            for at in 0..10_000 {
                let now = SECOND + at * SECOND / 1000;
                let gates = || Gate::new(vec![Arc::clone(&member)]).unwrap();
                let mut gates: Vec<_> =
                    (0..if at % 100 == 0 { 100 } else { 1 }).map(|_| gates()).collect();
                for gate in &mut gates {
                    if gate.open(true, || now) {
                        gate.take(op, 1 << 20);
                        passed += 1;
                        gate.settle(|| now);
                    }
                }
            }
            // 40 at the rate, and one with credit and one in advance for each queue.
            assert!(passed <= 40 + 2 * 100, "{kind:?}: {passed}");
        }
    }
}

/// What waits of one kind keeps no queue of the same disk waiting that begins later, unless one has
/// gone that had taken something in advance.
#[test]
fn a23_a_queue_that_begins_reads_beside_one_that_waits_to_write() {
    let member = Member::alone(&avg(LimitKind::BpsWrite, 1000)).unwrap();
    let gate = || Gate::new(vec![Arc::clone(&member)]).unwrap();
    let pass = |gate: &mut Gate, op, now| {
        let passed = gate.open(true, || now);
        if passed {
            gate.take(op, 10_000);
            gate.settle(|| now);
        }
        passed
    };
    let mut writes = gate();
    while pass(&mut writes, Op::Write, SECOND) {}
    let mut reads = gate();
    assert!((0..100).all(|_| pass(&mut reads, Op::Read, SECOND)));
    drop(writes);
    assert!(pass(&mut reads, Op::Read, SECOND), "it had taken nothing in advance");
    let mut next = gate();
    assert!(!pass(&mut next, Op::Read, SECOND), "what is first may be a write");
    assert!(!pass(&mut next, Op::Read, 20 * SECOND), "two of ten seconds each are not paid for");
    drop(next);
    assert!(pass(&mut gate(), Op::Read, 22 * SECOND), "now they are");
}

/// Gates that come and go, with requests and without, take nothing away from others.
#[test]
fn a24_a_queue_that_comes_and_goes_takes_no_credit_along() {
    for (kind, wanted) in
        [LimitKind::IopsWrite, LimitKind::Iops].into_iter().flat_map(|k| [(k, true), (k, false)])
    {
        let throttle = Arc::new(Throttle::new(&avg(kind, 1000)).unwrap());
        let (a, b) = (Member::of_group(&throttle), Member::of_group(&throttle));
        let mut queue = [Queue::new(vec![b], Op::Write, 4096)];
        for at in 0..100_000 {
            let now = SECOND + at * SECOND / 20_000;
            run(&mut queue, now, SECOND / 20_000, 1000);
            for _ in 0..4 {
                let mut gate = Gate::new(vec![Arc::clone(&a)]).unwrap();
                gate.open(wanted, || now);
            }
        }
        let passed = queue[0].passed;
        // Who has requests has an equal part, used or not.
        let least = if wanted { 2500 } else { 5050 };
        assert!((least..5120).contains(&passed), "{kind:?}, {wanted}: {passed}");
    }
}

/// A disk of many queues costs the others of its group as little as one of one queue, and its requests
/// are not forgotten when it has gone and come back.
#[test]
fn a24_many_huge_requests_cost_their_own_disk_only() {
    let burst = Rate { avg: Some(1 << 20), max: Some(4 << 20), max_length: Some(10) };
    for (kind, rate) in [
        (LimitKind::Bps, Rate { avg: Some(1 << 20), ..Rate::default() }),
        (LimitKind::BpsWrite, Rate { avg: Some(1 << 20), ..Rate::default() }),
        (LimitKind::Bps, burst),
    ] {
        let throttle = Arc::new(Throttle::new(&rates(kind, rate)).unwrap());
        let (a, b) = (Member::of_group(&throttle), Member::of_group(&throttle));
        let (mut taken, op) = (0, Op::Discard);
        for _ in 0..10 {
            let mut gates: Vec<_> =
                (0..64).map(|_| Gate::new(vec![Arc::clone(&a)]).unwrap()).collect();
            for gate in &mut gates {
                if gate.open(true, || SECOND) {
                    gate.take(op, 1 << 40);
                    taken += 1;
                }
            }
            gates.iter_mut().for_each(|gate| gate.settle(|| SECOND));
        }
        assert!(taken <= 128, "{kind:?}: {taken}");
        let mut queue = [Queue::new(vec![b], Op::Write, 4096)];
        run(&mut queue, SECOND, 10 * SECOND, 1000);
        let passed = queue[0].passed * 4096;
        assert!(passed >= 15 << 19, "{kind:?}: {passed} bytes in 10 s");
        assert_eq!(
            (0..64)
                .filter(|_| {
                    let mut gate = Gate::new(vec![Arc::clone(&a)]).unwrap();
                    gate.open(true, || 12 * SECOND)
                })
                .count(),
            0,
            "{kind:?}: it has not paid yet"
        );
    }
}

/// The bound of what others pay for is beyond the room for a burst: what one disk has had of that, no
/// other one has again.
#[test]
fn a24_disks_of_a_group_have_one_burst_together() {
    let burst = Rate { avg: Some(1000), max: Some(10_000), max_length: Some(10) };
    let throttle = Arc::new(Throttle::new(&rates(LimitKind::Bps, burst)).unwrap());
    let one = || [Queue::new(vec![Member::of_group(&throttle)], Op::Read, 4096)];
    let (mut first, mut second) = (one(), one());
    run(&mut first, SECOND, 60 * SECOND, 1000);
    run(&mut second, 61 * SECOND, 10 * SECOND, 1000);
    let passed = [&first, &second].map(|queue| queue[0].passed * 4096);
    assert!((110_000..170_000).contains(&passed[0]), "{passed:?}");
    assert!((10_000..50_000).contains(&passed[1]), "{passed:?}");
}

/// What is carried out of queues that stop passes at once, and is paid for: the next queue waits, and in the long run a
/// disk has no more than its limit.
#[test]
fn a26_what_passes_a_limit_is_paid_for() {
    for kind in [LimitKind::Bps, LimitKind::BpsRead, LimitKind::Iops] {
        let units = if kind.counts_requests() { 1 } else { 4096 };
        let alone = Member::alone(&avg(kind, 100 * units)).unwrap();
        let throttle = Arc::new(Throttle::new(&avg(kind, 100 * units)).unwrap());
        for member in [alone, Member::of_group(&throttle)] {
            let gate = || Gate::new(vec![Arc::clone(&member)]).unwrap();
            let stop = |requests: u64, now: u64| {
                let mut gate = gate();
                gate.lift(now);
                let pass = |_: &u64| {
                    let open = gate.open(true, || now);
                    if open {
                        gate.take(Op::Read, 4096);
                        gate.settle(|| now);
                    }
                    open
                };
                (0..requests).filter(pass).count() as u64
            };
            let seconds = 100;
            let mut passed = stop(1000, SECOND);
            assert_eq!(passed, 1000, "{kind:?}");
            // Ten seconds' worth: who begins then waits for as long, and in a busy group for up to twice that.
            let opens = |now| gate().open(true, || now);
            assert!(!opens(10 * SECOND), "{kind:?}");
            assert!(opens(30 * SECOND), "{kind:?}");
            for at in 0..seconds * 100 {
                passed += stop(1000, 30 * SECOND + at * SECOND / 100);
            }
            let most = 100 * (seconds + 30) + (16 << 10) + 2000;
            assert!(passed <= most, "{kind:?}: {passed} of {most}");
            // Once it is paid for, all is as before.
            assert_eq!(stop(1000, 1000 * SECOND), 1000, "{kind:?}");
        }
    }
}
