//! A disk that is served merges what its image is based on into what that is based on itself.
//!
//! Who serves the disk has the base opened for writing and locked ([`LockedBase`]), copies
//! ([`Disk::commit`]), has the header of its image name the base ([`Image::skip_middle`]), lets nothing be
//! in flight, and opens the image anew here, without the one in the middle.

use crate::disk::Disk;
use crate::flatten::Replaced;
use crate::open::{LockError, raise_lock, share_lock};
use ringway_image::{Bases, Commit, Image, Layer, LayerFormat, OpenBase, identity};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Why nothing is merged into what a disk is based on.
#[derive(Debug, thiserror::Error)]
pub enum NotCommitted {
    /// `null:`, `sim:`.
    #[error("no file holds this disk")]
    NoFile,
    /// Nothing is written.
    #[error("it is served read-only. Stop serving it, then `qemu-img commit`")]
    ReadOnly,
    /// A raw image.
    #[error("its image is raw, which is based on nothing")]
    Raw,
    /// It is one file.
    #[error("its image is based on nothing")]
    Alone,
    /// What is written goes to it.
    #[error(
        "its image is based on one other, which is based on nothing: only what is not written any more is \
         merged. Have what was written so far become a snapshot first (ringway ctl commit --snapshot NEW)"
    )]
    NoMiddle,
    /// Two files would have to be opened and locked.
    #[error(
        "the data of what it would be merged into are in another file. Stop serving it, then `ringway commit`"
    )]
    DataFile,
    /// The header and what is served differ.
    #[error(
        "the last step of a merge is not over: its header names what was merged into already. Say `ringway ctl \
         commit` once more without --snapshot, or serve the disk anew"
    )]
    Unfinished,
    /// The base, the header, or what the host says.
    #[error(transparent)]
    Image(#[from] io::Error),
}

/// Why a base is not ours to write.
#[derive(Debug, thiserror::Error)]
pub enum NotLocked {
    /// By another process.
    #[error(
        "what it would be merged into is in use by somebody else, who would see it change: stop that first \
         ({0})"
    )]
    InUse(LockError),
    /// By other disks of this process.
    #[error(
        "what it would be merged into is what other disks of this daemon are based on, too. Remove these, \
         or make them independent first (ringway ctl flatten)"
    )]
    Shared,
    /// Another file came.
    #[error("another file was opened for writing than the one that is read")]
    Other,
    /// What the host says.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// A file that a disk is based on, which is written, and which nobody else uses until this is dropped.
#[derive(Debug)]
pub struct LockedBase {
    writable: Arc<File>,
    /// As the chain has it. The lock belongs to this open file.
    read: Arc<File>,
}

impl LockedBase {
    /// Of a disk whose image, one of those that share `bases`, is based on `read`; `writable` is the same
    /// file. Nobody else may use it, and from now on nobody can.
    ///
    /// # Errors
    /// [`NotLocked`]; it is locked for reading then, as it was.
    pub fn new(read: Arc<File>, writable: File, bases: &Bases) -> Result<Self, NotLocked> {
        let (one, other) = (read.metadata()?, writable.metadata()?);
        if identity(&one) != identity(&other) {
            return Err(NotLocked::Other);
        }
        raise_lock(&read).map_err(NotLocked::InUse)?;
        let base = Self { writable: Arc::new(writable), read };
        // Disks of this process may share the open file, and with it the lock.
        match bases.based_on(&base.read)? {
            0 | 1 => Ok(base),
            _ => Err(NotLocked::Shared),
        }
    }

    /// Its file, open for writing.
    #[must_use]
    pub fn writable(&self) -> &Arc<File> {
        &self.writable
    }
}

impl Drop for LockedBase {
    fn drop(&mut self) {
        if let Err(error) = share_lock(&self.read) {
            tracing::warn!("what a disk is based on is still locked for writing: {error}");
        }
    }
}

impl Disk {
    /// What would be written, as the chain has it: the file below what its image is based on, or with
    /// `snapshot` below the image itself, which is to be a snapshot first.
    ///
    /// # Errors
    /// [`NotCommitted`].
    pub fn base_to_write(&self, snapshot: bool) -> Result<Layer, NotCommitted> {
        if !self.is_real() {
            return Err(NotCommitted::NoFile);
        }
        let image = self.image().ok_or(NotCommitted::Raw)?;
        if self.geometry.read_only {
            return Err(NotCommitted::ReadOnly);
        }
        if snapshot && image.skips_middle() {
            return Err(NotCommitted::Unfinished);
        }
        let chain = image.chain()?;
        let (middle, base) = match &chain[..] {
            [_] => return Err(NotCommitted::Alone),
            [top, base, ..] if snapshot => (top, base),
            [_, middle, base, ..] => (middle, base),
            _ => return Err(NotCommitted::NoMiddle),
        };
        if matches!(base.format, LayerFormat::Qcow2 { data: Some(_), .. }) {
            return Err(NotCommitted::DataFile);
        }
        Commit::judge(middle, base, self.image_unit())?;
        if !snapshot {
            image.may_skip_middle()?;
        }
        Ok(base.clone())
    }

    /// Begins to merge what its image is based on into `base`, which that is based on. Also gives the
    /// image.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the base.
    pub fn commit(&self, base: &LockedBase, bases: &Bases) -> io::Result<(Commit, Arc<Image>)> {
        let image = self.image().ok_or(io::ErrorKind::Unsupported)?;
        image.may_skip_middle()?;
        let (middle, mut below) = match image.layers() {
            [_, middle, below @ ..] if !below.is_empty() => (middle.clone(), below.to_vec()),
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        if !Arc::ptr_eq(&below[0].file, &base.read) {
            return Err(io::Error::other("it is based on another file by now"));
        }
        below[0].file = Arc::clone(&base.writable);
        let barriers = image.usage().barriers;
        let commit = Commit::open(middle, below, bases, self.image_unit(), barriers)?;
        Ok((commit, image))
    }

    /// Opens what it will be based on without the image in the middle: `base`, which is as `written` says.
    ///
    /// # Errors
    /// What the host says.
    pub fn base_without_middle(
        &self,
        base: &LockedBase,
        written: Layer,
        bases: &Bases,
    ) -> io::Result<OpenBase> {
        let image = self.image().ok_or(io::ErrorKind::Unsupported)?;
        let below = image.layers().iter().skip(3).cloned();
        let first = Layer { file: Arc::clone(&base.read), ..written };
        let chain = std::iter::once(first).chain(below).collect();
        bases.open_early(chain, image.cluster(), self.image_unit())
    }

    /// Serves it without the image in the middle: its header names `base` by now. Nothing may be in flight, and what was
    /// written has to be durable. What it was served from is closed when the answer is dropped. If it fails, it is served
    /// as before.
    ///
    /// # Errors
    /// What the host says.
    pub fn leave_middle(&self, base: &OpenBase) -> io::Result<Replaced> {
        self.open_anew(Some(base))
    }
}
