//! What takes its time while a disk is served: it becomes independent of what its image is based on.

use super::super::events::Events;
use super::super::job::Job;
use super::super::served::{Served, lock};
use super::super::survive::survive;
use super::{ChangeOfFiles, Disks};
use anyhow::{Context, anyhow};
use ringway_control::protocol::{Happened, JobFacts, JobState};
use ringway_disk::Replaced;
use ringway_export::ChangeError;
use ringway_image::{Bases, Image};
use ringway_terminal::reasons::in_full;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So much is copied at a time. A first write of a guest waits for it at most.
const PORTION: u64 = 2 << 20;

/// With a limit, a portion is what may be copied in a part of a second.
const PORTIONS_A_SECOND: u64 = 8;

/// For how long the last step is tried again while another change of the disk is under way.
const PATIENCE: Duration = Duration::from_secs(60);

/// How it ended, if it did not fail.
enum Ended {
    Done(Duration),
    Cancelled,
}

/// Pulls all of an image; false if it was told to stop.
fn pull_all(job: &Job, image: &Image, bps: Option<u64>) -> std::io::Result<bool> {
    let most = bps.map_or(PORTION, |bps| (bps / PORTIONS_A_SECOND).clamp(1, PORTION));
    let (mut at, mut due) = (0, Instant::now());
    while at < image.size() {
        if !job.wait(due) {
            return Ok(false);
        }
        let begun = Instant::now();
        let pulled = image.pull(at, most)?;
        at = pulled.next;
        if let Some(bps) = bps {
            let nanos = u128::from(pulled.read) * 1_000_000_000 / u128::from(bps.max(1));
            let took = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            // What was not copied meanwhile is not made up for.
            due = due.max(begun) + took;
        }
        job.change(|facts| {
            facts.done_bytes = at;
            facts.total_bytes = image.size();
            facts.copied_bytes += pulled.copied;
        });
    }
    Ok(true)
}

/// Carries it out.
fn flatten(job: &Job, served: &Served, bases: &Bases, bps: Option<u64>) -> anyhow::Result<Ended> {
    let _alone = lock(&served.files_change);
    let image = served.export.disk().image_to_flatten()?;
    let pulled = pull_all(job, &image, bps);
    if !pulled.map_err(stopped)? {
        return Ok(Ended::Cancelled);
    }
    image.detach().context("its header")?;
    drop(image);
    let blackout = leave_backing(job, served, bases).context(
        "it is one file by now, and whoever serves it next needs no other. Here what it was based on \
         is still in use",
    )?;
    Ok(blackout.map_or(Ended::Cancelled, Ended::Done))
}

/// Opens the image anew; for how long no requests were taken. `None` if the disk ends.
fn leave_backing(job: &Job, served: &Served, bases: &Bases) -> anyhow::Result<Option<Duration>> {
    let begun = Instant::now();
    loop {
        let mut replaced: Option<std::io::Result<Replaced>> = None;
        let disk = served.export.disk();
        let rested = served.export.at_rest(&mut || replaced = Some(disk.leave_backing(bases)));
        match (replaced, rested) {
            (Some(replaced), rested) => {
                drop(replaced?);
                return Ok(Some(rested?));
            }
            (None, Err(ChangeError::Busy)) if begun.elapsed() < PATIENCE => {
                if !job.wait(Instant::now() + Duration::from_millis(50)) {
                    return Ok(None);
                }
            }
            (None, rested) => {
                rested?;
                return Err(anyhow!("nothing was done"));
            }
        }
    }
}

/// Notes how it has ended, and tells it.
fn finish(job: &Job, served: &Served, events: &Events, ended: anyhow::Result<Ended>) {
    let JobFacts { job: name, copied_bytes, .. } = job.facts();
    let (state, blackout_us, error) = match ended {
        Ok(Ended::Done(blackout)) => {
            let blackout_us = u64::try_from(blackout.as_micros()).unwrap_or(u64::MAX);
            tracing::info!(disk = served.name(), copied_bytes, blackout_us, "{name}: done");
            (JobState::Done, Some(blackout_us), None)
        }
        Ok(Ended::Cancelled) => {
            tracing::info!(disk = served.name(), copied_bytes, "{name}: cancelled");
            (JobState::Cancelled, None, None)
        }
        Err(error) => {
            let error = in_full(&error);
            tracing::error!(disk = served.name(), copied_bytes, "{name}: {error}");
            (JobState::Failed, None, Some(error))
        }
    };
    let happened = match (&error, blackout_us) {
        (Some(error), _) => Happened::JobFailed { job: name, copied_bytes, error: error.clone() },
        (None, Some(blackout_us)) => Happened::JobDone { job: name, copied_bytes, blackout_us },
        (None, None) => Happened::JobCancelled { job: name, copied_bytes },
    };
    job.change(|facts| (facts.state, facts.blackout_us, facts.error) = (state, blackout_us, error));
    events.tell(Some((served.id, served.name())), happened);
}

/// What to do, if a copy could not go on.
fn stopped(error: std::io::Error) -> anyhow::Error {
    let what = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => "make room, then say it again: what was copied stays",
        _ => "what was copied stays, and the disk is served as before",
    };
    anyhow::Error::from(error).context(what)
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
        let files = served.change_files()?;
        let mut last = lock(&served.job);
        if served.is_ephemeral() {
            let why = "it is ephemeral: its image is deleted with it. Serve it without ephemeral, or copy \
                       it (ringway copy)";
            return Err(anyhow!(why).into());
        }
        if !served.export.is_locked() {
            return Err(ChangeError::NotLocked.into());
        }
        let image = served.export.disk().image_to_flatten().map_err(anyhow::Error::from)?;
        let job = Arc::new(Job::new(bps, image.size()));
        let (events, bases) = (Arc::clone(&self.events), Arc::clone(&self.host.bases));
        let started = Happened::JobStarted { job: "flatten".into(), total_bytes: image.size() };
        drop(image);
        let (its, disk) = (Arc::clone(&job), Arc::clone(served));
        let thread = std::thread::Builder::new().name("job".into()).spawn(move || {
            events.tell(Some((disk.id, disk.name())), started);
            let ended = survive("a job", || flatten(&its, &disk, &bases, bps));
            let ended = ended.unwrap_or_else(|| Err(anyhow!("it panicked; the log says where")));
            finish(&its, &disk, &events, ended);
        });
        job.runs_on(thread.context("cannot start a thread")?);
        let facts = job.facts();
        *last = Some(job);
        drop(files);
        Ok(facts)
    }

    /// Stops the job of a disk, and waits until it has.
    ///
    /// # Errors
    /// That there is none.
    pub(crate) fn cancel_job(&self, served: &Served) -> anyhow::Result<JobFacts> {
        let job = lock(&served.job).clone().filter(|job| job.is_running());
        let job = job.ok_or_else(|| anyhow!("nothing is under way that could be cancelled"))?;
        job.end();
        Ok(job.facts())
    }
}
