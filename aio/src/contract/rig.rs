//! An engine with a file, and memory for its operations.

use crate::engine::{Engine, FileId, Full, Io, IoMemory, IoOp, Reaped};
use fastrand::Rng;
use ringway_core::Segment;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The unit in which direct transfers are aligned here: good for every disk.
pub(super) const BLOCK: usize = 4096;
/// Longer than any operation takes on a host in trouble.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// Pages that direct transfers accept.
pub(super) struct Pages {
    base: *mut u8,
    layout: Layout,
}

impl Pages {
    pub(super) fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), BLOCK).expect("a small size");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, layout }
    }

    pub(super) fn segment(&self, offset: usize, len: usize) -> Segment {
        assert!(offset + len <= self.layout.size());
        Segment { base: self.base.wrapping_add(offset), len }
    }

    /// Only between operations.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: ours, initialised, and the caller looks only while no operation is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// An engine with a file, and another descriptor of the file to judge by.
pub(super) struct Rig {
    pub(super) engine: Box<dyn Engine>,
    pub(super) file: Arc<File>,
    pub(super) id: FileId,
    pub(super) plain: File,
    pub(super) out: Reaped,
    pub(super) tag: u64,
}

impl Rig {
    pub(super) fn new(mut engine: Box<dyn Engine>, file: Arc<File>, plain: File) -> Self {
        let id = engine.attach(&file).expect("the engine takes the file");
        let out = Reaped::with_capacity(engine.limits().depth as usize, 8);
        Self { engine, file, id, plain, out, tag: 0 }
    }

    /// Names the memory to the engine, for what it is worth.
    pub(super) fn map(&mut self, memory: &Pages) {
        let all = [memory.segment(0, memory.layout.size())];
        // SAFETY: nothing is in flight, and no operation uses the memory after it is dropped.
        if let Err(e) = unsafe { self.engine.map_memory(&all) } {
            println!("contract: memory is not prepared: {e}");
        }
    }

    /// Queues an operation; the caller keeps the memory and the list until it is reaped.
    pub(super) fn queue(
        &mut self,
        op: IoOp,
        offset: u64,
        segments: &[Segment],
    ) -> Result<u64, Full> {
        self.queue_on(self.id, op, offset, segments.iter().map(|s| s.len as u64).sum(), segments)
    }

    pub(super) fn queue_on(
        &mut self,
        file: FileId,
        op: IoOp,
        offset: u64,
        len: u64,
        segments: &[Segment],
    ) -> Result<u64, Full> {
        self.queue_memory(file, op, offset, len, segments.into())
    }

    pub(super) fn queue_memory(
        &mut self,
        file: FileId,
        op: IoOp,
        offset: u64,
        len: u64,
        memory: IoMemory<'_>,
    ) -> Result<u64, Full> {
        assert!(self.engine.limits().ops.has(op));
        self.tag += 1;
        let io = Io { tag: self.tag, op, file, offset, len, memory };
        // SAFETY: each case keeps memory and list until it has reaped or dropped the engine.
        unsafe { self.engine.queue(&io) }.map(|()| io.tag)
    }

    /// One operation from beginning to end.
    pub(super) fn one(&mut self, op: IoOp, offset: u64, segments: &[Segment]) -> i32 {
        self.queue(op, offset, segments).expect("nothing else is in flight");
        self.finish_one()
    }

    pub(super) fn one_without_data(&mut self, op: IoOp, offset: u64, len: u64) -> i32 {
        self.queue_on(self.id, op, offset, len, &[]).expect("nothing else is in flight");
        self.finish_one()
    }

    pub(super) fn finish_one(&mut self) -> i32 {
        self.engine.submit().expect("a usable engine");
        self.reap(1);
        assert_eq!(self.out.done[0].tag, self.tag);
        self.out.done[0].result
    }

    /// Waits until `count` operations are done; they are then in `out`, and no others.
    pub(super) fn reap(&mut self, count: usize) {
        self.out.clear();
        let start = Instant::now();
        loop {
            let before = self.out.done.len();
            let found = self.engine.reap(&mut self.out);
            assert_eq!(found, self.out.done.len() - before, "reap counts what it appends");
            if self.out.done.len() >= count {
                break;
            }
            assert!(start.elapsed() < TIMEOUT, "{} of {count} are done", self.out.done.len());
            self.engine.wait(Some(TIMEOUT)).expect("a usable engine");
        }
        assert_eq!(self.out.done.len(), count, "nothing is done twice");
    }

    /// Waits until something rings, and returns what did.
    pub(super) fn rung(&mut self) -> Vec<u32> {
        self.out.clear();
        let start = Instant::now();
        while self.out.rung.is_empty() {
            assert!(start.elapsed() < TIMEOUT, "no bell rang");
            self.engine.wait(Some(TIMEOUT)).expect("a usable engine");
            self.engine.reap(&mut self.out);
        }
        std::mem::take(&mut self.out.rung)
    }

    /// Takes what rang so far, if anything.
    pub(super) fn settle(&mut self) {
        for _ in 0..3 {
            self.engine.wait(Some(Duration::from_millis(1))).expect("a usable engine");
            self.engine.reap(&mut self.out);
        }
        self.out.clear();
    }

    /// Fails if something rings that should not.
    pub(super) fn quiet(&mut self) {
        self.settle();
        self.engine.wait(Some(Duration::from_millis(5))).expect("a usable engine");
        self.engine.reap(&mut self.out);
        assert!(self.out.rung.is_empty(), "{:?} rang for nothing", self.out.rung);
    }

    pub(super) fn judge(&self, offset: u64, expected: &[u8]) {
        let mut found = vec![0; expected.len()];
        self.plain.read_exact_at(&mut found, offset).expect("the file is that long");
        assert!(found == expected, "the file holds what was written at {offset}");
    }
}

/// Content as a function of where it is and of a seed.
pub(super) fn fill(bytes: &mut [u8], offset: u64, seed: u64) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let place = offset / 8 + i as u64;
        let value =
            Rng::with_seed(seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).u64(..).to_ne_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

pub(super) fn content(len: usize, offset: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, offset, seed);
    bytes
}
