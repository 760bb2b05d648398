//! One connection as its engine uses it: nothing here waits (hot).
//!
//! Requests go out in the order in which they came, many by one call; replies come in any order. Data
//! of reads goes where it belongs without a stop in between, but for what came along with a head.

use crate::incoming::Incoming;
use crate::loss::Loss;
use crate::memory::push;
use crate::operations::{HEAD, Operations};
use crate::reply::errno;
use crate::shared::{Lane, Mail, Shared, Wish};
use crate::table::{Table, answer, fail};
use ringway_aio::IoOp;
use ringway_core::Segment;
use ringway_nbd_words::offers;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// The most pieces of memory of one call (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;

/// The most segments of an operation: with its head it must fit into one call.
pub(crate) const SEGMENTS_MAX: usize = 512;

/// Calls that one look makes at most, so that a fast server does not keep others waiting.
const CALLS_MAX: usize = 16;

/// Bytes that have to pass within the time for which a server may be silent, where no reply ends.
const STRIDE: usize = 256 << 10;

/// The longest part of what moves no data, in bytes: lengths have 32 bits.
pub(crate) const ERASED_MAX: u64 = 1 << 30;

/// A connection, and the operations of its export.
///
/// # Invariants
/// 1. Each operation of the export is in `sending`, or has been sent and is in flight.
/// 2. `front` bytes of the first one in `sending` have been sent.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) shared: Arc<Shared>,
    /// Which one of the export's it is.
    pub(crate) index: usize,
    pub(crate) lane: Arc<Lane>,
    /// What the engine calls it.
    number: u32,
    /// How often its file is attached.
    pub(crate) users: u32,
    socket: Option<Arc<File>>,
    /// Nobody waits for it to come back: requests fail.
    failing: bool,
    /// Another connection is lost: nothing more is sent, and all that was sent is to be answered. Sent
    /// again while the server is at it, it would be done twice.
    retreating: bool,
    sending: VecDeque<u32>,
    front: usize,
    in_flight: usize,
    /// There was no room for what is in `sending`.
    pub(crate) full: bool,
    /// Something may have come that was not looked at.
    pub(crate) unread: bool,
    /// The server has closed it: once all is read there is nothing more.
    pub(crate) closed: bool,
    /// Bytes that have passed since the last progress.
    moved: usize,
    incoming: Incoming,
    pieces: Vec<libc::iovec>,
}

// SAFETY: the list of pieces is only filled and followed within one call.
unsafe impl Send for Connection {}

impl Connection {
    /// Connection `index` of an export, for an engine of `depth` operations.
    pub(crate) fn new(shared: Arc<Shared>, index: usize, number: u32, depth: u32) -> Self {
        let lane = Arc::clone(&shared.lanes[index]);
        let incoming = Incoming::new(number, shared.negotiated.structured);
        Self {
            shared,
            index,
            lane,
            number,
            users: 0,
            socket: None,
            failing: false,
            retreating: false,
            sending: VecDeque::with_capacity(depth as usize),
            front: 0,
            in_flight: 0,
            full: false,
            unread: false,
            closed: false,
            moved: 0,
            incoming,
            pieces: Vec::with_capacity(PIECES_MAX),
        }
    }

