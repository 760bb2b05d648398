//! What clients ask for, carried out.

use super::super::departure::Departure;
use super::super::disks::{AnyDisk, ChangeOfFiles, Disks, limits_of};
use super::super::events::Reader;
use super::super::isolate::{CHANGE_MAX, Isolated};
use super::super::limits::Change;
use super::super::reload::reload;
use super::super::served::{Served, lock};
use super::reports;
use ringway_control::protocol::{
    DiskFacts, Done, Happened, JobFacts, JobOf, Limited, Problem, ProblemKind, Removed, ResizedTo,
    Retried,
};
use ringway_control::request::{
    self, Add, Commit, ControlRequest, Flatten, Limit, Name, Nothing, One, Reload, Resize, Retry,
    Snapshot, StatsRequest,
};
use ringway_control::size::Size;
use ringway_disk::storage::KeptBy;
use ringway_export::{ChangeError, Offered};
use ringway_terminal::reasons::in_full;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

type Outcome = Result<Value, Problem>;

/// What becomes of a request.
pub(super) enum Taken<'a> {
    /// It was carried out.
    Answer(Value),
    /// Its answer is what happens from now on.
    Events(Reader<'a>),
}

/// Carries out one request, or begins to tell events.
pub(super) fn take<'a>(
    disks: &'a Disks,
    request: Result<ControlRequest, Problem>,
) -> Result<Taken<'a>, Problem> {
    request.and_then(|request| match request {
        ControlRequest::Events(Nothing {}) => match disks.events.read() {
            Ok(Some(reader)) => Ok(Taken::Events(reader)),
            Ok(None) => {
                Err(Problem::new(ProblemKind::Busy, "too many others read events: try again later"))
            }
            Err(error) => Err(Problem::new(ProblemKind::Failed, error)),
        },
        request => handle(disks, request).map(Taken::Answer),
    })
}

/// Carries out one line. Also gives back the request's `id`, if it has one.
pub(crate) fn carry_out(disks: &Disks, line: &[u8]) -> (Option<Value>, Outcome) {
    let (id, request) = request::parse(line);
    (id, request.and_then(|request| handle(disks, request)))
}

fn handle(disks: &Disks, request: ControlRequest) -> Outcome {
    if let Some(name) = changed(&request) {
        if let AnyDisk::Apart(disk) = find(disks, name)? {
            return change_apart(&disk, request);
        }
    }
    match request {
        ControlRequest::List(Nothing {}) => answer(reports::list(disks)),
        ControlRequest::Stats(StatsRequest { disk, buckets, histograms }) => {
            let one = disk.map(|disk| find(disks, &disk)).transpose()?;
            answer(reports::stats(disks, one, reports::Detail { buckets, histograms }))
        }
        ControlRequest::Events(Nothing {}) => {
            Err(Problem::new(ProblemKind::Failed, "events are told on a connection of their own"))
        }
        ControlRequest::Reload(Reload { dry_run }) => {
            answer(reload(disks, dry_run).map_err(failed)?)
        }
        ControlRequest::Add(disk) => add(disks, *disk),
        ControlRequest::Remove(disk) => remove(disks, disk),
        ControlRequest::Resize(asked) => resize(disks, asked),
        ControlRequest::Limit(asked) => limit(disks, *asked),
        ControlRequest::Drain(disk) => change(disks, disk, |disk| disk.drain()),
        ControlRequest::Pause(disk) => pause(disks, disk),
        ControlRequest::Resume(disk) => change(disks, disk, |disk| disk.resume()),
        ControlRequest::Retry(asked) => retry(disks, asked),
        ControlRequest::Snapshot(asked) => snapshot(disks, &asked),
        ControlRequest::Flatten(asked) => flatten(disks, &asked),
        ControlRequest::Commit(asked) => commit(disks, &asked),
    }
}

/// The disk that a request changes, if its own process can do so.
fn changed(request: &ControlRequest) -> Option<&Name> {
    match request {
        ControlRequest::Resize(Resize { disk, .. })
        | ControlRequest::Retry(Retry { disk, .. })
        | ControlRequest::Drain(One { disk })
        | ControlRequest::Pause(One { disk })
        | ControlRequest::Resume(One { disk })
        | ControlRequest::Snapshot(Snapshot { disk, .. })
        | ControlRequest::Flatten(Flatten { disk, .. })
        | ControlRequest::Commit(Commit { disk, .. }) => Some(disk),
        _ => None,
    }
}

