//! An image that is not raw, as helper and daemon say it: what its headers hold, and in which order its
//! files follow.

use super::path_message::Name;
use anyhow::Context;
use ringway_disk::Unmapped;
use ringway_image::{Layer, LayerFormat, Shape, Use};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// [`Unmapped`], but for its files.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ImageMessage {
    layers: Vec<LayerMessage>,
    read_only: bool,
    grows: bool,
    barriers: bool,
}

#[derive(Debug, Deserialize, Serialize)]
struct LayerMessage {
    file_bytes: u64,
    /// Its bytes are in no file of this host: the daemon knows how they are read.
    elsewhere: bool,
    /// Of qcow2 images.
    shape: Option<ShapeWords>,
    /// Bytes of the file with its data, if that is another one; it follows the layer's own.
    data_bytes: Option<u64>,
    name: Name,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(remote = "Shape")]
struct ShapeRemote {
    version: u32,
    size: u64,
    cluster_bits: u32,
    l1_offset: u64,
    l1_entries: u32,
    refcount_table_offset: u64,
    refcount_table_clusters: u32,
    refcount_order: u32,
    zstd: bool,
    autoclear: u64,
    external_data: bool,
    links: u64,
}

#[derive(Debug, Deserialize, Serialize)]
struct ShapeWords(#[serde(with = "ShapeRemote")] Shape);

impl ImageMessage {
    /// Adds the image's files to `files`, but for its first, which is there.
    pub(super) fn of(image: Unmapped, files: &mut Vec<Arc<File>>) -> Self {
        let Use { read_only, grows, barriers } = image.usage;
        let mut layers = Vec::with_capacity(image.layers.len());
        for (nth, Layer { file, file_bytes, format, name }) in image.layers.into_iter().enumerate()
        {
            files.extend((nth > 0).then_some(file));
            let (mut shape, mut data_bytes) = (None, None);
            let elsewhere = matches!(format, LayerFormat::Elsewhere(_));
            if let LayerFormat::Qcow2 { shape: found, data } = format {
                shape = Some(ShapeWords(found));
                if let Some((file, bytes)) = data {
                    files.push(file);
                    data_bytes = Some(bytes);
                }
            }
            let name = (&*name).into();
            layers.push(LayerMessage { file_bytes, elsewhere, shape, data_bytes, name });
        }
        Self { layers, read_only, grows, barriers }
    }

    /// How many files follow the first.
    pub(super) fn others(&self) -> usize {
        let data = self.layers.iter().filter(|layer| layer.data_bytes.is_some()).count();
        (self.layers.len() + data).saturating_sub(1)
    }

    pub(super) fn into_image(
        self,
        first: &Arc<File>,
        others: Vec<OwnedFd>,
    ) -> anyhow::Result<Unmapped> {
        let mut files = std::iter::once(Arc::clone(first))
            .chain(others.into_iter().map(|file| Arc::new(File::from(file))));
        let mut next = || files.next().context("a file of the image is missing");
        let mut layers = Vec::with_capacity(self.layers.len());
        for LayerMessage { file_bytes, elsewhere, shape, data_bytes, name } in self.layers {
            let file = next()?;
            let data = data_bytes.map(|bytes| anyhow::Ok((next()?, bytes))).transpose()?;
            let format = match shape {
                None if elsewhere => LayerFormat::Elsewhere(None),
                None => LayerFormat::Raw,
                Some(ShapeWords(shape)) => LayerFormat::Qcow2 { shape, data },
            };
            layers.push(Layer { file, file_bytes, format, name: name.into() });
        }
        let Self { read_only, grows, barriers, .. } = self;
        Ok(Unmapped { layers, usage: Use { read_only, grows, barriers } })
    }
}
