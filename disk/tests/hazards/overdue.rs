//! Requests that take too long are found by looks, whatever way they go; those that do not are not.

use ringway_aio::{Engine, FileId, Reaped};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{Alignment, CacheMode, CustomDisk, DiskQueue, Overdue, SchedulerMode};
use ringway_testkit::power_cut::{Faults, PowerCutEngine, SimulatedDisk, SimulatedSetup};
use std::sync::Arc;

const BYTES: u64 = 64 << 10;
const LIMIT: u64 = 1000;

/// A queue on a disk that moves when it is told to.
struct Bench {
    engine: PowerCutEngine,
    queue: DiskQueue<u32>,
    disk: SimulatedDisk,
    memory: Mapping,
}

impl Bench {
    fn new(path: SchedulerMode, faults: Faults) -> Self {
        let bytes = usize::try_from(BYTES).unwrap();
        let (granule, erase_granule, failed_flush_loses, lie, seed) = (4096, 512, false, None, 7);
        let setup =
            SimulatedSetup { bytes, granule, erase_granule, failed_flush_loses, faults, lie, seed };
        let disk = SimulatedDisk::new(setup, &vec![0; bytes]);
        let alignment = Alignment { memory: 512, offset: 4096 };
        let cache = CacheMode::None;
        let shape = CustomDisk { bytes: BYTES, cache, alignment, block_device: false, path };
        let engine = PowerCutEngine::by_hand(&disk);
        let opened = Arc::new(shape.open(None).unwrap());
        opened.set_now(0);
        let queue = DiskQueue::new(opened, engine.limits(), FileId(0), 0, 8).unwrap();
        Self { engine, queue, disk, memory: Mapping::anonymous(64 << 10).unwrap() }
    }

    /// Starts a request; `name` comes back with its answer.
    fn ask(&mut self, name: u32, op: Op, offset: u64, len: usize) {
        let tag = self.queue.acquire().expect("a slot");
        let base = self.memory.at(usize::try_from(offset).unwrap());
        let request = self.queue.request_mut(tag);
        request.op = op;
        let all = if op == Op::Flush { 0 } else { len as u64 };
        request.range = ByteRange::new(offset, all).unwrap();
        request.segments.clear();
        if op.moves_data() {
            assert!(request.segments.push(Segment { base, len }));
        }
        // SAFETY: the memory lives as long as the bench.
        unsafe { self.queue.start(&mut self.engine, tag, name) };
    }

    /// A round of a worker; what was answered.
    fn turn(&mut self) -> Vec<(u32, Status)> {
        if self.queue.has_deferred() {
            self.queue.retry(&mut self.engine, usize::MAX);
        }
        self.queue.unplug(&mut self.engine);
        self.engine.submit().unwrap();
        let mut reaped = Reaped::default();
        self.engine.reap(&mut reaped);
        let mut answers = Vec::new();
        for done in reaped.done {
            let slot = u16::try_from(done.tag & 0xffff).unwrap();
            answers.extend(self.queue.finish(&mut self.engine, slot, done.result));
        }
        answers.extend(std::iter::from_fn(|| self.queue.take_late()));
        answers.into_iter().map(|done| (done.context, done.status)).collect()
    }

    /// Lets the disk work until all is answered.
    fn rest(&mut self) -> Vec<(u32, Status)> {
        let mut answers: Vec<(u32, Status)> = Vec::new();
        for _ in 0..10_000 {
            if self.queue.in_flight() == 0 {
                answers.sort_unstable_by_key(|answer| answer.0);
                return answers;
            }
            self.disk.step();
            answers.extend(self.turn());
        }
        panic!("requests hang");
    }

    fn scan_overdue(&mut self, now: u64) -> Overdue {
        self.queue.scan_overdue(now, LIMIT)
    }
}

const PATHS: [SchedulerMode; 3] = [SchedulerMode::Bio, SchedulerMode::Request, SchedulerMode::Auto];

