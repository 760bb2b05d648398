//! The engine that does nothing, at once: the tutorial, and the yardstick for everything above it.
//!
//! Every operation succeeds and moves no byte. To begin another engine, copy this file: all engines
//! have the same functions in the same order.

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::Files;
use crate::bells::Bells;
use crate::engine::{BellId, Counters, Done, Engine, FileId, Full, Io, Limits, Reaped};

/// Completes everything, moves nothing.
///
/// # Invariants
/// 1. `done` holds one entry per operation in flight, at most `limits.depth`; the first `started`
///    of them have been submitted.
#[derive(Debug)]
pub struct Null {
    limits: Limits,
    files: Files<()>,
    bells: Bells,
    done: Vec<Done>,
    started: usize,
    counters: Counters,
}

impl Null {
    /// An engine for `depth` operations at a time.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(depth: u32) -> io::Result<Self> {
        Ok(Self {
            limits: Limits::new("null", depth),
            files: Files::new(),
            bells: Bells::new()?,
            done: Vec::with_capacity(depth as usize),
            started: 0,
            counters: Counters::default(),
        })
    }
}

impl Engine for Null {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        Ok(self.files.attach(file, ()))
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        self.bells.unwatch(fd);
    }

    #[inline]
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.done.len() == self.limits.depth as usize {
            return Err(Full);
        }
        // limits().max_bytes fits in i32.
        #[allow(clippy::cast_possible_truncation)]
        let result = if io.op.moves_data() { io.len as i32 } else { 0 };
        self.done.push(Done { tag: io.tag, result });
        self.counters.queued += 1;
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        self.started = self.done.len();
        Ok(())
    }

    #[inline]
    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.take(&mut out.rung);
        let found = self.started;
        if found > 0 {
            out.done.extend(self.done.drain(..found));
            self.started = 0;
        }
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.bells.poll(&mut self.counters)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.started > 0 {
            return Ok(());
        }
        self.bells.wait(timeout, &mut self.counters)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
