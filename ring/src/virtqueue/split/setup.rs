//! How the device side of a split virtqueue begins, where it is, and what is rare.

use super::SplitDevice;
use crate::virtqueue::chain::Chain;
use crate::virtqueue::chain_error::ChainError;
use crate::virtqueue::layout::{LayoutError, SplitAddresses, UsedElem};
use crate::virtqueue::split_memory::SplitMemory;
use crate::virtqueue::types::{Head, Unpublished};
use ringway_core::mem::Translator;
use std::sync::atomic::Ordering::Relaxed;

impl SplitDevice {
    /// A queue of `size` descriptors at `at` whose next available entry is `next_avail`
    /// (vhost-user SET_VRING_BASE). The used index is taken from the ring.
    ///
    /// # Errors
    /// [`LayoutError`] if size or alignment break §2.7.
    ///
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, for as long as the
    /// queue exists.
    pub unsafe fn new(
        size: u16,
        at: SplitAddresses,
        next_avail: u16,
        event_idx: bool,
        indirect: bool,
    ) -> Result<Self, LayoutError> {
        // SAFETY: the caller vouches for the memory.
        let ring = unsafe { SplitMemory::new(size, at)? };
        let used = ring.used_idx().load(Relaxed);
        Ok(Self {
            ring,
            next_avail,
            avail_seen: next_avail,
            used_next: used,
            used_published: used,
            event_idx,
            indirect,
            in_flight: vec![0; usize::from(size).div_ceil(64)].into_boxed_slice(),
            chain: Chain::for_queue(size),
            last: std::ptr::null(),
            used: vec![UsedElem { id: u32::MAX, len: 0 }; usize::from(size)].into_boxed_slice(),
        })
    }

    /// Queue size, in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// The next available entry the device will read: the answer to vhost-user GET_VRING_BASE once
    /// nothing is in flight.
    #[must_use]
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The chain that was handed out last.
    pub(in crate::virtqueue) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// The next entry of the used ring to write.
    pub(in crate::virtqueue) fn used_index(&self) -> u16 {
        self.used_next
    }

    /// True if nobody has used the ring yet: it is where rings begin, and the zeroes that its driver has left for the
    /// device to write are there still. An index alone comes back to 0 after 65,536 chains.
    pub(in crate::virtqueue) fn is_fresh(&self) -> bool {
        // SAFETY: the entry is in the used ring, which is mapped and aligned (SplitMemory invariant 1).
        let entry = |at| unsafe { self.ring.used_ring(at).read_volatile() };
        let zero = UsedElem { id: 0, len: 0 };
        self.next_avail == 0
            && self.used_next == 0
            && (0..self.ring.size()).all(|at| entry(at) == zero)
    }

    /// Goes on after another device: `used` is the ring's index as this one has read it, and the
    /// chains of `heads`, each below the queue size, were taken and not returned.
    pub(in crate::virtqueue) fn resume(&mut self, used: u16, heads: &[u16]) {
        for &head in heads {
            self.in_flight[usize::from(head / 64)] |= 1 << (head % 64);
        }
        // At most the queue size.
        #[allow(clippy::cast_possible_truncation)]
        let taken = heads.len() as u16;
        self.next_avail = used.wrapping_add(taken);
        self.avail_seen = self.next_avail;
    }

    /// Hands a chain out that [`SplitDevice::resume`] was told of.
    pub(in crate::virtqueue) fn retake(
        &mut self,
        head: u16,
        mem: &mut Translator,
    ) -> (Head, Result<&Chain, ChainError>) {
        let walked = self.chain.walk(&self.ring, head, mem, self.indirect);
        (Head(head), walked.map(|()| &self.chain))
    }

    /// Puts the chain that was popped last back, as if it had not been popped.
    #[cold]
    #[allow(clippy::needless_pass_by_value)]
    pub fn put_back(&mut self, head: Head) {
        let id = head.index();
        self.in_flight[usize::from(id / 64)] &= !(1 << (id % 64));
        self.next_avail = self.next_avail.wrapping_sub(1);
    }

    /// The entries of the used ring that the next [`SplitDevice::publish`] makes visible.
    #[must_use]
    pub fn unpublished(&self) -> Unpublished {
        Unpublished {
            first: self.used_published % self.ring.size(),
            count: self.used_next.wrapping_sub(self.used_published),
        }
    }
}
