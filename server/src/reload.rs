//! Reads the configuration file again (SIGHUP, `ctl reload`): disks that are new in it are added, those
//! that are gone from it removed, and limits and error policies changed that it changes. What cannot
//! change while the daemon runs is logged, and left.
//!
//! It is one plan (`plan.rs`), which is shown on request and tells what is deleted. It is carried out as a whole or
//! not at all (`steps.rs`).

mod plan;
mod steps;

use super::configured::{Configured, Said, spelled_place};
use super::disks::Disks;
use super::served::lock;
use anyhow::{Context, anyhow};
use plan::compare;
use ringway_control::config::{Location, NbdSecurity, parse};
use ringway_control::protocol::{FailedOf, Happened, LeftOf, Reloaded};
use ringway_terminal::reasons::in_full;
use std::path::Path;
use std::sync::TryLockError;

/// Reads the file again and does what it says, or with `dry_run` only says what that is.
///
/// # Errors
/// What is wrong; nothing has changed then.
pub(crate) fn reload(disks: &Disks, dry_run: bool) -> anyhow::Result<Reloaded> {
    let outcome = disks.configured.as_ref().map_or_else(
        || Err(anyhow!("there is no file to read again: this daemon was started without --config")),
        |configured| read_again(disks, configured, dry_run),
    );
    match &outcome {
        _ if dry_run => {}
        Ok(done) => {
            tell(done);
            disks.events.tell(None, Happened::Reloaded(done.clone()));
        }
        Err(error) => {
            let why = in_full(error);
            tracing::error!("the configuration was not read again, nothing has changed: {why}");
            disks.events.tell(None, Happened::ReloadFailed { why });
        }
    }
    outcome
}

fn tell(done: &Reloaded) {
    for LeftOf { image, words } in &done.left {
        let words = words.join(", ");
        tracing::warn!(disk = image, "does not change until the daemon is restarted: {words}");
    }
    for FailedOf { image, why } in &done.failed {
        tracing::error!(disk = image, "cannot be changed: {why}");
    }
    for name in &done.policies {
        tracing::info!(disk = name, "its failed requests are treated in another way now");
    }
    tracing::info!(
        added = done.added.len(),
        removed = done.removed.len(),
        limited = done.limited.len(),
        policies = done.policies.len(),
        unchanged = done.unchanged,
        "the configuration was read again"
    );
}

fn read_again(disks: &Disks, configured: &Configured, dry_run: bool) -> anyhow::Result<Reloaded> {
    let mut said = match configured.said.try_lock() {
        Ok(said) => said,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(anyhow!("it is being read already")),
    };
    let path = &configured.path;
    let text = disks.host.configuration().with_context(|| path.display().to_string())?;
    let locate = |path: &Path| disks.host.locate(path);
    let mut plan = parse(&text, path, Location::unknown).map_err(anyhow::Error::msg)?;
    let served: Vec<_> = disks.all().iter().map(|disk| lock(disk.words()).place.clone()).collect();
    // What is served may hang, and stays.
    for spec in plan.disks.iter().filter(|spec| !served.contains(&spelled_place(spec))) {
        disks.host.look_at(spec).with_context(|| spec.origin.clone())?;
    }
    plan.check_apart(locate).map_err(anyhow::Error::msg)?;
    plan.check_security(&plan.nbd).map_err(anyhow::Error::msg)?;
    // Options of the command line may allow more addresses: those are judged when they are used.
    let security = NbdSecurity { insecure: true, ..NbdSecurity::default() };
    plan.check_nbd(&security).map_err(anyhow::Error::msg)?;
    plan.resolve_groups(|name| configured.group(name)).map_err(anyhow::Error::msg)?;
    let now = Said::of(&plan);
    let mut changes = compare(disks, &said, &now, plan)?;
    let parted = changes.part(disks);
    changes.check(disks, &parted)?;
    let planned = changes.planned(disks, &parted);
    if dry_run {
        return Ok(Reloaded { dry_run, ..planned });
    }
    for image in &planned.deleted {
        tracing::warn!(disk = image, "its clone is about to be deleted: it is ephemeral");
    }
    let failed = steps::carry_out(disks, changes, parted, &mut said)?;
    // All that it names is served.
    disks.set_absent(Vec::new());
    Ok(Reloaded { failed, ..planned })
}
