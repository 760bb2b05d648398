//! Where a daemon keeps what must outlive it of its disks. What is kept of an image belongs to whoever has its
//! lock: it is taken up when that is taken, and left before it goes ([`Disk::leave_state`]).

use super::client::{Client, HelperEnded};
use super::state::{NoPlace, OwnState, StateDir, StateKeeper};
use super::state_name::identity;
use ringway_disk::storage::KeptBy;
use ringway_disk::{CacheMode, Disk};
use ringway_terminal::reasons::in_full;
use std::sync::{Arc, Mutex};

/// Who has the folder.
#[derive(Clone)]
pub(super) enum States {
    /// There is none.
    Nowhere,
    /// The daemon itself, which has no helper.
    Here(StateDir),
    /// Its helper.
    Helper(Arc<Client>),
}

impl States {
    /// The folder, if this process has it itself.
    pub(super) fn here(&self) -> Option<&StateDir> {
        match self {
            Self::Here(dir) => Some(dir),
            _ => None,
        }
    }

    /// Has what must outlive the daemon kept of a disk whose image is locked. Without a place the log is told, and
    /// it is served all the same.
    ///
    /// # Errors
    /// That what was kept of it before cannot be taken up, and is as it was: it must not be served without that.
    pub(super) fn keep(&self, disk: &Disk) -> anyhow::Result<()> {
        let has_data = disk.nature().kept_by != KeptBy::Nothing;
        if !has_data || disk.geometry().read_only {
            return Ok(());
        }
        let Err(error) = self.try_keep(disk) else { return Ok(()) };
        if !error.is::<NoPlace>() && !error.is::<HelperEnded>() {
            return Err(error.context(format!(
                "{}: what was kept of it in the state folder (--state-dir) cannot be taken up: that it is paused, that \
                 a flush has failed, or what its guest was answered may be there alone. Nothing was changed. Mend \
                 the folder, or delete that file if all of this may be forgotten",
                disk.name()
            )));
        }
        tracing::warn!(
            disk = disk.name(),
            "a failed flush and a pause will not outlive this daemon: {}",
            in_full(&error)
        );
        Ok(())
    }

    fn try_keep(&self, disk: &Disk) -> anyhow::Result<()> {
        let export = (disk.nature().kept_by == KeptBy::Name).then(|| disk.name());
        match self {
            Self::Nowhere => {}
            Self::Here(dir) => {
                let keeper = match export {
                    Some(name) => StateKeeper::of_export(dir, &identity(name.as_bytes()))?,
                    None => StateKeeper::here(dir, &disk.known_by()?)?,
                };
                let file = keeper.file().try_clone()?;
                disk.keep_state(&file, Arc::new(OwnState(Mutex::new(keeper))))?;
            }
            Self::Helper(helper) => match export {
                Some(name) => {
                    let (file, keeper) = helper.state_of_export(name)?;
                    disk.keep_state(&file, Arc::new(keeper))?;
                }
                None => {
                    let cached = disk.cache() != CacheMode::None;
                    let (file, keeper) = helper.state(&disk.known_by()?, cached)?;
                    if let Some(data) = disk.data_file() {
                        keeper.watch(&data)?;
                    }
                    disk.keep_state(&file, Arc::new(keeper))?;
                    disk.defer_entries();
                }
            },
        }
        Ok(())
    }
}
