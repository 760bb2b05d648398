//! A new image on top of one that is being served, and how it gets that one's name.
//!
//! ```text
//! made      IMAGE is the old one               .ringway-create-… is on top of NEW, which is not there
//! linked    IMAGE and NEW are the old one
//! named     IMAGE is on top of NEW, which is the old one
//! ```
//!
//! So at any moment IMAGE is a whole image with all that was written, and whoever opens it by the same
//! words finds it. Each step is durable before the next. Whoever has those names holds both files, and so their locks,
//! until nothing is to be done about them any more.

use super::OpenError;
use super::direct::turn_on;
use crate::choices::Alignment;
use crate::snapshot::OverlayShape;
use ringway_image::{CreateError, Header, Layer, LayerFormat, NewImage, Refused, Shape};
use rustix::fs::{
    AtFlags, CWD, Gid, RenameFlags, Uid, XattrFlags, chownat, fgetxattr, flistxattr, fsetxattr,
    linkat, renameat_with,
};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempPath;

/// Bytes of the names of a file's attributes, and of the value of one, at most.
const XATTRS_MAX: usize = 64 << 10;

/// Why there is no new image, or why it does not get its name.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// What the host says.
    #[error("{}: cannot {what}: {source}", path.display())]
    Host {
        /// Which file.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
    /// It has no last part.
    #[error("{}: it names no file", .0.display())]
    NoName(PathBuf),
    /// Names in headers and atomic renames stay within a folder.
    #[error(
        "{}: a snapshot is kept beside its image, in {}: give a name there, or move it when it is not \
         used any more and tell the images that are based on it (qemu-img rebase -u)",
        path.display(),
        folder.display()
    )]
    Elsewhere {
        /// What was asked for.
        path: PathBuf,
        /// Where the image is.
        folder: PathBuf,
    },
    /// Whoever opens it by that name looks for the snapshot in the folder of the link.
    #[error(
        "{}: this name is a symbolic link into another folder, where a snapshot would not be found by it: \
         serve the disk by its own name, {}",
        link.display(),
        image.display()
    )]
    Link {
        /// What it is served by.
        link: PathBuf,
        /// Its own name.
        image: PathBuf,
    },
    /// Nothing is overwritten.
    #[error("{}: it is there already, and a snapshot overwrites nothing. Give another name", .0.display())]
    Exists(PathBuf),
    /// It was renamed or replaced since it was opened.
    #[error("{}: another file has its name by now: serve the disk anew first", .0.display())]
    Replaced(PathBuf),
    /// It cannot be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// What was made is not as it should be.
    #[error("the new image: {0}")]
    Refused(#[from] Refused),
    /// Direct I/O.
    #[error(transparent)]
    Open(#[from] OpenError),
}

fn host(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> OverlayError {
    let path = path.to_owned();
    move |source| OverlayError::Host { path, what, source }
}

/// How far it has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Made,
    Linked,
    Named,
    /// It is served, or its process is gone: everything stays.
    Kept,
}

/// A new image on top of one that is being served. Dropping it takes it away again, and gives the old
/// one its name back, unless it is kept.
#[derive(Debug)]
pub struct NewOverlay {
    folder: PathBuf,
    image: PathBuf,
    snapshot: PathBuf,
    temporary: TempPath,
    step: Step,
    old: File,
    new: Arc<File>,
}

impl NewOverlay {
    /// Makes it, complete and durable, on top of what is at `path` and open as `opened`, and which is
    /// to be called `snapshot`: a name without a folder, or one in the image's. Also gives its file,
    /// which is not locked, and what its file takes. A lock of either file, if it is that of this open file, lasts as
    /// long as this does.
    ///
    /// # Errors
    /// [`OverlayError`]; there is nothing new then.
    pub fn make(
        path: &Path,
        opened: &File,
        snapshot: &Path,
        shape: OverlayShape,
    ) -> Result<(Self, Layer, Alignment), OverlayError> {
        let (image, folder) = own_name(path)?;
        let snapshot = place(&folder, snapshot)?;
        let old = opened.metadata().map_err(host(path, "look at it"))?;
        let named = image.symlink_metadata().map_err(host(path, "look at it"))?;
        if !named.is_file() || (named.dev(), named.ino()) != (old.dev(), old.ino()) {
            return Err(OverlayError::Replaced(path.into()));
        }
        if snapshot == image {
            return Err(OverlayError::Exists(snapshot));
        }
        is_free(&snapshot, &named)?;
        let cannot = || host(path, "make a new image on top of it");
        let mut named_by_us = tempfile::Builder::new();
        let new = named_by_us.prefix(".ringway-create-").tempfile_in(&folder).map_err(cannot())?;
        let (file, temporary) = new.into_parts();
        let name = in_header(&snapshot);
        let content = NewImage {
            virtual_size: shape.virtual_size,
            cluster_bits: shape.cluster_bits,
            backing: Some((&name, shape.format)),
        };
        content.write(&file).map_err(|error| match error {
            CreateError::Host(error) => cannot()(error),
            error => error.into(),
        })?;
        take_after(&file, opened, &image).map_err(cannot())?;
        file.sync_all().map_err(cannot())?;
        let bytes = file.metadata().map_err(cannot())?.len();
        let header = Header::read(&file, bytes).map_err(cannot())??;
        let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
        let name = path.to_path_buf();
        let new = Arc::new(file);
        let layer = Layer { file: Arc::clone(&new), file_bytes: bytes, format, name };
        let alignment = match shape.direct {
            true => turn_on(path, std::slice::from_ref(&layer))?,
            false => Alignment::ANY,
        };
        let (step, old) = (Step::Made, opened.try_clone().map_err(cannot())?);
        Ok((Self { folder, image, snapshot, temporary, step, old, new }, layer, alignment))
    }

    /// Where the snapshot is to be, from the root.
    #[must_use]
    pub fn snapshot(&self) -> &Path {
        &self.snapshot
    }

    /// Gives the old image its new name, and this one the name of the old one.
    ///
    /// # Errors
    /// What the host says; all names are as they were then.
    pub fn take_name(&mut self) -> Result<(), OverlayError> {
        let old = self.image.symlink_metadata().map_err(host(&self.image, "look at it"))?;
        match linkat(CWD, &self.image, CWD, &self.snapshot, AtFlags::empty()) {
            Ok(()) => self.step = Step::Linked,
            // Left by a daemon that was killed: it is the image itself.
            Err(Errno::EXIST) => is_free(&self.snapshot, &old)?,
            Err(error) => {
                let what = "give the image this name as well (a hard link)";
                return Err(host(&self.snapshot, what)(error.into()));
            }
        }
        self.sync_folder()?;
        ringway_core::kill_point!(OverlayLinked);
        let renamed = renameat_with(CWD, &*self.temporary, CWD, &self.image, RenameFlags::empty());
        renamed.map_err(|error| host(&self.image, "put a new image there")(error.into()))?;
        self.step = Step::Named;
        self.sync_folder()
    }

    fn sync_folder(&self) -> Result<(), OverlayError> {
        let synced = File::open(&self.folder).and_then(|folder| folder.sync_all());
        synced.map_err(host(&self.folder, "make names in it durable"))
    }

    /// It is served from now on.
    pub fn keep(mut self) {
        // A temporary name that it never had goes.
        if self.step == Step::Named {
            self.step = Step::Kept;
        }
    }

    /// It is not served: the old one has its name, and no other.
    ///
    /// # Errors
    /// What the host says; the new one may have that name still.
    pub fn undo(mut self) -> Result<(), OverlayError> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), OverlayError> {
        let step = std::mem::replace(&mut self.step, Step::Kept);
        let has_name = match step {
            Step::Linked => &self.old,
            // Nobody has written to it.
            Step::Named => &self.new,
            Step::Made | Step::Kept => return Ok(()),
        };
        // Else the old one could be left without a name.
        if !(leads_to(&self.image, has_name) && leads_to(&self.snapshot, &self.old)) {
            return Err(OverlayError::Replaced(self.image.clone()));
        }
        let undone = match step {
            Step::Linked => std::fs::remove_file(&self.snapshot),
            _ => renameat_with(CWD, &self.snapshot, CWD, &self.image, RenameFlags::empty())
                .map_err(io::Error::from),
        };
        undone.map_err(host(&self.image, "give it its name back"))?;
        self.sync_folder()
    }
}

