//! What operations do to files: data, vectors, zeroes, errors.

use super::rig::{BLOCK, Pages, Rig, TIMEOUT, content, fill};
use super::setting::{Mode, Suite, open};
use crate::engine::IoOp;
use crate::sys;
use fastrand::Rng;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) fn reads_and_writes(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 8, 8 << 20);
    let mut memory = Pages::new(4 << 20);
    for op in [IoOp::Write, IoOp::WriteDurable] {
        if op == IoOp::WriteDurable {
            rig.map(&memory);
        }
        for (round, len) in [BLOCK, 2 * BLOCK, 64 << 10, 1 << 20, 4 << 20].into_iter().enumerate() {
            let offset = (round * 5 * BLOCK) as u64;
            let expected = content(len, offset, 7);
            memory.bytes()[..len].copy_from_slice(&expected);
            let segment = [memory.segment(0, len)];
            assert_eq!(usize::try_from(rig.one(op, offset, &segment)), Ok(len));
            rig.judge(offset, &expected);
            memory.bytes().fill(0);
            assert_eq!(usize::try_from(rig.one(IoOp::Read, offset, &segment)), Ok(len));
            assert!(memory.bytes()[..len] == expected, "{len} bytes come back");
            assert!(memory.bytes()[len..].iter().all(|&b| b == 0), "nothing beyond is touched");
        }
    }
    if mode == Mode::Cached {
        let expected = content(777, 0, 8);
        memory.bytes()[3..780].copy_from_slice(&expected);
        let segment = [memory.segment(3, 777)];
        assert_eq!(rig.one(IoOp::Write, 12_345, &segment), 777);
        rig.judge(12_345, &expected);
    }
}

pub(super) fn vectors(suite: &Suite<'_>, mode: Mode) {
    let piece = if mode == Mode::Direct { BLOCK } else { 24 };
    let mut rig = suite.rig(mode, 4, 1024 * BLOCK);
    let mut memory = Pages::new(2048 * piece);
    for mapped in [false, true] {
        if mapped {
            rig.map(&memory);
        }
        for count in [1, 2, 3, 4, 5, 64, rig.engine.limits().max_segments.min(1024)] {
            let len = count * piece;
            // The pieces lie apart and in reverse, so that one that is misplaced shows.
            let segments: Vec<_> =
                (0..count).map(|i| memory.segment((count - 1 - i) * 2 * piece, piece)).collect();
            let expected = content(len, 0, count as u64);
            for (i, bytes) in expected.chunks(piece).enumerate() {
                let at = (count - 1 - i) * 2 * piece;
                memory.bytes()[at..at + piece].copy_from_slice(bytes);
            }
            assert_eq!(usize::try_from(rig.one(IoOp::Write, 0, &segments)), Ok(len));
            rig.judge(0, &expected);
            memory.bytes().fill(0);
            assert_eq!(usize::try_from(rig.one(IoOp::Read, 0, &segments)), Ok(len));
            for (i, bytes) in expected.chunks(piece).enumerate() {
                let at = (count - 1 - i) * 2 * piece;
                assert!(memory.bytes()[at..at + piece] == *bytes, "segment {i} of {count}");
            }
        }
    }
}

pub(super) fn sync(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let memory = Pages::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    rig.one(IoOp::Write, 0, &segment);
    assert_eq!(rig.one_without_data(IoOp::Sync, 0, 0), 0);
}

pub(super) fn zeroes(suite: &Suite<'_>, mode: Mode) {
    for (op, flags) in [(IoOp::PunchHole, sys::PUNCH_HOLE), (IoOp::ZeroRange, sys::ZERO_RANGE)] {
        let mut rig = suite.rig(mode, 4, 1 << 20);
        let before = content(1 << 20, 0, 3);
        rig.plain.write_all_at(&before, 0).unwrap();
        // SAFETY: no memory is involved.
        let host = sys::check(unsafe { libc::fallocate(rig.plain.as_raw_fd(), flags, 0, 4096) });
        let expected = host.map_or_else(|e| -e.raw_os_error().unwrap_or(0), |_| 0);
        // From the second block to beyond the end: the size must not change.
        assert_eq!(rig.one_without_data(op, 2 * 4096, 2 << 20), expected, "{op:?}");
        assert_eq!(rig.plain.metadata().unwrap().len(), 1 << 20);
        if expected == 0 {
            rig.judge(4096, &before[4096..8192]);
            rig.judge(8192, &vec![0; (1 << 20) - 8192]);
        } else {
            println!("contract: {op:?} is not for this file system ({expected})");
        }
    }
}

pub(super) fn short_at_the_end(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 3 * BLOCK + 512);
    let memory = Pages::new(2 * BLOCK);
    let segments = [memory.segment(0, BLOCK), memory.segment(BLOCK, BLOCK)];
    assert_eq!(rig.one(IoOp::Read, 2 * BLOCK as u64, &segments), 4096 + 512);
    assert_eq!(rig.one(IoOp::Read, 8 * BLOCK as u64, &segments), 0);
    assert_eq!(rig.one(IoOp::Read, 3 * BLOCK as u64, &segments[..1]), 512);
}

