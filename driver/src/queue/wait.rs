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
    /// [`Error::GivenUp`] if that is so after a vain attempt to reconnect,
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
        if self.counts_runs() {
            return self.wait_for_runs(count, deadline);
        }
        let count = count.clamp(1, self.ring.in_flight().max(1));
        while self.ring.in_flight() > 0 {
            let wake = match self.ring.arm(count).map_err(|fault| self.broken(fault))? {
                Armed::WorkArrived => Wake::Called,
                Armed::Quiet => self.sleep(deadline, None)?,
            };
            if wake == Wake::Called && !self.has_used(count)? {
                continue;
            }
            self.ring.disarm();
            let ready = self.has_used(1)?;
            return if wake == Wake::Lost && !ready {
                Err(self.link.disconnected())
            } else {
                Ok(ready)
            };
        }
        Ok(false)
    }

    /// As [`BlkQueue::wait_for`], where a chain may bring several completions, or none.
    #[cold]
    fn wait_for_runs(&mut self, count: u16, deadline: Option<Instant>) -> Result<bool, Error> {
        let count = usize::from(count.clamp(1, self.in_flight().max(1)));
        let ready = loop {
            self.collect()?;
            self.dispatch_waiting();
            if self.late() >= count || usize::from(self.in_flight()) == self.late() {
                break Ok(self.late() > 0);
            }
            let chains = self.merge.as_ref().map_or(1, |merge| merge.chains_for(count));
            let wake = match self.ring.arm(chains).map_err(|fault| self.broken(fault))? {
                Armed::WorkArrived => continue,
                Armed::Quiet => self.sleep(deadline, self.wake_in())?,
            };
            let over = wake == Wake::Lost || deadline.is_some_and(|at| Instant::now() >= at);
            if !over {
                continue;
            }
            self.collect()?;
            break match self.late() {
                0 if wake == Wake::Lost => Err(self.link.disconnected()),
                late => Ok(late > 0),
            };
        };
        self.ring.disarm();
        ready
    }

    /// Sleeps until the server calls, `deadline`, or for `most`.
    fn sleep(&mut self, deadline: Option<Instant>, most: Option<Duration>) -> Result<Wake, Error> {
        self.stats.sleeps += 1;
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let wake = self.link.sleep(left.into_iter().chain(most).min());
        self.follow_soon();
        wake
    }

    /// True if completions are not counted by chains.
    fn counts_runs(&self) -> bool {
        self.merge.as_ref().is_some_and(|merge| !merge.is_one_by_one())
    }

    /// True if there is a completion to pop; sends what waited for one.
    fn has_done(&mut self) -> Result<bool, Error> {
        if !self.counts_runs() {
            return self.has_used(1);
        }
        self.collect()?;
        self.dispatch_waiting();
        Ok(self.late() > 0)
    }

    /// Submits, then polls until there is a completion to pop: no sleep, so the thread keeps its CPU
    /// busy. False if the time is up or nothing is in flight.
    ///
    /// # Errors
    /// As [`BlkQueue::wait`].
    #[inline]
    pub fn wait_polling(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        /// Turns between two readings of the clock; a turn takes some 20 to 100 ns.
        const TURNS: u32 = 10_000;
        self.submit()?;
        let mut deadline = None;
        while self.in_flight() > 0 {
            for _ in 0..TURNS {
                if self.slow_pop {
                    if self.has_done()? {
                        return Ok(true);
                    }
                } else if self.has_used(1)? {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            self.follow_soon();
            let now = Instant::now();
            let until = *deadline.get_or_insert_with(|| timeout.and_then(|t| now.checked_add(t)));
            if until.is_some_and(|until| now >= until) {
                break;
            }
            if !self.link.is_connected() && !self.has_done()? {
                return Err(self.link.disconnected());
            }
        }
        Ok(false)
    }

    /// For loops that also wait for other things: submits, and asks the server to call when the next
    /// request completes. True if there is a completion to pop at once; false if
    /// [`BlkQueue::call_fd`] will become readable. Look at [`BlkQueue::is_connected`] now and then:
    /// a server that has gone does not call. With the policy request do not wait longer than
    /// [`BlkQueue::wake_in`] says.
    ///
    /// # Errors
    /// [`Error::Device`] if the server has broken the rules of the queue.
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.submit()?;
        loop {
            if self.slow_pop && self.has_done()? {
                return Ok(true);
            }
            let armed = self.ring.arm(1).map_err(|fault| self.broken(fault))?;
            match armed {
                Armed::Quiet => return Ok(false),
                // A chain that went with others may bring nothing.
                Armed::WorkArrived if self.slow_pop => {}
                Armed::WorkArrived => return Ok(true),
            }
        }
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

    /// Ends a queue whose server is gone: the contexts of the requests in flight come back, the
    /// buffers of those that were sent are given up for good.
    pub fn abandon(mut self) -> Vec<C> {
        let flights = self.flights.iter_mut().filter_map(Option::take);
        let fast = flights.map(|flight| (flight.data.abandon(), flight.ctx).1);
        fast.chain(self.merge.iter_mut().flat_map(|merge| merge.give_up())).collect()
    }
}
