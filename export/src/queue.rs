//! The guest's side of one queue, whatever the transport.

use ringway_core::mem::{GuestMap, HostRange};
use ringway_core::{Request, Status};
use ringway_disk::Watcher;
use ringway_ring::virtqueue::Armed;
use ringway_ring::{blkif, virtqueue};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// The guest broke its queue: nothing more can be taken from it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A virtqueue.
    #[error(transparent)]
    Virtqueue(#[from] virtqueue::Broken),
    /// A block ring of Xen.
    #[error(transparent)]
    Blkif(#[from] blkif::Broken),
}

impl Broken {
    /// The memory in which the queue lies has vanished.
    pub const MEMORY_GONE: Self = Self::Virtqueue(virtqueue::Broken::MemoryGone);
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

/// The guest's side of one queue: virtqueue, blkif ring, ublk queue.
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
    /// The right to answer one request, used up by answering.
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

    /// True if [`RequestQueue::pop`] would find something: one look, nothing else.
    fn has_work(&self) -> bool;

    /// Asks for kicks again and looks once more.
    ///
    /// # Errors
    /// [`Broken`], as for `pop`.
    fn arm(&mut self) -> Result<Armed, Broken>;

    /// Asks for no kicks while polling.
    fn disarm(&mut self);

    /// Rings when the guest has added requests.
    fn doorbell(&self) -> RawFd;

    /// The guest's memory.
    fn memory(&self) -> &Arc<GuestMap>;

    /// Who wants to be told of written guest memory. Asked when a worker takes the queue, and after
    /// every change to it.
    fn watcher(&self) -> Option<Watcher> {
        None
    }

    /// True if the guest's memory has vanished.
    fn memory_gone(&self) -> bool;

    /// Requests that were taken from the ring and not popped yet, by this queue or by a predecessor
    /// that left them unanswered. They come first, and are owed even by a queue that is to stop.
    fn backlog(&self) -> usize {
        0
    }

    /// True while the next request waits for something that comes with a command, so that
    /// [`RequestQueue::pop`] finds nothing although there may be requests.
    fn is_stalled(&self) -> bool {
        false
    }

    /// True if the answer to a request is written to memory in one of these ranges.
    fn answers_into(_: &Self::Token, _: &[HostRange]) -> bool {
        false
    }

    /// The queue is to stop: from now on only the backlog is taken.
    fn wind_down(&mut self) {}

    /// How often the guest was called.
    fn calls(&self) -> u64 {
        0
    }

    /// How many requests can be in flight.
    fn depth(&self) -> u16;
}
