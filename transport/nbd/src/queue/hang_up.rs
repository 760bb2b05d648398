//! What becomes of requests whose client has closed its connection.

use super::{Queue, Stage};
use crate::request::{Action, Asked};

/// The most bytes that are looked through for a disconnect request. Sockets hold less.
const LOOK_MAX: usize = 64 << 20;

impl Queue {
    /// The client has closed its side of the connection. True if it takes its requests with it: those that were
    /// not read yet are not carried out, because the client may have sent them again elsewhere, and something
    /// newer after them. False if it has said that it goes (NBD_CMD_DISC): then the protocol has all that came
    /// before carried out.
    #[cold]
    pub(crate) fn hang_up(&mut self) -> bool {
        self.said_goodbye = self.said_goodbye || self.ends_with_disconnect();
        if !self.said_goodbye {
            (self.hung_up, self.winding_down) = (true, true);
        }
        !self.said_goodbye
    }

    /// True if a disconnect request is among what was sent and not read. Nothing more comes.
    pub(super) fn ends_with_disconnect(&self) -> bool {
        let Some(rest) = self.socket.peek(LOOK_MAX) else { return false };
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
