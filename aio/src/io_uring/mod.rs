//! io_uring, as much of it as the running kernel has.
//!
//! One ring carries transfers, flushes, fallocate, discard and the doorbells (multishot poll of
//! their eventfds), so that one system call submits and sleeps for all of them. `reap` stays in
//! user space unless the kernel has flagged work that only entering it can finish.

use io_uring::squeue::Flags;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring as Ring, cqueue, opcode, squeue};
use ringway_core::Segment;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

mod buffers;
mod copies;
mod entry;
mod features;
mod polled;
mod transient;

pub use features::{Feature, Features, IoUringSetup, probe};
pub use polled::can_poll;

use crate::engine::{
    BellId, Counters, Done, Engine, FileId, Full, Io, IoOp, Limits, OpSet, Reaped,
};
use crate::files::Files;
use crate::sys;
use buffers::Buffers;
use copies::Copies;
use entry::entry;
use features::{FILES, set_up};
use polled::Polled;
use transient::is_transient;

/// Room in the ring for doorbells, beside `depth` operations. More are fine: a submission queue
/// that is full is submitted, and what a completion queue cannot hold the kernel keeps.
const BELLS: u32 = 64;

/// Set in the user data of everything that is no operation (tags leave it clear).
const BELL: u64 = 1 << 63;
/// The user data of what nobody waits for.
const NOBODY: u64 = u64::MAX;

/// A doorbell that is watched, or was.
#[derive(Clone, Copy, Debug)]
struct Bell {
    bell: BellId,
    fd: RawFd,
    /// Its poll request; tells this watch from earlier ones of the same slot.
    name: u64,
    state: Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Poll {
    Armed,
    Ended,
    Unused,
}

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
/// 2. The submission queue holds `limits.depth` + `BELLS` entries at least.
pub struct IoUring {
    limits: Limits,
    ring: Ring,
    features: Features,
    files: Files<Note>,
    polled: Option<Polled>,
    copies: Copies,
    buffers: Buffers,
    bells: Vec<Bell>,
    watches: u64,
    enabled: bool,
    in_flight: u32,
    counters: Counters,
}

impl IoUring {
    /// Sets a ring up, with all features that the kernel has.
    ///
    /// # Errors
    /// Says why this host has no io_uring for us: too old, switched off, or out of memory.
    pub fn new(setup: IoUringSetup<'_>) -> io::Result<Self> {
        let (ring, features) = set_up(setup.depth.max(1) + BELLS, setup.without)?;
        let ops = if features.has(Feature::Discard) {
            OpSet::ALL
        } else {
            OpSet::ALL.without(IoOp::Discard)
        };
        let limits = Limits {
            name: "io_uring",
            depth: setup.depth,
            max_segments: sys::MAX_SEGMENTS,
            max_bytes: sys::MAX_BYTES,
            ops,
        };
        Ok(Self {
            limits,
            ring,
            features,
            files: Files::new(),
            polled: setup.iopoll.then(|| Polled::new(setup.depth.max(1))).transpose()?,
            copies: Copies::new(setup.depth),
            buffers: Buffers::default(),
            bells: Vec::with_capacity(BELLS as usize),
            watches: 0,
            enabled: false,
            in_flight: 0,
            counters: Counters::default(),
        })
    }

    /// What of io_uring is in use here, and why the rest is not.
    #[must_use]
    pub fn features(&self) -> &Features {
        &self.features
    }

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

