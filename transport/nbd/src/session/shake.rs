//! The handshake over a socket, within a time limit, and within TLS where that is agreed upon.

use crate::handshake::{Handshake, HandshakeError, Negotiated, Next, TlsRule};
use crate::offer::Offer;
use crate::tls::Tls;
use ringway_nbd_tls::Wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustls::ServerConnection;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Why there are no requests.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShakeError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("it did not finish its handshake within {} s", .0.as_secs())]
    TimedOut(Duration),
    #[error("it closed the connection in its handshake")]
    Closed,
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("told to stop")]
    Stopped,
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// What was agreed upon, and the encryption, if there is one.
pub(crate) type Shaken = (Negotiated, Option<Box<ServerConnection>>);

/// Agrees with a client, which has `limit` for all of it; nothing if it has said that it goes. `admit` says whether
/// there is a place for it at the export that it chooses.
///
/// # Errors
/// [`ShakeError`].
pub(crate) fn shake_hands(
    stream: BorrowedFd<'_>,
    (offers, tls): (&[Offer], Option<&(Tls, bool)>),
    (limit, stop): (Duration, BorrowedFd<'_>),
    admit: &mut dyn FnMut(usize) -> bool,
) -> Result<Option<Shaken>, ShakeError> {
    rustix::io::ioctl_fionbio(stream, true).map_err(io::Error::from)?;
    let mut peer = HandshakeStream { stream, stop, begun: Instant::now(), limit, tls: None };
    peer.send(&Handshake::greeting())?;
    let rule = match tls {
        None => TlsRule::None,
        Some((_, true)) => TlsRule::Required,
        Some((_, false)) => TlsRule::Possible,
    };
    let mut handshake = Handshake::new(offers).with_tls(rule);
    let (mut bytes, mut answer) = (Vec::new(), Vec::new());
    loop {
        bytes.resize(handshake.needs(), 0);
        peer.receive(&mut bytes)?;
        answer.clear();
        let mut next = handshake.take(&bytes, &mut answer);
        // Said before the client believes that it is connected.
        if let Ok(Next::Begin(negotiated)) = next {
            if !admit(negotiated.export) {
                answer.clear();
                next = handshake.has_no_place(&mut answer);
            }
        }
        peer.send(&answer)?;
        match next? {
            Next::More => {}
            Next::StartTls => {
                if let Some((tls, _)) = tls {
                    peer.encrypt(tls)?;
                    handshake.is_encrypted();
                }
            }
            Next::Begin(negotiated) => return Ok(Some((negotiated, peer.tls))),
            Next::Abort => return Ok(None),
        }
    }
}

/// The connection of a client that shakes hands, within its time.
struct HandshakeStream<'a> {
    stream: BorrowedFd<'a>,
    stop: BorrowedFd<'a>,
    begun: Instant,
    limit: Duration,
    tls: Option<Box<ServerConnection>>,
}

impl HandshakeStream<'_> {
    /// Has the client shake hands by TLS. What it has sent in plain before cannot be taken for what it
    /// sends within: not a byte more was read than its options had.
    fn encrypt(&mut self, tls: &Tls) -> Result<(), ShakeError> {
        let mut tls = tls.begin()?;
        while tls.is_handshaking() {
            if tls.wants_write() {
                self.write_tls(&mut tls)?;
            } else if let Err(error) = self.read_tls(&mut tls) {
                // It is told why, if it still listens.
                let _ = tls.write_tls(&mut Wire(self.stream));
                return Err(error);
            }
        }
        self.write_tls(&mut tls)?;
        self.tls = Some(tls);
        Ok(())
    }

    fn read_tls(&self, tls: &mut ServerConnection) -> Result<(), ShakeError> {
        match tls.read_tls(&mut Wire(self.stream)) {
            Ok(0) => Err(ShakeError::Closed),
            Ok(_) => Ok(tls.process_new_packets().map(drop)?),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(PollFlags::IN),
            Err(error) => Err(error.into()),
        }
    }

    fn write_tls(&self, tls: &mut ServerConnection) -> Result<(), ShakeError> {
        while tls.wants_write() {
            match tls.write_tls(&mut Wire(self.stream)) {
                Ok(_) => {}
                Err(error) => self.bear(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), ShakeError> {
        while !bytes.is_empty() {
            if let Some(mut tls) = self.tls.take() {
                let taken = tls.writer().write(bytes)?;
                bytes = &bytes[taken..];
                let written = self.write_tls(&mut tls);
                self.tls = Some(tls);
                written?;
                continue;
            }
            match Wire(self.stream).write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.bear(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, mut bytes: &mut [u8]) -> Result<(), ShakeError> {
        while !bytes.is_empty() {
            let got = match self.tls.take() {
                None => Wire(self.stream).read(bytes),
                Some(mut tls) => {
                    let got = tls.reader().read(bytes);
                    let waits = got.as_ref().is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
                    let read = if waits { self.read_tls(&mut tls) } else { Ok(()) };
                    self.tls = Some(tls);
                    read?;
                    if waits {
                        continue;
                    }
                    got
                }
            };
            match got {
                Ok(0) => return Err(ShakeError::Closed),
                Ok(got) => bytes = &mut bytes[got..],
                Err(error) => self.bear(error, PollFlags::IN)?,
            }
        }
        Ok(())
    }

    /// Waits, if that is what an error asks for.
    fn bear(&self, error: io::Error, ready: PollFlags) -> Result<(), ShakeError> {
        match error.kind() {
            ErrorKind::WouldBlock => self.wait(ready),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
                Err(ShakeError::Closed)
            }
            _ => Err(error.into()),
        }
    }

    fn wait(&self, ready: PollFlags) -> Result<(), ShakeError> {
        let left = self.limit.saturating_sub(self.begun.elapsed());
        if left.is_zero() {
            return Err(ShakeError::TimedOut(self.limit));
        }
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let stream = self.stream.as_fd();
        let mut polled = [PollFd::new(&self.stop, PollFlags::IN), PollFd::new(&stream, ready)];
        match poll(&mut polled, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if polled[0].revents().is_empty() { Ok(()) } else { Err(ShakeError::Stopped) }
    }
}
