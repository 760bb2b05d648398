//! How the device side of a packed virtqueue begins, where it is, and what is rare.

use super::PackedDevice;
use crate::virtqueue::chain::Chain;
use crate::virtqueue::layout::LayoutError;
use crate::virtqueue::packed_layout::{PackedAddresses, PackedBase, PackedMemory, Position, Word};
use crate::virtqueue::types::{Head, Unpublished};
use std::sync::atomic::Ordering::Relaxed;

impl PackedDevice {
    /// A queue of `size` descriptors at `at` that goes on from `base` (vhost-user SET_VRING_BASE).
    ///
    /// Some front-ends say 0 of a new ring, where [`PackedBase::START`] belongs: a ring that really
    /// is at 0 has been used for a lap, so that its first descriptor has marks.
    ///
    /// # Errors
    /// [`LayoutError`] if size, alignment or base break §2.8.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, for as long as the
    /// queue exists.
    pub unsafe fn new(
        size: u16,
        at: PackedAddresses,
        base: PackedBase,
        event_idx: bool,
        indirect: bool,
    ) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { PackedMemory::new(size, at)? };
        let first = Word(ring.word(0).load(Relaxed));
        let is_new = base.0 == 0 && Position::from_bits(0).is_used(first.flags());
        let base = if is_new { PackedBase::START } else { base };
        let (next, used, taken) = base.positions(size)?;
        Ok(Self {
            ring,
            next,
            used,
            taken,
            pushed: 0,
            first_at: 0,
            first: Word(0),
            event_idx,
            indirect,
            armed: true,
            lengths: vec![0; usize::from(size)].into_boxed_slice(),
            chain: Chain::for_queue(size),
            idle: true,
        })
    }

    /// Queue size, in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Where the device has got to: the answer to vhost-user GET_VRING_BASE once nothing is in
    /// flight.
    #[must_use]
    pub fn base(&self) -> PackedBase {
        PackedBase::new(self.next, self.used)
    }

    /// True if nobody has used the ring yet: it is where rings begin, and what its driver has not made available there
    /// is zero still. A place alone comes back every two laps, and a ring that is all available says nothing.
    pub(in crate::virtqueue) fn is_fresh(&self) -> bool {
        let waits = |at| {
            let word = Word(self.ring.word(at).load(Relaxed));
            // SAFETY: the descriptor is in the ring (PackedMemory invariant 1).
            let addr = unsafe { self.ring.addr(at).read_volatile() };
            let offered = Position::START.is_available(word.flags());
            (!offered).then_some(word == Word(0) && addr == 0)
        };
        let mut rest = (0..self.ring.size()).filter_map(waits).peekable();
        self.base() == PackedBase::START && rest.peek().is_some() && rest.all(|zero| zero)
    }

    /// Puts the chain that was popped last back, as if it had not been popped.
    #[cold]
    #[allow(clippy::needless_pass_by_value)]
    pub fn put_back(&mut self, head: Head) {
        let length = std::mem::take(&mut self.lengths[usize::from(head.index())]);
        self.taken -= length;
        self.next = self.next.back(length, self.ring.size());
    }

    /// The descriptors that the next [`PackedDevice::publish`] gives back.
    #[must_use]
    pub fn unpublished(&self) -> Unpublished {
        Unpublished { first: self.first_at, count: self.pushed }
    }
}
