//! io_uring, as much of it as the running kernel has.
//!
//! One ring carries transfers, flushes, fallocate, discard, commands for drivers and the doorbells
//! (multishot polls), so that one system call submits and sleeps for all of them. `reap` stays in
//! user space unless the kernel has flagged work that only entering it can finish.

use io_uring::squeue::Flags;
use io_uring::types::Fd;
use io_uring::{IoUring as Ring, cqueue, squeue};
use ringway_core::Segment;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

mod buffers;
mod copies;
mod doorbells;
mod enter;
mod entry;
mod features;
mod polled;
mod tags;
mod transient;

pub use features::{Feature, Features, IoUringSetup, probe};
pub use polled::can_poll;

use crate::engine::{
    BellId, Command, CommandPort, CommandRefused, Counters, Done, Engine, FileId, Full, Io,
    IoMemory, IoOp, Limits, OpSet, Reaped,
};
use crate::files::Files;
use crate::sys;
use buffers::Buffers;
use copies::Copies;
use doorbells::Doorbells;
use entry::{COMMAND_BYTES, command, entry, entry_registered};
use features::{FILES, set_up};
use polled::Polled;
use tags::{BELL, COMMAND};

/// Room in the ring for doorbells, beside `depth` operations. More are fine: a submission queue
/// that is full is submitted, and what a completion queue cannot hold the kernel keeps.
const BELLS: u32 = 64;

/// What is to be known of a file.
#[derive(Clone, Copy, Debug)]
struct Note {
    /// Of its entries: whether the file is registered.
    flags: Flags,
    /// Its transfers go to the polled ring.
    polled: bool,
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
    in_flight: u32,
    commands: u32,
    counters: Counters,
}