    /// Its socket, while there is one.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.socket.as_ref().map(|socket| socket.as_raw_fd())
    }

    /// True if there is something to be read for, and a socket to read.
    pub(crate) fn listens(&self) -> bool {
        self.socket.is_some() && (self.in_flight > 0 || self.unread)
    }

    /// True if there is something that can be sent.
    pub(crate) fn can_send(&self) -> bool {
        !self.sending.is_empty() && !self.full && self.socket.is_some() && !self.retreating
    }

    /// Takes an operation in, or answers it where there is nothing to be asked.
    #[inline]
    pub(crate) fn queue(&mut self, table: &mut Table<'_>, slot: u32) {
        let facts = &self.shared.negotiated;
        let entry = table.operations.get_mut(slot);
        let offered = match entry.op {
            IoOp::Read | IoOp::Write | IoOp::WriteDurable => {
                entry.len = entry.len.min(facts.max_block.into());
                true
            }
            IoOp::Sync => facts.offers(offers::SEND_FLUSH),
            IoOp::PunchHole | IoOp::ZeroRange => facts.offers(offers::SEND_WRITE_ZEROES),
            IoOp::Discard => facts.offers(offers::SEND_TRIM),
        };
        if !entry.op.moves_data() {
            entry.len = entry.len.min(ERASED_MAX);
        }
        // Who has no flush has nothing to be flushed: what it takes is durable, by FUA if there is that.
        let errno = match entry.op {
            IoOp::Sync if self.shared.ledger.is_lost() => libc::EIO,
            IoOp::Sync if !offered => 0,
            _ if !offered => libc::EOPNOTSUPP,
            // What the supervisor has said and nobody has heard yet may be that it is back.
            _ if self.failing && !self.lane.arrived.load(SeqCst) => libc::ENOTCONN,
            _ => return self.enqueue(table, slot),
        };
        answer(table, slot, -errno);
    }

    #[inline]
    fn enqueue(&mut self, table: &mut Table<'_>, slot: u32) {
        let entry = table.operations.get_mut(slot);
        entry.sent = false;
        entry.make_head(slot, &self.shared.negotiated);
        if entry.op == IoOp::Sync {
            // What it covers.
            entry.end = self.shared.ledger.mark();
        }
        self.sending.push_back(slot);
    }

    /// Sends what is queued, as far as there is room.
    pub(crate) fn send(&mut self, table: &mut Table<'_>) -> Result<(), Loss> {
        let mut most = usize::MAX;
        while self.can_send() {
            let total = self.gather(table.operations, most);
            let Some(fd) = self.fd() else { break };
            *table.syscalls += 1;
            let count = i32::try_from(self.pieces.len()).unwrap_or(i32::MAX);
            // By pwritev2 without an offset, which every engine's thread may call.
            // SAFETY: heads are in the table; segments are valid by the contract of `queue`.
            let sent = unsafe { libc::pwritev2(fd, self.pieces.as_ptr(), count, -1, 0) };
            let Ok(sent) = usize::try_from(sent) else {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EAGAIN) => self.full = true,
                    Some(libc::EINTR) => continue,
                    // Nothing has gone. It may be the memory of any of them: the first one is tried alone.
                    Some(libc::EFAULT) if most > 1 && self.sending.len() > 1 => {
                        most = 1;
                        continue;
                    }
                    Some(libc::EFAULT) => return Err(self.faulted(table)),
                    _ => return Err(Loss::Host(error)),
                }
                break;
            };
            if self.in_flight == 0 {
                self.moves(sent, self.front == 0);
            }
            self.took(table.operations, sent);
            most = usize::MAX;
            self.full = sent < total;
        }
        self.lane.waits.store(self.in_flight > 0 || !self.sending.is_empty(), Relaxed);
        Ok(())
    }

    /// Lists what is to be sent, as much as one call takes, of `most` operations. How many bytes.
    fn gather(&mut self, operations: &Operations, most: usize) -> usize {
        self.pieces.clear();
        let (mut skip, mut total) = (self.front, 0);
        for &slot in self.sending.iter().take(most) {
            let entry = operations.get(slot);
            if self.pieces.len() + 1 + entry.segments().len() > PIECES_MAX {
                break;
            }
            let head = Segment { base: entry.head.as_ptr().cast_mut(), len: HEAD };
            let from = self.pieces.len();
            let left = HEAD.saturating_sub(skip) as u64;
            push(&mut self.pieces, std::slice::from_ref(&head), skip as u64, left);
            let skipped = (skip as u64).saturating_sub(HEAD as u64);
            let left = entry.payload().saturating_sub(skipped);
            push(&mut self.pieces, entry.segments(), skipped, left);
            total += self.pieces[from..].iter().map(|piece| piece.iov_len).sum::<usize>();
            skip = 0;
        }
        total
    }

    /// So many bytes of what was listed have gone.
    fn took(&mut self, operations: &mut Operations, sent: usize) {
        self.front += sent;
        while let Some(&slot) = self.sending.front() {
            let entry = operations.get_mut(slot);
            // An operation has at most 32 MiB.
            let whole = HEAD + usize::try_from(entry.payload()).unwrap_or(usize::MAX);
            if self.front < whole {
                break;
            }
            self.front -= whole;
            entry.sent = true;
            self.in_flight += 1;
            self.sending.pop_front();
        }
    }

    /// The memory of the first operation, sent alone, is not there any more: its guest's doing. What was begun cannot
    /// be ended, so the connection goes with it.
    #[cold]
    fn faulted(&mut self, table: &mut Table<'_>) -> Loss {
        if let Some(slot) = self.sending.pop_front() {
            answer(table, slot, -libc::EFAULT);
        }
        Loss::Memory
    }

    /// Reads what has come.
    pub(crate) fn receive(&mut self, table: &mut Table<'_>) -> Result<(), Loss> {
        self.unread = true;
        for _ in 0..CALLS_MAX {
            let Some(fd) = self.fd() else { break };
            let wanted = self.incoming.places(table.operations, &mut self.pieces);
            *table.syscalls += 1;
            let count = i32::try_from(self.pieces.len()).unwrap_or(i32::MAX);
            // SAFETY: the places are the rest of an operation's memory, which is valid by the contract
            // of `queue`, and memory of ours.
            let got = unsafe { libc::preadv2(fd, self.pieces.as_ptr(), count, -1, 0) };
            let got = match usize::try_from(got) {
                Ok(0) => return Err(Loss::Closed),
                Ok(got) => got,
                Err(_) => match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(libc::EAGAIN) => {
                        self.unread = false;
                        break;
                    }
                    error if error.kind() == io::ErrorKind::Interrupted => continue,
                    error if error.raw_os_error() == Some(libc::EFAULT) => {
                        self.give_up_read(table);
                        return Err(Loss::Memory);
                    }
                    error => return Err(Loss::Host(error)),
                },
            };
            let begins = !self.incoming.is_amid();
            self.incoming.came(got);
            let mut answered = false;
            while let Some((slot, error)) = self.incoming.next(table.operations)? {
                self.done(table, slot, error);
                answered = true;
            }
            self.moves(got, begins || answered);
            if self.retreating && self.in_flight == 0 {
                return Err(Loss::Other);
            }
            if got < wanted {
                // Its end does not ring again.
                self.unread = self.closed;
                break;
            }
        }
        self.lane.waits.store(self.in_flight > 0 || !self.sending.is_empty(), Relaxed);
        self.lane.amid.store(self.incoming.is_amid(), Relaxed);
        Ok(())
    }

    /// So many bytes have come or gone. That is progress with a request that begins, a reply that begins or
    /// ends, and each [`STRIDE`] amid one: else a server could be at one reply for ever.
    #[inline]
    fn moves(&mut self, bytes: usize, whole: bool) {
        self.moved += bytes;
        if whole || self.moved >= STRIDE {
            self.moved = 0;
            self.lane.progress.fetch_add(1, Relaxed);
        }
    }

    /// A read whose memory is not there any more has failed for good.
    #[cold]
    fn give_up_read(&mut self, table: &mut Table<'_>) {
        if let Some(slot) = self.incoming.reading() {
            self.in_flight -= 1;
            answer(table, slot, -libc::EFAULT);
        }
    }

    /// The server's answer to a request is complete.
    #[inline]
    fn done(&mut self, table: &mut Table<'_>, slot: u32, error: u32) {
        self.in_flight -= 1;
        if !self.lane.answered.load(Relaxed) {
            self.lane.answered.store(true, Relaxed);
        }
        if error == 0 && !self.is_complete(table, slot) {
            return;
        }
        let entry = table.operations.get(slot);
        // At most 32 MiB.
        let moved = if entry.op.moves_data() { i32::try_from(entry.len).unwrap_or(0) } else { 0 };
        let lost = entry.op == IoOp::Sync && self.shared.ledger.is_lost();
        let result = match error {
            0 if lost => -libc::EIO,
            0 => moved,
            // A flush that has found no room has lost what is written already: no second one brings it back.
            _ if entry.op == IoOp::WriteDurable && entry.flushing => -libc::EIO,
            error => -errno(error),
        };
        answer(table, slot, result);
    }

    /// A request has succeeded. False if its operation goes on with another one.
    fn is_complete(&mut self, table: &mut Table<'_>, slot: u32) -> bool {
        let facts = self.shared.negotiated;
        let entry = table.operations.get_mut(slot);
        match entry.op {
            IoOp::Read | IoOp::Discard => {}
            IoOp::WriteDurable => {
                let owed = !facts.offers(offers::SEND_FUA) && facts.offers(offers::SEND_FLUSH);
                if owed && !entry.flushing {
                    entry.flushing = true;
                    self.enqueue(table, slot);
                    return false;
                }
            }
            IoOp::Write | IoOp::PunchHole | IoOp::ZeroRange => {
                if facts.offers(offers::SEND_FLUSH) {
                    self.shared.ledger.write_answered();
                }
            }
            IoOp::Sync => self.shared.ledger.flush_answered(entry.end),
        }
        let entry = table.operations.get_mut(slot);
        let next = entry.offset.saturating_add(entry.len);
        if !entry.op.moves_data() && entry.op != IoOp::Sync && next < entry.end {
            entry.offset = next;
            entry.len = (entry.end - next).min(ERASED_MAX);
            self.enqueue(table, slot);
            return false;
        }
        true
    }

    /// The connection cannot go on: all that is not answered is to be sent again, in the order in which it
    /// came and before anything new.
    #[cold]
    pub(crate) fn lose(&mut self, table: &mut Table<'_>, loss: &Loss) {
        let Some(socket) = self.socket.take() else { return };
        let flushes = self.shared.negotiated.offers(offers::SEND_FLUSH);
        let lost = flushes && self.shared.ledger.connection_lost();
        self.incoming.clear();
        self.retreating = false;
        (self.front, self.in_flight, self.moved) = (0, 0, 0);
        (self.full, self.unread, self.closed) = (false, false, false);
        self.sending.clear();
        self.sending.extend(table.operations.of(self.number));
        self.sending
            .make_contiguous()
            .sort_unstable_by_key(|&slot| table.operations.get(slot).order);
        for &slot in &self.sending {
            let entry = table.operations.get_mut(slot);
            (entry.sent, entry.got, entry.filled) = (false, 0, 0);
            (entry.error, entry.flushing) = (0, false);
            entry.make_head(slot, &self.shared.negotiated);
        }
        if self.failing {
            fail(table, &mut self.sending, -libc::ENOTCONN, |_| true);
        } else if self.shared.ledger.is_lost() {
            fail(table, &mut self.sending, -libc::EIO, |operation| operation.op == IoOp::Sync);
        }
        self.lane.waits.store(false, Relaxed);
        self.lane.amid.store(false, Relaxed);
        let why = loss.to_string();
        self.shared.ask(Wish { lane: self.index, why, old: socket, lost, absent: false });
    }

    /// Takes what the supervisor says.
    #[cold]
    pub(crate) fn hear_supervisor(&mut self, table: &mut Table<'_>) -> Result<(), Loss> {
        match self.lane.take_mail() {
            Some(Mail::Connected(socket)) => {
                self.socket = Some(socket);
                self.lane.asked_at_once.store(!self.sending.is_empty(), Relaxed);
                self.failing = false;
                self.unread = true;
            }
            Some(Mail::Retreat) => return self.retreat(),
            Some(Mail::GaveUp) => {
                self.failing = true;
                // What was sent may be answered yet.
                fail(table, &mut self.sending, -libc::ENOTCONN, |_| true);
                return self.retreat();
            }
            None => {}
        }
        Ok(())
    }

    /// The export is given up: nothing more is sent, what is not answered fails, and so does all that comes.
    #[cold]
    pub(crate) fn end(&mut self, table: &mut Table<'_>) -> Result<(), Loss> {
        // A connection that has just come is closed again.
        drop(self.lane.take_mail());
        self.failing = true;
        fail(table, &mut self.sending, -libc::ENOTCONN, |_| true);
        if self.socket.is_some() { Err(Loss::Ended) } else { Ok(()) }
    }

    /// Nothing more is sent, and once all that was sent is answered the connection is given up.
    fn retreat(&mut self) -> Result<(), Loss> {
        self.retreating = self.in_flight > 0;
        if self.retreating { Ok(()) } else { Err(Loss::Other) }
    }
}

/// The owner of an engine may end before the export does.
impl Drop for Connection {
    fn drop(&mut self) {
        let retreats = self.retreating;
        let leave = |socket| if retreats { Some(socket) } else { self.lane.leave(socket) };
        let old = self.socket.take().and_then(leave);
        self.shared.free(self.index);
        let Some(old) = old else { return };
        let why = "its worker has ended".to_owned();
        let (lane, lost) = (self.index, false);
        self.shared.ask(Wish { lane, why, old, lost, absent: false });
    }
}
