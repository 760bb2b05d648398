//! A disk that finds out by itself whether its requests are to be merged: what its queues tell of
//! themselves, and when they follow.

use crate::bench::{Ask, Bench, Memory, engine};
use ringway_aio::{Engine, Fault, Faulty, Io};
use ringway_core::{Op, Status};
use ringway_disk::{Alignment, CacheMode, CustomDisk, Policy, SchedulerMode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const LEN: u64 = 4096;
const MS: u64 = 1_000_000;

type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;

/// Neighbours that come so many at a time.
struct Load {
    op: Op,
    at_once: u64,
    /// Nanoseconds that an operation takes.
    cost: u64,
    /// Nanoseconds without any, behind them.
    pause: u64,
}

impl Load {
    /// Has a disk carry this load for so many turns of its queue. True if merging was tried, and if it
    /// was chosen.
    fn carry(&self, turns: u64) -> (bool, bool) {
        let operations = Arc::new(AtomicU64::new(0));
        let (mut bench, memory) = (bench(Arc::clone(&operations)), Memory::new(64 << 10, 0));
        let disk = Arc::clone(bench.queue.disk());
        let (mut now, mut tried) = (1000 * MS, false);
        disk.set_now(now);
        for turn in 0..turns {
            for n in 0..self.at_once {
                let offset = (turn * self.at_once + n) * LEN % disk.capacity();
                bench.start(&memory, Ask::new(self.op, offset, LEN), n);
            }
            bench.queue.unplug(&mut bench.engine);
            now += operations.swap(0, SeqCst) * self.cost;
            disk.set_now(now);
            assert!(bench.finish().iter().all(|answer| answer.status == Status::Ok));
            now += self.pause;
            disk.set_now(now);
            tried |= disk.policy().present() == Policy::Request;
        }
        (tried, disk.policy().chosen() == Policy::Request)
    }
}

/// A queue on an engine that keeps nothing, and counts its operations.
fn bench(operations: Arc<AtomicU64>) -> Bench<Faulty<Box<dyn Engine>, Choice>> {
    let count: Choice = Box::new(move |_| {
        operations.fetch_add(1, SeqCst);
        None
    });
    let engine = Faulty::new(engine("null", 64).unwrap(), 512, count);
    let disk = CustomDisk {
        bytes: 64 << 20,
        cache: CacheMode::None,
        alignment: Alignment { memory: 512, offset: 512 },
        block_device: false,
        path: SchedulerMode::Auto,
    };
    Bench::new(engine, Arc::new(disk.open(None).unwrap()), 16).unwrap()
}

/// Merging is tried where two or more requests are in flight on the average, and each takes the disk
/// half a microsecond or more.
#[test]
fn merging_is_tried_where_it_may_win() {
    // Two at a time are one and a half on the average, four are two and a half.
    for (at_once, cost, tried) in
        [(2, 10_000, false), (4, 10_000, true), (4, 250, false), (4, 400, true)]
    {
        let load = Load { op: Op::Read, at_once, cost, pause: MS };
        assert_eq!(load.carry(512).0, tried, "{at_once} at a time, of {cost} ns");
    }
}

/// An operation costs the same whatever its length: what is merged is carried in a quarter of the
/// time.
#[test]
fn merging_is_chosen_where_it_carries_more() {
    for op in [Op::Read, Op::Write] {
        let load = Load { op, at_once: 4, cost: MS / 4, pause: 0 };
        assert_eq!(load.carry(4096), (true, true), "{op:?}");
    }
}
