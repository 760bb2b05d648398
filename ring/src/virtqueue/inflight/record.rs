//! The record of one queue as memory, as far as both formats have it in common.

use crate::virtqueue::layout::LayoutError;
use crate::virtqueue::store::next_store;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Counters are judged to be below this, so that the next ones cannot wrap.
pub(super) const COUNTER_MAX: u64 = 1 << 63;

/// Bytes to which the part of each queue is aligned: a cache line, so that queues do not share one.
const PART_ALIGN: usize = 64;

/// The version of the record this code knows; 0 says that it is new.
const VERSION: u16 = 1;

// Where the first fields are, in bytes; the same in both formats.
const FEATURES: usize = 0;
pub(super) const VERSION_AT: usize = 8;
const ENTRIES: usize = 10;

/// Bytes of the record of one queue with so many entries.
#[must_use]
pub const fn inflight_bytes(packed: bool, entries: u16) -> usize {
    let (header, entry) = shape(packed);
    (header + entry * entries as usize).next_multiple_of(PART_ALIGN)
}

/// Bytes of `QueueRegionPacked` without entries and of `DescStatePacked`, or of the split ones.
pub(super) const fn shape(packed: bool) -> (usize, usize) {
    if packed { (32, 32) } else { (16, 16) }
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

pub(super) const fn damaged<T>(what: &'static str, entry: u16) -> Result<T, InflightError> {
    Err(InflightError::Damaged { what, entry })
}

/// The record of one queue, as memory.
///
/// # Invariants
/// 1. `base` is aligned to 8 bytes and names [`inflight_bytes`] of mapped memory that is only touched
///    atomically.
#[derive(Clone, Copy, Debug)]
pub(super) struct InflightRegion {
    pub(super) base: *mut u8,
    pub(super) entries: u16,
    pub(super) packed: bool,
}

macro_rules! field {
    ($load:ident, $store:ident, $value:ty, $word:ty) => {
        pub(super) fn $load(&self, offset: usize) -> $value {
            // SAFETY: `at` gives a mapped and aligned place, which is only touched atomically.
            unsafe { <$word>::from_ptr(self.at(offset, size_of::<$value>()).cast()) }.load(Relaxed)
        }

        #[inline]
        pub(super) fn $store(&self, offset: usize, value: $value) {
            next_store();
            // SAFETY: as above. Release: after all stores before it, in the order of the program.
            unsafe { <$word>::from_ptr(self.at(offset, size_of::<$value>()).cast()) }
                .store(value, Release);
        }
    };
}

impl InflightRegion {
    /// The place of a field of `bytes` bytes.
    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= inflight_bytes(self.packed, self.entries));
        debug_assert!(offset % bytes == 0);
        self.base.wrapping_add(offset)
    }

    /// The offset of a field of an entry.
    #[inline]
    pub(super) const fn entry(&self, index: u16, field: usize) -> usize {
        let (header, entry) = shape(self.packed);
        header + entry * index as usize + field
    }

    field!(u8, put_u8, u8, AtomicU8);
    field!(u16, put_u16, u16, AtomicU16);
    field!(u32, put_u32, u32, AtomicU32);
    field!(u64, put_u64, u64, AtomicU64);

    /// True if the record is new and has to be made for a queue of `size`.
    pub(super) fn is_new(&self, size: u16) -> Result<bool, InflightError> {
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
    pub(super) fn is_made(&self) {
        self.put_u64(FEATURES, 0);
        self.put_u16(ENTRIES, self.entries);
        self.put_u16(VERSION_AT, VERSION);
    }

    /// The `inflight` field of an entry, which is the first in both formats.
    pub(super) fn is_in_flight(&self, index: u16) -> Result<bool, InflightError> {
        match self.u8(self.entry(index, 0)) {
            0 => Ok(false),
            1 => Ok(true),
            _ => damaged("in flight is neither 0 nor 1", index),
        }
    }
}
