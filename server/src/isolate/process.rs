//! The daemon's side of one process.

use super::files::ServedFiles;
use super::lock;
use super::protocol::{FromProcess, ToProcess};
use crate::bell::event;
use crate::connection::Connection;
use crate::departure::Departure;
use anyhow::{Context, anyhow, bail};
use ringway_control::config::LimitArgs;
use ringway_control::protocol::{ANSWER_MAX, DiskFacts, Happened, Problem};
use ringway_terminal::reasons::in_full;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often to look whether something has come about.
pub(super) const POLL_EVERY: Duration = Duration::from_millis(5);

/// How long it may take to read what it is told: it has a thread for nothing else.
const WRITE_MAX: Duration = Duration::from_secs(5);

/// What comes in answer to a request.
pub(super) type PendingAnswer = Receiver<Result<Value, Problem>>;

/// A process that serves one disk.
pub(crate) struct Process {
    pub(super) pid: u32,
    ear: Mutex<BufReader<Ear>>,
    line: Arc<Connection>,
    /// Ends the line from this side.
    leave: Arc<OwnedFd>,
    /// Held while a line is written.
    writing: Mutex<()>,
    /// Who waits for which answer; `None` once none can come any more.
    waiting: Mutex<Option<Waiting>>,
    ready: AtomicBool,
    /// It was told to go.
    goes: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    list: BTreeMap<u64, SyncSender<Result<Value, Problem>>>,
}

/// Reads a line that others write to.
pub(super) struct Ear(pub(super) Arc<Connection>);

impl Read for Ear {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        (&*self.0).read(buffer)
    }
}

/// The most questions that it may owe an answer: as many fit on the line.
const ASKED_MAX: usize = 64;

/// Reads one message; `None` at the end of the line.
pub(super) fn hear<T: serde::de::DeserializeOwned>(
    ear: &mut BufReader<Ear>,
) -> anyhow::Result<Option<T>> {
    let mut bytes = Vec::new();
    // A killed process ends in the middle of a word.
    let got = ear.by_ref().take(ANSWER_MAX).read_until(b'\n', &mut bytes);
    if got.is_err() || bytes.last() != Some(&b'\n') {
        return Ok(None);
    }
    serde_json::from_slice(&bytes).map(Some).context("the other process is not understood")
}

/// Writes one message.
pub(super) fn say(line: &Connection, message: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut bytes = serde_json::to_vec(message)?;
    bytes.push(b'\n');
    line.write_within(&bytes, WRITE_MAX).context("cannot tell the other process")
}

impl Process {
    pub(super) fn new(pid: u32, stream: UnixStream) -> anyhow::Result<Self> {
        let leave = Arc::new(event()?);
        let line = Arc::new(Connection::new(stream, Arc::clone(&leave))?);
        Ok(Self {
            pid,
            ear: Mutex::new(BufReader::new(Ear(Arc::clone(&line)))),
            line,
            leave,
            writing: Mutex::default(),
            waiting: Mutex::new(Some(Waiting::default())),
            ready: AtomicBool::new(false),
            goes: AtomicBool::new(false),
        })
    }

