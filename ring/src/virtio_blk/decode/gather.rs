//! Headers in pieces, and requests to discard or to zero.

use super::{HEADER_BYTES, Wire, take};
use crate::virtio_blk::wire::{
    ERASE_SECTORS_MAX, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use crate::virtqueue::{Chain, Desc};
use ringway_core::mem::{Access, Segments, Translator};
use ringway_core::{ByteRange, Op, Request, SECTOR_BYTES, Segment, Status};
use std::cmp::Ordering;
use std::ptr::NonNull;

/// Length of `struct virtio_blk_discard_write_zeroes`, in bytes.
const ERASE_BYTES: u64 = 16;

impl Wire {
    /// Reads a header that no single piece of memory holds.
    #[cold]
    pub(super) fn gather(readable: &[Desc], mem: &mut Translator) -> Result<Self, Status> {
        let bytes: [u8; 16] = read_bytes(readable, 0, mem)?;
        let word = |range: std::ops::Range<usize>| little_endian(&bytes[range]);
        // Each field is as wide as the bytes it is made of.
        #[allow(clippy::cast_possible_truncation)]
        let wire =
            Self { kind: word(0..4) as u32, reserved: word(4..8) as u32, sector: word(8..16) };
        Ok(wire)
    }

    /// DISCARD and WRITE_ZEROES, §5.2.6: one segment of {sector, num_sectors, flags}, as
    /// `max_discard_seg` and `max_write_zeroes_seg` say. More of them are not supported, as in QEMU's
    /// back-end; less than one is no request.
    #[cold]
    pub(super) fn erase(
        self,
        chain: &Chain,
        mem: &mut Translator,
        request: &mut Request,
    ) -> Result<(), Status> {
        match chain.readable_bytes().cmp(&(HEADER_BYTES + ERASE_BYTES)) {
            Ordering::Less => return Err(Status::IoError),
            Ordering::Equal => {}
            Ordering::Greater => return Err(Status::Unsupported),
        }
        let bytes: [u8; 16] = read_bytes(chain.readable(), HEADER_BYTES, mem)?;
        let sector = little_endian(&bytes[0..8]);
        let sectors = little_endian(&bytes[8..12]);
        let flags = little_endian(&bytes[12..16]);
        let known = if self.kind == VIRTIO_BLK_T_WRITE_ZEROES {
            u64::from(VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)
        } else {
            0
        };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        if sectors > u64::from(ERASE_SECTORS_MAX) {
            return Err(Status::IoError);
        }
        request.op = if self.kind == VIRTIO_BLK_T_DISCARD { Op::Discard } else { Op::WriteZeroes };
        request.unmap = flags != 0;
        request.range =
            ByteRange::from_sector(sector, sectors * SECTOR_BYTES).ok_or(Status::IoError)?;
        Ok(())
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// Sum of the lengths; fits easily (Chain invariant 2).
fn total(descs: &[Desc]) -> u64 {
    descs.iter().map(|desc| u64::from(desc.len)).sum()
}

/// Copies `N` bytes that begin `skip` bytes into a list of descriptors, once.
#[cold]
fn read_bytes<const N: usize>(
    descs: &[Desc],
    skip: u64,
    mem: &mut Translator,
) -> Result<[u8; N], Status> {
    if total(descs) < skip + N as u64 {
        return Err(Status::IoError);
    }
    // At most 16 bytes are at most 16 pieces.
    const { assert!(N <= 16) };
    let mut room = [Segment::EMPTY; 16];
    // SAFETY: the list does not outlive `room`, which nothing else touches.
    let mut parts = unsafe { Segments::over(NonNull::from(&mut room[..])) };
    take(descs, skip, N as u64, mem, Access::Read, &mut parts)?;
    let mut bytes = [0; N];
    // SAFETY: `take` only names mapped guest memory; `bytes` is our own.
    unsafe { parts.gather(0, &mut bytes) };
    Ok(bytes)
}
