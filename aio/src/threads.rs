//! A pool of threads that make ordinary blocking calls: works on every file and every host.
//!
//! What the page cache (or tmpfs) can answer without blocking is done right in `submit`, so that
//! it needs no hop to a thread and back; its result comes out of `reap` like any other.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::bells::Bells;
use crate::engine::{
    BellId, Counters, Done, Engine, FileId, Files, Full, Io, IoOp, Limits, Reaped,
};
use crate::pair::Second;
use crate::pool::Pool;
use crate::sys::{self, Job};

/// The most bytes the owner moves by itself: about 10 us of copying; more is better spread over
/// the pool's threads.
pub(crate) const INLINE_BYTES: u64 = 128 << 10;

/// What the owner may try by itself before it asks a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    /// Nothing: the file goes to the device.
    Ask,
    /// Reads with RWF_NOWAIT: the file goes through the page cache.
    Nowait,
    /// All transfers: the file lies in memory.
    Copy,
}

impl First {
    fn of(file: &File) -> io::Result<Self> {
        if sys::is_in_memory(file) {
            return Ok(Self::Copy);
        }
        if sys::is_direct(file)? || !sys::can_refuse_to_block(file) {
            return Ok(Self::Ask);
        }
        Ok(Self::Nowait)
    }

    /// The RWF flags with which the owner may try `job`.
    fn flags(self, job: &Job) -> Option<c_int> {
        match self {
            Self::Copy if job.op().moves_data() && job.bytes() <= INLINE_BYTES => Some(0),
            Self::Nowait if job.op() == IoOp::Read && job.bytes() <= INLINE_BYTES => {
                Some(libc::RWF_NOWAIT)
            }
            _ => None,
        }
    }
}

/// How [`Threads`] is set up.
#[derive(Clone, Copy, Debug)]
pub struct ThreadsSetup {
    /// Operations at a time.
    pub depth: u32,
    /// Threads of the beginning, at least one, which are the most that one file gets; more than `depth` are of no use.
    /// Several files get more, 512 together at most, as operations wait for nothing else.
    pub threads: usize,
    /// Whether cached bytes are moved within `submit`, for files where that cannot block.
    pub cached_inline: bool,
}

impl ThreadsSetup {
    /// `depth` operations at a time on 16 threads (or `depth`, if that is fewer), and cached bytes moved
    /// at once.
    #[must_use]
    pub const fn new(depth: u32) -> Self {
        let threads = if depth < 16 { depth as usize } else { 16 };
        Self { depth, threads, cached_inline: true }
    }
}

/// Blocking calls on a pool of threads.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap` and is at most `limits.depth`; each is
///    in exactly one of `batch`, `ready` and the pool.
#[derive(Debug)]
pub struct Threads {
    // First, so that it is dropped first: dropping joins the threads.
    pool: Pool,
    limits: Limits,
    cached_inline: bool,
    files: Files<First>,
    bells: Bells,
    batch: Vec<(Job, First)>,
    ready: Vec<Done>,
    in_flight: u32,
    counters: Counters,
}

impl Threads {
    /// Starts the pool's threads.
    ///
    /// # Errors
    /// When the process is out of descriptors or threads.
    pub fn new(setup: ThreadsSetup) -> io::Result<Self> {
        let bells = Bells::new()?;
        Ok(Self {
            pool: Pool::new(setup.threads, setup.depth, bells.waker())?,
            limits: Limits::new("threads", setup.depth),
            cached_inline: setup.cached_inline,
            files: Files::new(),
            bells,
            batch: Vec::with_capacity(setup.depth as usize),
            ready: Vec::with_capacity(setup.depth as usize),
            in_flight: 0,
            counters: Counters::default(),
        })
    }
}

impl Engine for Threads {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        let first = if self.cached_inline { First::of(file)? } else { First::Ask };
        let id = self.files.attach(file, first);
        self.pool.attach(id, true);
        Ok(id)
    }

    fn detach(&mut self, file: FileId) {
        self.files.detach(file);
        self.pool.attach(file, false);
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
        let file = self.files.get(io.file);
        // SAFETY: the caller keeps to our limits, which have no registered buffers.
        self.batch.push((unsafe { Job::new(io, file.fd) }, file.note));
        self.in_flight += 1;
        self.counters.queued += 1;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        let (ready, counters) = (&mut self.ready, &mut self.counters);
        self.batch.retain(|(job, first)| {
            let Some(flags) = first.flags(job) else { return true };
            counters.syscalls += 1;
            // SAFETY: the caller of `queue` vouched for the operation until its result is reaped.
            let result = unsafe { job.perform(flags) };
            if result == -libc::EAGAIN || result == -libc::EOPNOTSUPP {
                return true;
            }
            ready.push(Done { tag: job.tag, result });
            false
        });
        let wakes = self.pool.send(self.batch.drain(..).map(|(job, _)| job));
        self.counters.syscalls += wakes;
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.take(&mut out.rung);
        let before = out.done.len();
        out.done.append(&mut self.ready);
        self.pool.take(&mut out.done);
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
        if !self.before_sleep()? {
            return Ok(());
        }
        let woken = self.bells.wait(timeout, &mut self.counters);
        self.after_sleep();
        woken
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Second for Threads {
    fn bell(&mut self) -> io::Result<RawFd> {
        Ok(self.bells.waker().fd())
    }

    fn before_sleep(&mut self) -> io::Result<bool> {
        Ok(self.ready.is_empty() && self.pool.before_sleep()?)
    }

    fn after_sleep(&mut self) {
        self.pool.after_sleep();
    }
}
