//! What a disk is served from now: its file, and the image in it. A snapshot puts others in their place.

use crate::state::State;
use crate::unmapped::Unmapped;
use ringway_core::sync_turn::SyncTurn;
use ringway_image::{Bases, Image, Journal, LayerFormat};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// The file that is written, its image, and what of them outlives this process. Dropped in this order: the image
/// is left in order first, then its state, and its lock goes last, with the file.
#[derive(Debug)]
pub(crate) struct Active {
    /// Where its clusters are, if it is no raw image.
    pub(crate) image: Option<Arc<Image>>,
    /// Its image, if that is no raw one and nobody has read its tables.
    pub(crate) unmapped: Option<Unmapped>,
    /// Of all disks of this process, for an image whose tables are read later.
    pub(crate) bases: Arc<Bases>,
    /// Where entries of its image's tables wait for a flush, if there is a place that outlives this process.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Whether somebody sees it if a sync fails while this process dies.
    pub(crate) defers: bool,
    /// How many want its image to have no journal ([`Disk::without_journal`](crate::Disk::without_journal)).
    pub(crate) without_journal: usize,
    /// Whoever served it before was killed in a sync, with all who could have heard how that ended.
    pub(crate) is_unsure: bool,
    /// There is one while its lock is ours.
    pub(crate) state: Option<State>,
    pub(crate) file: Arc<File>,
}

impl Active {
    /// The journal, if it is to be used.
    pub(crate) fn journal_to_use(&self) -> Option<Arc<Journal>> {
        self.journal.clone().filter(|_| self.defers)
    }

    /// The file with the data of its image, if that is another one.
    pub(crate) fn data_file(&self) -> Option<Arc<File>> {
        let of_image = self.image.as_ref().and_then(|image| image.data_file());
        let top = self.unmapped.as_ref().and_then(|unmapped| unmapped.layers.first());
        match (of_image, top.map(|top| &top.format)) {
            (Some((_, file)), _) | (_, Some(LayerFormat::Qcow2 { data: Some((file, _)), .. })) => {
                Some(Arc::clone(file))
            }
            _ => None,
        }
    }

    /// It is served from this image from now on.
    ///
    /// # Errors
    /// What the host says; it is served as before then.
    pub(crate) fn serve(&mut self, image: Arc<Image>) -> io::Result<()> {
        if self.without_journal > 0 {
            image.set_defers(false)?;
        }
        self.image = Some(image);
        Ok(())
    }
}

/// An image whose thread syncs when it is its `turn`, if it shares one.
pub(crate) fn shared(image: Image, turn: Option<Arc<SyncTurn>>) -> Arc<Image> {
    turn.into_iter().for_each(|turn| image.share_turn(turn));
    Arc::new(image)
}
