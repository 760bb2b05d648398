//! What is wrong with a request, said before it is queued.

use super::wire::WireRequest;
use super::{BlkQueue, QueueLimits};
use crate::completion::Data;
use crate::error::Refusal;
use crate::memory::Buffer;
use crate::rejected::{Rejected, reject};

impl<C> BlkQueue<C> {
    /// Takes a read or write that does not take the fast path: there is something wrong with it, or
    /// the scheduler has to know of it.
    #[cold]
    pub(super) fn start_checked(
        &mut self,
        kind: u32,
        offset: u64,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        match self.judge(offset, data.as_slice()) {
            Some(why) => reject(why, ctx, data),
            None => {
                let wire = WireRequest { kind, offset, len: data.bytes(), flags: None };
                self.start_slow(wire, data, ctx)
            }
        }
    }

    /// What is wrong with a request for these buffers, if anything.
    pub(super) fn judge(&self, offset: u64, buffers: &[Buffer]) -> Option<Refusal> {
        let QueueLimits { seg_max, size_max, .. } = self.limits;
        let len: u64 = buffers.iter().map(|buffer| u64::from(buffer.bytes())).sum();
        let long = buffers.iter().map(Buffer::bytes).find(|&len| len > size_max);
        if buffers.is_empty() || buffers.iter().any(|buffer| buffer.bytes() == 0) {
            Some(Refusal::Empty)
        } else if (offset | len) & 511 != 0 {
            Some(Refusal::Misaligned { offset, len })
        } else if buffers.len() > seg_max {
            Some(Refusal::TooManySegments { have: buffers.len(), max: seg_max })
        } else if let Some(len) = long {
            Some(Refusal::SegmentTooLong { len, max: size_max })
        } else if len > u64::from(u32::MAX) - 64 {
            Some(Refusal::TooLong(len))
        } else if !buffers.iter().all(|buffer| buffer.is_in(&self.memory)) {
            Some(Refusal::ForeignBuffer)
        } else {
            None
        }
    }
}
