use super::*;
use crate::engine::IoMemory;
use ringway_testkit::{Need, skip};

const FACTS: Facts = Facts {
    id: 1,
    block_shift: 9,
    max_bytes: 8192,
    discard_blocks: 0,
    zero_blocks: 0,
    deallocates_zeroed: false,
};

fn list(lens: &[usize]) -> Vec<Segment> {
    let base = std::ptr::without_provenance_mut(0x10000);
    lens.iter().map(|&len| Segment { base, len }).collect()
}

/// How a list is named in a command: its operation, its length there, the bytes.
fn named(lens: &[usize]) -> (u32, u32, u32) {
    let (op, memory, bytes) = one_command(&FACTS, &list(lens));
    (op, memory.len, bytes)
}

#[test]
fn a_command_takes_what_the_device_and_the_kernel_take() {
    assert_eq!(named(&[4096]), (IO, 4096, 4096));
    assert_eq!(named(&[8192]), (IO, 8192, 8192));
    assert_eq!(named(&[8193]), (IO, 8192, 8192), "the beginning of one that is too long");
    assert_eq!(named(&[12288, 512]), (IO, 8192, 8192));
    assert_eq!(named(&[4096, 4096]), (IO_VEC, 2, 8192));
    assert_eq!(named(&[4096, 512, 4096]), (IO_VEC, 2, 4608), "whole segments only");
    assert_eq!(named(&[4096, 8192]), (IO, 4096, 4096), "a list of one is none");
    assert_eq!(named(&[]), (IO, 0, 0));
}

/// An engine with a file that is no namespace; the kernel refuses its commands.
fn engine() -> Option<(Nvme, FileId)> {
    let mut engine = match Nvme::new(4) {
        Ok(engine) => engine,
        Err(error) => {
            skip(Need::IoUring, error);
            return None;
        }
    };
    let open = || File::open("/dev/zero").unwrap();
    let file = Arc::new(open());
    let refused = engine.attach(&file).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "nobody has said what it is");
    let other: Handle = Arc::new("something else");
    let refused = engine.attach_handle(&file, &other).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    let namespace: Handle = Arc::new(Namespace { facts: FACTS, block: open() });
    let id = engine.attach_handle(&file, &namespace).unwrap();
    Some((engine, id))
}

fn run(engine: &mut Nvme, io: &Io<'_>) -> i32 {
    let mut out = Reaped::with_capacity(4, 1);
    // SAFETY: the memory of these tests outlives the loop, which ends with the result.
    unsafe { engine.queue(io) }.unwrap();
    assert_eq!(engine.reap(&mut out), 0, "nothing ends before it is submitted");
    engine.submit().unwrap();
    while engine.reap(&mut out) == 0 {
        engine.wait(None).unwrap();
    }
    assert_eq!((out.done.len(), out.done[0].tag), (1, io.tag));
    out.done[0].result
}

#[test]
fn what_needs_no_device_and_what_the_kernel_refuses_ends_once() {
    let Some((mut engine, file)) = engine() else { return };
    let mut bytes = vec![0u8; 4096];
    let whole = [Segment { base: bytes.as_mut_ptr(), len: 4096 }];
    let part = [Segment { base: bytes.as_mut_ptr(), len: 100 }];
    let io = |op, offset, len, memory| Io { tag: 9, op, file, offset, len, memory };
    let none = IoMemory::NONE;
    let mut say = |op, offset, len, memory| run(&mut engine, &io(op, offset, len, memory));
    assert_eq!(say(IoOp::Read, 0, 100, part[..].into()), -libc::EINVAL, "no whole block");
    assert_eq!(say(IoOp::Write, 100, 4096, whole[..].into()), -libc::EINVAL);
    assert_eq!(say(IoOp::Discard, 0, 4096, none), -libc::EOPNOTSUPP, "the device has none");
    assert_eq!(say(IoOp::ZeroRange, 0, 4096, none), -libc::EOPNOTSUPP);
    assert_eq!(say(IoOp::Read, 0, 0, none), 0);
    // /dev/zero takes no commands.
    assert_eq!(say(IoOp::Read, 0, 4096, whole[..].into()), -libc::EOPNOTSUPP);
    assert_eq!(say(IoOp::Sync, 0, 0, none), -libc::EOPNOTSUPP);
}

#[test]
fn no_more_is_taken_than_there_is_room_for() {
    let Some((mut engine, file)) = engine() else { return };
    let memory = IoMemory::NONE;
    for tag in 0..4 {
        let op = if tag % 2 == 0 { IoOp::Sync } else { IoOp::Discard };
        let io = Io { tag, op, file, offset: 0, len: 0, memory };
        // SAFETY: it names no memory.
        unsafe { engine.queue(&io) }.unwrap();
    }
    let io = Io { tag: 4, op: IoOp::Sync, file, offset: 0, len: 0, memory };
    // SAFETY: as above.
    assert_eq!(unsafe { engine.queue(&io) }, Err(Full));
    let mut out = Reaped::with_capacity(4, 0);
    while out.done.len() < 4 {
        engine.submit_and_wait(None).unwrap();
        engine.reap(&mut out);
    }
    let mut tags: Vec<_> = out.done.iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3]);
}

#[test]
fn doorbells_ring_beside_commands() {
    let Some((mut engine, file)) = engine() else { return };
    let bell = crate::sys::eventfd().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&bell);
    engine.watch(5, fd).unwrap();
    let memory = IoMemory::NONE;
    let io = Io { tag: 1, op: IoOp::Sync, file, offset: 0, len: 0, memory };
    let mut out = Reaped::with_capacity(4, 4);
    for _ in 0..3 {
        out.clear();
        crate::sys::ring(fd);
        // SAFETY: it names no memory.
        unsafe { engine.queue(&io) }.unwrap();
        engine.submit().unwrap();
        while out.done.is_empty() || out.rung.is_empty() {
            engine.wait(None).unwrap();
            engine.reap(&mut out);
        }
        assert!(out.done.len() == 1 && out.rung.iter().all(|&rung| rung == 5));
    }
    engine.unwatch(5, fd);
}
