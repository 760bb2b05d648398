//! Linux AIO, for files opened with O_DIRECT.
//!
//! A whole batch goes to the kernel in one `io_submit`. Completions are read from the ring that the
//! kernel shares with us, without a system call. Doorbells are an epoll set, and that set is polled
//! by one more request of the same context, so that one `io_getevents` sleeps for kicks and
//! completions alike. What Linux AIO does not know (fallocate, discard) helper threads do.

use ringway_core::Segment;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

mod context;

use crate::bells::Bells;
use crate::engine::{
    BellId, Counters, Done, Engine, FileId, Files, Full, Io, IoOp, Limits, Reaped,
};
use crate::pool::Pool;
use crate::sys::{self, Job};
use context::{Context, Event, FDSYNC, Iocb, POLL, PREAD, PREADV, PWRITE, PWRITEV};

/// The data of the request that polls the doorbells; tags leave the top bit clear.
const BELLS: u64 = u64::MAX;

/// An engine on one AIO context.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap`, and is at most `limits.depth`; each is
///    in exactly one of `batch`, the context, `jobs`, the helper and `ready`.
/// 2. `batch` holds at most `limits.depth` operations and one poll; `pointers` has one for each
///    place of it, and `batch` never moves.
#[derive(Debug)]
pub struct LinuxAio {
    // First, so that they are dropped first: each waits until its memory is let go.
    context: Context,
    helper: Pool,
    limits: Limits,
    files: Files<()>,
    bells: Bells,
    batch: Vec<Iocb>,
    pointers: Box<[*const Iocb]>,
    jobs: Vec<Job>,
    ready: Vec<Done>,
    /// True while the doorbells are polled by the context, or are about to be.
    listening: bool,
    in_flight: u32,
    counters: Counters,
}

// SAFETY: the pointers lead into `batch`, which moves with the engine but stays where it is in
// memory; the kernel follows them during `io_submit` only.
unsafe impl Send for LinuxAio {}

impl LinuxAio {
    /// A context for `depth` operations at a time, and a helper thread for each file that needs one.
    ///
    /// # Errors
    /// If the kernel has no Linux AIO, or its limit of requests (sysctl fs.aio-max-nr) is reached.
    pub fn new(depth: u32) -> io::Result<Self> {
        let limits = Limits::new("linux-aio", depth);
        let bells = Bells::new()?;
        let room = depth as usize + 1;
        let batch = Vec::<Iocb>::with_capacity(room);
        let pointers = (0..room).map(|i| batch.as_ptr().wrapping_add(i)).collect();
        Ok(Self {
            context: Context::new(depth + 1)?,
            helper: Pool::new(1, depth, bells.waker())?,
            limits,
            files: Files::new(),
            bells,
            batch,
            pointers,
            jobs: Vec::with_capacity(depth as usize),
            ready: Vec::with_capacity(depth as usize),
            listening: false,
            in_flight: 0,
            counters: Counters::default(),
        })
    }

    /// Hands the batch to the kernel. What it refuses at once becomes a result; what it has no
    /// room for stays in the batch, in order, and goes with the next call.
    fn push_batch(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.batch.len() {
            self.counters.syscalls += 1;
            match self.context.submit(&self.pointers[sent..self.batch.len()]) {
                Ok(taken) => sent += taken,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => break,
                Err(errno) if self.batch[sent].data == BELLS => {
                    return Err(io::Error::from_raw_os_error(errno));
                }
                Err(errno) => {
                    self.ready.push(Done { tag: self.batch[sent].data, result: -errno });
                    sent += 1;
                }
            }
        }
        self.batch.drain(..sent);
        Ok(())
    }

    /// Asks the context to complete a request when a doorbell rings.
    fn listen(&mut self) {
        if self.listening {
            return;
        }
        let events = u64::from(libc::POLLIN as u16);
        let fildes = self.bells.as_raw_fd();
        let poll = Iocb { data: BELLS, opcode: POLL, fildes, buf: events, ..Iocb::default() };
        self.batch.push(poll);
        self.listening = true;
    }

