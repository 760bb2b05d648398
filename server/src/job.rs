//! What takes its time while a disk is served: how far it is, and how it is told to stop.

use ringway_control::protocol::{JobFacts, JobState};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// A job of a disk: the one that runs, or the last one.
#[derive(Debug)]
pub(crate) struct Job {
    facts: Mutex<JobFacts>,
    cancelled: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Job {
    pub(crate) fn new(name: &str, bps: Option<u64>, total_bytes: u64) -> Self {
        let facts = JobFacts {
            job: name.into(),
            state: JobState::Running,
            done_bytes: 0,
            total_bytes,
            copied_bytes: 0,
            bps,
            blackout_us: None,
            error: None,
        };
        Self {
            facts: Mutex::new(facts),
            cancelled: AtomicBool::new(false),
            thread: Mutex::default(),
        }
    }

    /// What is known of it now.
    pub(crate) fn facts(&self) -> JobFacts {
        lock(&self.facts).clone()
    }

    pub(crate) fn is_running(&self) -> bool {
        lock(&self.facts).state == JobState::Running
    }

    /// True if it was told to stop.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(SeqCst)
    }

    /// Tells it to stop.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, SeqCst);
        lock(&self.thread).iter().for_each(|thread| thread.thread().unpark());
    }

    /// Tells it to stop, and waits until it has.
    pub(crate) fn end(&self) {
        self.cancel();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }

    /// Waits until `due`; false if it is to stop.
    pub(crate) fn wait(&self, due: Instant) -> bool {
        loop {
            if self.is_cancelled() {
                return false;
            }
            match due.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::park_timeout(left),
                _ => return true,
            }
        }
    }

    /// It has come further, or has ended.
    pub(crate) fn change(&self, change: impl FnOnce(&mut JobFacts)) {
        change(&mut lock(&self.facts));
    }

    /// The thread that carries it out.
    pub(crate) fn runs_on(&self, thread: JoinHandle<()>) {
        *lock(&self.thread) = Some(thread);
    }
}

/// What is behind it is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
