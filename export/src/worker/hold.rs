//! Requests that are held because a disk has failed them: what time and commands do with them.

use super::Worker;
use crate::command::QueueId;
use crate::queue::QueueLifecycle;
use ringway_aio::Engine;
use ringway_core::mem::HostRange;
use ringway_disk::Disk;
use std::sync::Arc;

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// Does what is due with held requests.
    #[cold]
    pub(super) fn tend_held(&mut self) {
        for queue in self.queues.iter_mut().flatten().filter(|queue| queue.disk.held() > 0) {
            queue.disk.tend_held(&mut self.engine);
        }
    }

    /// Tries held requests of a disk again, or has them fail.
    #[cold]
    pub(super) fn retry_held(&mut self, disk: &Arc<Disk>, fail: bool) -> usize {
        let queues = self.queues.iter_mut().flatten();
        let its = queues.filter(|queue| Arc::ptr_eq(queue.disk.disk(), disk));
        let engine = &mut self.engine;
        its.map(|queue| match fail {
            true => queue.disk.fail_held(engine, |_, _| true),
            false => queue.disk.try_held(engine),
        })
        .sum()
    }

    /// The disk becomes smaller: what lies beyond its end would fail, and is not waited for.
    #[cold]
    pub(super) fn fail_held_beyond(&mut self, disk: &Arc<Disk>, end: u64) {
        for queue in self.queues.iter_mut().flatten() {
            if Arc::ptr_eq(queue.disk.disk(), disk) {
                let beyond = |request: &ringway_core::Request| request.range.end() > end;
                queue.disk.fail_held(&mut self.engine, |request, _| beyond(request));
            }
        }
    }

    /// A guest takes memory away that held requests would be carried out with.
    #[cold]
    pub(super) fn fail_held_in(&mut self, QueueId(id): QueueId, ranges: &[HostRange]) {
        if let Some(Some(queue)) = self.queues.get_mut(id as usize) {
            let memory = queue.ring.shared_memory();
            let answers_into =
                |token: &Q::Token| memory.is_some_and(|memory| memory.answers_into(token, ranges));
            queue.disk.fail_held_in(&mut self.engine, ranges, answers_into);
        }
    }
}
