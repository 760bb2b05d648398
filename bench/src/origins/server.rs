//! Servers as processes of their own: this program, and QEMU's storage daemon.

use crate::load::{AccessArgs, Load};
use crate::origins::lab::on_server_cpus;
use crate::target::{Opened, Target};
use anyhow::{Context, Result, bail};
use ringway_control::config::is_unreal;
use ringway_disk::{EngineKind, SchedulerMode};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a server may take to listen, and to end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What QEMU's storage daemon is called.
pub(super) const QSD: &str = "qemu-storage-daemon";

/// Who serves.
#[derive(Clone, Copy, Debug)]
pub(super) enum ServerKind {
    /// With an engine, or the one it chooses.
    Ringway {
        engine: Option<EngineKind>,
        path: SchedulerMode,
    },
    Qsd(&'static str),
}

/// A server that runs. Dropping it ends it.
pub(super) struct Running {
    child: Child,
    home: TempDir,
}

impl Running {
    /// Starts a server of `disk`: an image, or what `ringway serve` takes as well.
    ///
    /// # Errors
    /// That there is no such program.
    pub(super) fn start(kind: ServerKind, disk: &str) -> Result<Self> {
        let home = tempfile::Builder::new().prefix("ringway-origins-").tempdir()?;
        let socket = home.path().join("s");
        let socket = socket.display().to_string();
        let mut command = match kind {
            ServerKind::Ringway { engine, path } => {
                let mut command = Command::new(std::env::current_exe()?);
                command.args(["serve", disk, "--socket", &socket, "--queues", "1"]);
                command.args(["--path", path.name()]);
                if !is_unreal(Path::new(disk)) {
                    command.args(["--cache", "none"]);
                }
                command.args(engine.iter().flat_map(|engine| ["--engine", engine.name()]));
                command
            }
            ServerKind::Qsd(aio) => {
                let mut command = Command::new(QSD);
                command.arg("--blockdev").arg(format!(
                    "driver=file,filename={disk},node-name=f,aio={aio},cache.direct=on"
                ));
                command.args(["--object", "iothread,id=t0", "--export"]).arg(format!(
                    "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={socket},\
                     writable=on,iothread=t0"
                ));
                command
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(home.path().join("log"))?);
        // SAFETY: one system call, which allocates and locks nothing.
        unsafe {
            // It does not outlive this process, however that ends.
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = on_server_cpus(|| {
            command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))
        })?;
        Ok(Self { child, home })
    }

    /// Connects to it as soon as it listens.
    ///
    /// # Errors
    /// What it said before it ended.
    pub(super) fn open(&mut self, load: &Load) -> Result<Opened> {
        self.open_by(SchedulerMode::Bio, load)
    }

    /// The same, with a path of the front-end's own.
    ///
    /// # Errors
    /// As [`Running::open`].
    pub(super) fn open_by(&mut self, path: SchedulerMode, load: &Load) -> Result<Opened> {
        let socket = self.home.path().join("s");
        let target: Target =
            format!("vhost-user:{}", socket.display()).parse().map_err(anyhow::Error::msg)?;
        let access = AccessArgs { allow_write: true, path: Some(path), ..AccessArgs::default() };
        let (child, home) = (&mut self.child, &self.home);
        target.open_within(TIMEOUT, load, &access, || {
            let Some(status) = child.try_wait()? else { return Ok(()) };
            let log = std::fs::read_to_string(home.path().join("log")).unwrap_or_default();
            bail!("the server ended, {status}: {}", log.lines().next().unwrap_or("no message"))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// True if a program of this name can be started.
pub(super) fn is_installed(program: &str) -> bool {
    let version = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    version.is_ok_and(|output| output.status.success())
}
