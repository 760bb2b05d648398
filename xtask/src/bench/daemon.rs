//! The servers: ours, QEMU's, or whoever listens at a socket. They end when their handle is dropped.

use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::spdk;

use anyhow::{Context, Result, bail};
use ringway_bench::usage::Usage;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a server may take until it listens: a Ceph cluster misses a client that was killed after 30 s.
const START: Duration = Duration::from_secs(45);
/// How long it may take to end before it is killed: images of a cluster are closed over the network.
const END: Duration = Duration::from_secs(15);

/// Size of a null device, in bytes.
const NULL_BYTES: u64 = 1 << 30;

/// A server to measure: `ringway:auto`, `ringway@PATH:io_uring+--poll=always`, `qsd:native`,
/// `spdk@PATH:aio`, `socket:NAME=PATH`.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    /// As it was said.
    pub(crate) name: String,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Ringway { binary: Option<PathBuf>, engine: String, options: Vec<String> },
    Qemu { aio: String },
    Spdk { binary: PathBuf, aio: String },
    Socket(PathBuf),
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is none of ringway[@BINARY]:ENGINE[+OPTION…], qsd:AIO, \
                 spdk@BINARY:aio, spdk@BINARY:uring, socket:NAME=PATH"
            )
        };
        let (spec, options) = text.split_once('+').unwrap_or((text, ""));
        let (program, what) = spec.rsplit_once(':').ok_or_else(wrong)?;
        if what.is_empty() {
            return Err(wrong());
        }
        let kind = match program.split_once('@').map_or((program, None), |(p, b)| (p, Some(b))) {
            ("ringway", binary) => Kind::Ringway {
                binary: binary.map(PathBuf::from),
                engine: what.to_owned(),
                options: options.split('+').filter(|o| !o.is_empty()).map(str::to_owned).collect(),
            },
            ("qsd", None) if options.is_empty() => Kind::Qemu { aio: what.to_owned() },
            ("spdk", Some(binary)) if matches!(what, "aio" | "uring") => {
                Kind::Spdk { binary: binary.into(), aio: what.to_owned() }
            }
            ("socket", None) => {
                let (name, path) = what.split_once('=').ok_or_else(wrong)?;
                return Ok(Self { name: name.to_owned(), kind: Kind::Socket(path.into()) });
            }
            _ => return Err(wrong()),
        };
        Ok(Self { name: text.to_owned(), kind })
    }
}

impl Server {
    /// What to call it when it serves `device`: a null device knows no way of asynchronous I/O.
    pub(crate) fn name_on(&self, device: Device) -> String {
        match (&self.kind, device) {
            (Kind::Qemu { .. }, Device::Null) => "qsd:null-co".into(),
            (Kind::Spdk { .. }, Device::Null) => "spdk:null".into(),
            (Kind::Spdk { aio, .. }, _) => format!("spdk:{aio}"),
            (Kind::Ringway { engine, .. }, Device::Null | Device::SimRam | Device::SimHdd) => {
                self.name.replacen(&format!(":{engine}"), &format!(":{}", device.name()), 1)
            }
            _ => self.name.clone(),
        }
    }

    /// True for ours.
    pub(crate) const fn is_ours(&self) -> bool {
        matches!(self.kind, Kind::Ringway { .. })
    }

    /// Starts it on the server's cores; clients may connect at once, with patience.
    pub(crate) fn start(&self, lab: &Lab, device: Device, queues: u16) -> Result<Running> {
        let folder = tempfile::Builder::new().prefix("ringway-bench-").tempdir()?;
        let socket = folder.path().join("disk.sock");
        let mut command = match &self.kind {
            Kind::Socket(path) => return Running::adopt(path, folder),
            Kind::Ringway { binary, engine, options } => {
                let mut command = contained(lab, binary.as_deref().unwrap_or(&lab.daemon));
                command.args(["serve", "--queues", &queues.to_string()]);
                command.arg("--socket").arg(&socket);
                match device.path(lab) {
                    None => _ = command.arg(device.unreal()),
                    Some(path) => _ = command.arg(path).args(["--cache", "none"]),
                }
                if device.path(lab).is_some() {
                    command.args(["--engine", engine]);
                }
                command.args(lab.common.daemon_args.split_whitespace()).args(options);
                command
            }
            Kind::Spdk { binary, aio } => {
                let config = spdk::write_config(folder.path(), device, device.path(lab), aio)?;
                let mut command = contained(lab, binary);
                command.args(spdk::arguments(&lab.common.server_cpus, folder.path(), &config));
                command
            }
            Kind::Qemu { .. } if matches!(device, Device::SimRam | Device::SimHdd) => {
                bail!("only ringway serves {}, its own simulation", device.name())
            }
            Kind::Qemu { aio } => {
                let mut command = contained(lab, &lab.common.qsd);
                let node = device.path(lab).map_or_else(
                    || format!("driver=null-co,node-name=f,size={NULL_BYTES}"),
                    |path| {
                        format!(
                            "driver=file,filename={},node-name=f,aio={aio},cache.direct=on",
                            path.display()
                        )
                    },
                );
                command.args(["--blockdev", &node, "--object", "iothread,id=t0", "--export"]);
                command.arg(format!(
                    "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},\
                     writable=on,num-queues={queues},iothread=t0",
                    socket.display()
                ));
                command
            }
        };
        Running::spawn(&mut command, socket, folder)
            .with_context(|| format!("cannot start {}", self.name))
    }
}

