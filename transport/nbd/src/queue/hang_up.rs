//! What becomes of requests whose client has closed its connection.

use super::{Queue, Stage};
use crate::request::{Action, Asked, Rules};
use crate::socket::peek;
use std::os::fd::OwnedFd;

/// What is sent and not received is looked through for a disconnect request if it is less than so many bytes. A client
/// waits for its answers before it sends one, as a rule, and has nothing else on the way then.
const LOOK_MAX: usize = 256 << 10;

/// Whether a client that has closed its side may have said before that it goes (NBD_CMD_DISC), by what nobody has received
/// yet: it is the last thing that a client sends. For the session's thread, as it copies that.
#[cold]
pub(crate) fn may_say_goodbye(stream: &OwnedFd, rules: &Rules, capacity: u64) -> bool {
    let Some(unread) = peek(stream, LOOK_MAX) else { return false };
    // The worker may have received the beginning of it, or all.
    let last = unread.len().checked_sub(rules.head_len()).map(|at| &unread[at..]);
    last.is_none_or(|last| is_disconnect(rules, last, capacity))
}

fn is_disconnect(rules: &Rules, head: &[u8], capacity: u64) -> bool {
    rules.parse(head, capacity).is_ok_and(|asked| asked.action == Ok(Action::Disconnect))
}

impl Queue {
    /// The client has closed its side of the connection. True if it takes its requests with it: those that were not read
    /// yet are not carried out, because the client may have sent them again elsewhere, and something newer after them.
    /// False if it has said that it goes (NBD_CMD_DISC): then the protocol has all that came before carried out. It is
    /// looked for where it may be, as [`may_say_goodbye`] tells: other queues of the worker wait for that.
    #[cold]
    pub(crate) fn hang_up(&mut self, may_say_goodbye: bool) -> bool {
        self.said_goodbye = self.said_goodbye || (may_say_goodbye && self.ends_with_disconnect());
        if !self.said_goodbye {
            (self.hung_up, self.winding_down) = (true, true);
        }
        !self.said_goodbye
    }

    /// True if a disconnect request is among what was sent and not read. Nothing more comes.
    #[cold]
    pub(super) fn ends_with_disconnect(&self) -> bool {
        let Some(rest) = peek(&self.socket.stream(), LOOK_MAX) else { return false };
        let sent = [self.input.bytes(), &rest].concat();
        let payload = |asked: &Asked| asked.payload as usize;
        let mut at = match &self.stage {
            Stage::Head => 0,
            Stage::Memory(asked) => payload(asked),
            Stage::Payload { entry, got } => (self.flights[usize::from(*entry)].len - got) as usize,
            Stage::Skip { left, .. } => *left as usize,
        };
        let (len, capacity) = (self.rules.head_len(), self.disk.capacity());
        while let Some(head) = sent.get(at..at.saturating_add(len)) {
            match self.rules.parse(head, capacity) {
                Ok(asked) if asked.action == Ok(Action::Disconnect) => return true,
                Ok(asked) => at += len + payload(&asked),
                Err(_) => return false,
            }
        }
        false
    }
}
