//! From a chain of descriptors to a request (VIRTIO 1.2 §5.2.6).
//!
//! Any layout is legal (§2.7.4.1): the first 16 readable bytes are the header, the last writable
//! byte is the status, what lies between is the data, however it is cut into descriptors.

use super::wire::{
    ERASE_SECTORS_MAX, VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, status_byte,
};
use crate::virtqueue::{Chain, Desc};
use ringway_core::mem::{Access, Segments, Translator};
use ringway_core::{ByteRange, Op, Request, SECTOR_BYTES, Segment, Status};
use std::cmp::Ordering;
use std::ptr::NonNull;

/// Length of `struct virtio_blk_req` before the data, in bytes.
const HEADER_BYTES: u64 = 16;
/// Length of `struct virtio_blk_discard_write_zeroes`, in bytes.
const ERASE_BYTES: u64 = 16;

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
    let Some(status_at) = status_at.and_then(NonNull::new) else {
        return Decoded { status_at: StatusByte::NOWHERE, verdict: Err(Status::IoError) };
    };
    let verdict = decode_body(chain, mem, request);
    Decoded { status_at: StatusByte(Some(status_at)), verdict }
}

#[inline]
fn decode_body(chain: &Chain, mem: &mut Translator, request: &mut Request) -> Result<(), Status> {
    let wire = read_header(chain.readable(), mem)?;
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
            return decode_erase(wire.kind, chain, mem, request);
        }
        // SCSI passthrough (2) and everything else is not offered and never will be acted upon.
        _ => return Err(Status::Unsupported),
    }
    Ok(())
}

/// Sum of the lengths; fits easily (Chain invariant 2).
fn total(descs: &[Desc]) -> u64 {
    descs.iter().map(|desc| u64::from(desc.len)).sum()
}

#[inline]
fn data_range(sector: u64, bytes: u64) -> Result<ByteRange, Status> {
    if !bytes.is_multiple_of(SECTOR_BYTES) || bytes == 0 {
        return Err(Status::IoError);
    }
    ByteRange::from_sector(sector, bytes).ok_or(Status::IoError)
}

