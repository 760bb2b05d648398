//! The process that starts processes: the daemon itself may not, in its sandbox.
//!
//! It is forked before there is a sandbox or a second thread, hears the daemon and nobody else, and
//! starts one thing: this very program, to serve one disk as it is told. Sandbox, user and folders are those that
//! the daemon was started with, whatever it says later. It ends when the daemon is dead.
//!
//! Until the daemon has started, disks are opened with the rights it was started with. What is added
//! later is opened as the daemon's user (`--user`), so that a daemon in wrong hands gains nothing.

use super::cgroups::{Cgroup, Cgroups};
use super::files::ServedFiles;
use super::lock;
use super::process::{POLL_EVERY, Process};
use super::protocol::{DiskSetup, ForAll, ProcessSetup};
use crate::host::wire::{Asker, LOST};
use crate::host::{Event, Parent, leave_no_zombie, reason, settle};
use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ringway_control::config::DaemonArgs;
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_terminal::logging;
use ringway_terminal::reasons::in_full;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// What the daemon asks for.
#[derive(Debug, Deserialize, Serialize)]
enum SpawnerRequest {
    /// Start a process for a new disk.
    Start(Box<DiskSetup>),
    /// Start one for a disk whose process has ended, which serves it from these files and no others.
    Again { number: u64, files: ServedFiles },
    /// Say how its process has ended, if it has.
    End { number: u64 },
    /// The disk is not served any more.
    Forget { number: u64 },
    /// From now on disks are those that the daemon names as the user that it has become.
    Started,
}

#[derive(Debug, Deserialize, Serialize)]
enum SpawnerAnswer {
    /// Comes with the line to the process.
    Begun {
        number: u64,
        pid: u32,
    },
    /// How it ended; `None` if it has not.
    Ended(Option<String>),
    Done,
    Refused(String),
}

/// What the spawner knows of one disk.
struct KnownDisk {
    setup: ProcessSetup,
    cgroup: Option<Cgroup>,
    /// Where its front-ends come in, if the service manager has opened that.
    socket: Option<OwnedFd>,
    child: Child,
}

/// The daemon's line to the spawner.
pub(crate) struct Spawner {
    /// Held from a question to its answer, which never takes long.
    line: Mutex<Asker>,
    /// The same line, for whoever waits for its end.
    end: OwnedFd,
    /// Why processes have no cgroups of their own.
    pub(crate) no_cgroups: Option<String>,
}

