//! One connection: its handshake, its queue, its end. It has a thread to itself, which may wait.

mod inbox;
mod shake;

use crate::Export;
use crate::extents::Tells;
use crate::handshake::Negotiated;
use crate::lines::{Lines, has_closed};
use crate::offer::Offer;
use crate::queue::{Desk, Queue, may_say_goodbye};
use crate::request::Rules;
use ringway_core::panic_point;
use ringway_export::{Notice, QueueId, SessionInbox, Stopped};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
pub(crate) use shake::shake_hands;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long a client that is about to be left may take for the answers it is owed.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long the connection of a client that has gone stays, so that what storage answers soon leaves nothing
/// behind.
const LEAVE_AFTER: Duration = Duration::from_millis(100);

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The client closed it, or broke the protocol.
    ByPeer,
    /// The server was told to stop.
    ByOrder,
    /// A worker has failed.
    Failed,
}

/// Why a connection is not served, or no more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the disk does not finish what is in flight")]
    Stuck,
    #[error("another client has closed its connection, and what it had in flight is not known yet")]
    Unnoticed,
    #[error("a worker of this disk has failed: what was in flight is not known")]
    Failed,
    #[error("the worker refuses it: {0}")]
    Worker(io::Error),
}

/// Where the queue is.
enum QueuePlace {
    /// It runs on its worker under this name.
    Running(QueueId),
    /// It is stopped.
    Here(Box<Queue>),
    /// It is lost to a disk that is stuck, or to a worker that ended.
    Lost,
}

/// One connection whose handshake is over.
pub(crate) struct Session<'a> {
    export: &'a Export,
    /// The number of its queue.
    at: usize,
    /// Those of all clients of the disk.
    lines: &'a Lines,
    stop: BorrowedFd<'a>,
    inbox: Arc<SessionInbox>,
    desk: Desk,
    place: QueuePlace,
    rules: Rules,
    tells: Tells,
    /// The client has gone, and its requests with it.
    deserted: bool,
    /// The client has gone, and had said that it would.
    said_goodbye: bool,
}

/// What a connection may ask of a disk.
fn rules(export: &Export, offer: &Offer, negotiated: Negotiated, is_file: bool) -> Rules {
    let geometry = export.disk().geometry();
    let fast = geometry.discard && is_file;
    Rules {
        replies: negotiated.replies,
        block_status: negotiated.block_status,
        read_only: offer.read_only,
        trims: offer.trims,
        fast_zero: fast.then_some(u64::from(geometry.discard_granularity.max(512))),
    }
}

