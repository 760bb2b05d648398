//! What a queue is made of, and why it cannot be made.

use crate::host::Host;
use crate::movement::Movement;
use crate::record::RecordError;
use ringway_ring::blkif::{LayoutError, Offered, RingAt};
use std::io;

/// What a queue is made of.
pub struct QueueSetup<H: Host> {
    /// The hypervisor, for this queue.
    pub host: H,
    /// The mapped ring; stays mapped as long as the queue exists.
    pub ring_pages: H::Mapped,
    /// Where and of what kind the ring is; `base` is that of `ring_pages`.
    pub at: RingAt,
    /// What the front-end was told.
    pub offered: Offered,
    /// How data is to move.
    pub movement: Movement,
    /// The front-end uses the same pages again (`feature-persistent`).
    pub persistent: bool,
}

/// Why a queue cannot go on where a predecessor was.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The ring.
    #[error(transparent)]
    Ring(#[from] LayoutError),
    /// The record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The host.
    #[error(transparent)]
    Host(#[from] io::Error),
}
