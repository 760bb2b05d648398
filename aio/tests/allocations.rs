//! After start, no engine allocates on its owner's thread.

use ringway_aio::{
    Engine, Io, IoOp, IoUring, IoUringSetup, LinuxAio, Null, Reaped, Threads, ThreadsSetup,
};
use ringway_core::Segment;
use ringway_testkit::{Need, skip};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::Duration;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|a| a.set(a.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|a| a.set(a.get() + 1));
        // SAFETY: passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const DEPTH: u32 = 32;

/// Every operation, full queues, doorbells, sleeps; not one allocation on this thread.
fn allocates_nothing(mut engine: Box<dyn Engine>, direct: bool) {
    let path = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    path.as_file().set_len(1 << 20).unwrap();
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
    let file = engine.attach(&Arc::new(file)).unwrap();
    // SAFETY: no memory is involved.
    let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    engine.watch(9, bell).unwrap();
    let mut memory = vec![0u8; (DEPTH as usize + 1) * 4096];
    let base = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
    let segments: Vec<_> = (0..DEPTH as usize)
        .map(|i| {
            let half =
                |j: usize| Segment { base: base.wrapping_add(i * 4096 + j * 2048), len: 2048 };
            [half(0), half(1)]
        })
        .collect();
    let mut out = Reaped::with_capacity(DEPTH as usize, 64);
    let mut round = |engine: &mut Box<dyn Engine>| {
        for (i, segments) in segments.iter().enumerate() {
            let op = IoOp::ALL[i % 6];
            let data = op.moves_data();
            let segments = if data { &segments[..] } else { &[] };
            let len = if op == IoOp::Sync { 0 } else { 4096 };
            let (offset, memory) = ((i * 4096) as u64, segments.into());
            let io = Io { tag: i as u64, op, file, offset, len, memory };
            // SAFETY: memory and list live until all is reaped, below.
            unsafe { engine.queue(&io) }.unwrap();
        }
        engine.submit().unwrap();
        let one = 1u64;
        // SAFETY: eight bytes are read.
        unsafe { libc::write(bell.as_raw_fd(), (&raw const one).cast(), 8) };
        out.clear();
        while out.done.len() < DEPTH as usize {
            if engine.reap(&mut out) == 0 {
                engine.wait(Some(Duration::from_millis(100))).unwrap();
            }
        }
    };
    // The first round may set up thread-locals of the runtime.
    round(&mut engine);
    let before = ALLOCATIONS.get();
    for _ in 0..20 {
        round(&mut engine);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0, "{}", engine.limits().name);
}

#[test]
fn null() {
    allocates_nothing(Box::new(Null::new(DEPTH).unwrap()), false);
}

#[test]
fn threads() {
    for cached_inline in [false, true] {
        let setup = ThreadsSetup { depth: DEPTH, threads: 3, cached_inline };
        allocates_nothing(Box::new(Threads::new(setup).unwrap()), false);
    }
}

#[test]
fn io_uring() {
    match IoUring::new(IoUringSetup::new(DEPTH)) {
        Ok(engine) => allocates_nothing(Box::new(engine), false),
        Err(e) => skip(Need::IoUring, e),
    }
}

#[test]
fn linux_aio() {
    match LinuxAio::new(DEPTH) {
        Ok(engine) => allocates_nothing(Box::new(engine), true),
        Err(e) => skip(Need::LinuxAio, e),
    }
}
