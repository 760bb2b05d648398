//! New images on top of those that are served: the daemon's side, with a helper or without.

use super::Host;
use super::client::{Client, HelpersState, OUT_OF_TURN};
use super::protocol::{HelperAnswer, HelperRequest, OverlayWanted};
use super::state::{OwnState, StateKeeper};
use super::wire::LOST;
use anyhow::{Context, bail, ensure};
use ringway_disk::{Beneath, Disk, NewOverlay, NewTop, OverlayShape, WithoutJournal, lock_image};
use ringway_image::Layer;
use ringway_terminal::reasons::in_full;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A new image on top of a disk's, locked for this daemon. What was done for it is undone when this is
/// dropped, unless the disk is served from it.
pub(crate) struct Overlay<'a> {
    disk: &'a Disk,
    made: Made,
    layer: Layer,
    /// Until the disk is served from it.
    new: Option<NewTop>,
    snapshot: PathBuf,
    /// The disk's state has its name, too.
    state_follows: bool,
    /// From before the names are taken until they stay, or are given back: whoever finds the new image has all that
    /// was answered.
    without_journal: Option<WithoutJournal>,
    on_top: bool,
}

enum Made {
    Here(Option<NewOverlay>),
    There(Arc<Client>, u64),
}

impl Host {
    /// Makes a new image on top of a disk's, which is at `path` and to be called `snapshot`.
    ///
    /// # Errors
    /// Why there is none; nothing has changed then.
    pub(crate) fn overlay<'a>(
        &self,
        disk: &'a Disk,
        path: &Path,
        snapshot: &Path,
    ) -> anyhow::Result<Overlay<'a>> {
        let shape = disk.overlay_shape()?;
        let (made, layer, alignment, snapshot) = match &self.helper {
            None => {
                let (made, layer, alignment) =
                    NewOverlay::make(path, &disk.file(), snapshot, shape)?;
                let snapshot = made.snapshot().to_owned();
                (Made::Here(Some(made)), layer, (alignment.memory, alignment.offset), snapshot)
            }
            Some(helper) => helper.overlay(disk, path, snapshot, shape)?,
        };
        let mut overlay = Overlay {
            disk,
            made,
            layer,
            new: None,
            snapshot,
            state_follows: false,
            without_journal: None,
            on_top: false,
        };
        let takes = disk.alignment();
        ensure!(
            alignment.0 <= takes.memory && alignment.1 <= takes.offset,
            "a new file here takes larger blocks than the image: serve it with --cache writeback"
        );
        lock_image(&overlay.layer.file, false).context("cannot lock the new image")?;
        let new = disk.prepare_on_top(overlay.layer.clone(), &overlay.snapshot);
        overlay.new = Some(new.context("cannot read the tables of the new image")?);
        Ok(overlay)
    }

    /// Serves the disk from the new image. Nothing may be in flight.
    ///
    /// # Errors
    /// What the host says; nothing has changed then.
    pub(crate) fn put_on_top(&self, overlay: &mut Overlay<'_>) -> std::io::Result<Beneath> {
        let new = overlay.new.take().ok_or(std::io::ErrorKind::NotFound)?;
        let beneath = overlay.disk.put_on_top(new, &self.bases)?;
        overlay.on_top = true;
        Ok(beneath)
    }
}

impl Overlay<'_> {
    /// The new image.
    pub(crate) fn file(&self) -> &std::fs::File {
        &self.layer.file
    }

    /// What the old image is called from now on, from the root.
    pub(crate) fn snapshot(&self) -> &Path {
        &self.snapshot
    }

    /// Gives the old image its new name, and this one the old one's. Whoever comes after a daemon that
    /// is killed from then on finds this one, on top of all that was written, which is why the disk has no journal
    /// before that.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn take_name(&mut self, without_journal: WithoutJournal) -> anyhow::Result<()> {
        self.without_journal = Some(without_journal);
        state_follows(self.disk, &self.layer)?;
        self.state_follows = true;
        match &mut self.made {
            Made::Here(made) => Ok(made.as_mut().context("it is not there")?.take_name()?),
            Made::There(helper, number) => {
                helper.ask_deferred(&HelperRequest::NameOverlay { number: *number }, None).map(drop)
            }
        }
    }
}

impl Drop for Overlay<'_> {
    fn drop(&mut self) {
        let ended = match &mut self.made {
            Made::Here(made) => match made.take() {
                Some(made) if self.on_top => {
                    made.keep();
                    Ok(())
                }
                made => made.map_or(Ok(()), NewOverlay::undo).map_err(Into::into),
            },
            Made::There(helper, number) => {
                let request = HelperRequest::EndOverlay { number: *number, kept: self.on_top };
                helper.ask_deferred(&request, None).map(drop)
            }
        };
        let settled = match self.state_follows {
            // The next daemon may find either of them.
            true if ended.is_err() && !self.on_top => {
                self.without_journal.take().into_iter().for_each(WithoutJournal::stay);
                Ok(())
            }
            true => state_settles(self.disk, self.on_top),
            false => Ok(()),
        };
        for error in [ended, settled].into_iter().filter_map(Result::err) {
            tracing::error!(
                disk = self.disk.name(),
                "what a snapshot has left behind could not be cleared up: {}",
                in_full(&error)
            );
        }
    }
}

/// What outlives the daemon is found by whoever serves the new image, too.
fn state_follows(disk: &Disk, layer: &Layer) -> anyhow::Result<()> {
    let Some(keeper) = disk.state_keeper() else { return Ok(()) };
    if let Some(keeper) = keeper.downcast_ref::<HelpersState>() {
        return keeper.follow(&layer.file);
    }
    match keeper.downcast_ref::<OwnState>() {
        Some(keeper) => lock(keeper).follow(layer.file.try_clone()?),
        None => Ok(()),
    }
}

fn state_settles(disk: &Disk, follows: bool) -> anyhow::Result<()> {
    let Some(keeper) = disk.state_keeper() else { return Ok(()) };
    if let Some(keeper) = keeper.downcast_ref::<HelpersState>() {
        return keeper.settle(follows);
    }
    keeper.downcast_ref().into_iter().for_each(|keeper| lock(keeper).settle(follows));
    Ok(())
}

fn lock(keeper: &OwnState) -> std::sync::MutexGuard<'_, StateKeeper> {
    keeper.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Client {
    fn overlay(
        self: &Arc<Self>,
        disk: &Disk,
        path: &Path,
        snapshot: &Path,
        shape: OverlayShape,
    ) -> anyhow::Result<(Made, Layer, (u32, u32), PathBuf)> {
        let request = HelperRequest::Overlay(Box::new(OverlayWanted {
            path: path.into(),
            snapshot: snapshot.into(),
            format: shape.format.name().into(),
            virtual_size: shape.virtual_size,
            cluster_bits: shape.cluster_bits,
            direct: shape.direct,
        }));
        let image = disk.file();
        let (HelperAnswer::Overlay { number, image, alignment, snapshot }, file) =
            self.ask_deferred(&request, Some(image.as_fd()))?
        else {
            bail!(OUT_OF_TURN);
        };
        let Some(file) = file else {
            let request = HelperRequest::EndOverlay { number, kept: false };
            let ended = self.ask_deferred(&request, None).err();
            bail!(
                "the new image: {LOST}{}",
                ended.map_or(String::new(), |error| format!("; {error}"))
            );
        };
        let file = Arc::new(std::fs::File::from(file));
        let layer = image.into_image(&file, Vec::new())?.layers.pop();
        let layer = layer.context("the new image has no file")?;
        Ok((Made::There(Arc::clone(self), number), layer, alignment, snapshot.into()))
    }
}
