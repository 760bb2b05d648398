//! The queue of the policy request against an oracle that knows each request: every byte reaches the same place,
//! each request goes once, deadlines hold, nothing is merged that must not be.
//!
//! A failing case is shrunk, printed, and its seed kept in `oracle.proptest-regressions`.

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};
use ringway_core::{ByteRange, DataOp};
use ringway_scheduler::merge_queue::{HOLD_NS, READ_DEADLINE_NS, WINDOW, WRITE_DEADLINE_NS};
use ringway_scheduler::{Limits, MERGED_MAX, MergeQueue, RunId, SchedulerStats};

const DEPTH: u16 = 64;
const LIMITS: Limits = Limits { max_bytes: 12 << 10, max_segments: 12 };
const SECTOR: u64 = 512;

fn config() -> Config {
    let mut config = Config::with_cases(if cfg!(miri) { 8 } else { 3000 });
    if let Some(more) = std::env::var("PROPTEST_CASES").ok().and_then(|word| word.parse().ok()) {
        config.cases = more;
    }
    if cfg!(miri) {
        config.failure_persistence = None;
        config.rng_seed = proptest::test_runner::RngSeed::Fixed(42);
    } else {
        config.failure_persistence =
            Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions")));
    }
    config
}

/// What happens to the queue.
#[derive(Clone, Debug)]
enum Step {
    /// A request: kind, sector, sectors, segments.
    Plug(DataOp, u64, u64, usize),
    /// A request right behind the last one of its kind.
    Follow(DataOp, u64),
    /// All that may go goes.
    Unplug,
    /// The operation at this place of those in flight ends.
    End(prop::sample::Index),
    /// A flush or discard: all goes.
    Barrier,
    /// Time passes, in nanoseconds.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let op = || prop_oneof![5 => Just(DataOp::Read), 4 => Just(DataOp::Write), 1 => Just(DataOp::WriteDurable)];
    prop_oneof![
        6 => (op(), 0u64..200, 1u64..9, 1usize..5).prop_map(|(a, b, c, d)| Step::Plug(a, b, c, d)),
        8 => (op(), 1u64..9).prop_map(|(op, sectors)| Step::Follow(op, sectors)),
        5 => Just(Step::Unplug),
        5 => any::<prop::sample::Index>().prop_map(Step::End),
        1 => Just(Step::Barrier),
        2 => (0u64..20_000_000).prop_map(Step::Pass),
        1 => (0u64..6_000_000_000).prop_map(Step::Pass),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Request {
    op: DataOp,
    range: ByteRange,
    segments: usize,
    born: u64,
    /// Barriers before it.
    epoch: u64,
}

impl Request {
    fn deadline(&self) -> u64 {
        self.born + if self.op == DataOp::Read { READ_DEADLINE_NS } else { WRITE_DEADLINE_NS }
    }
}

/// The queue, and what is known of each slot.
struct World {
    queue: MergeQueue,
    now: u64,
    epoch: u64,
    held: Vec<Option<Request>>,
    flying: Vec<(RunId, Vec<u16>, DataOp, ByteRange)>,
    last: [u64; 3],
    /// All but `expired`.
    stats: SchedulerStats,
}

impl World {
    fn new() -> Self {
        Self {
            queue: MergeQueue::new(DEPTH, LIMITS),
            now: 0,
            epoch: 0,
            held: vec![None; usize::from(DEPTH)],
            flying: Vec::new(),
            last: [0; 3],
            stats: SchedulerStats::default(),
        }
    }

    fn free_slot(&self) -> Option<u16> {
        let busy = |slot: u16| self.flying.iter().any(|(_, slots, ..)| slots.contains(&slot));
        (0..DEPTH).find(|&slot| self.held[usize::from(slot)].is_none() && !busy(slot))
    }

    fn plug(&mut self, op: DataOp, offset: u64, len: u64, segments: usize) {
        let Some(slot) = self.free_slot() else { return };
        let range = ByteRange::new(offset, len).unwrap();
        self.queue.plug(slot, op, range, segments, self.now);
        let (born, epoch) = (self.now, self.epoch);
        self.held[usize::from(slot)] = Some(Request { op, range, segments, born, epoch });
        self.last[op as usize] = range.end();
        self.stats.plugged += 1;
    }

    /// A run leaves: it is made of held requests, each once, end to end, of one kind, within limits.
    fn leave(&mut self, run: RunId) {
        let slots: Vec<u16> = self.queue.slots(run).collect();
        let op = self.queue.op(run);
        let range = self.queue.range(run);
        let (mut at, mut segments) = (range.offset(), 0);
        let mut epoch = None;
        for &slot in &slots {
            let request = self.held[usize::from(slot)].take().expect("held, and goes once");
            assert_eq!(request.op, op, "one kind");
            assert_eq!(request.range.offset(), at, "each byte where it belongs");
            assert_eq!(*epoch.get_or_insert(request.epoch), request.epoch, "not across a barrier");
            at = request.range.end();
            segments += request.segments;
        }
        assert_eq!(at, range.end());
        if slots.len() > 1 {
            assert!(range.len() <= LIMITS.max_bytes && segments <= LIMITS.max_segments);
        }
        self.stats.runs += 1;
        self.stats.merged += slots.len() as u64 - 1;
        self.flying.push((run, slots, op, range));
    }

    fn unplug(&mut self) {
        loop {
            let before: Vec<_> = self.held.iter().flatten().copied().collect();
            let full = self.flying.len() >= WINDOW;
            let Some(run) = self.queue.next(self.now) else {
                return self.check_held(full);
            };
            assert!(!full, "the window holds");
            self.leave(run);
            // Who has waited too long goes first, the longest overdue of all.
            let overdue = before.iter().filter(|r| r.deadline() <= self.now);
            if let Some(first) = overdue.min_by_key(|r| r.deadline()) {
                let still = self.held.iter().flatten().filter(|r| r.deadline() < first.deadline());
                assert_eq!(still.count(), 0, "deadlines hold");
                let gone = before.len() - self.held.iter().flatten().count();
                assert!(gone > 0);
                let left = |r: &&Request| r.deadline() == first.deadline();
                let (was, is) = (
                    before.iter().filter(left).count(),
                    self.held.iter().flatten().filter(left).count(),
                );
                assert!(is < was, "the first overdue one is among those that went");
            }
        }
    }

    /// With room in the window, only what continues something in flight is held, and not for long.
    fn check_held(&self, full: bool) {
        if full {
            return;
        }
        for request in self.held.iter().flatten() {
            assert!(self.now < request.born + HOLD_NS, "held for too long: {request:?}");
        }
        let waits = self.held.iter().flatten().any(|held| {
            self.flying.iter().any(|(.., op, range)| {
                *op == held.op
                    && (range.end() == held.range.offset() || range.offset() == held.range.end())
            })
        });
        let any = self.held.iter().any(Option::is_some);
        assert_eq!(any, waits, "nothing is held without a reason");
        let oldest = self.held.iter().flatten().map(|request| request.born).min();
        assert_eq!(self.queue.wake_at(), oldest.map(|born| born + HOLD_NS), "it is woken for");
        if let Some(at) = self.queue.wake_at() {
            assert!(at > self.now && at <= self.now + HOLD_NS);
        }
    }

    fn barrier(&mut self) {
        while let Some(run) = self.queue.next_of_all() {
            self.leave(run);
        }
        assert!(self.held.iter().all(Option::is_none), "nothing stays behind");
        assert!(!self.queue.holds());
        self.epoch += 1;
    }

    fn end(&mut self, place: usize) {
        let (run, slots, op, range) = self.flying.swap_remove(place);
        assert_eq!(self.queue.slots(run).collect::<Vec<_>>(), slots, "a run stays as it was sent");
        assert_eq!((self.queue.op(run), self.queue.range(run)), (op, range));
        self.queue.done(run);
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Plug(op, sector, sectors, segments) => {
                self.plug(op, sector * SECTOR, sectors * SECTOR, segments);
            }
            Step::Follow(op, sectors) => self.plug(op, self.last[op as usize], sectors * SECTOR, 1),
            Step::Unplug => self.unplug(),
            Step::End(place) if !self.flying.is_empty() => {
                self.end(place.index(self.flying.len()));
            }
            Step::End(_) => {}
            Step::Barrier => self.barrier(),
            Step::Pass(ns) => self.now += ns,
        }
        let held = self.held.iter().any(Option::is_some);
        assert_eq!(self.queue.holds(), held);
        assert_eq!(self.queue.is_empty(), !held && self.flying.is_empty());
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn each_request_goes_once_to_its_place(steps in prop::collection::vec(step(), 0..if cfg!(miri) { 40 } else { 250 })) {
        let mut world = World::new();
        for step in &steps {
            world.take(step);
        }
        // Everything can be brought to its end.
        while world.queue.holds() || !world.flying.is_empty() {
            world.unplug();
            if world.flying.is_empty() {
                break;
            }
            world.end(0);
        }
        prop_assert!(world.queue.is_empty());
        prop_assert!(world.held.iter().all(Option::is_none));
        let mut stats = world.queue.stats();
        stats.expired = 0;
        prop_assert_eq!(stats, world.stats);
    }
}

#[test]
fn a_stream_that_queues_behind_its_own_operation_grows() {
    let mut world = World::new();
    world.plug(DataOp::Read, 0, 4096, 1);
    world.unplug();
    assert_eq!(world.flying.len(), 1, "the first one goes at once");
    for i in 1..5 {
        world.plug(DataOp::Read, i * 2048 + 2048, 2048, 1);
        world.unplug();
    }
    assert_eq!(world.flying.len(), 1, "the others wait for it");
    world.end(0);
    world.unplug();
    assert_eq!(world.flying[0].3, ByteRange::new(4096, 4 * 2048).unwrap(), "the others in one");
}

#[test]
fn a_stream_is_merged_up_to_the_most() {
    let limits = Limits { max_bytes: MERGED_MAX, max_segments: 4096 };
    let mut queue = MergeQueue::new(512, limits);
    let plug = |queue: &mut MergeQueue, slot: u16| {
        let range = ByteRange::new(u64::from(slot) * 8192, 8192).unwrap();
        queue.plug(slot, DataOp::Read, range, 1, 0);
    };
    plug(&mut queue, 0);
    let first = queue.next(0).expect("nothing to wait for");
    (1..=300).for_each(|slot| plug(&mut queue, slot));
    queue.done(first);
    let lengths = std::iter::from_fn(|| queue.next(0).map(|run| queue.range(run).len()));
    assert_eq!(lengths.collect::<Vec<_>>(), [1 << 20; 2], "the rest waits for more");
    queue.was_split();
    let stats = SchedulerStats { plugged: 301, runs: 3, merged: 254, split: 1, expired: 0 };
    assert_eq!(queue.stats(), stats);
    // As long as another request like the last one would fit.
    (301..384).for_each(|slot| plug(&mut queue, slot));
    assert_eq!(queue.next(0), None);
    plug(&mut queue, 384);
    assert_eq!(queue.next(0).map(|run| queue.range(run).len()), Some(1 << 20));
}

/// What becomes of requests that come together: the ranges of the runs, in sectors and in the order in
/// which they go. Requests are given as sectors and segments.
fn runs_of(limits: Limits, requests: &[(DataOp, std::ops::Range<u64>, usize)]) -> Vec<[u64; 2]> {
    let mut queue = MergeQueue::new(DEPTH, limits);
    for (slot, (op, sectors, segments)) in (0..).zip(requests) {
        let (offset, len) = (sectors.start * SECTOR, (sectors.end - sectors.start) * SECTOR);
        queue.plug(slot, *op, ByteRange::new(offset, len).unwrap(), *segments, 0);
    }
    let runs = std::iter::from_fn(|| {
        let run = queue.next(0)?;
        let range = queue.range(run);
        queue.done(run);
        Some([range.offset() / SECTOR, range.end() / SECTOR])
    });
    runs.collect()
}

#[test]
fn segments_bound_what_is_merged() {
    use DataOp::Read;
    let limits = Limits { max_bytes: 1 << 20, max_segments: 6 };
    // Behind a run, and before one.
    let upward: Vec<_> = (10_100..10_108).map(|sector| (Read, sector..sector + 1, 1)).collect();
    assert_eq!(runs_of(limits, &upward), [[10_100, 10_106], [10_106, 10_108]]);
    let downward: Vec<_> = upward.iter().rev().cloned().collect();
    assert_eq!(runs_of(limits, &downward), [[10_100, 10_102], [10_102, 10_108]]);
    // A gap that is filled joins two runs, and counts the segments of both.
    let joined = [(Read, 10_100..10_102, 2), (Read, 10_104..10_106, 2), (Read, 10_102..10_104, 1)];
    assert_eq!(runs_of(limits, &joined), [[10_100, 10_106]]);
    let more = [&joined[..], &[(Read, 10_106..10_107, 1)]].concat();
    assert_eq!(runs_of(limits, &more), [[10_100, 10_107]]);
    let most = [&more[..], &[(Read, 10_107..10_108, 1)]].concat();
    assert_eq!(runs_of(limits, &most), [[10_100, 10_107], [10_107, 10_108]]);
    // Unless that is too much.
    let full = [(Read, 10_100..10_102, 3), (Read, 10_104..10_106, 3), (Read, 10_102..10_104, 1)];
    assert_eq!(runs_of(limits, &full), [[10_100, 10_104], [10_104, 10_106]]);
    let long = Limits { max_bytes: 5 * SECTOR, max_segments: 6 };
    assert_eq!(runs_of(long, &joined), [[10_100, 10_104], [10_104, 10_106]]);
}

#[test]
fn the_nearest_goes_first_whatever_its_kind() {
    use DataOp::{Read, Write, WriteDurable};
    // From the place where the last one ended, round and round.
    let three = [(Write, 50..60, 1), (Read, 80..90, 1), (WriteDurable, 20..30, 1)];
    assert_eq!(runs_of(LIMITS, &three), [[20, 30], [50, 60], [80, 90]]);
    let reversed = [(Read, 50..60, 1), (Write, 20..30, 1), (WriteDurable, 80..90, 1)];
    assert_eq!(runs_of(LIMITS, &reversed), [[20, 30], [50, 60], [80, 90]]);
    // Somebody waits for a read.
    let tie = [(Write, 20..40, 1), (Read, 20..30, 1)];
    assert_eq!(runs_of(LIMITS, &tie), [[20, 30], [20, 40]]);
    // What begins just there is not passed over.
    let mut queue = MergeQueue::new(DEPTH, LIMITS);
    let range = |sector| ByteRange::new(sector * SECTOR, 8 * SECTOR).unwrap();
    queue.plug(0, Write, range(0), 1, 0);
    let first = queue.next(0).unwrap();
    queue.done(first);
    queue.plug(1, Write, range(8), 1, 0);
    queue.plug(2, Write, range(100), 1, 0);
    let next = queue.next(0).unwrap();
    assert_eq!(queue.range(next), range(8));
}

#[test]
fn scattered_requests_go_at_once_in_the_order_of_sectors() {
    let mut world = World::new();
    for sector in [900, 100, 500, 300, 700] {
        world.plug(DataOp::Write, sector * SECTOR, 4096, 1);
    }
    world.unplug();
    let order: Vec<_> = world.flying.iter().map(|(.., range)| range.offset() / SECTOR).collect();
    assert_eq!(order, [100, 300, 500, 700, 900]);
}

#[test]
fn a_request_far_away_is_not_passed_over_for_ever() {
    let mut world = World::new();
    for i in 0..WINDOW as u64 {
        world.plug(DataOp::Read, i * 65536, 512, 1);
    }
    world.unplug();
    assert_eq!(world.flying.len(), WINDOW);
    world.plug(DataOp::Read, 0, 512, 1);
    let victim = world.held.iter().position(Option::is_some).unwrap();
    // Others arrive that are always nearer.
    let mut sector = 100_000;
    while world.held[victim].is_some() {
        assert!(world.now < READ_DEADLINE_NS + 10_000_000, "starved");
        world.now += 5_000_000;
        for _ in 0..2 {
            sector += 16;
            world.plug(DataOp::Read, sector * SECTOR, 512, 1);
        }
        world.end(0);
        world.unplug();
    }
    assert_eq!(world.queue.stats().expired, 1, "it alone went for its deadline");
}
