//! A plan is carried out: as a whole, or not at all. What can be undone comes first, and removals last.

use super::super::configured::{DiskWords, Said, Words};
use super::super::disks::{AnyDisk, BeingRemoved, Disks};
use super::super::limits;
use super::super::served::{Served, lock};
use super::plan::{Change, Changes, LIMITS, POLICIES, Parted, Removal, image};
use anyhow::{Context, anyhow};
use ringway_control::config::{DiskArgs, DiskSpec, LimitArgs, Place};
use ringway_control::protocol::FailedOf;
use ringway_disk::ErrorPolicy;
use ringway_terminal::reasons::in_full;
use serde_json::Value;
use std::sync::Arc;

/// What was done, and how it was before.
enum Step {
    /// A limit group was made.
    Group(String),
    /// A group had these limits.
    GroupLimits(String, LimitArgs),
    /// A disk was added.
    Added(AnyDisk),
    /// A disk had these limits, and this group.
    Limits(AnyDisk, LimitArgs, Option<String>),
    /// The failed requests of a disk were treated so.
    Policy(Arc<Served>, ErrorPolicy),
    /// A disk was removed.
    Removed(Box<Gone>),
}

/// What a disk was served by.
struct Gone {
    image: String,
    words: Words,
    /// Its limits, and its group: perhaps others than its words say (`ctl limit`).
    limits: (LimitArgs, Option<String>),
}

/// Does what the file says.
///
/// # Errors
/// What could not be done; nothing has changed then, but that front-ends of `replaced` disks were disconnected.
pub(super) fn carry_out(
    disks: &Disks,
    changes: Changes,
    parted: Parted,
    said: &mut Said,
) -> anyhow::Result<Vec<FailedOf>> {
    let mut steps = Vec::new();
    if let Err(error) = what_can_be_undone(disks, &changes, parted.first, &mut steps)
        .and_then(|()| replace(disks, parted.replaced, parted.later, &mut steps))
    {
        return Err(undo(disks, steps, error));
    }
    for (name, limits) in changes.groups {
        said.limit_groups.insert(name, limits);
    }
    changes.stay.iter().for_each(adopt);
    // From here on there is no way back.
    let mut failed = Vec::new();
    for Removal { disk, for_good, .. } in parted.gone {
        let image = disk.image();
        // What its front-end met at the end is no reason to have the others wait.
        if let Err(error) = disks.take(disk, for_good) {
            failed.push(FailedOf { image, why: in_full(&error) });
        }
    }
    for name in changes.groups_gone {
        // It may have been removed by hand.
        let there = disks.limit_groups.has(&name);
        match there.then(|| disks.remove_limit_group(&name)) {
            Some(Err(error)) => {
                let image = format!("limit-group {name}");
                failed.push(FailedOf { image, why: in_full(&error) });
            }
            _ => drop(said.limit_groups.remove(&name)),
        }
    }
    Ok(failed)
}

fn what_can_be_undone(
    disks: &Disks,
    changes: &Changes,
    first: Vec<DiskSpec>,
    steps: &mut Vec<Step>,
) -> anyhow::Result<()> {
    let (known, new): (Vec<_>, Vec<_>) =
        changes.groups.iter().partition(|(name, _)| disks.limit_groups.has(name));
    for (name, limits) in new {
        disks.limit_group(name, &all(limits, None), true)?;
        steps.push(Step::Group(name.clone()));
    }
    steps.extend(add_all(disks, first)?.into_iter().map(Step::Added));
    for (name, limits) in known {
        let silent = LimitArgs::default();
        let same = limits::Change { limits: &silent, lift: false, group: None };
        let before = disks.limit_group(name, &same, false)?;
        disks.limit_group(name, &all(limits, None), false)?;
        steps.push(Step::GroupLimits(name.clone(), before));
    }
    for Change { disk, spec, limits, policies } in &changes.stay {
        if *limits {
            let (own, group) = disk.limits();
            let new = spec.words.limit_group.as_deref();
            limit(disks, disk, &spec.words.limits, new).with_context(|| disk.image())?;
            steps.push(Step::Limits(disk.clone(), own, group));
        }
        if let (true, AnyDisk::Here(served)) = (*policies, disk) {
            let here = served.export.disk();
            steps.push(Step::Policy(Arc::clone(served), here.error_policy()));
            here.set_error_policy(spec.errors);
        }
    }
    Ok(())
}

