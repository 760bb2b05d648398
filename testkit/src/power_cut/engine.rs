//! The engine of a simulated disk: one queue's or one worker's way to it.

use super::disk::SimulatedDisk;
use ringway_aio::bells::Bells;
use ringway_aio::{
    BellId, Counters, Done, Engine, FileId, Full, Io, IoMemory, IoOp, Limits, Reaped,
};
use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Operations at a time: few, so that backlogs are met.
const DEPTH: u32 = 24;
/// What one operation takes.
const BYTES_MAX: u32 = 1 << 20;

/// An engine on a [`SimulatedDisk`].
#[derive(Debug)]
pub struct PowerCutEngine {
    disk: SimulatedDisk,
    number: usize,
    limits: Limits,
    /// Queued, not submitted.
    queued: Vec<Queued>,
    in_flight: u32,
    /// What the disk does with each reap. 0 leaves it to the owner of the disk.
    steps: u32,
    bells: Option<Bells>,
    counters: Counters,
    done: Vec<Done>,
}

/// An [`Io`] with a list of its own.
#[derive(Debug)]
struct Queued {
    tag: u64,
    op: IoOp,
    file: FileId,
    offset: u64,
    len: u64,
    segments: Vec<Segment>,
}

impl PowerCutEngine {
    /// An engine on `disk` for the tests' own thread: the disk moves when its owner says so.
    #[must_use]
    pub fn by_hand(disk: &SimulatedDisk) -> Self {
        Self {
            number: disk.add_engine(),
            disk: disk.clone(),
            limits: Limits { max_bytes: BYTES_MAX, ..Limits::new("power cut (simulation)", DEPTH) },
            queued: Vec::new(),
            in_flight: 0,
            steps: 0,
            bells: None,
            counters: Counters::default(),
            done: Vec::new(),
        }
    }

    /// An engine on `disk` for a worker: the disk moves whenever somebody looks.
    #[must_use]
    pub fn for_worker(disk: &SimulatedDisk) -> Self {
        let mut engine = Self::by_hand(disk);
        engine.steps = 6;
        engine
    }

    fn bells(&mut self) -> io::Result<&mut Bells> {
        if self.bells.is_none() {
            self.bells = Some(Bells::new()?);
        }
        self.bells.as_mut().ok_or_else(|| io::Error::other("just made"))
    }
}

impl Drop for PowerCutEngine {
    fn drop(&mut self) {
        self.disk.remove_engine(self.number);
    }
}

impl Engine for PowerCutEngine {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, _file: &Arc<File>) -> io::Result<FileId> {
        Ok(FileId(0))
    }

    fn detach(&mut self, _file: FileId) {}

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells()?.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        if let Some(bells) = &mut self.bells {
            bells.unwatch(fd);
        }
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        let &Io { tag, op, file, offset, len, memory } = io;
        let segments = memory.segments().to_vec();
        self.queued.push(Queued { tag, op, file, offset, len, segments });
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        for queued in self.queued.drain(..) {
            let Queued { tag, op, file, offset, len, segments } = queued;
            let memory = IoMemory::Segments(&segments);
            self.disk.start(self.number, &Io { tag, op, file, offset, len, memory });
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        if let Some(bells) = &mut self.bells {
            bells.take(&mut out.rung);
        }
        for _ in 0..self.steps {
            self.disk.step();
        }
        let found = self.disk.take_done(self.number, &mut self.done);
        out.done.append(&mut self.done);
        self.in_flight -= u32::try_from(found).expect("no more than were queued");
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        match &mut self.bells {
            Some(bells) => bells.poll(&mut self.counters),
            None => Ok(()),
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.in_flight > 0 {
            std::thread::yield_now();
            return self.poll_doorbells();
        }
        match &mut self.bells {
            Some(bells) => bells.wait(timeout, &mut self.counters),
            None => Ok(()),
        }
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