pub(super) fn errors(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 8, 1 << 20);
    let memory = Pages::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    let read_only = rig.engine.attach(&suite.open(mode, true, false)).unwrap();
    let write_only = rig.engine.attach(&suite.open(mode, false, true)).unwrap();
    // Good ones and bad ones in one batch: each gets its own.
    let batch = [
        (rig.id, IoOp::Write, 0, 4096),
        (read_only, IoOp::Write, 0, -libc::EBADF),
        (read_only, IoOp::WriteDurable, 0, -libc::EBADF),
        (rig.id, IoOp::Read, 1 << 63, -libc::EINVAL),
        (rig.id, IoOp::Read, u64::MAX, -libc::EINVAL),
        (write_only, IoOp::Read, 0, -libc::EBADF),
        (rig.id, IoOp::Read, (1 << 63) - 4096, -libc::EINVAL),
        (read_only, IoOp::Read, 0, 4096),
    ];
    let mut expected = Vec::new();
    for (file, op, offset, result) in batch {
        let tag = rig.queue_on(file, op, offset, BLOCK as u64, &segment).expect("depth 8");
        expected.push((tag, result));
    }
    rig.engine.submit().unwrap();
    rig.reap(batch.len());
    let mut found: Vec<_> = rig.out.done.iter().map(|d| (d.tag, d.result)).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
    if mode == Mode::Cached {
        let full = open(Path::new("/dev/full"), mode, true, true).unwrap();
        let full = rig.engine.attach(&full).unwrap();
        rig.queue_on(full, IoOp::Write, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), -libc::ENOSPC);
    }
    assert_eq!(rig.one(IoOp::Read, 0, &segment), 4096, "the engine is as good as before");
}

/// Reads and writes of random blocks, none overlapping; every read is verified.
pub(super) fn random_mix(suite: &Suite<'_>, mode: Mode) {
    const BLOCKS: usize = 128;
    const DEPTH: usize = 32;
    let seed = std::env::var("RINGWAY_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("contract: RINGWAY_SEED={seed}");
    let mut random = Rng::with_seed(seed);
    let mut rig = suite.rig(mode, 32, BLOCKS * BLOCK);
    let mut memory = Pages::new(DEPTH * BLOCK);
    if seed % 2 == 1 {
        rig.map(&memory);
    }
    let segments: Vec<_> = (0..DEPTH).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    // What each block holds, as the seed of its content; 0 is zeroes. Slots: (tag, block, write).
    let mut holds = [0u64; BLOCKS];
    let mut slots: Vec<Option<(u64, usize, Option<u64>)>> = vec![None; DEPTH];
    for _ in 0..400 {
        for slot in 0..DEPTH {
            let block = usize::try_from(random.u64(..BLOCKS as u64)).unwrap();
            if slots[slot].is_some() || slots.iter().flatten().any(|s| s.1 == block) {
                continue;
            }
            let offset = (block * BLOCK) as u64;
            let write = (random.bool()).then(|| random.u64(..) | 1);
            let bytes = &mut memory.bytes()[slot * BLOCK..][..BLOCK];
            match write {
                Some(seed) => fill(bytes, offset, seed),
                None => bytes.fill(0xee),
            }
            let op = match write {
                Some(seed) if seed % 8 == 1 => IoOp::WriteDurable,
                Some(_) => IoOp::Write,
                None => IoOp::Read,
            };
            let tag = rig.queue(op, offset, &segments[slot]).expect("a slot is free");
            slots[slot] = Some((tag, block, write));
        }
        rig.engine.submit().unwrap();
        rig.out.clear();
        while rig.engine.reap(&mut rig.out) == 0 {
            rig.engine.wait(Some(TIMEOUT)).unwrap();
        }
        for done in std::mem::take(&mut rig.out.done) {
            let mine = |s: &Option<(u64, usize, _)>| s.is_some_and(|s| s.0 == done.tag);
            let slot = slots.iter().position(mine).expect("a tag in flight");
            let (_, block, write) = slots[slot].take().expect("found");
            assert_eq!(done.result, 4096);
            let Some(seed) = write else {
                let offset = (block * BLOCK) as u64;
                let expected = match holds[block] {
                    0 => vec![0; BLOCK],
                    seed => content(BLOCK, offset, seed),
                };
                assert!(memory.bytes()[slot * BLOCK..][..BLOCK] == expected, "block {block}");
                continue;
            };
            holds[block] = seed;
        }
    }
    rig.reap(slots.iter().flatten().count());
}

pub(super) fn discard(suite: &Suite<'_>, device: &Path) {
    let engine = (suite.make)(4);
    if !engine.limits().ops.has(IoOp::Discard) {
        println!("contract: the engine does not offer discard");
        return;
    }
    let plain = OpenOptions::new().read(true).write(true).open(device).unwrap();
    plain.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    plain.sync_data().unwrap();
    let file = open(device, Mode::Direct, true, true).unwrap();
    let mut rig = Rig::new(engine, file, plain);
    assert_eq!(rig.one_without_data(IoOp::Discard, 64 << 10, 64 << 10), 0);
    rig.judge(0, &vec![1; 64 << 10]);
    // What a discarded range reads as is open; on the loop devices of the tests it is a hole.
    rig.judge(64 << 10, &vec![0; 64 << 10]);
    rig.judge(128 << 10, &vec![1; 64 << 10]);
    assert_eq!(rig.one_without_data(IoOp::PunchHole, 256 << 10, 4096), 0);
    rig.judge(256 << 10, &[0; 4096]);
    let rejected = rig.one_without_data(IoOp::Discard, 0, 100);
    assert_eq!(rejected, -libc::EINVAL, "not whole sectors");
}
