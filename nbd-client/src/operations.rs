//! Operations on their way: a table of fixed length, whose places have numbers (hot).

use crate::handshake::Negotiated;
use ringway_aio::{Io, IoOp};
use ringway_core::Segment;
use ringway_nbd_words::{REQUEST_MAGIC, command, flag, offers};

/// One operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) tag: u64,
    pub(crate) op: IoOp,
    /// Of which connection.
    pub(crate) connection: u32,
    /// The part that is asked for now.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Of what moves no data: where all of it ends.
    pub(crate) end: u64,
    segments: *const Segment,
    count: usize,
    /// Its place in the order in which operations came.
    pub(crate) order: u64,
    /// Counts the uses of the place, so that an answer of an earlier one is known as such.
    serial: u32,
    pub(crate) in_use: bool,
    /// All of it was sent.
    pub(crate) sent: bool,
    /// The write is done; now it is made durable.
    pub(crate) flushing: bool,
    /// Bytes that a read has got.
    pub(crate) got: u64,
    /// Bytes from its beginning that it has got without a gap.
    pub(crate) filled: u64,
    /// What the server has said, while more of its answer follows.
    pub(crate) error: u32,
    /// As it goes over the wire.
    pub(crate) head: [u8; HEAD],
}

/// The length of the head of a request.
pub(crate) const HEAD: usize = 28;

// SAFETY: the segments are followed while the operation is in flight, for which time the caller of
// `Engine::queue` vouches for them, on whatever thread has the engine.
unsafe impl Send for Operation {}

impl Operation {
    const FREE: Self = Self {
        tag: 0,
        op: IoOp::Sync,
        connection: 0,
        offset: 0,
        len: 0,
        end: 0,
        segments: std::ptr::NonNull::dangling().as_ptr(),
        count: 0,
        order: 0,
        serial: 0,
        in_use: false,
        sent: false,
        flushing: false,
        got: 0,
        filled: 0,
        error: 0,
        head: [0; HEAD],
    };

    /// The memory.
    pub(crate) fn segments(&self) -> &[Segment] {
        // SAFETY: the list stays valid while the operation is in flight, by the contract of `queue`.
        unsafe { std::slice::from_raw_parts(self.segments, self.count) }
    }

    /// Bytes that follow its head.
    pub(crate) fn payload(&self) -> u64 {
        let writes = matches!(self.op, IoOp::Write | IoOp::WriteDurable);
        if writes && !self.flushing { self.len } else { 0 }
    }

    /// Writes the head for what is asked now.
    pub(crate) fn make_head(&mut self, slot: u32, facts: &Negotiated) {
        let fua = if facts.offers(offers::SEND_FUA) { flag::FUA } else { 0 };
        // Where there is no flush, nothing else makes it durable later.
        let each = if facts.offers(offers::SEND_FLUSH) { 0 } else { fua };
        let (kind, flags) = match self.op {
            _ if self.flushing => (command::FLUSH, 0),
            IoOp::Read => (command::READ, 0),
            IoOp::Write => (command::WRITE, each),
            IoOp::WriteDurable => (command::WRITE, fua),
            IoOp::Sync => (command::FLUSH, 0),
            IoOp::PunchHole => (command::WRITE_ZEROES, each),
            IoOp::ZeroRange => (command::WRITE_ZEROES, flag::NO_HOLE | each),
            IoOp::Discard => (command::TRIM, each),
        };
        let (offset, len) = if kind == command::FLUSH { (0, 0) } else { (self.offset, self.len) };
        let cookie = u64::from(self.serial) << 32 | u64::from(slot);
        self.head[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        self.head[4..6].copy_from_slice(&flags.to_be_bytes());
        self.head[6..8].copy_from_slice(&kind.to_be_bytes());
        self.head[8..16].copy_from_slice(&cookie.to_be_bytes());
        self.head[16..24].copy_from_slice(&offset.to_be_bytes());
        // A part has at most 1 GiB.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.head[24..].copy_from_slice(&len.to_be_bytes());
    }
}

/// All operations of an engine.
#[derive(Debug)]
pub(crate) struct Operations {
    table: Box<[Operation]>,
    free: Vec<u32>,
    next_order: u64,
}

impl Operations {
    pub(crate) fn new(depth: u32) -> Self {
        let table = vec![Operation::FREE; depth as usize].into_boxed_slice();
        Self { table, free: (0..depth).rev().collect(), next_order: 0 }
    }

    /// A place for an operation, if there is one.
    ///
    /// # Safety
    /// As for `Engine::queue`; the memory is no registered buffer.
    pub(crate) unsafe fn begin(&mut self, io: &Io<'_>) -> Option<u32> {
        let slot = self.free.pop()?;
        // SAFETY: passed on to the caller.
        let segments = unsafe { io.memory.segments_unchecked() };
        let entry = &mut self.table[slot as usize];
        self.next_order += 1;
        *entry = Operation {
            tag: io.tag,
            op: io.op,
            connection: io.file.0,
            offset: io.offset,
            len: io.len,
            end: io.offset.saturating_add(io.len),
            segments: segments.as_ptr(),
            count: segments.len(),
            order: self.next_order,
            serial: entry.serial.wrapping_add(1),
            in_use: true,
            ..Operation::FREE
        };
        Some(slot)
    }

    pub(crate) fn end(&mut self, slot: u32) {
        self.table[slot as usize].in_use = false;
        self.free.push(slot);
    }

    pub(crate) fn get(&self, slot: u32) -> &Operation {
        &self.table[slot as usize]
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut Operation {
        &mut self.table[slot as usize]
    }

    /// All that are in flight on a connection.
    #[cold]
    pub(crate) fn of(&self, connection: u32) -> Vec<u32> {
        let here = |entry: &Operation| entry.in_use && entry.connection == connection;
        (0u32..).zip(&self.table).filter(|(_, entry)| here(entry)).map(|(slot, _)| slot).collect()
    }

    /// The operation of a connection that a server's answer is for, if it was sent and waits.
    pub(crate) fn answered(&self, connection: u32, cookie: u64) -> Option<u32> {
        let slot = u32::try_from(cookie & 0xffff_ffff).ok()?;
        let entry = self.table.get(slot as usize)?;
        let same = u64::from(entry.serial) == cookie >> 32;
        let here = entry.connection == connection;
        (same && here && entry.in_use && entry.sent).then_some(slot)
    }
}
