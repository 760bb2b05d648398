//! Asks a daemon again and again, on a thread of its own: the screen never waits for it.

use super::figures::Sample;
use crate::ctl::ask;
use anyhow::{Context, bail};
use ringway_control::protocol::{List, Stats};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long the daemon may take to answer. Its workers have a second.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What the screen wants of the one who asks.
pub(super) enum WatchCommand {
    /// Ask so often from now on.
    Every(Duration),
    /// Ask no more, or go on.
    Pause(bool),
}

/// A daemon that is being watched. Dropping it ends that.
pub(super) struct Watch {
    commands: Sender<WatchCommand>,
    /// Answers, or why there is none.
    pub(super) answers: Receiver<anyhow::Result<Sample>>,
}

impl Watch {
    /// Asks the daemon at `socket` from now on, whether it is there or not.
    ///
    /// # Errors
    /// That the host has no thread for it.
    pub(super) fn start(socket: PathBuf, every: Duration) -> std::io::Result<Self> {
        let (commands, received) = channel();
        let (tell, answers) = channel();
        std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || watch(&socket, every, &received, &tell))?;
        Ok(Self { commands, answers })
    }

    pub(super) fn send(&self, command: WatchCommand) {
        // It goes on until its answers are wanted no more.
        let _ = self.commands.send(command);
    }
}

fn watch(
    socket: &Path,
    mut every: Duration,
    commands: &Receiver<WatchCommand>,
    tell: &Sender<anyhow::Result<Sample>>,
) {
    let mut paused = false;
    let mut next = Instant::now();
    loop {
        let wait =
            if paused { Duration::MAX } else { next.saturating_duration_since(Instant::now()) };
        match commands.recv_timeout(wait) {
            Ok(WatchCommand::Every(time)) => {
                every = time;
                next = next.min(Instant::now() + every);
            }
            Ok(WatchCommand::Pause(pause)) => (paused, next) = (pause, Instant::now()),
            Err(RecvTimeoutError::Timeout) => {
                next = Instant::now() + every;
                if tell.send(take(socket)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Asks once.
///
/// # Errors
/// That there is no daemon, or what it finds wrong.
pub(super) fn take(socket: &Path) -> anyhow::Result<Sample> {
    let list: List = question(socket, "list", json!({}))?;
    let stats: Stats = question(socket, "stats", json!({ "buckets": true }))?;
    Ok(Sample { list, stats })
}

fn question<T: DeserializeOwned>(socket: &Path, command: &str, fields: Value) -> anyhow::Result<T> {
    let request: Map<String, Value> = serde_json::from_value(fields)?;
    match ask(socket, command, request, TIMEOUT)? {
        Ok(answer) => serde_json::from_value(answer)
            .with_context(|| format!("{}: its answer is not understood", socket.display())),
        Err(problem) => bail!("{}: {}", socket.display(), problem.message),
    }
}
