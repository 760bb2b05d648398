//! Requests that are held because the disk has failed them, as an operator sees them.

use super::{ChangeError, Export};
use crate::queue::QueueLifecycle;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use tracing::info;

/// How long workers may take to begin with it. They do between two turns.
const BEGIN_MAX: Duration = Duration::from_secs(1);

/// How long to wait for what comes of it, so that whoever asked learns whether it has helped.
const OUTCOME_MAX: Duration = Duration::from_secs(2);

/// How often to look.
const POLL_EVERY: Duration = Duration::from_millis(5);

/// What came of another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    /// Requests that were tried again, or failed.
    pub requests: usize,
    /// Requests that are held now.
    pub held: u64,
}

impl<Q: QueueLifecycle> Export<Q> {
    /// Has held requests tried again, or with `fail` has their guest told that they have failed.
    /// Waits a moment for what comes of it, but not for a disk that does not answer.
    pub fn retry_held(&self, fail: bool) -> Retried {
        let begun = Instant::now();
        let asked = self.ask_to_retry(fail);
        let left = || BEGIN_MAX.saturating_sub(begun.elapsed());
        let requests = asked.into_iter().flat_map(|answer| answer.recv_timeout(left())).sum();
        while self.disk.held_under_way() > 0 && begun.elapsed() < OUTCOME_MAX {
            // Nobody unparks this thread.
            std::thread::park_timeout(POLL_EVERY);
        }
        Retried { requests, held: self.disk.held().map_or(0, |held| held.count) }
    }

    /// As [`Export::retry_held`], and nobody waits for it.
    pub(super) fn retry_held_by_the_way(&self) {
        if self.disk.held().is_some() {
            drop(self.ask_to_retry(false));
        }
    }

    fn ask_to_retry(&self, fail: bool) -> Vec<std::sync::mpsc::Receiver<usize>> {
        // A worker that has ended holds nothing.
        let disk = || std::sync::Arc::clone(&self.disk);
        self.workers.iter().filter_map(|worker| worker.retry(disk(), fail).ok()).collect()
    }

    /// An error if requests are held: what is in flight cannot be carried out then. Or if some were
    /// left unanswered since there were `left` of them.
    pub(super) fn holds_nothing(&self, left: u64) -> Result<(), ChangeError> {
        match self.disk.held() {
            Some(held) => Err(ChangeError::Held { count: held.count, reason: held.reason() }),
            None => match self.disk.held_and_left() - left {
                0 => Ok(()),
                count => {
                    let reason = "the disk has failed them".into();
                    Err(ChangeError::Held { count, reason })
                }
            },
        }
    }

    /// Says how many requests were left unanswered when queues have stopped.
    pub(super) fn tell_of_left(&self) {
        let left = self.disk.held_and_left();
        let count = left - self.left_reported.swap(left, SeqCst);
        if count > 0 {
            if let Some(pass) = self.limits().left.pass() {
                info!(
                    disk = self.disk.name(),
                    requests = count,
                    suppressed = pass.suppressed,
                    "held requests stay unanswered: whoever serves this guest next carries them out"
                );
            }
        }
    }
}
