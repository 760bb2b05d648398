//! Names, looked up by this very process.

use super::served_images::ServedImages;
use crate::image::{check_iopoll, open_disk};
use anyhow::{Context, bail};
use ringway_control::config::{DiskSpec, Format as Said, Location};
use ringway_disk::{
    Base, Disk, EngineKind, LockError, OpenError, OpenOptions, Qcow2, Source, lock_image,
};
use ringway_export::engines_to_choose;
use ringway_image::Format;
use ringway_vhost_user::{Access, bind};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, XattrFlags, fgetxattr, fsetxattr, fstat, openat, statat, unlinkat,
};
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The attribute of a clone that says whose it is.
const SOCKET: &CStr = c"user.ringway.socket";

/// Engines for files: why to take them, or why not.
pub(super) type Engines = Vec<(EngineKind, Result<String, String>)>;

/// What there is to know before.
pub(super) struct Local {
    pub(super) engines: Engines,
    pub(super) iopoll: bool,
    pub(super) served: Arc<ServedImages>,
}

impl Local {
    pub(super) fn new(iopoll: bool) -> Self {
        Self { engines: engines_to_choose(None), iopoll, served: Arc::default() }
    }

    pub(super) fn has_io_uring(&self) -> bool {
        let works =
            |(kind, works): &(_, Result<_, _>)| *kind == EngineKind::IoUring && works.is_ok();
        self.engines.iter().any(works)
    }

    /// How a disk of a plan is to be opened.
    pub(super) fn options(&self, spec: &DiskSpec) -> OpenOptions {
        OpenOptions {
            source: spec.source.clone(),
            read_only: spec.read_only,
            cache: spec.cache,
            engine: spec.engine,
            engines: self.engines(spec.engine),
            serial: spec.serial.clone(),
            block_size: spec.block_size,
            create_bytes: spec.create_bytes,
            served_before: None,
            lock_wait: spec.lock_wait,
            incoming: spec.incoming,
            path: spec.path,
            raw: spec.raw,
            qcow2: spec.qcow2.then(|| Qcow2 {
                backing_root: spec.backing_root.clone(),
                cache_base: spec.cache_base,
                never_repair: spec.never_repair,
                base: spec.base.as_ref().map(|(path, format)| Base {
                    path: path.clone(),
                    export: None,
                    format: format.map(|format| match format {
                        Said::Raw => Format::Raw,
                        Said::Qcow2 => Format::Qcow2,
                    }),
                }),
            }),
        }
    }

    /// Those to choose from; one that is asked for is left to its workers to try.
    pub(super) fn engines(&self, asked: Option<EngineKind>) -> Engines {
        asked.map_or_else(|| self.engines.clone(), |engine| engines_to_choose(Some(engine)))
    }

    pub(super) fn open(&self, options: &OpenOptions, clone: &CloneWords) -> anyhow::Result<Opened> {
        open(options, clone, self.iopoll)
    }
}

/// What was said of a disk that is a clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CloneWords {
    /// It goes with the disk.
    pub(super) ephemeral: bool,
    /// The socket that it is named after.
    pub(super) named_after: Option<PathBuf>,
}

impl CloneWords {
    pub(super) fn of(spec: &DiskSpec) -> Self {
        Self { ephemeral: spec.ephemeral, named_after: spec.named_after.clone() }
    }
}

/// A disk that was opened here.
pub(super) struct Opened {
    pub(super) disk: Disk,
    /// Its file if that is new.
    pub(super) new: Option<OwnFile>,
    /// Its file if that is a clone that goes with the disk.
    pub(super) clone: Option<OwnFile>,
}

/// Opens a disk.
pub(super) fn open(
    options: &OpenOptions,
    clone: &CloneWords,
    iopoll: bool,
) -> anyhow::Result<Opened> {
    let disk = open_disk(options)?;
    let new = match &options.source {
        Source::Path(path) if disk.created() => Some(OwnFile::image(path, &disk.file())?),
        _ => None,
    };
    if let (Some(socket), false) = (&clone.named_after, options.incoming) {
        check_socket(&disk, socket)?;
    }
    if options.read_only && !options.incoming && disk.top_waits_for_journal() {
        // Only a daemon that writes can put into it what is missing.
        bail!(OpenError::Waits(disk.name().into()));
    }
    if iopoll {
        check_iopoll(&disk)?;
    }
    let clone = match &options.source {
        Source::Path(path) if clone.ephemeral => Some(OwnFile::image(path, &disk.file())?),
        _ => None,
    };
    Ok(Opened { disk, new, clone })
}

