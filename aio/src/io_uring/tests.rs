use super::*;
use crate::engine::IoMemory;
use ringway_testkit::{Need, skip};

#[test]
fn one_call_submits_and_sleeps() {
    let mut engine = match IoUring::new(IoUringSetup::new(4)) {
        Ok(engine) => engine,
        Err(error) => return skip(Need::IoUring, error),
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let file = engine.attach(&Arc::new(file)).unwrap();
    let mut data = vec![0u8; 512];
    let list = [Segment { base: data.as_mut_ptr(), len: data.len() }];
    let mut out = Reaped::with_capacity(4, 4);
    for round in 1..=20 {
        let memory = IoMemory::Segments(&list);
        let io = Io { tag: round, op: IoOp::Read, file, offset: 512, len: 512, memory };
        // SAFETY: data and list live until the result is reaped below.
        unsafe { engine.queue(&io) }.unwrap();
        let before = engine.counters();
        engine.submit_and_wait(None).unwrap();
        let after = engine.counters();
        assert_eq!((after.syscalls, after.sleeps), (before.syscalls + 1, before.sleeps + 1));
        out.clear();
        while engine.reap(&mut out) == 0 {
            // It ended early.
            engine.wait(None).unwrap();
        }
        assert_eq!((out.done[0].tag, out.done[0].result), (round, 512));
    }
}

/// Files of one worker may lie on several devices, and some that can be polled may be served beside one that
/// cannot.
#[test]
fn c85_a_file_that_cannot_be_polled_leaves_the_others_polled() {
    let setup = IoUringSetup { iopoll: true, ..IoUringSetup::new(4) };
    let mut engine = match IoUring::new(setup) {
        Ok(engine) => engine,
        Err(error) => return skip(Need::IoUring, error),
    };
    let files = [(); 2].map(|()| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        engine.attach(&Arc::new(file)).unwrap()
    });
    // Through the page cache: each kernel refuses to poll for that.
    files.iter().for_each(|&file| engine.files.note_mut(file).polled = true);
    let mut data = vec![0u8; 512];
    let list = [Segment { base: data.as_mut_ptr(), len: data.len() }];
    let mut out = Reaped::with_capacity(4, 4);
    for (tag, wanted) in [(7, -libc::EAGAIN), (8, 512)] {
        let memory = IoMemory::Segments(&list);
        let io = Io { tag, op: IoOp::Read, file: files[0], offset: 512, len: 512, memory };
        // SAFETY: data and list live until the result is reaped below.
        unsafe { engine.queue(&io) }.unwrap();
        engine.submit().unwrap();
        out.clear();
        while engine.reap(&mut out) == 0 {
            engine.wait(None).unwrap();
        }
        assert_eq!((out.done[0].tag, out.done[0].result), (tag, wanted));
    }
    let polled = files.map(|file| engine.files.get(file).note.polled);
    assert_eq!(polled, [false, true]);
    assert_eq!(files.map(|file| engine.cannot_poll(file)), [true, false]);
}
