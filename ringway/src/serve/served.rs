//! One disk that a daemon serves.

use crate::config::{Claim, CpuList};
use anyhow::{Context, anyhow};
use ringway_export::Export;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;

/// A disk with its place.
pub(crate) struct Served {
    /// Its number: never given to another disk of this daemon.
    pub(crate) id: u64,
    /// The disk, as offered.
    pub(crate) export: Export,
    /// What it takes for itself, which no other disk may have.
    pub(crate) claim: Claim,
    /// Its socket file.
    pub(crate) socket: Option<PathBuf>,
    /// Threads that serve its queues.
    pub(crate) workers: usize,
    /// The CPUs they are pinned to.
    pub(crate) cpus: Option<CpuList>,
    /// The worker of its first queue, and how many there were.
    pub(super) place: (usize, usize),
    pub(super) stop: OwnedFd,
    pub(super) leaving: AtomicBool,
    /// Its thread serves nobody any more.
    pub(super) ended: AtomicBool,
    pub(super) thread: Mutex<Option<JoinHandle<std::io::Result<()>>>>,
}

impl Served {
    /// Tells its thread to end: in order, after what is in flight.
    pub(super) fn stop(&self) {
        self.leaving.store(true, SeqCst);
        // One write can not fill the counter.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// It was told to go.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(SeqCst)
    }

    /// Waits until its thread has ended. Only one caller gets the outcome.
    pub(super) fn join(&self) -> Option<anyhow::Result<()>> {
        let thread = lock(&self.thread).take()?;
        let name = self.export.disk().name();
        Some(match thread.join() {
            Ok(ended) => ended.with_context(|| format!("{name}: cannot wait for front-ends")),
            Err(_) => Err(anyhow!("{name}: its thread panicked")),
        })
    }
}

/// What is behind it is whole at any time.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