impl IoUring {
    /// Sets a ring up, with all features that the kernel has.
    ///
    /// # Errors
    /// Says why this host has no io_uring for us: too old, switched off, or out of memory.
    pub fn new(setup: IoUringSetup<'_>) -> io::Result<Self> {
        let IoUringSetup { depth, without, iopoll, buffers, commands } = setup;
        if iopoll && buffers > 0 {
            let why = "a polled ring has no registered buffers";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let entries = depth.max(1) + BELLS + commands;
        let (ring, features) = set_up(entries, buffers, without)?;
        let mut limits = Limits::new("io_uring", depth);
        if !features.has(Feature::Discard) {
            limits.ops = OpSet::ALL.without(IoOp::Discard);
        }
        if features.has(Feature::RegisteredBuffers) {
            limits.registered_buffers = buffers;
        }
        if commands > 0 && features.has(Feature::Commands) {
            limits.commands = Some(CommandPort { depth: commands, bytes: COMMAND_BYTES });
        }
        Ok(Self {
            buffers: Buffers::new(limits.registered_buffers),
            limits,
            ring,
            features,
            files: Files::new(),
            polled: iopoll.then(|| Polled::new(depth.max(1))).transpose()?,
            copies: Copies::new(depth),
            doorbells: Doorbells::new(BELLS as usize),
            enabled: false,
            in_flight: 0,
            commands: 0,
            counters: Counters::default(),
        })
    }

    /// What of io_uring is in use here, and why the rest is not.
    #[must_use]
    pub fn features(&self) -> &Features {
        &self.features
    }

    #[cold]
    fn queue_polled(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let Some(polled) = &mut self.polled else { return Err(Full) };
        // SAFETY: a polled ring has no registered buffers (invariant 4).
        let segments = unsafe { io.memory.segments_unchecked() };
        let entry = entry(io, Fd(self.files.get(io.file).fd), segments, None).user_data(io.tag);
        // SAFETY: as in `queue`.
        unsafe { polled.queue(&entry) }.map_err(|_| Full)?;
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    /// The entry of an operation, where there are registered buffers.
    #[inline(never)]
    fn entry_with_buffers(&self, io: &Io<'_>, fd: Fd) -> squeue::Entry {
        match io.memory {
            IoMemory::Segments(segments) => entry(io, fd, segments, self.buffers.find(segments)),
            IoMemory::Registered { buffer, offset } => {
                entry_registered(io, fd, buffer, self.buffers.address(buffer, offset))
            }
        }
    }
}

impl Engine for IoUring {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        if sys::is_in_memory(file)? {
            sys::mark_nonblocking(file)?;
        }
        let id = self.files.next();
        let fixed = self.features.has(Feature::RegisteredFiles) && id.0 < FILES;
        let flags = if fixed { Flags::FIXED_FILE } else { Flags::empty() };
        let polled = self.polled.is_some() && can_poll(file).is_ok();
        let copied = self.limits.registered_buffers == 0 && copies::concern(file)?;
        let id = self.files.attach(file, Note { flags, polled, copied });
        if fixed {
            let fd = self.files.get(id).fd;
            let updated = self.ring.submitter().register_files_update(id.0, &[fd]);
            if let Err(e) = updated {
                self.files.detach(id);
                return Err(e);
            }
        }
        Ok(id)
    }

    unsafe fn map_memory(&mut self, regions: &[Segment]) -> io::Result<()> {
        if self.in_flight > 0 {
            let submitted = self.submit();
            if submitted.is_err() || !self.ring.submission().is_empty() {
                self.buffers.forget();
                let why = "the kernel does not take now what is queued for other memory";
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
            }
        }
        // SAFETY: passed on to the caller. What is in flight keeps the pages of its buffer (Linux 5.13).
        unsafe { self.buffers.register(&self.ring.submitter(), &mut self.features, regions) }
    }

    unsafe fn set_buffer(&mut self, number: u16, buffer: Option<Segment>) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.buffers.set(&self.ring.submitter(), number, buffer) }
    }

    fn detach(&mut self, file: FileId) {
        let known = self.files.detach(file);
        if known.is_some_and(|known| known.note.flags.contains(Flags::FIXED_FILE)) {
            // If this fails the kernel keeps the file open until the ring is gone.
            let _ = self.ring.submitter().register_files_update(file.0, &[-1]);
        }
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        sys::check_open(fd)?;
        let poll = self.doorbells.watch(bell, fd);
        self.push(&poll)?;
        if self.enabled { self.enter(0, None) } else { Ok(()) }
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        let Some(remove) = self.doorbells.unwatch(bell, fd) else { return };
        // If the ring is beyond use, nothing rings any more.
        if self.push(&remove).is_ok() && self.enabled {
            let _ = self.enter(0, None);
        }
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        debug_assert!(io.tag & BELL == 0, "the top bit of a tag is clear");
        let file = self.files.get(io.file);
        let Note { flags, polled, copied } = file.note;
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
        let fd = if flags.is_empty() { file.fd } else { io.file.0.cast_signed() };
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
        let Some(CommandPort { depth, bytes }) = self.limits.commands else {
            return Err(CommandRefused::NoPort);
        };
        let mut data = [0; COMMAND_BYTES];
        let Some(room) = data.get_mut(..asked.data.len()) else {
            return Err(CommandRefused::TooLong { bytes: asked.data.len(), most: bytes });
        };
        room.copy_from_slice(asked.data);
        debug_assert!(asked.tag & (BELL | COMMAND) == 0, "the top two bits of a tag are clear");
        if self.commands == depth {
            return Err(CommandRefused::Full);
        }
        let file = self.files.get(asked.file);
        let flags = file.note.flags;
        let fd = if flags.is_empty() { file.fd } else { asked.file.0.cast_signed() };
        let entry = command(asked, Fd(fd), data).flags(flags);
        let entry = entry.user_data(asked.tag | BELL | COMMAND);
        // SAFETY: the caller vouches for what the command names.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| CommandRefused::Full)?;
        self.commands += 1;
        Ok(())
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
        if let Some(polled) = &mut self.polled {
            polled.reap(out);
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

impl fmt::Debug for IoUring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limits, features, in_flight, .. } = self;
        write!(f, "IoUring {{ {in_flight} in flight, {limits:?}, {features:?} }}")
    }
}
