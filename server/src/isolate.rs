//! Disks with a process of their own: what a guest makes this host pay for (its memory, a fault in
//! what serves it) is paid by that process, and its end costs that disk alone.
//!
//! ```text
//! daemon                            spawner (forked first)     one process for each such disk
//!   spawner.start(order) ── Start ──▶  ringway serve --isolated N ──▶  opens, sandbox, listens
//!                        ◀── line ──                                    Ready {facts}
//!   isolated.ask(request) ───────────── line ──────────────────────▶  carries it out
//!                                       end of the line: it has ended, and is started again
//! ```
//!
//! The daemon has no guest of theirs. It keeps their numbers, forwards what its control socket is
//! asked for, starts them again, and waits for them at the end. If it is killed they end at once, as
//! if they were its threads, so that the next one can serve the same disks. Why it is built this
//! way: docs/adr/0019-a-process-for-a-disk.md.

mod cgroups;
mod entry;
mod files;
mod inside;
mod known;
mod mouth;
mod pending;
mod process;
mod process_log;
mod protocol;
mod spawner;

use super::bell::{Bell, event};
use super::configured::DiskWords;
use super::departure::Departure;
use super::events::Events;
use super::limits::apart_has_no_group;
use super::served::lock;
use anyhow::{Context, bail};
use pending::Pending;
use process::{POLL_EVERY, Process};
use process_log::ProcessLog;
use protocol::{DiskSetup, ToProcess};
use ringway_control::config::{Claim, DaemonArgs, DiskSpec, LimitArgs, Location, Place};
use ringway_control::log::{LogFormat, LogLevel};
use ringway_control::protocol::{DiskFacts, DiskStatsOf, Happened};
use ringway_terminal::reasons::in_full;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use entry::run;
pub(crate) use files::ServedFiles;
pub(crate) use inside::Inside;
pub(crate) use mouth::Mouth;
pub(crate) use spawner::Spawner;

/// Seconds to wait for an image, unless the user says so: as for one who was killed. Then for one of a Ceph
/// cluster, which misses who has died on another host after 30.
const LOCK_WAIT: [u32; 2] = [30, 45];
/// How long it may take to carry out a change, which may wait for the disk.
pub(crate) const CHANGE_MAX: Duration = Duration::from_secs(100);
/// How long it may take to end: it waits for its disk itself, for 30 seconds, and then for workers.
const END_MAX: Duration = Duration::from_secs(60);
/// Pauses before a process is started again: they double, and begin anew after a long life.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
const LONG_LIFE: Duration = Duration::from_secs(60);

/// What the configuration says of the log.
pub(crate) type LogWords = (Option<LogFormat>, Option<LogLevel>);

/// A disk that another process serves.
pub(crate) struct Isolated {
    /// Its number: never given to another disk of this daemon.
    pub(crate) id: u64,
    /// As far as it is known: [`Isolated::claim`].
    claim: Mutex<Claim>,
    /// It was asked for a snapshot, which changes the names of files, perhaps long after it was said to have
    /// failed.
    renames: AtomicBool,
    /// Its process was started again, and has made its socket anew.
    listens_anew: AtomicBool,
    /// The words it is served by.
    pub(crate) words: Mutex<DiskWords>,
    /// Its number at the spawner.
    number: u64,
    /// As they were told last.
    facts: Mutex<DiskFacts>,
    /// What it was served from last: it is served again from nothing else.
    files: Mutex<ServedFiles>,
    /// The one there is, unless it is being started again.
    process: Mutex<Option<Arc<Process>>>,
    restarts: AtomicU64,
    paused: AtomicBool,
    /// Those that were changed while it ran.
    limits: Mutex<Option<LimitArgs>>,
    /// Whether it was told to go, and how: told once.
    leaving: OnceLock<Leaving>,
    /// What its last process said of its end; nothing if it had ended before it could.
    departure: Mutex<Option<Departure>>,
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
    log: ProcessLog,
}

/// How a disk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Its daemon ends, or serves it by other words: a clone stays.
    Ends,
    /// It is removed, and with it a clone that is ephemeral.
    Removed,
}

/// One that was started and is not served yet.
pub(crate) struct Starting {
    process: Arc<Process>,
    number: u64,
    spec: DiskSpec,
}

