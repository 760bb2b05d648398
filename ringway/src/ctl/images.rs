//! Images: changes of those that are served, and who has one that is to be.

use crate::copy::bar;
use anyhow::{anyhow, bail};
use clap::Args;
use ringway_control::protocol::{JobFacts, JobOf, JobState, List, Snapshotted};
use ringway_control::size::Size;
use ringway_disk::open::foreign_holder;
use ringway_terminal::short::time;
use serde_json::{Value, json};

use std::path::{Path, PathBuf};
use std::time::Duration;

/// Of names that a request cannot hold.
pub(super) const NO_TEXT: &str =
    "a name here is not UTF-8, and requests to a daemon are text: rename it, or make a link to it";

/// How often a daemon is asked how far it is.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// The options of `ringway ctl snapshot`.
#[derive(Debug, Args)]
pub(super) struct SnapshotOf {
    /// The disk: its image is qcow2.
    disk: String,
    /// What is to have the data of now: a name, or a path in the folder of the image. Nothing may have
    /// it.
    new: PathBuf,
}

impl SnapshotOf {
    /// The fields of the request. The daemon runs in another folder; a name alone is one beside the
    /// image.
    pub(super) fn request(self) -> anyhow::Result<Value> {
        let Self { disk, new } = self;
        Ok(json!({ "disk": disk, "snapshot": place(new)? }))
    }
}

/// Where a snapshot is to be.
fn place(new: PathBuf) -> anyhow::Result<String> {
    let bare = new.parent().is_some_and(|parent| parent.as_os_str().is_empty());
    // What has no last part is for the daemon to refuse.
    let named = new.file_name().is_some();
    let place = if bare || !named { new } else { std::path::absolute(new)? };
    place.into_os_string().into_string().map_err(|_| anyhow!(NO_TEXT))
}

/// The options of `ringway ctl flatten`.
#[derive(Debug, Args)]
pub(super) struct FlattenOf {
    /// The disk: its image is qcow2.
    disk: String,
    /// How many bytes may be copied in a second, so that the guest has the rest.
    #[arg(long, value_name = "BYTES", conflicts_with = "cancel")]
    bps: Option<Size>,
    /// Stop it. What was copied stays, and the next one goes on there.
    #[arg(long, conflicts_with = "wait")]
    cancel: bool,
    /// Wait until it is done, and show how far it is. Interrupted, it goes on all the same.
    #[arg(long)]
    pub(super) wait: bool,
}

impl FlattenOf {
    /// The fields of the request.
    pub(super) fn request(self) -> Value {
        let Self { disk, bps, cancel, wait: _ } = self;
        json!({ "disk": disk, "bps": bps, "cancel": cancel })
    }
}

/// The options of `ringway ctl commit`.
#[derive(Debug, Args)]
pub(super) struct CommitOf {
    /// The disk: its image is qcow2, on top of a snapshot, on top of something else.
    disk: String,
    /// Have what was written so far become a read-only image of this name first, as ctl snapshot does, and
    /// merge that: a name, or a path in the folder of the image.
    #[arg(long, value_name = "NEW", conflicts_with = "cancel")]
    snapshot: Option<PathBuf>,
    /// How many bytes may be copied in a second, so that the guest has the rest.
    #[arg(long, value_name = "BYTES", conflicts_with = "cancel")]
    bps: Option<Size>,
    /// Stop it. The disk holds what it did, and the next one begins again.
    #[arg(long, conflicts_with = "wait")]
    cancel: bool,
    /// Wait until it is done, and show how far it is. Interrupted, it goes on all the same.
    #[arg(long)]
    pub(super) wait: bool,
}

impl CommitOf {
    /// The fields of the request.
    pub(super) fn request(self) -> anyhow::Result<Value> {
        let Self { disk, snapshot, bps, cancel, wait: _ } = self;
        let snapshot = snapshot.map(place).transpose()?;
        Ok(json!({ "disk": disk, "snapshot": snapshot, "bps": bps, "cancel": cancel }))
    }
}

