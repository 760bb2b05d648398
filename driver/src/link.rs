//! How a queue and its server wake each other, and how a queue learns that the server is gone.

use crate::Error;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const CALL: u64 = 0;
const SOCKET: u64 = 1;

/// Why a sleeper woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The server called, or someone else did.
    Called,
    /// The time is up.
    TimedOut,
    /// The server is gone.
    Lost,
}

/// The eventfds of one queue, shared by the queue and its device.
///
/// The call eventfd is watched edge-triggered, so a sleep costs one system call: the counter is never
/// read.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    epoll: OwnedFd,
    connected: AtomicBool,
    given_up: OnceLock<String>,
}

impl Link {
    pub(crate) fn new() -> Result<Self, Error> {
        let event = || {
            EventFd::new(EFD_NONBLOCK)
                .map_err(|source| Error::Host { what: "cannot create an eventfd", source })
        };
        let (kick, call) = (event()?, event()?);
        // SAFETY: epoll_create1 has no preconditions.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(Error::last_os("cannot create an epoll descriptor"));
        }
        // SAFETY: the descriptor is new and nobody else owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        let link = Self {
            kick,
            call,
            epoll,
            connected: AtomicBool::new(false),
            given_up: OnceLock::new(),
        };
        link.watch(link.call.as_raw_fd(), libc::EPOLLIN | libc::EPOLLET, CALL)?;
        Ok(link)
    }

    fn watch(&self, fd: RawFd, events: i32, token: u64) -> Result<(), Error> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: both descriptors are open and `event` is ours.
        let rc = unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
        if rc < 0 { Err(Error::last_os("cannot watch a descriptor")) } else { Ok(()) }
    }

    /// The queue was started over the connection `socket`; without one, somebody else looks after
    /// the connection.
    pub(crate) fn connect(&self, socket: Option<&impl AsRawFd>) -> Result<(), Error> {
        if let Some(socket) = socket {
            self.watch(socket.as_raw_fd(), libc::EPOLLRDHUP, SOCKET)?;
        }
        self.connected.store(true, Release);
        // The last server may have completed requests and died before it called.
        let _ = self.call.write(1);
        // What was queued meanwhile is seen at once.
        self.kick();
        Ok(())
    }

    /// The queue was stopped, or the connection is given up; wakes whoever sleeps.
    pub(crate) fn disconnect(&self, socket: &impl AsRawFd) {
        self.connected.store(false, Release);
        let (epoll, fd) = (self.epoll.as_raw_fd(), socket.as_raw_fd());
        // SAFETY: both descriptors are open; deleting needs no event.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        let _ = self.call.write(1);
    }

    /// The connection is lost for good; wakes whoever sleeps.
    pub(crate) fn give_up(&self, reason: &str) {
        let _ = self.given_up.set(reason.to_owned());
        self.connected.store(false, Release);
        let _ = self.call.write(1);
    }

    /// Why there is no server.
    pub(crate) fn disconnected(&self) -> Error {
        self.given_up.get().map_or(Error::NotConnected, |why| Error::GivenUp(why.clone()))
    }

    /// Tells the server that there are new requests.
    pub(crate) fn kick(&self) {
        // The counter can only be too full to write if it is readable already.
        let _ = self.kick.write(1);
    }

    /// True unless the device was stopped or the server has closed the connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Acquire) && self.poll(0) != Ok(Wake::Lost)
    }

    /// Sleeps until the server calls, in whole milliseconds.
    pub(crate) fn sleep(&self, timeout: Option<Duration>) -> Result<Wake, Error> {
        if !self.connected.load(Acquire) {
            return Ok(Wake::Lost);
        }
        let ms =
            timeout.map_or(-1, |t| i32::try_from(t.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
        let woken = self.poll(ms).map_err(|()| Error::last_os("cannot wait for the server"))?;
        Ok(if self.connected.load(Acquire) { woken } else { Wake::Lost })
    }

    fn poll(&self, ms: i32) -> Result<Wake, ()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 2];
        // SAFETY: `events` has room for two events.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 2, ms) };
        let Ok(count) = usize::try_from(count) else {
            let interrupted =
                std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
            return if interrupted { Ok(Wake::Called) } else { Err(()) };
        };
        let gone = events[..count].iter().any(|event| event.u64 == SOCKET);
        Ok(match count {
            _ if gone => Wake::Lost,
            0 => Wake::TimedOut,
            _ => Wake::Called,
        })
    }
}
