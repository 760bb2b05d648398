//! What a daemon and the process of one disk say to each other: a JSON value on each line. Both are
//! this very program, so nothing here has to last.

use super::files::ServedFiles;
use crate::departure::Departure;
use anyhow::Context;
use ringway_control::config::{DaemonArgs, DiskArgs, DiskSpec, LimitArgs, Place, Plan};
use ringway_control::log::{LogFormat, LogLevel};
use ringway_control::protocol::{DiskFacts, Happened, Problem};
use ringway_control::size::Size;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The first line: the disk to serve.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct ProcessSetup {
    pub(super) disk: DiskArgs,
    pub(super) daemon: DaemonArgs,
    /// The daemon has a control socket: the disk may be told to change its files.
    pub(super) commanded: bool,
    /// It has one, or its counts can be read: requests are timed.
    pub(super) sampled: bool,
    /// What its cgroup allows, which is not its own matter.
    pub(super) memory_max: Option<Size>,
    /// For its log lines.
    pub(super) name: String,
    /// What it was served from by the process before.
    pub(super) files: ServedFiles,
    pub(super) log_format: Option<LogFormat>,
    pub(super) log_level: Option<LogLevel>,
}

impl ProcessSetup {
    pub(super) fn into_plan(self) -> anyhow::Result<Plan> {
        let mut disk = self.disk;
        let image = disk.image.take().context("the setup names no image")?;
        let socket = disk.socket.take().context("the setup names no socket")?;
        let spec: DiskSpec =
            disk.into_spec(&image, Place::Socket(socket)).map_err(anyhow::Error::msg)?;
        Ok(Plan { disks: vec![spec], daemon: self.daemon, ..Plan::default() })
    }
}

/// What the daemon tells the process.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum ToProcess {
    /// All else is in place: what was made stays, front-ends are served, or wait if it is paused;
    /// with these limits, if they were changed.
    Go { paused: bool, limits: Option<Box<LimitArgs>> },
    /// End, in order; if it is true the disk is removed, and with it a clone that is ephemeral.
    Stop(bool),
    /// Print the counts.
    Counts,
    /// A request of the control socket; the answer has the same number.
    Ask { number: u64, request: Value },
}

/// What the process tells the daemon.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum FromProcess {
    /// Front-ends can connect; they are served once it is told to go.
    Ready {
        facts: Box<DiskFacts>,
        files: ServedFiles,
    },
    /// It is about to be served from these, or is from now on.
    Files(ServedFiles),
    /// The disk cannot be served, and nothing was created or changed.
    Failed(String),
    Answer {
        number: u64,
        outcome: Result<Value, Problem>,
    },
    /// Something has happened to the disk.
    Happened(Happened),
    /// It ends now.
    Stopped(Departure),
}
