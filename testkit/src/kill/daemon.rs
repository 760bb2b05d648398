//! The daemon that is killed.

use super::image;
use super::plan::{End, FIRST_LIMITS, Plan, QUEUES};
use anyhow::{Context, Result, bail};
use ringway_core::kill_points::{FAULTS, Point, VARIABLE};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// So many lines of a log are shown when a campaign goes wrong.
const LAST_LINES: usize = 8;

/// A running daemon; dropping it kills it.
#[derive(Debug)]
pub(super) struct Daemon(pub(super) Child);

impl Daemon {
    /// Starts one, without waiting until it is ready; with `dies`, one that kills itself when it
    /// comes to that point for that time. The logs of the last two are kept.
    pub(super) fn start(
        plan: &Plan,
        dir: &Path,
        life: u64,
        dies: Option<(Point, u64)>,
        faults: Option<String>,
    ) -> Result<Self> {
        let log = File::create(dir.join(format!("log.{}", life % 2)))?;
        let mut command = Command::new(&plan.ringway);
        command.args(["serve", image::name(plan), "--socket", "s"]);
        command.args(["--queues", &QUEUES.to_string()]);
        command.args(["--format", if plan.qcow2 { "qcow2" } else { "raw" }]);
        command.args(["--engine", &plan.engine, "--cache", &plan.cache, "--control", "c"]);
        // Faults are for the guest to hear of, unless they are to be waited for.
        let on_enospc = if plan.hold { "hold" } else { "report" };
        command.args(["--state-dir", "state", "--on-enospc", on_enospc]);
        command.args(FIRST_LIMITS.iter().filter(|_| plan.limits));
        command.current_dir(dir);
        for name in ["RUST_LOG", "NOTIFY_SOCKET", VARIABLE, FAULTS] {
            command.env_remove(name);
        }
        if let Some(faults) = faults {
            command.env(FAULTS, faults);
        }
        if let Some((point, count)) = dies {
            command.env(VARIABLE, format!("{}:{count}", point.name()));
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let started = command.spawn();
        Ok(Self(started.with_context(|| format!("cannot start {}", plan.ringway.display()))?))
    }

    pub(super) fn signal(&self, signal: i32) -> Result<()> {
        let pid = i32::try_from(self.0.id())?;
        // SAFETY: our own child, not waited for yet, so the number is still its own.
        match unsafe { libc::kill(pid, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()).context("cannot signal the daemon"),
        }
    }

    /// Ends it, and says when.
    pub(super) fn end(mut self, end: End) -> Result<Instant> {
        if let Some(status) = self.0.try_wait()? {
            bail!("the daemon ended by itself: {status}");
        }
        let begun = Instant::now();
        self.signal(if end == End::Killed { libc::SIGKILL } else { libc::SIGTERM })?;
        let status = self.0.wait()?;
        // Told before it listens for signals, it dies of the signal.
        if end == End::Terminated && !status.success() && status.code().is_some() {
            bail!("the daemon ended with {status} after SIGTERM");
        }
        Ok(begun)
    }

    /// Kills it together with what it has started, as a service manager kills a group, and says when.
    pub(super) fn kill_all(self) -> Result<Instant> {
        let pid = self.0.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let children: Vec<i32> =
            children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        // None of them does anything between the first and the last.
        self.signal(libc::SIGSTOP)?;
        for signal in [libc::SIGSTOP, libc::SIGKILL] {
            for &child in &children {
                // SAFETY: a child of ours, which lives and has not waited for it.
                unsafe { libc::kill(child, signal) };
            }
        }
        self.end(End::Killed)
    }

    /// Whether it has killed itself by now.
    pub(super) fn has_died(&mut self) -> Result<bool> {
        match self.0.try_wait()? {
            None => Ok(false),
            // SIGSYS: a filter of system calls does not let it kill itself.
            Some(status) if matches!(status.signal(), Some(libc::SIGKILL | libc::SIGSYS)) => {
                Ok(true)
            }
            Some(status) => bail!("the daemon ended by itself: {status}"),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The ends of the logs that are kept: a successor that did not come says there what it waited for.
pub(super) fn last_words(dir: &Path) -> String {
    let end = |log: &str| {
        let text = std::fs::read_to_string(dir.join(log)).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(LAST_LINES).collect();
        let lines: Vec<_> = lines.into_iter().rev().map(|line| format!("  {line}\n")).collect();
        format!("the end of {log}:\n{}", lines.concat())
    };
    ["log.0", "log.1"].map(end).concat()
}

/// Asks for another size of the disk, without waiting for an answer: the daemon may be gone. Keep what
/// comes back as long as the answer matters.
pub(super) fn resize(dir: &Path, bytes: u64) -> Option<UnixStream> {
    let mut socket = UnixStream::connect(dir.join("c")).ok()?;
    let request = json!({ "command": "resize", "disk": 0, "size": bytes, "shrink": true });
    writeln!(socket, "{request}").ok()?;
    Some(socket)
}

/// Asks the daemon, if it lives and answers soon.
pub(super) fn ask(dir: &Path, request: &Value) -> Option<Value> {
    let mut socket = UnixStream::connect(dir.join("c")).ok()?;
    socket.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    writeln!(socket, "{request}").ok()?;
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line).ok()?;
    let mut answer: Value = serde_json::from_str(&line).ok()?;
    answer["ok"].as_bool()?.then(|| answer["answer"].take())
}
