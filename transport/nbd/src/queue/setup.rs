//! How the queue of a connection is made.

use super::{Flight, MEMORY_PER_CONNECTION, Queue, Stage};
use crate::extents::{ANSWER_MAX, Extents, Question};
use crate::input::Input;
use crate::output::Output;
use crate::request::Rules;
use crate::socket::Socket;
use ringway_core::mem::Pool;
use ringway_disk::Disk;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Requests of a connection that may be under way. More stay in its socket.
const DEPTH_MAX: u16 = 256;

/// Questions about block status that may be open.
const QUESTIONS: usize = 4;

/// Where a session finds what its queue asks, and answers.
pub(crate) struct Desk {
    questions: Receiver<Question>,
    answers: SyncSender<Extents>,
    asked: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    stream: Arc<OwnedFd>,
}

impl Desk {
    /// Readable when something is asked.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// The connection. The session notices when its client closes it; requests may wait for long without a
    /// byte being read.
    pub(crate) fn stream(&self) -> &Arc<OwnedFd> {
        &self.stream
    }

    /// Answers all that is asked.
    pub(crate) fn answer(&self, answer: impl Fn(Question) -> Extents) {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.asked, &mut counter);
        while let Ok(question) = self.questions.try_recv() {
            // There is one place for each; a queue that is gone needs none.
            let _ = self.answers.try_send(answer(question));
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Queue {
    /// For a connection whose handshake is over; at most `depth` requests are under way at a time. If
    /// `durable`, writes are durable before they are done.
    ///
    /// # Errors
    /// What the host says to memory or descriptors.
    pub(crate) fn new(
        stream: OwnedFd,
        disk: Arc<Disk>,
        rules: Rules,
        depth: u16,
        durable: bool,
    ) -> io::Result<(Self, Desk)> {
        let depth = depth.clamp(1, DEPTH_MAX);
        let socket = Socket::new(stream)?;
        let asked = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (ask, questions) = sync_channel(QUESTIONS);
        let (answers, answered) = sync_channel(QUESTIONS);
        let (wake, stream) = (socket.wake(), socket.stream());
        let desk = Desk { questions, answers, asked: Arc::clone(&asked), wake, stream };
        let flight = |_| Flight {
            cookie: 0,
            offset: 0,
            len: 0,
            is_read: false,
            fua: false,
            refused: None,
            pages: None,
        };
        let entries = usize::from(depth);
        let replies_max = 2 * entries;
        let queue = Self {
            socket,
            disk,
            rules,
            input: Input::new(),
            output: Output::new(replies_max),
            replies_max,
            pool: Pool::new(MEMORY_PER_CONNECTION)?,
            stage: Stage::Head,
            flights: (0..entries).map(flight).collect(),
            free: (0..depth).rev().collect(),
            flush_due: Vec::with_capacity(entries),
            riders: Vec::with_capacity(entries),
            flushing: false,
            durable,
            starved_at: 0,
            questions: ask,
            answers: answered,
            asked,
            spare: (0..QUESTIONS).map(|_| Vec::with_capacity(ANSWER_MAX)).collect(),
            open_questions: 0,
            gone: None,
            hung_up: false,
            said_goodbye: false,
            winding_down: false,
        };
        Ok((queue, desk))
    }
}
