//! Disks of any shape, on an engine that keeps nothing and writes down what it is asked for: what a
//! queue makes of requests, and what it tells of them.

use crate::bench::{Ask, Bench, Memory, engine};
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp, Limits, OpSet};
use ringway_core::mem::HostRange;
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{
    Alignment, CacheMode, CustomDisk, Detours, Disk, DiskStats, ErrorPolicy, FailedOp, Incidents,
    Oldest, OnError, OpenOptions, Overdue, ResizeError, SchedulerMode, Source, Watcher, open,
};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const KIB: u64 = 1024;
const SECOND: u64 = 1_000_000_000;
const BYTES: u64 = 64 << 20;

/// What an engine was asked for: what, where, how long, in how many pieces of memory.
type Asked = Arc<Mutex<Vec<(IoOp, u64, u64, usize)>>>;
type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;
type Recorded = Bench<Faulty<Box<dyn Engine>, Choice>>;

const SHAPE: CustomDisk = CustomDisk {
    bytes: BYTES,
    cache: CacheMode::None,
    alignment: Alignment { memory: 512, offset: 4096 },
    block_device: false,
    path: SchedulerMode::Bio,
};

const FLUSH: Ask = Ask { op: Op::Flush, offset: 0, len: 0, at: 0, unmap: false };

/// An engine of `depth` operations, of which `fault` befalls all that move data.
fn recorder(depth: u32, fault: Option<Fault>) -> (Faulty<Box<dyn Engine>, Choice>, Asked) {
    let asked = Asked::default();
    let seer = Arc::clone(&asked);
    let choose: Choice = Box::new(move |io| {
        let pieces = io.memory.segments().len();
        seer.lock().unwrap().push((io.op, io.offset, io.len, pieces));
        fault.filter(|_| io.op.moves_data())
    });
    (Faulty::new(engine("null", depth).unwrap(), 512, choose), asked)
}

/// A disk of a shape, and what its engine was asked for. The engine's limits may be others.
fn bench(shape: CustomDisk, change: impl FnOnce(&mut Limits)) -> (Recorded, Asked) {
    let (engine, asked) = recorder(64, None);
    let disk = Arc::new(shape.open(Some("a serial")).unwrap());
    (Bench::limited(engine, disk, 16, change).unwrap(), asked)
}

fn take(asked: &Asked) -> Vec<(IoOp, u64, u64, usize)> {
    std::mem::take(&mut *asked.lock().unwrap())
}

#[test]
fn each_request_is_counted_where_it_belongs() {
    let (mut bench, _) = bench(SHAPE, |_| ());
    let memory = Memory::new(64 << 10, 0);
    let page = 4 * KIB;
    let good = [
        Ask::new(Op::Read, 0, page),
        Ask::new(Op::Read, page, 2 * page),
        Ask::new(Op::Read, 0, page),
        Ask::new(Op::Write, page, 4 * page),
        Ask::new(Op::Write, page, page),
        FLUSH,
        Ask::new(Op::Discard, 0, page),
        Ask::new(Op::WriteZeroes, 0, page),
        Ask::new(Op::WriteZeroes, 0, page),
    ];
    for ask in good {
        bench.start(&memory, ask, 0);
        let answer = bench.finish().remove(0);
        assert_eq!(answer.status, Status::Ok, "{ask:?}");
        let read = if ask.op == Op::Read { ask.len } else { 0 };
        assert_eq!(u64::from(answer.written), read, "{ask:?}: bytes in the guest's memory");
    }
    // Up to the last byte, and not beyond it.
    assert_eq!(bench.one(&memory, Ask::new(Op::Read, BYTES - page, page)), Status::Ok);
    for _ in 0..2 {
        let beyond = Ask::new(Op::Read, BYTES - page + 512, page);
        assert_eq!(bench.one(&memory, beyond), Status::IoError);
    }
    bench.queue.count_refused();
    let expected = DiskStats {
        reads: 4,
        read_bytes: 5 * page,
        writes: 2,
        written_bytes: 5 * page,
        flushes: 1,
        syncs: 1,
        erases: 3,
        errors: 3,
        refused: 3,
        ..DiskStats::default()
    };
    assert_eq!(bench.queue.stats(), expected);
}

