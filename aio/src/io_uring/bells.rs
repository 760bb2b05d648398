//! Doorbells of a ring: polls that go on until they are taken back.

use super::IoUring;
use crate::engine::BellId;
use crate::sys;
use io_uring::squeue;
use std::io;
use std::os::fd::RawFd;

impl IoUring {
    /// As [`Engine::watch`](crate::Engine::watch).
    pub(super) fn watch_bell(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        sys::check_open(fd)?;
        let poll = self.doorbells.watch(bell, fd);
        self.push(&poll)?;
        if self.enabled { self.enter(0, None) } else { Ok(()) }
    }

    /// As [`Engine::unwatch`](crate::Engine::unwatch).
    pub(super) fn unwatch_bell(&mut self, bell: BellId, fd: RawFd) {
        let Some(remove) = self.doorbells.unwatch(bell, fd) else { return };
        // If the ring is beyond use, nothing rings any more.
        if self.push(&remove).is_ok() && self.enabled {
            let _ = self.enter(0, None);
        }
    }

    /// Queues an entry that is no operation, and makes room for it if it must.
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: polls and their removal name no memory.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.enter(0, None)?;
        }
    }

    /// Polls end when the completion queue overflows; the kernel says so and we begin anew. What
    /// arrived in between shows at once, as it is readable.
    #[cold]
    pub(super) fn rearm(&mut self) -> io::Result<()> {
        while let Some(poll) = self.doorbells.rearm() {
            self.push(&poll)?;
        }
        self.enter(0, None)
    }
}
