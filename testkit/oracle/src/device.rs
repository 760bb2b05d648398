//! The oracle: what the specification says a device does, written for the reader and not for speed.
//!
//! It shares no code with the crate but the words for the results. All arithmetic is wider than the
//! numbers it is about; memory is read byte by byte.

use super::memory::Bytes;
use ringway_core::{Op, Status};
use ringway_ring::virtqueue::{Broken, Chain, ChainError};
use std::collections::{BTreeMap, BTreeSet};

/// Where the parts of the queue lie, as guest addresses, and what was negotiated.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    pub size: u16,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    pub event_idx: bool,
    pub indirect: bool,
}

impl Queue {
    /// §2.7.6: `flags, idx, ring[size], used_event.`
    pub fn avail_entry(&self, counter: u16) -> u64 {
        self.avail + 4 + 2 * u64::from(counter % self.size)
    }

    /// §2.7.8: `flags, idx, ring[size] of {id, len}, avail_event.`
    fn used_entry(&self, counter: u16) -> u64 {
        self.used + 4 + 8 * u64::from(counter % self.size)
    }
}

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub addr: u64,
    pub len: u32,
    pub writable: bool,
}

/// [`ChainError`] without its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    OutOfRange,
    TooLong,
    ZeroLength,
    ReadableAfterWritable,
    TooManyBytes,
    BadIndirect,
    TableUnmapped,
}

impl From<ChainError> for Fault {
    fn from(error: ChainError) -> Self {
        match error {
            ChainError::OutOfRange(_) => Self::OutOfRange,
            ChainError::TooLong => Self::TooLong,
            ChainError::ZeroLength => Self::ZeroLength,
            ChainError::ReadableAfterWritable => Self::ReadableAfterWritable,
            ChainError::TooManyBytes => Self::TooManyBytes,
            ChainError::BadIndirect => Self::BadIndirect,
            ChainError::TableUnmapped => Self::TableUnmapped,
        }
    }
}

