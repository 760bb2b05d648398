//! How a packed virtqueue lies in memory (VIRTIO 1.2 §2.8) and what both sides check about it.

use super::layout::{LayoutError, QUEUE_SIZE_MAX};
use crate::shared::{AtomicU32, AtomicU64, u32_at, u64_at};

/// The driver's mark on a descriptor (§2.8.1).
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// The device's mark on a descriptor (§2.8.1).
pub const DESC_F_USED: u16 = 1 << 15;
/// The two marks, which say whose turn it is.
const MARKS: u16 = DESC_F_AVAIL | DESC_F_USED;

/// Tell me of everything (§2.8.10).
const EVENT_ENABLE: u32 = 0;
/// Tell me nothing (§2.8.10).
const EVENT_DISABLE: u32 = 1;
/// Tell me when the descriptor I name has changed hands (§2.8.10).
const EVENT_DESC: u32 = 2;

/// Bytes of an event suppression structure (§2.8.14).
pub const EVENT_BYTES: usize = size_of::<u32>();

// The words below are put together as a little-endian machine lays them out.
const _: () = assert!(cfg!(target_endian = "little"));

/// Checks the size of a packed queue as it comes from the peer: any up to [`QUEUE_SIZE_MAX`],
/// powers of two or not (§2.8.10.1).
///
/// # Errors
/// [`LayoutError::PackedSize`] for any other.
pub fn check_packed_size(size: u32) -> Result<u16, LayoutError> {
    match u16::try_from(size) {
        Ok(n) if (1..=QUEUE_SIZE_MAX).contains(&n) => Ok(n),
        _ => Err(LayoutError::PackedSize(size)),
    }
}

/// Length, buffer id and flags of a descriptor (`struct pvirtq_desc`, §2.8.13): its second half,
/// which is read and written as one word, so that what is judged was there at one moment.
///
/// An aligned load of 8 bytes is a single access on the machines this runs on, whatever the widths of
/// the peer's stores: who sees the new flags sees the length and id that were stored before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

impl Word {
    #[inline]
    pub(super) const fn new(len: u32, id: u16, flags: u16) -> Self {
        Self(len as u64 | (id as u64) << 32 | (flags as u64) << 48)
    }

    // The fields are as wide as these types.
    #[inline]
    #[allow(clippy::cast_possible_truncation)]
    pub(super) const fn len(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)]
    pub(super) const fn id(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    pub(super) const fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

/// A place in the ring: a descriptor and the wrap counter (§2.8.1) of the lap.
///
/// # Invariants
/// 1. `available` is [`DESC_F_AVAIL`] where the wrap counter is 1, and [`DESC_F_USED`] where it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    index: u16,
    /// The marks of an available descriptor in this lap. Each look at a descriptor compares them, so the
    /// wrap counter is kept in their shape.
    available: u16,
}

impl Position {
    /// Where both sides start (§2.8.1).
    pub(super) const START: Self = Self::new(0, true);

    #[inline]
    pub(super) const fn new(index: u16, wrap: bool) -> Self {
        Self { index, available: if wrap { DESC_F_AVAIL } else { DESC_F_USED } }
    }

    /// 15 bits of index, then the wrap counter: as in the event structure and in vhost-user's
    /// SET_VRING_BASE.
    #[inline]
    pub(super) const fn from_bits(bits: u16) -> Self {
        Self::new(bits & 0x7fff, bits >> 15 != 0)
    }

    #[inline]
    pub(super) const fn to_bits(self) -> u16 {
        self.index | (self.wrap() as u16) << 15
    }

    #[inline]
    pub(super) const fn index(self) -> u16 {
        self.index
    }

    #[inline]
    pub(super) const fn wrap(self) -> bool {
        self.available == DESC_F_AVAIL
    }

    /// Goes on by `count` descriptors, at most `size`.
    #[inline]
    pub(super) fn advance(&mut self, count: u16, size: u16) {
        debug_assert!(count <= size && self.index() < size);
        // At most 32767 + 32768: fits.
        self.index += count;
        if self.index >= size {
            self.index -= size;
            self.available ^= MARKS;
        }
    }

    /// Goes back by `count` descriptors, at most `size`.
    pub(super) fn back(mut self, count: u16, size: u16) -> Self {
        debug_assert!(count <= size && self.index() < size);
        if self.index < count {
            self.index += size;
            self.available ^= MARKS;
        }
        self.index -= count;
        self
    }