impl Starting {
    /// Starts the process of a disk. `turn` is how many workers others have on the CPUs they share.
    ///
    /// # Errors
    /// That this disk cannot have one, or what the host says.
    pub(crate) fn new(
        spawner: &Spawner,
        spec: DiskSpec,
        options: &DaemonArgs,
        log: LogWords,
        turn: usize,
    ) -> anyhow::Result<Self> {
        let socket = match &spec.place {
            Place::Socket(_) => None,
            Place::Inherited { fd, listens: true, .. } => Some(fd.as_fd()),
            _ => bail!(
                "a disk with a process of its own is served at a socket file, or at a listening socket that is \
                 passed to the daemon: name one (--socket), or leave isolate out"
            ),
        };
        if spec.words.limit_group.is_some() {
            bail!(apart_has_no_group(&source_name(&spec)));
        }
        let rule = spec.access.clone().or(&options.each.access);
        let mut disk = (*spec.words).clone();
        (disk.socket_mode, disk.socket_group, disk.isolate) = (rule.mode, rule.group, None);
        let memory_max = disk.memory_max.take();
        // The daemon before may have been killed just now, and its processes not have noticed yet.
        disk.lock_wait.get_or_insert(LOCK_WAIT[usize::from(spec.is_of_cluster())]);
        let (log_format, log_level) = log;
        let name = source_name(&spec);
        let setup = DiskSetup { disk, turn, memory_max, name, log_format, log_level };
        let (number, process) = spawner.start(setup, socket)?;
        Ok(Self { process: Arc::new(process), number, spec })
    }

    /// Waits until front-ends could connect.
    ///
    /// # Errors
    /// What is wrong with the disk; nothing was created or changed then.
    pub(crate) fn wait(
        self,
        id: u64,
        locate: impl Fn(&Path) -> Location,
        spawner: &Spawner,
    ) -> anyhow::Result<Isolated> {
        let (facts, files) = self.process.ready().inspect_err(|_| spawner.forget(self.number))?;
        // Now that its files are there.
        let claim = self.spec.claim(locate);
        let log = ProcessLog::new(&facts.image);
        Ok(Isolated {
            id,
            claim: Mutex::new(claim),
            renames: AtomicBool::new(false),
            listens_anew: AtomicBool::new(false),
            words: Mutex::new(DiskWords::of(&self.spec, false)),
            number: self.number,
            facts: Mutex::new(DiskFacts { id, ..facts }),
            files: Mutex::new(files),
            process: Mutex::new(Some(self.process)),
            restarts: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            limits: Mutex::default(),
            leaving: OnceLock::new(),
            departure: Mutex::default(),
            stop: event()?,
            thread: Mutex::default(),
            log,
        })
    }

    /// The disk.
    pub(crate) fn spec(&self) -> &DiskSpec {
        &self.spec
    }
}

