//! The crash-safe record of what is in flight (vhost-user protocol, "Inflight I/O tracking").
//!
//! The record lies in shared memory that the front-end keeps when a back-end dies. The next back-end
//! learns from it which chains were taken and never returned: the available ring cannot tell once
//! chains come back in another order than they were taken in.
//!
//! ```text
//! take a chain    counter, inflight = 1                       before the request is issued
//! return a batch  link the chains, publish the used index, inflight = 0 for each, used_idx
//! start again     a batch that was published is only cleared; the rest is carried out once more,
//!                 in the order of the counters
//! ```
//!
//! **Order.** What a process has stored before it is killed stays, in the order of its program: only
//! the compiler has to be kept from changing it, which `Release` does. A crash of the whole machine
//! takes the record along with the guest.
//!
//! **Trust.** The memory belongs to the front-end. It is read when a queue starts, each field once,
//! and judged as a whole; afterwards it is only written. What decides over memory accesses is kept
//! in private copies.

mod packed;
mod split;
#[cfg(all(test, not(loom)))]
mod tests;

use super::chain::{Chain, ChainError};
use super::layout::{LayoutError, QUEUE_SIZE_MAX};
use super::packed_layout::PackedBase;
use super::sides::{Areas, Format, Unpublished};
use super::split::{Armed, Broken, Head};
use super::store::next_store;
use packed::PackedTracked;
use ringway_core::mem::Translator;
use split::SplitTracked;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Bytes to which the part of each queue is aligned: a cache line, so that queues do not share one.
const PART_ALIGN: usize = 64;

/// The version of the record this code knows; 0 says that it is new.
const VERSION: u16 = 1;

// Where the first fields are, in bytes; the same in both formats.
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const ENTRIES: usize = 10;

/// Bytes of the record of one queue with so many entries.
#[must_use]
pub const fn inflight_bytes(packed: bool, entries: u16) -> usize {
    let (header, entry) = shape(packed);
    (header + entry * entries as usize).next_multiple_of(PART_ALIGN)
}

/// Bytes of the header, and of an entry.
const fn shape(packed: bool) -> (usize, usize) {
    if packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) }
}

/// Why a queue cannot go on from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// The queue itself cannot be.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Written by something else, or damaged.
    #[error("the inflight region says version {version}, features {features:#x}: not version 1")]
    Version {
        /// As found.
        version: u16,
        /// As found.
        features: u64,
    },
    /// The region was made for other queues.
    #[error("the inflight region has {region} entries but the queue {queue} descriptors")]
    Entries {
        /// Entries in the region, or what it says of them.
        region: u16,
        /// Queue size.
        queue: u16,
    },
    /// A new record for a queue that is in the middle of something.
    #[error(
        "the inflight region is new, but the queue goes on at {base:#x} with used index {used:#x}: \
         requests in between were taken and not tracked"
    )]
    Base {
        /// Where the queue is to go on.
        base: u32,
        /// Where its used ring is.
        used: u32,
    },
    /// The record contradicts itself.
    #[error("the inflight region is damaged at entry {entry}: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
        /// Where.
        entry: u16,
    },
}

const fn damaged<T>(what: &'static str, entry: u16) -> Result<T, InflightError> {
    Err(InflightError::Damaged { what, entry })
}

/// The record of one queue, as memory.
///
/// # Invariants
/// 1. `base` is aligned to 8 bytes and names [`inflight_bytes`] of mapped memory that is only touched
///    atomically.
#[derive(Clone, Copy, Debug)]
struct Part {
    base: *mut u8,
    entries: u16,
    packed: bool,
}

macro_rules! field {
    ($load:ident, $store:ident, $value:ty, $word:ty) => {
        fn $load(&self, offset: usize) -> $value {
            // SAFETY: `at` gives a mapped and aligned place, which is only touched atomically.
            unsafe { <$word>::from_ptr(self.at(offset, size_of::<$value>()).cast()) }.load(Relaxed)
        }

        #[inline]
        fn $store(&self, offset: usize, value: $value) {
            next_store();
            // SAFETY: as above. Release: after all stores before it, in the order of the program.
            unsafe { <$word>::from_ptr(self.at(offset, size_of::<$value>()).cast()) }
                .store(value, Release);
        }
    };
}

impl Part {
    /// The place of a field of `bytes` bytes.
    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= inflight_bytes(self.packed, self.entries));
        debug_assert!(offset.is_multiple_of(bytes));
        self.base.wrapping_add(offset)
    }

    /// The offset of a field of an entry.
    #[inline]
    const fn entry(&self, index: u16, field: usize) -> usize {
        let (header, entry) = shape(self.packed);
        header + entry * index as usize + field
    }

    field!(u8, put_u8, u8, AtomicU8);
    field!(u16, put_u16, u16, AtomicU16);
    field!(u32, put_u32, u32, AtomicU32);
    field!(u64, put_u64, u64, AtomicU64);

    /// True if the record is new and has to be made for a queue of `size`.
    fn is_new(&self, size: u16) -> Result<bool, InflightError> {
        let wrong = |region| Err(InflightError::Entries { region, queue: size });
        if self.entries < size {
            return wrong(self.entries);
        }
        let (version, features) = (self.u16(VERSION_AT), self.u64(FEATURES));
        if version == 0 {
            return Ok(true);
        }
        if version != VERSION || features != 0 {
            return Err(InflightError::Version { version, features });
        }
        let entries = self.u16(ENTRIES);
        if entries == self.entries { Ok(false) } else { wrong(entries) }
    }

    /// The last of a new record: from here on it counts.
    fn is_made(&self) {
        self.put_u64(FEATURES, 0);
        self.put_u16(ENTRIES, self.entries);
        self.put_u16(VERSION_AT, VERSION);
    }

    /// The `inflight` field of an entry, which is the first in both formats.
    fn is_in_flight(&self, index: u16) -> Result<bool, InflightError> {
        match self.u8(self.entry(index, 0)) {
            0 => Ok(false),
            1 => Ok(true),
            _ => damaged("in flight is neither 0 nor 1", index),
        }
    }
}

