//! Bounce pages: memory that the file takes, in the place of the guest's.
//!
//! A piece of a read is copied out of them, a piece of a write into them. Where a write begins or ends
//! within a block, the blocks around it are read first.

use super::dispatch::Dispatch;
use super::slots::Stage;
use ringway_aio::IoOp;
use ringway_core::mem::{Pool, Segment};
use ringway_core::{ByteRange, Op};
use std::io;

/// Memory for bounce buffers, in bytes. It only costs pages once a guest needs it. Large enough for
/// the largest piece on each of a few requests; more requests wait their turn.
const POOL_BYTES: usize = 4 << 20;

/// The longest piece that goes through a bounce buffer, in bytes.
const PIECE_MAX: u64 = 1 << 20;

/// The bounce pages of a queue.
///
/// # Invariants
/// 1. Pages taken from `pool` are in the slow part of a slot in flight.
#[derive(Debug)]
pub(crate) struct Bounce {
    pool: Pool,
}

impl Bounce {
    /// Maps the pool; call at start only.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { pool: Pool::new(POOL_BYTES)? })
    }

    /// Bytes in use.
    pub(crate) fn in_use(&self) -> usize {
        self.pool.in_use()
    }

    /// Prepares the operation for the next piece of a request. False if there are no pages for it
    /// now.
    pub(crate) fn next_piece<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) -> bool {
        let disk = &d.issuer.disk;
        let (slot, slow) = d.slots.both(tag);
        let rest = rest_of(slot.request.range, slot.done);
        let block = u64::from(disk.alignment.offset);
        // Later pieces start on a block, so that only the first and last can share one.
        let end = rest.end().min((rest.offset() / block * block).saturating_add(PIECE_MAX));
        let piece = beginning_of(rest, end - rest.offset());
        let blocks = piece.widened(block).unwrap_or(piece);
        // `blocks` is at most PIECE_MAX long plus one block.
        let need = usize::try_from(blocks.len()).unwrap_or(usize::MAX);
        if slow.pages.is_none() {
            slow.pages = self.pool.acquire(need);
        }
        let Some(pages) = slow.pages.as_mut() else { return false };
        slow.piece = piece.len();
        slow.range = blocks;
        slow.part.clear();
        let pushed = slow.part.push(Segment { base: pages.base(), len: need });
        debug_assert!(pushed, "an empty list has room");
        if slot.request.op == Op::Read {
            (slot.stage, slow.op) = (Stage::BounceRead, IoOp::Read);
        } else if blocks == piece {
            fill(d, tag);
        } else {
            (slot.stage, slow.op) = (Stage::ModifyRead, IoOp::Read);
            // SAFETY: no operation on these pages is in flight yet. Zeroes, so that a short read
            // leaves nothing old in what is written back.
            unsafe { pages.bytes().fill(0) };
        }
        true
    }

    /// Takes back the pages of a request, if it has any.
    pub(crate) fn release<C, E>(&mut self, d: &mut Dispatch<'_, C, E>, tag: u16) {
        if let Some(pages) = d.slots.both(tag).1.pages.take() {
            self.pool.release(pages);
        }
    }
}

/// Bytes of the request that an operation has carried out which moved `moved` bytes; those that were
/// read into bounce pages are in the guest's memory then.
pub(crate) fn take_moved<C, E>(d: &mut Dispatch<'_, C, E>, tag: u16, moved: u64) -> u64 {
    let (slot, slow) = d.slots.both(tag);
    let skip = (slot.request.range.offset() + slot.done).saturating_sub(slow.range.offset());
    match slot.stage {
        Stage::BounceRead => {
            let got = moved.saturating_sub(skip).min(slow.piece);
            let pages = slow.pages.as_mut().expect("a bounced read holds pages");
            let from = usize::try_from(skip).expect("a piece lies in its pages");
            let len = usize::try_from(got).expect("a piece is short");
            // SAFETY: the operation on the pages is over; the caller of `start` vouches for the
            // segments. Only bytes that were read are copied.
            unsafe {
                slot.request.segments.scatter(slot.done, &pages.bytes()[from..from + len]);
            }
            got
        }
        Stage::BounceWrite => moved.saturating_sub(skip).min(slow.piece),
        // The blocks to be modified were not read whole: never write them back.
        Stage::ModifyRead => 0,
        _ => moved.min(slow.piece),
    }
}

/// Puts the guest's bytes (or zeroes) into the bounce pages: they are to be written next.
pub(crate) fn fill<C, E>(d: &mut Dispatch<'_, C, E>, tag: u16) {
    let op = d.issuer.data_op(Op::Write).into();
    let (slot, slow) = d.slots.both(tag);
    let pages = slow.pages.as_mut().expect("a bounced write holds pages");
    let at = usize::try_from(slot.request.range.offset() + slot.done - slow.range.offset())
        .expect("a piece lies in its pages");
    let len = usize::try_from(slow.piece).expect("a piece is short");
    // SAFETY: no operation on the pages is in flight; the caller of `start` vouches for the
    // segments.
    unsafe {
        let bytes = &mut pages.bytes()[at..at + len];
        if slot.request.op == Op::Write {
            slot.request.segments.gather(slot.done, bytes);
        } else {
            bytes.fill(0);
        }
    }
    (slot.stage, slow.op) = (Stage::BounceWrite, op);
}

/// What is left of a request of which `done` bytes are done.
pub(crate) fn rest_of(range: ByteRange, done: u64) -> ByteRange {
    // No further than its end.
    ByteRange::new(range.offset() + done, range.len() - done).unwrap_or(range)
}

/// The first `len` bytes of a range that has as many.
pub(crate) fn beginning_of(range: ByteRange, len: u64) -> ByteRange {
    debug_assert!(len <= range.len());
    ByteRange::new(range.offset(), len).unwrap_or(range)
}
