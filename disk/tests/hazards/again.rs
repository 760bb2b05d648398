//! What a queue does next when an operation ends otherwise than it should: the same again, the rest, by
//! other means, or nothing.

use crate::bench::{Ask, Bench, Memory, engine};
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp, OpSet};
use ringway_core::{Op, Status};
use ringway_disk::{Alignment, CacheMode, CustomDisk, SchedulerMode};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// What the engine was asked for: what, where, how long.
type Asked = Vec<(IoOp, u64, u64)>;
type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;

const SHAPE: CustomDisk = CustomDisk {
    bytes: 64 << 20,
    cache: CacheMode::None,
    alignment: Alignment { memory: 512, offset: 4096 },
    block_device: false,
    path: SchedulerMode::Bio,
};

/// How often an operation that does not get on is begun again.
const AGAIN: usize = 100;

/// Carries out a request, whose first operations meet these faults, the last of them `last` times. Its
/// answer, and what the engine was asked for.
fn carry_out(shape: CustomDisk, ask: Ask, faults: &[Fault], last: usize) -> (Status, Asked, u64) {
    let asked: Arc<Mutex<Asked>> = Arc::default();
    let seer = Arc::clone(&asked);
    let last = faults.last().copied().into_iter().cycle().take(last.saturating_sub(1));
    let mut faults: VecDeque<_> = faults.iter().copied().chain(last).collect();
    let choose: Choice = Box::new(move |io| {
        seer.lock().unwrap().push((io.op, io.offset, io.len));
        faults.pop_front()
    });
    let engine: Faulty<Box<dyn Engine>, _> = Faulty::new(engine("null", 8).unwrap(), 1, choose);
    let disk = Arc::new(shape.open(None).unwrap());
    let mut bench = Bench::limited(engine, disk, 4, |limits| limits.ops = OpSet::ALL).unwrap();
    let memory = Memory::new(64 << 10, 0);
    let status = bench.one(&memory, ask);
    let stats = bench.queue.stats();
    assert_eq!(stats.errors, u64::from(status != Status::Ok));
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    (status, asked, stats.continued)
}

fn ask(op: Op, offset: u64, len: u64) -> Ask {
    Ask { unmap: false, ..Ask::new(op, offset, len) }
}

/// An operation that was interrupted, and one that ended before the request began. (Syncs pause: `syncs.rs`.)
#[test]
fn what_does_not_get_on_is_begun_again_a_hundred_times() {
    let interrupted = [libc::EINTR, libc::EAGAIN].map(Fault::Error);
    let whole = [
        (ask(Op::Read, 0, 4096), IoOp::Read),
        (ask(Op::Write, 0, 4096), IoOp::Write),
        (ask(Op::WriteZeroes, 0, 4096), IoOp::ZeroRange),
        // By a block around it, of which the first kilobyte is not its.
        (ask(Op::Read, 1024, 512), IoOp::Read),
        (ask(Op::Write, 1024, 512), IoOp::Read),
    ];
    let whole = whole.iter().flat_map(|&(ask, op)| interrupted.map(|fault| (ask, op, fault)));
    let within = [Fault::Short(512), Fault::Short(1024)];
    let within = within.map(|fault| (ask(Op::Read, 1024, 512), IoOp::Read, fault));
    for (ask, op, fault) in whole.chain(within) {
        for (times, enough) in [(1, true), (AGAIN, true), (AGAIN + 1, false)] {
            let what = format!("{ask:?}, {fault:?}, {times} times");
            let (status, asked, continued) = carry_out(SHAPE, ask, &[fault], times);
            assert_eq!(status == Status::Ok, enough, "{what}");
            assert_eq!(continued, times.min(AGAIN) as u64, "{what}");
            assert_eq!(asked[..times], vec![(op, 0, 4096); times], "{what}");
            let modified = enough && ask.op == Op::Write && ask.len == 512;
            let rest = usize::from(enough) + usize::from(modified);
            assert_eq!(asked.len() - times, rest, "{what}: {asked:?}");
        }
    }
}