/// Marks a record as new: the next queue begins where the front-end says. To be called for a queue
/// that was drained, once the front-end knows where it stopped.
///
/// # Safety
/// `region` is aligned to 8 bytes and names [`inflight_bytes`] of mapped memory; no queue uses it.
pub unsafe fn renew_inflight(region: *mut u8, packed: bool, entries: u16) {
    Part { base: region, entries, packed }.put_u16(VERSION_AT, 0);
}

/// Counters are judged to be below this, so that the next ones cannot wrap.
const COUNTER_MAX: u64 = 1 << 63;

/// A virtqueue, seen from the device, that keeps a record of what is in flight.
// One per queue, made at start.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Tracked {
    /// VIRTIO 1.2 §2.7.
    #[doc(hidden)]
    Split(SplitTracked),
    /// VIRTIO 1.2 §2.8.
    #[doc(hidden)]
    Packed(PackedTracked),
}

impl super::sides::Device {
    /// How many descriptors the last `pop` has read, also of a chain that it refused.
    #[must_use]
    pub fn walked(&self) -> usize {
        match self {
            Self::Split(ring) => ring.chain().walked(),
            Self::Packed(ring) => ring.chain().walked(),
            Self::Tracked(queue) => queue.walked(),
        }
    }
}

impl Tracked {
    /// # Safety
    /// As [`super::Device::tracked`].
    pub(super) unsafe fn start(
        format: Format,
        at: Areas,
        base: Option<u32>,
        region: *mut u8,
        entries: u16,
    ) -> Result<Self, InflightError> {
        let entries = entries.min(QUEUE_SIZE_MAX);
        let part = Part { base: region, entries, packed: format.packed };
        // SAFETY: the caller vouches for the memory.
        unsafe {
            if format.packed {
                PackedTracked::start(part, format, at, base).map(Self::Packed)
            } else {
                SplitTracked::start(part, format, at, base).map(Self::Split)
            }
        }
    }

    pub(super) fn size(&self) -> u16 {
        match self {
            Self::Split(queue) => queue.ring.size(),
            Self::Packed(queue) => queue.ring.size(),
        }
    }

    pub(super) fn base(&self) -> u32 {
        match self {
            Self::Split(queue) => queue.ring.next_avail().into(),
            Self::Packed(queue) => queue.ring.base().0,
        }
    }

    /// As [`super::Device::goes_on`].
    pub(super) fn goes_on(&self) -> bool {
        match self {
            Self::Split(queue) => queue.resumed || queue.ring.next_avail() != 0,
            Self::Packed(queue) => queue.resumed || queue.ring.base() != PackedBase::START,
        }
    }

    /// Chains of an earlier device that were not handed out yet.
    pub(super) fn backlog(&self) -> usize {
        match self {
            Self::Split(queue) => queue.backlog.len(),
            Self::Packed(queue) => queue.backlog.len(),
        }
    }

    #[allow(clippy::type_complexity)]
    pub(super) fn pop(
        &mut self,
        mem: &mut Translator,
    ) -> Result<Option<(Head, Result<&Chain, ChainError>)>, Broken> {
        match self {
            Self::Split(queue) => queue.pop(mem),
            Self::Packed(queue) => queue.pop(mem),
        }
    }

    pub(super) fn walked(&self) -> usize {
        match self {
            Self::Split(queue) => queue.ring.chain().walked(),
            Self::Packed(queue) => queue.ring.chain().walked(),
        }
    }

    pub(super) fn put_back(&mut self, head: Head) {
        match self {
            Self::Split(queue) => queue.put_back(head),
            Self::Packed(queue) => queue.put_back(head),
        }
    }

    pub(super) fn push(&mut self, head: Head, written: u32) {
        match self {
            Self::Split(queue) => queue.push(head, written),
            Self::Packed(queue) => queue.push(head, written),
        }
    }

    pub(super) fn unpublished(&self) -> Unpublished {
        match self {
            Self::Split(queue) => queue.ring.unpublished(),
            Self::Packed(queue) => queue.ring.unpublished(),
        }
    }

    pub(super) fn publish(&mut self) -> bool {
        match self {
            Self::Split(queue) => queue.publish(),
            Self::Packed(queue) => queue.publish(),
        }
    }

    pub(super) fn has_work(&self) -> bool {
        self.backlog() > 0
            || match self {
                Self::Split(queue) => queue.ring.has_work(),
                Self::Packed(queue) => queue.ring.has_work(),
            }
    }

    pub(super) fn arm(&mut self) -> Result<Armed, Broken> {
        let armed = match self {
            Self::Split(queue) => queue.ring.arm()?,
            Self::Packed(queue) => queue.ring.arm(),
        };
        Ok(if self.backlog() > 0 { Armed::WorkArrived } else { armed })
    }

    pub(super) fn disarm(&mut self) {
        match self {
            Self::Split(queue) => queue.ring.disarm(),
            Self::Packed(queue) => queue.ring.disarm(),
        }
    }
}
