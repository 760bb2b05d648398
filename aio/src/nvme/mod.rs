//! NVMe passthrough: commands of NVMe for the generic character device of a namespace
//! (`/dev/ng0n1`), which the kernel hands to the device past its block layer.
//!
//! One io_uring, of entries of 128 and completions of 32 bytes (Linux 5.19), carries commands
//! (IORING_OP_URING_CMD) and the doorbells, so that one system call submits and sleeps for both. There
//! is no page cache, no merging and no splitting below: a transfer that is longer than one command may
//! be ends short, and its caller goes on; what is erased goes in as many commands as it takes.
//!
//! How a ring begins and ends, and its files: `setup.rs`.

mod command;
mod flights;
mod namespace;
mod setup;
mod status;

pub use namespace::{Facts, Namespace};

use crate::engine::{
    BellId, Counters, Done, Engine, FileId, Files, Full, Handle, Io, IoOp, Limits, Reaped,
};
use crate::io_uring::doorbells::Doorbells;
use crate::io_uring::tags::BELL;
use crate::io_uring::transient::is_transient;
use command::{Blocks, Bytes, IO, IO_VEC, Memory, Transfer};
use flights::{Flight, Flights};
use io_uring::squeue::{Entry128, Flags};
use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring as Ring, cqueue, opcode};
use ringway_core::Segment;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// A ring of one worker, for namespaces.
///
/// The ring belongs to the thread that first submits, reaps or waits; before that it may be built, and
/// files and doorbells added, on another.
///
/// # Invariants
/// 1. Each operation in flight has a place in `flights`, whose number is the user data of its command; or
///    its result is in `refused`. Together there are at most `limits.depth`.
/// 2. The submission queue holds `limits.depth` + `BELLS` entries at least.
/// 3. The first `submitted` of `refused` may be reaped.
pub struct Nvme {
    limits: Limits,
    ring: Ring<Entry128, cqueue::Entry32>,
    files: Files<Arc<Namespace>>,
    flights: Flights,
    refused: Vec<Done>,
    submitted: usize,
    doorbells: Doorbells,
    enabled: bool,
    counters: Counters,
}

impl Engine for Nvme {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, _: &Arc<File>) -> io::Result<FileId> {
        Err(namespace::no_namespace())
    }

    fn attach_handle(&mut self, file: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        self.attach_namespace(file, handle)
    }

    fn detach(&mut self, file: FileId) {
        self.detach_namespace(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        crate::sys::check_open(fd)?;
        let poll = self.doorbells.watch(bell, fd);
        self.push_poll(poll.into())?;
        if self.enabled { self.enter(0, None) } else { Ok(()) }
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        let Some(remove) = self.doorbells.unwatch(bell, fd) else { return };
        // If the ring is beyond use, nothing rings any more.
        if self.push_poll(remove.into()).is_ok() && self.enabled {
            let _ = self.enter(0, None);
        }
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.flights.count() + self.refused.len() == self.limits.depth as usize {
            return Err(Full);
        }
        debug_assert!(io.tag & BELL == 0, "the top bit of a tag is clear");
        let facts = self.files.get(io.file).note.facts;
        let block = (1u64 << facts.block_shift) - 1;
        if (io.offset | io.len) & block != 0 {
            return self.refuse(io.tag, libc::EINVAL);
        }
        let blocks =
            Blocks { first: io.offset >> facts.block_shift, count: io.len >> facts.block_shift };
        let transfer = match io.op {
            IoOp::Read => Transfer::Read,
            IoOp::Write => Transfer::Write,
            IoOp::WriteDurable => Transfer::WriteDurable,
            IoOp::Sync => return self.flush(io, facts),
            IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard => {
                return self.erase(io, facts, blocks);
            }
        };
        // SAFETY: this engine has no registered buffers, so the caller names none.
        let segments = unsafe { io.memory.segments_unchecked() };
        let (op, memory, bytes) = one_command(&facts, segments);
        if bytes == 0 || u64::from(bytes) & block != 0 {
            let errno = if io.len == 0 { 0 } else { libc::EINVAL };
            return self.refuse(io.tag, errno);
        }
        let blocks = Blocks { count: u64::from(bytes) >> facts.block_shift, ..blocks };
        let command = command::transfer(&facts, transfer, blocks, memory);
        let flight = Flight::of_one(io.tag, table_index(io.file), bytes, facts);
        self.push(flight, op, command)
    }

    fn submit(&mut self) -> io::Result<()> {
        self.submitted = self.refused.len();
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
        out.done.extend(self.refused.drain(..self.submitted));
        self.submitted = 0;
        let mut ended = false;
        let (_, mut queue, completions) = self.ring.split();
        for found in completions {
            let tag = found.user_data();
            if tag & BELL != 0 {
                let more = cqueue::more(found.flags());
                if let Some(bell) = self.doorbells.rang(tag, found.result(), more) {
                    out.rung.push(bell);
                    ended |= !more;
                }
                continue;
            }
            // Numbers of places are ours.
            #[allow(clippy::cast_possible_truncation)]
            let at = tag as u32;
            let Some(flight) = self.flights.at(at) else { continue };
            let mut result = status::result(found.result());
            if result == 0 {
                if let Some(next) = flight.next_erase() {
                    let entry = entry(flight.file, IO, next).user_data(tag);
                    // SAFETY: it names nothing but the range in the flight, which stays.
                    if unsafe { queue.push(&entry) }.is_ok() {
                        continue;
                    }
                    // There is room (invariant 2). If not, all of it goes once more.
                    result = -libc::EAGAIN;
                } else {
                    result = flight.bytes as i32;
                }
            }
            out.done.push(Done { tag: flight.tag, result });
            self.flights.end(at);
        }
        drop(queue);
        if ended {
            let _ = self.rearm();
        }
        out.done.len() - before
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.submitted > 0 || !self.ring.completion().is_empty() {
            return Ok(());
        }
        self.counters.sleeps += 1;
        self.enter(1, timeout)
    }

    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.refused.is_empty() {
            return self.submit();
        }
        // If something is done already the kernel does not sleep.
        self.counters.sleeps += 1;
        self.enter(1, timeout)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl fmt::Debug for Nvme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvme {{ {} in flight, {:?} }}", self.flights.count(), self.limits)
    }
}

