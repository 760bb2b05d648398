//! An engine of `ringway-aio` on a file, without a device in between (hot).

use crate::backend::{Ask, Backend, Effort};
use anyhow::{Context, Result, bail};
use fastrand::Rng;
use ringway_aio::{
    Engine, FileId, Io, IoMemory, IoOp, IoUring, IoUringSetup, LinuxAio, Nvme, Reaped, Threads,
    ThreadsSetup,
};
use ringway_core::Segment;
use ringway_disk::{Disk, EngineKind};
use std::io;
use std::time::Duration;

const PAGE: usize = 4096;

/// Threads of the engine `threads`, as many as a worker of the daemon has.
const THREADS: usize = 16;

/// Memory that begins on a page.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; PAGE]);

/// An engine with one slot per request in flight.
///
/// # Invariants
/// 1. `segments[slot]` names memory in `_pages` that belongs to this slot alone. Neither it nor the
///    memory is touched while `busy[slot]`, which is from `start` to the `pop` of the slot.
/// 2. The engine is declared, and so dropped, before segments and memory.
pub(crate) struct FileBackend {
    engine: Box<dyn Engine>,
    file: FileId,
    segments: Box<[[Segment; 1]]>,
    busy: Box<[bool]>,
    room: usize,
    found: Reaped,
    taken: usize,
    failed: i32,
    _pages: Box<[Page]>,
}

impl FileBackend {
    /// `depth` slots of `room` bytes, each `skew` bytes behind the beginning of a page. To be made
    /// on the thread that uses it.
    ///
    /// # Errors
    /// What the host says to the engine.
    pub(crate) fn new(disk: &Disk, depth: u32, room: usize, skew: usize) -> Result<Self> {
        let stride = (room + skew).next_multiple_of(PAGE);
        let mut pages = vec![Page([0; PAGE]); stride / PAGE * depth as usize].into_boxed_slice();
        scatter(&mut pages);
        let base = pages.as_mut_ptr().cast::<u8>();
        let slot = |at| [Segment { base: base.wrapping_add(at * stride + skew), len: room }];
        let mut engine = engine(disk.engine(), depth)
            .with_context(|| format!("cannot start the engine {}", disk.engine()))?;
        let file = disk.attach(&mut engine)?;
        Ok(Self {
            engine,
            file,
            segments: (0..depth as usize).map(slot).collect(),
            busy: vec![false; depth as usize].into(),
            room,
            found: Reaped::with_capacity(depth as usize, 1),
            taken: 0,
            failed: 0,
            _pages: pages,
        })
    }
}

fn engine(kind: EngineKind, depth: u32) -> io::Result<Box<dyn Engine>> {
    Ok(match kind {
        EngineKind::IoUring => Box::new(IoUring::new(IoUringSetup::new(depth))?),
        EngineKind::LinuxAio => Box::new(LinuxAio::new(depth)?),
        EngineKind::Nvme => Box::new(Nvme::new(depth)?),
        EngineKind::Threads => {
            Box::new(Threads::new(ThreadsSetup { depth, threads: THREADS, cached_inline: true })?)
        }
        EngineKind::Own(own) => (own.make)(depth)?,
        EngineKind::Null
        | EngineKind::NullAfter(_)
        | EngineKind::Sim(_)
        | EngineKind::IoUringNbd
        | EngineKind::ThreadsNbd
        | EngineKind::Custom => {
            return Err(io::Error::other("it is not for files"));
        }
    })
}

/// Touches pages for the first time, in random order: then neighbours are seldom neighbours in
/// physical memory too, as in a process that has run for long. Else luck would decide how many
/// segments the kernel makes of a buffer.
fn scatter(pages: &mut [Page]) {
    let mut order: Vec<usize> = (0..pages.len()).collect();
    let mut random = Rng::with_seed(1);
    for last in (1..order.len()).rev() {
        let other = usize::try_from(random.u64(..=last as u64)).unwrap_or(0);
        order.swap(last, other);
    }
    for at in order {
        pages[at].0[0] = 0x5a;
    }
}

impl Backend for FileBackend {
    #[inline]
    fn start(&mut self, slot: u32, ask: &Ask) -> Result<()> {
        assert!(!std::mem::replace(&mut self.busy[slot as usize], true), "a slot is used twice");
        assert!(ask.len as usize <= self.room, "a request is longer than its memory");
        let segments = &mut self.segments[slot as usize];
        segments[0].len = ask.len as usize;
        let io = Io {
            tag: slot.into(),
            op: if ask.write { IoOp::Write } else { IoOp::Read },
            file: self.file,
            offset: ask.offset,
            len: ask.len.into(),
            memory: IoMemory::Segments(&*segments),
        };
        // SAFETY: invariants 1 and 2; `Target::open` keeps lengths below the limits of every engine,
        // and all engines read and write.
        if unsafe { self.engine.queue(&io) }.is_err() {
            bail!("the engine takes fewer requests at a time: use a smaller --iodepth");
        }
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> Result<()> {
        Ok(self.engine.submit()?)
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<(u32, bool)>> {
        if self.taken == self.found.done.len() {
            self.found.clear();
            self.taken = 0;
            if self.engine.reap(&mut self.found) == 0 {
                return Ok(None);
            }
        }
        let done = self.found.done[self.taken];
        self.taken += 1;
        let slot = u32::try_from(done.tag).context("a tag of nobody")?;
        self.busy[slot as usize] = false;
        let ok = usize::try_from(done.result) == Ok(self.segments[slot as usize][0].len);
        if !ok {
            self.failed = done.result;
        }
        Ok(Some((slot, ok)))
    }

    #[cold]
    fn complaint(&self) -> String {
        match self.failed {
            error if error < 0 => io::Error::from_raw_os_error(error.saturating_neg()).to_string(),
            bytes => format!("only {bytes} bytes were transferred"),
        }
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        Ok(self.engine.wait(Some(timeout))?)
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn memory(&mut self, slot: u32) -> &mut [u8] {
        assert!(!self.busy[slot as usize], "the memory of a request in flight");
        let base = self.segments[slot as usize][0].base;
        // SAFETY: `room` bytes in `_pages` that belong to this slot alone, which is not in flight
        // (invariant 1).
        unsafe { std::slice::from_raw_parts_mut(base, self.room) }
    }

    fn counted(&self) -> Option<Effort> {
        None
    }
}
