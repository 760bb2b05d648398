//! Which files a disk is served from is changed by one at a time.

use super::super::served::{Served, lock};
use anyhow::anyhow;
use ringway_export::ChangeError;
use ringway_terminal::reasons::in_full;
use std::sync::{MutexGuard, TryLockError};

/// Why they are not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChangeOfFiles {
    /// A job runs.
    #[error(
        "it is being merged with what it is based on, or that with the next ({0}; ctl list shows how far). \
         Wait until that is done, or stop it (ctl {0} --cancel): the disk holds what it did"
    )]
    Job(String),
    /// Another change is under way.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// All else.
    #[error("{}", in_full(.0))]
    Other(#[from] anyhow::Error),
}

impl Served {
    /// Held by whoever changes which files it is served from.
    ///
    /// # Errors
    /// That somebody else does, or that it is being removed.
    pub(super) fn change_files(&self) -> Result<MutexGuard<'_, ()>, ChangeOfFiles> {
        if let Some(job) = lock(&self.job).as_ref().filter(|job| job.is_running()) {
            return Err(ChangeOfFiles::Job(job.facts().job));
        }
        let alone = match self.files_change.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(ChangeError::Busy.into()),
        };
        if self.is_leaving() {
            return Err(anyhow!("it is being removed").into());
        }
        Ok(alone)
    }
}
