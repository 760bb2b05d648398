//! From bytes to requests, one step at a time (hot).

use super::outcome::Step;
use super::{ConnectionEnd, Flight, Queue, Stage};
use crate::extents::Question;
use crate::input::Received;
use crate::output::Body;
use crate::reply::Head;
use crate::request::{Action, Asked, NbdError};
use ringway_core::mem::Segment;
use ringway_core::{Op, Request};
use ringway_export::Broken;

impl Queue {
    #[inline]
    pub(super) fn step(&mut self, request: &mut Request) -> Result<Step, Broken> {
        match self.stage {
            Stage::Head => self.read_head(request),
            Stage::Memory(asked) => Ok(self.place(asked, request)),
            Stage::Payload { entry, got } => self.read_payload(entry, got, request),
            Stage::Skip { asked, left } => self.skip(asked, left),
        }
    }

    #[inline]
    fn read_head(&mut self, request: &mut Request) -> Result<Step, Broken> {
        if !self.has_room() {
            return Ok(Step::Wait);
        }
        let len = self.rules.head_len();
        let Some(head) = self.input.bytes().get(..len) else { return self.receive_more() };
        let asked = self.rules.parse(head, self.disk.capacity()).map_err(Broken::rule)?;
        self.input.consume(len);
        match asked.action {
            Ok(Action::Read | Action::Write { .. }) => Ok(self.place(asked, request)),
            Ok(Action::Disconnect) => {
                self.said_goodbye = true;
                Err(Broken::rule(ConnectionEnd::Disconnected))
            }
            Err(_) if asked.payload > 0 => {
                self.stage = Stage::Skip { asked, left: asked.payload };
                Ok(Step::Again)
            }
            Err(error) => Ok(self.refuse(asked, error)),
            Ok(Action::BlockStatus { .. }) => Ok(self.place(asked, request)),
            Ok(Action::Nothing) => {
                self.answer_nothing(asked);
                Ok(Step::Again)
            }
            Ok(action) => Ok(self.start(asked, action, request)),
        }
    }

    #[inline]
    fn receive_more(&mut self) -> Result<Step, Broken> {
        Ok(match self.receive()? {
            Received::Some(_) => Step::Again,
            _ => Step::Wait,
        })
    }

    #[cold]
    fn answer_nothing(&mut self, asked: Asked) {
        let (cookie, offset) = (asked.cookie, asked.range.offset());
        let head = if asked.is_read {
            Head::nothing_read(self.rules.replies, cookie, offset)
        } else {
            Head::done(self.rules.replies, cookie, offset)
        };
        self.output.push(head, Body::Nothing);
    }

    /// An entry for a request. There is one: that was looked at before its head was read.
    #[inline]
    fn enter(&mut self, asked: Asked, fua: bool) -> u16 {
        let entry = self.free.pop().expect("there was room");
        let flight = &mut self.flights[usize::from(entry)];
        *flight = Flight {
            cookie: asked.cookie,
            offset: asked.range.offset(),
            // Of those that have data, which are short.
            len: u32::try_from(asked.range.len()).unwrap_or(0),
            is_read: asked.is_read,
            fua,
            refused: None,
            pages: None,
        };
        entry
    }

    #[cold]
    fn refuse(&mut self, asked: Asked, error: NbdError) -> Step {
        let entry = self.enter(asked, false);
        self.flights[usize::from(entry)].refused = Some(error);
        Step::Refused(entry)
    }

    /// Begins a request without data.
    fn start(&mut self, asked: Asked, action: Action, request: &mut Request) -> Step {
        let (op, unmap, fua) = match action {
            Action::Trim { fua } => (Op::Discard, true, fua),
            Action::WriteZeroes { fua, unmap } => (Op::WriteZeroes, unmap, fua),
            _ => (Op::Flush, false, false),
        };
        let entry = self.enter(asked, fua);
        (request.op, request.unmap, request.range) = (op, unmap, asked.range);
        // NBD_CMD_FLAG_NO_HOLE.
        request.allocate = !unmap;
        request.segments.clear();
        Step::Request(entry)
    }

