//! Entering the kernel: to submit, to sleep, and at the end.

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, squeue};
use std::io;
use std::time::Duration;

use super::IoUring;
use super::transient::is_transient;
use crate::engine::{Engine, Reaped};

impl IoUring {
    /// One `io_uring_enter`: submits what is queued, lets the kernel post what is done, and with
    /// `want` = 1 sleeps until something is.
    pub(super) fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
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
    pub(super) fn must_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Queues an entry that is no operation, and makes room for it if it must.
    pub(super) fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: polls and their removal name no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.enter(0, None)?;
        }
    }

    /// Polls end when the completion queue overflows; the kernel says so and we begin anew. What
    /// arrived in between shows at once, as it is readable.
    #[cold]
    pub(super) fn rearm(&mut self) -> io::Result<()> {
        while let Some(poll) = self.doorbells.rearm() {
            self.push(&poll)?;
        }
        self.enter(0, None)
    }

    /// Submits polled transfers and asks their devices.
    #[cold]
    pub(super) fn poll(&mut self, want: u32) -> io::Result<()> {
        match &mut self.polled {
            Some(polled) if polled.is_busy() => {
                self.counters.syscalls += 1;
                polled.enter(want)
            }
            _ => Ok(()),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Io, IoMemory, IoOp};
    use crate::io_uring::IoUringSetup;
    use ringway_core::Segment;
    use ringway_testkit::{Need, skip};
    use std::sync::Arc;

    #[test]
    fn one_call_submits_and_sleeps() {
        let mut engine = match IoUring::new(IoUringSetup::new(4)) {
            Ok(engine) => engine,
            Err(error) => return skip(Need::IoUring, error),
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let file = engine.attach(&Arc::new(file)).unwrap();
        let mut data = vec![0u8; 512];
        let list = [Segment { base: data.as_mut_ptr(), len: data.len() }];
        let mut out = Reaped::with_capacity(4, 4);
        for round in 1..=20 {
            let memory = IoMemory::Segments(&list);
            let io = Io { tag: round, op: IoOp::Read, file, offset: 512, len: 512, memory };
            // SAFETY: data and list live until the result is reaped below.
            unsafe { engine.queue(&io) }.unwrap();
            let before = engine.counters();
            engine.submit_and_wait(None).unwrap();
            let after = engine.counters();
            assert_eq!((after.syscalls, after.sleeps), (before.syscalls + 1, before.sleeps + 1));
            out.clear();
            while engine.reap(&mut out) == 0 {
                // It ended early.
                engine.wait(None).unwrap();
            }
            assert_eq!((out.done[0].tag, out.done[0].result), (round, 512));
        }
    }
}
