//! A disk whose image says where its clusters are.

use crate::disk::Disk;
use crate::unmapped::Unmapped;
use ringway_image::{Bases, Image, ImageClient};
use std::io;
use std::sync::Arc;

impl Disk {
    /// Reads the tables of an image that is not raw; does nothing for others. A disk is not served
    /// before. Its lock has to be ours.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the tables.
    pub fn map_image(&mut self) -> io::Result<()> {
        self.map_image_beside(&Bases::default())
    }

    /// As [`Disk::map_image`]; what the image is based on is shared with other disks that are based on
    /// the same.
    ///
    /// # Errors
    /// As [`Disk::map_image`].
    pub fn map_image_beside(&mut self, bases: &Bases) -> io::Result<()> {
        let unit = self.image_unit();
        let mut active = self.active();
        if let Some(Unmapped { layers, usage }) = active.unmapped.take() {
            active.image = Some(Arc::new(Image::open_beside(layers, usage, bases, unit)?));
        }
        Ok(())
    }

    /// The image that says where its clusters are, if it is no raw one. After a snapshot it is another.
    #[must_use]
    pub fn image(&self) -> Option<Arc<Image>> {
        self.active().image.clone()
    }

    /// What its image reads and writes multiples of, in bytes.
    pub(crate) fn image_unit(&self) -> u32 {
        self.alignment.memory.max(self.alignment.offset)
    }

    /// What a queue of `depth` requests needs besides an engine, if the disk is no raw image. Starts
    /// the image's thread; for threads that may.
    ///
    /// # Errors
    /// What the host says.
    pub fn image_client(&self, depth: u16) -> io::Result<Option<ImageClient>> {
        if self.active().unmapped.is_some() {
            return Err(io::Error::other("the tables of its image have not been read"));
        }
        self.image().map(|image| image.client(depth)).transpose()
    }
}
