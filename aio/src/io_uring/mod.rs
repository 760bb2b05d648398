//! io_uring, as much of it as the running kernel has.
//!
//! One ring carries transfers, flushes, fallocate, discard, commands for drivers and the doorbells
//! (multishot polls), so that one system call submits and sleeps for all of them. `reap` stays in
//! user space unless the kernel has flagged work that only entering it can finish.
//!
//! Here is what each transfer passes (hot). How a ring begins: `setup.rs`; how it ends: `end.rs`;
//! doorbells: `bells.rs`; entries that change a file: `changes.rs`; transfers that go another way:
//! `detours.rs`.

use io_uring::squeue::Flags;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring as Ring, cqueue, opcode, squeue};
use ringway_core::Segment;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

mod bells;
mod buffers;
mod changes;
mod commands;
mod copies;
mod detours;
pub(crate) mod doorbells;
mod end;
pub(crate) mod features;
mod polled;
mod setup;
pub(crate) mod tags;
pub(crate) mod transient;

pub use features::{Feature, Features, IoUringSetup, probe};
pub use polled::can_poll;

use crate::engine::{
    BellId, Command, CommandRefused, Counters, Done, Engine, FileId, Files, Full, Io, IoOp, Limits,
    Reaped,
};
use crate::pair::Second;
use crate::sys;
use buffers::Buffers;
use copies::Copies;
use doorbells::Doorbells;
use polled::Polled;
use tags::{BELL, COMMAND};
use transient::is_transient;

/// What is to be known of a file.
#[derive(Clone, Copy, Debug)]
struct Note {
    /// Of its entries: whether the file is registered.
    flags: Flags,
    /// Its transfers go to the polled ring.
    polled: bool,
    /// They did, and its device has no queues to poll.
    cannot_poll: bool,
    /// Its writes are copied here.
    copied: bool,
}

/// A ring of one worker.
///
/// The ring belongs to the thread that first submits, reaps or waits; before that it may be built,
/// and files and doorbells added, on another.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap`, and is at most `limits.depth`.
/// 2. The submission queue holds `limits.depth` + `BELLS` entries at least, and one for each command.
/// 3. `commands` counts them from `queue_command` to `reap`.
/// 4. If `limits.registered_buffers` is 0, no operation names a registered buffer; if not, `polled` is
///    `None` and no file is `copied`.
pub struct IoUring {
    limits: Limits,
    ring: Ring,
    features: Features,
    files: Files<Note>,
    polled: Option<Polled>,
    copies: Copies,
    buffers: Buffers,
    doorbells: Doorbells,
    enabled: bool,
    /// Rings when something completes, for an owner that sleeps elsewhere.
    bell: Option<OwnedFd>,
    in_flight: u32,
    commands: u32,
    counters: Counters,
}

