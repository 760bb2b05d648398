//! The device side of a split virtqueue (VIRTIO 1.2 §2.7).
//!
//! ```text
//! while let Some((head, chain)) = queue.pop(…)? { … }   // one load of avail.idx per batch
//! queue.push(head, written);                            // used ring entries, not yet visible
//! if queue.publish() { call() }                         // one store of used.idx per batch
//! match queue.arm()? { Quiet => sleep, WorkArrived => go on }
//! ```
//!
//! How it begins, and what is rare: `split/setup.rs`; how it waits: `split/arm.rs`.

mod arm;
mod setup;

use super::chain::Chain;
use super::chain_error::ChainError;
use super::layout::{AVAIL_F_NO_INTERRUPT, UsedElem};
use super::split_memory::{SplitMemory, event_passed};
use super::store::next_store;
use super::types::{Broken, Head};
use crate::shared::{fence, prefetch};
use ringway_core::mem::Translator;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// How many chains ahead of the one being popped their headers are fetched.
const AHEAD: u16 = 4;

/// One split virtqueue, seen from the device.
///
/// # Invariants
/// 1. `used_next - used_published` and the number of bits set in `in_flight` are at most the queue
///    size.
/// 2. `avail_seen - next_avail` is at most the queue size.
#[derive(Debug)]
pub struct SplitDevice {
    ring: SplitMemory,
    /// The next entry of the available ring to read.
    next_avail: u16,
    /// The available index as last read.
    avail_seen: u16,
    /// The next entry of the used ring to write.
    used_next: u16,
    /// The used index as last published.
    used_published: u16,
    event_idx: bool,
    indirect: bool,
    /// One bit for each chain popped and not pushed.
    in_flight: Box<[u64]>,
    chain: Chain,
    /// Where the last chain began: a driver with one request at a time uses it again and again.
    last: *const u8,
    /// What the used ring holds as far as this side has written it.
    used: Box<[UsedElem]>,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for SplitDevice {}

impl SplitDevice {
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
        if self.next_avail == self.avail_seen {
            prefetch(self.last);
            if !self.read_avail_index()? {
                return Ok(None);
            }
            for ahead in 0..AHEAD {
                self.prefetch(ahead, mem);
            }
        }
        self.prefetch(AHEAD, mem);
        let head = self.ring.avail_ring(self.next_avail).load(Relaxed);
        if head >= self.ring.size() {
            return Err(Broken::HeadOutOfRange(head));
        }
        let (word, bit) = (usize::from(head / 64), 1u64 << (head % 64));
        if self.in_flight[word] & bit != 0 {
            return Err(Broken::HeadInFlight(head));
        }
        self.in_flight[word] |= bit;
        self.next_avail = self.next_avail.wrapping_add(1);
        let walked = self.chain.walk(&self.ring, head, mem, self.indirect);
        Ok(Some((Head(head), walked.map(|()| &self.chain))))
    }

    /// Prefetches the first buffer, a request's header, of a chain that was seen and not popped yet.
    /// What is read for it is not judged, and is read again by `pop`.
    #[inline(always)]
    fn prefetch(&mut self, ahead: u16, mem: &mut Translator) {
        if self.avail_seen.wrapping_sub(self.next_avail) <= ahead {
            return;
        }
        let head = self.ring.avail_ring(self.next_avail.wrapping_add(ahead)).load(Relaxed);
        if head < self.ring.size() {
            // SAFETY: `head` is in the table, which is mapped (SplitMemory invariant 1).
            let addr = unsafe { (&raw const (*self.ring.desc(head)).addr).read_volatile() };
            self.last = mem.guess(addr);
            prefetch(self.last);
        }
    }

    /// Reads the available index; true if there are new chains.
    #[inline]
    fn read_avail_index(&mut self) -> Result<bool, Broken> {
        // Acquire: what the driver wrote before the index is visible after this load.
        let idx = self.ring.avail_idx().load(Acquire);
        let new = idx.wrapping_sub(self.next_avail);
        if new > self.ring.size() {
            return Err(Broken::IndexJump {
                from: self.next_avail,
                to: idx,
                size: self.ring.size(),
            });
        }
        self.avail_seen = idx;
        Ok(new != 0)
    }

    /// Returns a chain to the driver with the number of bytes written to its writable part. Not
    /// visible before [`SplitDevice::publish`].
    #[inline]
    #[allow(clippy::needless_pass_by_value)]
    pub fn push(&mut self, head: Head, written: u32) {
        let id = head.index();
        let (word, bit) = (usize::from(id / 64), 1u64 << (id % 64));
        debug_assert!(self.in_flight[word] & bit != 0, "chain {id} is not in flight");
        self.in_flight[word] &= !bit;
        let entry = UsedElem { id: u32::from(id), len: written };
        let at = usize::from(self.used_next) & (self.used.len() - 1);
        if self.used[at] != entry {
            self.used[at] = entry;
            next_store();
            // SAFETY: the entry lies in the used ring (SplitMemory invariant 1); the driver reads it
            // only after `publish`.
            unsafe { self.ring.used_ring(self.used_next).write_volatile(entry) };
        }
        self.used_next = self.used_next.wrapping_add(1);
    }

    /// Makes the pushed chains visible; true if the driver wants to be called (§2.7.7).
    #[inline]
    #[must_use = "true means the driver waits for a call"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.used_published, self.used_next);
        if old == new {
            return false;
        }
        next_store();
        // Release: the entries and the data are visible before the index.
        self.ring.used_idx().store(new, Release);
        self.used_published = new;
        // The index must be visible before the driver's wish is read: otherwise both sides could
        // decide that the other one will look again.
        fence(SeqCst);
        if self.event_idx {
            event_passed(self.ring.used_event().load(Relaxed), new, old)
        } else {
            self.ring.avail_flags().load(Relaxed) & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// True if [`SplitDevice::pop`] would find something, if only that the driver is wrong.
    #[inline]
    #[must_use]
    pub fn has_work(&self) -> bool {
        prefetch(self.last);
        self.next_avail != self.avail_seen || self.ring.avail_idx().load(Relaxed) != self.next_avail
    }
}