/// Runs on the server's cores and never outlives this process.
fn contained(lab: &Lab, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "taskset", "-c", &lab.server_list()]).arg(program);
    command
}

/// A server that runs. Dropping this ends it, unless someone else started it.
#[derive(Debug)]
pub(crate) struct Running {
    child: Option<Child>,
    pid: u32,
    socket: PathBuf,
    folder: TempDir,
}

impl Running {
    fn spawn(command: &mut Command, socket: PathBuf, folder: TempDir) -> Result<Self> {
        let log = |name| File::create(folder.path().join(name));
        let child = command
            .stdin(Stdio::null())
            .stdout(log("out")?)
            .stderr(log("err")?)
            .spawn()
            .with_context(|| format!("no {:?}", command.get_program()))?;
        let mut running = Self { pid: child.id(), child: Some(child), socket, folder };
        let deadline = Instant::now() + START;
        while !running.socket.exists() {
            let ended = running.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if let Some(status) = ended {
                let err = running.log("err");
                let says = err.lines().find(|line| line.contains("error"));
                bail!("{status}: {}", says.or(err.lines().next()).unwrap_or("no message"));
            }
            if Instant::now() > deadline {
                bail!("no socket after {} s: {}", START.as_secs(), running.log("err"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(running)
    }

    /// Ours, with the disks of a file; ready once `socket` is there, that of the last disk.
    pub(crate) fn from_file(lab: &Lab, file: &Path, socket: PathBuf) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ringway-bench-").tempdir()?;
        let mut command = contained(lab, &lab.daemon);
        command.arg("serve").arg("--config").arg(file);
        command.args(lab.common.daemon_args.split_whitespace());
        Self::spawn(&mut command, socket, folder).context("cannot start the daemon")
    }

    /// Ours, or QEMU's, with an image of either format, through the page cache or past it.
    pub(crate) fn of_image(
        lab: &Lab,
        ours: bool,
        image: &Path,
        qcow2: bool,
        direct: bool,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ringway-bench-").tempdir()?;
        let socket = folder.path().join("disk.sock");
        let program = if ours { &lab.daemon } else { &lab.common.qsd };
        let mut command = contained(lab, program);
        if ours {
            command.arg("serve").arg(image).arg("--socket").arg(&socket);
            command.args(["--cache", if direct { "none" } else { "writeback" }, "--format"]);
            command.arg(if qcow2 { "qcow2" } else { "raw" });
            command.args(lab.common.daemon_args.split_whitespace());
        } else {
            let name = image.display();
            let cache = if direct { ",cache.direct=on" } else { "" };
            let file =
                |node| format!("driver=file,filename={name},node-name={node},aio=io_uring{cache}");
            if qcow2 {
                command.args(["--blockdev", &file("f0"), "--blockdev"]);
                command
                    .arg(format!("driver=qcow2,file=f0,node-name=f,l2-cache-size=67108864{cache}"));
            } else {
                command.args(["--blockdev", &file("f")]);
            }
            command.args(["--object", "iothread,id=t0", "--export"]).arg(format!(
                "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable=on,\
                 num-queues=1,iothread=t0",
                socket.display()
            ));
        }
        Self::spawn(&mut command, socket, folder)
    }

    /// Any program, with the options that have it listen at a socket.
    pub(crate) fn of_program(
        lab: &Lab,
        program: &Path,
        options: impl FnOnce(&Path) -> Vec<String>,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ringway-bench-").tempdir()?;
        let socket = folder.path().join("disk.sock");
        let mut command = contained(lab, program);
        command.args(options(&socket));
        Self::spawn(&mut command, socket, folder)
            .with_context(|| format!("cannot start {}", program.display()))
    }

    /// Memory it has, in KiB.
    pub(crate) fn resident_kib(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        kib.context("no VmRSS")?.parse().context("VmRSS is a number")
    }

    /// Threads and descriptors it has.
    pub(crate) fn held(&self) -> Result<[usize; 2]> {
        let count = |what| -> Result<usize> {
            Ok(std::fs::read_dir(format!("/proc/{}/{what}", self.pid))?.count())
        };
        Ok([count("task")?, count("fd")?])
    }

    /// Whoever listens at `socket`; the kernel knows the process.
    fn adopt(socket: &Path, folder: TempDir) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("no one listens at {}", socket.display()))?;
        let pid =
            ringway_bench::peer::server(&stream).context("its process cannot be seen from here")?;
        Ok(Self { child: None, pid, socket: socket.to_path_buf(), folder })
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub(crate) const fn pid(&self) -> u32 {
        self.pid
    }

    /// What the kernel has counted of it.
    pub(crate) fn usage(&self) -> Result<Usage> {
        Usage::of(self.pid)
    }

    /// The engine that our daemon says it uses.
    pub(crate) fn engine(&self) -> Option<String> {
        let out = self.log("out");
        let word = out.split_once("engine ")?.1.split_whitespace().next()?;
        Some(word.to_owned())
    }

    /// What it said last, for error messages.
    pub(crate) fn last_words(&self) -> String {
        let err = self.log("err");
        err.lines().next_back().map_or("the server said nothing".into(), |line| {
            format!("the server's last words: {line}")
        })
    }

    /// All it said.
    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(child) = self.child.as_mut() else { return };
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + END;
        while Instant::now() < deadline {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}
