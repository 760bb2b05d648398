//! The device side of a packed virtqueue (VIRTIO 1.2 §2.8), with the verbs of the split one.
//!
//! ```text
//! while let Some((head, chain)) = queue.pop(…)? { … }   // one load of a descriptor's flags per chain
//! queue.push(head, written);                            // used descriptors, not yet visible
//! if queue.publish() { call() }                         // one release store per batch
//! match queue.arm()? { Quiet => sleep, WorkArrived => go on }
//! ```
//!
//! The driver looks for used descriptors in ring order (§2.8.2), so a batch stays invisible until
//! its first descriptor is marked: that one is written last.
//!
//! How it begins, and what is rare: `packed/setup.rs`; how it waits: `packed/arm.rs`; what a record of the
//! chains in flight needs: `packed/record.rs`.

mod arm;
mod record;
mod setup;

use super::chain::{Chain, Sums};
use super::chain_error::ChainError;
use super::layout::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use super::packed_layout::{Event, PackedMemory, Position, Word};
use super::store::next_store;
use super::types::{Broken, Head};
use crate::shared::{fence, prefetch};
use ringway_core::mem::Translator;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// How many chains ahead of the one being popped their headers are fetched.
const AHEAD: u16 = 4;

/// A descriptor as it was copied out of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copied {
    pub(super) addr: u64,
    pub(super) word: Word,
}

impl Copied {
    #[inline]
    fn flags(self) -> u16 {
        self.word.flags()
    }

    /// What a chain keeps of it.
    #[inline]
    fn desc(self) -> Desc {
        let Self { addr, word } = self;
        Desc { addr, len: word.len(), flags: word.flags() & DESC_F_WRITE, next: 0 }
    }
}

/// One packed virtqueue, seen from the device.
///
/// # Invariants
/// 1. `lengths[id]` is the number of descriptors of the chain in flight with that buffer id, or 0.
/// 2. `taken` descriptors lie between `used` and `next`; the chains in flight have no more than that
///    together. `taken + pushed` is at most the queue size.
/// 3. While `pushed` is not 0, `first` holds what belongs into the descriptor `first_at`, the first
///    of the batch that is not visible yet.
#[derive(Debug)]
pub struct PackedDevice {
    ring: PackedMemory,
    /// The next descriptor to become available.
    next: Position,
    /// The next descriptor to be used.
    used: Position,
    taken: u16,
    /// Descriptors skipped by chains pushed and not published.
    pushed: u16,
    first_at: u16,
    first: Word,
    event_idx: bool,
    indirect: bool,
    /// The driver may kick.
    armed: bool,
    lengths: Box<[u16]>,
    chain: Chain,
    /// The look before found nothing.
    idle: bool,
}

// SAFETY: the ring memory stays mapped while this exists, on whatever thread it runs.
unsafe impl Send for PackedDevice {}