/// The chain at `head` (§2.7.5), or everything that is wrong with the first bad descriptor.
pub(crate) fn walk(mem: &Bytes, queue: Queue, head: u16) -> Result<Vec<Buffer>, Vec<Fault>> {
    let most = usize::from(queue.size).max(Chain::INDIRECT_MAX);
    let (mut table, mut entries) = (u128::from(queue.desc), u32::from(queue.size));
    let (mut in_table, mut index, mut steps) = (false, u32::from(head), 0);
    let mut chain: Vec<Buffer> = Vec::new();
    loop {
        let mut faults = Vec::new();
        if steps == entries {
            faults.push(Fault::TooLong);
        }
        if index >= entries {
            faults.push(Fault::OutOfRange);
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        steps += 1;
        // struct virtq_desc { le64 addr; le32 len; le16 flags; le16 next; }
        let at = table + 16 * u128::from(index);
        let Some(addr) = mem.number(at, 8) else { return Err(vec![Fault::TableUnmapped]) };
        let Some(rest) = mem.number(at + 8, 8) else { return Err(vec![Fault::TableUnmapped]) };
        let len = rest & 0xffff_ffff;
        let (next_follows, writable, indirect) =
            (rest >> 32 & 1 != 0, rest >> 32 & 2 != 0, rest >> 32 & 4 != 0);
        if indirect {
            let slots = len / 16;
            let fits = len % 16 == 0 && slots > 0 && slots <= Chain::INDIRECT_MAX as u64;
            if in_table || !queue.indirect || next_follows || !fits {
                return Err(vec![Fault::BadIndirect]);
            }
            (table, entries) = (u128::from(addr), u32::try_from(slots).unwrap());
            (in_table, index, steps) = (true, 0, 0);
            continue;
        }
        if len == 0 {
            faults.push(Fault::ZeroLength);
        }
        if chain.len() == most {
            faults.push(Fault::TooLong);
        }
        if chain.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>() + len >= 1 << 32 {
            faults.push(Fault::TooManyBytes);
        }
        if !writable && chain.last().is_some_and(|before| before.writable) {
            faults.push(Fault::ReadableAfterWritable);
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        chain.push(Buffer { addr, len: u32::try_from(len).unwrap(), writable });
        if !next_follows {
            return Ok(chain);
        }
        index = u32::try_from(rest >> 48).unwrap();
    }
}

/// Pieces of guest memory as (address, length), none over the end of a region.
pub(crate) type Pieces = Vec<(u64, u64)>;

/// A request, understood.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub op: Op,
    pub unmap: bool,
    pub offset: u64,
    pub len: u64,
    pub data: Pieces,
}

/// What a chain asks for (§5.2.6), and the address of its status byte.
pub(crate) fn understand(
    mem: &Bytes,
    chain: &[Buffer],
    most_segments: usize,
) -> (Option<u64>, Result<Wanted, Status>) {
    let status_at = chain
        .last()
        .filter(|last| last.writable)
        .and_then(|last| u64::try_from(u128::from(last.addr) + u128::from(last.len) - 1).ok())
        .filter(|&addr| mem.get(u128::from(addr)).is_some());
    if status_at.is_none() {
        return (None, Err(Status::IoError));
    }
    (status_at, request(mem, chain, most_segments).map_err(|bad| bad.0))
}

/// Why not.
struct Refused(Status);

const FAILED: Refused = Refused(Status::IoError);

fn request(mem: &Bytes, chain: &[Buffer], most_segments: usize) -> Result<Wanted, Refused> {
    let side = |writable| chain.iter().copied().filter(move |buffer| buffer.writable == writable);
    let bytes = |writable| side(writable).map(|buffer| u64::from(buffer.len)).sum::<u64>();
    let number = |skip, len| {
        let pieces = cut(mem, side(false), skip, u64::from(len)).ok_or(FAILED)?;
        let each = pieces.iter().flat_map(|&(addr, len)| addr..addr + len);
        let all: Vec<u8> = each.map(|addr| mem.get(addr.into()).unwrap()).collect();
        Ok(all.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte)))
    };
    let data = |writable, skip, len| {
        cut(mem, side(writable), skip, len)
            .filter(|pieces| pieces.len() <= most_segments)
            .ok_or(FAILED)
    };
    // struct virtio_blk_req { le32 type; le32 reserved; le64 sector; u8 data[]; u8 status; }
    if bytes(false) < 16 {
        return Err(FAILED);
    }
    let (kind, _, sector) = (number(0, 4u8)?, number(4, 4)?, number(8, 8)?);
    let range = |sector: u64, bytes: u64| {
        let end = u128::from(sector) * 512 + u128::from(bytes);
        if end > u128::from(u64::MAX) { Err(FAILED) } else { Ok((sector * 512, bytes)) }
    };
    let (op, unmap, (offset, len), data) = match kind {
        0 | 1 => {
            let (op, len) = if kind == 0 {
                (Op::Read, bytes(true) - 1)
            } else {
                (Op::Write, bytes(false) - 16)
            };
            if len == 0 || len % 512 != 0 {
                return Err(FAILED);
            }
            let skip = if kind == 0 { 0 } else { 16 };
            (op, false, range(sector, len)?, data(kind == 0, skip, len)?)
        }
        4 => (Op::Flush, false, (0, 0), Vec::new()),
        // §5.2.6.1: the serial has 20 bytes, however long the buffer is.
        8 => (Op::GetId, false, (0, 0), data(true, 0, (bytes(true) - 1).min(20))?),
        11 | 13 => {
            // struct virtio_blk_discard_write_zeroes { le64 sector; le32 num_sectors; le32 flags; }
            if bytes(false) < 32 {
                return Err(FAILED);
            }
            // §5.2.4: one is offered (max_discard_seg, max_write_zeroes_seg).
            if bytes(false) > 32 {
                return Err(Refused(Status::Unsupported));
            }
            let (sector, sectors, flags) = (number(16, 8)?, number(24, 4)?, number(28, 4)?);
            // §5.2.6.2: unknown flags, and unmap in a discard, are unsupported.
            if flags > u64::from(kind == 13) {
                return Err(Refused(Status::Unsupported));
            }
            if sectors > u64::from(ringway_ring::virtio_blk::ERASE_SECTORS_MAX) {
                return Err(FAILED);
            }
            let op = if kind == 11 { Op::Discard } else { Op::WriteZeroes };
            (op, flags == 1, range(sector, sectors * 512)?, Vec::new())
        }
        _ => return Err(Refused(Status::Unsupported)),
    };
    Ok(Wanted { op, unmap, offset, len, data })
}