/// Has the process of a disk do it.
fn change_apart(disk: &Isolated, request: ControlRequest) -> Outcome {
    let pause = match &request {
        ControlRequest::Pause(_) => Some(true),
        ControlRequest::Resume(_) => Some(false),
        _ => None,
    };
    if matches!(request, ControlRequest::Snapshot(_) | ControlRequest::Commit(_)) {
        disk.may_rename();
    }
    let mut line = answer(request)?;
    // It knows no other.
    line["disk"] = 0.into();
    let said = disk.ask(line).wait(CHANGE_MAX);
    if let Some(pause) = pause {
        // One that failed may have been carried out in part.
        let now = said.as_ref().map_or_else(|_| reports::paused_apart(disk), |_| Some(pause));
        now.into_iter().for_each(|paused| disk.set_paused(paused));
    }
    let mut said = said?;
    if let Ok(begun) = JobOf::deserialize(&said) {
        disk.set_job(begun.job);
    }
    said["id"] = disk.id.into();
    Ok(said)
}

fn answer(value: impl Serialize) -> Outcome {
    serde_json::to_value(value).map_err(|error| Problem::new(ProblemKind::Failed, error))
}

/// The disk of this number, image or socket; or the only one whose image or socket is called so without its folder, or
/// that has this serial number.
fn find(disks: &Disks, name: &Name) -> Result<AnyDisk, Problem> {
    let (all, word) = (
        disks.all(),
        match name {
            Name::Id(id) => id.to_string(),
            Name::Word(word) => word.clone(),
        },
    );
    let path = Path::new(&word);
    let is_it = |disk: &AnyDisk| {
        let is_named_so = || disk.image() == word || disk.is_at_socket(path);
        disk.id().to_string() == word || matches!(name, Name::Word(_)) && is_named_so()
    };
    let mut found: Vec<_> = all.iter().filter(|disk| is_it(disk)).cloned().collect();
    if found.is_empty() && path.is_absolute() {
        // Only now, as another disk's file system may hang.
        let place = disks.host.locate(path);
        found = all.iter().filter(|disk| disk.claim(&disks.host).is_at(&place)).cloned().collect();
    }
    if let (true, Name::Word(word)) = (found.is_empty(), name) {
        found = all.into_iter().filter(|disk| is_called(&facts_of(disk), word)).collect();
    }
    let no_such = |message| Err(Problem::new(ProblemKind::NoSuchDisk, message));
    match &found[..] {
        [_] => Ok(found.remove(0)),
        [] => no_such(format!(
            "there is no disk '{word}': name one by its number, image or socket (see list)"
        )),
        several => {
            let names = several.iter().map(|disk| {
                let DiskFacts { id, image, socket, .. } = facts_of(disk);
                let at = socket.map(|socket| format!(" at {}", socket.display()));
                format!("{image}{} (number {id})", at.unwrap_or_default())
            });
            no_such(format!(
                "several disks are called '{word}': {}. Name one by its number",
                names.collect::<Vec<_>>().join(", ")
            ))
        }
    }
}

/// As it was said last, which names it as well as what it says now.
fn facts_of(disk: &AnyDisk) -> DiskFacts {
    match disk {
        AnyDisk::Here(served) => reports::facts(served),
        AnyDisk::Apart(disk) => disk.facts(None),
    }
}

/// True if this is the name of its image or socket without the folder, or its serial number.
fn is_called(facts: &DiskFacts, word: &str) -> bool {
    let ends = |path: &Path| path.file_name().is_some_and(|name| name == word);
    ends(Path::new(&facts.image))
        || facts.socket.as_deref().is_some_and(ends)
        || (!word.is_empty() && facts.serial == word)
}

/// One that this process serves, as it did a moment ago.
fn find_here(disks: &Disks, name: &Name) -> Result<Arc<Served>, Problem> {
    match find(disks, name)? {
        AnyDisk::Here(served) => Ok(served),
        AnyDisk::Apart(disk) => Err(Problem::new(
            ProblemKind::Busy,
            format!("{}: it has just been added", disk.image()),
        )),
    }
}

fn add(disks: &Disks, disk: Add) -> Outcome {
    match disks.add(disk.into_spec()?).map_err(failed)? {
        AnyDisk::Here(served) => answer(reports::facts(&served)),
        AnyDisk::Apart(disk) => answer(disk.facts(None)),
    }
}

fn remove(disks: &Disks, One { disk }: One) -> Outcome {
    match find(disks, &disk)? {
        AnyDisk::Here(served) => {
            let (id, image) = (served.id, served.export.disk().name().to_owned());
            let connected = served.export.is_connected();
            let Departure { clear, held, .. } = disks.remove(served).map_err(failed)?;
            answer(Removed { id, image, drained: clear, connected, held })
        }
        AnyDisk::Apart(disk) => {
            let (id, image) = (disk.id, disk.image());
            let connected = reports::facts_apart(&disk).connected;
            let Departure { clear, held, .. } = disks.remove_isolated(&disk).map_err(failed)?;
            answer(Removed { id, image, drained: clear, connected, held })
        }
    }
}

