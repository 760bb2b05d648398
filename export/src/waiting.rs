//! Who waits for requests in flight.

use crate::command::Stopped;
use ringway_aio::FileId;
use ringway_core::mem::HostRange;
use ringway_disk::{Disk, Share};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Somebody who is answered once requests in flight have ended.
pub(crate) enum Waiting<Q> {
    /// Gets the queue's ring once nothing of it is in flight.
    Stop { queue: u32, reply: SyncSender<Stopped<Q>> },
    /// Is told once nothing of the disk is in flight beyond `end` bytes.
    Settle { disk: Arc<Disk>, end: u64, reply: SyncSender<()> },
    /// Is told how a flush ended that no guest has asked for.
    Flush { flush: Flush, reply: SyncSender<io::Result<()>> },
    /// Is told once no request of the queue is in flight that uses memory in one of these ranges.
    Unused { queue: u32, ranges: Vec<HostRange>, reply: SyncSender<()> },
}

/// One flush, from a worker's command to its answer. The worker has attached the file for it.
#[derive(Debug)]
pub(crate) struct Flush {
    pub(crate) disk: Arc<Disk>,
    pub(crate) file: FileId,
    /// Its place is one of the disk's.
    pub(crate) share: Arc<Share>,
    /// The engine's.
    pub(crate) tag: u64,
    pub(crate) state: FlushState,
    pub(crate) tries: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FlushState {
    /// The engine has had no room for it yet.
    Ready,
    InFlight,
    /// With the engine's result.
    Over(i32),
}

impl Flush {
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, FlushState::Over(_))
    }
}

/// How often a flush is tried again that an engine could not carry out just then.
const RETRIES_MAX: u32 = 16;

/// A result that is of no queue.
#[cold]
pub(crate) fn note_flush<Q>(waiting: &mut [Waiting<Q>], tag: u64, result: i32) {
    for waiting in waiting {
        let Waiting::Flush { flush, .. } = waiting else { continue };
        if flush.tag == tag {
            flush.share.give_back();
            let again = matches!(-result, libc::EINTR | libc::EAGAIN) && flush.tries < RETRIES_MAX;
            flush.state = if again { FlushState::Ready } else { FlushState::Over(result) };
        }
    }
}
