//! A thread that serves clients until it is dropped.

use super::bell::event;
use super::survive::survive;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

/// How long one that panicked rests: not too fast, if it does over all it hears.
const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The thread. Dropping it ends it, and waits for that.
pub(crate) struct Service {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Calls `serve` on a thread called `name`, and again if it panics, which is logged with `who`. It
    /// returns once the descriptor that it is given becomes readable.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn start(
        name: &str,
        who: &'static str,
        mut serve: impl FnMut(&OwnedFd) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(event()?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            while survive(who, || serve(&stopped)).is_none() {
                let _ = poll(&mut [PollFd::new(&*stopped, PollFlags::IN)], Some(&REST));
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // One write can not fill the counter.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn one_that_panics_serves_on_and_ends_when_it_is_dropped() {
        let (calls, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counted, at_end) = (Arc::clone(&calls), Arc::clone(&ended));
        let service = Service::start("test", "this test", move |stop| {
            assert!(counted.fetch_add(1, SeqCst) > 0, "as wanted");
            let _ = poll(&mut [PollFd::new(stop, PollFlags::IN)], None);
            at_end.fetch_add(1, SeqCst);
        })
        .unwrap();
        while calls.load(SeqCst) < 2 {
            std::thread::yield_now();
        }
        assert_eq!(ended.load(SeqCst), 0);
        drop(service);
        assert_eq!((calls.load(SeqCst), ended.load(SeqCst)), (2, 1));
    }
}