fn resize(disks: &Disks, Resize { disk, size, shrink }: Resize) -> Outcome {
    let served = find_here(disks, &disk)?;
    let image = served.export.disk().name().to_owned();
    let bytes = size.map(|Size(bytes)| bytes);
    let _resizing = lock(&served.resizing);
    let done = served.export.resize(bytes, shrink).map_err(|e| refused(&image, &e))?;
    tracing::info!(
        disk = image,
        from = done.from,
        to = done.to,
        guest_notice = done.notice.name(),
        "resized"
    );
    let (from, to, guest_notice) = (done.from, done.to, done.notice.name().to_owned());
    let happened = Happened::Resized { from, to, guest_notice: guest_notice.clone() };
    disks.events.tell(Some((served.id, &image)), happened);
    answer(ResizedTo { id: served.id, image, from, to, guest_notice })
}

fn retry(disks: &Disks, Retry { disk, fail, flushes }: Retry) -> Outcome {
    let served = find_here(disks, &disk)?;
    let disk = served.export.disk();
    let image = disk.name().to_owned();
    if flushes {
        return retry_flushes(&served, fail);
    }
    let requests = served.export.retry_held(fail).requests;
    if requests > 0 {
        let what = if fail { "held requests given up" } else { "held requests tried again" };
        tracing::info!(disk = image, requests, "{what}");
    }
    let held = disk.held().map(Into::into);
    answer(Retried { id: served.id, image, requests, failed: fail, flushes: None, held })
}

/// Somebody knows what was lost with a failed flush, and whoever uses the disk goes on with what is there.
fn retry_flushes(served: &Served, fail: bool) -> Outcome {
    let disk = served.export.disk();
    let (id, image) = (served.id, disk.name().to_owned());
    if fail {
        let why = "flushes goes without fail";
        return Err(Problem::new(ProblemKind::Malformed, why));
    }
    if disk.flush_failed_here() {
        // The next sync would succeed, whatever the host has dropped, and so would one of the image's tables.
        let why = "a flush has failed since the disk was opened: restart the daemon first, or remove the disk and add \
                   it again";
        return Err(Problem::new(ProblemKind::Failed, format!("{image}: {why}")));
    }
    let flushes = disk.forgive_flush();
    if flushes {
        tracing::warn!(
            disk = image,
            "flushes are tried again, as it was ordered (ctl retry --flushes): what was written before one had failed \
             may be lost"
        );
    }
    let held = disk.held().map(Into::into);
    answer(Retried { id, image, requests: 0, failed: false, flushes: Some(flushes), held })
}

fn snapshot(disks: &Disks, asked: &Snapshot) -> Outcome {
    let served = find_here(disks, &asked.disk)?;
    let taken = disks.snapshot(&served, &asked.snapshot);
    answer(taken.map_err(|error| files_stay(&served, &error))?)
}

fn flatten(disks: &Disks, asked: &Flatten) -> Outcome {
    job(disks, &asked.disk, |served| match asked.cancel {
        true => Ok(disks.cancel_job(served, "flatten")?),
        false => disks.flatten(served, asked.bps.map(|Size(bytes)| bytes)),
    })
}

fn commit(disks: &Disks, asked: &Commit) -> Outcome {
    job(disks, &asked.disk, |served| match asked.cancel {
        true => Ok(disks.cancel_job(served, "commit")?),
        false => {
            let bps = asked.bps.map(|Size(bytes)| bytes);
            disks.commit(served, asked.snapshot.as_deref(), bps)
        }
    })
}

/// Begins what takes its time with the files of a disk, or has it stop.
fn job(
    disks: &Disks,
    disk: &Name,
    act: impl FnOnce(&Arc<Served>) -> Result<JobFacts, ChangeOfFiles>,
) -> Outcome {
    let served = find_here(disks, disk)?;
    let job = act(&served).map_err(|error| files_stay(&served, &error))?;
    answer(JobOf { id: served.id, image: served.name().to_owned(), job })
}

/// Why a disk is not served from other files.
fn files_stay(served: &Served, error: &ChangeOfFiles) -> Problem {
    let name = served.name();
    match error {
        ChangeOfFiles::Change(error) => refused(name, error),
        ChangeOfFiles::Job(_) => Problem::new(ProblemKind::Busy, format!("{name}: {error}")),
        ChangeOfFiles::Other(_) => Problem::new(ProblemKind::Failed, format!("{name}: {error}")),
    }
}

