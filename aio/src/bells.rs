//! Doorbells through epoll, for engines that have no better way.
//!
//! ```text
//! bells.watch(7, eventfd)?    // bell 7 rings whenever the eventfd is written
//! bells.wait(timeout)?        // sleeps until a bell rings or a Waker wakes
//! bells.take(&mut rung)       // which ones
//! ```
//!
//! Watching is edge-triggered: each write of an eventfd reports once, so its counter need not be
//! read, which saves a system call per kick.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{BellId, Counters};
use crate::sys;

/// How many events one look takes; those beyond are found by the next look.
const EVENTS: usize = 64;
/// What the epoll set calls the wake-up; bells are 32 bits.
const WAKE: u64 = u64::MAX;

/// That there is nothing more to come.
const CLOSED: u32 = (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;

/// What is told of every descriptor: also that its peer has closed it.
const ALWAYS: c_int = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET;

/// A set of doorbells and one way for other threads to wake the sleeper.
///
/// # Invariants
/// 1. `rung` never holds more than `EVENTS` bells: a look with something untaken does nothing.
/// 2. `closed` has those of the last look.
#[derive(Debug)]
pub struct Bells {
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    events: Box<[libc::epoll_event]>,
    rung: Vec<BellId>,
    closed: Vec<BellId>,
}

/// Wakes the thread that sleeps in [`Bells::wait`], from any other.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Wakes the sleeper; if nobody sleeps, the next sleep ends at once.
    pub fn wake(&self) {
        sys::ring(self.0.as_raw_fd());
    }

    /// What it writes to, for whoever sleeps elsewhere.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Bells {
    /// An empty set.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is involved.
        let epoll = sys::check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and nobody else's.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        let wake = Arc::new(sys::eventfd()?);
        let events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS].into_boxed_slice();
        let [rung, closed] = [(); 2].map(|()| Vec::with_capacity(EVENTS));
        let bells = Self { epoll, wake, events, rung, closed };
        bells.control(libc::EPOLL_CTL_ADD, bells.wake.as_raw_fd(), WAKE)?;
        Ok(bells)
    }

    /// For a thread that wants to end the sleep of this set's owner.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.wake))
    }

    /// Listens to `fd`. If it was written before, it rings at once.
    ///
    /// # Errors
    /// If `fd` cannot be polled or is watched already.
    pub fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, bell.into())
    }

    /// From now on `fd`, which is watched, also rings when there is room for bytes, or no more. It rings
    /// at once for what there is already.
    ///
    /// # Errors
    /// If `fd` is not watched.
    pub fn watch_room(&mut self, bell: BellId, fd: RawFd, wanted: bool) -> io::Result<()> {
        let room = if wanted { libc::EPOLLOUT } else { 0 };
        self.control_for(ALWAYS | room, libc::EPOLL_CTL_MOD, fd, bell.into())
    }

    /// Stops listening to `fd`, which must still be open.
    pub fn unwatch(&mut self, fd: RawFd) {
        // A descriptor that is not watched is as good as one that is watched no longer.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0);
    }

    /// True if a bell rang that was not taken.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.rung.is_empty()
    }

    /// Moves the bells that rang to `out`.
    #[inline]
    pub fn take(&mut self, out: &mut Vec<BellId>) {
        out.append(&mut self.rung);
    }

    /// Of the bells that rang last, those of connections whose peers have closed them. They ring once for that and
    /// for all that came before: whoever reads such a connection has to go on to its end.
    #[must_use]
    pub fn closed(&self) -> &[BellId] {
        &self.closed
    }

    /// Looks at the bells without sleeping.
    ///
    /// # Errors
    /// Only if the set is beyond use.
    pub fn poll(&mut self, counters: &mut Counters) -> io::Result<()> {
        self.collect(Some(Duration::ZERO), counters)
    }

    /// Sleeps until a bell rings, a waker wakes or the time is over; may end early.
    ///
    /// # Errors
    /// Only if the set is beyond use.
    pub fn wait(&mut self, timeout: Option<Duration>, counters: &mut Counters) -> io::Result<()> {
        counters.sleeps += u64::from(!self.any());
        self.collect(timeout, counters)
    }

    fn collect(&mut self, timeout: Option<Duration>, counters: &mut Counters) -> io::Result<()> {
        if self.any() {
            return Ok(());
        }
        counters.syscalls += 1;
        let found = match epoll_wait(self.epoll.as_raw_fd(), &mut self.events, timeout) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            found => found?,
        };
        self.closed.clear();
        for event in self.events[..found].iter().filter(|event| event.u64 != WAKE) {
            // All but WAKE were given as 32 bits.
            #[allow(clippy::cast_possible_truncation)]
            let bell = event.u64 as BellId;
            self.rung.push(bell);
            if event.events & CLOSED != 0 {
                self.closed.push(bell);
            }
        }
        Ok(())
    }

    fn control(&self, action: c_int, fd: RawFd, name: u64) -> io::Result<()> {
        self.control_for(ALWAYS, action, fd, name)
    }

    fn control_for(&self, events: c_int, action: c_int, fd: RawFd, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: name };
        // SAFETY: the kernel reads `event` during the call.
        sys::check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), action, fd, &raw mut event) })?;
        Ok(())
    }
}

impl AsRawFd for Bells {
    /// Readable while an event waits to be collected.
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

fn epoll_wait(
    epoll: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    let room = c_int::try_from(events.len()).expect("EVENTS is small");
    let until = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let until = until.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let events = events.as_mut_ptr();
    // SAFETY: the kernel writes at most `room` events and reads one timespec, if any.
    let found = unsafe { libc::epoll_pwait2(epoll, events, room, until, std::ptr::null()) };
    match sys::check(found) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
            // Before Linux 5.11: whole milliseconds, rounded up lest the caller spins.
            let ms = timeout.map_or(-1, |t| t.as_micros().div_ceil(1000).try_into().unwrap_or(-1));
            // SAFETY: as above.
            sys::check(unsafe { libc::epoll_wait(epoll, events, room, ms) })
        }
        found => found,
    }
    .map(|found| found.unsigned_abs() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn each_write_rings_once_without_a_read() {
        let (mut bells, mut counters) = (Bells::new().unwrap(), Counters::default());
        let fd = sys::eventfd().unwrap();
        sys::ring(fd.as_raw_fd());
        bells.watch(3, fd.as_raw_fd()).unwrap();
        let mut rung = Vec::new();
        for _ in 0..3 {
            bells.wait(None, &mut counters).unwrap();
            bells.take(&mut rung);
            bells.poll(&mut counters).unwrap();
            assert!(!bells.any(), "an edge shows once");
            sys::ring(fd.as_raw_fd());
        }
        assert_eq!(rung, [3, 3, 3]);
        bells.unwatch(fd.as_raw_fd());
        let start = Instant::now();
        bells.wait(Some(Duration::from_micros(300)), &mut counters).unwrap();
        assert!(start.elapsed() >= Duration::from_micros(300));
    }

    #[test]
    fn a_waker_ends_the_sleep_and_is_no_bell() {
        let (mut bells, mut counters) = (Bells::new().unwrap(), Counters::default());
        let waker = bells.waker();
        let other = std::thread::spawn(move || waker.wake());
        bells.wait(None, &mut counters).unwrap();
        other.join().unwrap();
        assert!(!bells.any());
    }
}
