//! Snapshots of disks that are served.

use super::super::isolate::ServedFiles;
use super::super::served::{Served, lock};
use super::{ChangeOfFiles, Disks};
use anyhow::{Context, anyhow};
use ringway_control::protocol::{Happened, Snapshotted};
use ringway_core::kill_point;
use ringway_export::ChangeError;
use std::path::Path;
use std::sync::MutexGuard;

impl Disks {
    /// What was written so far to a disk becomes a read-only image called `name`, in the folder of its
    /// image, which is a new one on top of it from then on.
    ///
    /// # Errors
    /// Why there is none; nothing has changed then, unless it says so.
    pub(crate) fn snapshot(
        &self,
        served: &Served,
        name: &Path,
    ) -> Result<Snapshotted, ChangeOfFiles> {
        let alone = served.change_files()?;
        self.take_snapshot(served, &alone, name)
    }

    /// As [`Disks::snapshot`], for whoever changes the disk's files already.
    pub(super) fn take_snapshot(
        &self,
        served: &Served,
        _alone: &MutexGuard<'_, ()>,
        name: &Path,
    ) -> Result<Snapshotted, ChangeOfFiles> {
        let taken = self.put_overlay(served, name);
        if let Some(parent) = &self.parent {
            ServedFiles::of(served).into_iter().for_each(|files| parent.files(files));
        }
        taken
    }

    fn put_overlay(&self, served: &Served, name: &Path) -> Result<Snapshotted, ChangeOfFiles> {
        if served.is_ephemeral() {
            return Err(anyhow!(
                "it is ephemeral: its image is deleted with it, and what that is based on would be left. \
                 Serve it without ephemeral, or copy it (ringway copy)"
            )
            .into());
        }
        let disk = served.export.disk();
        if !served.export.is_locked() {
            return Err(ChangeError::NotLocked.into());
        }
        let path = lock(&served.claim).image().map(Path::to_owned).context("it has no image")?;
        // The new image is as large as the disk is now, and may be what is served in a moment.
        let resizing = lock(&served.resizing);
        let mut overlay = self.host.overlay(disk, &path, name)?;
        // Most of what has to be durable is, before anybody waits for it.
        disk.sync().map_err(ChangeError::Sync)?;
        // If we are killed behind the next step, who opens the disk finds the new image, on top of what was
        // written until then.
        let (without_journal, left) = disk.without_journal();
        left.map_err(ChangeError::Sync)?;
        kill_point!(OverlayMade);
        // Whichever of them has the image's name when this process ends.
        if let Some(parent) = &self.parent {
            let files = ServedFiles::of(served).and_then(|files| files.or_on_top(overlay.file()));
            parent.files(files.context("cannot look at its files")?);
        }
        // What may be refused is, before any name changes.
        served.export.may_rest()?;
        overlay.take_name(without_journal)?;
        kill_point!(OverlayNamed);
        let mut beneath = None;
        let at_rest =
            served.export.at_rest(&mut || beneath = Some(self.host.put_on_top(&mut overlay)));
        kill_point!(OverlayOnTop);
        drop(resizing);
        let snapshot = overlay.snapshot().to_owned();
        // Its names stay, or go.
        drop(overlay);
        lock(&served.claim).follow(|path| self.host.locate(path));
        let Some(beneath) = beneath else {
            return Err(at_rest.map_or_else(Into::into, |_| anyhow!("nothing was done").into()));
        };
        let beneath = beneath.context("the new image is not served")?;
        if let Err(error) = beneath.settle(&self.host.bases) {
            tracing::warn!(
                disk = served.name(),
                "what is its base from now on is still locked for writing: {error}"
            );
        }
        let blackout = at_rest
            .map_err(|error| anyhow!("the snapshot was taken, {}: {error}", snapshot.display()))?;
        let blackout_us = u64::try_from(blackout.as_micros()).unwrap_or(u64::MAX);
        let images = disk.image().map_or(1, |image| image.layers().len());
        tracing::info!(
            disk = served.name(),
            snapshot = %snapshot.display(),
            blackout_us,
            "snapshot taken"
        );
        let (id, image) = (served.id, served.name().to_owned());
        let happened = Happened::SnapshotTaken { snapshot: snapshot.clone(), blackout_us };
        self.events.tell(Some((id, &image)), happened);
        Ok(Snapshotted { id, image, snapshot, blackout_us, images })
    }
}