impl Isolated {
    /// Lets it serve, and starts it again whenever it ends, on a thread of its own.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn launch(
        self: &Arc<Self>,
        spawner: &Arc<Spawner>,
        bell: &Arc<Bell>,
        events: &Arc<Events>,
    ) -> anyhow::Result<()> {
        let process = lock(&self.process).clone().context("its process has not been started")?;
        process.go(false, None)?;
        let (disk, spawner, bell) = (Arc::clone(self), Arc::clone(spawner), Arc::clone(bell));
        let events = Arc::clone(events);
        let name = format!("disk-{}", self.id);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            disk.attend(&spawner, process, &events);
            disk.tell_if_clone_stays();
            spawner.forget(disk.number);
            drop(disk);
            bell.ring();
        })?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// It is not to be served after all: what was made for it goes again.
    pub(crate) fn abandon(&self, spawner: &Spawner) {
        let process = lock(&self.process).take();
        process.iter().for_each(|process| process.give_up());
        // Closes the line, and the process takes away what it has made.
        drop(process);
        let _ = spawner.end_of(self.number, END_MAX);
        spawner.forget(self.number);
    }

    fn attend(&self, spawner: &Spawner, mut process: Arc<Process>, events: &Events) {
        let tell = |happened| events.tell(Some((self.id, &self.image())), happened);
        let mut pause = PAUSE.0;
        loop {
            let begun = Instant::now();
            // One that ends without a word leaves none of its predecessor's.
            let files = |files| *lock(&self.files) = files;
            let departure = process.hear(|what| self.log.odd(what), tell, files);
            *lock(&self.departure) = departure;
            let pid = process.pid;
            *lock(&self.process) = None;
            let how = spawner.end_of(self.number, END_MAX);
            if self.is_leaving() {
                return;
            }
            if begun.elapsed() >= LONG_LIFE {
                pause = PAUSE.0;
            }
            let why = how.unwrap_or_else(|error| in_full(&error));
            self.log.ended(pid, &why);
            tell(Happened::ProcessEnded { process: pid, why });
            process = loop {
                if self.rest(pause) {
                    return;
                }
                pause = (pause * 2).min(PAUSE.1);
                match self.begin_again(spawner) {
                    Ok(process) => break process,
                    Err(_) if self.is_leaving() => return,
                    Err(error) => self.log.not_yet(&error),
                }
            };
            self.log.again(process.pid);
            tell(Happened::Restarted { process: process.pid });
        }
    }

    fn begin_again(&self, spawner: &Spawner) -> anyhow::Result<Arc<Process>> {
        let files = lock(&self.files).clone();
        let process = Arc::new(spawner.again(self.number, files)?);
        *lock(&self.process) = Some(Arc::clone(&process));
        let begun = || -> anyhow::Result<()> {
            if self.is_leaving() {
                bail!("it is being removed");
            }
            let (facts, files) = process.ready()?;
            *lock(&self.facts) = DiskFacts { id: self.id, ..facts };
            *lock(&self.files) = files;
            let limits = lock(&self.limits).map(Box::new);
            self.restarts.fetch_add(1, SeqCst);
            self.listens_anew.store(true, SeqCst);
            let goes = process.go(self.paused.load(SeqCst), limits);
            if self.is_leaving() {
                // It may have heard that before, and have ended: what it has said of its end is heard next.
                let _ = process.say(&ToProcess::Stop(self.is_removed()));
                return Ok(());
            }
            goes
        };
        begun().inspect_err(|_| *lock(&self.process) = None)?;
        Ok(process)
    }

    /// True if it is to end meanwhile.
    fn rest(&self, time: Duration) -> bool {
        let stop = self.stop.as_fd();
        let time = Timespec::try_from(time).ok();
        let mut polled = [PollFd::new(&stop, PollFlags::IN)];
        // Interrupted is as good as rested.
        let _ = poll(&mut polled, time.as_ref());
        !polled[0].revents().is_empty() || self.is_leaving()
    }

    /// Tells it to end: in order, after what is in flight. Whoever does has begun that ([`Isolated::begin_to_leave`]).
    pub(crate) fn stop(&self) {
        // One write can not fill the counter.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let process = lock(&self.process).clone();
        if let Some(process) = process {
            match process.is_ready() {
                // One that hears nothing any more is given up in the end.
                true => drop(process.say(&ToProcess::Stop(self.is_removed()))),
                false => process.give_up(),
            }
        }
    }

    /// It was told to go, or another one has told it before.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.get().is_some()
    }

    fn is_removed(&self) -> bool {
        self.leaving.get() == Some(&Leaving::Removed)
    }

    /// True for whoever is first, who ends it.
    pub(crate) fn begin_to_leave(&self, how: Leaving) -> bool {
        self.leaving.set(how).is_ok()
    }

    /// Nobody waits for it any more.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.process).is_none()
    }

    /// Waits for its end.
    pub(crate) fn join(&self) -> Departure {
        let Some(thread) = lock(&self.thread).take() else {
            return Departure { clear: true, ..Departure::default() };
        };
        let begun = Instant::now();
        while !thread.is_finished() {
            if begun.elapsed() > END_MAX {
                tracing::error!(disk = self.image(), "its process does not end: it is left behind");
                if let Some(process) = &*lock(&self.process) {
                    process.give_up();
                }
                return self.without_a_word();
            }
            // Nobody unparks this thread.
            std::thread::park_timeout(POLL_EVERY);
        }
        let _ = thread.join();
        lock(&self.departure).unwrap_or_else(|| self.without_a_word())
    }

    /// How one has gone whose process has said nothing of its end: entries of its image may be in the state folder
    /// alone.
    fn without_a_word(&self) -> Departure {
        let facts = lock(&self.facts);
        Departure { unsaved: facts.qcow2.is_some() && !facts.read_only, ..Departure::default() }
    }

    /// What is said of one that was not left in order.
    pub(crate) fn not_in_order(&self) -> String {
        format!("{}: its process could not end it in order", self.image())
    }

    /// Its process deletes the clone of a disk that is removed, unless it has ended before it was told so.
    fn tell_if_clone_stays(&self) {
        let told = lock(&self.departure).is_some();
        if self.is_removed() && !told && self.is_ephemeral() {
            tracing::error!(
                disk = self.image(),
                "its clone is ephemeral and was not deleted, as its process had ended. Delete it: the next disk of \
                 that name would be served what it holds"
            );
        }
    }

    /// Asks its process, which knows one disk of the number 0. The answer comes later.
    pub(crate) fn ask(&self, request: Value) -> Pending {
        let process = lock(&self.process).clone();
        let answer = process.and_then(|process| process.ask(request));
        Pending { image: self.image(), answer }
    }

    /// What is said of one whose process does not say anything.
    pub(crate) fn silent_stats(&self) -> DiskStatsOf {
        let facts = self.facts(None);
        DiskStatsOf {
            id: self.id,
            image: facts.image,
            size: facts.size,
            engine: facts.engine,
            cache: facts.cache,
            path: facts.path,
            state: facts.state,
            connected: facts.connected,
            ..DiskStatsOf::default()
        }
    }

    /// Has it print its counts.
    pub(crate) fn tell_counts(&self) {
        let process = lock(&self.process).clone();
        process.iter().for_each(|process| process.tell_counts());
    }
}

/// The image of a disk, as it was named.
fn source_name(spec: &DiskSpec) -> String {
    let image = spec.words.image.as_deref();
    image.map(|image| image.display().to_string()).unwrap_or_default()
}
