//! How a worker ends, and what becomes of its queues then.

use super::Worker;
use super::queue::WorkerQueue;
use crate::answer::abandon;
use crate::command::Alarm;
use crate::queue::QueueLifecycle;
use ringway_aio::Engine;
use ringway_core::thread::panic_message;
use std::io;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Weak;

/// Why a worker ended that was not told to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("its engine failed: {0}")]
    Engine(#[from] io::Error),
    #[error("it panicked: {0}")]
    Panic(String),
}

impl<E: Engine, Q: QueueLifecycle> Worker<E, Q> {
    /// Works until told to exit.
    ///
    /// # Errors
    /// Only if the engine is beyond use.
    pub fn run(mut self) -> io::Result<()> {
        match catch_unwind(AssertUnwindSafe(|| self.work())) {
            Ok(outcome) => {
                if outcome.is_err() {
                    self.give_up();
                }
                self.take_down(false);
                outcome
            }
            Err(panic) => {
                self.take_down(true);
                resume_unwind(panic)
            }
        }
    }

    /// Works until told to exit, and ends in order whatever comes: sessions hear of it, nobody is left
    /// waiting for an answer, and no memory goes that the kernel may still write to. `report` is called
    /// as soon as sessions know of a failure; an engine may take its time to end.
    pub(crate) fn run_to_end(mut self, report: impl FnOnce(&Failure)) {
        let work = catch_unwind(AssertUnwindSafe(|| self.work()));
        let failure = match work {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Failure::Engine(error)),
            Err(panic) => Some(Failure::Panic(panic_message(&*panic).to_owned())),
        };
        if let Some(failure) = &failure {
            self.give_up();
            report(failure);
        }
        self.take_down(matches!(failure, Some(Failure::Panic(_))));
    }

    /// Tells all sessions that their queues are served no more.
    #[cold]
    pub(super) fn give_up(&self) {
        for queue in self.queues.iter().flatten() {
            // One session that cannot be reached keeps no other from hearing it.
            let _ = catch_unwind(AssertUnwindSafe(|| (queue.alarm)(Alarm::WorkerFailed)));
        }
    }

    /// Ends the engine, which waits for its operations, and lets the queues' memory go after that, but
    /// for queues with commands in flight.
    ///
    /// After a panic neither is done: an engine that lost count would end too early or never, and what
    /// it believes is not known. It is left alone for the rest of the process, and so is all memory its
    /// operations may write to. Whoever waits for an answer hears of the end in any case.
    pub(super) fn take_down(self, after_panic: bool) {
        let Self { engine, mut queues, waiting, inbox, known, .. } = self;
        // Whose queues there are may be among what is not known.
        let leave_in_flight = |queues: &mut Vec<Option<WorkerQueue<Q>>>| {
            known.iter().filter_map(Weak::upgrade).for_each(|disk| disk.abandon());
            let each = |queue: &mut WorkerQueue<Q>| queue.disk.let_go(false);
            let all = || queues.iter_mut().flatten().for_each(each);
            let _ = catch_unwind(AssertUnwindSafe(all));
        };
        if after_panic {
            leave_in_flight(&mut queues);
            forget((engine, queues));
        } else if catch_unwind(AssertUnwindSafe(|| drop(engine))).is_err() {
            leave_in_flight(&mut queues);
            forget(queues);
        } else {
            // Before anybody waits for the thread of an image, which may wait for its turn.
            queues.iter_mut().flatten().for_each(|queue| queue.disk.let_go(true));
            // Threads of images may write to that memory, too.
            queues.iter_mut().flatten().for_each(|queue| queue.disk.close_image());
            // Sessions know of it, or have gone before.
            if Q::HAS_COMMANDS {
                queues.into_iter().flatten().for_each(WorkerQueue::outlive_commands);
            } else {
                abandon(queues);
            }
        }
        // Only now: whoever waits for a queue to stop takes this to mean that nothing of it is in
        // flight that it could hear of.
        drop((waiting, inbox));
    }
}