impl<'a> Session<'a> {
    /// A session on a connection that begins to send requests, as queue `at`. It ends when `stop`
    /// becomes readable.
    ///
    /// # Errors
    /// What the host says to memory or descriptors.
    pub(crate) fn new(
        export: &'a Export,
        (offer, negotiated): (&Offer, Negotiated),
        stream: OwnedFd,
        (at, lines): (usize, &'a Lines),
        stop: BorrowedFd<'a>,
    ) -> io::Result<Self> {
        let tells = Tells::of(export.disk());
        let rules = rules(export, offer, negotiated, tells == Tells::File);
        let (depth, durable) = (export.options().queue_size, !export.may_write_back());
        let disk = Arc::clone(export.disk());
        let (queue, desk) = Queue::new(stream, disk, rules, depth, durable)?;
        let inbox = Arc::new(SessionInbox::new()?);
        export.enter(Arc::clone(&inbox));
        let place = QueuePlace::Here(Box::new(queue));
        let (deserted, said_goodbye) = (false, false);
        Ok(Self {
            export,
            at,
            lines,
            stop,
            inbox,
            desk,
            place,
            rules,
            tells,
            deserted,
            said_goodbye,
        })
    }

    /// Serves it until it ends.
    pub(crate) fn run(mut self) -> Ended {
        self.export.notice(Notice::Connected);
        let (ended, why) = match self.start() {
            Ok(()) => self.serve(),
            Err(refusal) => (Ended::ByPeer, Some(refusal.to_string())),
        };
        let stopped = if self.deserted { self.leave() } else { self.stop() };
        if stopped.is_ok() {
            if let QueuePlace::Here(queue) = &mut self.place {
                self.desk.answer(|question| {
                    question.answer(self.export.disk(), self.tells, self.rules.replies)
                });
                queue.take_answers();
                queue.finish(FAREWELL);
            }
        }
        let why = stopped.err().map(|refusal| refusal.to_string()).or(why);
        self.tell_of_end(why);
        ended
    }

    fn tell_of_end(&self, why: Option<String>) {
        let disk = self.export.disk().name();
        let limits = self.export.limits();
        match &why {
            None => {
                if let Some(pass) = limits.disconnected.pass() {
                    info!(
                        disk,
                        queue = self.at,
                        suppressed = pass.suppressed,
                        "client disconnected"
                    );
                }
            }
            Some(why) => {
                if let Some(pass) = limits.ended.pass() {
                    let suppressed = pass.suppressed;
                    warn!(disk, queue = self.at, suppressed, "connection ended: {why}");
                }
            }
        }
        self.export.notice(Notice::Disconnected { why });
    }

    /// Until it is over: how, and why if that is worth telling.
    fn serve(&mut self) -> (Ended, Option<String>) {
        loop {
            let [stop, inbox, asked, closed] = match self.wait() {
                Ok(rung) => rung,
                Err(error) => return (Ended::Failed, Some(error.to_string())),
            };
            panic_point!("nbd");
            if stop {
                return (Ended::ByOrder, None);
            }
            if closed {
                match self.hang_up() {
                    Ok(true) => {
                        self.deserted = true;
                        return (Ended::ByPeer, None);
                    }
                    Ok(false) => {
                        self.said_goodbye = true;
                        self.lines.leave(self.desk.stream());
                    }
                    Err(error) => return (Ended::ByPeer, Some(error.to_string())),
                }
            }
            if asked {
                self.desk.answer(|question| {
                    question.answer(self.export.disk(), self.tells, self.rules.replies)
                });
            }
            if inbox {
                if let Some(ended) = self.handle_inbox() {
                    return ended;
                }
            }
        }
    }

    /// Waits until it is to stop, its inbox or its queue has something, or its client has closed the
    /// connection: which of these it was. The last one is not waited for if that is known.
    fn wait(&self) -> rustix::io::Result<[bool; 4]> {
        let stream = self.desk.stream().as_fd();
        let fds = [self.stop, self.inbox.bell(), self.desk.bell(), stream];
        let flags = [PollFlags::IN, PollFlags::IN, PollFlags::IN, PollFlags::RDHUP];
        let mut polled = [0, 1, 2, 3].map(|at| PollFd::new(&fds[at], flags[at]));
        let polled = if self.said_goodbye { &mut polled[..3] } else { &mut polled[..] };
        match poll(polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok([0, 1, 2, 3].map(|at| polled.get(at).is_some_and(|fd| !fd.revents().is_empty())))
    }

    /// Whether the client, which has closed the connection, may have said before that it goes. This thread looks, as the
    /// worker has others to serve.
    fn may_say_goodbye(&self) -> bool {
        may_say_goodbye(self.desk.stream(), &self.rules, self.export.disk().capacity())
    }

    /// The client has closed the connection: true if it is over by that. Its queue may wait for a limit, or for
    /// the disk to be resumed, and read nothing.
    fn hang_up(&mut self) -> io::Result<bool> {
        let may_say_goodbye = self.may_say_goodbye();
        match &mut self.place {
            QueuePlace::Here(queue) => Ok(queue.hang_up(may_say_goodbye)),
            QueuePlace::Lost => Ok(true),
            QueuePlace::Running(id) => {
                let (reply, answer) = sync_channel(1);
                let edit = move |queue: &mut Queue| {
                    // There is room for one.
                    let _ = reply.send(queue.hang_up(may_say_goodbye));
                };
                self.export.worker(self.at).edit(*id, edit)?;
                // Nobody has the queue if it did not reply.
                Ok(answer.try_recv().unwrap_or(true))
            }
        }
    }

    /// Has the worker serve the queue.
    fn start(&mut self) -> Result<(), Refusal> {
        if self.export.holds() {
            // It starts when the disk is resumed.
            return Ok(());
        }
        if self.export.has_failed() {
            return Err(Refusal::Failed);
        }
        let mut queue = match std::mem::replace(&mut self.place, QueuePlace::Lost) {
            QueuePlace::Here(queue) => queue,
            other => {
                // It runs, and has a line itself, which is not to be waited for.
                self.place = other;
                return Ok(());
            }
        };
        if !self.lines.await_closed() {
            self.place = QueuePlace::Here(queue);
            return Err(Refusal::Unnoticed);
        }
        queue.resume();
        if !self.said_goodbye {
            let stream = self.desk.stream();
            self.lines.enter(stream);
            // Others began meanwhile without having waited for this one.
            if has_closed(slice::from_ref(stream)) && queue.hang_up(self.may_say_goodbye()) {
                self.lines.leave(stream);
                self.place = QueuePlace::Here(queue);
                self.deserted = true;
                return Ok(());
            }
        }
        let (inbox, at) = (Arc::clone(&self.inbox), self.at);
        let alarm = Box::new(move |alarm| inbox.raise(at, alarm));
        // Without a write cache, writes are durable before they are answered.
        let (disk, durable) = (Arc::clone(self.export.disk()), !self.export.may_write_back());
        let id = self.export.worker(at).add(*queue, disk, durable, alarm);
        let id = id.map_err(|refused| Refusal::Worker(refused.error))?;
        self.place = QueuePlace::Running(id);
        self.export.started(at, id);
        Ok(())
    }

    /// Stops the queue, and waits until nothing of it is in flight.
    fn stop(&mut self) -> Result<(), Refusal> {
        let QueuePlace::Running(id) = self.place else { return Ok(()) };
        let promise = self.begin_stop(id)?;
        match self.export.await_disk(Instant::now(), self.at, &promise) {
            Ok(Some(stopped)) => {
                self.export.stopped(&stopped);
                self.place = QueuePlace::Here(Box::new(stopped.ring));
                Ok(())
            }
            Ok(None) => {
                // It stays with its worker, with all its memory, until the disk answers.
                self.export.fence(vec![promise], None);
                Err(Refusal::Stuck)
            }
            Err(error) => Err(Refusal::Worker(error)),
        }
    }
}

impl Session<'_> {
    /// Has the worker stop the queue. What overlaps a write that it has in flight waits from now on.
    fn begin_stop(&mut self, id: QueueId) -> Result<Receiver<Stopped<Queue>>, Refusal> {
        self.place = QueuePlace::Lost;
        self.export.stopping(self.at, id);
        let worker = self.export.worker(self.at);
        let promise = worker.stop(id).map_err(Refusal::Worker)?;
        // Commands are carried out in their order.
        worker.edit(id, |_| ()).map_err(Refusal::Worker)?;
        self.lines.leave(self.desk.stream());
        Ok(promise)
    }

    /// Stops the queue of a client that has gone. What storage has of it stays with its worker, and counts as in
    /// flight. The client may come back at once, in this very place if not too much is left behind.
    fn leave(&mut self) -> Result<(), Refusal> {
        let QueuePlace::Running(id) = self.place else { return Ok(()) };
        let promise = self.begin_stop(id)?;
        loop {
            match promise.recv_timeout(LEAVE_AFTER) {
                Ok(stopped) => {
                    self.export.stopped(&stopped);
                    self.place = QueuePlace::Here(Box::new(stopped.ring));
                    return Ok(());
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Refusal::Worker(io::Error::other("the worker has ended")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if self.export.disk().may_outlive() || is_rung(self.stop) {
                        self.export.fence(vec![promise], None);
                        return Ok(());
                    }
                }
            }
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let QueuePlace::Running(_) = self.place {
            // A panic: nobody knows what is in flight.
            self.export.fail();
        }
        self.lines.leave(self.desk.stream());
        self.export.leave(&self.inbox);
    }
}

/// Readable once told to stop.
pub(crate) fn is_rung(stop: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&stop, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok_and(|rung| rung > 0)
}
