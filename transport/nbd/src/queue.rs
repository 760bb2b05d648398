//! One connection, as a worker sees it: a queue of requests (hot).
//!
//! ```text
//! socket → input → head → pages → worker        pop: nothing waits, nothing is allocated
//! worker → output → socket                      publish: one call sends all answers of a turn
//! ```
//!
//! What does not fit waits where it is: without a free entry, without pages or behind a client that does
//! not read its answers no more requests are read, so that a slow client holds up itself alone.

mod hang_up;
mod lifecycle;
mod outcome;
mod setup;
mod step;

pub(crate) use hang_up::may_say_goodbye;
pub(crate) use setup::Desk;

use crate::extents::Question;
use crate::input::{Input, Missing, Received};
use crate::output::{Body, Output};
use crate::reply::Head;
use crate::request::{Asked, NbdError, Rules};
use crate::socket::Socket;
use ringway_core::mem::{Pool, PoolPages};
use ringway_core::{ByteRange, Op, Request, Status};
use ringway_disk::Disk;
use ringway_export::{AnswerDue, Armed, Broken, Pop, RequestQueue};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

/// Memory for data on its way, in bytes, for each connection: one of the longest requests. It costs
/// pages once it is used. A request for which there is none waits, and all behind it.
pub const MEMORY_PER_CONNECTION: usize = crate::protocol::PAYLOAD_MAX as usize;

/// Heads that one call of `pop` looks at: those that need no disk are answered on the way.
const STEPS_MAX: usize = 64;

/// The entry of the flush behind durable writes.
const FLUSH: u16 = u16::MAX;

/// Why a connection takes no more requests.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionEnd {
    /// It has said that it goes.
    #[error("the client has disconnected")]
    Disconnected,
    /// It has gone without a word.
    #[error("the client has closed its connection")]
    Closed,
    /// The connection is lost.
    #[error("the connection is lost: {0}")]
    Lost(io::ErrorKind),
}

/// The right to answer one request.
#[derive(Debug)]
pub struct Token {
    entry: u16,
    due: AnswerDue,
}

impl Token {
    #[inline]
    fn new(entry: u16) -> Self {
        Self { entry, due: AnswerDue::default() }
    }
}

/// A request that was taken.
#[derive(Debug)]
struct Flight {
    cookie: u64,
    offset: u64,
    len: u32,
    /// Its reply looks like that of a read.
    is_read: bool,
    /// Durable before it is answered.
    fua: bool,
    /// The answer, whatever the disk says.
    refused: Option<NbdError>,
    pages: Option<PoolPages>,
}

/// How far the client's next request has come.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Its head is read.
    Head,
    /// There is no memory for it.
    Memory(Asked),
    /// Its data is read: so much is there.
    Payload { entry: u16, got: u32 },
    /// Its data is of no use.
    Skip { asked: Asked, left: u32 },
}

/// The queue of one connection.
///
/// # Invariants
/// 1. An entry is in exactly one of: `free`, the stage, a token that is out, `flush_due`, `riders`.
/// 2. Replies that wait, entries that are not free, and questions that are open are fewer than the
///    output has room for.
pub struct Queue {
    socket: Socket,
    disk: Arc<Disk>,
    rules: Rules,
    input: Input,
    output: Output,
    /// Replies that `output` has room for.
    replies_max: usize,
    pool: Pool,
    stage: Stage,
    flights: Box<[Flight]>,
    free: Vec<u16>,
    /// Done, but to be durable before they are answered.
    flush_due: Vec<u16>,
    /// Those that the flush under way is for.
    riders: Vec<u16>,
    flushing: bool,
    /// Writes are durable before they are done in any case.
    durable: bool,
    /// Bytes of the pool that were in use when there were not enough.
    starved_at: usize,
    questions: SyncSender<Question>,
    answers: Receiver<crate::extents::Extents>,
    asked: Arc<std::os::fd::OwnedFd>,
    /// Memory for block status.
    spare: Vec<Vec<u8>>,
    /// Questions without an answer.
    open_questions: usize,
    gone: Option<io::ErrorKind>,
    /// The client has closed its side: what it has sent and was not read is not read any more.
    hung_up: bool,
    /// The client has gone and had said that it would: all that it has sent is carried out.
    said_goodbye: bool,
    winding_down: bool,
}