impl Drop for NewOverlay {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            tracing::error!(
                "{}: the names of a snapshot that was not taken are still there: {error}",
                self.snapshot.display()
            );
        }
    }
}

/// True if this name, which is no link, is that of the file.
fn leads_to(name: &Path, file: &File) -> bool {
    let (there, here) = (name.symlink_metadata(), file.metadata());
    there.is_ok_and(|there| {
        here.is_ok_and(|here| (there.dev(), there.ino()) == (here.dev(), here.ino()))
    })
}

/// Whoever may use the image may use the new one: owner, group, access control lists and other attributes, mode.
fn take_after(new: &File, old: &File, name: &Path) -> io::Result<()> {
    let (meta, now) = (old.metadata()?, new.metadata()?);
    if (meta.uid(), meta.gid()) != (now.uid(), now.gid()) {
        let (user, group) = (Uid::from_raw(meta.uid()), Gid::from_raw(meta.gid()));
        if let Err(error) = chownat(new, c"", Some(user), Some(group), AtFlags::EMPTY_PATH) {
            // A group of its own anybody may give.
            let _ = chownat(new, c"", None, Some(group), AtFlags::EMPTY_PATH);
            tracing::warn!(
                "{}: the new image is not its owner's (user {user}, group {group}): {error}",
                name.display(),
                user = meta.uid(),
                group = meta.gid()
            );
        }
    }
    let mut names = vec![0; XATTRS_MAX];
    let len = flistxattr(old, &mut names[..]).unwrap_or(0);
    let mut value = vec![0; XATTRS_MAX];
    for name in names[..len].split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let copied = fgetxattr(old, name, &mut value[..])
            .and_then(|len| fsetxattr(new, name, &value[..len], XattrFlags::empty()));
        // Labels and the like are the host's to give.
        if [&b"user."[..], b"system."].iter().any(|kind| name.to_bytes().starts_with(kind)) {
            copied?;
        }
    }
    // Last: to change an owner or a list may change it.
    new.set_permissions(std::fs::Permissions::from_mode(meta.mode() & 0o777))
}