fn limit(disks: &Disks, asked: Limit) -> Outcome {
    let group = asked.group.as_deref();
    let new = group.map(|name| (name != "none").then_some(name));
    let change = Change { limits: &asked.limits, lift: asked.lift, group: new };
    let wrong = |error| {
        let kind = match group {
            Some(name) if name != "none" && !asked.create && !disks.limit_groups.has(name) => {
                ProblemKind::NoSuchGroup
            }
            _ => ProblemKind::Failed,
        };
        Problem::new(kind, in_full(&error))
    };
    if asked.remove {
        let more =
            asked.disk.is_some() || asked.create || !change.limits.is_silent() || change.lift;
        let Some(name) = group.filter(|_| !more) else {
            let why = "remove takes a group away: it goes with group and nothing else";
            return Err(Problem::new(ProblemKind::Malformed, why));
        };
        disks.remove_limit_group(name).map_err(wrong)?;
        disks.events.tell(None, Happened::LimitGroupRemoved { limit_group: name.into() });
        let limits = BTreeMap::new();
        let group = asked.group;
        return answer(Limited { id: None, image: None, group, limits, removed: true });
    }
    let Some(name) = &asked.disk else {
        let name = group.unwrap_or_default();
        let change = Change { group: None, ..change };
        let limits = disks.limit_group(name, &change, asked.create).map_err(wrong)?.numbers();
        if asked.create || !change.is_none() {
            let limit_group = asked.group.clone();
            let happened = Happened::LimitsChanged { limits: limits.clone(), limit_group };
            disks.events.tell(None, happened);
        }
        let group = asked.group;
        return answer(Limited { id: None, image: None, group, limits, removed: false });
    };
    let disk = find(disks, name)?;
    let (id, image) = match &disk {
        AnyDisk::Here(served) => {
            disks.limit(served, &change).map_err(wrong)?;
            (served.id, served.export.disk().name().to_owned())
        }
        AnyDisk::Apart(isolated) => {
            // Its process, asked for the same, tells it.
            return disks.limit_apart(isolated, &change);
        }
    };
    let (limits, group) = limits_of(&disk);
    if !change.is_none() {
        let (limits, limit_group) = (limits.clone(), group.clone());
        disks.events.tell(Some((id, &image)), Happened::LimitsChanged { limits, limit_group });
    }
    answer(Limited { id: Some(id), image: Some(image), group, limits, removed: false })
}

/// Pauses a disk if that is kept: who copies what lies below must not find it written to because a service manager
/// has started the daemon anew.
fn pause(disks: &Disks, One { disk }: One) -> Outcome {
    let served = find_here(disks, &disk)?;
    let disk_here = served.export.disk();
    if !disk_here.can_keep_pause() {
        let why = match disk_here.nature().kept_by {
            KeptBy::Nothing => {
                "a pause would not outlive this daemon, so it is not paused: of an image of a Ceph cluster nothing is \
                 kept in the state folder. `ringway ctl drain` makes all writes durable; a snapshot is taken in the \
                 cluster"
            }
            _ => {
                "a pause would not outlive this daemon, so it is not paused: the file in the state folder that would \
                 keep it is missing. Start the daemon anew, with a folder that stays (--state-dir)"
            }
        };
        return Err(Problem::new(ProblemKind::Failed, format!("{}: {why}", disk_here.name())));
    }
    change(disks, One { disk }, |disk| disk.pause())
}

fn change(
    disks: &Disks,
    One { disk }: One,
    act: impl Fn(&dyn Offered) -> Result<(), ChangeError>,
) -> Outcome {
    let served = find_here(disks, &disk)?;
    let image = served.export.disk().name().to_owned();
    let (begun, before) = (Instant::now(), served.export.is_paused());
    act(&*served.export).map_err(|error| refused(&image, &error))?;
    let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let after = served.export.is_paused();
    if after != before {
        tracing::info!(disk = image, "{}", if after { "paused" } else { "resumed" });
        let happened = if after { Happened::Paused } else { Happened::Resumed };
        disks.events.tell(Some((served.id, &image)), happened);
    }
    answer(Done { id: served.id, image, state: reports::state(&served), took_us })
}

fn refused(disk: &str, error: &ChangeError) -> Problem {
    let kind = match error {
        ChangeError::Busy => ProblemKind::Busy,
        ChangeError::Shrinks { .. } => ProblemKind::NotMeant,
        _ => ProblemKind::Failed,
    };
    Problem::new(kind, format!("{disk}: {error}"))
}

// Passed by value as `map_err` does.
#[allow(clippy::needless_pass_by_value)]
fn failed(error: anyhow::Error) -> Problem {
    Problem::new(ProblemKind::Failed, in_full(&error))
}