impl Engine for IoUring {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.attach_file(file)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.register_memory(regions) }
    }

    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.buffers.set(&self.ring.submitter(), number, buffer) }
    }

    fn detach(&mut self, file: FileId) {
        self.detach_file(file);
    }

    fn cannot_poll(&self, file: FileId) -> bool {
        self.files.get(file).note.cannot_poll
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.watch_bell(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.unwatch_bell(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        debug_assert!(io.tag & BELL == 0, "the top bit of a tag is clear");
        let file = self.files.get(io.file);
        let Note { flags, polled, copied, .. } = file.note;
        // Neither files nor buffers are registered with the polled ring. A durable write ends with a
        // flush, which no device is polled for.
        if polled && matches!(io.op, IoOp::Read | IoOp::Write) {
            return self.queue_polled(io);
        }
        // SAFETY: passed on to the caller; with registered buffers no file is `copied` (invariant 4).
        if copied && unsafe { self.copies.take(io, file.fd) } {
            self.in_flight += 1;
            self.counters.queued += 1;
            return Ok(());
        }
        let fd = if flags.is_empty() { file.fd } else { io.file.0 as i32 };
        let entry = if self.buffers.in_use() {
            self.entry_with_buffers(io, Fd(fd))
        } else {
            // SAFETY: no buffer is registered, so the caller names none.
            entry(io, Fd(fd), unsafe { io.memory.segments_unchecked() }, None)
        };
        let entry = entry.flags(flags).user_data(io.tag);
        // SAFETY: the caller vouches for the memory until the tag is reaped.
        // A queue that is full, by doorbells, is the caller's to submit.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Full)?;
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    unsafe fn queue_command(&mut self, asked: &Command<'_>) -> Result<(), CommandRefused> {
        // SAFETY: passed on to the caller.
        unsafe { self.push_command(asked) }
    }

    fn submit(&mut self) -> io::Result<()> {
        if self.polled.is_some() {
            self.poll(0)?;
        }
        self.copies.carry_out(&mut self.counters);
        if self.ring.submission().is_empty() && !self.must_enter() {
            return Ok(());
        }
        self.enter(0, None)
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        if self.must_enter() || !self.enabled {
            // If the ring is beyond use, `submit` and `wait` say so.
            let _ = self.enter(0, None);
        }
        let before = out.done.len();
        if self.polled.is_some() {
            self.reap_polled(out);
        }
        self.copies.reap(out);
        let mut ended = false;
        for found in self.ring.completion() {
            let tag = found.user_data();
            if tag & BELL == 0 {
                out.done.push(Done { tag, result: found.result() });
                continue;
            }
            let more = cqueue::more(found.flags());
            if tag & COMMAND != 0 {
                let tag = tag & !(BELL | COMMAND);
                out.commands.push(Done { tag, result: found.result() });
                self.commands -= u32::from(!more);
                continue;
            }
            if let Some(bell) = self.doorbells.rang(tag, found.result(), more) {
                out.rung.push(bell);
                ended |= !more;
            }
        }
        if ended {
            let _ = self.rearm();
        }
        let found = out.done.len() - before;
        // At most `depth` are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = found as u32;
        self.in_flight -= fewer;
        found
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.copies.any() || !self.ring.completion().is_empty() {
            return Ok(());
        }
        // Nothing rings when a polled transfer is done: whoever has some under way does not sleep.
        if self.polled.as_ref().is_some_and(Polled::is_busy) {
            return self.poll(0);
        }
        self.counters.sleeps += 1;
        self.enter(1, timeout)
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        // Two rings are two calls, and copies are done before anybody sleeps.
        if self.polled.is_some() || self.copies.concern_a_sleep() {
            self.submit()?;
            return self.wait(timeout);
        }
        // If something is done already the kernel does not sleep.
        self.counters.sleeps += 1;
        self.enter(1, timeout)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Second for IoUring {
    fn bell(&mut self) -> io::Result<RawFd> {
        let bell = sys::eventfd()?;
        // What a restricted ring takes is restricted once it is enabled, which its owner's first turn does.
        self.ring.submitter().register_eventfd(bell.as_raw_fd())?;
        Ok(self.bell.insert(bell).as_raw_fd())
    }

    fn before_sleep(&mut self) -> io::Result<bool> {
        // What was not taken, and what only entering the kernel completes.
        self.submit()?;
        let is_idle = self.ring.submission().is_empty() && self.ring.completion().is_empty();
        Ok(is_idle && !self.copies.any() && !self.must_enter())
    }
}

impl fmt::Debug for IoUring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limits, features, in_flight, .. } = self;
        write!(f, "IoUring {{ {in_flight} in flight, {limits:?}, {features:?} }}")
    }
}

impl IoUring {
    /// One `io_uring_enter`: submits what is queued, lets the kernel post what is done, and with
    /// `want` = 1 sleeps until something is.
    fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        if !self.enabled {
            // Binds the ring to this thread.
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        let until = timeout.map(Timespec::from);
        let mut args = SubmitArgs::new();
        if let Some(until) = &until {
            args = args.timespec(until);
        }
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        let count = u32::try_from(self.ring.submission().len()).expect("the ring is smaller");
        self.counters.syscalls += 1;
        // SAFETY: the queued entries follow the rules of `queue`, and `args` outlives the call.
        let entered =
            unsafe { self.ring.submitter().enter(count, want, flags.bits(), Some(&args)) };
        match entered {
            // Time is over, a signal came, or the kernel is short of memory or of room for
            // completions: what was not taken stays queued and goes with the next call.
            Err(e) if is_transient(&e) => Ok(()),
            entered => entered.map(drop),
        }
    }

    /// True if only entering the kernel brings further completions.
    #[inline]
    fn must_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }
}

/// Translates an operation on `segments`; `buffer` is the registered one that they lie in, if any.
#[inline]
fn entry(io: &Io<'_>, fd: Fd, segments: &[Segment], buffer: Option<u16>) -> squeue::Entry {
    let offset = sys::kernel_offset(io.offset) as u64;
    match io.op {
        IoOp::Read => read(fd, segments, buffer, offset),
        IoOp::Write => IoUring::write(fd, segments, buffer, offset, 0),
        IoOp::WriteDurable => IoUring::write(fd, segments, buffer, offset, libc::RWF_DSYNC),
        IoOp::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        IoOp::PunchHole => IoUring::allocate(io, fd, sys::PUNCH_HOLE),
        IoOp::ZeroRange => IoUring::allocate(io, fd, sys::ZERO_RANGE),
        IoOp::Discard => IoUring::discard(io, fd),
    }
}

#[inline]
fn read(fd: Fd, segments: &[Segment], buffer: Option<u16>, offset: u64) -> squeue::Entry {
    match (segments, buffer) {
        (&[one], None) => opcode::Read::new(fd, one.base, length(one)).offset(offset).build(),
        (&[one], Some(buffer)) => {
            opcode::ReadFixed::new(fd, one.base, length(one), buffer).offset(offset).build()
        }
        (_, None) => {
            let (iov, count) = iovec(segments);
            opcode::Readv::new(fd, iov, count).offset(offset).build()
        }
        (_, Some(buffer)) => {
            let (iov, count) = iovec(segments);
            opcode::ReadvFixed::new(fd, iov, count, buffer).offset(offset).build()
        }
    }
}

#[inline]
fn length(segment: Segment) -> u32 {
    u32::try_from(segment.len).expect("within limits().max_bytes")
}

#[inline]
fn iovec(segments: &[Segment]) -> (*const libc::iovec, u32) {
    let count = u32::try_from(segments.len()).expect("within limits().max_segments");
    (segments.as_ptr().cast(), count)
}

#[cfg(test)]
mod tests;
