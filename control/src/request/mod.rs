//! What clients can ask for: one line, parsed and judged before any disk is looked at.

#![allow(missing_docs, reason = "docs/control.md says what each word means, for all programs")]

#[cfg(any(test, fuzzing))]
pub mod fuzz_case;

use crate::config::{
    DiskArgs, DiskSpec, LimitArgs, NbdAddress, NbdPlace, Place, hint, is_unreal, with_hint,
};
use crate::protocol::{Problem, ProblemKind, VERSION};
use crate::size::Size;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The commands there are.
pub const COMMANDS: [&str; 15] = [
    "list", "stats", "events", "reload", "add", "remove", "resize", "limit", "drain", "pause",
    "resume", "retry", "snapshot", "flatten", "commit",
];

/// A request whose form is right; as JSON, the fields it was made of.
#[derive(Debug, Serialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum ControlRequest {
    List(Nothing),
    Stats(StatsRequest),
    Events(Nothing),
    Reload(Reload),
    Add(Box<Add>),
    Remove(One),
    Resize(Resize),
    Limit(Box<Limit>),
    Drain(One),
    Pause(One),
    Resume(One),
    Retry(Retry),
    Snapshot(Snapshot),
    Flatten(Flatten),
    Commit(Commit),
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Reload {
    /// Nothing is done: the answer says what would be.
    #[serde(default)]
    pub dry_run: bool,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StatsRequest {
    pub disk: Option<Name>,
    #[serde(default)]
    pub buckets: bool,
    #[serde(default)]
    pub histograms: bool,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct One {
    pub disk: Name,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Add {
    disk: DiskArgs,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Resize {
    pub disk: Name,
    pub size: Option<Size>,
    #[serde(default)]
    pub shrink: bool,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Retry {
    pub disk: Name,
    #[serde(default)]
    pub fail: bool,
    /// Not held requests, but flushes after one that had failed before the disk was opened: what was written until then
    /// may be lost, and whoever uses the disk knows that.
    #[serde(default)]
    pub flushes: bool,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    pub disk: Name,
    /// What the read-only image is to be called: a name, or a path in the folder of the disk's image.
    pub snapshot: PathBuf,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Flatten {
    pub disk: Name,
    /// How many bytes may be copied in a second.
    pub bps: Option<Size>,
    /// What is under way is to stop.
    #[serde(default)]
    pub cancel: bool,
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Commit {
    pub disk: Name,
    /// What was written so far is to be a snapshot of this name first, and that to be merged.
    pub snapshot: Option<PathBuf>,
    /// How many bytes may be copied in a second.
    pub bps: Option<Size>,
    /// What is under way is to stop.
    #[serde(default)]
    pub cancel: bool,
}

/// Of a disk, or of a group if no disk is named.
#[derive(Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "schema",
    schemars(extend("anyOf" = [{ "required": ["disk"] }, { "required": ["group"] }]))
)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    pub disk: Option<Name>,
    /// With a disk the group it is to share limits with, or `none`.
    pub group: Option<String>,
    /// What is to change; what is not said stays.
    #[serde(default)]
    pub limits: LimitArgs,
    /// All that was said before is lifted first.
    #[serde(default)]
    pub lift: bool,
    /// There is no such group yet.
    #[serde(default)]
    pub create: bool,
    /// There is to be no such group any more.
    #[serde(default)]
    pub remove: bool,
}

/// How a client names a disk: its number, its image as it was given, or an absolute path of its
/// image or socket.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Name {
    Id(u64),
    Word(String),
}

/// Reads one line. Also gives back the request's `id`, if it has one.
pub fn parse(line: &[u8]) -> (Option<Value>, Result<ControlRequest, Problem>) {
    let mut fields: Map<String, Value> = match serde_json::from_slice(line) {
        Ok(fields) => fields,
        Err(error) => {
            let message = format!("the line is not a JSON object: {error}");
            return (None, Err(Problem::new(ProblemKind::Malformed, message)));
        }
    };
    let id = fields.remove("id");
    (id, request(fields))
}

fn request(mut fields: Map<String, Value>) -> Result<ControlRequest, Problem> {
    match fields.remove("version") {
        None => {}
        Some(version) if version == VERSION => {}
        Some(version) => {
            let message = format!("version {version}: this daemon speaks version {VERSION}");
            return Err(Problem::new(ProblemKind::Version, message));
        }
    }
    let Some(Value::String(command)) = fields.remove("command") else {
        let message = format!("the request names no command; there are {}", COMMANDS.join(", "));
        return Err(Problem::new(ProblemKind::Malformed, message));
    };
    Ok(match command.as_str() {
        "list" => ControlRequest::List(arguments(fields)?),
        "stats" => ControlRequest::Stats(arguments(fields)?),
        "events" => ControlRequest::Events(arguments(fields)?),
        "reload" => ControlRequest::Reload(arguments(fields)?),
        "add" => ControlRequest::Add(arguments(fields)?),
        "remove" => ControlRequest::Remove(arguments(fields)?),
        "resize" => ControlRequest::Resize(arguments(fields)?),
        "limit" => ControlRequest::Limit(Box::new(limit(arguments(fields)?)?)),
        "drain" => ControlRequest::Drain(arguments(fields)?),
        "pause" => ControlRequest::Pause(arguments(fields)?),
        "resume" => ControlRequest::Resume(arguments(fields)?),
        "retry" => ControlRequest::Retry(arguments(fields)?),
        "snapshot" => ControlRequest::Snapshot(arguments(fields)?),
        "flatten" => {
            let flatten: Flatten = arguments(fields)?;
            job(flatten.bps, flatten.cancel)?;
            ControlRequest::Flatten(flatten)
        }
        "commit" => {
            let commit: Commit = arguments(fields)?;
            job(commit.bps, commit.cancel)?;
            if commit.cancel && commit.snapshot.is_some() {
                let why = "what is to stop needs no snapshot";
                return Err(Problem::new(ProblemKind::Malformed, why));
            }
            ControlRequest::Commit(commit)
        }
        other => {
            let hint = hint(other, COMMANDS.iter().copied());
            let message =
                format!("there is no command '{other}'{hint}; there are {}", COMMANDS.join(", "));
            return Err(Problem::new(ProblemKind::UnknownCommand, message));
        }
    })
}

fn limit(limit: Limit) -> Result<Limit, Problem> {
    let what = match (&limit.disk, &limit.group) {
        (None, None) => "neither a disk nor a limit group is named",
        (Some(_), _) if limit.create => {
            "a disk does not make a group: create it first, without a disk"
        }
        (None, Some(group)) if group.is_empty() => "a group needs a name",
        (None, Some(group)) if group == "none" => {
            "no group can be called 'none': it is the word for no group"
        }
        _ => return Ok(limit),
    };
    Err(Problem::new(ProblemKind::Malformed, what))
}

/// What takes its time is begun, or is to stop.
fn job(bps: Option<Size>, cancel: bool) -> Result<(), Problem> {
    let what = match bps {
        Some(Size(0)) => "at 0 bytes a second it would never be done",
        Some(_) if cancel => "what is to stop needs no bps",
        _ => return Ok(()),
    };
    Err(Problem::new(ProblemKind::Malformed, what))
}

fn arguments<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, Problem> {
    serde_json::from_value(Value::Object(fields))
        .map_err(|e| Problem::new(ProblemKind::Malformed, with_hint(&e.to_string())))
}

impl Add {
    /// The disk that is asked for.
    pub fn into_spec(self) -> Result<DiskSpec, Problem> {
        let malformed = |message: &str| Problem::new(ProblemKind::Malformed, message);
        let mut disk = self.disk;
        let image = disk.take_image().ok_or_else(|| malformed("the disk has no image"))?;
        let place = match disk.take_nbd(&image).map_err(|e| malformed(&e))? {
            Some(place) => Place::Nbd(place),
            None => {
                let socket = disk.socket.take();
                Place::Socket(socket.ok_or_else(|| malformed("the disk has no socket"))?)
            }
        };
        let image_is_relative = !is_unreal(&image) && !image.is_absolute();
        let socket = match &place {
            Place::Nbd(NbdPlace { address: NbdAddress::Unix(path), .. }) => Some(path),
            Place::Socket(path) => Some(path),
            _ => None,
        };
        if image_is_relative || socket.is_some_and(|path| !path.is_absolute()) {
            return Err(malformed("image and socket must be absolute paths"));
        }
        let others = [&disk.backing_root, &disk.base, &disk.overlay];
        let is_relative = |path: &PathBuf| !is_unreal(path) && !path.is_absolute();
        if others.into_iter().flatten().any(is_relative) {
            return Err(malformed("backing-root, base and overlay must be absolute paths"));
        }
        if disk.socket_group.as_ref().is_some_and(|group| group.parse::<u32>().is_err()) {
            return Err(malformed(
                "socket-group is the number of a group: a daemon looks no names up",
            ));
        }
        disk.into_spec(&image, place).map_err(|e| malformed(&e))
    }
}
