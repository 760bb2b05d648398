//! What exports ask about the paths of their disks while a guest is migrated.

use super::client::Client;
use super::states::States;
use ringway_control::config::Location;
use ringway_disk::Disk;
use ringway_disk::open::holder;
use ringway_export::{Names, WarningLimit};
use ringway_terminal::reasons::in_full;
use std::path::PathBuf;
use std::sync::Arc;

/// What a limited warning tells of.
pub(super) const PATHS: &str = "paths that cannot be looked at";

/// Looks at the path of one disk, or has the helper look.
pub(super) struct PathNames {
    pub(super) helper: Option<Arc<Client>>,
    pub(super) states: States,
    pub(super) path: PathBuf,
    /// A guest can have it asked as often as it likes.
    pub(super) warnings: WarningLimit,
}

impl Names for PathNames {
    fn leads_to(&self, disk: &Disk) -> bool {
        let location = match &self.helper {
            // Without a helper nobody can tell; the lock itself is held by then.
            Some(helper) => match helper.locate(&self.path) {
                Ok(location) => location,
                Err(error) => {
                    if let Some(pass) = self.warnings.pass() {
                        let (disk, suppressed) = (disk.name(), pass.suppressed);
                        tracing::warn!(disk, suppressed, "its path: {}", in_full(&error));
                    }
                    return true;
                }
            },
            None => Location::of(&self.path),
        };
        location.leads_to(&disk.file())
    }

    fn holder(&self, disk: &Disk) -> String {
        let read_only = disk.geometry().read_only;
        let found = match &self.helper {
            Some(helper) => helper.holder(&self.path, read_only).ok().flatten(),
            None => holder(&self.path, read_only),
        };
        found.unwrap_or_else(|| "a process that cannot be seen from here".into())
    }

    fn keep_state(&self, disk: &Disk) -> Result<(), String> {
        self.states.keep(disk).map_err(|error| in_full(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heard::heard;
    use ringway_disk::{OpenOptions, Source, open};

    /// A guest that is migrated to and fro, and a helper that has died.
    #[test]
    fn e04_a_path_that_nobody_can_look_at_is_told_ten_times() {
        let (ours, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let helper = Some(Arc::new(Client::new(ours.into())));
        let looker = PathNames {
            helper,
            states: States::Nowhere,
            path: "disk.img".into(),
            warnings: WarningLimit::warnings(None, "tests"),
        };
        let disk = open(&OpenOptions::new(Source::Null { bytes: 512, latency_us: 0 })).unwrap();
        let lines = heard(|| (0..1000).for_each(|_| assert!(looker.leads_to(&disk))));
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert!(lines[0].contains("its path: ") && lines[0].contains("has ended"), "{lines:?}");
    }
}
