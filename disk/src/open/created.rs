//! Files that opening a disk makes, and takes away again if it fails.

use super::file::permission;
use super::{OpenError, OpenOptions};
use ringway_core::SECTOR_BYTES;
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that this process has made and will remove again unless the disk opens: its path, device and
/// inode. Whatever else has got that name by then is not ours.
pub(super) struct Created(Option<(PathBuf, (u64, u64))>);

impl Created {
    /// No file was made.
    pub(super) fn nothing() -> Self {
        Self(None)
    }

    /// This file was just made.
    pub(super) fn just_now(path: &Path) -> io::Result<Self> {
        let meta = path.symlink_metadata()?;
        Ok(Self(Some((path.into(), (meta.dev(), meta.ino())))))
    }

    /// A sparse file, if there is none and one is to be made.
    pub(super) fn if_missing(path: &Path, options: &OpenOptions) -> Result<Self, OpenError> {
        match path.symlink_metadata() {
            Ok(_) => return Ok(Self(None)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(permission(path, options.read_only));
            }
            Err(source) => {
                return Err(OpenError::Host { path: path.into(), what: "look at it", source });
            }
        }
        if options.incoming {
            return Err(OpenError::NothingIncoming(path.into()));
        }
        let Some(bytes) = options.create_bytes else {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            return Err(match folder.is_some_and(|folder| !folder.exists()) {
                true => OpenError::NoFolder(path.into()),
                false => OpenError::Missing(path.into()),
            });
        };
        if let Some(note) = options.served_before.clone() {
            return Err(OpenError::Gone { path: path.into(), note });
        }
        if bytes == 0 || bytes % SECTOR_BYTES != 0 {
            return Err(OpenError::Size { name: path.display().to_string(), bytes });
        }
        if i64::try_from(bytes).is_err() {
            return Err(OpenError::TooLarge { name: path.into(), bytes });
        }
        let file = FileOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OpenError::NoFolder(path.into()),
            io::ErrorKind::PermissionDenied => permission(path, false),
            _ => OpenError::Host { path: path.into(), what: "create it", source },
        })?;
        let host = |what| move |source| OpenError::Host { path: path.into(), what, source };
        let meta = file.metadata().map_err(host("look at it"))?;
        let created = Self(Some((path.into(), (meta.dev(), meta.ino()))));
        file.set_len(bytes).map_err(host("give it its size"))?;
        Ok(created)
    }

    /// Keeps the file. True if there is one to keep, and `file` is it.
    pub(super) fn keep(mut self, file: Option<&File>) -> bool {
        let made = self.0.take().map(|(_, made)| made);
        let opened = file.and_then(|file| file.metadata().ok());
        made.is_some() && made == opened.map(|meta| (meta.dev(), meta.ino()))
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        if let Some((path, made)) = &self.0 {
            if path.symlink_metadata().is_ok_and(|meta| (meta.dev(), meta.ino()) == *made) {
                // Best effort: the error that brought us here is the one worth telling.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}