impl PackedDevice {
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
        let Some(first) = self.next_available() else {
            self.idle = true;
            return Ok(None);
        };
        let (at, id, verdict) = self.walk(first, mem)?;
        let size = self.ring.size();
        // One for each id below the queue size.
        let Some(length) = self.lengths.get_mut(usize::from(id)) else {
            return Err(Broken::IdOutOfRange(id));
        };
        if *length != 0 {
            return Err(Broken::IdInFlight(id));
        }
        // From `next` to the end of the chain: at least one descriptor, because `walk` took one.
        *length = at.index().wrapping_sub(self.next.index());
        if at.wrap() != self.next.wrap() {
            *length = length.wrapping_add(size);
        }
        let length = *length;
        self.taken += length;
        self.next = at;
        // Only of a batch: the driver is about to write the descriptors behind a single chain.
        if self.next_available().is_some() {
            if std::mem::take(&mut self.idle) {
                for ahead in 0..AHEAD {
                    self.prefetch(ahead.saturating_mul(length), mem);
                }
            }
            self.prefetch(AHEAD.saturating_mul(length), mem);
        }
        if verdict.is_err() {
            self.chain.refuse(length.into());
        }
        Ok(Some((Head(id), verdict.map(|()| &self.chain))))
    }

    /// Prefetches the buffer of a descriptor further on, if the driver has made it available: the
    /// header of a request, if the chains before it are as long as the last. What is read for it is
    /// not judged, and is read again by `pop`.
    #[inline(always)]
    fn prefetch(&self, further: u16, mem: &Translator) {
        let size = self.ring.size();
        let mut at = self.next;
        if further >= size {
            return;
        }
        at.advance(further, size);
        if at.is_available(Word(self.ring.word(at.index()).load(Relaxed)).flags()) {
            // SAFETY: the descriptor is in the ring (PackedMemory invariant 1).
            prefetch(mem.guess(unsafe { self.ring.addr(at.index()).read_volatile() }));
        }
    }

    /// The next descriptor, if the driver has made it available.
    #[inline]
    fn next_available(&self) -> Option<Word> {
        // Acquire: what the driver wrote before it marked the descriptor is visible after this load.
        let word = Word(self.ring.word(self.next.index()).load(Acquire));
        self.next.is_available(word.flags()).then_some(word)
    }

    /// Copies the chain that begins with `first` at `next`. Returns where it ends, its id and what
    /// is wrong with it.
    #[inline]
    fn walk(
        &mut self,
        first: Word,
        mem: &mut Translator,
    ) -> Result<(Position, u16, Result<(), ChainError>), Broken> {
        let size = self.ring.size();
        let (mut at, mut word) = (self.next, first);
        let mut sums = Sums::default();
        // A chain cannot have more descriptors than the ring has left: what was pushed and not
        // published is not the driver's yet.
        for taken in self.taken + self.pushed..size {
            // SAFETY: the descriptor is in the ring (PackedMemory invariant 1: `at` is below the
            // size). Volatile: the driver may write at the same time; only the copy is used.
            let addr = unsafe { self.ring.addr(at.index()).read_volatile() };
            let copied = Copied { addr, word };
            let added = if copied.flags() & DESC_F_INDIRECT == 0 {
                self.chain.add(&mut sums, copied.desc())
            } else if self.indirect && at == self.next && copied.flags() & DESC_F_NEXT == 0 {
                let walked = self.chain.walk_packed_table(copied.desc(), mem);
                at.advance(1, size);
                return Ok((at, word.id(), walked));
            } else {
                Err(ChainError::BadIndirect)
            };
            if let Err(error) = added {
                // `pop` counts all of its descriptors as refused, these too.
                self.chain.settle(Sums::default());
                let (end, id) = self.skip_rest(at, word, taken)?;
                return Ok((end, id, Err(error)));
            }
            at.advance(1, size);
            if copied.flags() & DESC_F_NEXT == 0 {
                self.chain.settle(sums);
                return Ok((at, word.id(), Ok(())));
            }
            word = self.following(at)?;
        }
        Err(Broken::Overrun(size))
    }

    /// A descriptor that the one before says is in its chain.
    #[inline]
    fn following(&self, at: Position) -> Result<Word, Broken> {
        // Visible: the driver marks the first descriptor of a chain last (§2.8.6).
        let word = Word(self.ring.word(at.index()).load(Relaxed));
        if at.is_available(word.flags()) { Ok(word) } else { Err(Broken::HalfChain(at.index())) }
    }

    /// Follows a chain whose descriptor `word` at `at` is wrong to its end, where its id is (§2.8.6).
    /// `taken` descriptors before it are the device's. Returns where the chain ends, and its id.
    #[cold]
    fn skip_rest(
        &self,
        mut at: Position,
        mut word: Word,
        taken: u16,
    ) -> Result<(Position, u16), Broken> {
        let size = self.ring.size();
        for _ in taken..size {
            at.advance(1, size);
            if word.flags() & DESC_F_NEXT == 0 {
                return Ok((at, word.id()));
            }
            word = self.following(at)?;
        }
        Err(Broken::Overrun(size))
    }

    /// Returns a chain to the driver with the number of bytes written to its writable part. Not
    /// visible before [`PackedDevice::publish`].
    #[inline]
    #[allow(clippy::needless_pass_by_value)]
    pub fn push(&mut self, head: Head, written: u32) {
        let id = head.index();
        let length = std::mem::take(&mut self.lengths[usize::from(id)]);
        debug_assert!(length != 0, "chain {id} is not in flight");
        let flags = self.used.used() | if written == 0 { 0 } else { DESC_F_WRITE };
        let word = Word::new(written, id, flags);
        if self.pushed == 0 {
            (self.first_at, self.first) = (self.used.index(), word);
        } else {
            next_store();
            self.ring.word(self.used.index()).store(word.0, Relaxed);
        }
        self.used.advance(length, self.ring.size());
        self.pushed += length;
        self.taken -= length;
    }

    /// Makes the pushed chains visible; true if the driver wants to be called (§2.8.10).
    #[inline]
    #[must_use = "true means the driver waits for a call"]
    pub fn publish(&mut self) -> bool {
        if self.pushed == 0 {
            return false;
        }
        let moved = std::mem::take(&mut self.pushed);
        next_store();
        // Release: the data and the other descriptors of the batch are visible before this one.
        self.ring.word(self.first_at).store(self.first.0, Release);
        // The mark must be visible before the driver's wish is read: otherwise both sides could
        // decide that the other one will look again.
        fence(SeqCst);
        let event = Event(self.ring.driver_event().load(Relaxed));
        event.is_passed(self.used, moved.into(), self.ring.size(), self.event_idx)
    }

    /// True if [`PackedDevice::pop`] would find something.
    #[inline]
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.next_available().is_some()
    }
}