#[test]
fn bytes_of_durable_writes_are_counted_and_others_are_not() {
    let memory = Memory::new(64 << 10, 0);
    for (cache, durable) in [(CacheMode::None, true), (CacheMode::Unsafe, false)] {
        let (mut bench, asked) = bench(CustomDisk { cache, ..SHAPE }, |_| ());
        for durable in [false, true] {
            bench.queue.set_durable_writes(durable);
            for op in [Op::Read, Op::Write, Op::Write] {
                assert_eq!(bench.one(&memory, Ask::new(op, 0, 8 * KIB)), Status::Ok);
            }
        }
        let bytes = if durable { 16 * KIB } else { 0 };
        assert_eq!(bench.queue.stats().durable_bytes, bytes, "{cache:?}");
        let last = if durable { IoOp::WriteDurable } else { IoOp::Write };
        let ops: Vec<_> = take(&asked).iter().map(|asked| asked.0).collect();
        let all = [IoOp::Read, IoOp::Write, IoOp::Write, IoOp::Read, last, last];
        assert_eq!(ops, all, "{cache:?}");
        // Nothing is lost by this cache but by a power cut, which its owner has said does not matter.
        assert_eq!(bench.one(&memory, FLUSH), Status::Ok);
        assert_eq!(take(&asked).len(), usize::from(durable), "{cache:?}: a sync of the file");
    }
}

#[test]
fn a_disk_that_is_read_only_changes_nothing_and_says_so() {
    let memory = Memory::new(64 << 10, 0);
    let mut options = OpenOptions::new(Source::Null { bytes: BYTES, latency_us: 0 });
    for read_only in [false, true] {
        options.read_only = read_only;
        let disk = Arc::new(open(&options).unwrap());
        let discard = disk.geometry().discard;
        let (engine, asked) = recorder(64, None);
        let mut bench = Bench::new(engine, disk, 16).unwrap();
        let changed = if read_only { Status::IoError } else { Status::Ok };
        let discarded = if discard { changed } else { Status::Unsupported };
        for (op, status) in [
            (Op::Read, Status::Ok),
            (Op::Write, changed),
            (Op::WriteZeroes, changed),
            (Op::Discard, if read_only { Status::IoError } else { discarded }),
            (Op::Flush, Status::Ok),
        ] {
            assert_eq!(bench.one(&memory, Ask::new(op, 0, 4 * KIB)), status, "{op:?} {read_only}");
        }
        let asked = take(&asked);
        let others = asked.iter().filter(|asked| asked.0 != IoOp::Read).count();
        assert_eq!(others == 0, read_only, "{asked:?}");
    }
}

#[test]
fn the_serial_is_what_get_id_reads() {
    let (mut bench, asked) = bench(SHAPE, |_| ());
    let mut memory = Memory::new(64 << 10, 0);
    for len in [32, 20, 5] {
        memory.bytes().fill(0xee);
        let ask = Ask { op: Op::GetId, offset: 0, len: 0, at: 0, unmap: false };
        bench.start_pieces(&[memory.segment(0, 2), memory.segment(100, len - 2)], ask, 0);
        let answer = bench.finish().remove(0);
        assert_eq!((answer.status, answer.written as usize), (Status::Ok, len));
        let mut right = [0; 32];
        right[..8].copy_from_slice(b"a serial");
        let bytes = memory.bytes();
        assert_eq!([&bytes[..2], &bytes[100..98 + len]].concat(), right[..len]);
        assert_eq!((bytes[2], bytes[98 + len]), (0xee, 0xee));
    }
    assert_eq!(take(&asked), []);
}

/// The dirty log of a migration: what is read from the disk is written to memory, also if only a part
/// of it came.
#[test]
fn who_watches_memory_is_told_of_what_may_have_been_written() {
    let memory = Memory::new(64 << 10, 0);
    let base = memory.segment(0, 1).base as usize;
    for fault in [None, Some(Fault::Error(libc::EIO))] {
        let (engine, _) = recorder(64, fault);
        let disk = Arc::new(SHAPE.open(None).unwrap());
        let mut bench = Bench::new(engine, disk, 16).unwrap();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let ear = Arc::clone(&reported);
        bench.queue.watch_memory(Some(Watcher::new(move |segments| {
            let pieces = segments.iter().map(|piece| (piece.base as usize - base, piece.len));
            ear.lock().unwrap().extend(pieces);
        })));
        for op in [Op::Write, Op::Flush, Op::WriteZeroes, Op::Read] {
            bench.one(&memory, Ask::new(op, 0, 8 * KIB).at(4096));
        }
        bench.queue.watch_memory(None);
        bench.one(&memory, Ask::new(Op::Read, 0, 8 * KIB));
        assert_eq!(*reported.lock().unwrap(), [(4096, 8192)], "{fault:?}");
    }
}

