//! What a daemon and the process of one disk say to each other: a JSON value on each line. Both are
//! this very program, so nothing here has to last.

use super::files::ServedFiles;
use crate::departure::Departure;
use crate::endpoint::inherit;
use anyhow::Context;
use ringway_control::config::{DaemonArgs, DiskArgs, DiskSpec, EachDisk, LimitArgs, Place, Plan};
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
    /// The daemon named it after it had become its user: the process names nothing with other rights, but for the folder
    /// of what outlives it.
    pub(super) added: bool,
    /// The daemon has a control socket: the disk may be told to change its files.
    pub(super) commanded: bool,
    /// It has one, or its counts can be read: requests are timed.
    pub(super) sampled: bool,
    /// For its log lines.
    pub(super) name: String,
    /// What it was served from by the process before.
    pub(super) files: ServedFiles,
    pub(super) log_format: Option<LogFormat>,
    pub(super) log_level: Option<LogLevel>,
    /// The number of the inherited socket that its front-ends come to, if it makes none.
    pub(super) socket: Option<i32>,
}

impl ProcessSetup {
    pub(super) fn into_plan(self) -> anyhow::Result<Plan> {
        let mut disk = self.disk;
        let image = disk.image.take().context("the setup names no image")?;
        let socket = disk.socket.take();
        let place = match self.socket {
            Some(number) => inherit(number)?,
            None => Place::Socket(socket.context("the setup names no socket")?),
        };
        let spec: DiskSpec = disk.into_spec(&image, place).map_err(anyhow::Error::msg)?;
        Ok(Plan { disks: vec![spec], daemon: self.daemon, ..Plan::default() })
    }
}

/// What the daemon says of a disk that is to have a process: all else its processes have from the start of the
/// daemon, so that one in wrong hands starts none with more rights.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct DiskSetup {
    pub(super) disk: DiskArgs,
    /// How many workers others have on the CPUs that they share.
    pub(super) turn: usize,
    /// What its cgroup allows, which is not its own matter.
    pub(super) memory_max: Option<Size>,
    /// For its log lines.
    pub(super) name: String,
    pub(super) log_format: Option<LogFormat>,
    pub(super) log_level: Option<LogLevel>,
}

/// What all processes of disks have in common.
#[derive(Debug)]
pub(super) struct ForAll {
    daemon: DaemonArgs,
    commanded: bool,
    sampled: bool,
}

impl ForAll {
    /// By the words that the daemon was started with.
    pub(super) fn of(options: &DaemonArgs) -> Self {
        let mut daemon = options.clone();
        let commanded = daemon.control.take().is_some();
        let sampled = commanded | daemon.metrics.take().is_some();
        daemon.each = EachDisk::default();
        Self { daemon, commanded, sampled }
    }

    /// The first line to the process of a disk.
    pub(super) fn with(&self, disk: DiskSetup, added: bool) -> ProcessSetup {
        let mut daemon = self.daemon.clone();
        if let Some(cpus) = &mut daemon.cpus {
            cpus.rotate(disk.turn);
        }
        let DiskSetup { disk, name, log_format, log_level, .. } = disk;
        let (commanded, sampled) = (self.commanded, self.sampled);
        let files = ServedFiles::default();
        ProcessSetup {
            disk,
            daemon,
            added,
            commanded,
            sampled,
            name,
            files,
            log_format,
            log_level,
            socket: None,
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_control::config::Sandbox;

    /// What a daemon says of a disk cannot say more than that.
    #[test]
    fn e29_a_process_has_what_its_daemon_was_started_with() {
        let options = DaemonArgs {
            user: Some("nobody".into()),
            state_dir: Some("/state".into()),
            ..DaemonArgs::default()
        };
        let said = serde_json::json!({
            "disk": DiskArgs::default(), "turn": 0, "memory_max": null, "name": "x", "log_format": null,
            "log_level": null, "daemon": DaemonArgs { sandbox: Some(Sandbox::Off), ..DaemonArgs::default() },
            "commanded": true, "added": false,
        });
        let disk: DiskSetup = serde_json::from_value(said).unwrap();
        let setup = ForAll::of(&options).with(disk, true);
        assert_eq!((setup.daemon.sandbox, setup.commanded, setup.added), (None, false, true));
        assert_eq!((setup.daemon.user, setup.daemon.state_dir), (options.user, options.state_dir));
    }
}
