//! What the sides and formats of a virtqueue have in common: how it is described, what is moved over
//! it, and what can be wrong with it.

use super::layout::{Desc, SplitAddresses, avail_bytes, desc_bytes, used_bytes};
use super::packed_layout::{EVENT_BYTES, PackedAddresses};

/// A chain of at most this many pieces goes directly into the ring under [`Tables::when_scarce`].
pub(super) const DIRECT_MAX: usize = 3;

/// What both sides must agree on before a queue starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Packed instead of split (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// Queue size, in descriptors.
    pub size: u16,
    /// VIRTIO_RING_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_RING_F_INDIRECT_DESC.
    pub indirect: bool,
}

impl Format {
    /// Bytes of the three areas: descriptors, driver, device (§2.7, §2.8.10.1).
    #[must_use]
    pub const fn area_bytes(&self) -> (usize, usize, usize) {
        if self.packed {
            (desc_bytes(self.size), EVENT_BYTES, EVENT_BYTES)
        } else {
            (desc_bytes(self.size), avail_bytes(self.size), used_bytes(self.size))
        }
    }
}

/// The part of a ring between what the device has written and what the driver can see: entries of
/// the used ring (split), or descriptors (packed). It may run over the end of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unpublished {
    /// The first entry or descriptor, below the queue size.
    pub first: u16,
    /// How many, at most the queue size.
    pub count: u16,
}

/// Where the three areas of a virtqueue are, in our address space.
#[derive(Clone, Copy, Debug)]
pub struct Areas {
    /// Descriptors.
    pub desc: *mut u8,
    /// Driver area: the available ring, or what the driver wants to be told.
    pub driver: *mut u8,
    /// Device area: the used ring, or what the device wants to be told.
    pub device: *mut u8,
}

impl Areas {
    pub(super) fn split(self) -> SplitAddresses {
        SplitAddresses { desc: self.desc, avail: self.driver, used: self.device }
    }

    pub(super) fn packed(self) -> PackedAddresses {
        PackedAddresses { desc: self.desc, driver: self.driver, device: self.device }
    }
}

/// The driver broke the rules of the queue itself. The queue stops; everything else goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// §2.7.13.1: the available index ran ahead by more than the queue holds.
    #[error("the available index moved from {from} to {to}, more than the queue size {size}")]
    IndexJump {
        /// Where the device has got to.
        from: u16,
        /// What the driver wrote.
        to: u16,
        /// Queue size.
        size: u16,
    },
    /// The available ring names a descriptor that does not exist.
    #[error("the available ring names descriptor {0}, beyond the queue")]
    HeadOutOfRange(u16),
    /// The available ring names a chain that the device has not returned yet.
    #[error("descriptor {0} was made available again while in flight")]
    HeadInFlight(u16),
    /// §2.8.1: the driver made more descriptors available than the packed queue holds.
    #[error("the driver overran the queue: more than its {0} descriptors are available")]
    Overrun(u16),
    /// §2.8.6: a chain's first descriptor was made available before its others.
    #[error("descriptor {0} belongs to a chain but is not available")]
    HalfChain(u16),
    /// A buffer id that cannot be told from others.
    #[error("buffer id {0} is beyond the queue")]
    IdOutOfRange(u16),
    /// A buffer id that the device has not returned yet.
    #[error("buffer id {0} was made available again while in flight")]
    IdInFlight(u16),
}

/// The head of a chain the device owes an answer: given back by value, exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a chain that is not answered is lost to the guest"]
pub struct Head(pub(super) u16);

impl Head {
    /// Index of the chain's first descriptor.
    #[must_use]
    pub const fn index(&self) -> u16 {
        self.0
    }
}

/// What [`SplitDevice::arm`](super::SplitDevice::arm) found after notifications were enabled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "sleeping after WorkArrived loses the work"]
pub enum Armed {
    /// Nothing new: the next chain will come with a kick.
    Quiet,
    /// Chains arrived meanwhile: go on popping.
    WorkArrived,
}

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
    /// Its head, as [`SplitDriver::add`](super::SplitDriver::add) returned it. Free for the next chain.
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}
