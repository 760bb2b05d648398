//! The guest's side of one queue, whatever the transport.

use crate::memory::SharedMemory;
use crate::queue_commands::{CommandSender, CommandSetup};
use ringway_aio::Engine;
use ringway_core::{Request, Status};
use std::error::Error;
use std::io;
use std::os::fd::RawFd;

/// Nothing more can be taken from a queue.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The guest broke a rule of its transport.
    #[error(transparent)]
    Rule(Box<dyn Error + Send + Sync>),
    /// The memory in which the queue lies has vanished.
    #[error("the guest's memory vanished: its file was cut short")]
    MemoryGone,
}

impl Broken {
    /// The rule that the guest broke.
    #[cold]
    pub fn rule(rule: impl Error + Send + Sync + 'static) -> Self {
        Self::Rule(Box::new(rule))
    }
}

/// What [`RequestQueue::pop`] found.
#[derive(Debug)]
#[must_use]
pub enum Pop<T> {
    /// A request; answer it with this token.
    Request(T),
    /// Something malformed; answer it with this token and status.
    Refused(T, Status),
    /// Nothing.
    Empty,
}

/// What [`RequestQueue::arm`] found after it asked for kicks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "sleeping after WorkArrived loses the work"]
pub enum Armed {
    /// Nothing new: the next request comes with a kick.
    Quiet,
    /// Requests arrived meanwhile: go on popping.
    WorkArrived,
}

/// The guest's side of one queue (virtqueue, blkif ring, ublk queue): what a worker does with it in
/// its loop.
///
/// ```text
/// match queue.pop(slot.request_mut())? {
///     Pop::Request(token) => …,                      // later: queue.complete(token, status, bytes)
///     Pop::Refused(token, status) => queue.complete(token, status, 0),
///     Pop::Empty => …,
/// }
/// queue.publish()?;                                  // once a turn
/// ```
pub trait RequestQueue: Send {
    /// The right to answer one request, used up by answering. To drop one is a mistake, which
    /// [`AnswerDue`](crate::AnswerDue) notices in debug builds.
    type Token: Send;

    /// Takes the next request and writes it to `request`.
    ///
    /// # Errors
    /// [`Broken`]: the guest broke the queue; it must not be used any more.
    fn pop(&mut self, request: &mut Request) -> Result<Pop<Self::Token>, Broken>;

    /// What the last [`RequestQueue::pop`] that found something has cost to read: descriptors, or
    /// pieces of granted pages, at least 1. A chain that was refused counts as well.
    fn effort(&self) -> u32;

    /// Answers a request; `written` bytes of data went to guest memory. Not visible before
    /// [`RequestQueue::publish`].
    fn complete(&mut self, token: Self::Token, status: Status, written: u32);

    /// Makes the answers visible: one index store, at most one notification.
    ///
    /// # Errors
    /// What the host says to the notification; the guest may then have missed it.
    fn publish(&mut self) -> io::Result<()>;

    /// True if [`RequestQueue::pop`] would find something: one check, nothing else.
    fn has_work(&self) -> bool;

    /// Asks for kicks again, then checks once more for requests.
    ///
    /// # Errors
    /// [`Broken`], as for `pop`.
    fn arm(&mut self) -> Result<Armed, Broken>;

    /// Asks for no kicks while polling.
    fn disarm(&mut self);
}

/// How a queue comes to a worker, changes there, and leaves it.
pub trait QueueLifecycle: RequestQueue {
    /// Rings when the guest has added requests.
    fn doorbell(&self) -> RawFd;

    /// How many requests can be in flight.
    fn depth(&self) -> u16;

    /// Requests that were taken from the ring and not popped yet, by this queue or by a predecessor
    /// that left them unanswered. They come first, and are popped even from a queue that is to stop, as
    /// far as the limits of its disk let them pass.
    fn backlog(&self) -> usize {
        0
    }

    /// True while the next request waits for something that comes with a command, so that
    /// [`RequestQueue::pop`] finds nothing although there may be requests.
    fn is_stalled(&self) -> bool {
        false
    }

    /// The queue is to stop: from now on only the backlog is taken.
    fn wind_down(&mut self) {}

    /// True if requests that are not answered can be left to whoever serves the guest next, because
    /// a record names them. Those that are held when the queue stops are; else they fail.
    fn can_leave(&self) -> bool {
        false
    }

    /// Leaves a request that nothing is done for. It comes again from this queue if that is resumed,
    /// or from the one that goes on with its record.
    fn leave(&mut self, token: Self::Token) {
        crate::answer::abandon(token);
    }

    /// True once whoever sent its requests has gone, and nobody goes on with them: those that the disk has not
    /// been given when the queue stops are dropped, because they may have been sent again elsewhere.
    fn peer_is_gone(&self) -> bool {
        false
    }

    /// True if whoever sends its requests may be gone without that being known, and back with another queue, as over a
    /// network.
    fn peer_may_vanish(&self) -> bool {
        false
    }

    /// How often the guest was notified.
    fn calls(&self) -> u64 {
        0
    }

    /// The guest memory that the queue uses, if it stays mapped while the queue lives.
    fn shared_memory(&self) -> Option<&dyn SharedMemory<Self::Token>> {
        None
    }

    /// Whether requests come as results of commands to a driver, as ublk's FETCH, which the queue hands
    /// to the engine of its worker. The queues of a worker are of one type: where this is false, its loop
    /// has nothing of the functions below.
    const HAS_COMMANDS: bool = false;

    /// What its commands need, asked once, when a worker takes the queue; `None` if this one has none.
    fn command_setup(&self) -> Option<CommandSetup> {
        None
    }

    /// Hands over commands, by [`CommandSender::send`]. Called after each [`RequestQueue::publish`], also
    /// when the queue is to stop: then it is given back only when the last result has come. So whoever stops
    /// it sees to it that commands end which wait for a guest.
    #[inline]
    fn send_commands<E: Engine>(&mut self, to: &mut CommandSender<'_, E>) {
        let _ = to;
    }

    /// The result of a command: a negative errno, or what its driver says. [`RequestQueue::pop`] is next.
    #[inline]
    fn command_done(&mut self, tag: u32, result: i32) {
        let _ = (tag, result);
    }
}
