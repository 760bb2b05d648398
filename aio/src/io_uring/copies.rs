//! Writes to files in memory, done by the worker itself.
//!
//! io_uring never writes through a cache in place: it sends each such write to a thread of the kernel,
//! which takes longer than the copy that is all there is to do. Reads it copies in place, many in one
//! call. A file in memory that is open with O_DIRECT (Linux 6.6) is not concerned.

use crate::engine::{Counters, Done, Io, IoOp, Reaped};
use crate::sys::{self, Job};
use crate::threads::INLINE_BYTES;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;

/// Writes that wait for the next submission, and results that wait for the next harvest.
#[derive(Debug)]
pub(super) struct Copies {
    batch: Vec<Job>,
    done: Vec<Done>,
}

/// True if writes to `file` are to be done here.
pub(super) fn concern(file: &File) -> io::Result<bool> {
    Ok(sys::is_in_memory(file) && !sys::is_direct(file)?)
}

impl Copies {
    /// Room for `depth` writes. Allocates; nothing else does.
    pub(super) fn new(depth: u32) -> Self {
        let room = depth as usize;
        Self { batch: Vec::with_capacity(room), done: Vec::with_capacity(room) }
    }

    /// True if this one is not the ring's: longer ones are better spread over the kernel's threads.
    ///
    /// # Safety
    /// The rules of [`crate::Engine::queue`], and the memory is no registered buffer.
    #[inline]
    pub(super) unsafe fn take(&mut self, io: &Io<'_>, fd: RawFd) -> bool {
        if !matches!(io.op, IoOp::Write | IoOp::WriteDurable) || io.len > INLINE_BYTES {
            return false;
        }
        // SAFETY: passed on to the caller.
        self.batch.push(unsafe { Job::new(io, fd) });
        true
    }

    /// Does what was taken.
    #[inline]
    pub(super) fn carry_out(&mut self, counters: &mut Counters) {
        for job in self.batch.drain(..) {
            counters.syscalls += 1;
            // SAFETY: the caller of `queue` vouched for the operation until its result is reaped.
            let result = unsafe { job.perform(0) };
            self.done.push(Done { tag: job.tag, result });
        }
    }

    /// True if some wait for the next submission, or their results for the next harvest.
    #[inline]
    pub(super) fn concern_a_sleep(&self) -> bool {
        !self.batch.is_empty() || self.any()
    }

    /// True if there are results.
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.done.is_empty()
    }

    #[inline]
    pub(super) fn reap(&mut self, out: &mut Reaped) {
        out.done.append(&mut self.done);
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::{Engine, Io, IoMemory, IoOp, Reaped};
    use crate::io_uring::{IoUring, IoUringSetup};
    use ringway_core::Segment;
    use ringway_testkit::{Need, skip};
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    /// What a file in memory answers, with `bytes` written through the cache: results right after the
    /// submission, and whether the data is there.
    fn write(bytes: usize) -> (usize, bool) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let file = Arc::new(file);
        let mut engine = IoUring::new(IoUringSetup::new(4)).unwrap();
        let id = engine.attach(&file).unwrap();
        let mut data = vec![7u8; bytes];
        let segments = [Segment { base: data.as_mut_ptr(), len: bytes }];
        let (op, len) = (IoOp::Write, bytes as u64);
        let memory = IoMemory::Segments(&segments);
        let io = Io { tag: 3, op, file: id, offset: 512, len, memory };
        // SAFETY: data and list live until the result is reaped below.
        unsafe { engine.queue(&io) }.unwrap();
        let mut out = Reaped::with_capacity(4, 4);
        assert_eq!(engine.reap(&mut out), 0, "nothing begins before it is submitted");
        engine.submit().unwrap();
        let at_once = engine.reap(&mut out);
        while out.done.is_empty() {
            engine.wait(None).unwrap();
            engine.reap(&mut out);
        }
        assert_eq!((out.done[0].tag, out.done[0].result), (3, i32::try_from(bytes).unwrap()));
        let mut read = vec![0; bytes];
        file.read_exact_at(&mut read, 512).unwrap();
        (at_once, read == data)
    }

    #[test]
    fn short_writes_to_memory_are_done_with_the_submission() {
        if let Err(error) = crate::io_uring::probe() {
            return skip(Need::IoUring, error);
        }
        assert_eq!(write(4096), (1, true));
        assert!(write(512 << 10).1, "long ones are the ring's");
    }
}
