//! How threads of the daemon wake the first one.

use ringway_export::Rouse;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// What rings when a disk is served no more, or a worker has ended.
pub(super) struct Bell {
    pub(super) event: OwnedFd,
    pub(super) worker_failed: AtomicBool,
    /// Whoever served a disk has panicked.
    pub(super) disk_panicked: AtomicBool,
    /// Called when there are new disks, and perhaps new workers.
    pub(super) on_change: OnceLock<Rouse>,
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        let (worker_failed, disk_panicked, on_change) = Default::default();
        Ok(Self { event: event()?, worker_failed, disk_panicked, on_change })
    }

    pub(super) fn changed(&self) {
        if let Some(changed) = self.on_change.get() {
            changed();
        }
    }

    /// A disk is served no more.
    pub(super) fn ended(&self, panicked: bool) {
        self.disk_panicked.fetch_or(panicked, SeqCst);
        self.ring();
    }

    pub(super) fn silence(&self) {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.event, &mut counter);
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
