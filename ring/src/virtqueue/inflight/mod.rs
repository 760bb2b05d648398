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
mod record;
mod split;
#[cfg(all(test, not(loom)))]
mod tests;

use super::chain::Chain;
use super::chain_error::ChainError;
use super::layout::QUEUE_SIZE_MAX;
use super::types::{Areas, Armed, Broken, Format, Head, Unpublished};
use packed::PackedTracked;
use record::{InflightRegion, VERSION_AT};
use ringway_core::mem::Translator;
use split::SplitTracked;

pub use record::{InflightError, inflight_bytes};

/// Marks a record as new: the next queue begins where the front-end says. To be called for a queue
/// that was drained, once the front-end knows where it stopped.
///
/// # Safety
/// `region` is aligned to 8 bytes and names [`inflight_bytes`] of mapped memory; no queue uses it.
pub unsafe fn renew_inflight(region: *mut u8, packed: bool, entries: u16) {
    InflightRegion { base: region, entries, packed }.put_u16(VERSION_AT, 0);
}

/// True if a record may name requests that nobody has answered, as far as can be told without the ring that it is of: a
/// batch that was published and not noted any more counts, too.
///
/// # Safety
/// As [`renew_inflight`]; a queue may use it.
#[must_use]
pub unsafe fn may_name_inflight(region: *mut u8, packed: bool, entries: u16) -> bool {
    let part = InflightRegion { base: region, entries, packed };
    part.u16(VERSION_AT) != 0 && (0..entries).any(|index| part.is_in_flight(index) != Ok(false))
}

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
        let part = InflightRegion { base: region, entries, packed: format.packed };
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
            Self::Split(queue) => queue.resumed || !queue.ring.is_fresh(),
            Self::Packed(queue) => queue.resumed || !queue.ring.is_fresh(),
        }
    }

    /// Chains of an earlier device that were not handed out yet.
    pub(super) fn backlog(&self) -> usize {
        match self {
            Self::Split(queue) => queue.backlog.len(),
            Self::Packed(queue) => queue.backlog.len(),
        }
    }

    /// True if the chain handed out last is one of them.
    pub(super) fn is_retaken(&self) -> bool {
        match self {
            Self::Split(queue) => queue.retaken,
            Self::Packed(queue) => queue.retaken.is_some(),
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
