//! A snapshot of a disk that is served: what was written so far becomes the base of a new, empty image.
//!
//! Who serves the disk has the new image made ([`crate::open::NewOverlay`]) and opened
//! ([`Disk::prepare_on_top`]), lets nothing be in flight, and puts it on top here. Queues that start after that write to
//! it.

use crate::active::shared;
use crate::disk::Disk;
use crate::open::share_lock;
use ringway_image::{Bases, CHAIN_MAX, Format, Image, Journal, Layer, LayerFormat, OnTop};
use std::any::Any;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// What a new image on top of a disk has to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayShape {
    /// What it is based on.
    pub format: Format,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Log2 of the bytes of a cluster.
    pub cluster_bits: u32,
    /// Its file is used with O_DIRECT.
    pub direct: bool,
}

/// Why there is no snapshot of a disk.
#[derive(Debug, thiserror::Error)]
pub enum NoSnapshot {
    /// `null:`, `sim:`.
    #[error("no file holds this disk")]
    NoFile,
    /// A device has one place.
    #[error(
        "its image is a block device, which cannot get another name. Snapshots of devices are made by \
         LVM and the like; or serve a clone of it (ringway serve --base), which can have snapshots"
    )]
    Device,
    /// Nothing is written.
    #[error("it is served read-only: it is the same as ever without a snapshot")]
    ReadOnly,
    /// The words that serve it would be wrong.
    #[error(
        "its image is raw, and after a snapshot it would be qcow2, which the words it is served by do not \
         say: after a restart it would not be served. Serve a qcow2 image, or a clone of this one \
         (ringway serve --base): snapshots of these need no other words"
    )]
    Raw,
    /// It is in two files already.
    #[error("the data of its image are in another file, which a snapshot would not hold")]
    DataFile,
    /// A longer chain would not be opened.
    #[error(
        "its image is based on so many others that no more than {CHAIN_MAX} could be opened. Have it \
         take them in first (ringway ctl flatten)"
    )]
    Deep,
    /// The header and what is served differ.
    #[error(
        "the last step of a merge is not over: its header names what was merged into already. Say `ringway ctl \
         commit` once more, without --snapshot, or serve the disk anew"
    )]
    Unfinished,
    /// What it was based on may be gone.
    #[error(
        "the last step of flattening it is not over: its header names nothing any more that it is based on. Say \
         `ringway ctl flatten` once more, or serve the disk anew"
    )]
    Detached,
}

/// What a disk was served from until it got a new top.
#[derive(Debug)]
#[must_use]
pub struct Beneath {
    image: Arc<Image>,
    file: Arc<File>,
    /// What is on top of it now.
    top: Arc<Image>,
}

/// A new image that is about to be put on top of a disk's.
#[derive(Debug)]
pub struct NewTop {
    on_top: OnTop,
    file: Arc<File>,
    size: u64,
    /// As it was when the new one was opened.
    image: Arc<Image>,
    journal: Option<Arc<Journal>>,
}

impl Beneath {
    /// Gives back what its image had taken ahead, and lets others read it. May take its time.
    ///
    /// # Errors
    /// That its lock could not be shared.
    pub fn settle(self, bases: &Bases) -> io::Result<()> {
        drop(self.image);
        // Without that other images only have tables of their own.
        let _ = self.top.renew_base(bases);
        share_lock(&self.file).map_err(io::Error::other)
    }
}

/// See [`Disk::without_journal`].
#[derive(Debug)]
#[must_use]
pub struct WithoutJournal(Option<Arc<Disk>>);

impl WithoutJournal {
    /// It has none as long as this process serves it.
    pub fn stay(mut self) {
        self.0 = None;
    }
}

impl Drop for WithoutJournal {
    fn drop(&mut self) {
        let Some(disk) = &self.0 else { return };
        let mut active = disk.active();
        active.without_journal -= 1;
        let image = active.image.clone().filter(|_| active.without_journal == 0);
        drop(active);
        let Some(image) = image else { return };
        // Nothing can fail that matters: without a journal it is only slower.
        let _ = image.set_defers(true);
        // Somebody else may have wanted it meanwhile.
        if disk.active().without_journal > 0 {
            let _ = image.set_defers(false);
        }
    }
}

