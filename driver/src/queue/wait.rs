//! Waiting for completions, asleep or polling, and giving up.

use super::BlkQueue;
use crate::Error;
use crate::link::Wake;
use ringway_ring::virtqueue::Armed;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

impl<C> BlkQueue<C> {
    /// Submits, then sleeps until there is a completion to pop. False if the time is up or nothing
    /// is in flight. The time is rounded up to milliseconds.
    ///
    /// # Errors
    /// [`Error::NotConnected`] if the server is gone and all its completions are popped,
    /// [`Error::Device`] if it broke the rules of the queue.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        self.wait_for(1, timeout)
    }

    /// As [`BlkQueue::wait`], until `count` completions are there (or all that are in flight, if
    /// these are fewer). Needs EVENT_IDX to sleep through the first ones.
    ///
    /// # Errors
    /// As [`BlkQueue::wait`].
    pub fn wait_for(&mut self, count: u16, timeout: Option<Duration>) -> Result<bool, Error> {
        self.submit()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let count = count.clamp(1, self.ring.in_flight().max(1));
        while self.ring.in_flight() > 0 {
            let wake = match self.ring.arm(count).map_err(|fault| self.broken(fault))? {
                Armed::WorkArrived => Wake::Called,
                Armed::Quiet => {
                    self.stats.sleeps += 1;
                    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                    self.link.sleep(left)?
                }
            };
            if wake == Wake::Called && !self.has_used(count)? {
                continue;
            }
            self.ring.disarm();
            let ready = self.has_used(1)?;
            return if wake == Wake::Gone && !ready { Err(Error::NotConnected) } else { Ok(ready) };
        }
        Ok(false)
    }

    /// Submits, then polls until there is a completion to pop: no sleep, so the thread keeps its CPU
    /// busy. False if the time is up or nothing is in flight.
    ///
    /// # Errors
    /// As [`BlkQueue::wait`].
    #[inline]
    pub fn wait_polling(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        /// Turns between two looks at the clock; a turn takes some 20 to 100 ns.
        const TURNS: u32 = 10_000;
        self.submit()?;
        let mut deadline = None;
        while self.ring.in_flight() > 0 {
            for _ in 0..TURNS {
                if self.has_used(1)? {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let until = *deadline.get_or_insert_with(|| timeout.and_then(|t| now.checked_add(t)));
            if until.is_some_and(|until| now >= until) {
                break;
            }
            if !self.link.is_connected() && !self.has_used(1)? {
                return Err(Error::NotConnected);
            }
        }
        Ok(false)
    }

    /// For loops that also wait for other things: submits, and asks the server to call when the next
    /// request completes. True if there is a completion to pop at once; false if
    /// [`BlkQueue::call_fd`] will become readable. Look at [`BlkQueue::is_connected`] now and then:
    /// a server that has gone does not call.
    ///
    /// # Errors
    /// [`Error::Device`] if the server has broken the rules of the queue.
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.submit()?;
        let armed = self.ring.arm(1).map_err(|fault| self.broken(fault))?;
        Ok(armed == Armed::WorkArrived)
    }

    /// The eventfd by which the server calls. Watch it edge-triggered, or read its counter before
    /// waiting again; the other ways of waiting do not need that.
    #[must_use]
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open as long as the link, which the queue keeps.
        unsafe { BorrowedFd::borrow_raw(self.link.call.as_raw_fd()) }
    }

    #[inline]
    fn has_used(&mut self, count: u16) -> Result<bool, Error> {
        self.ring.has_used(count).map_err(|fault| self.broken(fault))
    }

    /// Ends a queue whose server is gone: the contexts of the requests in flight come back, their
    /// buffers are given up for good.
    pub fn abandon(mut self) -> Vec<C> {
        let flights = self.flights.iter_mut().filter_map(Option::take);
        flights.map(|flight| (flight.data.abandon(), flight.ctx).1).collect()
    }
}
