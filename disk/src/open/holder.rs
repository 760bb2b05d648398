//! Who keeps us from an image, as far as can be seen from here.

use super::image_lock::{LockError, drop_flock, is_marked, try_flock};
use super::mount;
use std::fs::File;
use std::path::Path;

/// Who uses a block device that is mounted, or that a RAID or a volume is made of.
pub(super) const BY_HOST: &str = "the host itself (mounted, or part of another device)";

/// Who keeps us from an image.
#[derive(Clone, Debug)]
pub(super) enum Holder {
    /// The host itself: mounted, or part of another device.
    Host,
    /// A process that goes on.
    Living(String),
    /// A process that was killed and is not gone yet.
    Dying(String),
    /// A program that locks as QEMU does and not as we do; its name, if it can be seen.
    Foreign(Option<String>),
    /// The kernel names no process: it is gone but for its last operations, or cannot be seen from
    /// here.
    Unseen,
}

impl Holder {
    /// Who it was that kept us from locking `file`.
    pub(super) fn of(error: &LockError, file: &File) -> Self {
        match error {
            LockError::Marked(byte) if is_foreign(file, *byte) => {
                Self::Foreign(mount::marker(file, *byte).map(mount::process))
            }
            _ => Self::of_lock(file),
        }
    }

    fn of_lock(file: &File) -> Self {
        Self::of_pid(mount::Locks::on(file).pid)
    }

    fn of_pid(pid: Option<u32>) -> Self {
        match pid.map(|pid| (pid, mount::process(pid))) {
            Some((pid, name)) if mount::is_dying(pid) => Self::Dying(name),
            // The table goes on naming it until its last operation is over.
            Some((pid, _)) if !mount::is_here(pid) => Self::Unseen,
            Some((_, name)) => Self::Living(name),
            None => Self::Unseen,
        }
    }

    /// Who has a block device to itself.
    pub(super) fn of_device(path: &Path) -> Self {
        // Reading without claiming it is allowed.
        let Ok(file) = File::open(path) else { return Self::Host };
        match Self::of_lock(&file) {
            // A mount has the device, but no lock on it.
            Self::Unseen if try_flock(&file, true).is_ok() => Self::Host,
            holder => holder,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Host => BY_HOST.into(),
            Self::Living(name) | Self::Foreign(Some(name)) => name,
            Self::Foreign(None) => {
                "a program of QEMU, by its locks, that cannot be seen from here (from the sandbox, \
                 or of another user, container or host)"
                    .into()
            }
            Self::Dying(name) => format!("{name}, killed, whose last writes have not landed yet"),
            Self::Unseen => "a process that cannot be seen from here (of another container or \
                             host), or by the last writes of one that was killed"
                .into(),
        }
    }
}

/// True if whoever has marked this byte has no `flock`, which daemons of this kind hold as long, even
/// dead ones whose last writes have not landed.
fn is_foreign(file: &File, byte: i64) -> bool {
    // A table would do, but does not show what other containers hold.
    let free = try_flock(file, false).is_ok() && drop_flock(file).is_ok();
    // Still there: so whoever it is did not let go of both meanwhile.
    free && is_marked(file, byte).unwrap_or(false)
}

impl LockError {
    /// Who keeps us from `file`, as far as can be seen from here: `process 42 (qemu-system-x86)`.
    #[must_use]
    pub fn holder(&self, file: &File) -> String {
        Holder::of(self, file).name()
    }
}
