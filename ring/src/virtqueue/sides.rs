//! The two sides of a virtqueue whatever its format: one `match` in front of the verbs that both
//! formats have in common.

use super::chain::{Chain, ChainError};
use super::inflight::{InflightError, Tracked};
use super::layout::LayoutError;
use super::packed::PackedDevice;
use super::packed_driver::PackedDriver;
use super::packed_layout::PackedBase;
use super::split::SplitDevice;
use super::split_driver::SplitDriver;
use super::types::{
    Areas, Armed, Broken, DeviceFault, Format, Head, NoRoom, Piece, Tables, Unpublished, Used,
};
use ringway_core::mem::Translator;

/// A virtqueue, seen from the device.
// One per queue, made at start: its size costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Device {
    /// VIRTIO 1.2 §2.7.
    Split(SplitDevice),
    /// VIRTIO 1.2 §2.8.
    Packed(PackedDevice),
    /// Either, with a record of what is in flight that outlives the device.
    Tracked(Box<Tracked>),
}

impl Device {
    /// A queue at `at` that goes on from `base`, as vhost-user's SET_VRING_BASE puts it; from the
    /// start without.
    ///
    /// # Errors
    /// [`LayoutError`] if size, alignment or base do not fit the format.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths [`Format::area_bytes`], for as long as the
    /// queue exists.
    pub unsafe fn new(format: Format, at: Areas, base: Option<u32>) -> Result<Self, LayoutError> {
        let Format { packed, size, event_idx, indirect } = format;
        // SAFETY: the caller vouches for the memory.
        unsafe {
            if packed {
                let base = base.map_or(PackedBase::START, PackedBase);
                PackedDevice::new(size, at.packed(), base, event_idx, indirect).map(Self::Packed)
            } else {
                let base = base.unwrap_or(0);
                let next = u16::try_from(base).map_err(|_| LayoutError::SplitBase(base))?;
                SplitDevice::new(size, at.split(), next, event_idx, indirect).map(Self::Split)
            }
        }
    }

    /// A queue with a record of what is in flight (vhost-user, "Inflight I/O tracking"): `region` is
    /// its part of the inflight region, with `entries` entries. If an earlier device has left chains
    /// in flight there, they come out of [`Device::pop`] first, in the order in which that device
    /// took them, and `base` is not asked for. A new record begins at `base`.
    ///
    /// # Errors
    /// [`InflightError`] if the queue cannot be, or if the record contradicts itself; it is left as
    /// it was then.
    ///
    /// # Safety
    /// As [`Device::new`]. Also, `region` is aligned to 8 bytes and names
    /// [`inflight_bytes`](super::inflight_bytes) of mapped memory, for as long as the queue exists,
    /// and no other queue uses it.
    pub unsafe fn tracked(
        format: Format,
        at: Areas,
        base: Option<u32>,
        region: *mut u8,
        entries: u16,
    ) -> Result<Self, InflightError> {
        // SAFETY: the caller vouches for the memory.
        let queue = unsafe { Tracked::start(format, at, base, region, entries)? };
        Ok(Self::Tracked(Box::new(queue)))
    }

    /// Chains that an earlier device has left in flight and that were not popped yet.
    #[must_use]
    pub fn backlog(&self) -> usize {
        match self {
            Self::Split(_) | Self::Packed(_) => 0,
            Self::Tracked(queue) => queue.backlog(),
        }
    }

    /// Queue size, in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.size(),
            Self::Packed(ring) => ring.size(),
            Self::Tracked(queue) => queue.size(),
        }
    }

    /// Where the device has got to, as vhost-user's GET_VRING_BASE puts it.
    #[must_use]
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.next_avail().into(),
            Self::Packed(ring) => ring.base().0,
            Self::Tracked(queue) => queue.base(),
        }
    }

    /// True if the queue takes up what another device has begun, as far as anybody can tell: its
    /// record was not new, or it is not where a queue begins. Ask before the first chain is taken.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        match self {
            Self::Split(ring) => ring.next_avail() != 0 || ring.used_index() != 0,
            Self::Packed(ring) => ring.base() != PackedBase::START,
            Self::Tracked(queue) => queue.goes_on(),
        }
    }

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

    /// How many descriptors the last `pop` has read, also of a chain that it refused.
    #[must_use]
    pub fn walked(&self) -> usize {
        match self {
            Self::Split(ring) => ring.chain().walked(),
            Self::Packed(ring) => ring.chain().walked(),
            Self::Tracked(queue) => queue.walked(),
        }
    }

    /// Puts the chain that was popped last back, before anything else is done: the next
    /// [`Device::pop`] takes it again.
    #[cold]
    pub fn put_back(&mut self, head: Head) {
        match self {
            Self::Split(ring) => ring.put_back(head),
            Self::Packed(ring) => ring.put_back(head),
            Self::Tracked(queue) => queue.put_back(head),
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

    /// What the chains pushed and not published take of the ring: for a log of written memory.
    #[must_use]
    pub fn unpublished(&self) -> Unpublished {
        match self {
            Self::Split(ring) => ring.unpublished(),
            Self::Packed(ring) => ring.unpublished(),
            Self::Tracked(queue) => queue.unpublished(),
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

    /// Asks the driver for kicks again, then looks once more: drain, re-arm, look again.
    ///
    /// # Errors
    /// [`Broken`] ends the queue.
    pub fn arm(&mut self) -> Result<Armed, Broken> {
        match self {
            Self::Split(ring) => ring.arm(),
            Self::Packed(ring) => Ok(ring.arm()),
            Self::Tracked(queue) => queue.arm(),
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

    /// Asks the driver not to kick: the device is polling.
    pub fn disarm(&mut self) {
        match self {
            Self::Split(ring) => ring.disarm(),
            Self::Packed(ring) => ring.disarm(),
            Self::Tracked(queue) => queue.disarm(),
        }
    }
}

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
