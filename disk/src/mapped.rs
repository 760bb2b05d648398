//! A disk whose image says where its clusters are.

use crate::active::shared;
use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::holding::is_no_space;
use crate::unmapped::Unmapped;
use ringway_core::host::forget;
use ringway_image::{
    Bases, BelowLost, Image, ImageClient, Journal, Layer, LayerFormat, Replayed, Use,
    leave_unwritten, read_as_stored, replay,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Disk {
    /// Reads the tables of an image that is not raw; does nothing for others. A disk is not served
    /// before. Its lock has to be ours: those of an incoming disk are read by [`Disk::map_image_again`].
    ///
    /// # Errors
    /// What the host says, or what is wrong with the tables.
    pub fn map_image(&mut self) -> io::Result<()> {
        self.map_image_beside(&Arc::default())
    }

    /// As [`Disk::map_image`]; what the image is based on is shared with other disks that are based on
    /// the same.
    ///
    /// # Errors
    /// As [`Disk::map_image`].
    pub fn map_image_beside(&mut self, bases: &Arc<Bases>) -> io::Result<()> {
        self.active().bases = Arc::clone(bases);
        if self.incoming {
            return Ok(());
        }
        let unmapped = self.active().unmapped.take();
        self.leave_unwritten(unmapped.as_ref().map_or(&[], |unmapped| &unmapped.layers))?;
        unmapped.map_or(Ok(()), |unmapped| self.map(unmapped))
    }

    /// True if something waits for an image of it in the state folder of a daemon that was killed, or if one of
    /// them is a copy of an image that was in use ([`Layer::waits_for_journal`]). Known until its tables are read.
    #[must_use]
    pub fn waits_for_journal(&self) -> bool {
        let active = self.active();
        let layers = active.unmapped.iter().flat_map(|unmapped| &unmapped.layers);
        layers.into_iter().any(Layer::waits_for_journal)
    }

    /// The same of its image alone, and not of those that it is based on.
    #[must_use]
    pub fn top_waits_for_journal(&self) -> bool {
        let active = self.active();
        let layers = active.unmapped.as_ref().map(|unmapped| &unmapped.layers);
        layers.and_then(|layers| layers.first()).is_some_and(Layer::waits_for_journal)
    }

    /// Whether the lock of its file can go to another process, which goes on with its guest.
    #[must_use]
    pub fn can_be_handed_over(&self) -> bool {
        self.is_real() && self.image().is_none_or(|image| image.can_be_handed_over())
    }

    /// Has all that is known of an image that is not raw be in its file, durably, and forgets it: others may
    /// write the file once its lock is given up. Nothing may be in flight. If it fails, it is served as
    /// before.
    ///
    /// # Errors
    /// What the host says.
    pub fn forget_image(&self) -> io::Result<()> {
        let Some(image) = self.image() else { return Ok(()) };
        let layers = image.hand_over(self.image_unit()).inspect_err(|_| self.note_loss())?;
        let usage = image.usage();
        let mut active = self.active();
        active.unmapped = Some(Unmapped { layers, usage });
        active.image = None;
        drop(active);
        // Its thread has nothing to do any more, and ends.
        drop(image);
        Ok(())
    }

    /// True if nothing is known of its image but what its files are.
    #[must_use]
    pub fn has_forgotten_image(&self) -> bool {
        self.active().unmapped.is_some()
    }

    /// Reads the tables of an image that is not raw, and its header before them, which others may have
    /// written: the lock has to be ours again. The bytes that the disk has by now; it has to be told them
    /// ([`Disk::set_capacity`]). If it fails, nothing is known of it, as before.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the image.
    pub fn map_image_again(&self) -> io::Result<u64> {
        let unit = self.image_unit();
        let active = self.active();
        let Some(Unmapped { layers, usage }) = &active.unmapped else { return Ok(self.capacity()) };
        let (mut layers, usage) = (layers.clone(), *usage);
        drop(active);
        self.leave_unwritten(&layers)?;
        if let Some(top) = layers.first_mut() {
            *top = top.taken_over(usage, unit)?;
        }
        let bytes = match layers.first().map(|top| &top.format) {
            Some(LayerFormat::Qcow2 { shape, .. }) => shape.size,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        self.judge_size(bytes).map_err(io::Error::other)?;
        self.map(Unmapped { layers, usage })?;
        Ok(bytes)
    }

    /// Reads its tables, and serves it from them. That takes as long as its storage likes: nothing is held meanwhile that
    /// others need to learn how it is.
    fn map(&self, Unmapped { mut layers, usage }: Unmapped) -> io::Result<()> {
        let active = self.active();
        let (journal, to_use) = (active.journal.clone(), active.journal_to_use());
        let bases = Arc::clone(&active.bases);
        drop(active);
        let known = self.failure_inherited.load(SeqCst);
        self.finish(&mut layers, usage, journal.as_deref(), to_use.as_deref())?;
        if !known && self.failure_inherited.load(SeqCst) {
            // What has not come from the journal may have been lost in a sync.
            self.leave_unwritten(&layers)?;
        }
        let unit = self.image_unit();
        let image = match &to_use {
            Some(journal) => Image::open_with_journal(layers, usage, &bases, unit, journal),
            None => Image::open_beside(layers, usage, &bases, unit),
        };
        let image = image.inspect_err(|error| {
            if BelowLost::is(error) {
                // The host tells nobody else.
                self.inherit_failure();
            }
        })?;
        let image = shared(image, self.cached_turn());
        let mut active = self.active();
        active.serve(image)?;
        active.unmapped = None;
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

impl Disk {
    /// If a sync had failed in an earlier process, or may have: what the host could not write then it may hold still, as
    /// if it were durable, until it needs the memory. Where nothing is kept nobody knows whether one had, and all that the
    /// host holds is forgotten.
    fn leave_unwritten(&self, layers: &[Layer]) -> io::Result<()> {
        let writes = self.is_real() && !self.geometry.read_only;
        if !writes {
            return Ok(());
        }
        let active = self.active();
        let (file, journal) = (Arc::clone(&active.file), active.journal.clone());
        let (is_kept, is_unsure) = (active.state.is_some(), active.is_unsure);
        drop(active);
        let has_failed = self.failure_inherited.load(SeqCst);
        let Some(top) = layers.first() else {
            if has_failed || is_unsure {
                // What cannot be written now either is known to be lost.
                let _ = read_as_stored(&file);
            }
            return Ok(());
        };
        if !has_failed && !is_unsure {
            let data = match &top.format {
                LayerFormat::Qcow2 { data, .. } => data.as_ref().map(|(data, _)| data),
                _ => None,
            };
            if !is_kept && self.cache != CacheMode::None {
                [&file].into_iter().chain(data).for_each(|file| forget(file));
            }
            return Ok(());
        }
        // Where a sync was under way that nobody knows to have failed, answered writes wait in the journal.
        let journal = journal.as_deref().filter(|_| has_failed);
        leave_unwritten(layers, self.image_unit(), journal).map_err(|error| {
            let text = "a sync had failed, and its tables cannot be written once more";
            io::Error::new(error.kind(), format!("{text}: {error}"))
        })
    }

    /// Does what a process that was killed had left to do in an image.
    fn finish(
        &self,
        layers: &mut [Layer],
        usage: Use,
        journal: Option<&Journal>,
        to_use: Option<&Journal>,
    ) -> io::Result<()> {
        // Names of a snapshot that was not taken may have stayed, and its disk gone on with what is the base here.
        let base_waits = layers.get(1).is_some_and(Layer::waits_for_journal);
        let lacks = base_waits && !self.created && layers[0].is_empty(self.image_unit())?;
        let Some(Layer { file, file_bytes, format, .. }) = layers.first_mut() else {
            return Ok(());
        };
        let LayerFormat::Qcow2 { shape, data: None } = format else { return Ok(()) };
        if usage.read_only {
            return Ok(());
        }
        if lacks {
            self.answered_is_lost();
        }
        let bytes = if usage.grows { file.metadata()?.len() } else { *file_bytes };
        let lost = &mut || self.answered_is_lost();
        let replayed = replay(file, bytes, self.image_unit(), journal, lost);
        let replayed = match (replayed, to_use) {
            (Err(error), Some(journal))
                if error.raw_os_error().is_some_and(is_no_space) && journal.is_used() =>
            {
                tracing::warn!(
                    disk = self.name(),
                    "what a daemon had answered before finds no room in its tables, and waits on: {error}"
                );
                return Ok(());
            }
            (replayed, _) => replayed?,
        };
        shape.forget_journal();
        if let Replayed::Entries(count) = replayed {
            tracing::info!(
                disk = self.name(),
                count,
                "put into its tables what a killed daemon had answered"
            );
        }
        Ok(())
    }
}
