//! Queue, submit, reap: depth, tags, system calls, files that come and go.

use super::rig::{BLOCK, Pages, TIMEOUT};
use super::setting::{Mode, Suite};
use crate::engine::{Full, IoOp};
use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub(super) fn files_come_and_go(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let memory = Pages::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    for _ in 0..100 {
        let file = suite.open(mode, true, true);
        let id = rig.engine.attach(&file).unwrap();
        rig.queue_on(id, IoOp::Read, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), 4096);
        rig.engine.detach(id);
        assert_eq!(Arc::strong_count(&file), 1, "a detached file is let go");
    }
    let many: Vec<_> = (0..300)
        .map(|_| rig.engine.attach(&rig.file).expect("as many files as descriptors"))
        .collect();
    for id in many {
        rig.queue_on(id, IoOp::Read, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), 4096);
    }
}

pub(super) fn dropped_in_flight(suite: &Suite<'_>, mode: Mode) {
    for submit in [false, true] {
        let mut rig = suite.rig(mode, 64, 8 << 20);
        rig.plain.write_all_at(&vec![1; 8 << 20], 0).unwrap();
        rig.plain.sync_data().unwrap();
        let mut memory = Pages::new(4 << 20);
        let segments: Vec<_> = (0..64).map(|i| [memory.segment(i << 16, 1 << 16)]).collect();
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i << 17) as u64, segment).unwrap();
        }
        if submit {
            rig.engine.submit().unwrap();
        }
        let file = rig.file;
        drop(rig.engine);
        memory.bytes().fill(0x55);
        assert_eq!(Arc::strong_count(&file), 1, "the file is let go");
        thread::sleep(Duration::from_millis(20));
        assert!(memory.bytes().iter().all(|&b| b == 0x55), "nobody writes here any more");
    }
}

pub(super) fn full_then_not(suite: &Suite<'_>, mode: Mode) {
    for depth in [1, 4, 7] {
        let mut rig = suite.rig(mode, depth, 1 << 20);
        let memory = Pages::new(BLOCK);
        let segment = [memory.segment(0, BLOCK)];
        let depth = rig.engine.limits().depth;
        for _ in 0..20 {
            for _ in 0..depth {
                rig.queue(IoOp::Read, 0, &segment).expect("depth is what limits() says");
            }
            assert_eq!(rig.queue(IoOp::Read, 0, &segment), Err(Full));
            rig.engine.submit().unwrap();
            assert_eq!(rig.queue(IoOp::Read, 0, &segment), Err(Full), "done is not yet reaped");
            rig.reap(depth as usize);
            assert!(rig.out.done.iter().all(|d| d.result == 4096));
        }
    }
}

pub(super) fn each_tag_once(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 128, 1 << 20);
    let memory = Pages::new(128 * BLOCK);
    let segments: Vec<_> = (0..128).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    let mut in_flight = HashSet::new();
    let mut left = 3000;
    while left > 0 || !in_flight.is_empty() {
        while left > 0 && in_flight.len() < 128 {
            let at = left % 128;
            let tag = rig.queue(IoOp::Read, (at * BLOCK) as u64, &segments[at]).unwrap();
            assert!(in_flight.insert(tag));
            left -= 1;
        }
        rig.engine.submit().unwrap();
        rig.out.clear();
        if rig.engine.reap(&mut rig.out) == 0 {
            rig.engine.wait(Some(TIMEOUT)).unwrap();
        }
        for done in &rig.out.done {
            assert!(in_flight.remove(&done.tag), "tag {} is in flight", done.tag);
            assert_eq!(done.result, 4096);
        }
    }
    rig.engine.submit().unwrap();
    assert_eq!(rig.engine.reap(&mut rig.out), 0, "nothing is left");
    assert_eq!(rig.engine.counters().queued, 3000);
}

pub(super) fn few_system_calls(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 64, 1 << 20);
    rig.plain.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    let memory = Pages::new(64 * BLOCK);
    let segments: Vec<_> = (0..64).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    let mut rounds = Vec::new();
    for _ in 0..20 {
        let before = rig.engine.counters().syscalls;
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i * BLOCK) as u64, segment).unwrap();
        }
        rig.engine.submit().unwrap();
        // A busy worker would look again and again; the calls that sleeping costs depend on the disk.
        rig.out.clear();
        let start = Instant::now();
        while rig.out.done.len() < 64 && start.elapsed() < TIMEOUT {
            if rig.engine.reap(&mut rig.out) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(rig.out.done.len(), 64);
        rounds.push(rig.engine.counters().syscalls - before);
    }
    // A disk that is slow for a while answers one by one; it is not slow in most of the rounds.
    rounds.sort_unstable();
    // Exact: it is small.
    #[allow(clippy::cast_precision_loss)]
    let per_io = rounds[rounds.len() / 2] as f64 / 64.0;
    println!("contract: {per_io:.4} system calls per operation");
    assert!(per_io <= suite.syscalls_per_io_max, "{per_io} system calls per operation");
}

/// One after the other, each submitted by the call that sleeps for it: all come.
pub(super) fn submit_with_the_wait(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let memory = Pages::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    for _ in 0..50 {
        let tag = rig.queue(IoOp::Read, 0, &segment).unwrap();
        rig.out.clear();
        let start = Instant::now();
        rig.engine.submit_and_wait(Some(TIMEOUT)).unwrap();
        // A wait may end early.
        while rig.engine.reap(&mut rig.out) == 0 {
            assert!(start.elapsed() < TIMEOUT, "it was submitted");
            rig.engine.wait(Some(TIMEOUT)).unwrap();
        }
        assert_eq!((rig.out.done.len(), rig.out.done[0].tag), (1, tag));
        assert_eq!(rig.out.done[0].result, 4096);
    }
}
