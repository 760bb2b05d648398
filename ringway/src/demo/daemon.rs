//! The demo's daemon: this very program, as a child that ends with its only front-end.

use super::args::DemoArgs;
use anyhow::{Context, bail};
use ringway_control::config::Choice;
use ringway_control::log::LogArgs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the daemon may take to end once its front-end has gone.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running daemon.
pub(super) struct Daemon {
    child: Child,
    ready: String,
}

impl Daemon {
    /// Starts a daemon on a new image in `home`; returns once it serves, with the socket that leads to it.
    ///
    /// # Errors
    /// That it does not start; it has said why on standard error.
    pub(super) fn start(
        home: &Path,
        bytes: u64,
        queues: u16,
        args: &DemoArgs,
        log: &LogArgs,
    ) -> anyhow::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        // Inherited by the child, and only by it: nothing else is started here.
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = Command::new(program);
        command.current_dir(home);
        command.args(["serve", "disk.img", "--size", &bytes.to_string()]);
        command.args(["--queues", &queues.to_string(), "--fd", &theirs.as_raw_fd().to_string()]);
        if let Some(Choice::Is(engine)) = args.engine {
            command.args(["--engine", engine.name()]);
        }
        if let Some(cache) = args.cache {
            command.args(["--cache", cache.name()]);
        }
        if log.verbose == 0 {
            command.env("RUST_LOG", "warn");
        }
        command.args(std::iter::repeat_n("-v", log.verbose.into()));
        // A group of its own: Ctrl-C is for the demo, which ends the daemon in order.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the daemon")?;
        drop(theirs);
        let mut ready = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut ready)?;
        }
        let mut daemon = Self { child, ready };
        if daemon.ready.is_empty() {
            bail!("the daemon did not start ({}); see above", daemon.ended()?);
        }
        Ok((daemon, ours))
    }

    /// What it said of its disk: the name, and what there is to know.
    pub(super) fn disk(&self) -> (&str, Vec<String>) {
        let mut words = self.ready.trim_end().split("  ");
        (words.next().unwrap_or_default(), words.map(str::to_owned).collect())
    }

    /// Waits for its end, which its front-end's departure brings about.
    ///
    /// # Errors
    /// That it fails, or goes on running.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        let status = self.ended()?;
        if !status.success() {
            bail!("the daemon ended with {status}");
        }
        Ok(())
    }

    fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        bail!("the daemon still runs {} s after its front-end has gone", TIMEOUT.as_secs())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // Best effort: it ends with its front-end anyway.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