impl Spawner {
    /// Starts it, for a daemon with these words, to which disks may be added later if it `adds` them. There must
    /// be no other thread.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn fork(log: &LogArgs, options: &DaemonArgs, adds: bool) -> anyhow::Result<Self> {
        let (ours, its) = line(SocketType::SEQPACKET).context("cannot make a line to a process")?;
        // Whoever is started from here on begins where this process is.
        let cgroups = Cgroups::prepare();
        let no_cgroups = cgroups.as_ref().err().map(in_full);
        leave_no_zombie();
        let parent = Parent::this();
        // SAFETY: there is one thread, so the child may do anything the parent may.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error()).context("cannot start a process"),
            0 => {
                drop(ours);
                let _ = rustix::thread::set_name(c"ringway-spawner");
                settle(&[Some(its.as_raw_fd()), parent.fd()], true);
                logging::after_fork();
                let (known, forgotten) = (BTreeMap::new(), Vec::new());
                let cgroups = cgroups.map_err(|error| in_full(&error));
                let (for_all, started) = (ForAll::of(options), false);
                Serving { log, for_all, adds, cgroups, started, known, forgotten, last: 0 }
                    .serve(&its, parent);
                // SAFETY: ends the process. What belongs to the daemon is not put in order here.
                unsafe { libc::_exit(0) }
            }
            _ => {
                let end = ours.try_clone().context("cannot make a line to a process")?;
                Ok(Self { line: Mutex::new(Asker::new(ours)), end, no_cgroups })
            }
        }
    }

    /// Hangs up when the spawner has ended.
    pub(crate) fn end(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    fn ask(&self, request: &SpawnerRequest) -> anyhow::Result<(SpawnerAnswer, Option<OwnedFd>)> {
        self.ask_with(request, None)
    }

    fn ask_with(
        &self,
        request: &SpawnerRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(SpawnerAnswer, Option<OwnedFd>)> {
        let gone = || {
            anyhow!(
                "the process that starts others for this daemon has ended (ringway-spawner): start \
                 the daemon anew"
            )
        };
        match lock(&self.line).ask(request, fd) {
            Ok((SpawnerAnswer::Refused(why), _)) => Err(anyhow!(why)),
            Ok(answer) => Ok(answer),
            Err(error) if error.is_gone() => Err(gone()),
            Err(error) => Err(error.into()),
        }
    }

    /// Starts the process of a new disk, whose front-ends come to `socket` if that was passed to the daemon; gives
    /// back the number of the disk here.
    pub(super) fn start(
        &self,
        setup: DiskSetup,
        socket: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(u64, Process)> {
        self.begin(&SpawnerRequest::Start(Box::new(setup)), socket)
    }

    /// Starts the process of a disk again.
    pub(super) fn again(&self, number: u64, files: ServedFiles) -> anyhow::Result<Process> {
        self.begin(&SpawnerRequest::Again { number, files }, None).map(|(_, process)| process)
    }

    fn begin(
        &self,
        request: &SpawnerRequest,
        socket: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<(u64, Process)> {
        let (SpawnerAnswer::Begun { number, pid }, line) = self.ask_with(request, socket)? else {
            bail!("the process that starts others answers something else");
        };
        let process = line.context(LOST).and_then(|line| Process::new(pid, line.into()));
        let process = process.inspect_err(|_| {
            // It ends, as its line has been closed.
            if let SpawnerRequest::Start(_) = request {
                self.forget(number);
            }
        })?;
        Ok((number, process))
    }

    /// Waits for the end of a process that has closed its line: how it ended.
    pub(super) fn end_of(&self, number: u64, timeout: Duration) -> anyhow::Result<String> {
        let begun = Instant::now();
        loop {
            match self.ask(&SpawnerRequest::End { number })? {
                (SpawnerAnswer::Ended(Some(how)), _) => return Ok(how),
                _ if begun.elapsed() > timeout => {
                    return Ok("it waits for its disk, and cannot end".into());
                }
                // Nobody unparks this thread.
                _ => std::thread::park_timeout(POLL_EVERY),
            }
        }
    }

    pub(super) fn forget(&self, number: u64) {
        // Without the spawner there is nothing to forget.
        let _ = self.ask(&SpawnerRequest::Forget { number });
    }

    /// The daemon has started.
    ///
    /// # Errors
    /// That the spawner is gone.
    pub(crate) fn started(&self) -> anyhow::Result<()> {
        self.ask(&SpawnerRequest::Started).map(drop)
    }
}

/// How its processes log: as the daemon was told on its command line.
fn log_words(log: &LogArgs) -> Vec<String> {
    let mut words = vec!["-v".to_owned(); log.verbose.into()];
    if log.quiet {
        words.push("-q".into());
    }
    if let Some(format) = log.log_format.and_then(|format| format.to_possible_value()) {
        words.push(format!("--log-format={}", format.get_name()));
    }
    words
}

fn line(kind: SocketType) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

struct Serving<'a> {
    log: &'a LogArgs,
    for_all: ForAll,
    adds: bool,
    /// Or why there are none.
    cgroups: Result<Cgroups, String>,
    started: bool,
    known: BTreeMap<u64, KnownDisk>,
    /// They end, and nobody asks how: each is waited for here, so that no record of it stays.
    forgotten: Vec<(Child, Option<Cgroup>)>,
    last: u64,
}

impl Serving<'_> {
    /// Until the daemon is dead. Its processes find that out themselves.
    fn serve(mut self, line: &OwnedFd, mut parent: Parent) {
        let ends = ends_of_children();
        loop {
            // Without the descriptor they are waited for with each request.
            self.reap();
            let answer = match parent.next(line, ends.as_ref().map(AsFd::as_fd)) {
                Event::Request(request, fd) => self.handle(request, fd),
                Event::Unreadable(error) => Err(error.into()),
                Event::Other => {
                    // One may stand for several.
                    let _ = ends.as_ref().map(SignalFd::read_signal);
                    continue;
                }
                Event::Dead => return,
            };
            let (answer, fd) =
                answer.unwrap_or_else(|error| (SpawnerAnswer::Refused(reason(&error)), None));
            // If nobody takes it, the daemon is dead, or about to be.
            let _ = parent.answer(line, &answer, fd.as_ref().map(AsFd::as_fd));
        }
    }

    /// Waits for forgotten children that have ended.
    fn reap(&mut self) {
        self.forgotten.retain_mut(|(child, cgroup)| match child.try_wait() {
            Ok(None) => true,
            // Its helper may take a moment longer.
            _ => cgroup.as_ref().is_some_and(|cgroup| !cgroup.remove()),
        });
    }

    fn handle(
        &mut self,
        request: SpawnerRequest,
        socket: Option<OwnedFd>,
    ) -> anyhow::Result<(SpawnerAnswer, Option<OwnedFd>)> {
        match request {
            SpawnerRequest::Start(disk) => {
                if self.started && socket.is_some() {
                    bail!("sockets are passed to a daemon when it starts");
                }
                if self.started && !self.adds {
                    bail!("this daemon was started without --control: no disks are added to it");
                }
                let number = self.last + 1;
                let cgroup = self.cgroup(number, disk.memory_max.map(|Size(bytes)| bytes))?;
                let setup = self.for_all.with(*disk, self.started);
                let begun = begin(&setup, socket.as_ref(), cgroup.as_ref(), self.log);
                let (child, line) = begun.inspect_err(|_| {
                    cgroup.iter().for_each(|cgroup| _ = cgroup.remove());
                })?;
                self.last = number;
                let pid = child.id();
                self.known.insert(number, KnownDisk { setup, cgroup, socket, child });
                Ok((SpawnerAnswer::Begun { number, pid }, Some(line)))
            }
            SpawnerRequest::Again { number, files } => {
                let log = self.log;
                let known = self.get(number)?;
                if known.child.try_wait()?.is_none() {
                    bail!("process {} has not ended yet", known.child.id());
                }
                known.setup.files = files;
                let (child, line) =
                    begin(&known.setup, known.socket.as_ref(), known.cgroup.as_ref(), log)?;
                known.child = child;
                Ok((SpawnerAnswer::Begun { number, pid: known.child.id() }, Some(line)))
            }
            SpawnerRequest::End { number } => {
                let ended = self.get(number)?.child.try_wait()?;
                Ok((SpawnerAnswer::Ended(ended.map(in_words)), None))
            }
            SpawnerRequest::Forget { number } => {
                self.forgotten
                    .extend(self.known.remove(&number).map(|known| (known.child, known.cgroup)));
                Ok((SpawnerAnswer::Done, None))
            }
            SpawnerRequest::Started => {
                self.started = true;
                Ok((SpawnerAnswer::Done, None))
            }
        }
    }

    /// A disk's own, if there can be one; without, it may not have a limit.
    fn cgroup(&self, number: u64, memory_max: Option<u64>) -> anyhow::Result<Option<Cgroup>> {
        match &self.cgroups {
            Ok(cgroups) => cgroups.make(number, memory_max).map(Some),
            Err(_) if memory_max.is_none() => Ok(None),
            Err(why) => bail!(
                "memory-max needs a cgroup for the process of this disk, and this daemon may make none: \
                 {why}. docs/operating.md says how it is given one"
            ),
        }
    }

    fn get(&mut self, number: u64) -> anyhow::Result<&mut KnownDisk> {
        self.known.get_mut(&number).with_context(|| format!("there is no disk {number} here"))
    }
}

/// Readable when a child has ended.
fn ends_of_children() -> Option<SignalFd> {
    let set = SigSet::from(Signal::SIGCHLD);
    set.thread_block().ok()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).ok()
}

