//! How a ring ends: nothing is in flight, or the process goes.

use super::IoUring;
use crate::engine::{Engine, Reaped};
use std::io;
use std::time::Duration;

impl IoUring {
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