/// `len` bytes from `skip` bytes into a list of buffers; `None` unless all of them are memory.
fn cut(mem: &Bytes, buffers: impl Iterator<Item = Buffer>, skip: u64, len: u64) -> Option<Pieces> {
    let (first, last) = (u128::from(skip), u128::from(skip) + u128::from(len));
    let (mut start, mut pieces) = (0, Vec::new());
    for buffer in buffers {
        let end = start + u128::from(buffer.len);
        // The part of the buffer that is wanted, as offsets in the list.
        let (mut from, to) = (start.max(first), end.min(last));
        while from < to {
            let addr = u128::from(buffer.addr) + (from - start);
            let piece = mem.room(addr)?.min(u64::try_from(to - from).ok()?);
            pieces.push((u64::try_from(addr).ok()?, piece));
            from += u128::from(piece);
        }
        start = end;
    }
    Some(pieces)
}

/// What a device does next, and what it writes.
pub(crate) struct Device {
    pub queue: Queue,
    next_avail: u16,
    known: u16,
    used: u16,
    published: u16,
    in_flight: BTreeSet<u16>,
    /// The used entries this device wrote last, by their place: the ring is its own (§2.7.8), so one
    /// that would stay as it is need not be written again.
    written: BTreeMap<u16, (u16, u32)>,
}

impl Device {
    pub(crate) fn new(mem: &Bytes, queue: Queue, next_avail: u16) -> Self {
        let used = half(mem, queue.used + 2);
        Self {
            queue,
            next_avail,
            known: next_avail,
            used,
            published: used,
            in_flight: BTreeSet::new(),
            written: BTreeMap::new(),
        }
    }

    /// The head of the next chain. The index is read when all that is known has been taken.
    pub(crate) fn pop(&mut self, mem: &Bytes) -> Result<Option<u16>, Broken> {
        if self.known == self.next_avail && !self.read_avail(mem)? {
            return Ok(None);
        }
        let head = half(mem, self.queue.avail_entry(self.next_avail));
        if head >= self.queue.size {
            return Err(Broken::HeadOutOfRange(head));
        }
        if !self.in_flight.insert(head) {
            return Err(Broken::HeadInFlight(head));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    fn read_avail(&mut self, mem: &Bytes) -> Result<bool, Broken> {
        let (from, to, size) = (self.next_avail, half(mem, self.queue.avail + 2), self.queue.size);
        if to.wrapping_sub(from) > size {
            return Err(Broken::IndexJump { from, to, size });
        }
        self.known = to;
        Ok(to != from)
    }

    pub(crate) fn push(&mut self, mem: &mut Bytes, head: u16, written: u32) {
        assert!(self.in_flight.remove(&head));
        let entry = self.queue.used_entry(self.used);
        let before = self.written.insert(self.used % self.queue.size, (head, written));
        if before != Some((head, written)) {
            mem.set_number(entry, u64::from(head), 4);
            mem.set_number(entry + 4, u64::from(written), 4);
        }
        self.used = self.used.wrapping_add(1);
    }

    /// True if the driver is to be called (§2.7.7, §2.7.10).
    pub(crate) fn publish(&mut self, mem: &mut Bytes) -> bool {
        let old = self.published;
        if old == self.used {
            return false;
        }
        mem.set_number(self.queue.used + 2, u64::from(self.used), 2);
        self.published = self.used;
        if self.queue.event_idx {
            let event = half(mem, self.queue.avail + 4 + 2 * u64::from(self.queue.size));
            // The call is wanted when the entry with the number `event` is among the new ones.
            (0..self.used.wrapping_sub(old)).any(|i| old.wrapping_add(i) == event)
        } else {
            half(mem, self.queue.avail) & 1 == 0
        }
    }

    /// True if there is work.
    pub(crate) fn arm(&mut self, mem: &mut Bytes) -> Result<bool, Broken> {
        if self.queue.event_idx {
            let event = self.queue.used + 4 + 8 * u64::from(self.queue.size);
            mem.set_number(event, u64::from(self.next_avail), 2);
        } else {
            mem.set_number(self.queue.used, 0, 2);
        }
        self.read_avail(mem)
    }

    pub(crate) fn disarm(&mut self, mem: &mut Bytes) {
        if !self.queue.event_idx {
            mem.set_number(self.queue.used, 1, 2);
        }
    }
}

fn half(mem: &Bytes, addr: u64) -> u16 {
    let word = mem.number(u128::from(addr), 2).expect("the rings are in guest memory");
    u16::try_from(word).unwrap()
}