impl Disk {
    /// What a new image on top of it has to be like.
    ///
    /// # Errors
    /// [`NoSnapshot`].
    pub fn overlay_shape(&self) -> Result<OverlayShape, NoSnapshot> {
        if !self.is_real() {
            return Err(NoSnapshot::NoFile);
        }
        if self.geometry.read_only {
            return Err(NoSnapshot::ReadOnly);
        }
        if self.block_device {
            return Err(NoSnapshot::Device);
        }
        let image = self.image().ok_or(NoSnapshot::Raw)?;
        if image.skips_middle() {
            return Err(NoSnapshot::Unfinished);
        }
        if image.is_detached() {
            return Err(NoSnapshot::Detached);
        }
        let chain = image.layers();
        if chain.len() >= CHAIN_MAX {
            return Err(NoSnapshot::Deep);
        }
        match chain.first().map(|top| &top.format) {
            Some(LayerFormat::Qcow2 { shape, data: None }) => Ok(OverlayShape {
                format: Format::Qcow2,
                virtual_size: self.capacity(),
                cluster_bits: shape.cluster_bits,
                direct: self.alignment != crate::Alignment::ANY,
            }),
            _ => Err(NoSnapshot::DataFile),
        }
    }

    /// Its image, whichever it is by then, has no journal until the first part of the answer is dropped: what is
    /// answered meanwhile is in its file, whatever is put on top of it, and whoever has it next. The second part says
    /// whether what was answered before is there, too.
    pub fn without_journal(self: &Arc<Self>) -> (WithoutJournal, io::Result<()>) {
        self.active().without_journal += 1;
        let guard = WithoutJournal(Some(Arc::clone(self)));
        (guard, self.with_image(|image| image.set_defers(false)))
    }

    /// Who looks after what outlives this process, as [`Disk::keep_state`] was told.
    #[must_use]
    pub fn state_keeper(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.active().state.as_ref().map(|state| Arc::clone(&state.keeper))
    }

    /// Opens a new, empty image, whose lock is ours, to be put on top of its own, which is to be called `snapshot` then.
    /// It is served on meanwhile.
    ///
    /// # Errors
    /// What the host says.
    pub fn prepare_on_top(&self, overlay: Layer, snapshot: &Path) -> io::Result<NewTop> {
        let file = Arc::clone(&overlay.file);
        let size = match &overlay.format {
            LayerFormat::Qcow2 { shape, .. } => shape.size,
            LayerFormat::Raw | LayerFormat::Elsewhere(_) => overlay.file_bytes,
        };
        let image = self.image().ok_or(io::ErrorKind::Unsupported)?;
        let journal = self.active().journal_to_use();
        let on_top =
            image.prepare_on_top(overlay, snapshot, self.image_unit(), journal.as_ref())?;
        Ok(NewTop { on_top, file, size, image, journal })
    }

    /// Puts a new image on top. Nothing may be in flight, and what was written has to be durable. No file is looked at for
    /// it but the disk's own. Nothing has changed if it fails.
    ///
    /// # Errors
    /// What the host says.
    pub fn put_on_top(&self, new: NewTop, bases: &Bases) -> io::Result<Beneath> {
        let NewTop { on_top, file, size, image: old, journal } = new;
        if size != self.capacity() {
            return Err(io::Error::other("the disk has another size by now: try again"));
        }
        let is_same = |now: Arc<Image>| Arc::ptr_eq(&now, &old);
        let to_use = self.active().journal_to_use();
        if !self.image().is_some_and(is_same) || !is_one(to_use.as_ref(), journal.as_ref()) {
            return Err(io::Error::other("its guest was elsewhere meanwhile: try again"));
        }
        // The journal is for the new one from now on.
        old.leave_journal()?;
        let image = shared(old.put_on_top(on_top, bases)?, self.cached_turn());
        let mut active = self.active();
        active.serve(Arc::clone(&image))?;
        let file = std::mem::replace(&mut active.file, file);
        drop(active);
        // A guest's flush is of the new one from now on. Without a thread it syncs nothing.
        let _ = old.leave_turn();
        // The new one is nothing but holes.
        self.find_holes();
        Ok(Beneath { image: old, file, top: image })
    }
}

/// True if both are the same one, or none.
fn is_one(one: Option<&Arc<Journal>>, other: Option<&Arc<Journal>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}
