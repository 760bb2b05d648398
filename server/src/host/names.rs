//! What exports ask about the paths of their disks while a guest is migrated.

use super::client::Client;
use ringway_control::config::Location;
use ringway_disk::Disk;
use ringway_disk::open::holder;
use ringway_export::Names;
use std::path::PathBuf;
use std::sync::Arc;

/// Looks at the path of one disk, or has the helper look.
pub(super) struct Looker {
    pub(super) helper: Option<Arc<Client>>,
    pub(super) path: PathBuf,
}

impl Names for Looker {
    fn leads_to(&self, disk: &Disk) -> bool {
        let location = match &self.helper {
            // Without a helper nobody can tell; the lock itself is held by then.
            Some(helper) => match helper.locate(&self.path) {
                Ok(location) => location,
                Err(error) => {
                    tracing::warn!("{}: {error:#}", disk.name());
                    return true;
                }
            },
            None => Location::of(&self.path),
        };
        location.leads_to(disk.file())
    }

    fn holder(&self, disk: &Disk) -> String {
        let read_only = disk.geometry().read_only;
        let found = match &self.helper {
            Some(helper) => helper.holder(&self.path, read_only).ok().flatten(),
            None => holder(&self.path, read_only),
        };
        found.unwrap_or_else(|| "a process that cannot be seen from here".into())
    }
}
