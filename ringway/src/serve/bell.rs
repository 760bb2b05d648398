//! How threads of the daemon wake the first one.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;

/// What rings when a disk's thread or a worker has ended.
pub(super) struct Bell {
    pub(super) event: OwnedFd,
    pub(super) worker_failed: AtomicBool,
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { event: event()?, worker_failed: AtomicBool::new(false) })
    }

    pub(super) fn ring(&self) {
        // A full counter rings too.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// A descriptor to ring.
pub(super) fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}
