//! What comes from a server: where it goes, and what it says (hot).

use crate::loss::Loss;
use crate::memory::{fill, push, zero};
use crate::operations::{Operation, Operations};
use crate::reply::{Reply, parse};
use ringway_aio::IoOp;

/// What is read at a time while heads are waited for.
const STAGED: usize = 16 << 10;

/// The server goes down, and asks its clients to go (`NBD_ESHUTDOWN`).
const ESHUTDOWN: u32 = 108;

/// Pieces of reads that came before what lies in front of them, on one connection. Honest servers send pieces in
/// order, or a few of them.
const SCATTERED_MAX: usize = 4096;

/// A piece of a read's memory.
#[derive(Clone, Copy, Debug)]
struct Piece {
    slot: u32,
    begin: u64,
    end: u64,
}

/// What comes next.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Head,
    /// Data of a read: `left` bytes for `at` in the operation's memory.
    Data {
        slot: u32,
        at: u64,
        left: u64,
        last: bool,
    },
}

/// The stream of replies of one connection.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// What the engine calls the connection.
    number: u32,
    structured: bool,
    expected: Expected,
    /// What reads have got behind a gap.
    scattered: Vec<Piece>,
    staged: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Incoming {
    pub(crate) fn new(number: u32, structured: bool) -> Self {
        let (expected, staged) = (Expected::Head, vec![0; STAGED].into());
        Self { number, structured, expected, scattered: Vec::new(), staged, begin: 0, end: 0 }
    }

    /// Another stream begins.
    pub(crate) fn clear(&mut self) {
        (self.expected, self.begin, self.end) = (Expected::Head, 0, 0);
        self.scattered.clear();
    }

    /// The read whose data comes now.
    pub(crate) fn reading(&self) -> Option<u32> {
        match self.expected {
            Expected::Data { slot, .. } => Some(slot),
            Expected::Head => None,
        }
    }

    /// True if a reply has begun, and not all of it has come.
    pub(crate) fn is_amid(&self) -> bool {
        self.begin < self.end || self.reading().is_some()
    }

    /// Lists where the next bytes go. How many there is room for.
    #[inline]
    pub(crate) fn places(
        &mut self,
        operations: &Operations,
        pieces: &mut Vec<libc::iovec>,
    ) -> usize {
        pieces.clear();
        let mut room = 0;
        if let Expected::Data { slot, at, left, .. } = self.expected {
            // What was staged has been taken, or it would not be data that is waited for.
            (self.begin, self.end) = (0, 0);
            push(pieces, operations.get(slot).segments(), at, left);
            room = pieces.iter().map(|piece| piece.iov_len).sum();
        } else if self.begin > 0 {
            self.staged.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        let free = &mut self.staged[self.end..];
        pieces.push(libc::iovec { iov_base: free.as_mut_ptr().cast(), iov_len: free.len() });
        room + free.len()
    }

    /// So many bytes have come to the places that were listed.
    #[inline]
    pub(crate) fn came(&mut self, got: usize) {
        let mut got = got as u64;
        if let Expected::Data { at, left, .. } = &mut self.expected {
            let moved = got.min(*left);
            (*at, *left) = (*at + moved, *left - moved);
            got -= moved;
        }
        // No more than there was room for.
        self.end += usize::try_from(got).unwrap_or(0);
    }

    /// The next request of which all has come, and its error, as the protocol has it or 0.
    ///
    /// # Errors
    /// Why the connection cannot go on.
    #[inline]
    pub(crate) fn next(&mut self, operations: &mut Operations) -> Result<Option<(u32, u32)>, Loss> {
        loop {
            if let Expected::Data { slot, .. } = self.expected {
                match self.take_data(operations) {
                    None => return Ok(None),
                    Some(true) => return self.complete(operations, slot, 0).map(Some),
                    Some(false) => {}
                }
            }
            let staged = &self.staged[self.begin..self.end];
            let Some((reply, len)) = parse(staged, self.structured).map_err(Loss::Violation)?
            else {
                return Ok(None);
            };
            self.begin += len;
            if let Some((slot, error)) = self.hear(operations, reply)? {
                return self.complete(operations, slot, error).map(Some);
            }
        }
    }

    /// Takes staged data to where it belongs. Once all is there: whether it ends the reply.
    fn take_data(&mut self, operations: &Operations) -> Option<bool> {
        let Expected::Data { slot, at, left, last } = self.expected else { return None };
        let staged = &self.staged[self.begin..self.end];
        // At most what is staged.
        let moved = usize::try_from(left.min(staged.len() as u64)).unwrap_or(0);
        // SAFETY: the memory of an operation in flight is valid, by the contract of `Engine::queue`.
        unsafe { fill(operations.get(slot).segments(), at, &staged[..moved]) };
        self.begin += moved;
        let (at, left) = (at + moved as u64, left - moved as u64);
        if left > 0 {
            self.expected = Expected::Data { slot, at, left, last };
            return None;
        }
        self.expected = Expected::Head;
        Some(last)
    }

    /// Gives the request that a reply ends.
    fn hear(
        &mut self,
        operations: &mut Operations,
        reply: Reply,
    ) -> Result<Option<(u32, u32)>, Loss> {
        let (Reply::Done { cookie, .. }
        | Reply::Data { cookie, .. }
        | Reply::Hole { cookie, .. }
        | Reply::Failed { cookie, .. }) = reply;
        let unknown = Loss::Violation("it answers what was not asked");
        let slot = operations.answered(self.number, cookie).ok_or(unknown)?;
        let entry = operations.get_mut(slot);
        match reply {
            Reply::Done { error, simple, .. } => {
                let simple_read = entry.op == IoOp::Read && simple;
                if simple_read && self.structured {
                    return Err(Loss::Violation("a simple reply to a read"));
                }
                if simple_read && error == 0 {
                    entry.got = entry.len;
                    let (at, left, last) = (0, entry.len, true);
                    self.expected = Expected::Data { slot, at, left, last };
                    return Ok(None);
                }
                Ok(Some((slot, error)))
            }
            Reply::Failed { error, .. } => {
                entry.error = error;
                Ok(None)
            }
            Reply::Data { offset, len, last, .. } => {
                let at = self.piece_of_read(slot, entry, (offset, len))?;
                self.expected = Expected::Data { slot, at, left: len, last };
                Ok(None)
            }
            Reply::Hole { offset, len, last, .. } => {
                let at = self.piece_of_read(slot, entry, (offset, len))?;
                // SAFETY: as for `fill`.
                unsafe { zero(entry.segments(), at, len) };
                Ok(last.then_some((slot, 0)))
            }
        }
    }
    /// Where in a read's memory a chunk lies, which is counted. No two of them may overlap: else their lengths
    /// add up, and what lies in no chunk is whatever the memory held.
    #[inline]
    fn piece_of_read(
        &mut self,
        slot: u32,
        entry: &mut Operation,
        (offset, len): (u64, u64),
    ) -> Result<u64, Loss> {
        let at = offset.checked_sub(entry.offset).filter(|_| entry.op == IoOp::Read && len > 0);
        let fits = |at: &u64| at.checked_add(len).is_some_and(|end| end <= entry.len);
        let at = at.filter(fits).ok_or(Loss::Violation("data that was not asked for"))?;
        if at == entry.filled && entry.got == entry.filled {
            entry.filled += len;
        } else {
            self.scatter(entry, Piece { slot, begin: at, end: at + len })?;
        }
        entry.got += len;
        Ok(at)
    }

    /// A piece of a read that has others behind a gap, or becomes one.
    #[cold]
    fn scatter(&mut self, entry: &mut Operation, piece: Piece) -> Result<(), Loss> {
        let overlaps = |other: &Piece| {
            other.slot == piece.slot && other.begin < piece.end && piece.begin < other.end
        };
        if piece.begin < entry.filled || self.scattered.iter().any(overlaps) {
            return Err(Loss::Violation("data that it has sent already"));
        }
        if self.scattered.len() == SCATTERED_MAX {
            return Err(Loss::Violation("data in too many pieces without order"));
        }
        self.scattered.push(piece);
        // What has no gap before it any more.
        let next = |slot, filled| move |other: &Piece| (other.slot, other.begin) == (slot, filled);
        while let Some(at) = self.scattered.iter().position(next(piece.slot, entry.filled)) {
            entry.filled = self.scattered.swap_remove(at).end;
        }
        Ok(())
    }

    /// The server's answer to a request is complete.
    #[inline]
    fn complete(
        &mut self,
        operations: &Operations,
        slot: u32,
        error: u32,
    ) -> Result<(u32, u32), Loss> {
        let entry = operations.get(slot);
        let error = if error == 0 { entry.error } else { error };
        if error == ESHUTDOWN {
            return Err(Loss::Leaves);
        }
        if error == 0 && entry.op == IoOp::Read && entry.got != entry.len {
            return Err(Loss::Violation("a reply to a read without all of its data"));
        }
        if !self.scattered.is_empty() {
            self.scattered.retain(|piece| piece.slot != slot);
        }
        Ok((slot, error))
    }
}
