//! Opening the file itself.

use super::probe::FileKind;
use super::{OpenError, OpenOptions, fence};
use ringway_core::file::usual_node;
use std::fs::{File, OpenOptions as FileOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens a file or block device, with these flags besides.
pub(super) fn open_file(
    path: &Path,
    options: &OpenOptions,
    kind: FileKind,
    flags: i32,
) -> Result<File, OpenError> {
    // A block device that is mounted must not be written behind the file system's back.
    let claims = kind == FileKind::BlockDevice && !options.read_only;
    let mut exclusive = if claims { libc::O_EXCL } else { 0 };
    let mut lock_wait = fence::LockWait::new(path, options, true);
    let device = path.metadata().ok().filter(|_| kind == FileKind::BlockDevice);
    let mut node = device.and_then(|device| usual_node(device.rdev()));
    loop {
        let file = FileOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(flags | exclusive | libc::O_CLOEXEC)
            .open(node.as_deref().unwrap_or(path));
        let source = match file {
            Ok(file) => return Ok(file),
            Err(source) => source,
        };
        return Err(match source.raw_os_error() {
            // The source of a migration on this very host.
            Some(libc::EBUSY) if options.incoming && lock_wait.is_claimed_by_a_process() => {
                exclusive = 0;
                continue;
            }
            Some(libc::EBUSY) => {
                lock_wait.claimed()?;
                continue;
            }
            // Another node may be open to more than the usual one.
            Some(libc::EACCES | libc::EPERM | libc::ENOENT) if node.take().is_some() => continue,
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => permission(path, options.read_only),
            _ => OpenError::Host { path: path.into(), what: "open it", source },
        });
    }
}

/// The error of whoever may not open a file.
pub(super) fn permission(path: &Path, read_only: bool) -> OpenError {
    OpenError::Permission {
        path: path.into(),
        mode: if read_only { "reading" } else { "reading and writing" },
        hint: if read_only {
            "Run as a user who may read it. If this is root, its cgroup (systemd: DeviceAllow=) or a capability that \
             was taken away forbids it"
        } else {
            "Run as a user who may write it, or use `serve --read-only`. If this is root, its cgroup (systemd: \
             DeviceAllow=, ReadWritePaths=) or a capability that was taken away forbids it"
        },
    }
}