/// Blocks are written back whole, so they have to be read whole.
#[test]
fn what_was_not_read_whole_is_not_written_back() {
    let write = ask(Op::Write, 1024, 512);
    let (read, back) = ((IoOp::Read, 0, 4096), (IoOp::Write, 0, 4096));
    for most in [512, 1024, 1536, 4095] {
        let (status, asked, _) = carry_out(SHAPE, write, &[Fault::Short(most)], 1);
        assert_eq!((status, asked), (Status::Ok, vec![read, read, back]), "{most}");
    }
    // Of the block that was to be written back the request's part did not arrive, or half of it.
    for most in [1024, 1200] {
        let faults = [Fault::Short(4096), Fault::Short(most)];
        let (status, asked, _) = carry_out(SHAPE, write, &faults, 1);
        assert_eq!(status, Status::Ok);
        assert!(asked.len() > 2 && *asked.last().unwrap() == back, "{most}: {asked:?}");
    }
}

/// The file ends, or takes nothing: that is no reason to ask again.
#[test]
fn a_transfer_of_nothing_is_not_begun_again() {
    for (op, offset, len) in
        [(Op::Read, 0, 4096), (Op::Write, 0, 4096), (Op::Read, 1024, 512), (Op::Write, 1024, 512)]
    {
        let (status, asked, continued) =
            carry_out(SHAPE, ask(op, offset, len), &[Fault::Short(0)], 1);
        assert_eq!((status, asked.len(), continued), (Status::IoError, 1, 0), "{op:?} {offset}");
    }
}

/// Past the page cache a file may refuse memory that looked right: it gets another, once.
#[test]
fn what_a_file_refuses_as_invalid_goes_through_other_memory_once() {
    let einval = Fault::Error(libc::EINVAL);
    let cached = CustomDisk { cache: CacheMode::Writeback, ..SHAPE };
    for (shape, ask, faults, tries) in [
        (SHAPE, ask(Op::Read, 0, 4096), 1, 2),
        (SHAPE, ask(Op::Write, 0, 4096), 1, 2),
        (SHAPE, ask(Op::Write, 0, 4096), 2, 2),
        (SHAPE, ask(Op::Read, 512, 512), 1, 1),
        (SHAPE, ask(Op::WriteZeroes, 0, 4096), 1, 1),
        (cached, ask(Op::Read, 0, 4096), 1, 1),
        (cached, ask(Op::Write, 0, 4096), 1, 1),
        (SHAPE, ask(Op::Flush, 0, 0), 1, 1),
    ] {
        let (status, asked, _) = carry_out(shape, ask, &[einval], faults);
        assert_eq!(asked.len(), tries, "{ask:?}, {faults} times: {asked:?}");
        assert_eq!(status == Status::Ok, tries > faults, "{ask:?}, {faults} times");
    }
}

/// A file that cannot erase is written to, or left as it is where that is allowed. Nothing else is
/// excused by such an error.
#[test]
fn only_what_erases_may_be_unknown_to_a_file() {
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV] {
        let unknown = Fault::Error(errno);
        let zeroes = [(IoOp::ZeroRange, 0, 4096), (IoOp::Write, 0, 4096)];
        for (ask, right) in [
            (ask(Op::WriteZeroes, 0, 4096), &zeroes[..]),
            (ask(Op::Discard, 0, 4096), &[(IoOp::PunchHole, 0, 4096)]),
        ] {
            let (status, asked, _) = carry_out(SHAPE, ask, &[unknown], 1);
            assert_eq!((status, &asked[..]), (Status::Ok, right), "{ask:?} {errno}");
        }
        for (op, len) in [(Op::Read, 4096), (Op::Write, 4096), (Op::Flush, 0), (Op::Read, 512)] {
            let (status, asked, _) = carry_out(SHAPE, ask(op, 0, len), &[unknown], 1);
            assert_eq!((status, asked.len()), (Status::IoError, 1), "{op:?} {errno}");
        }
    }
}
