//! A worker allocates nothing for the requests of a connection once that is served.
#![allow(missing_docs)]

use ringway_aio::Null;
use ringway_disk::{EngineKind, Source};
use ringway_export::WorkerOptions;
use ringway_nbd::Pool;
use ringway_testkit::nbd::{Client, EXTENDED, NbdRig, SIMPLE, STRUCTURED, command as c, flag};
use ringway_testkit::rig::RigOptions;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Allocations of workers.
static COUNT: AtomicU64 = AtomicU64::new(0);

fn count() {
    if IS_WORKER.try_with(Cell::get).unwrap_or(false) {
        COUNT.fetch_add(1, SeqCst);
    }
}

struct Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller vouches for both.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller vouches for all three.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests of every kind, many at a time, of which some are refused and some do not fit the socket.
fn work(client: &mut Client) {
    for round in 0..40u64 {
        let mut asked = 0;
        for at in 0..32u64 {
            let range = (4096 * at, 4096);
            match (round + at) % 8 {
                0 => client.ask(c::WRITE, flag::FUA, at, range, &[1; 4096]),
                1 => client.ask(c::FLUSH, 0, at, (0, 0), &[]),
                2 => client.ask(c::READ, 0, at, (0, 1 << 20), &[]),
                3 => client.ask(c::CACHE, 0, at, range, &[]),
                4 => client.ask(c::WRITE, 0, at, (1 << 40, 4096), &[1; 4096]),
                5 => client.ask(c::BLOCK_STATUS, 0, at, range, &[]),
                6 => client.ask(c::WRITE, 0, at, (0, 65536), &[1; 65536]),
                _ => client.ask(c::READ, 0, at, range, &[]),
            }
            asked += 1;
        }
        for _ in 0..asked {
            client.reply().expect("the connection goes on");
        }
    }
}

#[test]
fn no_request_allocates() {
    let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
    let options = RigOptions::new(source, EngineKind::Null).queues(3, 1);
    let disk = Arc::new(ringway_disk::open(&options.disk).unwrap());
    let pool = Pool::with_engines(1, WorkerOptions::default(), Arc::new(|| {}), |_| {
        IS_WORKER.set(true);
        Null::new(1024)
    });
    let rig = NbdRig::with_pool(disk, pool.unwrap(), &options, Duration::from_secs(20));
    let mut clients = [SIMPLE, STRUCTURED, EXTENDED].map(|mode| Client::new(rig.connect(), mode));
    // Channels and tables have their rooms after the first of each.
    clients.iter_mut().for_each(work);
    let before = COUNT.load(SeqCst);
    assert!(before > 0, "workers are counted");
    clients.iter_mut().for_each(work);
    assert_eq!(COUNT.load(SeqCst) - before, 0, "allocations of 3840 requests");
}
