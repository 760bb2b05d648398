//! Connections of a disk whose queues run, as its clients see them: open, or closed by their client.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long sessions may take to notice that their clients have closed their connections.
const NOTICE_MAX: Duration = Duration::from_secs(30);

/// The connections whose queues run.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<Vec<Arc<OwnedFd>>>);

impl Lines {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue of this one is about to run.
    pub(crate) fn enter(&self, stream: &Arc<OwnedFd>) {
        self.lock().push(Arc::clone(stream));
    }

    /// It runs no more, and what it has left in flight is known; or it is to be served to its end.
    pub(crate) fn leave(&self, stream: &Arc<OwnedFd>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, stream));
    }

    /// Waits until each connection that its client has closed by now has left: that client may be the one that
    /// begins here. False if that takes too long.
    pub(crate) fn await_closed(&self) -> bool {
        let begun = Instant::now();
        while self.has_closed() {
            if begun.elapsed() > NOTICE_MAX {
                return false;
            }
            // Nobody unparks this thread.
            std::thread::park_timeout(Duration::from_millis(1));
        }
        true
    }

    fn has_closed(&self) -> bool {
        has_closed(&self.lock())
    }
}

/// True if one of these was closed by its client.
pub(crate) fn has_closed(streams: &[Arc<OwnedFd>]) -> bool {
    let mut polled: Vec<_> =
        streams.iter().map(|stream| PollFd::new(stream, PollFlags::RDHUP)).collect();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok_and(|closed| closed > 0)
}
