//! What comes back from a queue.

use crate::memory::{Buffer, pieces_of};
use ringway_core::Status;
use ringway_scheduler::SchedulerStats;

/// The buffers of a request.
#[derive(Debug, Default)]
pub enum Data {
    /// None: flush, discard, write-zeroes, raw.
    #[default]
    None,
    /// One.
    One(Buffer),
    /// Those of a vectored request, in order.
    Many(Vec<Buffer>),
}

impl Data {
    /// The buffer of a request that has one.
    #[inline]
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        if let Self::One(buffer) = self { Some(buffer) } else { None }
    }

    /// The buffers of a vectored request.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        match self {
            Self::None => Vec::new(),
            Self::One(buffer) => vec![buffer],
            Self::Many(buffers) => buffers,
        }
    }

    /// The buffers, in order.
    pub(crate) fn as_slice(&self) -> &[Buffer] {
        match self {
            Self::None => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Many(buffers) => buffers,
        }
    }

    /// How many pieces of `max` bytes at most its buffers are.
    pub(crate) fn pieces(&self, max: u32) -> usize {
        pieces_of(self.as_slice(), max)
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::One(buffer) => buffer.bytes().into(),
            Self::Many(buffers) => buffers.iter().map(|buffer| u64::from(buffer.bytes())).sum(),
        }
    }

    /// Gives up buffers that the server may still write to.
    #[cold]
    pub(crate) fn abandon(self) {
        self.into_buffers().into_iter().for_each(Buffer::abandon);
    }
}

/// A request that is done.
#[derive(Debug)]
#[must_use = "the buffers and the context come back here"]
pub struct Completion<C> {
    /// What the caller gave along with the request.
    pub ctx: C,
    /// How it went.
    pub status: Status,
    /// Bytes the device says it wrote to memory, status byte included; the request's share of them
    /// if it went along with others.
    pub used_len: u32,
    /// The buffers, the caller's again.
    pub data: Data,
}

impl<C> Completion<C> {
    /// True if the request was carried out.
    #[inline]
    pub fn is_ok(&self) -> bool {
        self.status == Status::Ok
    }

    /// The buffer of a request that has one.
    #[inline]
    pub fn into_buffer(self) -> Option<Buffer> {
        self.data.into_buffer()
    }
}

/// Counters of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests queued.
    pub queued: u64,
    /// Requests completed.
    pub completed: u64,
    /// Kicks sent to the server: notifications one way.
    pub kicks: u64,
    /// Times the queue slept until the server called or the time was up: at least as many as the
    /// notifications the other way.
    pub sleeps: u64,
    /// What the path request has done: all 0 on the path bio.
    pub path: SchedulerStats,
}