/// The name of an image from the root, and its folder, which has to be that of `path`.
fn own_name(path: &Path) -> Result<(PathBuf, PathBuf), OverlayError> {
    let image = path.canonicalize().map_err(host(path, "find it"))?;
    let folder = image.parent().unwrap_or(Path::new("/")).to_owned();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    match parent.canonicalize().map_err(host(parent, "find this folder"))? == folder {
        true => Ok((image, folder)),
        false => Err(OverlayError::Link { link: path.into(), image }),
    }
}

/// Where a snapshot is to be.
fn place(folder: &Path, said: &Path) -> Result<PathBuf, OverlayError> {
    let name = said.file_name().ok_or_else(|| OverlayError::NoName(said.into()))?;
    let parent = said.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        let there = parent.canonicalize().map_err(host(parent, "find this folder"))?;
        if there != folder {
            return Err(OverlayError::Elsewhere { path: said.into(), folder: folder.into() });
        }
    }
    Ok(folder.join(name))
}

/// Nothing has the name, or the image itself.
fn is_free(snapshot: &Path, image: &std::fs::Metadata) -> Result<(), OverlayError> {
    match snapshot.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(host(snapshot, "look at it")(error)),
        Ok(there) if (there.dev(), there.ino()) == (image.dev(), image.ino()) => Ok(()),
        Ok(_) => Err(OverlayError::Exists(snapshot.into())),
    }
}

/// The snapshot's name in a header of the same folder. To QEMU a colon ends a protocol, but behind a
/// slash.
fn in_header(snapshot: &Path) -> PathBuf {
    let name = PathBuf::from(snapshot.file_name().unwrap_or_default());
    match name.as_os_str().as_encoded_bytes().contains(&b':') {
        true => Path::new(".").join(name),
        false => name,
    }
}
