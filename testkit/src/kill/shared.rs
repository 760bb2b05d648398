//! What the queues' threads and the one that kills know of each other.

use super::oracle::Findings;
use super::plan::Plan;
use crate::Rng;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between the queues' threads and the one that kills.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Where the daemon is whose held requests are to be tried again.
    pub(super) holds: Option<PathBuf>,
    /// Where the daemon is whose limits are to change, and the seed of how.
    pub(super) limits: Option<(PathBuf, u64)>,
    /// How often a daemon has said that requests had waited for a limit.
    pub(super) throttled: AtomicU64,
    pub(super) stop: AtomicBool,
    /// A queue is over.
    pub(super) fatal: AtomicBool,
    /// Daemons that have ended, and one.
    pub(super) life: AtomicU64,
    pub(super) findings: Mutex<Findings>,
    /// A flush was answered with an error: no later one may succeed.
    pub(super) flush_failed: AtomicBool,
    /// A daemon was told to have a sync fail.
    pub(super) sync_fails: AtomicBool,
    /// The guest's write cache may have been off, so that writes were durable.
    pub(super) cache_off: AtomicBool,
    /// The latest life in which a request was issued and completed, and when.
    pub(super) resumed: Mutex<(u64, Option<Instant>)>,
    pub(super) has_resumed: Condvar,
}

impl Shared {
    /// Of the first daemon, in `dir`.
    pub(super) fn first(plan: &Plan, dir: &Path, random: &mut Rng) -> Self {
        Self {
            holds: plan.hold.then(|| dir.to_path_buf()),
            limits: plan.limits.then(|| (dir.to_path_buf(), random.next_u64())),
            life: AtomicU64::new(1),
            ..Self::default()
        }
    }

    pub(super) fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request of this life is complete: only the daemon of this life can have done it.
    pub(super) fn resumed(&self, life: u64) {
        let now = Instant::now();
        let mut last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        if life > last.0 {
            *last = (life, Some(now));
            self.has_resumed.notify_all();
        }
    }

    /// When traffic resumed in this life, if it does within `patience`.
    pub(super) fn wait_resumed(&self, life: u64, patience: Duration) -> Option<Instant> {
        let last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.has_resumed.wait_timeout_while(last, patience, |last| last.0 < life);
        let (last, _) = waited.unwrap_or_else(PoisonError::into_inner);
        last.1.filter(|_| last.0 == life)
    }
}