/// Memory is unmapped, and disks are made smaller, when nobody uses what goes.
#[test]
fn what_requests_in_flight_use_is_known() {
    let (mut bench, _) = bench(SHAPE, |_| ());
    let memory = Memory::new(64 << 10, 0);
    let first = memory.segment(4096, 1).base as usize;
    let uses = |bench: &Recorded, ranges: &[HostRange]| bench.queue.uses(ranges, |_| false);
    let everywhere = [(0, usize::MAX)];
    assert!(!uses(&bench, &everywhere) && !bench.queue.reaches_beyond(0));
    bench.start(&memory, Ask::new(Op::Read, 64 * KIB, 8 * KIB).at(4096), 5);
    assert!(bench.queue.reaches_beyond(72 * KIB - 1) && !bench.queue.reaches_beyond(72 * KIB));
    let beside = [(first - 4096, first - 1), (first + 8192, first + 16384)];
    assert!(!uses(&bench, &beside), "neighbours");
    for (from, to) in [(first - 1, first), (first + 8191, first + 8191), (first + 10, first + 11)] {
        assert!(uses(&bench, &[(0, 1), (from, to)]), "{from} to {to} of {first}");
    }
    assert!(bench.queue.uses(&[], |&context| context == 5));
    assert!(!bench.queue.uses(&[], |&context| context == 6));
    bench.finish();
    assert!(!uses(&bench, &everywhere) && !bench.queue.reaches_beyond(0));
    // Refused at once; its answer has not been taken yet.
    bench.start(&memory, Ask::new(Op::Read, BYTES, 8 * KIB), 7);
    assert!(bench.queue.has_late() && bench.queue.uses(&[], |&context| context == 7));
    assert!(!bench.queue.uses(&everywhere, |&context| context == 6), "the memory is free");
    bench.queue.take_late().unwrap();
    assert!(!bench.queue.has_late() && !bench.queue.uses(&[], |_| true));
}

#[test]
fn slots_are_handed_out_once_and_come_back() {
    let (mut bench, _) = bench(SHAPE, |_| ());
    let tags: Vec<_> = std::iter::from_fn(|| bench.queue.acquire()).collect();
    assert_eq!((tags.len(), bench.queue.in_flight()), (16, 16));
    for &tag in &tags[..15] {
        bench.queue.abandon(tag);
    }
    assert_eq!(bench.queue.in_flight(), 1);
    bench.queue.abandon(tags[15]);
    assert_eq!((bench.queue.in_flight(), bench.queue.has_deferred()), (0, false));
}

/// What finds no room in the engine waits for its turn, in order, and other queues have theirs.
#[test]
fn a_full_engine_gets_the_rest_later() {
    for path in [SchedulerMode::Bio, SchedulerMode::Request] {
        let (engine, asked) = recorder(2, None);
        let disk = Arc::new(CustomDisk { path, ..SHAPE }.open(None).unwrap());
        let mut bench = Bench::new(engine, disk, 16).unwrap();
        let memory = Memory::new(64 << 10, 0);
        let offset = |n: u64| n * 64 * KIB;
        (0..7).for_each(|n| bench.start(&memory, Ask::new(Op::Read, offset(n), 4 * KIB), n));
        bench.queue.unplug(&mut bench.engine);
        let places = || -> Vec<_> { asked.lock().unwrap().iter().map(|asked| asked.1).collect() };
        assert!(bench.queue.has_deferred(), "{path}");
        let answers = bench.finish();
        assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{path}");
        assert_eq!((answers.len(), bench.queue.in_flight()), (7, 0), "{path}");
        // The full engine was asked again and again; it has written down each time.
        let mut places = places();
        places.dedup();
        assert!((0..7).all(|n| places.contains(&offset(n))), "{path}: {places:?}");
        assert!(places.is_sorted(), "{path}: {places:?}");
        assert!(!bench.queue.has_deferred(), "{path}");
    }
}

#[test]
fn parts_keep_within_the_limits_of_the_engine() {
    let mut memory = Memory::new(1 << 20, 0);
    memory.bytes().fill(0);
    for (cache, split) in [(CacheMode::None, 1), (CacheMode::Writeback, 0)] {
        let shape = CustomDisk { cache, ..SHAPE };
        // A limit that is no multiple of a block: parts are.
        let (mut bench, asked) = bench(shape, |limits| limits.max_bytes = 13_000);
        assert_eq!(bench.one(&memory, Ask::new(Op::Read, 4096, 28 * KIB)), Status::Ok);
        let (read, part) = (IoOp::Read, 12 * KIB);
        let right = [(read, 4096, part, 1), (read, 4096 + part, part, 1)];
        assert_eq!(take(&asked), [&right[..], &[(read, 4096 + 2 * part, 4096, 1)]].concat());
        assert_eq!((bench.queue.stats().split, bench.queue.stats().bounced), (split, 0));
        // One that fits is no detour.
        assert_eq!(bench.one(&memory, Ask::new(Op::Read, 4096, part)), Status::Ok);
        assert_eq!(take(&asked), [right[0]]);
        assert_eq!(bench.queue.stats().split, split);
    }
    let (mut bench, asked) = bench(SHAPE, |limits| limits.max_segments = 2);
    let pieces: Vec<_> = (0..5).map(|n| memory.segment(n * 8192, 4096)).collect();
    for (count, parts) in [(5, &[2, 2, 1][..]), (2, &[2]), (3, &[2, 1])] {
        let ask = Ask::new(Op::Write, 0, count as u64 * 4096);
        bench.start_pieces(&pieces[..count], ask, 0);
        assert_eq!(bench.finish()[0].status, Status::Ok);
        let found: Vec<_> = take(&asked).iter().map(|asked| asked.3).collect();
        assert_eq!(found, parts);
    }
    assert_eq!(bench.queue.stats().split, 2);
}

