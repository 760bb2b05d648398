//! What is wrong with a request, said before it is queued.

use super::{BlkQueue, Limits, reject};
use crate::completion::Data;
use crate::error::{Refusal, Rejected};
use crate::memory::Buffer;

impl<C> BlkQueue<C> {
    #[cold]
    pub(super) fn refuse(&self, offset: u64, data: Data, ctx: C) -> Result<(), Rejected<C>> {
        let why = match &data {
            Data::One(buffer) => self.judge(offset, std::slice::from_ref(buffer)),
            Data::Many(buffers) => self.judge(offset, buffers),
            Data::None => None,
        };
        reject(why.unwrap_or(Refusal::Empty), ctx, data)
    }

    /// What is wrong with a request for these buffers, if anything.
    pub(super) fn judge(&self, offset: u64, buffers: &[Buffer]) -> Option<Refusal> {
        let Limits { seg_max, size_max, .. } = self.limits;
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