/// Straight, through bounce pages, without data; held by a path, waiting for a lock.
#[test]
fn c08_requests_of_every_kind_are_found_when_they_are_overdue() {
    for path in PATHS {
        let mut bench = Bench::new(path, Faults::default());
        let asked = [
            (Op::Read, 0, 4096),
            (Op::Write, 4096, 4096),
            (Op::Write, 8192 + 512, 512),
            // In the same block: it waits for the lock.
            (Op::Write, 8192 + 1024, 512),
            (Op::Flush, 0, 0),
            (Op::WriteZeroes, 16384, 4096),
        ];
        for (name, &(op, offset, len)) in (0..).zip(&asked) {
            bench.ask(name, op, offset, len);
        }
        assert!(bench.turn().is_empty());
        let all = asked.len();
        assert_eq!(bench.scan_overdue(10), Overdue::default(), "{path}");
        assert_eq!(bench.scan_overdue(LIMIT + 9), Overdue::default(), "{path}");
        let found = bench.scan_overdue(LIMIT + 10);
        assert_eq!((found.requests, found.new), (all, all), "{path}");
        assert_eq!(found.oldest.unwrap().age_ns, LIMIT);
        let found = bench.scan_overdue(LIMIT + 20);
        assert_eq!((found.requests, found.new), (all, 0), "{path}: each is counted once");
        // And nothing of it changes how they end.
        let answers = bench.rest();
        let good: Vec<_> = (0..).take(all).map(|name| (name, Status::Ok)).collect();
        assert_eq!(answers, good, "{path}");
        assert_eq!(bench.scan_overdue(9 * LIMIT), Overdue::default(), "{path}");
        let stats = bench.queue.stats();
        assert_eq!((stats.overdue, stats.reads, stats.writes), (all as u64, 1, 3), "{path}");
        assert_eq!(stats.errors, 0);
    }
}

/// A slot is used by one request after the other: none is taken for the one before it, whatever way
/// both go and whatever happens to them.
#[test]
fn c08_a_request_is_no_older_than_itself() {
    let faults = Faults { short: 300, again: 300, ..Faults::default() };
    for path in PATHS {
        let mut bench = Bench::new(path, faults);
        let kinds = [(Op::Read, 0, 8192), (Op::Write, 4096, 8192), (Op::Write, 512, 1024)];
        let mut now = 0;
        for name in 0..400 {
            // Always one at a time, so always the same slot.
            let (op, offset, len) = kinds[(name as usize * 7 / 3) % 3];
            bench.ask(name, op, offset, len);
            // Looks meet it at any point of its way, half of its limit apart.
            let mut answers = Vec::new();
            let mut checks = 0;
            while answers.is_empty() {
                if checks < 2 && name % 3 > 0 {
                    let found = bench.scan_overdue(now);
                    assert_eq!(found, Overdue::default(), "{path}: request {name} at {now}");
                    (now, checks) = (now + LIMIT / 2, checks + 1);
                }
                bench.disk.step();
                answers = bench.turn();
            }
            assert_eq!(answers, [(name, Status::Ok)], "{path}");
            now += LIMIT;
        }
        assert_eq!(bench.queue.stats().overdue, 0, "{path}");
        assert!(bench.queue.stats().continued > 50, "{path}: faults were met");
    }
}

/// One that is begun again and again after faults stays as old as it is.
#[test]
fn c08_a_request_that_never_gets_on_grows_old() {
    let mut bench = Bench::new(SchedulerMode::Bio, Faults { again: 900, ..Faults::default() });
    bench.ask(0, Op::Read, 0, 4096);
    assert_eq!(bench.scan_overdue(0), Overdue::default());
    let mut answers = Vec::new();
    while answers.is_empty() && bench.queue.stats().continued < 3 {
        bench.disk.step();
        answers = bench.turn();
    }
    assert!(answers.is_empty(), "the seed is one of a request that is begun again three times");
    assert_eq!(bench.scan_overdue(LIMIT).requests, 1);
}