/// Only what the file does not take goes through memory of ours.
#[test]
fn what_the_file_takes_is_not_bounced() {
    let (mut bench, asked) = bench(SHAPE, |_| ());
    let memory = Memory::new(64 << 10, 0);
    let cases = [
        // Offset, length, place in memory, operations for a write.
        (0, 4096, 0, 1, 0),
        (8192, 8192, 512, 1, 0),
        (0, 4096, 511, 1, 1),
        (512, 4096, 0, 2, 1),
        (0, 512, 0, 2, 1),
        (512, 7 * 512, 512, 2, 1),
    ];
    let mut expected = 0;
    for (offset, len, at, operations, bounced) in cases {
        for op in [Op::Write, Op::Read] {
            assert_eq!(bench.one(&memory, Ask::new(op, offset, len).at(at)), Status::Ok);
            expected += bounced;
            let what = format!("{op:?} {offset} {len} {at}");
            assert_eq!(bench.queue.stats().bounced, expected, "{what}");
            let found = take(&asked);
            assert_eq!(found.len(), if op == Op::Write { operations } else { 1 }, "{what}");
            let whole = |asked: &(IoOp, u64, u64, usize)| (asked.1 | asked.2) % 4096 == 0;
            assert!(found.iter().all(whole), "{what}: {found:?}");
        }
    }
    bench.start(&memory, Ask::new(Op::Read, 0, 4096).at(1), 0);
    assert_eq!(bench.queue.bounce_bytes(), 4096);
    bench.finish();
    expected += 1;
    // Pieces of memory that are no multiples of a block.
    let pieces = [memory.segment(0, 512), memory.segment(4096, 4096 - 512)];
    bench.start_pieces(&pieces, Ask::new(Op::Read, 0, 4096), 0);
    assert_eq!(bench.finish()[0].status, Status::Ok);
    assert_eq!(bench.queue.stats().bounced, expected + 1);
}

/// What is bounced goes piece by piece, each in at most 1 MiB of ours, and all but the first begin on a block.
#[test]
fn what_is_bounced_goes_in_pieces_of_a_mebibyte() {
    const MIB: u64 = 1 << 20;
    let (read, write) = (IoOp::Read, IoOp::Write);
    let memory = Memory::new(3 << 20, 0);
    let (mut bench, asked) = bench(SHAPE, |_| ());
    // Two and a half, beginning and ending within blocks.
    let (from, first) = (2 * MIB + 3 * 4096, 512);
    let ask = |op| Ask::new(op, from + first, 5 * MIB / 2).at(1);
    assert_eq!(bench.one(&memory, ask(Op::Read)), Status::Ok);
    let places = [from, from + MIB, from + 2 * MIB];
    let lens = [MIB, MIB, MIB / 2 + 4096];
    let all = |op: IoOp| [0, 1, 2].map(|n| (op, places[n], lens[n], 1));
    assert_eq!(take(&asked), all(read));
    assert_eq!(bench.one(&memory, ask(Op::Write)), Status::Ok);
    let [start, middle, end] = all(write);
    assert_eq!(take(&asked), [all(read)[0], start, middle, all(read)[2], end]);
    assert_eq!(bench.queue.stats().bounced, 2);
}

/// Who changes a part of a block reads it first: nobody else writes to the block meanwhile.
#[test]
fn writes_wait_for_those_in_the_same_block_and_for_no_others() {
    let memory = Memory::new(64 << 10, 0);
    let part = Ask::new(Op::Write, 512, 512);
    let whole = Ask::new(Op::Write, 0, 4096);
    let zeroes = Ask::new(Op::WriteZeroes, 0, 4096);
    let elsewhere = Ask::new(Op::Write, 4096, 4096);
    let read = Ask::new(Op::Read, 0, 4096);
    for path in [SchedulerMode::Bio, SchedulerMode::Request] {
        for (first, second, waits) in [
            (part, part, true),
            (part, whole, true),
            (part, zeroes, true),
            (whole, part, true),
            (zeroes, part, true),
            (part, elsewhere, false),
            (part, read, false),
        ] {
            let what = format!("{path}: {first:?}, then {second:?}");
            let (mut bench, asked) = bench(CustomDisk { path, ..SHAPE }, |_| ());
            bench.start(&memory, first, 0);
            bench.start(&memory, second, 1);
            bench.queue.unplug(&mut bench.engine);
            assert_eq!(asked.lock().unwrap().len(), if waits { 1 } else { 2 }, "{what}");
            assert_eq!(bench.queue.has_deferred(), waits, "{what}");
            let answers = bench.finish();
            assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{what}");
            // The lock is free again.
            assert_eq!(bench.one(&memory, part), Status::Ok, "{what}");
        }
    }
    // Sectors by themselves need no lock, and guests that write one twice at a time get what they ask for.
    let alignment = Alignment { memory: 512, offset: 512 };
    let (mut bench, asked) = bench(CustomDisk { alignment, ..SHAPE }, |_| ());
    (0..2).for_each(|context| bench.start(&memory, part.at(1), context));
    assert_eq!((asked.lock().unwrap().len(), bench.queue.has_deferred()), (2, false));
    bench.finish();
}

