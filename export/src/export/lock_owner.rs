//! Who has the lock of an export's image, and who may look at its path.

use super::lock_state::LockState;
use ringway_disk::Disk;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a guest may wait for the lock before that is an error for it, unless said otherwise: as
/// long as a daemon that starts waits for the last writes of one that was killed.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// What an export asks of somebody who may look at paths: a daemon in a sandbox may not.
pub trait Names: Send + Sync {
    /// True if the path of a disk leads to the file that is open.
    fn leads_to(&self, disk: &Disk) -> bool;

    /// Who has the lock of a disk, as far as can be seen.
    fn holder(&self, disk: &Disk) -> String;

    /// The lock of a disk is ours: has what outlives this process kept where its predecessor kept it
    /// ([`Disk::keep_state`]), if there is a place; without one the log is told, and it is served all the same.
    ///
    /// # Errors
    /// That what its predecessor kept cannot be taken up: it is not to be served without that.
    fn keep_state(&self, disk: &Disk) -> Result<(), String>;
}

/// The lock of an export's image.
pub(super) struct ImageLock {
    pub(super) state: Arc<Mutex<LockState>>,
    pub(super) names: Option<Arc<dyn Names>>,
    pub(super) timeout: Duration,
}

impl ImageLock {
    /// As [`ringway_disk::open()`] has left it.
    pub(super) fn of(disk: &Disk) -> Self {
        let state = if disk.is_incoming() { LockState::Free } else { LockState::Held };
        Self { state: Arc::new(Mutex::new(state)), names: None, timeout: TIMEOUT }
    }
}
