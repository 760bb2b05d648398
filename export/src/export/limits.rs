//! Limits of a disk that guests are using.

use super::Export;
use super::change::ANSWER_MAX;
use crate::queue::QueueLifecycle;
use ringway_throttle::Member;
use std::sync::Arc;
use std::time::Instant;

impl<Q: QueueLifecycle> Export<Q> {
    /// Gives the disk these limits in the place of those it had; none of them lifts all. Queues that
    /// wait for the old ones look again at once. Returns when all workers know; one that is stuck in
    /// the kernel takes them over when it comes back.
    pub fn set_limits(&self, limits: Vec<Arc<Member>>) {
        self.disk.set_limits(limits);
        // A worker that has ended has no queues.
        let promises: Vec<_> = self
            .workers
            .iter()
            .filter_map(|w| w.adopt_limits(Arc::clone(&self.disk)).ok())
            .collect();
        let deadline = Instant::now() + ANSWER_MAX;
        for promise in promises {
            let _ = promise.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}