/// The host tells one sync of a file that data is lost, and syncs take places that all disks share: so there is one
/// at a time, and those that come meanwhile share the next.
#[test]
fn flushes_share_a_sync_and_there_is_one_at_a_time() {
    let memory = Memory::new(4096, 0);
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let (mut bench, asked) = bench(CustomDisk { cache, ..SHAPE }, |_| ());
        (0..3).for_each(|context| bench.start(&memory, FLUSH, context));
        assert_eq!((take(&asked).len(), bench.queue.has_deferred()), (1, true), "{cache:?}");
        assert!(bench.finish().iter().all(|answer| answer.status == Status::Ok), "{cache:?}");
        assert_eq!((bench.queue.stats().syncs, bench.queue.stats().flushes), (2, 3), "{cache:?}");
    }
}

/// Zeroing by the file, and discarding, is durable after a sync only.
#[test]
fn what_erases_is_followed_by_a_sync_where_writes_are_durable() {
    let memory = Memory::new(4096, 0);
    for (durable, syncs) in [(false, 0), (true, 1)] {
        let (mut bench, asked) = bench(CustomDisk { block_device: true, ..SHAPE }, |_| ());
        bench.queue.set_durable_writes(durable);
        let mut ops = |op, offset| {
            assert_eq!(bench.one(&memory, Ask::new(op, offset, 4096)), Status::Ok);
            take(&asked).iter().map(|asked| asked.0).collect::<Vec<_>>()
        };
        for (op, first) in [(Op::WriteZeroes, IoOp::PunchHole), (Op::Discard, IoOp::Discard)] {
            let right = [&[first][..], &[IoOp::Sync][..syncs]].concat();
            assert_eq!(ops(op, 4096), right, "{op:?} {durable}");
        }
        // Zeroes that are written, as they are no whole block, are durable by themselves.
        let write = if durable { IoOp::WriteDurable } else { IoOp::Write };
        assert_eq!(ops(Op::WriteZeroes, 512), [IoOp::Read, write], "{durable}");
    }
}

/// What is found in several queues is added up; of the oldest the first is told.
#[test]
fn what_scans_have_found_is_added_up() {
    let oldest = |age_ns, offset| {
        let range = ByteRange::new(offset, 512).unwrap();
        Some(Oldest { op: Op::Read, range, age_ns })
    };
    let mut sum = Overdue::default();
    for (requests, new, age, offset) in
        [(2, 1, 5, 0), (3, 2, 7, 512), (1, 0, 7, 1024), (4, 4, 6, 0)]
    {
        sum.add(&Overdue { requests, new, oldest: oldest(age, offset) });
    }
    assert_eq!(sum, Overdue { requests: 10, new: 7, oldest: oldest(7, 512) });
}

/// Files and block devices erase by different calls, each in blocks of its own, if at all.
#[test]
fn what_erases_is_asked_for_as_the_file_has_it() {
    let memory = Memory::new(64 << 10, 0);
    let none = OpSet::ALL.without(IoOp::PunchHole).without(IoOp::ZeroRange).without(IoOp::Discard);
    let file = SHAPE;
    let device = CustomDisk { block_device: true, ..SHAPE };
    let by_writing = [IoOp::Write];
    let within = [IoOp::Read, IoOp::Write];
    let zeroes = |unmap| Ask { unmap, ..Ask::new(Op::WriteZeroes, 0, 8 * KIB) };
    // Without the flag that only write-zeroes has.
    let discard = Ask { unmap: false, ..Ask::new(Op::Discard, 0, 8 * KIB) };
    // A part of a block.
    let part = |ask| Ask { len: 512, ..ask };
    let cases: [(CustomDisk, OpSet, Ask, &[IoOp]); 14] = [
        (file, OpSet::ALL, discard, &[IoOp::PunchHole]),
        (file, OpSet::ALL, zeroes(true), &[IoOp::PunchHole]),
        (file, OpSet::ALL, zeroes(false), &[IoOp::ZeroRange]),
        (file, OpSet::ALL, part(zeroes(false)), &[IoOp::ZeroRange]),
        (device, OpSet::ALL, discard, &[IoOp::Discard]),
        (device, OpSet::ALL.without(IoOp::Discard), discard, &[IoOp::PunchHole]),
        (device, OpSet::ALL, zeroes(true), &[IoOp::PunchHole]),
        (device, OpSet::ALL, zeroes(false), &[IoOp::ZeroRange]),
        (device, OpSet::ALL, part(discard), &[]),
        (device, OpSet::ALL, part(zeroes(true)), &within),
        (file, none, discard, &[]),
        (file, none, zeroes(true), &by_writing),
        (file, none, zeroes(false), &by_writing),
        (device, none, discard, &[]),
    ];
    for (shape, ops, ask, right) in cases {
        let what = format!("{ask:?} of {shape:?} with {ops:?}");
        let (mut bench, asked) = bench(shape, |limits| limits.ops = ops);
        assert_eq!(bench.one(&memory, ask), Status::Ok, "{what}");
        let found: Vec<_> = take(&asked).iter().map(|asked| asked.0).collect();
        assert_eq!(found, right, "{what}");
        // Nothing at all is done at once.
        let nothing = Ask { len: 0, ..ask };
        assert_eq!(bench.one(&memory, nothing), Status::Ok, "{what}");
        assert_eq!(take(&asked), [], "{what}");
    }
}