/// A clone that has its name from the last part of a socket's path is for that socket alone: others may end alike. A
/// file system without attributes does not tell them apart, which is said.
fn check_socket(disk: &Disk, socket: &Path) -> anyhow::Result<()> {
    let (file, socket) = (disk.file(), Location::of(socket));
    let (ours, mut its) = (socket.real().as_os_str().as_bytes(), [0; 4096]);
    match fgetxattr(&file, SOCKET, &mut its[..]) {
        Ok(len) if its[..len] == *ours => {}
        Ok(len) => bail!(
            "{}: it is the clone of another disk, whose socket is {}, and --overlay names clones by the last part of \
             that: give this socket another name, or say --base and the clone's own name; if that disk has moved, \
             setfattr -x {} lets this one have its clone",
            disk.name(),
            OsStr::from_bytes(&its[..len]).to_string_lossy(),
            SOCKET.to_string_lossy()
        ),
        Err(_) => {
            let kept = fsetxattr(&file, SOCKET, ours, XattrFlags::empty());
            if let (Err(error), false) = (kept, disk.geometry().read_only) {
                tracing::warn!(
                    disk = disk.name(),
                    "its file system does not keep for which socket this clone was made ({error}): another one whose \
                     path ends alike would be served it. Give sockets names of their own, or say --base and the \
                     clone's own name"
                );
            }
        }
    }
    Ok(())
}

/// Opens the configuration file. Nobody is waited for, should it be a pipe by now.
pub(super) fn configuration(path: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    let opened = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.context("cannot read the configuration")
}

/// Looks at a file as who opens it does, which the file system does not answer from what is known of it. Nobody is
/// waited for, should it be a pipe.
pub(crate) fn look(path: &Path) {
    let _ = Location::of(path);
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let _ = File::options().read(true).custom_flags(flags).open(path);
}

