//! An engine that carries each operation out at once, by a function of yours: for data in memory, or
//! that is computed.

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::Null;
use crate::engine::{BellId, Counters, Engine, FileId, Full, Io, Limits, Reaped};

/// Has a function do each operation while it is queued.
///
/// The function runs on the worker's thread, so whatever it takes all queues of the worker wait for:
/// what has to wait for others, for a disk or a network, wants an engine that does it meanwhile.
pub struct Immediate<F> {
    limits: Limits,
    /// Has the tags in flight, and the doorbells.
    tags: Null,
    /// Of each tag in flight, in the same order.
    results: Vec<i32>,
    carry_out: F,
}

impl<F: FnMut(&Io<'_>) -> i32 + Send> Immediate<F> {
    /// An engine for `depth` operations at a time. `carry_out` returns the number of bytes moved (0
    /// for what moves none) or a negative errno; it may follow the segments of [`Io::memory`], which
    /// are mapped until it returns, by copying only, as a guest may write to them meanwhile.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(depth: u32, carry_out: F) -> io::Result<Self> {
        Ok(Self {
            limits: Limits::new("immediate", depth),
            tags: Null::new(depth)?,
            results: Vec::with_capacity(depth as usize),
            carry_out,
        })
    }
}

impl<F: FnMut(&Io<'_>) -> i32 + Send> Engine for Immediate<F> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.tags.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.tags.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.tags.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.tags.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { self.tags.queue(io) }?;
        self.results.push((self.carry_out)(io));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.tags.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        let found = self.tags.reap(out);
        let from = out.done.len() - found;
        for (done, result) in out.done[from..].iter_mut().zip(self.results.drain(..found)) {
            done.result = result;
        }
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.tags.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.tags.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.tags.counters()
    }
}
