//! An engine that fails on purpose: wraps another and lets chosen operations fail or fall short.
//!
//! ```
//! # use ringway_aio::{Fault, Faulty, IoOp, Null};
//! let mut first = true;
//! let engine = Faulty::new(Null::new(8).unwrap(), 512, move |io| {
//!     (io.op == IoOp::Write && std::mem::take(&mut first)).then_some(Fault::Error(libc::ENOSPC))
//! });
//! ```

use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{
    BellId, Command, CommandRefused, Counters, Done, Engine, FileId, Full, Handle, Io, IoMemory,
    Limits, Reaped,
};
use fastrand::Rng;

/// What befalls an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails with this `errno`; nothing is done.
    Error(i32),
    /// Moves at most so many bytes; with 0 it succeeds and moves nothing. Operations that move no
    /// data go unharmed.
    Short(u32),
}

/// Chooses what befalls an operation, when it is queued.
pub trait Choose: FnMut(&Io<'_>) -> Option<Fault> + Send {}

impl<F: FnMut(&Io<'_>) -> Option<Fault> + Send> Choose for F {}

/// Faults by chance, `per_mille` in a thousand: EIO, ENOSPC, zero and short transfers of any
/// length. The same seed and operations yield the same faults.
pub fn seeded(seed: u64, per_mille: u16) -> impl Choose {
    let mut random = Rng::with_seed(seed);
    move |io| {
        if random.u16(..1000) >= per_mille {
            return None;
        }
        Some(match random.u8(..4) {
            0 => Fault::Error(libc::EIO),
            1 => Fault::Error(libc::ENOSPC),
            2 => Fault::Short(0),
            // Below the length, which is 32 bits for data.
            _ => Fault::Short(u32::try_from(random.u64(..io.len.max(1))).unwrap_or(0)),
        })
    }
}

/// An engine in which operations fail as `choose` says. All else is the inner engine's.
///
/// # Invariants
/// 1. A slot is free, or has one operation from `queue` to `reap`; the inner engine knows it by
///    the slot's number.
#[derive(Debug)]
pub struct Faulty<E, F> {
    // First, so that it is dropped first: it may still use the slots' lists.
    inner: E,
    choose: F,
    granule: u32,
    slots: Box<[FaultySlot]>,
    free: Vec<u32>,
    queued: Vec<Done>,
    ready: Vec<Done>,
    from_inner: Reaped,
}

#[derive(Clone, Debug, Default)]
struct FaultySlot {
    tag: u64,
    /// The most bytes to tell of.
    most: i32,
    /// The list of a transfer that is cut short.
    segments: Vec<Segment>,
}

impl<E: Engine, F: Choose> Faulty<E, F> {
    /// Wraps `inner`. A short transfer really moves whole granules (a power of two, as O_DIRECT
    /// needs them), so at least as much as it tells of, and nothing beyond.
    pub fn new(inner: E, granule: u32, choose: F) -> Self {
        let depth = inner.limits().depth;
        Self {
            inner,
            choose,
            granule,
            slots: vec![FaultySlot::default(); depth as usize].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            queued: Vec::with_capacity(depth as usize),
            ready: Vec::with_capacity(depth as usize),
            from_inner: Reaped::with_capacity(depth as usize, 8),
        }
    }

    /// Queues no more than `most` bytes of an operation.
    ///
    /// # Safety
    /// As [`Engine::queue`].
    unsafe fn queue_short(&mut self, slot: u32, io: &Io<'_>, most: u32) -> Result<(), Full> {
        let len = io.len.min(most.next_multiple_of(self.granule).into());
        let kept = &mut self.slots[slot as usize];
        kept.most = most.try_into().unwrap_or(i32::MAX);
        kept.segments.clear();
        let mut left = usize::try_from(len).expect("a transfer fits in memory");
        for segment in io.memory.segments() {
            let part = Segment { base: segment.base, len: segment.len.min(left) };
            left -= part.len;
            if part.len > 0 {
                kept.segments.push(part);
            }
        }
        let memory = match io.memory {
            IoMemory::Segments(_) => IoMemory::Segments(&kept.segments),
            registered => registered,
        };
        let io = Io { tag: slot.into(), len, memory, ..*io };
        // SAFETY: the caller vouches for the memory; the list stays in the slot until the inner
        // engine has yielded the slot's number or was dropped (invariant 1).
        unsafe { self.inner.queue(&io) }
    }
}

impl<E: Engine, F: Choose> Engine for Faulty<E, F> {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.inner.attach(file)
    }

    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        self.inner.attach_handle(file, handle)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.map_memory(regions) }
    }

    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.set_buffer(number, buffer) }
    }

    fn detach(&mut self, file: FileId) {
        self.inner.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.inner.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.inner.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let Some(&slot) = self.free.last() else { return Err(Full) };
        let kept = &mut self.slots[slot as usize];
        (kept.tag, kept.most) = (io.tag, i32::MAX);
        match (self.choose)(io) {
            Some(Fault::Error(errno)) => {
                self.queued.push(Done { tag: slot.into(), result: -errno });
            }
            Some(Fault::Short(0)) if io.op.moves_data() => {
                self.queued.push(Done { tag: slot.into(), result: 0 });
            }
            // SAFETY: passed on to the caller.
            Some(Fault::Short(most)) if io.op.moves_data() => unsafe {
                self.queue_short(slot, io, most)?;
            },
            // SAFETY: passed on to the caller.
            _ => unsafe { self.inner.queue(&Io { tag: slot.into(), ..*io }) }?,
        }
        self.free.pop();
        Ok(())
    }

    unsafe fn queue_command(&mut self, command: &Command<'_>) -> Result<(), CommandRefused> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.queue_command(command) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.ready.append(&mut self.queued);
        self.inner.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.from_inner.clear();
        self.inner.reap(&mut self.from_inner);
        out.rung.append(&mut self.from_inner.rung);
        out.commands.append(&mut self.from_inner.commands);
        let before = out.done.len();
        for done in self.ready.drain(..).chain(self.from_inner.done.drain(..)) {
            // The inner engine's tags are slots (invariant 1).
            #[allow(clippy::cast_possible_truncation)]
            let number = done.tag as u32;
            let slot = &self.slots[number as usize];
            out.done.push(Done { tag: slot.tag, result: done.result.min(slot.most) });
            self.free.push(number);
        }
        out.done.len() - before
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.inner.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.ready.is_empty() { self.inner.wait(timeout) } else { Ok(()) }
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IoOp, Threads, ThreadsSetup};
    use std::os::unix::fs::FileExt;

    fn threads() -> (Threads, Arc<File>) {
        let setup = ThreadsSetup { depth: 4, threads: 1, cached_inline: true };
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        (Threads::new(setup).unwrap(), Arc::new(file))
    }

    /// Does one operation and returns its result.
    fn one(engine: &mut impl Engine, op: IoOp, offset: u64, segments: &[Segment]) -> i32 {
        let len = segments.iter().map(|s| s.len as u64).sum();
        let io = Io { tag: 77, op, file: FileId(0), offset, len, memory: segments.into() };
        // SAFETY: the caller's memory outlives this function, which waits for the result.
        unsafe { engine.queue(&io) }.unwrap();
        engine.submit().unwrap();
        let mut out = Reaped::default();
        while engine.reap(&mut out) == 0 {
            engine.wait(None).unwrap();
        }
        assert_eq!(out.done[0].tag, 77);
        out.done[0].result
    }

    #[test]
    fn a_short_write_writes_what_it_tells_and_at_most_its_granule() {
        for most in [0, 1, 511, 512, 513, 3000, 4096, 5000] {
            let (inner, file) = threads();
            let mut engine = Faulty::new(inner, 512, move |_: &Io<'_>| Some(Fault::Short(most)));
            engine.attach(&file).unwrap();
            let mut memory = vec![7u8; 4096];
            let base = memory.as_mut_ptr();
            let segments = [(0, 100), (100, 2000), (2100, 1996)]
                .map(|(at, len)| Segment { base: base.wrapping_add(at), len });
            let result = one(&mut engine, IoOp::Write, 0, &segments);
            assert_eq!(result, most.min(4096) as i32);
            let mut found = vec![0; 4096];
            file.read_exact_at(&mut found, 0).unwrap();
            let written = found.iter().take_while(|&&b| b == 7).count();
            assert_eq!(written, (most.next_multiple_of(512) as usize).min(4096));
            assert!(found[written..].iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn an_error_does_nothing_and_hits_only_what_was_chosen() {
        let (inner, file) = threads();
        let mut engine = Faulty::new(inner, 512, |io: &Io<'_>| {
            (io.offset == 4096).then_some(Fault::Error(libc::EIO))
        });
        engine.attach(&file).unwrap();
        let mut memory = [1u8; 512];
        let segment = [Segment { base: memory.as_mut_ptr(), len: 512 }];
        assert_eq!(one(&mut engine, IoOp::Write, 4096, &segment), -libc::EIO);
        assert_eq!(one(&mut engine, IoOp::Write, 8192, &segment), 512);
        let mut found = [9; 512];
        file.read_exact_at(&mut found, 4096).unwrap();
        assert_eq!(found, [0; 512]);
    }

    #[test]
    fn the_same_seed_is_the_same_fate() {
        let fates = |seed| {
            let mut choose = seeded(seed, 200);
            let io = |i| Io {
                tag: i,
                op: IoOp::Read,
                file: FileId(0),
                offset: i * 512,
                len: 4096,
                memory: IoMemory::NONE,
            };
            (0..1000).map(|i| choose(&io(i))).collect::<Vec<_>>()
        };
        assert_eq!(fates(1), fates(1));
        assert_ne!(fates(1), fates(2));
        let hit = fates(3).iter().flatten().count();
        assert!((100..300).contains(&hit), "{hit} of 1000");
    }
}
