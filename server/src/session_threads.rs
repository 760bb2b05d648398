//! The threads that serve front-ends: one waits for all of them, a few act ([ADR
//! 0010](../../docs/adr/0010-no-line-written-by-two-workers.md)).
//!
//! ```text
//!   sessions   sleeps for all tasks (epoll) ──── ready ────▶ session-N   takes turns, which may block
//!       ▲                                                        │
//!       └───────────────────────── quiet ────────────────────────┘
//! ```
//!
//! A task is with the first thread, in one of the two queues or with one of the others: so its turns
//! come one after the other. Turns that take long have more threads started, so that a task never waits
//! for another one's client or disk.

mod poller;
mod shared;

pub(crate) use shared::{Linger, Task, Turn};

use poller::Poller;
use ringway_aio::bells::Bells;
use shared::Shared;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The threads. Dropping them ends the one that waits; tasks that have not ended are dropped.
pub(crate) struct SessionThreads {
    shared: Arc<Shared>,
    poller: Option<JoinHandle<()>>,
}

impl SessionThreads {
    /// Starts the thread that waits.
    ///
    /// # Errors
    /// What the host says to a thread, or to a descriptor.
    pub(crate) fn start() -> io::Result<Self> {
        let bells = Bells::new()?;
        let shared = Arc::new(Shared::new(bells.waker()));
        let mut poller = Poller::new(bells, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("sessions".into());
        let poller = thread.spawn(move || poller.run())?;
        Ok(Self { shared, poller: Some(poller) })
    }

    /// Serves one more.
    pub(crate) fn add(&self, task: Box<dyn Task>) {
        let mut queues = self.shared.lock();
        queues.tasks += 1;
        queues.quiet.push(task);
        drop(queues);
        self.shared.waker.wake();
    }
}

impl Drop for SessionThreads {
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.work.notify_all();
        self.shared.waker.wake();
        if let Some(poller) = self.poller.take() {
            let _ = poller.join();
        }
    }
}

#[cfg(test)]
mod tests;
