//! A new, empty image on top of one that is served.
//!
//! All that takes looking at files is done while guests are served on: the new image is opened, and what the old one is
//! based on is known by it. While the disk is at rest the old one gives what it knows of its own tables, from memory.

use super::{Image, Opened, Use};
use crate::base::{Bases, Beneath};
use crate::budget::Budget;
use crate::journal::Journal;
use crate::layer::{Layer, LayerFormat};
use crate::layers::Layers;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A new image that is about to be put on top of another one.
#[derive(Debug)]
pub struct OnTop {
    opened: Opened,
    beneath: Beneath,
    /// What is below it, which has another name by then.
    below: Layer,
}

impl Image {
    /// Opens `overlay`, a new and empty image, to be put on top of this one, which is to be called `name` then and is
    /// served on meanwhile. All I/O is in multiples of `unit` bytes; the journal is for the new image, once this one has
    /// left it.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the new image.
    pub fn prepare_on_top(
        &self,
        overlay: Layer,
        name: &Path,
        unit: u32,
        journal: Option<&Arc<Journal>>,
    ) -> io::Result<OnTop> {
        let (usage, chain): (Use, _) = (self.usage, &self.chain);
        let LayerFormat::Qcow2 { shape, .. } = &overlay.format else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let beneath = Beneath::new(chain, self.base.as_ref(), shape.cluster_bits, unit)?;
        let below = chain.first().ok_or(io::ErrorKind::Unsupported)?;
        let below = Layer { name: name.into(), ..below.clone() };
        let layers = Layers::on(overlay.clone(), None, unit, &mut Budget::default())?;
        Ok(OnTop { opened: Opened::new(overlay, layers, usage, journal)?, beneath, below })
    }

    /// Puts it on top of this image, which has left its journal, and to which nothing is written any more. No file is looked
    /// at, wherever it lies.
    ///
    /// # Errors
    /// That the thread of this image has ended, or what the host says to memory.
    pub fn put_on_top(&self, on_top: OnTop, bases: &Bases) -> io::Result<Self> {
        let OnTop { mut opened, beneath, below } = on_top;
        let (top, below) = self.in_thread(move |work| work.top_beneath(below))??;
        opened.layers.set_base(beneath.finish(top, below, bases)?)?;
        opened.into_image()
    }

    /// What it is based on is not changed any more: who is to be based on the same shares it from now on.
    ///
    /// # Errors
    /// What the host says to the question of what the files are.
    pub fn renew_base(&self, bases: &Bases) -> io::Result<()> {
        self.base.as_ref().map_or(Ok(()), |base| bases.renew(base))
    }
}
