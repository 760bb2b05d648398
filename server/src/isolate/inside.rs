//! The process of one disk, from inside: a daemon with one disk, whose control socket is a line to
//! the daemon that has it.

use super::files::ServedFiles;
use super::mouth::Mouth;
use super::process::{Ear, hear};
use super::protocol::{FromProcess, ToProcess};
use crate::control::{carry_out, facts};
use crate::departure::{Departure, Watch};
use crate::disks::Disks;
use crate::limits::Change;
use anyhow::{Context, bail};
use ringway_control::config::Plan;
use ringway_control::protocol::DiskFacts;
use ringway_disk::Source;
use ringway_export::WarningLimit;
use ringway_terminal::reasons::in_full;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::BufReader;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, LazyLock};

/// The line to the daemon that has the disk.
pub(crate) struct Inside {
    /// The disk, for log lines.
    pub(crate) name: String,
    /// Whether the disk has come after the daemon had become its user.
    pub(crate) added: bool,
    /// Whether its files may have to change.
    pub(crate) commanded: bool,
    /// Whether requests are timed.
    pub(crate) sampled: bool,
    /// What its disk was served from before.
    pub(super) files: ServedFiles,
    pub(super) ear: BufReader<Ear>,
    pub(super) mouth: Arc<Mouth>,
}

impl Inside {
    /// Who is told from which files the disk is served.
    pub(crate) fn mouth(&self) -> Arc<Mouth> {
        Arc::clone(&self.mouth)
    }

    /// Refuses a name that leads elsewhere than to what its disk was served from before, before anything is opened or
    /// made there.
    ///
    /// # Errors
    /// That it does.
    pub(crate) fn check_name(&self, plan: &Plan) -> anyhow::Result<()> {
        let paths = plan.disks.iter().filter_map(|disk| match &disk.source {
            Source::Path(path) => Some(path),
            _ => None,
        });
        paths.into_iter().try_for_each(|path| self.files.check_name(path))
    }

    /// Says that front-ends can connect, and waits for the word to serve them, or to let them wait.
    ///
    /// # Errors
    /// That there is none: what was made is to go again.
    pub(crate) fn wait_for_go(&mut self, disks: &Disks) -> anyhow::Result<()> {
        let served = disks.list().into_iter().next().context("there is no disk")?;
        self.files.check(&served)?;
        let files = ServedFiles::of(&served)?;
        let process = Some(std::process::id());
        let facts = DiskFacts { process, ..facts(&served) };
        self.mouth.say(&FromProcess::Ready { facts: Box::new(facts), files });
        match hear(&mut self.ear)? {
            Some(ToProcess::Go { paused, limits }) => {
                if let Some(limits) = &limits {
                    disks.limit(&served, &Change { limits, lift: true, group: None })?;
                }
                if paused {
                    served.export.pause()?;
                }
                Ok(())
            }
            Some(ToProcess::Stop(removed)) => {
                // Its disk is removed while it is started again: as after the word to serve.
                disks.removed.store(removed, SeqCst);
                let watch = Watch::begin([&*served]);
                let stopped = disks.stop_all();
                let departure = Departure { unsaved: stopped.is_err(), ..watch.end([&*served]) };
                self.mouth.say(&FromProcess::Stopped(departure));
                stopped?;
                bail!("it was told to stop before it was served")
            }
            _ => bail!("the daemon does not go on"),
        }
    }

    /// Does what the daemon says, on a thread of its own; `stop` is rung when it is to end.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn attend(
        self,
        disks: &Arc<Disks>,
        stop: &Arc<OwnedFd>,
    ) -> std::io::Result<Farewell> {
        let Self { mut ear, mouth, .. } = self;
        let farewell = Farewell(Arc::clone(&mouth));
        forward_events(disks, &mouth)?;
        let (disks, stop) = (Arc::clone(disks), Arc::clone(stop));
        std::thread::Builder::new().name("line".into()).spawn(move || {
            loop {
                let message = match hear(&mut ear) {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    // The daemon lives: it has said something, and the next word may be understood.
                    Err(error) => {
                        tracing::error!("what the daemon says: {}", in_full(&error));
                        continue;
                    }
                };
                match message {
                    ToProcess::Go { .. } => {}
                    ToProcess::Stop(removed) => {
                        disks.removed.store(removed, SeqCst);
                        // One write can not fill the counter.
                        let _ = rustix::io::write(&*stop, &1u64.to_ne_bytes());
                    }
                    ToProcess::Counts => disks.workers().tell(),
                    ToProcess::Ask { number, request } => answer(&disks, &mouth, number, &request),
                }
            }
            // The daemon was killed. What it had of its own has ended like that, and the next one
            // waits for the last writes of whoever was killed, and for nobody who lives on.
            // SAFETY: ends the process; nothing of it has to be put in order.
            unsafe { libc::_exit(1) }
        })?;
        Ok(farewell)
    }
}

/// Says what happens to the disk, on a thread of its own.
fn forward_events(disks: &Arc<Disks>, mouth: &Arc<Mouth>) -> std::io::Result<()> {
    let (events, mouth) = (Arc::clone(&disks.events), Arc::clone(mouth));
    std::thread::Builder::new().name("events".into()).spawn(move || {
        // The only reader, so there is room for it.
        let Ok(Some(reader)) = events.read() else { return };
        loop {
            // Interrupted is as good as woken.
            let _ = poll(&mut [PollFd::new(&reader.bell(), PollFlags::IN)], None);
            reader
                .take()
                .into_iter()
                .for_each(|event| mouth.say(&FromProcess::Happened(event.happened)));
        }
    })?;
    Ok(())
}

/// A change may wait for the disk, so each request has a thread. The control socket has few
/// clients, so they are few.
fn answer(disks: &Arc<Disks>, mouth: &Arc<Mouth>, number: u64, request: &serde_json::Value) {
    let line = request.to_string();
    let (disks, mouth) = (Arc::clone(disks), Arc::clone(mouth));
    let thread = std::thread::Builder::new().name("request".into()).spawn(move || {
        let (_, outcome) = carry_out(&disks, line.as_bytes());
        drop(disks);
        mouth.say(&FromProcess::Answer { number, outcome });
    });
    // Whoever has asked gives up waiting.
    if let Err(error) = thread {
        static WARNINGS: LazyLock<WarningLimit> =
            LazyLock::new(|| WarningLimit::warnings(None, "requests that are not carried out"));
        if let Some(pass) = WARNINGS.pass() {
            tracing::warn!(suppressed = pass.suppressed, "a request is not carried out: {error}");
        }
    }
}

/// What is said at the end.
pub(crate) struct Farewell(Arc<Mouth>);

impl Farewell {
    pub(crate) fn say(self, departure: Departure) {
        self.0.say(&FromProcess::Stopped(departure));
    }
}
