//! What not every engine has: commands for drivers, and buffers that have a number.

use super::rig::{BLOCK, Pages, Rig, TIMEOUT, content};
use super::setting::{Mode, Suite};
use crate::engine::{Command, CommandRefused, IoMemory, IoOp};
use std::collections::HashSet;
use std::io;
use std::time::Instant;

/// A command that no driver knows; files have no driver that takes any.
fn unknown(file: crate::FileId, tag: u64, data: &[u8]) -> Command<'_> {
    Command { tag, file, op: 0x7777_7777, addr: 0, data }
}

pub(super) fn commands(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let Some(port) = rig.engine.limits().commands else {
        // SAFETY: the command names no memory, here and below.
        let refused = unsafe { rig.engine.queue_command(&unknown(rig.id, 1, &[])) };
        return assert_eq!(refused, Err(CommandRefused::NoPort));
    };
    let long = vec![0; port.bytes + 1];
    // SAFETY: as above.
    let refused = unsafe { rig.engine.queue_command(&unknown(rig.id, 1, &long)) };
    assert_eq!(refused, Err(CommandRefused::TooLong { bytes: port.bytes + 1, most: port.bytes }));
    let memory = Pages::new(4 * BLOCK);
    let segments: Vec<_> = (0..4).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    for round in 0..20 {
        rig.out.clear();
        // The smallest tags and the largest; those of the operations are among them.
        let tags = (0..u64::from(port.depth)).map(|i| if i % 2 == 0 { i } else { (1 << 62) - i });
        let mut left: HashSet<u64> = tags.collect();
        for &tag in &left {
            // SAFETY: as above.
            let taken = unsafe { rig.engine.queue_command(&unknown(rig.id, tag, &long[1..])) };
            assert_eq!(taken, Ok(()), "round {round}");
        }
        // SAFETY: as above.
        let refused = unsafe { rig.engine.queue_command(&unknown(rig.id, 1, &[])) };
        assert_eq!(refused, Err(CommandRefused::Full));
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i * BLOCK) as u64, segment).expect("apart from commands");
        }
        rig.engine.submit().unwrap();
        let start = Instant::now();
        while rig.out.done.len() < 4 || rig.out.commands.len() < left.len() {
            assert!(start.elapsed() < TIMEOUT, "{:?}", rig.out);
            let before = rig.out.done.len();
            let found = rig.engine.reap(&mut rig.out);
            assert_eq!(found, rig.out.done.len() - before, "reap counts operations");
            rig.engine.wait(Some(TIMEOUT / 1000)).unwrap();
        }
        for done in &rig.out.commands {
            assert!(left.remove(&done.tag), "tag {:#x} is in flight", done.tag);
            assert_eq!(done.result, -libc::EOPNOTSUPP);
        }
        assert!(rig.out.done.iter().all(|done| done.result == 4096));
    }
    // One that is in flight does not keep the engine from being dropped.
    // SAFETY: as above.
    unsafe { rig.engine.queue_command(&unknown(rig.id, 1, &[])) }.unwrap();
    rig.engine.submit().unwrap();
}

pub(super) fn registered_buffers(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let mut memory = Pages::new(12 * BLOCK);
    let count = rig.engine.limits().registered_buffers;
    let piece = |i: usize| Some(memory.segment(i * 4 * BLOCK, 4 * BLOCK));
    let (first, second, third) = (piece(0), piece(1), piece(2));
    // SAFETY: the memory outlives the engine's use of it, here and below.
    let beyond = unsafe { rig.engine.set_buffer(count, first) }.unwrap_err();
    if count == 0 {
        return assert_eq!(beyond.kind(), io::ErrorKind::Unsupported);
    }
    assert_eq!(beyond.kind(), io::ErrorKind::InvalidInput);
    assert!(count >= 3, "the suite uses three numbers");
    let last = count - 1;
    // SAFETY: as above.
    unsafe { rig.engine.set_buffer(0, first).and_then(|()| rig.engine.set_buffer(last, second)) }
        .expect("the kernel pins a few pages");
    let at = |buffer, offset: usize| IoMemory::Registered {
        buffer,
        offset: u32::try_from(offset).expect("small"),
    };
    let (file, len) = (rig.id, 2 * BLOCK as u64);
    let one = |rig: &mut Rig, op, offset, memory| {
        rig.queue_memory(file, op, offset, len, memory).expect("nothing else is in flight");
        rig.finish_one()
    };
    for (round, op) in [IoOp::Write, IoOp::WriteDurable].into_iter().enumerate() {
        let place = (round * 8 * BLOCK) as u64;
        let expected = content(2 * BLOCK, place, 9);
        memory.bytes()[BLOCK..3 * BLOCK].copy_from_slice(&expected);
        assert_eq!(one(&mut rig, op, place, at(0, BLOCK)), 8192);
        rig.judge(place, &expected);
        assert_eq!(one(&mut rig, IoOp::Read, place, at(last, 2 * BLOCK)), 8192);
        assert!(memory.bytes()[6 * BLOCK..8 * BLOCK] == expected, "from the offset on");
        assert!(memory.bytes()[4 * BLOCK..6 * BLOCK].iter().all(|&b| b == 0 || round > 0));
        memory.bytes().fill(0);
    }
    assert_eq!(one(&mut rig, IoOp::Read, 0, at(1, 0)), -libc::EFAULT, "no buffer has this number");
    assert_eq!(one(&mut rig, IoOp::Read, 0, at(0, 3 * BLOCK)), -libc::EFAULT, "beyond its end");
    // What is in flight keeps the buffer it was queued with.
    let expected = content(2 * BLOCK, 0, 9);
    rig.queue_memory(file, IoOp::Read, 0, len, at(0, 0)).unwrap();
    rig.engine.submit().unwrap();
    // SAFETY: as above.
    unsafe { rig.engine.set_buffer(0, third) }.unwrap();
    assert_eq!(rig.finish_one(), 8192);
    assert!(memory.bytes()[..2 * BLOCK] == expected);
    assert_eq!(one(&mut rig, IoOp::Read, 0, at(0, 0)), 8192);
    assert!(memory.bytes()[8 * BLOCK..10 * BLOCK] == expected, "the one that took the number");
    // SAFETY: as above.
    unsafe { rig.engine.set_buffer(0, None) }.unwrap();
    assert_eq!(one(&mut rig, IoOp::Read, 0, at(0, 0)), -libc::EFAULT, "nobody has the number");
    let segment = [memory.segment(0, 2 * BLOCK)];
    memory.bytes().fill(0);
    assert_eq!(rig.one(IoOp::Read, 0, &segment), 8192, "segments are as good as ever");
    assert!(memory.bytes()[..2 * BLOCK] == expected);
}
