//! A look at what a disk does not answer, through the whole back-end, by a clock of the test's own.

use ringway_core::Op;
use ringway_disk::{Alignment, CacheMode, CustomDisk, EngineKind, SchedulerMode, SimModel, Source};
use ringway_driver::{BlkQueue, Options};
use ringway_testkit::power_cut::{Faults, PowerCutEngine, SimulatedDisk, SimulatedSetup};
use ringway_testkit::rig::{Rig, RigOptions};
use std::time::{Duration, Instant};

const BYTES: u64 = 64 << 10;
const SECOND: u64 = 1_000_000_000;
const LIMIT: u64 = 30 * SECOND;
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk that does nothing before the test says so.
fn disk() -> SimulatedDisk {
    let bytes = usize::try_from(BYTES).unwrap();
    let setup = SimulatedSetup {
        bytes,
        granule: 512,
        erase_granule: 512,
        failed_flush_loses: false,
        faults: Faults::default(),
        lie: None,
        seed: 1,
    };
    SimulatedDisk::new(setup, &vec![0; bytes])
}

#[test]
fn c08_a_lost_completion_is_told_and_counted() {
    for path in [SchedulerMode::Bio, SchedulerMode::Request, SchedulerMode::Auto] {
        let disk = disk();
        let shape = CustomDisk {
            bytes: BYTES,
            cache: CacheMode::None,
            alignment: Alignment { memory: 512, offset: 512 },
            block_device: false,
            path,
        };
        let source = Source::Sim { model: SimModel::Ram, bytes: BYTES };
        let options = RigOptions::new(source, EngineKind::Sim(SimModel::Ram));
        let of_worker = disk.clone();
        let mut rig = Rig::with_engines(shape.open(None).unwrap(), &options, move || {
            PowerCutEngine::by_hand(&of_worker)
        });
        let mut device = Options::new().over(rig.connect()).unwrap();
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        let buffer = device.pool().alloc(8192).unwrap();
        queue.write(4096, buffer, ()).unwrap();
        queue.submit().unwrap();
        let begun = Instant::now();
        while rig.stats()[0].queues.first().is_none_or(|queue| queue.in_flight == 0) {
            assert!(begun.elapsed() < PATIENCE, "{path}: it does not begin");
            std::thread::yield_now();
        }
        let inspect = |now| {
            let found = rig.inspect(now, LIMIT);
            assert_eq!(found.len(), 1, "one queue");
            assert_eq!(found[0].lost_kicks, 0);
            found[0].overdue
        };
        assert_eq!(inspect(100 * SECOND).requests, 0, "{path}: met for the first time");
        assert_eq!(inspect(100 * SECOND + LIMIT - 1).requests, 0);
        let found = inspect(101 * SECOND + LIMIT);
        assert_eq!((found.requests, found.new), (1, 1), "{path}");
        let oldest = found.oldest.unwrap();
        assert_eq!((oldest.op, oldest.age_ns), (Op::Write, LIMIT + SECOND));
        assert_eq!((oldest.range.offset(), oldest.range.len()), (4096, 8192));
        let again = inspect(102 * SECOND + LIMIT);
        assert_eq!((again.requests, again.new), (1, 0), "{path}: counted once");
        let stats = &rig.stats()[0];
        assert_eq!((stats.queues[0].overdue, stats.disk.overdue), (1, 1), "{path}");

        // It comes at last, and ends as any other; the next one in its place is young.
        let mut answer = || {
            while queue.completions().next().is_none_or(|answer| !answer.is_ok()) {
                assert!(begun.elapsed() < PATIENCE, "{path}: no answer");
                disk.step();
                std::thread::yield_now();
            }
        };
        answer();
        let gone = inspect(200 * SECOND);
        assert_eq!((gone.requests, gone.oldest), (0, None), "{path}");
        let stats = &rig.stats()[0];
        assert_eq!((stats.queues[0].overdue, stats.disk.overdue), (0, 1), "{path}");
        assert_eq!(stats.disk.written_bytes, 8192);
        drop((queue, device));
    }
}
