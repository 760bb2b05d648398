//! What a record of the chains in flight needs of the device side of a packed virtqueue.

use super::{Copied, PackedDevice};
use crate::virtqueue::chain::{Chain, Sums};
use crate::virtqueue::chain_error::ChainError;
use crate::virtqueue::layout::DESC_F_INDIRECT;
use crate::virtqueue::packed_layout::{Position, Word};
use crate::virtqueue::store::next_store;
use crate::virtqueue::types::Head;
use ringway_core::mem::Translator;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

impl PackedDevice {
    /// The next descriptor to be used.
    pub(in crate::virtqueue) fn used(&self) -> Position {
        self.used
    }

    /// Descriptors taken and not returned.
    pub(in crate::virtqueue) fn taken(&self) -> u16 {
        self.taken
    }

    /// True if the driver has made the descriptor at `at` available and it was not used since.
    pub(in crate::virtqueue) fn is_available(&self, at: Position) -> bool {
        at.is_available(Word(self.ring.word(at.index()).load(Acquire)).flags())
    }

    /// The chain that was handed out last.
    pub(in crate::virtqueue) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Descriptors of a chain in flight.
    pub(in crate::virtqueue) fn length(&self, id: u16) -> u16 {
        self.lengths[usize::from(id)]
    }

    /// A descriptor of the chain that was popped last, counted from its end.
    pub(in crate::virtqueue) fn taken_last(&self, from_end: u16) -> Copied {
        let (next, size) = (self.next.index(), self.ring.size());
        let back = from_end + 1;
        let at = if next >= back { next - back } else { next + size - back };
        // SAFETY: as in `walk`; the guest may have changed it meanwhile, so it is judged anew when it
        // is read from the record.
        let addr = unsafe { self.ring.addr(at).read_volatile() };
        Copied { addr, word: Word(self.ring.word(at).load(Relaxed)) }
    }

    /// Goes on after another device: `used` is the next descriptor to be used, and the chains of
    /// `lengths` (id and descriptors, at most the queue size together) were taken and not returned.
    pub(in crate::virtqueue) fn resume(
        &mut self,
        used: Position,
        lengths: impl Iterator<Item = (u16, u16)>,
    ) {
        self.taken = 0;
        for (id, length) in lengths {
            self.lengths[usize::from(id)] = length;
            self.taken += length;
        }
        (self.used, self.next) = (used, used);
        self.next.advance(self.taken, self.ring.size());
    }

    /// Takes back the marks that another device has put on descriptors of a batch it did not live to
    /// publish: behind the first descriptor that this one uses, the driver would see them.
    pub(in crate::virtqueue) fn withdraw(&mut self) {
        let mut at = self.used;
        for _ in 0..self.taken {
            let word = Word(self.ring.word(at.index()).load(Relaxed));
            if at.is_used(word.flags()) {
                next_store();
                let word = Word::new(word.len(), word.id(), at.available());
                self.ring.word(at.index()).store(word.0, Release);
            }
            at.advance(1, self.ring.size());
        }
    }

    /// Hands a chain out that [`PackedDevice::resume`] was told of, from a copy of its descriptors.
    pub(in crate::virtqueue) fn retake(
        &mut self,
        id: u16,
        descs: &[Copied],
        mem: &mut Translator,
    ) -> (Head, Result<&Chain, ChainError>) {
        let verdict = match descs {
            [table] if self.indirect && table.flags() & DESC_F_INDIRECT != 0 => {
                self.chain.walk_packed_table(table.desc(), mem)
            }
            _ => {
                let mut sums = Sums::default();
                let verdict = descs.iter().try_for_each(|copied| {
                    if copied.flags() & DESC_F_INDIRECT != 0 {
                        return Err(ChainError::BadIndirect);
                    }
                    self.chain.add(&mut sums, copied.desc())
                });
                self.chain.settle(sums);
                verdict
            }
        };
        if verdict.is_err() {
            self.chain.refuse(descs.len());
        }
        (Head(id), verdict.map(|()| &self.chain))
    }
}
