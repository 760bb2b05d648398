//! What takes its time with the files of a disk while it is served: how it is paced, and how it ends.

use super::super::events::Events;
use super::super::job::Job;
use super::super::served::{Served, lock};
use super::super::survive::survive;
use super::Disks;
use anyhow::{Context, anyhow, bail};
use ringway_control::protocol::{Happened, JobFacts, JobState};
use ringway_disk::Replaced;
use ringway_export::ChangeError;
use ringway_image::{CopyRate, Pulled};
use ringway_terminal::reasons::in_full;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For how long the last step is tried again while another change of the disk is under way.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How it ended, if it did not fail.
pub(super) enum Ended {
    Done(Duration),
    Cancelled,
}

/// Copies all of an image, whose size may change meanwhile, portion by portion; false if it was told to
/// stop.
pub(super) fn copy_all(
    job: &Job,
    bps: Option<u64>,
    size: impl Fn() -> u64,
    mut copy: impl FnMut(u64, u64) -> std::io::Result<Pulled>,
) -> anyhow::Result<bool> {
    let mut rate = CopyRate::new(bps);
    while rate.done < size() {
        if !job.wait(rate.due()) {
            return Ok(false);
        }
        match rate.next(&mut copy) {
            Err(error) if error.kind() == ErrorKind::Interrupted && job.is_cancelled() => {
                return Ok(false);
            }
            copied => copied.map_err(|error| stopped(job, error))?,
        };
        job.change(|facts| {
            facts.done_bytes = rate.done;
            facts.total_bytes = size();
            facts.copied_bytes = rate.copied;
        });
    }
    Ok(true)
}

/// Has the disk opened anew when nothing is in flight; for how long no requests were taken. `None` if it
/// ends.
pub(super) fn open_anew(
    job: &Job,
    served: &Served,
    open: impl Fn() -> std::io::Result<Replaced>,
) -> anyhow::Result<Option<Duration>> {
    let begun = Instant::now();
    loop {
        let mut replaced: Option<std::io::Result<Replaced>> = None;
        let at_rest = served.export.at_rest(&mut || replaced = Some(open()));
        match (replaced, at_rest) {
            (Some(replaced), at_rest) => {
                drop(replaced?);
                return Ok(Some(at_rest?));
            }
            (None, Err(ChangeError::Busy)) if begun.elapsed() < TIMEOUT => {
                if !job.wait(Instant::now() + Duration::from_millis(50)) {
                    return Ok(None);
                }
            }
            (None, at_rest) => {
                at_rest?;
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
fn stopped(job: &Job, error: std::io::Error) -> anyhow::Error {
    let is_full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
    let what = match (is_full, job.facts().job == "commit") {
        (true, false) => "make room, then say it again: what was copied stays",
        // What was to be a snapshot is one.
        (true, true) => "make room, then say it again without --snapshot: it begins anew",
        (false, false) => "what was copied stays, and the disk is served as before",
        (false, true) => "the disk is served as before",
    };
    anyhow::Error::from(error).context(what)
}

impl Disks {
    /// Begins what takes its time. Whoever calls holds the disk's files until this returns.
    pub(super) fn start_job(
        &self,
        served: &Arc<Served>,
        job: Job,
        carry_out: impl FnOnce(&Job) -> anyhow::Result<Ended> + Send + 'static,
    ) -> anyhow::Result<JobFacts> {
        let mut last = lock(&served.job);
        // Whoever ends it looks for a job to end after it is said that it leaves.
        if served.is_leaving() {
            bail!("it is being removed");
        }
        let (job, events) = (Arc::new(job), Arc::clone(&self.events));
        let JobFacts { job: name, total_bytes, .. } = job.facts();
        let started = Happened::JobStarted { job: name, total_bytes };
        let (its, disk) = (Arc::clone(&job), Arc::clone(served));
        let thread = std::thread::Builder::new().name("job".into()).spawn(move || {
            events.tell(Some((disk.id, disk.name())), started);
            let alone = || {
                let _alone = lock(&disk.files_change);
                carry_out(&its)
            };
            let ended = survive("a job", alone);
            let ended = ended.unwrap_or_else(|| Err(anyhow!("it panicked; the log says where")));
            // Before anybody is told.
            disk.export.disk().note_loss();
            finish(&its, &disk, &events, ended);
        });
        job.runs_on(thread.context("cannot start a thread")?);
        let facts = job.facts();
        *last = Some(job);
        Ok(facts)
    }

    /// Stops the job of a disk, if it is the one that is called `name`, and waits until it has.
    ///
    /// # Errors
    /// That there is none, or another one.
    pub(crate) fn cancel_job(&self, served: &Served, name: &str) -> anyhow::Result<JobFacts> {
        let job = lock(&served.job).clone().filter(|job| job.is_running());
        let job = job.ok_or_else(|| anyhow!("nothing is under way that could be cancelled"))?;
        let JobFacts { job: its, .. } = job.facts();
        if its != name {
            return Err(anyhow!("{its} is under way, not {name}: ctl {its} --cancel stops it"));
        }
        job.end();
        Ok(job.facts())
    }
}