/// Waits until what has begun is over; its answer then. `list` asks the daemon for its disks.
///
/// # Errors
/// One message: that it has failed, or that there is nobody any more who could be asked.
pub(super) fn job_ended(
    begun: Value,
    quiet: bool,
    list: impl Fn() -> anyhow::Result<Value>,
) -> anyhow::Result<Value> {
    let mut of: JobOf = serde_json::from_value(begun)?;
    let name = if of.job.job == "commit" { "commit" } else { "flatten" };
    let bar = bar(name, 0, of.job.total_bytes, quiet);
    while of.job.state == JobState::Running {
        std::thread::sleep(ASK_AGAIN);
        let list: List = serde_json::from_value(list()?)?;
        let disk = list.disks.into_iter().find(|disk| disk.id == of.id);
        let Some(job) = disk.and_then(|disk| disk.job) else {
            bail!(
                "{}: nobody carries it on: the disk was removed, or its own process has ended. Its image \
                 holds what it did",
                of.image
            );
        };
        bar.set_length(job.total_bytes);
        bar.set_position(job.done_bytes);
        of.job = job;
    }
    bar.finish_and_clear();
    if let Some(error) = &of.job.error {
        bail!("{}: {}: {error}", of.image, of.job.job);
    }
    Ok(serde_json::to_value(of)?)
}

/// How far it is, if it is not over.
pub(super) fn under_way(job: &JobFacts) -> Option<String> {
    let percent = 100 * job.done_bytes / job.total_bytes.max(1);
    (job.state == JobState::Running).then(|| format!("{} {percent} %", job.job))
}

/// The line for an answer.
pub(super) fn job(of: &JobOf) -> String {
    let JobOf { image, job, id: _ } = of;
    let copied = Size(job.copied_bytes);
    let took = time(1e3 * job.blackout_us.unwrap_or(0) as f64);
    let flatten = job.job == "flatten";
    match job.state {
        JobState::Running if flatten => format!(
            "{image}: what it is based on is being copied into it. ringway ctl list shows how far it is\n"
        ),
        JobState::Running => format!(
            "{image}: the image it is based on is being merged into the one below. ringway ctl list shows how \
             far it is\n"
        ),
        JobState::Done if flatten => format!(
            "{image}: it is based on nothing any more; {copied} were copied, and no requests were taken for \
             {took}\n"
        ),
        JobState::Done => format!(
            "{image}: the image it was based on is merged into the one below, and not needed any more; \
             {copied} were copied, and no requests were taken for {took}\n"
        ),
        JobState::Cancelled if flatten => format!(
            "{image}: stopped. {copied} were copied and stay; it is still based on what it was\n"
        ),
        JobState::Cancelled => format!(
            "{image}: stopped. It is still based on what it was; {copied} were copied, so that the lowest \
             image alone is neither what it was nor what it was to be\n"
        ),
        JobState::Failed => {
            let error = job.error.as_deref().unwrap_or("unknown");
            format!("{image}: failed: {error}\n")
        }
    }
}

/// The line for an answer.
pub(super) fn snapshotted(taken: &Snapshotted) -> String {
    let Snapshotted { image, snapshot, blackout_us, images, id: _ } = taken;
    let took = time(1e3 * *blackout_us as f64);
    format!(
        "{image}: what was written so far is {} (read-only). The image goes on top of it, {images} images \
         together; no requests were taken for {took}\n",
        snapshot.display()
    )
}

/// Who has the image that was to be added, if it is a program of QEMU and `said` does not name it: a
/// daemon sees no process from its sandbox.
pub(super) fn seen_from_here(image: &Path, read_only: bool, said: &str) -> String {
    let holder = foreign_holder(image, read_only).filter(|name| !said.contains(name));
    holder.map_or_else(String::new, |name| format!(". Seen from here it is in use by {name}"))
}
