//! The device side of a virtqueue whatever its format: one `match` in front of the verbs that all have
//! in common (hot). How it begins and waits: `device/setup.rs`.

mod setup;

use super::chain::Chain;
use super::chain_error::ChainError;
use super::inflight::Tracked;
use super::packed::PackedDevice;
use super::split::SplitDevice;
use super::types::{Broken, Head};
use ringway_core::mem::Translator;

/// A virtqueue, seen from the device.
// One per queue, made at start: its size costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
// A tag of its own, which is compared at once: each verb asks for it. In the niche of a length it would
// have to be worked out.
#[repr(u8)]
pub enum Device {
    /// VIRTIO 1.2 §2.7.
    Split(SplitDevice),
    /// VIRTIO 1.2 §2.8.
    Packed(PackedDevice),
    /// Either, with a record of what is in flight that outlives the device.
    Tracked(Box<Tracked>),
}

impl Device {
    /// Takes the next chain, if there is one. A malformed chain is handed out with its error: it
    /// must be pushed back like any other.
    ///
    /// # Errors
    /// [`Broken`] ends the queue.
    #[inline]
    #[allow(clippy::type_complexity)]
    pub fn pop(
        &mut self,
        mem: &mut Translator,
    ) -> Result<Option<(Head, Result<&Chain, ChainError>)>, Broken> {
        match self {
            Self::Split(ring) => ring.pop(mem),
            Self::Packed(ring) => ring.pop(mem),
            Self::Tracked(queue) => queue.pop(mem),
        }
    }

    /// Returns a chain to the driver with the number of bytes written to its writable part. Not
    /// visible before [`Device::publish`].
    #[inline]
    pub fn push(&mut self, head: Head, written: u32) {
        match self {
            Self::Split(ring) => ring.push(head, written),
            Self::Packed(ring) => ring.push(head, written),
            Self::Tracked(queue) => queue.push(head, written),
        }
    }

    /// Makes the pushed chains visible; true if the driver wants to be called.
    #[inline]
    #[must_use = "true means the driver waits for a call"]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
            Self::Tracked(queue) => queue.publish(),
        }
    }

    /// True if the driver has added something since the last `pop`: one look.
    #[inline]
    #[must_use]
    pub fn has_work(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_work(),
            Self::Packed(ring) => ring.has_work(),
            Self::Tracked(queue) => queue.has_work(),
        }
    }
}
