//! Who waits for requests in flight.

use crate::command::Stopped;
use crate::worker::Flush;
use ringway_core::mem::HostRange;
use ringway_disk::Disk;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Somebody who is answered once requests in flight have ended.
pub(crate) enum Waiting<Q> {
    /// Gets the queue's ring once nothing of it is in flight.
    Stop { queue: u32, reply: SyncSender<Stopped<Q>> },
    /// Is told once nothing of the disk is in flight beyond `end` bytes.
    Settle { disk: Arc<Disk>, end: u64, reply: SyncSender<()> },
    /// Is told how a flush ended ([`crate::worker::flush`]).
    Flush { flush: Flush, reply: SyncSender<io::Result<()>> },
    /// Is told once no request of the queue is in flight that uses memory in one of these ranges.
    Unused { queue: u32, ranges: Vec<HostRange>, reply: SyncSender<()> },
}