    /// True if these flags say that the driver has made the descriptor here available in this lap.
    #[inline]
    pub(super) const fn is_available(self, flags: u16) -> bool {
        flags & MARKS == self.available()
    }

    /// True if these flags say that the device has used the descriptor here in this lap.
    #[inline]
    pub(super) const fn is_used(self, flags: u16) -> bool {
        flags & MARKS == self.used()
    }

    /// The marks of an available descriptor.
    #[inline]
    pub(super) const fn available(self) -> u16 {
        self.available
    }

    /// The marks of a used descriptor: both the wrap counter.
    #[inline]
    pub(super) const fn used(self) -> u16 {
        self.available ^ DESC_F_USED
    }

    /// Descriptors from `earlier` to here, at most two laps apart.
    #[inline]
    fn since(self, earlier: Self, size: u16) -> i32 {
        let lap = if self.wrap() == earlier.wrap() { 0 } else { i32::from(size) };
        i32::from(self.index()) - i32::from(earlier.index()) + lap
    }
}

/// Where the device is in a packed ring, as vhost-user's GET_VRING_BASE and SET_VRING_BASE put it:
/// bits 0–14 the next descriptor to become available, bit 15 its wrap counter, bits 16–30 the next
/// to be used, bit 31 its wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBase(pub u32);

impl PackedBase {
    /// A ring that nobody has used yet.
    pub const START: Self = Self::new(Position::START, Position::START);

    pub(super) const fn new(avail: Position, used: Position) -> Self {
        Self(avail.to_bits() as u32 | (used.to_bits() as u32) << 16)
    }

    /// A base of both sides at one place, counted in descriptors since the start: for front-ends
    /// that begin somewhere else to see the ring wrap.
    #[must_use]
    pub const fn after(descs: u16, size: u16) -> Self {
        let at = Position::new(descs % size, (descs / size) % 2 == 0);
        Self::new(at, at)
    }

    /// The next available and the next used descriptor, and how many descriptors lie between them.
    pub(super) fn positions(self, size: u16) -> Result<(Position, Position, u16), LayoutError> {
        // The two halves.
        #[allow(clippy::cast_possible_truncation)]
        let (low, high) = (self.0 as u16, (self.0 >> 16) as u16);
        let avail = Position::from_bits(low);
        // Front-ends that know only the lower half (DPDK) speak of drained rings.
        let used = if high == 0 { avail } else { Position::from_bits(high) };
        let between = avail.since(used, size);
        match u16::try_from(between) {
            Ok(n) if n <= size && avail.index() < size && used.index() < size => {
                Ok((avail, used, n))
            }
            _ => Err(LayoutError::PackedBase(self.0)),
        }
    }
}

/// What one side wants to be told (`struct pvirtq_event_suppress`, §2.8.14), as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event(pub(super) u32);

impl Event {
    pub(super) const ALL: Self = Self(EVENT_ENABLE << 16);
    pub(super) const NONE: Self = Self(EVENT_DISABLE << 16);

    /// Once the descriptor `at` has changed hands.
    #[inline]
    pub(super) const fn at(at: Position) -> Self {
        Self(EVENT_DESC << 16 | at.to_bits() as u32)
    }

    /// Does the owner want to hear that `moved` descriptors, the last of them before `now`, have
    /// changed hands? (§2.8.10; the reserved value 3 asks for too much rather than too little.)
    #[inline]
    pub(super) fn is_passed(self, now: Position, moved: u32, size: u16, event_idx: bool) -> bool {
        match self.0 >> 16 & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if event_idx => {
                // The lower half.
                #[allow(clippy::cast_possible_truncation)]
                let event = Position::from_bits(self.0 as u16);
                (1..=i64::from(moved)).contains(&now.since(event, size).into())
            }
            _ => true,
        }
    }
}

/// Where the three parts of a packed virtqueue are, in our address space.
#[derive(Clone, Copy, Debug)]
pub struct PackedAddresses {
    /// Descriptor ring: 16 bytes for each descriptor.
    pub desc: *mut u8,
    /// Driver area: what the driver wants to be told, [`EVENT_BYTES`].
    pub driver: *mut u8,
    /// Device area: what the device wants to be told, [`EVENT_BYTES`].
    pub device: *mut u8,
}

/// Typed pointers into a packed virtqueue, shared by its device and its driver side.
///
/// # Invariants
/// 1. The three parts are mapped, aligned and long enough for `size` descriptors while this exists.
/// 2. `size` is between 1 and [`QUEUE_SIZE_MAX`].
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedMemory {
    desc: *mut u64,
    driver: *mut u32,
    device: *mut u32,
    size: u16,
}

