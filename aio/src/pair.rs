//! Two engines in one worker, for files of two kinds: a chain of images whose base is not on this host.
//!
//! ```text
//! queue ─► the file's bit ─► first, or second        reap: the first, then the second
//! wait  ─► the first sleeps; the second's one descriptor is a doorbell there
//! ```
//!
//! All other doorbells are the first one's, too: for its files a worker makes the calls that it makes without a second.

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{
    BellId, Command, CommandRefused, Counters, Engine, FileId, Full, Handle, Io, Limits, Reaped,
};
use ringway_core::Segment;

/// With this bit a file is the second engine's.
const SECOND: u32 = 1 << 31;

/// The doorbell of the second engine: nobody else may use the number.
const BELL: BellId = 0xfffe_0000;

/// An engine whose owner can sleep elsewhere.
pub trait Second: Engine {
    /// A descriptor that rings (as doorbells do) when there is something to reap, while its owner sleeps. Called once,
    /// before anything else.
    ///
    /// # Errors
    /// What the host says.
    fn bell(&mut self) -> io::Result<RawFd>;

    /// True if there is nothing to be done without waiting: from now on, until [`Second::after_sleep`], the descriptor
    /// rings.
    ///
    /// # Errors
    /// As [`Engine::wait`].
    fn before_sleep(&mut self) -> io::Result<bool>;

    /// Its owner is awake again.
    fn after_sleep(&mut self) {}
}

/// Two engines: the first for what has a handle ([`Engine::attach_handle`]), the second for files.
///
/// It takes no commands and has no registered buffers; its other limits are the stricter of both.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap`, of both, and is at most `limits.depth`.
#[derive(Debug)]
pub struct Pair<A, B> {
    first: A,
    second: B,
    limits: Limits,
    in_flight: u32,
}

impl<A: Engine, B: Second> Pair<A, B> {
    /// Has both work together. `name` is what users know the pair by.
    ///
    /// # Errors
    /// What the host says to listening to the second.
    pub fn new(name: &'static str, mut first: A, mut second: B) -> io::Result<Self> {
        first.watch(BELL, second.bell()?)?;
        let (one, other) = (first.limits(), second.limits());
        let limits = Limits {
            name,
            depth: one.depth.min(other.depth),
            max_segments: one.max_segments.min(other.max_segments),
            max_bytes: one.max_bytes.min(other.max_bytes),
            // Files that are written are the second's.
            ops: other.ops,
            registered_buffers: 0,
            commands: None,
        };
        Ok(Self { first, second, limits, in_flight: 0 })
    }
}

impl<A: Engine, B: Second> Engine for Pair<A, B> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        let FileId(id) = self.second.attach(file)?;
        debug_assert_eq!(id & SECOND, 0);
        Ok(FileId(id | SECOND))
    }

    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        self.first.attach_handle(file, handle)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.first.map_memory(regions)? };
        // SAFETY: as before.
        unsafe { self.second.map_memory(regions) }
    }

    fn detach(&mut self, file: FileId) {
        match file.0 & SECOND {
            0 => self.first.detach(file),
            _ => self.second.detach(FileId(file.0 & !SECOND)),
        }
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        debug_assert_ne!(bell, BELL);
        self.first.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.first.unwatch(bell, fd);
    }

    #[inline]
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        let queued = if io.file.0 & SECOND == 0 {
            // SAFETY: passed on to the caller, who keeps to limits that are stricter than those of either.
            unsafe { self.first.queue(io) }
        } else {
            // SAFETY: as above.
            unsafe { self.second.queue(&Io { file: FileId(io.file.0 & !SECOND), ..*io }) }
        };
        self.in_flight += u32::from(queued.is_ok());
        queued
    }

    unsafe fn queue_command(&mut self, _: &Command<'_>) -> Result<(), CommandRefused> {
        Err(CommandRefused::NoPort)
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        self.second.submit()?;
        self.first.submit()
    }

    #[inline]
    fn reap(&mut self, out: &mut Reaped) -> usize {
        let mut count = self.first.reap(out);
        // The second is looked at in any case.
        out.rung.retain(|bell| *bell != BELL);
        count += self.second.reap(out);
        // At most `depth` are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = count as u32;
        self.in_flight -= fewer;
        count
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.first.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.second.before_sleep()? {
            return Ok(());
        }
        let woken = self.first.wait(timeout);
        self.second.after_sleep();
        woken
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.second.submit()?;
        if !self.second.before_sleep()? {
            return self.first.submit();
        }
        let woken = self.first.submit_and_wait(timeout);
        self.second.after_sleep();
        woken
    }

    fn counters(&self) -> Counters {
        let (one, other) = (self.first.counters(), self.second.counters());
        Counters {
            queued: one.queued + other.queued,
            syscalls: one.syscalls + other.syscalls,
            sleeps: one.sleeps + other.sleeps,
        }
    }
}