fn begin(
    setup: &ProcessSetup,
    socket: Option<&OwnedFd>,
    cgroup: Option<&Cgroup>,
    log: &LogArgs,
) -> anyhow::Result<(Child, OwnedFd)> {
    let (ours, its) = line(SocketType::STREAM).context("cannot make a line to a process")?;
    let (number, socket) = (its.as_raw_fd(), socket.map(AsRawFd::as_raw_fd));
    let setup = &ProcessSetup { socket, ..setup.clone() };
    let door = cgroup.map(Cgroup::door).transpose()?;
    // What runs now, whatever its file is by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ringway").args(["serve", "--isolated", &number.to_string()]).args(log_words(log));
    // The daemon tells its service manager.
    command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    let prepare = move || {
        for number in [Some(number), socket].into_iter().flatten() {
            // SAFETY: they are open: `its` is dropped after the child was started, and the socket is kept.
            let its = unsafe { BorrowedFd::borrow_raw(number) };
            fcntl_setfd(its, FdFlags::empty())?;
        }
        // Before it has any memory of its own, and with the rights of this process.
        door.iter().try_for_each(|door| rustix::io::write(door, b"0").map(drop))?;
        Ok(())
    };
    // SAFETY: this process has one thread, so its child may do anything.
    unsafe { command.pre_exec(prepare) };
    let mut child = command.spawn().context("cannot start a process for the disk")?;
    drop(its);
    let mut stream = UnixStream::from(ours);
    let mut bytes = serde_json::to_vec(setup).context("its names must be valid UTF-8")?;
    bytes.push(b'\n');
    if let Err(error) = stream.write_all(&bytes) {
        // It has gone again already.
        let _ = child.wait();
        return Err(error).context("cannot tell the process of the disk what to serve");
    }
    Ok((child, stream.into()))
}

fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (_, Some(libc::SIGKILL)) => "killed by signal 9: by hand, or for lack of memory".into(),
        (_, Some(signal)) => format!("killed by signal {signal}"),
        _ => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_control::config::DiskArgs;

    /// What a daemon in wrong hands gets by each message after the start, if no disks are added to it.
    #[test]
    fn e40_who_adds_no_disks_has_no_processes_started() {
        let log = LogArgs::default();
        let mut serving = Serving {
            log: &log,
            for_all: ForAll::of(&DaemonArgs::default()),
            adds: false,
            cgroups: Err("there are none".into()),
            started: false,
            known: BTreeMap::new(),
            forgotten: Vec::new(),
            last: 0,
        };
        let (disk, name) = (DiskArgs::default(), "x".to_owned());
        let (turn, memory_max, log_format, log_level) = (0, None, None, None);
        let disk = DiskSetup { disk, turn, memory_max, name, log_format, log_level };
        let requests = [
            (SpawnerRequest::Start(Box::new(disk)), "without --control"),
            (SpawnerRequest::Again { number: 1, files: ServedFiles::default() }, "no disk 1"),
            (SpawnerRequest::End { number: 1 }, "no disk 1"),
        ];
        assert!(serving.handle(SpawnerRequest::Started, None).is_ok());
        for (request, words) in requests {
            let error = serving.handle(request, None).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(serving.handle(SpawnerRequest::Forget { number: 1 }, None).is_ok());
        assert!(serving.known.is_empty() && serving.forgotten.is_empty());
    }

    /// A daemon in wrong hands asks for a second process of a disk, to serve other files, and names disks that it has
    /// forgotten.
    #[test]
    fn e61_a_disk_whose_process_lives_gets_no_other_one() {
        let log = LogArgs::default();
        let for_all = ForAll::of(&DaemonArgs::default());
        let (disk, name) = (DiskArgs::default(), "x".to_owned());
        let (turn, memory_max, log_format, log_level) = (0, None, None, None);
        let disk = DiskSetup { disk, turn, memory_max, name, log_format, log_level };
        let setup = for_all.with(disk, true);
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let known = BTreeMap::from([(3, KnownDisk { setup, cgroup: None, socket: None, child })]);
        let mut serving = Serving {
            log: &log,
            for_all,
            adds: true,
            cgroups: Err("there are none".into()),
            started: true,
            known,
            forgotten: Vec::new(),
            last: 3,
        };
        let other = r#"{"images": [{"Device": 7}], "others": []}"#;
        let files: ServedFiles = serde_json::from_str(other).unwrap();
        let before = format!("{:?}", serving.known[&3].setup.files);
        for (number, words) in [(3, "has not ended yet"), (4, "no disk 4")] {
            let again = SpawnerRequest::Again { number, files: files.clone() };
            let error = serving.handle(again, None).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let known = serving.known.get_mut(&3).unwrap();
        assert_eq!((known.child.id(), format!("{:?}", known.setup.files)), (pid, before));
        known.child.kill().unwrap();
        known.child.wait().unwrap();
        assert!(serving.handle(SpawnerRequest::Forget { number: 3 }, None).is_ok());
        let again = SpawnerRequest::Again { number: 3, files };
        assert!(serving.handle(again, None).is_err(), "it is known no more");
    }
}
