//! How a session waits for a disk to finish what is in flight, and to make it durable.

use super::Export;
use crate::command::Handle;
use crate::queue::QueueLifecycle;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tracing::warn;

/// How often to say that a disk keeps a stopping queue waiting.
const DRAIN_REPORT: Duration = Duration::from_secs(5);

impl<Q: QueueLifecycle> Export<Q> {
    /// Makes durable what was answered, as a guest's flush does: by itself where the host can, else by the
    /// engines of the workers that have answered.
    ///
    /// # Errors
    /// [`Disk::sync`](ringway_disk::Disk::sync); that a worker has ended, or that an engine does not answer
    /// within [`Export::drain_max`], after which the flush may still end either way.
    pub fn sync(&self) -> io::Result<()> {
        // Whoever has the turn before is waited for within the same time.
        let begun = Instant::now();
        self.disk().sync_with(self.drain_max(), || {
            let ask = |worker: &Handle<Q>| worker.flush(Arc::clone(self.disk()));
            let asked: Vec<_> = self.workers.iter().map(ask).collect();
            let late =
                || io::Error::new(io::ErrorKind::TimedOut, "the flush has not ended in time");
            let end = |(at, promise): (usize, io::Result<_>)| {
                self.await_disk(begun, at, &promise?)?.ok_or_else(late)?
            };
            // All of them are waited for.
            let ends: Vec<_> = asked.into_iter().enumerate().map(end).collect();
            ends.into_iter().collect()
        })
    }

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
