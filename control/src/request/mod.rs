//! What clients can ask for: one line, parsed and judged before any disk is looked at.

#![allow(missing_docs, reason = "docs/control.md says what each word means, for all programs")]

#[cfg(any(test, fuzzing))]
pub mod case;

use crate::config::{DiskArgs, DiskSpec, LimitArgs, Place, is_unreal};
use crate::protocol::{Kind, Problem, VERSION};
use crate::size::Size;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The commands there are.
pub const COMMANDS: [&str; 11] = [
    "list", "stats", "events", "add", "remove", "resize", "limit", "drain", "pause", "resume",
    "retry",
];

/// A request whose form is right; as JSON, the fields it was made of.
#[derive(Debug, Serialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Request {
    List(Nothing),
    Stats(Asked),
    Events(Nothing),
    Add(Box<Add>),
    Remove(One),
    Resize(Resize),
    Limit(Box<Limit>),
    Drain(One),
    Pause(One),
    Resume(One),
    Retry(Retry),
}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Asked {
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
}

/// Of a disk, or of a group if no disk is named.
#[derive(Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
pub fn parse(line: &[u8]) -> (Option<Value>, Result<Request, Problem>) {
    let mut fields: Map<String, Value> = match serde_json::from_slice(line) {
        Ok(fields) => fields,
        Err(error) => {
            let message = format!("the line is not a JSON object: {error}");
            return (None, Err(Problem::new(Kind::Malformed, message)));
        }
    };
    let id = fields.remove("id");
    (id, request(fields))
}

fn request(mut fields: Map<String, Value>) -> Result<Request, Problem> {
    match fields.remove("version") {
        None => {}
        Some(version) if version == VERSION => {}
        Some(version) => {
            let message = format!("version {version}: this daemon speaks version {VERSION}");
            return Err(Problem::new(Kind::Version, message));
        }
    }
    let Some(Value::String(command)) = fields.remove("command") else {
        let message = format!("the request names no command; there are {}", COMMANDS.join(", "));
        return Err(Problem::new(Kind::Malformed, message));
    };
    Ok(match command.as_str() {
        "list" => Request::List(arguments(fields)?),
        "stats" => Request::Stats(arguments(fields)?),
        "events" => Request::Events(arguments(fields)?),
        "add" => Request::Add(arguments(fields)?),
        "remove" => Request::Remove(arguments(fields)?),
        "resize" => Request::Resize(arguments(fields)?),
        "limit" => Request::Limit(Box::new(limit(arguments(fields)?)?)),
        "drain" => Request::Drain(arguments(fields)?),
        "pause" => Request::Pause(arguments(fields)?),
        "resume" => Request::Resume(arguments(fields)?),
        "retry" => Request::Retry(arguments(fields)?),
        other => {
            let message =
                format!("there is no command '{other}'; there are {}", COMMANDS.join(", "));
            return Err(Problem::new(Kind::UnknownCommand, message));
        }
    })
}

fn limit(limit: Limit) -> Result<Limit, Problem> {
    let what = match (&limit.disk, &limit.group) {
        (None, None) => "neither a disk nor a limit group is named",
        (Some(_), _) if limit.create => {
            "a disk does not make a group: create it first, without a disk"
        }
        (None, Some(group)) if group.is_empty() || group == "none" => "a group needs a name",
        _ => return Ok(limit),
    };
    Err(Problem::new(Kind::Malformed, what))
}

fn arguments<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, Problem> {
    serde_json::from_value(Value::Object(fields)).map_err(|e| Problem::new(Kind::Malformed, e))
}

impl Add {
    /// The disk that is asked for.
    pub fn into_spec(self) -> Result<DiskSpec, Problem> {
        let malformed = |message: &str| Problem::new(Kind::Malformed, message);
        let mut disk = self.disk;
        let image = disk.image.take().ok_or_else(|| malformed("the disk has no image"))?;
        let socket = disk.socket.take().ok_or_else(|| malformed("the disk has no socket"))?;
        let image_is_relative = !is_unreal(&image) && !image.is_absolute();
        if image_is_relative || !socket.is_absolute() {
            return Err(malformed("image and socket must be absolute paths"));
        }
        if disk.socket_group.as_ref().is_some_and(|group| group.parse::<u32>().is_err()) {
            return Err(malformed(
                "socket-group is the number of a group: a daemon looks no names up",
            ));
        }
        disk.into_spec(&image, Place::Socket(socket)).map_err(|e| malformed(&e))
    }
}
