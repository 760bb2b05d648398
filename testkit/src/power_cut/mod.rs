//! A simulation of power cuts: a disk with a volatile cache that keeps no promise beyond its
//! contract, and an oracle that knows what a guest may find afterwards.
//!
//! ```text
//! campaign   guests on several queues ──► DiskQueue ──► engine ──┐
//!    │ issued, answered                                          ▼
//! oracle ◄──────────── what is left after the cut ◄──────────── disk
//! ```
//!
//! [`SimulatedDisk`] is the weakest disk that the contract of a block device allows. Sectors of a
//! write arrive one by one, in any order, mixed with those of other operations. A flush covers what
//! had completed when it began, and nothing else. A durable write covers its own sectors. At the cut
//! any subset of the rest survives, sector by sector.
//!
//! [`Oracle`] knows requests only: when each was issued and when its answer came. [`Campaign`] runs
//! one seed after the other, without threads, so that a seed is a history. A [`Lie`] breaks the
//! disk, or the way it is used, on purpose: the oracle has to notice.

mod campaign;
mod config;
mod disk;
mod engine;
mod life;
mod oracle;
mod setup;
mod state;

pub use campaign::{Campaign, Failure};
pub use config::{Config, Counts};
pub use disk::SimulatedDisk;
pub use engine::PowerCutEngine;
pub use oracle::{Content, Oracle, Ticket, Wrong};
pub use setup::{Faults, SimulatedSetup};

/// Bytes of a sector: what is never torn.
pub const SECTOR: usize = 512;

/// The longest request of the guests of a campaign, in sectors. What is longer was merged.
const SECTORS_MAX: u64 = 20;

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The disk: a flush does nothing.
    FlushDoesNothing,
    /// The disk: a flush forgets one sector.
    FlushForgetsASector,
    /// The disk: a flush covers only what came over its own queue.
    FlushOfOneQueue,
    /// The disk: a flush does not cover zeroing and discards.
    FlushForgetsZeroes,
    /// The disk: durable writes are plain ones.
    DurableIsPlain,
    /// The disk: small writes rewrite the rest of their 4 KiB as it was when they began.
    StaleNeighbours,
    /// The disk: a torn write damages the sector behind it.
    TornBeyondTheEnd,
    /// The disk: a write is over before its memory was read.
    MemoryReadLate,
    /// The disk: durable writes that are longer than any request, so merged ones, are plain ones.
    MergedIsPlain,
    /// The disk: writes that are longer than any request, so merged ones, forget their last sector.
    MergedForgetsItsEnd,
    /// Above the disk: each queue locks blocks for itself only.
    LocksPerQueue,
    /// Above the disk: flushes are answered and not passed on.
    FlushNotPassedOn,
    /// Above the disk: one queue was not told that writes must be durable.
    OneQueueNotDurable,
    /// Above the disk: each queue remembers failed flushes for itself only.
    FailedFlushPerQueue,
}

impl Lie {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::FlushDoesNothing,
        Self::FlushForgetsASector,
        Self::FlushOfOneQueue,
        Self::FlushForgetsZeroes,
        Self::DurableIsPlain,
        Self::StaleNeighbours,
        Self::TornBeyondTheEnd,
        Self::MemoryReadLate,
        Self::MergedIsPlain,
        Self::MergedForgetsItsEnd,
        Self::LocksPerQueue,
        Self::FlushNotPassedOn,
        Self::OneQueueNotDurable,
        Self::FailedFlushPerQueue,
    ];
}
