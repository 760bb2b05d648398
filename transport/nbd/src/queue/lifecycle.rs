//! How the queue of a connection comes to a worker, and what is done when it has left.

use super::Queue;
use ringway_export::QueueLifecycle;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

impl QueueLifecycle for Queue {
    fn doorbell(&self) -> RawFd {
        self.socket.bell()
    }

    fn depth(&self) -> u16 {
        // It was a u16.
        #[allow(clippy::cast_possible_truncation)]
        let depth = self.flights.len() as u16;
        depth
    }

    fn backlog(&self) -> usize {
        self.flush_due.len()
    }

    fn wind_down(&mut self) {
        self.winding_down = true;
    }

    fn peer_is_gone(&self) -> bool {
        self.hung_up || (self.gone.is_some() && !self.said_goodbye)
    }

    fn peer_may_vanish(&self) -> bool {
        true
    }

    fn calls(&self) -> u64 {
        self.output.calls()
    }
}

impl Queue {
    /// Serves again after it was stopped.
    pub(crate) fn resume(&mut self) {
        self.winding_down = false;
    }

    /// Takes what the session has found out since. The queue has stopped.
    pub(crate) fn take_answers(&mut self) {
        self.take_extents();
    }

    /// Sends what is left to be sent to a client that is about to be left; `false` if it did not take
    /// it in time. The queue has stopped.
    pub(crate) fn finish(&mut self, timeout: Duration) -> bool {
        let begun = Instant::now();
        while self.gone.is_none() && !self.output.is_empty() {
            match self.output.send(&self.socket, &mut self.pool, &mut self.spare) {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) => return false,
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() || self.wait_for_room(left).is_err() {
                return false;
            }
        }
        self.gone.is_none()
    }

    fn wait_for_room(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut polled = [PollFd::new(&self.socket, PollFlags::OUT)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
