//! How a session waits for a disk to finish what is in flight.

use super::Export;
use crate::queue::QueueLifecycle;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tracing::warn;

/// How often to say that a disk keeps a stopping queue waiting.
const DRAIN_REPORT: Duration = Duration::from_secs(5);

impl<Q: QueueLifecycle> Export<Q> {
    /// Waits for a worker's promise about queue `at` that depends on the disk, and says so now and then;
    /// `None` if it is not kept within [`Export::drain_max`] from `begun`.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn await_disk<T>(
        &self,
        begun: Instant,
        at: usize,
        promise: &Receiver<T>,
    ) -> io::Result<Option<T>> {
        let most = self.drain_max();
        loop {
            let left = most.saturating_sub(begun.elapsed());
            match promise.recv_timeout(left.min(DRAIN_REPORT)) {
                Ok(kept) => return Ok(Some(kept)),
                Err(RecvTimeoutError::Timeout) if begun.elapsed() < most => {
                    if let Some(pass) = self.limits().waiting.pass() {
                        warn!(
                            disk = self.disk().name(),
                            queue = at,
                            suppressed = pass.suppressed,
                            "still waiting for the disk to finish what is in flight"
                        );
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(gone) => return Err(io::Error::other(gone)),
            }
        }
    }
}
