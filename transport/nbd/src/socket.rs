//! The socket of a connection as its worker uses it: nothing here waits (hot).

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A connected socket, and one descriptor that rings for all that a worker waits for: bytes of the
/// client, room for bytes to it if asked for, and answers of the session.
///
/// ```text
/// client ─▶ socket ──┐
///                    ├─▶ bell (epoll) ─▶ the worker's engine
/// session ─▶ wake ───┘
/// ```
#[derive(Debug)]
pub(crate) struct Socket {
    stream: Arc<OwnedFd>,
    bell: OwnedFd,
    wake: Arc<OwnedFd>,
    /// Room is waited for.
    wants_room: bool,
}

const FROM_CLIENT: u64 = 0;
const FROM_SESSION: u64 = 1;

/// Copies what has come and is not received, and leaves it where it is; `None` if that is `most` bytes or more. Allocates
/// as much.
#[cold]
pub(crate) fn peek(stream: &OwnedFd, most: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; most];
    let place = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most };
    let mut places = [place];
    let mut message = message(&mut places);
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the place is `bytes`, which nobody else uses.
    let got = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) };
    let got = outcome(got).ok().flatten().unwrap_or(0);
    bytes.truncate(got);
    (got < most).then_some(bytes)
}

impl Socket {
    /// Of a connected stream socket.
    ///
    /// # Errors
    /// What the host says to descriptors.
    pub(crate) fn new(stream: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&stream, true)?;
        let bell = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (client, session) =
            (epoll::EventData::new_u64(FROM_CLIENT), epoll::EventData::new_u64(FROM_SESSION));
        epoll::add(&bell, &stream, client, epoll::EventFlags::IN)?;
        epoll::add(&bell, &wake, session, epoll::EventFlags::IN)?;
        Ok(Self { stream: stream.into(), bell, wake: wake.into(), wants_room: false })
    }

    /// Rings for the worker.
    pub(crate) fn bell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// How the session rings it.
    pub(crate) fn wake(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// The connection itself, for whoever has to notice that its client closes it.
    pub(crate) fn stream(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.stream)
    }

    /// The session's ringing was heard.
    #[cold]
    pub(crate) fn heard(&self) {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.wake, &mut counter);
    }

    /// Has the bell ring when there is room again, or no more.
    #[cold]
    pub(crate) fn want_room(&mut self, wanted: bool) -> io::Result<()> {
        if self.wants_room == wanted {
            return Ok(());
        }
        let room = if wanted { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        let client = epoll::EventData::new_u64(FROM_CLIENT);
        epoll::modify(&self.bell, &self.stream, client, epoll::EventFlags::IN | room)?;
        self.wants_room = wanted;
        Ok(())
    }

    /// True while room is waited for.
    pub(crate) fn wants_room(&self) -> bool {
        self.wants_room
    }

    /// Takes what has come, into these places in order; `None` if there is nothing.
    ///
    /// # Safety
    /// The places are writable memory that nobody else uses.
    #[inline]
    pub(crate) unsafe fn receive(&self, places: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        let mut message = message(places);
        // SAFETY: the caller vouches for the places; the message lives as long as the call.
        let got =
            unsafe { libc::recvmsg(self.stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        outcome(got)
    }

    /// Sends from these places in order; `None` if there is no room.
    ///
    /// # Safety
    /// The places are readable memory.
    #[inline]
    pub(crate) unsafe fn send(&self, places: &mut [libc::iovec]) -> io::Result<Option<usize>> {
        let message = message(places);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as above.
        let sent = unsafe { libc::sendmsg(self.stream.as_raw_fd(), &raw const message, flags) };
        outcome(sent)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[inline]
fn message(places: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a message of zeroes names nobody and carries nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = places.as_mut_ptr();
    // The C libraries do not agree on its type.
    #[allow(clippy::useless_conversion)]
    {
        message.msg_iovlen = places.len().try_into().unwrap_or(0);
    }
    message
}

#[inline]
fn outcome(result: isize) -> io::Result<Option<usize>> {
    if let Ok(bytes) = usize::try_from(result) {
        return Ok(Some(bytes));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN | Errno::INTR) => Ok(None),
        _ => Err(error),
    }
}
