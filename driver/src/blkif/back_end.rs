//! The other end of a ring in one process: all that a server needs, and a null device.

use super::LocalGrants;
use crate::Error;
use crate::link::Link;
use ringway_core::Status;
use ringway_ring::blkif::{Armed, Back};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// The back end of a ring. A server takes requests off its ring, reaches their memory through
/// [`BackEnd::grants`], and is told of new ones by [`BackEnd::doorbell`].
#[derive(Debug)]
pub struct BackEnd {
    // Before the memory it lies in, which `grants` keeps.
    ring: Back,
    grants: LocalGrants,
    link: Arc<Link>,
}

impl BackEnd {
    pub(super) fn new(ring: Back, grants: LocalGrants, link: Arc<Link>) -> Self {
        Self { ring, grants, link }
    }

    /// The ring and the pages, both to be used at once.
    pub fn parts(&mut self) -> (&mut Back, &mut LocalGrants) {
        (&mut self.ring, &mut self.grants)
    }

    /// The pages.
    #[must_use]
    pub fn grants(&self) -> &LocalGrants {
        &self.grants
    }

    /// The eventfd by which the front end tells of requests.
    #[must_use]
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open as long as the link, which this keeps.
        unsafe { BorrowedFd::borrow_raw(self.link.kick.as_raw_fd()) }
    }

    /// Makes answers visible, and tells the front end if it wants to know.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            // The counter can only be too full to write if it is readable already.
            let _ = self.link.call.write(1);
        }
    }

    /// A null device: takes all requests there are, moves no data, answers them, publishes once.
    /// Malformed ones are refused. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::BlkifFront`] if the front end broke the rules of the ring.
    #[inline]
    pub fn answer_all(&mut self) -> Result<u32, Error> {
        let mut count = 0;
        while let Some((token, asked)) = self.ring.pop(&mut self.grants)? {
            let status = asked.map_or_else(|refused| refused.status(), |_| Status::Ok);
            self.ring.push(token, status);
            count += 1;
        }
        self.publish();
        Ok(count)
    }

    /// Asks for a notification of the next request; false if there are requests already.
    ///
    /// # Errors
    /// As [`BackEnd::answer_all`].
    pub fn arm(&mut self) -> Result<bool, Error> {
        Ok(self.ring.arm()? == Armed::Quiet)
    }

    /// Sleeps until the doorbell rings, and quiets it.
    ///
    /// # Errors
    /// What the host says.
    pub fn wait(&self) -> Result<(), Error> {
        let fd = self.link.kick.as_raw_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one descriptor, and ours.
        while unsafe { libc::poll(&raw mut poll, 1, -1) } < 0 {
            if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return Err(Error::last_os("cannot wait for the front end"));
            }
        }
        // It is not blocking, so that nothing but a rare race is to be reported here.
        let _ = self.link.kick.read();
        Ok(())
    }

    /// True if there are requests.
    #[inline]
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.ring.has_work()
    }
}
