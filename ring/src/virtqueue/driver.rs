//! The driver side of a virtqueue whatever its format: one `match` in front of the verbs that both
//! have in common.

use super::layout::LayoutError;
use super::packed_driver::PackedDriver;
use super::split_driver::SplitDriver;
use super::types::{Areas, Armed, DeviceFault, Format, NoRoom, Piece, Tables, Used};

/// A virtqueue, seen from the driver.
#[derive(Debug)]
pub enum Driver {
    /// VIRTIO 1.2 §2.7.
    Split(SplitDriver),
    /// VIRTIO 1.2 §2.8.
    Packed(PackedDriver),
}

impl Driver {
    /// An empty queue at `at` with interrupts disarmed. The ring begins as after `first` chains
    /// (split) or descriptors (packed), which the device must be told: [`Driver::base`].
    ///
    /// # Errors
    /// [`LayoutError`] if size or alignment do not fit the format.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths [`Format::area_bytes`], and `tables` mapped
    /// memory of [`Tables::bytes`], for as long as the queue exists. No device uses them yet.
    pub unsafe fn new(
        format: Format,
        at: Areas,
        first: u16,
        tables: Option<Tables>,
    ) -> Result<Self, LayoutError> {
        let Format { packed, size, event_idx, .. } = format;
        // SAFETY: the caller vouches for the memory.
        unsafe {
            if packed {
                PackedDriver::new(size, at.packed(), first, event_idx, tables).map(Self::Packed)
            } else {
                SplitDriver::new(size, at.split(), first, event_idx, tables).map(Self::Split)
            }
        }
    }

    /// Queue size, in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.size(),
            Self::Packed(ring) => ring.size(),
        }
    }

    /// Where the device of an idle queue begins, as vhost-user's SET_VRING_BASE puts it.
    #[must_use]
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.avail_index().into(),
            Self::Packed(ring) => ring.base().0,
        }
    }

    /// Chains added and not popped yet.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.in_flight(),
            Self::Packed(ring) => ring.in_flight(),
        }
    }

    /// The most pieces a chain may have in this queue.
    #[must_use]
    pub fn max_pieces(&self) -> usize {
        match self {
            Self::Split(ring) => ring.max_pieces(),
            Self::Packed(ring) => ring.max_pieces(),
        }
    }

    /// The number that names the next chain to be added, below the queue size.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        match self {
            Self::Split(ring) => ring.next_head(),
            Self::Packed(ring) => ring.next_head(),
        }
    }

    /// Adds a chain: what the device reads, then what it writes. It becomes visible to the device
    /// with [`Driver::publish`]. Returns its number.
    ///
    /// # Errors
    /// [`NoRoom`]; nothing has changed.
    #[inline(always)]
    pub fn add(&mut self, readable: &[Piece], writable: &[Piece]) -> Result<u16, NoRoom> {
        match self {
            Self::Split(ring) => ring.add(readable, writable),
            Self::Packed(ring) => ring.add(readable, writable),
        }
    }

    /// Makes the added chains visible; true if the device wants to be kicked.
    #[inline]
    #[must_use = "true means the device waits for a kick"]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// Takes back the next chain the device is done with, if there is one.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue: it would be reported again and again.
    #[inline(always)]
    pub fn pop_used(&mut self) -> Result<Option<Used>, DeviceFault> {
        match self {
            Self::Split(ring) => ring.pop_used(),
            Self::Packed(ring) => ring.pop_used(),
        }
    }

    /// True if at least `count` chains (1 to all that are in flight) came back and were not popped
    /// yet.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    #[inline]
    pub fn has_used(&mut self, count: u16) -> Result<bool, DeviceFault> {
        match self {
            Self::Split(ring) => ring.has_used(count),
            Self::Packed(ring) => ring.has_used(count),
        }
    }

    /// Asks the device for an interrupt once `after` of the chains in flight came back, or earlier, then
    /// looks once more: `WorkArrived` if they are here already. Chains added later need not count.
    ///
    /// # Errors
    /// [`DeviceFault`] ends the queue.
    pub fn arm(&mut self, after: u16) -> Result<Armed, DeviceFault> {
        match self {
            Self::Split(ring) => ring.arm(after),
            Self::Packed(ring) => ring.arm(after),
        }
    }

    /// Asks the device for no interrupts: the driver is polling.
    #[inline]
    pub fn disarm(&mut self) {
        match self {
            Self::Split(ring) => ring.disarm(),
            Self::Packed(ring) => ring.disarm(),
        }
    }
}
