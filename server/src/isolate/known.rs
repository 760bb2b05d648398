//! What the daemon knows of a disk whose process is another one.

use super::Isolated;
use crate::host::Host;
use crate::served::lock;
use ringway_control::config::{Claim, LimitArgs};
use ringway_control::protocol::{DiskFacts, JobFacts, State};
use serde_json::Value;
use std::cell::RefCell;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

impl Isolated {
    /// What it takes for itself, which no other disk may have.
    pub(crate) fn claim(&self, host: &Host) -> Claim {
        let known = || lock(&self.claim).clone();
        // Nothing is looked up under the lock: its file system may hang.
        let seen = RefCell::new(None);
        let look = |path: &Path| seen.borrow_mut().insert(host.locate(path)).clone();
        if self.renames.load(SeqCst) {
            known().follow(look);
            seen.take().iter().for_each(|seen| lock(&self.claim).follow(|_| seen.clone()));
        }
        if self.listens_anew.swap(false, SeqCst) {
            known().listens(look);
            seen.take().iter().for_each(|seen| lock(&self.claim).listens(|_| seen.clone()));
        }
        known()
    }

    /// The names of its image's files may change from now on.
    pub(crate) fn may_rename(&self) {
        self.renames.store(true, SeqCst);
    }

    /// Its image, as it was named.
    pub(crate) fn image(&self) -> String {
        lock(&self.facts).image.clone()
    }

    /// Its image goes with it.
    pub(crate) fn is_ephemeral(&self) -> bool {
        lock(&self.words).words.get("ephemeral") == Some(&Value::Bool(true))
    }

    /// True if this is its socket.
    pub(crate) fn is_at_socket(&self, path: &Path) -> bool {
        lock(&self.facts).socket.as_deref() == Some(path)
    }

    /// Whether it is paused is kept here, as its process may end.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.paused.store(paused, SeqCst);
    }

    /// As it was told to be.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(SeqCst)
    }

    /// What was begun is known before its process tells of it.
    pub(crate) fn set_job(&self, job: JobFacts) {
        lock(&self.facts).job = Some(job);
    }

    /// As above: what its limits are by now.
    pub(crate) fn set_limits(&self, limits: LimitArgs) {
        *lock(&self.limits) = Some(limits);
    }

    /// Its limits: those it was given last.
    pub(crate) fn limits(&self) -> LimitArgs {
        lock(&self.limits).unwrap_or_else(|| {
            let numbers = serde_json::to_value(&lock(&self.facts).limits).unwrap_or_default();
            serde_json::from_value(numbers).unwrap_or_default()
        })
    }

    /// As its process says now, or said last.
    pub(crate) fn facts(&self, now: Option<DiskFacts>) -> DiskFacts {
        if let Some(now) = now {
            let mut facts = lock(&self.facts);
            // It is found by what it was called at its start, whatever its process says since.
            let DiskFacts { image, socket, serial, .. } = facts.clone();
            *facts = DiskFacts { id: self.id, image, socket, serial, ..now };
        }
        let mut facts = lock(&self.facts).clone();
        let launched = lock(&self.thread).is_some();
        let process = lock(&self.process).clone().filter(|process| process.goes() || !launched);
        facts.process = process.map(|process| process.pid);
        facts.restarts = self.restarts.load(SeqCst);
        if self.is_leaving() {
            facts.state = State::Leaving;
        } else if facts.process.is_none() {
            (facts.state, facts.connected) = (State::Restarting, false);
        }
        facts
    }
}