    /// Waits until it could serve.
    pub(super) fn ready(&self) -> anyhow::Result<(DiskFacts, ServedFiles)> {
        let message = hear(&mut lock(&self.ear))?;
        match message {
            Some(FromProcess::Ready { facts, files }) => {
                self.ready.store(true, SeqCst);
                Ok((*facts, files))
            }
            Some(FromProcess::Failed(why)) => Err(anyhow!(why)),
            Some(_) => bail!("its process says something else than that it is ready"),
            None => bail!("its process has ended before it was ready; the log may say why"),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }

    /// Has it serve its front-ends, or let them wait. It takes requests from then on.
    pub(super) fn go(&self, paused: bool, limits: Option<Box<LimitArgs>>) -> anyhow::Result<()> {
        self.say(&ToProcess::Go { paused, limits })?;
        self.goes.store(true, SeqCst);
        Ok(())
    }

    /// Whether it was told to go: any other word before that one ends it.
    pub(super) fn goes(&self) -> bool {
        self.goes.load(SeqCst)
    }

    /// Has it print its counts, if it has any.
    pub(super) fn tell_counts(&self) {
        if self.goes() {
            // One that hears nothing is noticed by others.
            let _ = self.say(&ToProcess::Counts);
        }
    }

    pub(super) fn say(&self, message: &ToProcess) -> anyhow::Result<()> {
        let _writing = lock(&self.writing);
        say(&self.line, message)
    }

    /// Sends a request, if it was told to go; without an answer to come the receiver hears that it is alone.
    pub(super) fn ask(&self, request: Value) -> Option<PendingAnswer> {
        if !self.goes() {
            return None;
        }
        let (sender, receiver) = sync_channel(1);
        let number = {
            let mut waiting = lock(&self.waiting);
            let waiting = waiting.as_mut()?;
            if waiting.list.len() >= ASKED_MAX {
                // It hears nothing: who asks on would wait for room on the line.
                return Some(receiver);
            }
            waiting.last += 1;
            waiting.list.insert(waiting.last, sender);
            waiting.last
        };
        if self.say(&ToProcess::Ask { number, request }).is_err() {
            if let Some(waiting) = &mut *lock(&self.waiting) {
                waiting.list.remove(&number);
            }
        }
        Some(receiver)
    }

    /// Hears answers until the process has ended or is given up. Gives back what it said of its end.
    /// `odd` is told of what it should not say: it may be in wrong hands; `happened` of what has happened
    /// to its disk, `files` from which it is served from now on.
    pub(super) fn hear(
        &self,
        odd: impl Fn(&str),
        happened: impl Fn(Happened),
        files: impl Fn(ServedFiles),
    ) -> Option<Departure> {
        let mut ear = lock(&self.ear);
        let mut departure = None;
        loop {
            match hear(&mut ear) {
                Ok(Some(FromProcess::Answer { number, outcome })) => {
                    let mut waiting = lock(&self.waiting);
                    let waits = waiting.as_mut().and_then(|all| all.list.remove(&number));
                    // Whoever has asked may have gone.
                    let _ = waits.map(|waits| waits.send(outcome));
                }
                Ok(Some(FromProcess::Happened(what))) => happened(what),
                Ok(Some(FromProcess::Files(now))) => files(now),
                Ok(Some(FromProcess::Stopped(told))) => departure = Some(told),
                Ok(Some(FromProcess::Ready { .. } | FromProcess::Failed(_))) => {
                    odd("it says twice that it has started")
                }
                Err(error) => odd(&in_full(&error)),
                Ok(None) => break,
            }
        }
        // Those who wait hear that nothing comes.
        lock(&self.waiting).take();
        departure
    }

    /// Ends the line from this side. The process ends then, if it can.
    pub(super) fn give_up(&self) {
        // One write can not fill the counter.
        let _ = rustix::io::write(&*self.leave, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::TryRecvError::Disconnected;

    /// It is stopped, as by a cgroup's freezer, and asked each second.
    #[test]
    fn e92_a_process_that_hears_nothing_keeps_nobody_who_asks_waiting() {
        let (ours, _its) = UnixStream::pair().unwrap();
        let process = Process::new(1, ours).unwrap();
        process.goes.store(true, SeqCst);
        let asked: Vec<_> = (0..5000)
            .map(|_| process.ask(serde_json::json!({"command": "list"})).unwrap())
            .collect();
        // Those that were not sent have no answer to wait for.
        let is_over = |answer: &&PendingAnswer| matches!(answer.try_recv(), Err(Disconnected));
        let over = asked.iter().filter(is_over).count();
        assert_eq!(over, 5000 - ASKED_MAX);
    }
}