    /// Sorts one completion; collected here, acted on by whoever reaps.
    fn sort(event: Event, listening: &mut bool, out: &mut Vec<Done>) {
        if event.data == BELLS {
            *listening = false;
            return;
        }
        // The kernel moves at most i32::MAX bytes, and errors are small.
        #[allow(clippy::cast_possible_truncation)]
        out.push(Done { tag: event.data, result: event.res as i32 });
    }
}

impl Engine for LinuxAio {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        if !sys::is_direct(file)? {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "linux-aio needs a file opened with O_DIRECT (cache mode none): through the page \
                 cache io_submit would block until each operation is done",
            ));
        }
        let id = self.files.attach(file, ());
        self.helper.attach(id, true);
        Ok(id)
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(file);
        self.helper.attach(file, false);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        self.bells.unwatch(fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        let fd = self.files.get(io.file).fd;
        // SAFETY: the caller keeps to our limits, which have no registered buffers.
        let segments = unsafe { io.memory.segments_unchecked() };
        match io.op {
            IoOp::Read => self.batch.push(transfer(io, segments, fd, [PREAD, PREADV], 0)),
            IoOp::Write => self.batch.push(transfer(io, segments, fd, [PWRITE, PWRITEV], 0)),
            IoOp::WriteDurable => {
                self.batch.push(transfer(io, segments, fd, [PWRITE, PWRITEV], libc::RWF_DSYNC));
            }
            IoOp::Sync => {
                let sync = Iocb { data: io.tag, opcode: FDSYNC, fildes: fd, ..Iocb::default() };
                self.batch.push(sync);
            }
            IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard => {
                // SAFETY: as above.
                self.jobs.push(unsafe { Job::new(io, fd) });
            }
        }
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.counters.syscalls += self.helper.send(self.jobs.drain(..));
        self.push_batch()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.take(&mut out.rung);
        let before = out.done.len();
        out.done.append(&mut self.ready);
        self.helper.take(&mut out.done);
        let was_listening = self.listening;
        while let Some(event) = self.context.next() {
            Self::sort(event, &mut self.listening, &mut out.done);
        }
        if was_listening && !self.listening {
            // If the set is beyond use, `wait` says so.
            let _ = self.bells.poll(&mut self.counters);
            self.bells.take(&mut out.rung);
        }
        let found = out.done.len() - before;
        // At most `depth` are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = found as u32;
        self.in_flight -= fewer;
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.bells.poll(&mut self.counters)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.listen();
        self.submit()?;
        if !self.ready.is_empty() || self.bells.any() || self.context.any() {
            return Ok(());
        }
        if !self.helper.before_sleep()? {
            return Ok(());
        }
        self.counters.sleeps += 1;
        self.counters.syscalls += 1;
        let slept = self.context.sleep(timeout);
        self.helper.after_sleep();
        slept
    }

    /// The request that listens goes with the batch: one `io_submit`, not two.
    fn submit_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// A transfer of one segment, or of several.
#[inline]
fn transfer(
    io: &Io<'_>,
    segments: &[Segment],
    fd: RawFd,
    [one, several]: [u16; 2],
    rw_flags: i32,
) -> Iocb {
    let (opcode, buf, nbytes) = match *segments {
        [segment] => (one, segment.base.expose_provenance(), segment.len),
        _ => (several, segments.as_ptr().expose_provenance(), segments.len()),
    };
    Iocb {
        data: io.tag,
        rw_flags,
        opcode,
        fildes: fd,
        buf: buf as u64,
        nbytes: nbytes as u64,
        offset: sys::kernel_offset(io.offset),
        ..Iocb::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Mode, Suite, takes_direct};
    use ringway_testkit::{Need, skip};

    #[test]
    fn works_without_the_ring() {
        let dir = std::env::temp_dir();
        if !takes_direct(&dir) {
            return skip(Need::Direct, dir.display());
        }
        if let Err(error) = LinuxAio::new(1) {
            return skip(Need::LinuxAio, error);
        }
        let make = |depth| {
            let mut engine = LinuxAio::new(depth).unwrap();
            assert!(engine.context.ring_is_known, "the kernel's ring is as we know it");
            engine.context.ring_is_known = false;
            Box::new(engine) as Box<dyn Engine>
        };
        Suite {
            make: &make,
            dir: &dir,
            modes: &[Mode::Direct],
            moves_data: true,
            syscalls_per_io_max: 10.0,
            block_device: None,
        }
        .run();
    }
}
