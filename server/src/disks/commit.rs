//! Disks whose images are merged into what these are based on.

use super::super::host::NamedBase;
use super::super::job::Job;
use super::super::served::Served;
use super::jobs::{Ended, copy_all, open_anew};
use super::{ChangeOfFiles, Disks};
use anyhow::{Context, anyhow};
use ringway_control::protocol::JobFacts;
use ringway_core::kill_point;
use ringway_disk::LockedBase;
use ringway_export::ChangeError;
use ringway_image::Bases;
use std::path::Path;
use std::sync::Arc;

/// Carries it out.
fn commit(
    job: &Job,
    served: &Served,
    (base, named): (&LockedBase, &NamedBase),
    bases: &Bases,
    bps: Option<u64>,
) -> anyhow::Result<Ended> {
    let disk = served.export.disk();
    let (mut commit, image) = disk.commit(base, bases)?;
    let size = commit.size();
    let copy = |at, most| {
        commit.copy(at, most).inspect(|_| {
            kill_point!(Merged);
        })
    };
    let copied = copy_all(job, bps, || size, copy);
    if !copied? {
        return Ok(Ended::Cancelled);
    }
    let written = commit.finish().context("what was merged cannot be made durable")?;
    kill_point!(MergeDurable);
    // By that name the image will be opened next.
    named.open().context("what was merged stays in both")?;
    image.skip_middle().context("its header")?;
    kill_point!(MiddleSkipped);
    drop(image);
    let beneath = disk
        .base_without_middle(base, written, bases)
        .context("what it is based on from now on")?;
    let leave = || disk.leave_middle(&beneath);
    let blackout = open_anew(job, served, leave).context(
        "its header names what was merged into by now, and whoever serves it next needs the other image no \
         more. Here that is still in use",
    )?;
    kill_point!(Reopened);
    if blackout.is_some() {
        if let Err(error) = commit.give_back() {
            tracing::warn!(
                "clusters of the base that are not used could not be given back: {error}"
            );
        }
    }
    Ok(blackout.map_or(Ended::Cancelled, Ended::Done))
}

impl Disks {
    /// Begins to merge what the image of a disk is based on into what that is based on, at most `bps`
    /// bytes in a second, after which the image is based on the latter. With `snapshot` what was written so
    /// far becomes an image of that name first, and is what is merged.
    ///
    /// # Errors
    /// Why it cannot be; nothing has changed then, unless it says that the snapshot was taken.
    pub(crate) fn commit(
        &self,
        served: &Arc<Served>,
        snapshot: Option<&Path>,
        bps: Option<u64>,
    ) -> Result<JobFacts, ChangeOfFiles> {
        let files = served.change_files()?;
        if served.is_ephemeral() {
            let why = "it is ephemeral: its image is deleted with it, and what that is based on is to stay \
                       as it is. Serve it without ephemeral";
            return Err(anyhow!(why).into());
        }
        if !served.export.is_locked() {
            return Err(ChangeError::NotLocked.into());
        }
        if snapshot.is_none() && served.base.is_some() {
            let why = "it is served as a clone (base), and what is merged away may be what it is a clone of. \
                       Merge a snapshot (--snapshot NEW), or serve the disk without base";
            return Err(anyhow!(why).into());
        }
        let disk = served.export.disk();
        let file = disk.base_to_write(snapshot.is_some()).map_err(anyhow::Error::from)?;
        // Before there is a snapshot, which would be in vain.
        let (base, named) = self.host.locked_base(file, served.base.as_deref())?;
        if let Some(name) = snapshot {
            self.take_snapshot(served, &files, name)?;
        }
        let job = Job::new("commit", bps, disk.capacity());
        let (its, bases) = (Arc::clone(served), Arc::clone(&self.host.bases));
        Ok(self.start_job(served, job, move |job| {
            let ended = commit(job, &its, (&base, &named), &bases, bps);
            // Before anybody is told that it is over.
            drop(base);
            ended
        })?)
    }
}