impl PackedMemory {
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, for as long as the
    /// returned value or a copy of it is in use.
    pub(super) unsafe fn new(size: u16, at: PackedAddresses) -> Result<Self, LayoutError> {
        check_packed_size(u32::from(size))?;
        for (name, address, align) in
            [("descriptor", at.desc, 16), ("driver", at.driver, 4), ("device", at.device, 4)]
        {
            if (address as usize) % align != 0 {
                return Err(LayoutError::Unaligned(name, align));
            }
        }
        // The casts keep the alignment just checked.
        #[allow(clippy::cast_ptr_alignment)]
        let (desc, driver, device) = (at.desc.cast(), at.driver.cast(), at.device.cast());
        Ok(Self { desc, driver, device, size })
    }

    #[inline]
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// The address field of a descriptor.
    #[inline]
    pub(super) fn addr(&self, index: u16) -> *mut u64 {
        debug_assert!(index < self.size);
        self.desc.wrapping_add(2 * usize::from(index))
    }

    /// The rest of a descriptor, a [`Word`].
    #[inline]
    pub(super) fn word(&self, index: u16) -> &AtomicU64 {
        debug_assert!(index < self.size);
        // SAFETY: the word lies in the descriptor ring, which is mapped and aligned to 16 bytes
        // (invariant 1); both sides only touch it atomically.
        unsafe { u64_at(self.desc.add(2 * usize::from(index) + 1)) }
    }

    /// What the driver wants to be told.
    #[inline]
    pub(super) fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: mapped and aligned to 4 bytes (invariant 1); both sides only touch it atomically.
        unsafe { u32_at(self.driver) }
    }

    /// What the device wants to be told.
    #[inline]
    pub(super) fn device_event(&self) -> &AtomicU32 {
        // SAFETY: as in `driver_event`.
        unsafe { u32_at(self.device) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a08_every_packed_queue_size_is_judged() {
        for size in
            (0..=if cfg!(miri) { 700 } else { 70_000 }).chain([u32::MAX, 1 << 16, (1 << 16) + 128])
        {
            assert_eq!(check_packed_size(size).is_ok(), (1..=32768).contains(&size), "{size}");
        }
    }

    /// Against counting: two sides that only ever count up, over all offsets and laps of small rings.
    #[test]
    fn verify_spec_2_8_10_events_pass_at_the_wrap() {
        for size in 1..=5u16 {
            let place = |count: u16| {
                let at = PackedBase::after(count, size);
                Position::from_bits(u16::try_from(at.0 & 0xffff).unwrap())
            };
            for now in 2 * size..4 * size {
                for moved in 0..=size {
                    // The event can name what is to come, or what was in the lap before.
                    for event in now - size..now + size {
                        let passed = (now - moved..now).contains(&event);
                        let said =
                            Event::at(place(event)).is_passed(place(now), moved.into(), size, true);
                        assert_eq!(said, passed, "{size}: {event} in {now} - {moved}");
                    }
                }
            }
        }
        let now = Position::START;
        assert!(Event::ALL.is_passed(now, 1, 4, true) && !Event::NONE.is_passed(now, 1, 4, true));
        assert!(Event::at(now).is_passed(now, 1, 4, false), "DESC without EVENT_IDX means always");
        assert!(Event(3 << 16).is_passed(now, 1, 4, true), "the reserved value");
        assert!(!Event(2 << 16 | 0x7fff).is_passed(now, 4, 4, true), "beyond the ring");
    }

    #[test]
    fn bases_are_judged() {
        let start = PackedBase::START.positions(8).unwrap();
        assert_eq!(start, (Position::START, Position::START, 0));
        let low_half = PackedBase(0x8003).positions(8).unwrap();
        assert_eq!((low_half.0, low_half.2), (low_half.1, 0));
        // Five taken and not returned, over the seam of two laps.
        assert_eq!(PackedBase(0x8006_0003).positions(8).unwrap().2, 5);
        for bad in [0x8000_8008, 0x8008_8000, 0x8003_8002, 0x0003_8002 | 1 << 30, 0x0001_8002] {
            assert_eq!(PackedBase(bad).positions(8), Err(LayoutError::PackedBase(bad)), "{bad:x}");
        }
        for count in 0..40 {
            let base = PackedBase::after(count, 8);
            let (avail, used, between) = base.positions(8).unwrap();
            assert_eq!((PackedBase::new(avail, used), between), (base, 0));
        }
    }
}