/// Listens on a new socket file.
pub(super) fn listen(path: &Path, access: Access) -> anyhow::Result<(UnixListener, OwnFile)> {
    let mut tries = 0;
    loop {
        let listener = bind(path, access)?;
        match OwnFile::new(path) {
            Ok(file) => return Ok((listener, file)),
            // The helper of a daemon that was killed removes what it has made, and looks a moment before.
            Err(_) if tries < 3 => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// A file that this process has made, and removes when this is dropped.
#[derive(Debug)]
pub(super) struct OwnFile {
    pub(super) path: PathBuf,
    /// File system and inode of its folder: somebody may have put another one there by the end, and who may write the
    /// folders above must not have other files go, with rights that are not his.
    folder: (u64, u64),
    /// And its own: what has the name at the end may be somebody else's.
    identity: (u64, u64),
    /// An image, whose lock, once it is locked, lasts until it has gone: nobody else serves it before that.
    image: Option<File>,
    kept: bool,
}

impl OwnFile {
    /// One that was just made at `path`.
    fn new(path: &Path) -> anyhow::Result<Self> {
        Self::of(path, None)
    }

    /// An image that was opened at `path`.
    fn image(path: &Path, image: &File) -> anyhow::Result<Self> {
        Self::of(path, Some(image))
    }

    fn of(path: &Path, image: Option<&File>) -> anyhow::Result<Self> {
        // A later change of the working folder would not matter.
        let path = std::path::absolute(path)?;
        let vanished = || format!("{}: it has vanished", path.display());
        let open = folder_of(&path).with_context(vanished)?;
        let folder = identity(&open, Path::new("")).with_context(vanished)?;
        let identity = match image {
            // What has the name by now may be another one.
            Some(image) if !path.is_symlink() => fstat(image).map(|it| (it.st_dev, it.st_ino))?,
            _ => identity(&open, &path).with_context(vanished)?,
        };
        let image = image.map(File::try_clone).transpose()?;
        Ok(Self { path, folder, identity, image, kept: false })
    }

    /// Lets it stay.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }

    /// Removes it, unless it has gone already.
    pub(super) fn remove(mut self) -> anyhow::Result<()> {
        self.kept = true;
        self.unlink().with_context(|| self.path.display().to_string())
    }

    fn unlink(&self) -> io::Result<()> {
        let folder = folder_of(&self.path)?;
        let there = match identity(&folder, &self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            there => there?,
        };
        if (identity(&folder, Path::new(""))?, there) != (self.folder, self.identity) {
            return Err(io::Error::other("another file has its name by now"));
        }
        // Whoever could lock it serves it.
        if let Some(Err(LockError::Locked | LockError::Marked(_))) =
            self.image.as_ref().map(|image| lock_image(image, false))
        {
            return Err(io::Error::other("somebody else serves it by now"));
        }
        Ok(unlinkat(&folder, name(&self.path), AtFlags::empty())?)
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if !self.kept {
            // Best effort: a socket that stays is replaced by the next daemon.
            let _ = self.unlink();
        }
    }
}

/// What is looked at in it and removed from it is in one folder, whatever becomes of its path.
fn folder_of(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path.parent().unwrap_or(path), flags, Mode::empty())?)
}

/// Of a file in a folder, or without a name of the folder.
fn identity(folder: &OwnedFd, path: &Path) -> io::Result<(u64, u64)> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let stat = statat(folder, name(path), flags)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Files that are made have one.
fn name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Whoever waits for the lock of an image gets it when that has gone, however the disk was closed before.
    #[test]
    fn c111_an_image_of_ours_is_locked_until_it_has_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let ours = || {
            let mut options = File::options();
            let image = options.read(true).write(true).create_new(true).open(&path).unwrap();
            (OwnFile::image(&path, &image).unwrap(), image)
        };
        let (own, image) = ours();
        lock_image(&image, false).unwrap();
        drop(image);
        let other = File::open(&path).unwrap();
        assert!(lock_image(&other, false).is_err());
        own.remove().unwrap();
        assert!(!path.exists());
        // Another file has its name, or somebody else its lock.
        let (own, _) = ours();
        let other = File::create_new(dir.path().join("other")).unwrap();
        std::fs::rename(dir.path().join("other"), &path).unwrap();
        assert!(own.remove().is_err() && path.exists());
        drop(other);
        std::fs::remove_file(&path).unwrap();
        let (own, _) = ours();
        let other = File::open(&path).unwrap();
        lock_image(&other, false).unwrap();
        assert!(own.remove().is_err() && path.exists());
    }

    #[test]
    fn e38_a_file_is_removed_from_the_folder_that_it_was_made_in() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for folder in ["here", "other"] {
            std::fs::create_dir(at(folder)).unwrap();
        }
        std::fs::write(at("here/file"), "ours").unwrap();
        let ours = OwnFile::new(&at("here/file")).unwrap();
        // The folder has gone elsewhere, and its name leads to another one, which has the same file, even.
        std::fs::rename(at("here"), at("there")).unwrap();
        symlink("other", at("here")).unwrap();
        std::fs::hard_link(at("there/file"), at("other/file")).unwrap();
        assert!(ours.remove().is_err());
        assert!(at("other/file").exists());
        // What has its name by now is somebody else's.
        let ours = OwnFile::new(&at("other/file")).unwrap();
        std::fs::write(at("new"), "not ours").unwrap();
        std::fs::rename(at("new"), at("other/file")).unwrap();
        drop(ours);
        assert_eq!(std::fs::read(at("other/file")).unwrap(), b"not ours");
        let ours = OwnFile::new(&at("other/file")).unwrap();
        ours.remove().unwrap();
        assert!(!at("other/file").exists());
        std::fs::write(at("other/file"), "ours").unwrap();
        let ours = OwnFile::new(&at("other/file")).unwrap();
        std::fs::remove_file(at("other/file")).unwrap();
        assert!(ours.remove().is_ok(), "it has gone");
    }
}
