//! Requests of a disk that are held because it has failed them: what its queues share.

use crate::incidents::{FailedOp, reason};
use ringway_core::{ByteRange, Op, Status};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// The shared part of what holds a disk's requests.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    pub(crate) policy: AtomicU64,
    /// The image is a file that has holes, or may get some.
    pub(crate) sparse: AtomicBool,
    /// Requests that are held.
    pub(crate) held: AtomicU64,
    /// Those of them that are with the disk once more.
    pub(crate) trying: AtomicU64,
    /// Those of them that are tried again by themselves.
    pub(crate) by_itself: AtomicU64,
    /// When the present spell began, in the disk's time.
    pub(crate) since_ns: AtomicU64,
    /// When a request is tried again by itself.
    pub(crate) retry_ns: AtomicU64,
    /// What the latest one was to do in the upper half, its error in the lower one.
    pub(crate) latest: AtomicU64,
    /// Spells so far: times that requests have begun to be held.
    pub(crate) spells: AtomicU64,
    /// Requests that were left in the record for whoever serves the guest next.
    pub(crate) left: AtomicU64,
    /// Those of them that the next queue has not met yet: it goes on with the time for which they were held.
    pub(crate) resumable: Mutex<Vec<LeftRequest>>,
}

/// A held request of a queue that was stopped.
#[derive(Debug)]
pub(crate) struct LeftRequest {
    pub(crate) op: Op,
    pub(crate) range: ByteRange,
    /// When it failed first, and when it was left, in the disk's time.
    pub(crate) since_ns: u64,
    pub(crate) left_ns: u64,
}

/// How long what is known of a request that was left is believed, in nanoseconds: a queue that starts again does so
/// at once, and a later request of the same range is another one.
pub(crate) const RESUMABLE_NS: u64 = 5_000_000_000;

/// As many as are known at a time, at most: more than a disk has places for. Those beyond begin their time anew.
pub(crate) const RESUMABLE_MAX: usize = 4096;

/// Requests that are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRequests {
    /// How many.
    pub count: u64,
    /// For how long there have been some without a pause.
    pub age: Duration,
    /// What the latest one was to do.
    pub op: FailedOp,
    /// Its error; 0 if the host told none.
    pub errno: i32,
    /// In how long one is tried again by itself; `None` if they wait to be told.
    pub retry_in: Option<Duration>,
}

impl HeldRequests {
    /// The error in words.
    #[must_use]
    pub fn reason(&self) -> String {
        reason(self.op, self.errno)
    }
}

/// True for errors that say that there is no space.
pub(crate) fn is_no_space(errno: i32) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT)
}

/// What whoever has asked is told of a failure.
pub(crate) fn status_of(errno: i32) -> Status {
    if is_no_space(errno) { Status::NoSpace } else { Status::IoError }
}