/// So many detours are told that somebody may look for another cache mode or other buffers.
#[test]
fn many_detours_are_told_with_how_many_requests_they_were_of() {
    let (mut bench, _) = bench(SHAPE, |limits| limits.max_bytes = 8192);
    let memory = Memory::new(64 << 10, 0);
    let disk = Arc::clone(bench.queue.disk());
    disk.set_now(100 * SECOND);
    let rung = Arc::new(AtomicU64::new(0));
    let bell = Arc::clone(&rung);
    disk.incidents().on_incident(Box::new(move || {
        bell.fetch_add(1, SeqCst);
    }));
    // Bounced, split, and the same for writes.
    let kinds = [(Op::Read, 4096, 1), (Op::Read, 16384, 0), (Op::Write, 4096, 1)];
    for n in 0..4096 {
        let (op, len, at) = kinds[n % 3];
        assert_eq!(bench.one(&memory, Ask::new(op, 0, len).at(at)), Status::Ok);
    }
    assert_eq!((rung.load(SeqCst), disk.incidents().take_detours()), (0, None));
    assert_eq!(bench.one(&memory, Ask::new(Op::Read, 0, 4096).at(1)), Status::Ok);
    let reported = Detours { count: 4096, requests: 4096 };
    assert_eq!((rung.load(SeqCst), disk.incidents().take_detours()), (1, Some(reported)));
}

/// Where a request failed is told as where it has got to.
#[test]
fn the_place_of_a_failure_is_where_it_happened() {
    let memory = Memory::new(64 << 10, 0);
    let asked = Asked::default();
    let seer = Arc::clone(&asked);
    let choose: Choice = Box::new(move |io| {
        seer.lock().unwrap().push((io.op, io.offset, io.len, 0));
        (io.offset >= 24 * KIB).then_some(Fault::Error(libc::EIO))
    });
    let engine = Faulty::new(engine("null", 8).unwrap(), 512, choose);
    let disk = Arc::new(SHAPE.open(None).unwrap());
    let mut bench = Bench::limited(engine, disk, 4, |limits| limits.max_bytes = 8192).unwrap();
    assert_eq!(bench.one(&memory, Ask::new(Op::Read, 8 * KIB, 32 * KIB)), Status::IoError);
    let incidents = bench.queue.disk().incidents();
    let told: Vec<_> = (0..Incidents::KINDS).filter_map(|k| incidents.all(k)).collect();
    assert_eq!(told.len(), 1);
    let failure = told[0];
    assert_eq!((failure.errno, failure.sector, failure.count), (libc::EIO, Some(48), 1));
}

