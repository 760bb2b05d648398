//! From which files a disk is served: a process that is started again serves it from no others.

use crate::served::Served;
use anyhow::{Context, ensure};
use ringway_control::config::{FileIdentity, Location};
use ringway_image::{Layer, LayerFormat};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::Path;

/// The files of a disk; none if it has none on this host.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct ServedFiles {
    /// Its image: two while a snapshot is taken, as either of them may have its name if that is interrupted.
    images: Vec<FileIdentity>,
    /// What that is based on, and data files. Jobs make them fewer.
    others: Vec<FileIdentity>,
}

impl ServedFiles {
    /// As a disk is served now.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn of(served: &Served) -> io::Result<Self> {
        let disk = served.export.disk();
        // What is open tells, and not what its name led to when it was looked up.
        if !disk.is_real() {
            return Ok(Self::default());
        }
        let (mut images, mut others) = (vec![FileIdentity::of(&disk.file())?], Vec::new());
        if let Some(image) = disk.image() {
            let layers = image.layers();
            images = vec![FileIdentity::of(&layers[0].file)?];
            // What is elsewhere is known by its name alone.
            let here = |layer: &&Layer| !matches!(layer.format, LayerFormat::Elsewhere(_));
            for layer in layers.iter().filter(here) {
                others.push(FileIdentity::of(&layer.file)?);
                if let LayerFormat::Qcow2 { data: Some((data, _)), .. } = &layer.format {
                    others.push(FileIdentity::of(data)?);
                }
            }
        }
        Ok(Self { images, others })
    }

    /// A new image is about to be put on top.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn or_on_top(mut self, new: &File) -> io::Result<Self> {
        if !self.images.is_empty() {
            let new = FileIdentity::of(new)?;
            self.images.push(new.clone());
            self.others.push(new);
        }
        Ok(self)
    }

    /// Refuses a name that leads elsewhere by now, before anything is opened or made there.
    ///
    /// # Errors
    /// That it does.
    pub(super) fn check_name(&self, path: &Path) -> anyhow::Result<()> {
        if self.images.is_empty() {
            return Ok(());
        }
        let there = Location::of(path);
        let what = match there.identity() {
            FileIdentity::Path(_) => "there is no file of this name any more",
            _ => "another file has this name by now",
        };
        ensure!(
            self.images.contains(there.identity()),
            "{}: {what}, and the guest of this disk is served no other image than before. Give the image its \
             name back, or remove the disk",
            path.display()
        );
        Ok(())
    }

    /// Refuses other files than before.
    ///
    /// # Errors
    /// Which of them is another one.
    pub(super) fn check(&self, served: &Served) -> anyhow::Result<()> {
        if self.images.is_empty() {
            return Ok(());
        }
        let now = Self::of(served).context("cannot look at its files")?;
        let name = served.name();
        ensure!(
            now.images.iter().all(|image| self.images.contains(image)),
            "{name}: it was replaced while it was opened"
        );
        let layers = served.export.disk().image();
        let other = now.others.iter().find(|file| !self.others.contains(file));
        let Some(other) = other else { return Ok(()) };
        let named = layers.iter().flat_map(|image| image.layers().iter());
        let named =
            named.filter(|layer| FileIdentity::of(&layer.file).is_ok_and(|is| is == *other));
        let which = named.map(|layer| layer.name.display().to_string()).next();
        anyhow::bail!(
            "{name}: it is based on another file than before{}, and its guest is served nothing else. Give the \
             former one its name back, or remove the disk",
            which.map_or_else(String::new, |which| format!(", {which}"))
        );
    }
}
