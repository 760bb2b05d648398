//! What is wrong with a request, said before it is queued.

use super::BlkQueue;
use super::limits::QueueLimits;
use super::wire::WireRequest;
use crate::completion::Data;
use crate::error::Refusal;
use crate::memory::{Buffer, pieces_of};
use crate::rejected::{Rejected, reject};

impl<C> BlkQueue<C> {
    /// Takes a read or write that does not take the fast path: it has several buffers, or one that is longer
    /// than a piece may be, there is something wrong with it, or the scheduler has to know of it.
    #[inline(never)]
    pub(super) fn start_checked(
        &mut self,
        kind: u32,
        offset: u64,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        match self.judge(offset, data.as_slice()) {
            Some(why) => reject(why, ctx, data),
            None if self.fast_max > 0 => self.add_pieces(kind, offset, data, ctx),
            None => {
                let wire = WireRequest { kind, offset, len: data.bytes(), flags: None };
                self.start_slow(wire, data, ctx)
            }
        }
    }

    /// What is wrong with a request for these buffers, if anything.
    pub(super) fn judge(&self, offset: u64, buffers: &[Buffer]) -> Option<Refusal> {
        let QueueLimits { seg_max, size_max, .. } = self.limits;
        let pieces = pieces_of(buffers, size_max);
        let len: u64 = buffers.iter().map(|buffer| u64::from(buffer.bytes())).sum();
        if buffers.is_empty() || buffers.iter().any(|buffer| buffer.bytes() == 0) {
            Some(Refusal::Empty)
        } else if (offset | len) & 511 != 0 {
            Some(Refusal::Misaligned { offset, len })
        } else if pieces > seg_max {
            Some(Refusal::TooManySegments { have: pieces, max: seg_max })
        } else if len > u64::from(u32::MAX) - 64 {
            Some(Refusal::TooLong(len))
        } else if !buffers.iter().all(|buffer| buffer.is_in(&self.memory)) {
            Some(Refusal::ForeignBuffer)
        } else {
            None
        }
    }
}
