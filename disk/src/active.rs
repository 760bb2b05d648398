//! What a disk is served from now: its file, and the image in it. A snapshot puts others in their place.

use crate::unmapped::Unmapped;
use ringway_image::{Bases, Image};
use std::fs::File;
use std::sync::Arc;

/// The file that is written, and its image.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) file: Arc<File>,
    /// Its image, if that is no raw one and nobody has read its tables.
    pub(crate) unmapped: Option<Unmapped>,
    /// Where its clusters are, if it is no raw image.
    pub(crate) image: Option<Arc<Image>>,
    /// Of all disks of this process, for an image whose tables are read later.
    pub(crate) bases: Arc<Bases>,
}