impl Queue {
    /// True if one more request can be taken.
    #[inline]
    fn has_room(&self) -> bool {
        let busy = self.flights.len() - self.free.len();
        !self.free.is_empty() && self.output.len() + busy + self.open_questions < self.replies_max
    }

    /// True if receiving brings the next request nearer.
    fn may_receive(&self) -> bool {
        match self.stage {
            Stage::Head => self.has_room(),
            Stage::Memory(_) => false,
            Stage::Payload { .. } | Stage::Skip { .. } => true,
        }
    }

    /// Receives what is there, to where it belongs.
    #[inline]
    fn receive(&mut self) -> Result<Received, Broken> {
        let missing = match self.stage {
            Stage::Payload { entry, got } => self.missing(entry, got),
            _ => None,
        };
        // SAFETY: the pages are the entry's, and no operation has begun on them.
        let received = unsafe { self.input.receive(&self.socket, missing) };
        match received {
            Ok(Received::Some(placed)) => {
                if let Stage::Payload { got, .. } = &mut self.stage {
                    // Not more than was missing, which is less than 2^32.
                    #[allow(clippy::cast_possible_truncation)]
                    {
                        *got += placed as u32;
                    }
                }
                Ok(Received::Some(placed))
            }
            Ok(Received::End) => {
                self.hung_up = true;
                Err(Broken::rule(ConnectionEnd::Closed))
            }
            Ok(Received::Nothing) => Ok(Received::Nothing),
            Err(error) => {
                self.hung_up = true;
                Err(Broken::rule(ConnectionEnd::Lost(error.kind())))
            }
        }
    }

    /// The rest of a write's pages, if something is missing.
    #[inline]
    fn missing(&self, entry: u16, got: u32) -> Option<Missing> {
        let flight = &self.flights[usize::from(entry)];
        let pages = flight.pages.as_ref().filter(|_| got < flight.len)?;
        // SAFETY: the pages have at least `len` bytes.
        let base = unsafe { pages.base().add(got as usize) };
        Some(Missing { base, len: (flight.len - got) as usize })
    }

    /// Answers a request; its entry is free again.
    #[inline]
    fn answer(&mut self, entry: u16, status: Status) {
        let flight = &mut self.flights[usize::from(entry)];
        let pages = flight.pages.take();
        self.free.push(entry);
        let error = flight.refused.or(match status {
            Status::Ok => None,
            Status::IoError => Some(NbdError::Io),
            Status::NoSpace => Some(NbdError::NoSpace),
            Status::Unsupported => Some(NbdError::Unsupported),
        });
        let (cookie, offset, replies) = (flight.cookie, flight.offset, self.rules.replies);
        let (len, is_read) = (flight.len, flight.is_read && error.is_none());
        if let Some(pages) = pages {
            if is_read && self.gone.is_none() {
                let head = Head::data(replies, cookie, offset, len);
                return self.output.push(head, Body::Pages(pages, len as usize));
            }
            self.pool.release(pages);
        }
        if self.gone.is_some() {
            return;
        }
        let head = match error {
            None => Head::done(replies, cookie, offset),
            Some(error) => Head::failed(replies, cookie, offset, error),
        };
        self.output.push(head, Body::Nothing);
    }

    /// Sends what the client has room for. That it has gone is told by the next look at the queue.
    #[inline]
    fn send(&mut self) {
        match self.output.send(&self.socket, &mut self.pool, &mut self.spare) {
            Ok(true) if self.socket.wants_room() => self.end_wait_for_room(),
            Ok(_) => {}
            Err(error) => self.lose(error.kind()),
        }
    }

    #[cold]
    fn end_wait_for_room(&mut self) {
        if let Err(error) = self.socket.want_room(false) {
            self.lose(error.kind());
        }
    }

    /// Takes what the session has found out; true if there was something.
    #[cold]
    fn take_extents(&mut self) -> bool {
        let before = self.open_questions;
        while let Ok(extents) = self.answers.try_recv() {
            self.open_questions -= 1;
            if self.gone.is_some() {
                self.spare.push(extents.payload);
                continue;
            }
            // At most ANSWER_MAX.
            #[allow(clippy::cast_possible_truncation)]
            let len = extents.payload.len() as u32;
            let head = Head::extents(self.rules.replies, extents.cookie, extents.offset, len);
            self.output.push(head, Body::Extents(extents.payload));
        }
        if before > self.open_questions {
            self.socket.heard();
        }
        before > self.open_questions
    }