/// A front-end takes its memory away, or goes: its held requests fail, others stay.
#[test]
fn held_requests_fail_when_their_memory_goes() {
    let memory = Memory::new(64 << 10, 0);
    let (engine, _) = recorder(64, Some(Fault::Error(libc::EIO)));
    let disk = Arc::new(SHAPE.open(None).unwrap());
    let hold = ErrorPolicy { on_write: OnError::Hold, ..ErrorPolicy::default() };
    disk.set_error_policy(hold);
    assert_eq!(disk.error_policy(), hold);
    let mut bench = Bench::new(engine, disk, 16).unwrap();
    for n in 0..6 {
        let at = usize::try_from(n * 8192).unwrap();
        bench.start(&memory, Ask::new(Op::Write, n * 8192, 4096).at(at), n);
    }
    let mut answers = Vec::new();
    for _ in 0..8 {
        bench.turn(&mut answers);
    }
    assert_eq!((answers.len(), bench.queue.held()), (0, 6));
    let held = bench.queue.disk().held().unwrap();
    assert_eq!((held.count, held.op, held.errno), (6, FailedOp::Write, libc::EIO));
    assert!(held.retry_in.is_none() && held.reason().contains("os error 5"), "{held:?}");
    let first = memory.segment(2 * 8192, 1).base as usize;
    // The second one's memory, and who is behind the fourth and fifth.
    let ranges = [(first - 4096, first - 1), (first + 4095, first + 8191)];
    let count = bench.queue.fail_held_in(&mut bench.engine, &ranges, |&context| context >= 4);
    assert_eq!(count, 3);
    bench.turn(&mut answers);
    let mut failed: Vec<_> = answers.iter().map(|answer| (answer.context, answer.status)).collect();
    failed.sort_unstable_by_key(|failed| failed.0);
    assert_eq!(failed, [2, 4, 5].map(|n| (n, Status::IoError)));
    assert_eq!(bench.queue.held(), 3);
    assert_eq!(bench.queue.try_held(&mut bench.engine), 3);
    assert_eq!((bench.queue.held(), bench.queue.disk().held_under_way()), (0, 3));
    for _ in 0..8 {
        bench.turn(&mut answers);
    }
    assert_eq!((bench.queue.held(), answers.len()), (3, 3), "held again");
    assert_eq!(bench.queue.fail_held(&mut bench.engine, |_, _| true), 3);
    assert_eq!(bench.finish().len(), 3);
    assert_eq!(bench.queue.stats().held, 6);
}

/// A disk whose requests are held, and what befalls them at present.
struct Held {
    bench: Recorded,
    asked: Asked,
    broken: Arc<Mutex<Option<i32>>>,
    memory: Memory,
}

impl Held {
    /// For ten seconds at most; writes that fail for another reason than space are reported.
    fn new() -> Self {
        let (broken, asked) = (Arc::new(Mutex::new(Some(libc::ENOSPC))), Asked::default());
        let (seer, wrong) = (Arc::clone(&asked), Arc::clone(&broken));
        let choose: Choice = Box::new(move |io| {
            seer.lock().unwrap().push((io.op, io.offset, io.len, 0));
            wrong.lock().unwrap().map(Fault::Error)
        });
        let disk = SHAPE.open(None).unwrap();
        disk.set_error_policy(ErrorPolicy {
            on_read: OnError::Hold,
            on_write: OnError::Report,
            on_enospc: Some(OnError::Hold),
            hold_timeout: Some(Duration::from_secs(10)),
        });
        disk.set_now(10 * SECOND);
        let engine = Faulty::new(engine("null", 64).unwrap(), 512, choose);
        let bench = Bench::new(engine, Arc::new(disk), 16).unwrap();
        Self { bench, asked, broken, memory: Memory::new(64 << 10, 0) }
    }

    fn disk(&self) -> &Disk {
        self.bench.queue.disk()
    }

    fn break_by(&self, errno: Option<i32>) {
        *self.broken.lock().unwrap() = errno;
    }

    fn start(&mut self, op: Op, names: std::ops::Range<u64>) {
        names.for_each(|n| self.bench.start(&self.memory, Ask::new(op, n * 4096, 4096), n));
    }

    /// At so many seconds; looks after what is held.
    fn tend(&mut self, at: u64) {
        self.disk().set_now(at * SECOND);
        self.bench.queue.tend_held(&mut self.bench.engine);
    }

    /// What is answered now.
    fn rest(&mut self) -> Vec<(u64, Status)> {
        let mut answers = Vec::new();
        (0..8).for_each(|_| self.bench.turn(&mut answers));
        answers.iter().map(|answer| (answer.context, answer.status)).collect()
    }

    /// How many are held, and in how many seconds one is tried again, and the queue is to be looked at.
    fn waits(&self) -> (u64, Option<u64>, Option<u64>) {
        let held = self.disk().held();
        let seconds = |time: Duration| time.as_secs();
        (
            held.map_or(0, |held| held.count),
            held.and_then(|held| held.retry_in).map(seconds),
            self.bench.queue.wake_in().map(seconds),
        )
    }
}

