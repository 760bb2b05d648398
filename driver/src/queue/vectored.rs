//! Requests of several buffers, or of one that is longer than the device takes in one piece.

use super::BlkQueue;
use crate::completion::Data;
use crate::error::Refusal;
use crate::rejected::{Rejected, reject};
use ringway_ring::virtio_blk::VIRTIO_BLK_T_OUT;

impl<C> BlkQueue<C> {
    /// Adds a read or write of any number of buffers. It was judged.
    pub(super) fn add_pieces(
        &mut self,
        kind: u32,
        offset: u64,
        data: Data,
        ctx: C,
    ) -> Result<(), Rejected<C>> {
        let Some(head) = self.ring.next_head() else {
            return reject(Refusal::Full, ctx, data);
        };
        let (header, status) = self.headers.fill(head, kind, offset / 512);
        // Header, at most `seg_max` pieces, status: there is room for them.
        let mut pieces = std::mem::take(&mut self.scratch);
        pieces.clear();
        pieces.push(header);
        let (delta, max) = (self.guest_delta, self.limits.size_max);
        pieces.extend(data.as_slice().iter().flat_map(|buffer| buffer.pieces(delta, max)));
        pieces.push(status);
        let split = if kind == VIRTIO_BLK_T_OUT { pieces.len() - 1 } else { 1 };
        let (readable, writable) = pieces.split_at(split);
        let added = self.ring.add(readable, writable);
        self.scratch = pieces;
        self.hold(added, ctx, data)
    }
}
