//! What clients ask for, carried out.

use super::super::disks::Disks;
use super::super::served::Served;
use super::reports;
use crate::config::{DiskArgs, Place, is_unreal};
use crate::control::{Done, Kind, Problem, Removed, ResizedTo, VERSION};
use crate::size::Size;
use ringway_export::{ChangeError, Export};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The commands there are.
const COMMANDS: &str = "list, stats, add, remove, resize, drain, pause, resume";

type Outcome = Result<Value, Problem>;

/// Carries out one line. Also gives back the request's `id`, if it has one.
pub(super) fn carry_out(disks: &Disks, line: &[u8]) -> (Option<Value>, Outcome) {
    let mut request: Map<String, Value> = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => {
            let message = format!("the line is not a JSON object: {error}");
            return (None, Err(Problem::new(Kind::Malformed, message)));
        }
    };
    let id = request.remove("id");
    (id, obey(disks, request))
}

fn obey(disks: &Disks, mut request: Map<String, Value>) -> Outcome {
    match request.remove("version") {
        None => {}
        Some(version) if version == VERSION => {}
        Some(version) => {
            let message = format!("version {version}: this daemon speaks version {VERSION}");
            return Err(Problem::new(Kind::Version, message));
        }
    }
    let command = request.remove("command");
    let Some(Value::String(command)) = command else {
        let message = format!("the request names no command; there are {COMMANDS}");
        return Err(Problem::new(Kind::Malformed, message));
    };
    match command.as_str() {
        "list" => {
            let Nothing {} = arguments(request)?;
            answer(reports::list(disks))
        }
        "stats" => {
            let Asked { disk, buckets } = arguments(request)?;
            let one = disk.map(|disk| find(disks, &disk)).transpose()?;
            answer(reports::stats(disks, one, buckets))
        }
        "add" => add(disks, arguments(request)?),
        "remove" => remove(disks, arguments(request)?),
        "resize" => resize(disks, arguments(request)?),
        "drain" => change(disks, arguments(request)?, Export::drain),
        "pause" => change(disks, arguments(request)?, Export::pause),
        "resume" => change(disks, arguments(request)?, Export::resume),
        other => {
            let message = format!("there is no command '{other}'; there are {COMMANDS}");
            Err(Problem::new(Kind::UnknownCommand, message))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    disk: Option<Name>,
    #[serde(default)]
    buckets: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct One {
    disk: Name,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    disk: DiskArgs,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resize {
    disk: Name,
    size: Option<Size>,
    #[serde(default)]
    shrink: bool,
}

/// How a client names a disk: its number, its image as it was given, or an absolute path of its
/// image or socket.
#[derive(Deserialize)]
#[serde(untagged)]
enum Name {
    Id(u64),
    Word(String),
}

fn arguments<T: DeserializeOwned>(request: Map<String, Value>) -> Result<T, Problem> {
    serde_json::from_value(Value::Object(request)).map_err(|e| Problem::new(Kind::Malformed, e))
}

fn answer(value: impl Serialize) -> Outcome {
    serde_json::to_value(value).map_err(|error| Problem::new(Kind::Failed, error))
}

fn find(disks: &Disks, name: &Name) -> Result<Arc<Served>, Problem> {
    let is_it = |served: &Served| match name {
        Name::Id(id) => served.id == *id,
        Name::Word(word) => {
            served.id.to_string() == *word
                || served.export.disk().name() == word
                || served.socket.as_deref() == Some(Path::new(word))
                || (Path::new(word).is_absolute() && served.claim.is_at(Path::new(word)))
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

fn add(disks: &Disks, Add { mut disk }: Add) -> Outcome {
    let malformed = |message: &str| Problem::new(Kind::Malformed, message);
    let image = disk.image.take().ok_or_else(|| malformed("the disk has no image"))?;
    let socket = disk.socket.take().ok_or_else(|| malformed("the disk has no socket"))?;
    let image_is_relative = !is_unreal(&image) && !image.is_absolute();
    if image_is_relative || !socket.is_absolute() {
        return Err(malformed("image and socket must be absolute paths"));
    }
    let spec = disk.into_spec(&image, Place::Socket(socket)).map_err(|e| malformed(&e))?;
    let served = disks.add(spec).map_err(failed)?;
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
    act: impl Fn(&Export) -> Result<(), ChangeError>,
) -> Outcome {
    let served = find(disks, &disk)?;
    let image = served.export.disk().name().to_owned();
    let begun = Instant::now();
    act(&served.export).map_err(|error| refused(&image, &error))?;
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
    Problem::new(Kind::Failed, format!("{error:#}"))
}