/// What finds no space is tried again by itself, the oldest alone; what has waited for too long is
/// reported; anything else waits to be told.
#[test]
fn time_moves_held_requests_and_says_when() {
    let mut scene = Held::new();
    assert_eq!(scene.waits(), (0, None, None));
    scene.start(Op::Write, 0..1);
    assert_eq!((scene.rest(), scene.waits()), (vec![], (1, Some(3), Some(3))));
    scene.disk().set_now(11 * SECOND);
    scene.start(Op::Write, 1..2);
    assert_eq!((scene.rest(), scene.waits()), (vec![], (2, Some(2), Some(2))));

    // A read beside them; a write that fails so is reported.
    scene.disk().set_now(12 * SECOND);
    scene.break_by(Some(libc::EIO));
    scene.start(Op::Read, 2..3);
    scene.start(Op::Write, 3..4);
    assert_eq!(scene.rest(), [(3, Status::IoError)]);
    let held = scene.disk().held().unwrap();
    assert_eq!((held.op, held.errno, held.age.as_secs()), (FailedOp::Read, libc::EIO, 2));
    assert_eq!(scene.waits(), (3, Some(1), Some(1)));
    take(&scene.asked);
    scene.tend(12);
    assert_eq!((scene.rest(), take(&scene.asked)), (vec![], vec![]), "it is not time yet");

    scene.break_by(Some(libc::ENOSPC));
    scene.tend(13);
    let going = (scene.bench.queue.held(), scene.disk().held_under_way());
    assert_eq!(going, (2, 1), "the oldest goes");
    assert_eq!(scene.rest(), []);
    assert_eq!(take(&scene.asked).iter().map(|asked| asked.1).collect::<Vec<_>>(), [0]);
    assert_eq!((scene.waits(), scene.disk().held_under_way()), ((3, Some(3), Some(3)), 0));

    // Ten seconds after they failed first, however often they were tried.
    scene.tend(20);
    assert_eq!((scene.rest(), scene.waits()), (vec![(0, Status::NoSpace)], (2, Some(3), Some(1))));
    scene.tend(21);
    assert_eq!((scene.rest(), scene.waits()), (vec![(1, Status::NoSpace)], (1, None, Some(1))));
    scene.break_by(None);
    assert_eq!(scene.bench.queue.try_held(&mut scene.bench.engine), 1);
    assert_eq!(scene.rest(), [(2, Status::Ok)]);
    scene.tend(21);
    scene.tend(22);
    assert_eq!((scene.waits(), scene.disk().held_spells()), ((0, None, None), 1));
}

#[test]
fn held_requests_follow_the_one_that_finds_space() {
    let mut scene = Held::new();
    let rung = Arc::new(AtomicU64::new(0));
    let bell = Arc::clone(&rung);
    scene.disk().incidents().on_incident(Box::new(move || {
        bell.fetch_add(1, SeqCst);
    }));
    scene.break_by(Some(libc::EDQUOT));
    scene.start(Op::Write, 4..7);
    assert_eq!((scene.rest(), scene.disk().held_spells()), (vec![], 1));
    assert_eq!(rung.load(SeqCst), 1, "the first one rings");
    take(&scene.asked);
    assert_eq!(scene.bench.queue.fail_held(&mut scene.bench.engine, |_, &name| name == 4), 1);
    assert_eq!(scene.rest(), [(4, Status::NoSpace)]);
    let incidents = scene.disk().incidents();
    let told = (0..Incidents::KINDS).find_map(|kind| incidents.take(kind)).unwrap();
    assert_eq!((told.op, told.errno), (FailedOp::Write, libc::EDQUOT), "why it was held");
    assert_eq!(take(&scene.asked), [], "that says nothing about space");
    scene.break_by(None);
    scene.tend(13);
    let all = [5, 6].map(|n| (n, Status::Ok));
    assert_eq!((scene.rest(), scene.disk().held()), (all.to_vec(), None));
    assert_eq!(
        (scene.disk().held_under_way(), rung.load(SeqCst)),
        (0, 3),
        "the failure, the last one"
    );
    let stats = scene.bench.queue.stats();
    assert_eq!((stats.held, stats.errors, stats.refused), (3, 1, 0));

    // Left to whoever serves the guest next, oldest first.
    scene.break_by(Some(libc::ENOSPC));
    scene.start(Op::Write, 7..9);
    assert_eq!((scene.rest(), scene.disk().held_spells()), (vec![], 2));
    let mut left = Vec::new();
    scene.bench.queue.leave_held(|context| left.push(context));
    assert_eq!((left, scene.disk().held(), scene.disk().held_and_left()), (vec![7, 8], None, 2));
    assert_eq!((scene.bench.queue.in_flight(), scene.bench.queue.held()), (0, 0));

    // And not held any more at all.
    scene.bench.queue.hold_no_more(&mut scene.bench.engine);
    scene.start(Op::Write, 9..10);
    assert_eq!((scene.rest(), scene.disk().held()), (vec![(9, Status::NoSpace)], None));
}

/// Nothing says its size but its owner, whatever it takes discards for.
#[test]
fn c96_a_disk_of_its_owner_has_the_size_that_it_is_told() {
    for block_device in [false, true] {
        let disk = CustomDisk { block_device, ..SHAPE }.open(None).unwrap();
        assert_eq!(disk.next_size(Some(2 * BYTES)).unwrap(), 2 * BYTES);
        disk.set_file_bytes(2 * BYTES).unwrap();
        disk.set_capacity(2 * BYTES);
        assert_eq!(disk.geometry().capacity, 2 * BYTES);
        assert!(matches!(disk.next_size(None), Err(ResizeError::NoFile)));
    }
}
