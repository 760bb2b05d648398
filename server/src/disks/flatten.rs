//! Disks that become independent of what their images are based on.

use super::super::job::Job;
use super::super::served::Served;
use super::jobs::{Ended, copy_all, open_anew};
use super::{ChangeOfFiles, Disks};
use anyhow::{Context, anyhow};
use ringway_control::protocol::JobFacts;
use ringway_core::kill_point;
use ringway_export::ChangeError;
use std::sync::Arc;

/// Carries it out.
fn flatten(job: &Job, served: &Served, bps: Option<u64>) -> anyhow::Result<Ended> {
    let disk = served.export.disk();
    let image = disk.image_to_flatten()?;
    let pull = |at, most| {
        image.pull_while(&|| !job.is_cancelled(), at, most).inspect(|_| {
            kill_point!(Pulled);
        })
    };
    let pulled = copy_all(job, bps, || image.size(), pull);
    if !pulled? {
        return Ok(Ended::Cancelled);
    }
    image.detach().context("its header")?;
    kill_point!(Detached);
    drop(image);
    let leave = || disk.leave_backing();
    let blackout = open_anew(job, served, leave).context(
        "it is one file by now, and whoever serves it next needs no other. Here what it was based on \
         is still in use",
    )?;
    kill_point!(Reopened);
    Ok(blackout.map_or(Ended::Cancelled, Ended::Done))
}

impl Disks {
    /// Begins to copy what the image of a disk is based on into it, at most `bps` bytes in a second, after
    /// which it is based on nothing.
    ///
    /// # Errors
    /// Why it cannot be; nothing has changed then.
    pub(crate) fn flatten(
        &self,
        served: &Arc<Served>,
        bps: Option<u64>,
    ) -> Result<JobFacts, ChangeOfFiles> {
        let _files = served.change_files()?;
        if served.is_ephemeral() {
            let why = "it is ephemeral: its image is deleted with it. Serve it without ephemeral, or copy \
                       it (ringway copy)";
            return Err(anyhow!(why).into());
        }
        if !served.export.is_locked() {
            return Err(ChangeError::NotLocked.into());
        }
        let image = served.export.disk().image_to_flatten().map_err(anyhow::Error::from)?;
        let job = Job::new("flatten", bps, image.size());
        drop(image);
        let disk = Arc::clone(served);
        Ok(self.start_job(served, job, move |job| flatten(job, &disk, bps))?)
    }
}