#[inline]
fn read_header(readable: &[Desc], mem: &mut Translator) -> Result<Wire, Status> {
    if let Some(first) = readable.first()
        && u64::from(first.len) >= HEADER_BYTES
        && let Some(at) = mem.one(first.addr, 16)
    {
        // SAFETY: 16 mapped bytes; the type has no alignment. Volatile: the driver may write at the same
        // time; only this copy is judged.
        let Unaligned { kind, reserved, sector } =
            unsafe { at.cast::<Unaligned>().read_volatile() };
        return Ok(Wire {
            kind: u32::from_le(kind),
            reserved: u32::from_le(reserved),
            sector: u64::from_le(sector),
        });
    }
    let bytes: [u8; 16] = read_bytes(readable, 0, mem)?;
    let word = |range: std::ops::Range<usize>| little_endian(&bytes[range]);
    // Each field is as wide as the bytes it is made of.
    #[allow(clippy::cast_possible_truncation)]
    let wire = Wire { kind: word(0..4) as u32, reserved: word(4..8) as u32, sector: word(8..16) };
    Ok(wire)
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
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
    let mut parts = unsafe { Segments::over(NonNull::from_mut(&mut room[..])) };
    take(descs, skip, N as u64, mem, Access::Read, &mut parts)?;
    let mut bytes = [0; N];
    // SAFETY: `take` only names mapped guest memory; `bytes` is our own.
    unsafe { parts.gather(0, &mut bytes) };
    Ok(bytes)
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

/// DISCARD and WRITE_ZEROES, §5.2.6: one segment of {sector, num_sectors, flags}, as
/// `max_discard_seg` and `max_write_zeroes_seg` say. More of them are not supported, as in QEMU's
/// back-end; less than one is no request.
#[cold]
fn decode_erase(
    kind: u32,
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
    let known = if kind == VIRTIO_BLK_T_WRITE_ZEROES {
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
    request.op = if kind == VIRTIO_BLK_T_DISCARD { Op::Discard } else { Op::WriteZeroes };
    request.unmap = flags != 0;
    request.range =
        ByteRange::from_sector(sector, sectors * SECTOR_BYTES).ok_or(Status::IoError)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_core::mem::{GuestMap, Mapping, Region};
    use std::sync::Arc;

    /// Where a front-end has the pieces of a read: header, data, status.
    type Layout = (&'static str, &'static [(u64, u32)], &'static [(u64, u32)]);

    const HIGH: u64 = 1 << 32;

    /// As stock clients have them, and as they may.
    const LAYOUTS: [Layout; 5] = [
        // Headers and status bytes back to back in a region of their own: nothing is aligned.
        ("libblkio", &[(17, 16)], &[(HIGH + 4096, 4096), (33, 1)]),
        // A guest of more than 3 GiB: its requests on one side of the hole, pages on both.
        ("Linux", &[(64, 16)], &[(HIGH + 4096, 2048), (4096, 2048), (80, 1)]),
        // Header, data and status one after the other.
        ("firmware", &[(HIGH + 3, 16)], &[(HIGH + 19, 4096), (HIGH + 4115, 1)]),
        ("a header over two regions", &[(8191, 1), (HIGH, 15)], &[(100, 4096), (HIGH + 100, 1)]),
        ("a status behind the data", &[(1000, 4), (8, 12)], &[(HIGH + 512, 4097)]),
    ];

    fn memory() -> Arc<GuestMap> {
        let region = |guest| {
            let mapping = Arc::new(Mapping::anonymous(8192).unwrap());
            Region { guest, user: guest, len: 8192, mapping }
        };
        Arc::new(GuestMap::new(vec![region(0), region(HIGH)]).unwrap())
    }

    fn at(map: &GuestMap, guest: u64) -> *mut u8 {
        let region = &map.regions()[usize::from(guest >= HIGH)];
        region.mapping.at(usize::try_from(guest - region.guest).unwrap())
    }

    /// Lays a header out over the readable pieces.
    fn put_header(map: &GuestMap, pieces: &[(u64, u32)], kind: u32, sector: u64) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend_from_slice(&[0xff; 4]);
        header.extend_from_slice(&sector.to_le_bytes());
        let places =
            pieces.iter().flat_map(|&(addr, len)| (0..u64::from(len)).map(move |n| addr + n));
        for (place, byte) in places.zip(header) {
            // SAFETY: the byte lies in a region.
            unsafe { at(map, place).write(byte) };
        }
    }

    #[test]
    fn layouts_of_stock_clients_are_understood_whatever_came_before() {
        let map = memory();
        let mut mem = Translator::new(Arc::clone(&map));
        let mut chain = Chain::for_queue(16);
        let mut request = Request::with_capacity(8);
        for round in 0..3 * LAYOUTS.len() {
            let (name, readable, writable) = LAYOUTS[(2 * round + round / 5) % LAYOUTS.len()];
            let round = round as u64;
            put_header(&map, readable, VIRTIO_BLK_T_IN, round << 33);
            chain.assemble(readable, writable).unwrap();
            let decoded = decode(&chain, &mut mem, &mut request);
            assert_eq!(decoded.verdict, Ok(()), "{name}");
            assert_eq!(request.op, Op::Read, "{name}");
            assert_eq!(Some(request.range), ByteRange::from_sector(round << 33, 4096), "{name}");
            let data = request.segments.as_slice().iter().map(|s| (s.base, s.len));
            let mut left = 4096;
            let wanted = writable.iter().map_while(|&(addr, len)| {
                let len = left.min(len as usize);
                left -= len;
                (len > 0).then(|| (at(&map, addr), len))
            });
            assert!(data.eq(wanted), "{name}: {:?}", request.segments);
            let (addr, len) = writable[writable.len() - 1];
            let place = at(&map, addr + u64::from(len) - 1);
            assert_eq!(decoded.status_at.address().map(NonNull::as_ptr), Some(place), "{name}");
        }
    }

    #[test]
    fn a_write_has_its_data_behind_the_header_wherever_that_ends() {
        let map = memory();
        let mut mem = Translator::new(Arc::clone(&map));
        let mut chain = Chain::for_queue(16);
        let mut request = Request::with_capacity(8);
        // One descriptor for all, at an odd address, and a status in the other region.
        let readable = [(HIGH + 5, 16 + 1024)];
        put_header(&map, &readable, VIRTIO_BLK_T_OUT, 7);
        chain.assemble(&readable, &[(13, 1)]).unwrap();
        assert_eq!(decode(&chain, &mut mem, &mut request).verdict, Ok(()));
        assert_eq!(request.op, Op::Write);
        let data = Segment { base: at(&map, HIGH + 21), len: 1024 };
        assert_eq!(request.segments.as_slice(), [data]);
        // The end of a region is the end of a header that begins there.
        chain.assemble(&[(8180, 16)], &[(13, 1)]).unwrap();
        assert_eq!(decode(&chain, &mut mem, &mut request).verdict, Err(Status::IoError));
    }
}
