//! The place where origins are measured: images, CPUs, rounds.

use crate::load::Load;
use crate::outcome::Outcome;
use crate::pattern::{Rw, Sizes};
use crate::runner;
use crate::target::Opened;
use anyhow::{Context, Result};
use indicatif::ProgressBar;
use ringway_control::config::cpus;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tempfile::TempDir;

/// The place of measurement.
pub(super) struct Lab<'a> {
    pub(super) rounds: usize,
    pub(super) runtime: Duration,
    /// On the disk.
    pub(super) slow: Option<TempDir>,
    /// On tmpfs.
    pub(super) fast: Option<TempDir>,
    pub(super) signal: &'a AtomicUsize,
    pub(super) bar: ProgressBar,
}

/// The program was told to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted;

/// The name of each image in its folder.
pub(super) const IMAGE: &str = "disk.img";

impl Lab<'_> {
    pub(super) fn disk(&self) -> Result<PathBuf> {
        self.slow.as_ref().map(|home| home.path().join(IMAGE)).context("no image")
    }

    pub(super) fn memory(&self) -> Result<PathBuf> {
        self.fast.as_ref().map(|home| home.path().join(IMAGE)).context("no image")
    }

    pub(super) fn load(&self, rw: Rw, sizes: Sizes, depth: u32, jobs: u16) -> Load {
        Load {
            jobs,
            runtime: Some(self.runtime),
            ramp: Duration::from_millis(100).min(self.runtime),
            cpus: client_cpus(),
            ..Load::new(rw, sizes, depth)
        }
    }

    /// Rounds there and back, so that a drift favours nobody: calls `one` with the number of a
    /// contestant.
    pub(super) fn alternate(
        &self,
        count: usize,
        mut one: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        for round in 0..self.rounds {
            for step in 0..count {
                if self.signal.load(Relaxed) != 0 {
                    return Err(Interrupted.into());
                }
                one(if round % 2 == 0 { step } else { count - 1 - step })?;
            }
        }
        Ok(())
    }

    pub(super) fn tell(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }

    pub(super) fn measure(&self, opened: &mut Opened, load: &Load) -> Result<Outcome> {
        runner::run(opened, load, self.signal, &mut || Ok(()), &mut |_| self.bar.tick())
    }
}

/// The client runs on the last CPU, servers on the others, if there are several.
pub(super) fn client_cpus() -> Vec<usize> {
    let count = usize::from(cpus());
    if count > 1 { vec![count - 1] } else { Vec::new() }
}

/// Does something on the servers' CPUs: what is started there stays there.
pub(super) fn on_server_cpus<T>(act: impl FnOnce() -> Result<T>) -> Result<T> {
    let count = usize::from(cpus());
    let pin = |cpus: std::ops::Range<usize>| -> Result<()> {
        let mut set = CpuSet::new();
        cpus.for_each(|cpu| set.set(cpu));
        // Containers may have other CPUs than the first ones; then nothing is pinned.
        let _ = sched_setaffinity(None, &set);
        Ok(())
    };
    if count > 1 {
        pin(0..count - 1)?;
    }
    let done = act();
    pin(0..count)?;
    done
}
