//! Messages between daemon and helper: one packet each, with at most one descriptor.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What is said where a message has come without its descriptor.
pub(crate) const LOST: &str =
    "its descriptor is lost: a process of this daemon has no more of them (ulimit -n)";

/// The longest message in bytes: paths are 4096 at most, reasons a few lines.
const LONGEST: usize = 64 << 10;

/// Why a message was not sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    /// The receiver has no room for it.
    #[error(
        "a path is too long: 4095 bytes at most. What is asked for would be a message of {0} bytes to another \
         process of this daemon, and {LONGEST} is the most"
    )]
    TooLong(usize),
    /// It cannot be put into words.
    #[error("it cannot be said to another process: {0}")]
    Words(#[from] serde_json::Error),
    /// What the host says, such as that nobody has the other end any more.
    #[error("cannot send to another process: {0}")]
    Host(#[from] io::Error),
}

/// Why no message was received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// Nobody has the other end any more.
    #[error("the other process has closed its line")]
    Ended,
    /// One has come, and is not understood. The next one may be.
    #[error("a message of another process is not understood: {0}")]
    Message(String),
    /// What the host says. No message was taken from the line.
    #[error("cannot receive from another process: {0}")]
    Host(#[from] io::Error),
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error(transparent)]
    Send(#[from] SendError),
    #[error(transparent)]
    Receive(#[from] ReceiveError),
}

impl AskError {
    /// Nobody is at the other end any more.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Self::Send(SendError::Host(_)) | Self::Receive(ReceiveError::Ended))
    }
}

/// What is answered to one request. Both ends count the requests of their line: an answer that could not be received
/// is not taken for that to the next one.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Numbered<T> {
    /// Which request of the line it is for, from 1.
    pub(super) request: u64,
    pub(super) answer: T,
}

/// The end of a line on which one request after the other is sent, and answered.
pub(crate) struct Asker {
    line: OwnedFd,
    asked: u64,
}

impl Asker {
    pub(crate) fn new(line: OwnedFd) -> Self {
        Self { line, asked: 0 }
    }

    /// Sends a request, and waits for the answer to it.
    ///
    /// # Errors
    /// [`AskError`].
    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        request: &impl Serialize,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(T, Option<OwnedFd>), AskError> {
        send(&self.line, request, fd)?;
        self.asked += 1;
        loop {
            let (Numbered { request, answer }, fd) = receive(&self.line)?;
            // Who has asked for one of those before was told that there is no answer.
            if request >= self.asked {
                return Ok((answer, fd));
            }
        }
    }
}

/// Sends one message.
///
/// # Errors
/// [`SendError`]; nothing was sent then.
pub(crate) fn send(
    line: impl AsFd,
    message: &impl Serialize,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), SendError> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > LONGEST {
        return Err(SendError::TooLong(bytes.len()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    loop {
        let sent = sendmsg(&line, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop).map_err(io::Error::from)?),
        }
    }
}

/// Waits for one message. Its descriptor is lost if this process has no more of them: what was done for that is known
/// by the words, so that it can be undone.
///
/// # Errors
/// [`ReceiveError`].
pub(crate) fn receive<T: DeserializeOwned>(
    line: impl AsFd,
) -> Result<(T, Option<OwnedFd>), ReceiveError> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&line, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Err(ReceiveError::Ended),
            got => break got.map_err(io::Error::from)?,
        }
    };
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            fd = fds.next();
        }
    }
    if got.bytes == 0 {
        return Err(ReceiveError::Ended);
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(ReceiveError::Message(format!("it has more than {LONGEST} bytes")));
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // Not one of several that were not expected.
        fd = None;
    }
    match serde_json::from_slice(&bytes[..got.bytes]) {
        Ok(message) => Ok((message, fd)),
        Err(error) => Err(ReceiveError::Message(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::forked::line;
    use super::*;
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use std::time::Duration;

    /// The host has no memory for a moment, say; here it has no patience.
    #[test]
    fn e32_an_answer_that_could_not_be_received_is_not_taken_for_the_next_one() {
        let (ours, its) = line().unwrap();
        set_socket_timeout(&ours, Timeout::Recv, Some(Duration::from_millis(1))).unwrap();
        let patient = ours.try_clone().unwrap();
        let mut asker = Asker::new(ours);
        let error = asker.ask::<String>(&"first", None).unwrap_err();
        assert!(matches!(error, AskError::Receive(ReceiveError::Host(_))), "{error}");
        set_socket_timeout(&patient, Timeout::Recv, None).unwrap();
        for (request, answer) in [(1, "to the first"), (2, "to the second")] {
            let answer = answer.to_owned();
            send(&its, &Numbered { request, answer }, None).unwrap();
        }
        assert_eq!(asker.ask::<String>(&"second", None).unwrap().0, "to the second");
    }
}
