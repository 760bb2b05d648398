//! What clients ask for, carried out.

use super::super::disks::Disks;
use super::super::served::Served;
use super::reports;
use super::words::{self, Add, Asked, Name, Nothing, One, Request, Resize};
use crate::control::{Done, Kind, Problem, Removed, ResizedTo};
use crate::reasons::in_full;
use crate::size::Size;
use ringway_export::{ChangeError, Offered};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

type Outcome = Result<Value, Problem>;

/// Carries out one line. Also gives back the request's `id`, if it has one.
pub(super) fn carry_out(disks: &Disks, line: &[u8]) -> (Option<Value>, Outcome) {
    let (id, request) = words::parse(line);
    (id, request.and_then(|request| obey(disks, request)))
}

fn obey(disks: &Disks, request: Request) -> Outcome {
    match request {
        Request::List(Nothing {}) => answer(reports::list(disks)),
        Request::Stats(Asked { disk, buckets }) => {
            let one = disk.map(|disk| find(disks, &disk)).transpose()?;
            answer(reports::stats(disks, one, buckets))
        }
        Request::Add(disk) => add(disks, *disk),
        Request::Remove(disk) => remove(disks, disk),
        Request::Resize(asked) => resize(disks, asked),
        Request::Drain(disk) => change(disks, disk, |disk| disk.drain()),
        Request::Pause(disk) => change(disks, disk, |disk| disk.pause()),
        Request::Resume(disk) => change(disks, disk, |disk| disk.resume()),
    }
}

fn answer(value: impl Serialize) -> Outcome {
    serde_json::to_value(value).map_err(|error| Problem::new(Kind::Failed, error))
}

fn find(disks: &Disks, name: &Name) -> Result<Arc<Served>, Problem> {
    let place = match name {
        Name::Word(word) if Path::new(word).is_absolute() => {
            Some(disks.host.locate(Path::new(word)))
        }
        _ => None,
    };
    let is_it = |served: &Served| match name {
        Name::Id(id) => served.id == *id,
        Name::Word(word) => {
            served.id.to_string() == *word
                || served.export.disk().name() == word
                || served.socket.as_deref() == Some(Path::new(word))
                || place.as_ref().is_some_and(|place| served.claim.is_at(place))
        }
    };
    let mut found = disks.list().into_iter().filter(|served| is_it(served));
    let word = match name {
        Name::Id(id) => id.to_string(),
        Name::Word(word) => word.clone(),
    };
    match (found.next(), found.next()) {
        (Some(served), None) => Ok(served),
        (Some(_), Some(_)) => Err(Problem::new(
            Kind::NoSuchDisk,
            format!("several disks are called '{word}': name one by its number (see list)"),
        )),
        (None, _) => Err(Problem::new(
            Kind::NoSuchDisk,
            format!(
                "there is no disk '{word}': name one by its number, image or socket (see list)"
            ),
        )),
    }
}

fn add(disks: &Disks, disk: Add) -> Outcome {
    let served = disks.add(disk.into_spec()?).map_err(failed)?;
    answer(reports::facts(&served))
}

fn remove(disks: &Disks, One { disk }: One) -> Outcome {
    let served = find(disks, &disk)?;
    let (id, image) = (served.id, served.export.disk().name().to_owned());
    let drained = disks.remove(served).map_err(failed)?;
    answer(Removed { id, image, drained })
}

fn resize(disks: &Disks, Resize { disk, size, shrink }: Resize) -> Outcome {
    let served = find(disks, &disk)?;
    let image = served.export.disk().name().to_owned();
    let bytes = size.map(|Size(bytes)| bytes);
    let done = served.export.resize(bytes, shrink).map_err(|e| refused(&image, &e))?;
    tracing::info!(
        disk = image,
        from = done.from,
        to = done.to,
        told = done.told.name(),
        "resized"
    );
    let (from, to, told) = (done.from, done.to, done.told.name().into());
    answer(ResizedTo { id: served.id, image, from, to, told })
}

fn change(
    disks: &Disks,
    One { disk }: One,
    act: impl Fn(&dyn Offered) -> Result<(), ChangeError>,
) -> Outcome {
    let served = find(disks, &disk)?;
    let image = served.export.disk().name().to_owned();
    let begun = Instant::now();
    act(&*served.export).map_err(|error| refused(&image, &error))?;
    let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    answer(Done { id: served.id, image, state: reports::state(&served), took_us })
}

fn refused(disk: &str, error: &ChangeError) -> Problem {
    let kind = match error {
        ChangeError::Busy => Kind::Busy,
        ChangeError::Shrinks { .. } => Kind::NotMeant,
        _ => Kind::Failed,
    };
    Problem::new(kind, format!("{disk}: {error}"))
}

// Passed by value as `map_err` does.
#[allow(clippy::needless_pass_by_value)]
fn failed(error: anyhow::Error) -> Problem {
    Problem::new(Kind::Failed, in_full(&error))
}