/// Disks go that others take the place of.
fn replace(
    disks: &Disks,
    replaced: Vec<Removal>,
    later: Vec<DiskSpec>,
    steps: &mut Vec<Step>,
) -> anyhow::Result<()> {
    for Removal { disk, for_good, .. } in replaced {
        let (id, image) = (disk.id(), disk.image());
        let words = lock(disk.words()).words.clone();
        let gone = Gone { image: image.clone(), words, limits: disk.limits() };
        let taken = disks.take(disk, for_good).context(image);
        // It may have gone, and not in order; but whoever else removes it does not want it back.
        let is_others = taken.as_ref().is_err_and(|error| error.is::<BeingRemoved>());
        if !is_others && disks.all().iter().all(|other| other.id() != id) {
            steps.push(Step::Removed(Box::new(gone)));
        }
        taken?;
    }
    for spec in later {
        steps.extend(add_all(disks, vec![spec])?.into_iter().map(Step::Added));
    }
    Ok(())
}

/// Has all be as it was; the error, with what could not be undone.
fn undo(disks: &Disks, steps: Vec<Step>, mut error: anyhow::Error) -> anyhow::Error {
    for step in steps.into_iter().rev() {
        let undone = match step {
            Step::Group(name) => {
                disks.limit_groups.forget(&name);
                Ok(())
            }
            Step::GroupLimits(name, before) => {
                disks.limit_group(&name, &all(&before, None), false).map(drop)
            }
            // Its image was there before it, or is asked for once more.
            Step::Added(disk) => disks.take(disk, false).map(drop),
            Step::Limits(disk, own, group) => limit(disks, &disk, &own, group.as_deref()),
            Step::Policy(served, before) => {
                served.export.disk().set_error_policy(before);
                Ok(())
            }
            Step::Removed(gone) => bring_back(disks, *gone),
        };
        if let Err(more) = undone {
            error = anyhow!("{}; and {}", in_full(&error), in_full(&more));
        }
    }
    error
}

/// The file says so of the disk, and it holds.
fn adopt(change: &Change) {
    let now = DiskWords::of(&change.spec, true).words;
    let mut words = lock(change.disk.words());
    words.in_file = true;
    if change.limits {
        words.adopt(&LIMITS, &now);
    }
    if change.policies {
        words.adopt(&POLICIES, &now);
    }
}

/// Serves a disk again that was removed.
fn bring_back(
    disks: &Disks,
    Gone { image, words, limits: (own, group) }: Gone,
) -> anyhow::Result<()> {
    let served = spec_of(disks, words).and_then(|spec| add_all(disks, vec![spec]));
    let served = served
        .with_context(|| format!("{image} was removed, and cannot be served again: add it anew"))?;
    let limited = served.iter().try_for_each(|disk| limit(disks, disk, &own, group.as_deref()));
    limited.with_context(|| format!("{image} is served again, without the limits that it had"))
}

/// A disk that was served by these words.
fn spec_of(disks: &Disks, words: Words) -> anyhow::Result<DiskSpec> {
    let mut args: DiskArgs = serde_json::from_value(Value::Object(words))?;
    let image = args.take_image().context("it has no image")?;
    let place = match args.take_nbd(&image).map_err(anyhow::Error::msg)? {
        Some(place) => Place::Nbd(place),
        None => Place::Socket(args.socket.take().context("it has no socket")?),
    };
    let mut spec = args.into_spec(&image, place).map_err(anyhow::Error::msg)?;
    let number = |name: &str| {
        let configured = disks.configured.as_ref().context("there is no file that names it")?;
        configured.group(name)
    };
    spec.access.resolve(number).map_err(anyhow::Error::msg)?;
    Ok(spec)
}

fn limit(
    disks: &Disks,
    disk: &AnyDisk,
    own: &LimitArgs,
    group: Option<&str>,
) -> anyhow::Result<()> {
    let change = all(own, Some(group));
    match disk {
        AnyDisk::Here(served) => disks.limit(served, &change),
        AnyDisk::Apart(disk) => {
            let limited = disks.limit_apart(disk, &change);
            limited.map(drop).map_err(|error| anyhow!(error.message))
        }
    }
}

/// Adds all of them, or none: their images.
fn add_all(disks: &Disks, specs: Vec<DiskSpec>) -> anyhow::Result<Vec<AnyDisk>> {
    let mut additions = Vec::new();
    for spec in specs {
        let origin = if spec.origin.is_empty() { image(&spec) } else { spec.origin.clone() };
        match disks.open_to_add(spec) {
            Ok(addition) => additions.push(addition),
            Err(error) => {
                disks.abandon(additions);
                return Err(error.context(origin));
            }
        }
    }
    let added = disks.serve_all(additions)?;
    added.iter().for_each(|disk| lock(disk.words()).in_file = true);
    Ok(added)
}

/// These limits and no others.
fn all<'a>(limits: &'a LimitArgs, group: Option<Option<&'a str>>) -> limits::Change<'a> {
    limits::Change { limits, lift: true, group }
}
