//! A disk that is served becomes independent of what its image is based on.
//!
//! Who serves the disk pulls all of it ([`Image::pull`]), has the header name no backing file any more
//! ([`Image::detach`]), lets nothing be in flight, and opens the image anew here.

use crate::active::shared;
use crate::disk::Disk;
use ringway_image::{Image, OpenBase};
use std::io;
use std::sync::Arc;

/// Why a disk cannot be flattened.
#[derive(Debug, thiserror::Error)]
pub enum NotFlattened {
    /// `null:`, `sim:`.
    #[error("no file holds this disk")]
    NoFile,
    /// Nothing is written.
    #[error("it is served read-only. Stop serving it, then copy it (ringway copy)")]
    ReadOnly,
    /// A raw image.
    #[error("its image is raw, which is based on nothing")]
    Raw,
    /// It is one file.
    #[error("its image is based on nothing")]
    Alone,
    /// The header, or what the host says.
    #[error(transparent)]
    Image(#[from] io::Error),
}

/// What a disk was served from, as long as somebody still uses it.
#[derive(Debug)]
pub struct Replaced {
    _image: Arc<Image>,
}

impl Disk {
    /// Its image, if that can be flattened.
    ///
    /// # Errors
    /// [`NotFlattened`].
    pub fn image_to_flatten(&self) -> Result<Arc<Image>, NotFlattened> {
        if !self.is_real() {
            return Err(NotFlattened::NoFile);
        }
        let image = self.image().ok_or(NotFlattened::Raw)?;
        if self.geometry.read_only {
            return Err(NotFlattened::ReadOnly);
        }
        if image.layers().len() < 2 {
            return Err(NotFlattened::Alone);
        }
        image.may_detach()?;
        Ok(image)
    }

    /// Serves it from its image alone, whose header names no backing file any more. Nothing may be in
    /// flight, and what was written has to be durable. What it was based on is closed when the answer is
    /// dropped, which may take its time. If it fails, it is served as before.
    ///
    /// # Errors
    /// What the host says.
    pub fn leave_backing(&self) -> io::Result<Replaced> {
        self.open_anew(None)
    }

    /// Serves it from its image on what means the same. Nothing may be in flight; no other file than its own is looked at.
    pub(crate) fn open_anew(&self, base: Option<&OpenBase>) -> io::Result<Replaced> {
        let old = self.image().ok_or(io::ErrorKind::Unsupported)?;
        old.give_back()?;
        let top = old.chain()?.swap_remove(0);
        let (unit, journal) = (self.image_unit(), self.active().journal_to_use());
        let image = Image::open_on(top, base, old.usage(), unit, journal.as_ref())?;
        self.active().serve(shared(image, self.cached_turn()))?;
        Ok(Replaced { _image: old })
    }
}
