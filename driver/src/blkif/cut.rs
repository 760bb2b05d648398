//! From buffers to pieces of granted pages.

use super::grants::number;
use crate::error::Refusal;
use crate::memory::{Buffer, Memory};
use ringway_ring::blkif::{GrantPiece, PAGE_BYTES};
use std::sync::Arc;

/// Sectors of a page.
const PAGE_SECTORS: usize = PAGE_BYTES / 512;

/// Appends the sectors of the buffers, page by page, to `pieces`: at most `most`.
#[inline]
pub(super) fn cut(
    buffers: &[Buffer],
    memory: &Arc<Memory>,
    offset: u64,
    most: usize,
    pieces: &mut Vec<GrantPiece>,
) -> Result<(), Refusal> {
    for buffer in buffers {
        if !buffer.is_in(memory) {
            return Err(Refusal::ForeignBuffer);
        }
        let len = u64::from(buffer.bytes());
        let start = buffer.host().addr().wrapping_sub(memory.at(0).addr());
        if (offset | len) & 511 != 0 {
            return Err(Refusal::Misaligned { offset, len });
        }
        if start & 511 != 0 {
            return Err(Refusal::BufferMisaligned);
        }
        if len == 0 {
            return Err(Refusal::Empty);
        }
        let (mut sector, mut left) = (start / 512, buffer.len() / 512);
        while left > 0 {
            let first = sector % PAGE_SECTORS;
            let count = left.min(PAGE_SECTORS - first);
            if pieces.len() == most {
                let have = pieces.len() + left.div_ceil(PAGE_SECTORS);
                return Err(Refusal::TooManySegments { have, max: most });
            }
            // Below 8, both.
            #[allow(clippy::cast_possible_truncation)]
            let (first, last) = (first as u8, (first + count - 1) as u8);
            pieces.push(GrantPiece::new(number(sector / PAGE_SECTORS), first, last));
            (sector, left) = (sector + count, left - count);
        }
    }
    if pieces.is_empty() { Err(Refusal::Empty) } else { Ok(()) }
}
