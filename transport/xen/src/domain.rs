//! A front-end's domain: the real grants and event channel of one queue.

use super::access::Access;
use super::evtchn::EventChannel;
use super::gntdev::{GrantDevice, Mapped};
use super::host::{GrantCopy, Host};
use std::io;
use std::os::fd::RawFd;

/// One queue's grant device and event channel of a front-end's domain.
#[derive(Debug)]
pub struct Domain {
    grants: GrantDevice,
    channel: EventChannel,
}

impl Domain {
    /// Maps the ring that the front-end in domain `id` has granted as `pages`, and binds the event
    /// channel that it offers as `port`. Should this process be killed, the front-end's bell rings.
    ///
    /// # Errors
    /// What the host says to its devices, to the pages or to the port.
    pub fn connect(
        access: &dyn Access,
        id: u16,
        pages: &[u32],
        port: u32,
    ) -> io::Result<(Self, Mapped)> {
        let mut grants = GrantDevice::open(access, id)?;
        let ring = grants.map(pages, true)?;
        let channel = EventChannel::bind(access, id, port)?;
        // Only for who waits for it: a host that cannot do it does without.
        let _ = ring.notify_when_gone(channel.port());
        Ok((Self { grants, channel }, ring))
    }
}

impl Host for Domain {
    type Mapped = Mapped;

    unsafe fn copy(&mut self, copies: &mut [GrantCopy]) -> io::Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.grants.copy(copies) }
    }

    fn map(&mut self, grants: &[u32], writable: bool) -> io::Result<Mapped> {
        self.grants.map(grants, writable)
    }

    fn notify(&mut self) -> io::Result<()> {
        self.channel.notify()
    }

    fn doorbell(&self) -> RawFd {
        self.channel.fd()
    }

    fn hush(&mut self) {
        self.channel.hush();
    }
}