    /// Gives a request its memory, or lets it wait, and all behind it.
    #[inline]
    fn place(&mut self, asked: Asked, request: &mut Request) -> Step {
        let fua = match asked.action {
            Ok(Action::BlockStatus { one }) => return self.ask(asked, one),
            Ok(Action::Write { fua }) => fua,
            _ => false,
        };
        // At most PAYLOAD_MAX.
        #[allow(clippy::cast_possible_truncation)]
        let len = asked.range.len() as usize;
        let Some(pages) = self.pool.acquire(len) else {
            self.starved_at = self.pool.in_use();
            self.stage = Stage::Memory(asked);
            return Step::Wait;
        };
        let entry = self.enter(asked, fua);
        self.flights[usize::from(entry)].pages = Some(pages);
        if asked.is_read {
            self.stage = Stage::Head;
            self.fill(entry, Op::Read, request);
            return Step::Request(entry);
        }
        self.stage = Stage::Payload { entry, got: 0 };
        Step::Again
    }

    /// True if memory was given back since there was none.
    #[inline]
    pub(super) fn may_have_memory(&self) -> bool {
        match self.stage {
            Stage::Memory(Asked { action: Ok(Action::BlockStatus { .. }), .. }) => {
                !self.spare.is_empty()
            }
            _ => self.pool.in_use() < self.starved_at,
        }
    }

    #[inline]
    fn fill(&mut self, entry: u16, op: Op, request: &mut Request) {
        let flight = &self.flights[usize::from(entry)];
        let len = flight.len as usize;
        request.op = op;
        request.segments.clear();
        if let Some(pages) = &flight.pages {
            let pushed = request.segments.push(Segment { base: pages.base(), len });
            debug_assert!(pushed, "an empty list has room for one");
        }
        // It was a range when it was asked for.
        request.range = ringway_core::ByteRange::new(flight.offset, len as u64).unwrap_or_default();
    }

    #[inline]
    fn read_payload(
        &mut self,
        entry: u16,
        got: u32,
        request: &mut Request,
    ) -> Result<Step, Broken> {
        let Some(missing) = self.missing(entry, got) else {
            self.stage = Stage::Head;
            self.fill(entry, Op::Write, request);
            return Ok(Step::Request(entry));
        };
        let received = self.input.bytes();
        let len = received.len().min(missing.len);
        if len == 0 {
            return self.receive_more();
        }
        // SAFETY: the pages are the entry's, and no operation has begun on them.
        unsafe { missing.base.copy_from_nonoverlapping(received.as_ptr(), len) };
        self.input.consume(len);
        // At most what is missing.
        #[allow(clippy::cast_possible_truncation)]
        let got = got + len as u32;
        self.stage = Stage::Payload { entry, got };
        Ok(Step::Again)
    }

    #[cold]
    fn skip(&mut self, asked: Asked, left: u32) -> Result<Step, Broken> {
        if left == 0 {
            self.stage = Stage::Head;
            let error = asked.action.err().unwrap_or(NbdError::Invalid);
            return Ok(self.refuse(asked, error));
        }
        let len = self.input.bytes().len().min(left as usize);
        if len == 0 {
            return self.receive_more();
        }
        self.input.consume(len);
        // At most what is left.
        #[allow(clippy::cast_possible_truncation)]
        let left = left - len as u32;
        self.stage = Stage::Skip { asked, left };
        Ok(Step::Again)
    }

    /// Asks the session what is allocated.
    #[cold]
    fn ask(&mut self, asked: Asked, one: bool) -> Step {
        let Some(memory) = self.spare.pop() else {
            self.stage = Stage::Memory(asked);
            return Step::Wait;
        };
        self.stage = Stage::Head;
        let question = Question { cookie: asked.cookie, range: asked.range, one, memory };
        match self.questions.try_send(question) {
            Ok(()) => {
                self.open_questions += 1;
                // A full counter rings too.
                let _ = rustix::io::write(&*self.asked, &1u64.to_ne_bytes());
                Step::Again
            }
            // There is one place for each piece of memory, so nobody is there to ask.
            Err(_) => self.refuse(asked, NbdError::Io),
        }
    }
}