impl Nvme {
    fn flush(&mut self, io: &Io<'_>, facts: Facts) -> Result<(), Full> {
        let flight = Flight::of_one(io.tag, table_index(io.file), 0, facts);
        self.push(flight, IO, command::flush(&facts))
    }

    /// Write Zeroes or Dataset Management, if the device has it.
    fn erase(&mut self, io: &Io<'_>, facts: Facts, blocks: Blocks) -> Result<(), Full> {
        let most = match io.op {
            IoOp::Discard => facts.discard_blocks,
            _ => facts.zero_blocks,
        };
        if most == 0 || blocks.count == 0 {
            let errno = if most == 0 { libc::EOPNOTSUPP } else { 0 };
            return self.refuse(io.tag, errno);
        }
        let file = table_index(io.file);
        let (at, flight) =
            self.flights.take(Flight::erasing(io.tag, file, facts, io.op, blocks)).ok_or(Full)?;
        let Some(command) = flight.next_erase() else {
            self.flights.end(at);
            return self.refuse(io.tag, libc::EINVAL);
        };
        self.push_at(at, entry(file, IO, command))
    }

    /// An answer that needs no device: 0 or an error. It comes with the next submission.
    #[cold]
    fn refuse(&mut self, tag: u64, errno: i32) -> Result<(), Full> {
        self.refused.push(Done { tag, result: -errno });
        self.counters.queued += 1;
        Ok(())
    }

    #[inline]
    fn push(&mut self, flight: Flight, op: u32, command: Bytes) -> Result<(), Full> {
        let (at, flight) = self.flights.take(flight).ok_or(Full)?;
        let entry = entry(flight.file, op, command);
        self.push_at(at, entry)
    }

    #[inline]
    fn push_at(&mut self, at: u32, entry: Entry128) -> Result<(), Full> {
        // SAFETY: the caller of `queue` vouches for the memory until the tag is reaped.
        // A queue that is full, by doorbells, is the caller's to submit.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(at.into())) };
        if pushed.is_err() {
            self.flights.end(at);
            return Err(Full);
        }
        self.counters.queued += 1;
        Ok(())
    }

    /// Queues an entry for doorbells, and makes room for it if it must.
    fn push_poll(&mut self, entry: Entry128) -> io::Result<()> {
        loop {
            // SAFETY: polls and their removal name no memory.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            self.enter(0, None)?;
        }
    }

    /// Polls end when the completion queue overflows; the kernel says so and we begin anew. What
    /// arrived in between shows at once, as it is readable.
    #[cold]
    fn rearm(&mut self) -> io::Result<()> {
        while let Some(poll) = self.doorbells.rearm() {
            self.push_poll(poll.into())?;
        }
        self.enter(0, None)
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
            // What was not taken stays queued and goes with the next call.
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

/// Where a file's character device is in the ring's table; its block device follows.
#[inline]
fn table_index(file: FileId) -> u32 {
    2 * file.0
}

/// An entry with a command for the file at `file` of the ring's table.
#[inline]
fn entry(file: u32, op: u32, command: Bytes) -> Entry128 {
    opcode::UringCmd80::new(Fixed(file), op).cmd(command).build().flags(Flags::FIXED_FILE)
}

/// As much of a transfer's memory as one command takes: how it is named, the memory, and its bytes. All
/// of the first segments, or the beginning of the first.
#[inline]
fn one_command(facts: &Facts, segments: &[Segment]) -> (u32, Memory, u32) {
    let most = facts.max_bytes as usize;
    let (mut bytes, mut count) = (0, 0u32);
    for segment in segments {
        if bytes + segment.len > most {
            break;
        }
        bytes += segment.len;
        count += 1;
    }
    // Both are at most `max_bytes`.
    #[allow(clippy::cast_possible_truncation)]
    match (segments, count) {
        ([], _) => (IO, Memory { addr: 0, len: 0 }, 0),
        ([one], _) | ([one, ..], 0 | 1) => {
            let len = one.len.min(most) as u32;
            (IO, Memory { addr: one.base.expose_provenance() as u64, len }, len)
        }
        _ => {
            let addr = segments.as_ptr().expose_provenance() as u64;
            (IO_VEC, Memory { addr, len: count }, bytes as u32)
        }
    }
}

#[cfg(test)]
mod tests;
