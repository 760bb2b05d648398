//! The words in which one talks to the driver side of a queue.

#[cfg(doc)]
use super::SplitDriver;
use crate::virtqueue::Desc;

/// A piece of memory as the device sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes; not zero.
    pub len: u32,
}

/// Memory for indirect tables (§2.7.5.3): one for each descriptor of the ring, side by side.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// Where they lie in our address space; aligned to 16 bytes.
    pub host: *mut u8,
    /// The same byte as a guest-physical address.
    pub guest: u64,
    /// Entries of each table.
    pub entries: u16,
    /// True: short chains go directly into the ring while more than half of it is free, which saves
    /// the device a memory access. False: every chain of more than one piece uses its table.
    pub when_scarce: bool,
}

impl Tables {
    /// Bytes that the tables of a queue of `size` need.
    #[must_use]
    pub const fn bytes(size: u16, entries: u16) -> usize {
        size as usize * entries as usize * size_of::<Desc>()
    }
}

/// Why a chain was not added. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// Reap completions, then try again.
    #[error("the queue is full")]
    Full,
    /// It will never fit.
    #[error("a chain of {pieces} pieces is longer than the {max} this queue can take")]
    TooLong {
        /// Pieces of the chain.
        pieces: usize,
        /// What fits.
        max: usize,
    },
    /// A chain needs one piece at least.
    #[error("a chain without pieces")]
    NoPieces,
}

/// The device broke the rules of the queue. Nothing it says can be trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFault {
    /// The used index ran ahead of what is in flight.
    #[error("the used index moved from {from} to {to} with {in_flight} chains in flight")]
    IndexJump {
        /// Where the driver has got to.
        from: u16,
        /// What the device wrote.
        to: u16,
        /// Chains that the device may return.
        in_flight: u16,
    },
    /// The used ring names a descriptor that does not exist.
    #[error("the used ring names descriptor {0}, beyond the queue")]
    IdOutOfRange(u32),
    /// The used ring names something that is not the head of a chain in flight.
    #[error("the used ring names descriptor {0}, which heads no chain in flight")]
    NotInFlight(u16),
}

/// A chain that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its head, as [`SplitDriver::add`] returned it. Free for the next chain.
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}
