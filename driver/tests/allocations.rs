//! Nothing is allocated for reads and writes once a queue was made, on any path.

use ringway_disk::{EngineKind, SimModel, Source};
use ringway_driver::{BlkQueue, Buffer, Options, SchedulerMode};
use ringway_testkit::rig::{Rig, RigOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

thread_local! {
    /// Allocations of this thread; the server has its own.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller vouches for both.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller vouches for all three.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: u64 = 48;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Keeps streams and scattered requests in flight, batch by batch.
fn work(queue: &mut BlkQueue<u64>, free: &mut Vec<Buffer>, from: u64) {
    let mut next = from;
    for _ in 0..300 {
        while let Some(buffer) = free.pop() {
            let block = if next % 7 == 0 { next * 31 % 2000 } else { next % 2000 };
            let queued = if next % 16 < 8 {
                queue.read(block * 4096, buffer, next)
            } else {
                queue.write(block * 4096, buffer, next)
            };
            queued.unwrap();
            next += 1;
        }
        if next % 5 == 0 {
            queue.flush(0).unwrap();
        }
        assert!(queue.wait_for(3, PATIENCE).unwrap());
        free.extend(queue.completions().filter_map(|done| done.into_buffer()));
    }
}

#[test]
fn no_path_allocates_after_start() {
    for path in SchedulerMode::ALL {
        for packed in [false, true] {
            let ram = Source::Sim { model: SimModel::Ram, bytes: 16 << 20 };
            let mut rig = Rig::start(&RigOptions::new(ram, EngineKind::Sim(SimModel::Ram)));
            let options = Options::new().path(path).packed(packed);
            let mut device = options.over(rig.connect()).unwrap();
            let mut queue = device.queue::<u64>().unwrap();
            let mut free: Vec<_> = (0..DEPTH).map(|_| device.pool().alloc(4096).unwrap()).collect();
            // The first time through, the test's own list grows.
            work(&mut queue, &mut free, 1);
            let before = COUNT.get();
            work(&mut queue, &mut free, 100_000);
            assert_eq!(COUNT.get() - before, 0, "{path}, packed {packed}");
            let merged = queue.stats().path.merged > 0;
            assert!(path == SchedulerMode::Auto || merged == (path == SchedulerMode::Request));
        }
    }
}