    /// Queues an entry that is no operation, and makes room for it if it must.
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: polls and their removal name no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.enter(0, None)?;
        }
    }

    /// Asks for `bells[slot]`. The poll reports each write of the eventfd, as edges; the counter
    /// need not be read.
    fn arm(&mut self, slot: usize) -> io::Result<()> {
        let bell = &mut self.bells[slot];
        bell.state = Poll::Armed;
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let poll = opcode::PollAdd::new(Fd(bell.fd), events).multi(true).build();
        let poll = poll.user_data(bell.name);
        self.push(&poll)
    }

    /// Polls end when the completion queue overflows; the kernel says so and we begin anew. What
    /// rang in between shows at once, as the counter is not zero.
    #[cold]
    fn rearm(&mut self) -> io::Result<()> {
        for slot in 0..self.bells.len() {
            if self.bells[slot].state == Poll::Ended {
                self.arm(slot)?;
            }
        }
        self.enter(0, None)
    }

    /// Submits polled transfers and asks their devices.
    #[cold]
    fn poll(&mut self, want: u32) -> io::Result<()> {
        match &mut self.polled {
            Some(polled) if polled.is_busy() => {
                self.counters.syscalls += 1;
                polled.enter(want)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn queue_polled(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let Some(polled) = &mut self.polled else { return Err(Full) };
        let entry = entry(io, Fd(self.files.get(io.file).fd), None).user_data(io.tag);
        // SAFETY: as in `queue`.
        unsafe { polled.queue(&entry) }.map_err(|_| Full)?;
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    /// Completes what is in the kernel, without a caller to hear of it.
    fn drain(&mut self) -> io::Result<()> {
        let mut out = Reaped::default();
        self.copies.carry_out(&mut self.counters);
        while self.in_flight > 0 {
            if self.reap(&mut out) == 0 {
                self.wait(Some(Duration::from_secs(1)))?;
            }
        }
        Ok(())
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
        let copied = copies::concern(file)?;
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
        // SAFETY: passed on to the caller.
        unsafe { self.buffers.register(&self.ring.submitter(), &mut self.features, regions) }
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
        let unused = self.bells.iter().position(|b| b.state == Poll::Unused);
        let slot = unused.unwrap_or(self.bells.len());
        self.watches += 1;
        let name = BELL | self.watches << 16 | slot as u64;
        let new = Bell { bell, fd, name, state: Poll::Armed };
        match self.bells.get_mut(slot) {
            Some(old) => *old = new,
            None => self.bells.push(new),
        }
        self.arm(slot)?;
        if self.enabled { self.enter(0, None) } else { Ok(()) }
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        let known = |b: &Bell| b.state != Poll::Unused && (b.bell, b.fd) == (bell, fd);
        let Some(slot) = self.bells.iter().position(known) else { return };
        self.bells[slot].state = Poll::Unused;
        let remove = opcode::PollRemove::new(self.bells[slot].name).build().user_data(NOBODY);
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
        if copied && self.copies.take(io, file.fd) {
            self.in_flight += 1;
            self.counters.queued += 1;
            return Ok(());
        }
        let fd = if flags.is_empty() { file.fd } else { io.file.0.cast_signed() };
        let entry =
            entry(io, Fd(fd), self.buffers.find(io.segments)).flags(flags).user_data(io.tag);
        // SAFETY: the caller vouches for the memory until the tag is reaped.
        // A queue that is full, by doorbells, is the caller's to submit.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Full)?;
        self.in_flight += 1;
        self.counters.queued += 1;
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
            // A result of a watch that is over finds no bell.
            let Some(bell) = self.bells.iter_mut().find(|b| b.name == tag) else { continue };
            if bell.state == Poll::Unused {
                continue;
            }
            out.rung.push(bell.bell);
            if !cqueue::more(found.flags()) {
                // A poll that failed would fail again.
                bell.state = if found.result() < 0 { Poll::Unused } else { Poll::Ended };
                ended = true;
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

impl Drop for IoUring {
    fn drop(&mut self) {
        if let Err(e) = self.drain() {
            // Only on a thread that does not own the ring. To go on would let the kernel write
            // into memory that is somebody else's by now.
            // Told as panics are: standard error may be of no use.
            let _abort = Abort;
            panic!("io_uring dropped with {} operations in flight: {e}", self.in_flight);
        }
        // Closing a ring lets go of its files some time later; their locks must not live on.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// Ends the process when it is dropped.
struct Abort;

impl Drop for Abort {
    fn drop(&mut self) {
        std::process::abort();
    }
}
