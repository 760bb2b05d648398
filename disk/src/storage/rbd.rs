//! Images of Ceph clusters.

use super::{Flush, KeptBy, Nature, Size, Storage};
use crate::choices::{EngineKind, OwnEngine};
use crate::disk::Disk;
use ringway_aio::{Engine, FileId, Handle};
use ringway_rbd::{Image, Rbd};
use std::any::Any;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// The engine of images.
pub(crate) const RBD: EngineKind =
    EngineKind::Own(OwnEngine { name: "rbd", make: |depth| Ok(Box::new(Rbd::new(depth)?)) });

/// An image, which stays with its process.
#[derive(Debug)]
pub(crate) struct Cluster(pub(crate) Arc<Image>);

impl Storage for Cluster {
    fn nature(&self) -> Nature {
        Nature {
            engine: Some(RBD),
            flush: Flush::Engine,
            size: Size::Asked,
            has_length: false,
            kept_by: KeptBy::Nothing,
            max_bytes: u32::MAX,
        }
    }

    fn attach(&self, engine: &mut dyn Engine, file: &Arc<File>) -> io::Result<FileId> {
        let image: Handle = Arc::<Image>::clone(&self.0);
        engine.attach_handle(file, &image)
    }

    fn bytes(&self, _: &File) -> io::Result<u64> {
        self.0.bytes().map_err(io::Error::other)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Disk {
    /// The image of a Ceph cluster that holds the data, if it is one.
    #[must_use]
    pub fn cluster_image(&self) -> Option<&Arc<Image>> {
        self.storage.as_any().downcast_ref().map(|Cluster(image)| image)
    }
}
