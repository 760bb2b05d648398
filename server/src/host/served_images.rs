//! Which images have been served that would be made if they were missing, kept in the state folder by their paths: one
//! that is missing now was moved, or its file system is not mounted, and the guest that it has must not find an empty
//! disk in its place. Forgotten when a disk is removed for good.

use super::state::StateDir;
use super::state_name::StateName;
use ringway_control::config::Location;
use ringway_disk::{OpenOptions, Source};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The longest path that the host takes.
const PATH_MAX: u64 = 4096;

/// One that is about to be opened: as its user names it, what it is called in the folder, and where it is.
pub(super) struct Named(PathBuf, StateName, PathBuf);

/// Those of this daemon, as its user names them from the root: what each is called in the folder, and where it is.
#[derive(Default)]
pub(super) struct ServedImages(Mutex<BTreeMap<PathBuf, (StateName, PathBuf)>>);

impl ServedImages {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, (StateName, PathBuf)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An image that is about to be opened, and would be made if it were missing, is not made again if it was served
    /// before. `locate` looks at its path, with the rights of whoever is to open it.
    pub(super) fn recall(
        &self,
        options: &mut OpenOptions,
        dir: Option<&StateDir>,
        locate: impl FnOnce(&Path) -> Location,
    ) -> Option<Named> {
        let is_made = options.create_bytes.is_some()
            || options.qcow2.as_ref().is_some_and(|qcow2| qcow2.base.is_some());
        let (Source::Path(path), Some(dir), true) = (&options.source, dir, is_made) else {
            return None;
        };
        let said = std::path::absolute(path).ok()?;
        let real = locate(path).real().to_owned();
        let name = StateName::served_image(real.as_os_str().as_bytes());
        if is_kept(dir, name, &real) {
            options.served_before = Some(name.to_string());
        }
        Some(Named(said, name, real))
    }

    /// It was opened: whoever asked for it might have it.
    pub(super) fn opened(&self, image: Option<Named>) {
        self.lock().extend(image.map(|Named(said, name, real)| (said, (name, real))));
    }

    /// It is served from now on.
    pub(super) fn keep(&self, path: &Path, dir: Option<&StateDir>) {
        let known = std::path::absolute(path).ok().and_then(|path| self.lock().get(&path).cloned());
        let (Some((name, real)), Some(dir)) = (known, dir) else { return };
        if is_kept(dir, name, &real) {
            return;
        }
        let written = || -> io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
            open(dir, name, flags)?.write_all(real.as_os_str().as_bytes())
        };
        if let Err(error) = written() {
            tracing::warn!(
                "{}: that it was served cannot be kept, so the next daemon makes it anew if it is missing: {error}",
                path.display()
            );
        }
    }

    /// It is served no more, and nobody waits for it.
    pub(super) fn forget(&self, path: &Path, dir: Option<&StateDir>) {
        let known = std::path::absolute(path).ok().and_then(|path| self.lock().remove(&path));
        if let (Some((name, _)), Some(dir)) = (known, dir) {
            // One that is not there was never served.
            let _ = unlinkat(dir.fd(), name.to_string(), AtFlags::empty());
        }
    }
}

/// Whether the folder says that the image at this path was served.
fn is_kept(dir: &StateDir, name: StateName, real: &Path) -> bool {
    let mut path = Vec::new();
    let read =
        open(dir, name, OFlags::RDONLY).and_then(|file| file.take(PATH_MAX).read_to_end(&mut path));
    read.is_ok() && path == real.as_os_str().as_bytes()
}

fn open(dir: &StateDir, name: StateName, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(openat(dir.fd(), name.to_string(), flags, Mode::RUSR | Mode::WUSR)?))
}