    /// Nobody is there any more.
    #[cold]
    fn lose(&mut self, why: io::ErrorKind) {
        self.gone = Some(why);
        self.said_goodbye = self.said_goodbye || (!self.hung_up && self.ends_with_disconnect());
        self.output.drop_all(&mut self.pool, &mut self.spare);
        self.free.append(&mut self.flush_due);
    }

    fn is_there(&self) -> Result<(), Broken> {
        let gone = self.gone.filter(|_| !self.said_goodbye);
        gone.map_or(Ok(()), |why| Err(Broken::rule(ConnectionEnd::Lost(why))))
    }

    /// The flush behind writes that are to be durable: one for all that wait.
    #[inline]
    fn pop_flush(&mut self, request: &mut Request) -> bool {
        if self.flush_due.is_empty() || self.flushing {
            return false;
        }
        std::mem::swap(&mut self.flush_due, &mut self.riders);
        self.flushing = true;
        request.op = Op::Flush;
        request.range = ByteRange::default();
        request.segments.clear();
        true
    }
}

impl RequestQueue for Queue {
    type Token = Token;

    #[inline]
    fn pop(&mut self, request: &mut Request) -> Result<Pop<Token>, Broken> {
        if self.pop_flush(request) {
            return Ok(Pop::Request(Token::new(FLUSH)));
        }
        if self.winding_down {
            return Ok(Pop::Empty);
        }
        self.is_there()?;
        for _ in 0..STEPS_MAX {
            match self.step(request)? {
                outcome::Step::Request(entry) => return Ok(Pop::Request(Token::new(entry))),
                outcome::Step::Refused(entry) => {
                    return Ok(Pop::Refused(Token::new(entry), Status::IoError));
                }
                outcome::Step::Again => {}
                outcome::Step::Wait => break,
            }
        }
        Ok(Pop::Empty)
    }

    #[inline]
    fn effort(&self) -> u32 {
        1
    }

    #[inline]
    fn complete(&mut self, token: Token, status: Status, _written: u32) {
        let Token { entry, due } = token;
        due.settle();
        if entry == FLUSH {
            self.flushing = false;
            while let Some(rider) = self.riders.pop() {
                self.answer(rider, status);
            }
            return;
        }
        let flight = &mut self.flights[usize::from(entry)];
        if flight.fua && status == Status::Ok && !self.durable && self.gone.is_none() {
            if let Some(pages) = flight.pages.take() {
                self.pool.release(pages);
            }
            self.flush_due.push(entry);
            return;
        }
        self.answer(entry, status);
    }

    #[inline]
    fn publish(&mut self) -> io::Result<()> {
        self.input.next_turn();
        if self.open_questions > 0 {
            self.take_extents();
        }
        if !self.output.is_empty() && self.output.is_due() {
            self.send();
        }
        Ok(())
    }

    #[inline]
    fn has_work(&self) -> bool {
        if !self.flush_due.is_empty() && !self.flushing {
            return true;
        }
        let received = self.input.bytes().len();
        !self.winding_down
            && match self.stage {
                Stage::Head => received >= self.rules.head_len() && self.has_room(),
                Stage::Memory(_) => self.may_have_memory(),
                Stage::Payload { entry, got } => {
                    received > 0 || got == self.flights[usize::from(entry)].len
                }
                Stage::Skip { left, .. } => received > 0 || left == 0,
            }
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        self.is_there()?;
        if self.open_questions > 0 && self.take_extents() {
            return Ok(Armed::WorkArrived);
        }
        if !self.output.is_empty() {
            let asked = self.socket.want_room(true);
            asked.map_err(|error| Broken::rule(ConnectionEnd::Lost(error.kind())))?;
            // Once more: the bell may have rung while others kept the worker busy.
            self.send();
            self.is_there()?;
        }
        if self.has_work() {
            return Ok(Armed::WorkArrived);
        }
        self.input.next_turn();
        // Without room, what is in flight or waits to be sent brings us back.
        while !self.winding_down && self.may_receive() {
            match self.receive()? {
                _ if self.has_work() || self.input.is_used_up() => return Ok(Armed::WorkArrived),
                Received::Nothing => break,
                _ => self.input.poll_again(),
            }
        }
        Ok(Armed::Quiet)
    }

    fn disarm(&mut self) {
        self.output.unblock();
    }
}

#[cfg(test)]
mod tests;
