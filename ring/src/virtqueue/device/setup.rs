//! How the device side of a virtqueue begins, where it is, how it waits, and what is rare.

use super::Device;
use crate::virtqueue::inflight::{InflightError, Tracked};
use crate::virtqueue::layout::LayoutError;
use crate::virtqueue::packed::PackedDevice;
use crate::virtqueue::packed_layout::PackedBase;
use crate::virtqueue::split::SplitDevice;
use crate::virtqueue::types::{Areas, Armed, Broken, Format, Head, Unpublished};

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
    /// [`inflight_bytes`](crate::virtqueue::inflight_bytes) of mapped memory, for as long as the queue exists,
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

    /// Asks the driver not to kick: the device is polling.
    pub fn disarm(&mut self) {
        match self {
            Self::Split(ring) => ring.disarm(),
            Self::Packed(ring) => ring.disarm(),
            Self::Tracked(queue) => queue.disarm(),
        }
    }

    /// Chains that an earlier device has left in flight and that were not popped yet.
    #[must_use]
    pub fn backlog(&self) -> usize {
        match self {
            Self::Split(_) | Self::Packed(_) => 0,
            Self::Tracked(queue) => queue.backlog(),
        }
    }

    /// True if the chain popped last is one that an earlier device has left in flight.
    #[must_use]
    pub fn is_retaken(&self) -> bool {
        match self {
            Self::Split(_) | Self::Packed(_) => false,
            Self::Tracked(queue) => queue.is_retaken(),
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

    /// True if the queue takes up what another device has begun, as far as anybody can tell: its record was not new,
    /// or its ring is not as a driver makes one. Ask before the first chain is taken. A queue that was there and not
    /// used yet begins, too, whatever its guest has done with others.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        match self {
            Self::Split(ring) => !ring.is_fresh(),
            Self::Packed(ring) => !ring.is_fresh(),
            Self::Tracked(queue) => queue.goes_on(),
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

    /// What the chains pushed and not published take of the ring: for a log of written memory.
    #[must_use]
    pub fn unpublished(&self) -> Unpublished {
        match self {
            Self::Split(ring) => ring.unpublished(),
            Self::Packed(ring) => ring.unpublished(),
            Self::Tracked(queue) => queue.unpublished(),
        }
    }
}
