//! From a chain of descriptors to a request (VIRTIO 1.2 §5.2.6) (hot).
//!
//! Any layout is legal (§2.7.4.1): the first 16 readable bytes are the header, the last writable
//! byte is the status, what lies between is the data, however it is cut into descriptors. Headers in
//! pieces, and requests to discard or zero: `decode/gather.rs`.

mod gather;

use super::wire::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, status_byte,
};
use crate::virtqueue::{Chain, Desc};
use ringway_core::mem::{Access, Segments, Translator};
use ringway_core::{ByteRange, Op, Request, SECTOR_BYTES, Status};
use std::ptr::NonNull;

/// Length of `struct virtio_blk_req` before the data, in bytes.
const HEADER_BYTES: u64 = 16;

/// Where the answer to a request goes: the last writable byte of its chain, if there is one.
#[derive(Debug)]
pub struct StatusByte(Option<NonNull<u8>>);

// SAFETY: the byte lies in guest memory that stays mapped, on whatever thread.
unsafe impl Send for StatusByte {}

impl StatusByte {
    /// No place for an answer.
    pub const NOWHERE: Self = Self(None);

    /// Where it is in our address space.
    #[must_use]
    pub const fn address(&self) -> Option<NonNull<u8>> {
        self.0
    }

    /// Stores the answer. Returns the bytes written: 1, or 0 if the chain has no place for it.
    ///
    /// # Safety
    /// The guest memory that [`decode`] resolved must still be mapped.
    #[inline]
    pub unsafe fn write(&self, status: Status) -> u32 {
        match self.0 {
            // SAFETY: `decode` resolved the byte and the caller vouches that it is still mapped.
            Some(at) => unsafe {
                at.write_volatile(status_byte(status));
                1
            },
            None => 0,
        }
    }
}

/// The fixed part of a request as it lies on the wire: type, reserved, sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Wire {
    /// `VIRTIO_BLK_T_*`.
    pub kind: u32,
    /// Not used.
    pub reserved: u32,
    /// First sector, in units of 512 bytes.
    pub sector: u64,
}

const _: () = assert!(size_of::<Wire>() == 16);

/// The same where it lies: drivers in user space keep headers back to back with status bytes.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned {
    kind: u32,
    reserved: u32,
    sector: u64,
}

const _: () = assert!(size_of::<Unaligned>() == 16 && align_of::<Unaligned>() == 1);

/// A chain, understood.
#[derive(Debug)]
pub struct Decoded {
    /// Where the answer goes.
    pub status_at: StatusByte,
    /// `Ok`: the request was filled in. `Err`: this is the answer already.
    pub verdict: Result<(), Status>,
}

/// Turns a chain into a request. `request` is overwritten; after an `Err` verdict its content means
/// nothing.
#[inline]
pub fn decode(chain: &Chain, mem: &mut Translator, request: &mut Request) -> Decoded {
    request.segments.clear();
    let Some(last) = chain.writable().last() else {
        return Decoded { status_at: StatusByte::NOWHERE, verdict: Err(Status::IoError) };
    };
    // No descriptor is empty (Chain invariant 2), so `len - 1` is in it.
    let status_at = last
        .addr
        .checked_add(u64::from(last.len - 1))
        .and_then(|addr| mem.one_for(addr, 1, Access::Write));
    let Some(status_at) = status_at else {
        return Decoded { status_at: StatusByte::NOWHERE, verdict: Err(Status::IoError) };
    };
    let verdict = decode_body(chain, mem, request);
    Decoded { status_at: StatusByte(Some(status_at)), verdict }
}

#[inline]
fn decode_body(chain: &Chain, mem: &mut Translator, request: &mut Request) -> Result<(), Status> {
    let wire = match whole_header(chain.readable(), mem) {
        Some(wire) => wire,
        None => Wire::gather(chain.readable(), mem)?,
    };
    request.unmap = false;
    match wire.kind {
        VIRTIO_BLK_T_IN => {
            request.op = Op::Read;
            let bytes = chain.writable_bytes() - 1;
            take(chain.writable(), 0, bytes, mem, Access::Write, &mut request.segments)?;
            request.range = data_range(wire.sector, bytes)?;
        }
        VIRTIO_BLK_T_OUT => {
            request.op = Op::Write;
            let bytes = chain.readable_bytes() - HEADER_BYTES;
            take(chain.readable(), HEADER_BYTES, bytes, mem, Access::Read, &mut request.segments)?;
            request.range = data_range(wire.sector, bytes)?;
        }
        _ => return decode_other(wire, chain, mem, request),
    }
    Ok(())
}

/// All other kinds. Not beside reads and writes, each of which would jump through the table of all
/// kinds.
#[inline(never)]
fn decode_other(
    wire: Wire,
    chain: &Chain,
    mem: &mut Translator,
    request: &mut Request,
) -> Result<(), Status> {
    match wire.kind {
        VIRTIO_BLK_T_FLUSH => {
            request.op = Op::Flush;
            request.range = ByteRange::default();
        }
        VIRTIO_BLK_T_GET_ID => {
            request.op = Op::GetId;
            request.range = ByteRange::default();
            // Never more than the serial has, however long the buffer is.
            let bytes = (chain.writable_bytes() - 1).min(u64::from(VIRTIO_BLK_ID_BYTES));
            take(chain.writable(), 0, bytes, mem, Access::Write, &mut request.segments)?;
        }
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            return wire.erase(chain, mem, request);
        }
        // SCSI passthrough (2) and everything else is not offered and never will be acted upon.
        _ => return Err(Status::Unsupported),
    }
    Ok(())
}

#[inline]
fn data_range(sector: u64, bytes: u64) -> Result<ByteRange, Status> {
    if bytes % SECTOR_BYTES != 0 || bytes == 0 {
        return Err(Status::IoError);
    }
    ByteRange::from_sector(sector, bytes).ok_or(Status::IoError)
}

/// A header that one piece of memory holds.
#[inline]
fn whole_header(readable: &[Desc], mem: &mut Translator) -> Option<Wire> {
    let first = readable.first()?;
    if u64::from(first.len) < HEADER_BYTES {
        return None;
    }
    let at = mem.one(first.addr, 16)?;
    // SAFETY: 16 mapped bytes; the type has no alignment. Volatile: the driver may write at the same
    // time; only this copy is judged.
    let Unaligned { kind, reserved, sector } = unsafe { at.cast::<Unaligned>().read_volatile() };
    Some(Wire {
        kind: u32::from_le(kind),
        reserved: u32::from_le(reserved),
        sector: u64::from_le(sector),
    })
}

/// Resolves `len` bytes that begin `skip` bytes into a list of descriptors.
#[inline]
fn take(
    descs: &[Desc],
    mut skip: u64,
    mut len: u64,
    mem: &mut Translator,
    access: Access,
    out: &mut Segments,
) -> Result<(), Status> {
    for desc in descs {
        if len == 0 {
            break;
        }
        let whole = u64::from(desc.len);
        if skip >= whole {
            skip -= whole;
            continue;
        }
        let piece = (whole - skip).min(len);
        let addr = desc.addr.checked_add(skip).ok_or(Status::IoError)?;
        // `piece` is at most `desc.len`, a u32.
        #[allow(clippy::cast_possible_truncation)]
        if !mem.resolve(addr, piece as u32, access, out) {
            return Err(Status::IoError);
        }
        skip = 0;
        len -= piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
