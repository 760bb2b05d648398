//! Requests that are held because a disk has failed them: what time and commands do with them.

use super::Worker;
use crate::queue::QueueLifecycle;
use crate::waiting::Waiting;
use ringway_aio::Engine;
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

    /// Has those requests fail that are held and that somebody waits for, who is the one at `at`: nothing
    /// would end them. What is with the disk now may be held a moment later, so this is done each turn.
    #[cold]
    pub(super) fn fail_held_for(&mut self, at: usize) {
        let (queues, engine) = (&mut self.queues, &mut self.engine);
        match &self.waiting[at] {
            // A queue is stopped without what it holds; a flush covers what was answered.
            Waiting::Stop { .. } | Waiting::Flush { .. } => {}
            // The disk becomes smaller; or it was to, and that was given up.
            Waiting::Settle { disk, end, .. } if disk.capacity() > *end => {}
            Waiting::Settle { disk, end, .. } => {
                let all = queues.iter_mut().flatten();
                for queue in all.filter(|queue| Arc::ptr_eq(queue.disk.disk(), disk)) {
                    queue.disk.fail_held(engine, |request, _| request.range.end() > *end);
                }
            }
            // A guest takes memory away that they would be carried out with.
            Waiting::Unused { queue, ranges, .. } => {
                if let Some(Some(queue)) = queues.get_mut(*queue as usize) {
                    let memory = queue.ring.shared_memory();
                    let answers_into = |token: &Q::Token| {
                        memory.is_some_and(|memory| memory.answers_into(token, ranges))
                    };
                    queue.disk.fail_held_in(engine, ranges, answers_into);
                }
            }
        }
    }
}
