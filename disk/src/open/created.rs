//! Files that opening a disk makes, and takes away again if it fails.

use super::file::permission;
use super::image_lock::{LockError, lock_image};
use super::{OpenError, OpenOptions};
use ringway_core::SECTOR_BYTES;
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that this process has made and will remove again unless the disk opens: its path, device and
/// inode. Whatever else has got that name by then is not ours; nor is it any more if somebody else has its lock, who
/// may have waited for that and serves it.
#[derive(Default)]
pub(super) struct Created {
    made: Option<(PathBuf, (u64, u64))>,
    /// The same, once it is locked: its lock does not go before it does.
    locked: Option<File>,
}

impl Created {
    /// No file was made.
    pub(super) fn nothing() -> Self {
        Self::default()
    }

    fn just_made(path: &Path, meta: &std::fs::Metadata) -> Self {
        Self { made: Some((path.into(), (meta.dev(), meta.ino()))), locked: None }
    }

    /// This file was just made.
    pub(super) fn just_now(path: &Path) -> io::Result<Self> {
        Ok(Self::just_made(path, &path.symlink_metadata()?))
    }

    /// A sparse file, if there is none and one is to be made.
    pub(super) fn if_missing(path: &Path, options: &OpenOptions) -> Result<Self, OpenError> {
        match path.symlink_metadata() {
            Ok(_) => return Ok(Self::nothing()),
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
        let created = Self::just_made(path, &meta);
        file.set_len(bytes).map_err(host("give it its size"))?;
        Ok(created)
    }

    /// It is locked, and open as `file`, if that is the one that was made.
    pub(super) fn is_locked(&mut self, file: &File) {
        let is_it = self.made.is_some() && self.is_it(file.metadata());
        self.locked = is_it.then(|| file.try_clone().ok()).flatten();
    }

    fn is_it(&self, meta: io::Result<std::fs::Metadata>) -> bool {
        let identity = meta.map(|meta| (meta.dev(), meta.ino()));
        self.made.as_ref().is_some_and(|(_, made)| identity.is_ok_and(|it| it == *made))
    }

    /// Keeps the file. True if there is one to keep, and `file` is it.
    pub(super) fn keep(mut self, file: Option<&File>) -> bool {
        let is_it = file.is_some_and(|file| self.is_it(file.metadata()));
        self.made = None;
        is_it
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut reading = FileOptions::new();
        let reading = reading.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = match &self.locked {
            Some(file) => file,
            None => &reading.open(path)?,
        };
        let locked = lock_image(file, false);
        let is_theirs = matches!(locked, Err(LockError::Locked | LockError::Marked(_)));
        if !is_theirs && self.is_it(file.metadata()) && self.is_it(path.symlink_metadata()) {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.made {
            // Best effort: the error that brought us here is the one worth telling.
            let _ = self.remove(path);
        }
    }
}
