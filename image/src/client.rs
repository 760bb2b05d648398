//! A queue's line to the image's thread.
//!
//! ```text
//! queue                            thread
//!   ask(part) ──── Ask ──────────▶   loads, allocates, copies, publishes
//!   bell ◀──────── Answer ────────
//!   take()
//!   bell ◀──────── Fence ─────────   clusters are to be used again
//!   (what was begun before ends) ── Fenced ──▶
//! ```
//!
//! Both ways hold as much as can be on them, so neither side ever waits for the other.

use crate::ask::{Answer, Ask};
use ringway_core::host::Bell;
use ringway_core::host::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use ringway_core::host::thread::Thread;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// What goes to the thread.
#[derive(Debug)]
pub(crate) enum Message {
    Ask(Ask),
    /// What was in flight at the fence is over.
    Fenced,
}

/// What comes back.
#[derive(Debug)]
pub(crate) enum Reply {
    Answer(Answer),
    Fence,
}

/// The image's thread has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadLost;

/// The queue's end.
#[derive(Debug)]
pub struct ImageClient {
    messages: SyncSender<Message>,
    replies: Receiver<Reply>,
    bell: Arc<Bell>,
    thread: Thread,
    /// Questions that are not answered.
    asked: usize,
    /// Operations in flight that the table led to: those begun since the last fence, and those before.
    direct: [u32; 2],
    /// Which of the two counts those that begin now.
    generation: u8,
    /// The thread waits for the others to end.
    fence: bool,
}

/// The thread's end.
#[derive(Debug)]
pub(crate) struct ServerEnd {
    pub(crate) messages: Receiver<Message>,
    pub(crate) replies: SyncSender<Reply>,
    pub(crate) bell: Arc<Bell>,
    /// The image's.
    pub(crate) thread: Thread,
    /// A fence is on its way.
    pub(crate) fencing: bool,
    /// The queue is to look.
    pub(crate) rings: bool,
}

impl ServerEnd {
    /// Says something; the bell has to be rung then.
    pub(crate) fn say(&mut self, reply: Reply) {
        // There is room for all that may be under way; a queue that has gone needs nothing.
        let _ = self.replies.try_send(reply);
        self.rings = true;
    }

    /// Rings, if something was said.
    pub(crate) fn ring(&mut self) {
        if std::mem::take(&mut self.rings) {
            self.bell.ring();
        }
    }
}

impl Drop for ServerEnd {
    /// Whoever waits for an answer learns that there will be none.
    fn drop(&mut self) {
        self.rings = true;
        self.ring();
    }
}

/// Both ends of a line for a queue of `depth` requests. Allocates.
///
/// # Errors
/// What the host says to another descriptor.
pub(crate) fn line(depth: u16, thread: Thread) -> io::Result<(ImageClient, ServerEnd)> {
    let bell = Arc::new(Bell::new()?);
    let places = usize::from(depth) + 1;
    let ((messages, asked), (answers, replies)) = (sync_channel(places), sync_channel(places));
    let far = ServerEnd {
        messages: asked,
        replies: answers,
        bell: Arc::clone(&bell),
        thread: thread.clone(),
        fencing: false,
        rings: false,
    };
    let client = ImageClient {
        messages,
        replies,
        bell,
        thread,
        asked: 0,
        direct: [0; 2],
        generation: 0,
        fence: false,
    };
    Ok((client, far))
}

impl ImageClient {
    /// What rings when there is something to [`ImageClient::take`]: an eventfd that nobody has to read.
    #[must_use]
    pub fn bell(&self) -> RawFd {
        self.bell.fd()
    }

    /// Asks. At most as many questions as the queue has requests may be open.
    ///
    /// # Errors
    /// That nobody will answer.
    ///
    /// # Safety
    /// `ask.memory` is a list of segments that stays as it is, and their memory valid, until the
    /// answer was taken or the client dropped.
    pub unsafe fn ask(&mut self, ask: Ask) -> Result<(), ThreadLost> {
        self.messages.try_send(Message::Ask(ask)).map_err(|_| ThreadLost)?;
        self.asked += 1;
        self.thread.unpark();
        Ok(())
    }

    /// True if there are questions whose answers were not taken.
    #[inline]
    #[must_use]
    pub fn has_asked(&self) -> bool {
        self.asked > 0
    }

    /// The next answer, if there is one.
    ///
    /// # Errors
    /// That there will be no more, though some are open.
    pub fn take(&mut self) -> Result<Option<Answer>, ThreadLost> {
        loop {
            match self.replies.try_recv() {
                Ok(Reply::Answer(answer)) => {
                    self.asked -= 1;
                    return Ok(Some(answer));
                }
                Ok(Reply::Fence) => {
                    self.generation ^= 1;
                    self.fence = true;
                    self.pass_fence();
                }
                Err(TryRecvError::Disconnected) if self.asked > 0 => {
                    self.asked = 0;
                    return Err(ThreadLost);
                }
                Err(_) => return Ok(None),
            }
        }
    }

    /// An operation begins where the table led to. Gives what [`ImageClient::ended`] has to be told.
    #[inline]
    pub fn began(&mut self) -> u8 {
        self.direct[usize::from(self.generation)] += 1;
        self.generation
    }

    /// It is over.
    #[inline]
    pub fn ended(&mut self, generation: u8) {
        self.direct[usize::from(generation)] -= 1;
        if self.fence {
            self.pass_fence();
        }
    }

    #[cold]
    fn pass_fence(&mut self) {
        if self.direct[usize::from(self.generation ^ 1)] == 0 {
            self.fence = false;
            // There is room for it beside all questions.
            let _ = self.messages.try_send(Message::Fenced);
            self.thread.unpark();
        }
    }
}

impl Drop for ImageClient {
    /// Waits until nobody uses memory of a question any more.
    fn drop(&mut self) {
        while self.asked > 0 {
            match self.replies.recv() {
                Ok(Reply::Answer(_)) => self.asked -= 1,
                Ok(Reply::Fence) => {}
                Err(_) => break,
            }
        }
        self.thread.unpark();
    }
}
