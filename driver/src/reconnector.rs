//! A thread that looks after a connection: when the server goes, it waits for another one and takes
//! the device up there.

use crate::Error;
use crate::backoff::retry_after;
use crate::connection::Connection;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The thread; dropping this ends it.
#[derive(Debug)]
pub(crate) struct Reconnector {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Reconnector {
    /// Looks after the connection that `connection` has, for `timeout` after each loss.
    pub(crate) fn start(
        connection: &Arc<Mutex<Connection>>,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let host = |what| move |source| Error::Host { what, source };
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(host("cannot create an eventfd"))?);
        let watch = Watch { connection: Arc::clone(connection), stop: Arc::clone(&stop), timeout };
        let thread = std::thread::Builder::new()
            .name("reconnect".into())
            .spawn(move || watch.run())
            .map_err(host("cannot start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Reconnector {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watch {
    connection: Arc<Mutex<Connection>>,
    stop: Arc<EventFd>,
    timeout: Duration,
}

impl Watch {
    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while self.is_lost() {
            self.connection().lost();
            if let Some(reason) = self.take_up() {
                // Whoever waits hears why; the requests in flight are not done.
                for queue in &self.connection().started {
                    queue.link.give_up(&reason);
                }
                return;
            }
        }
    }

    /// Waits until the server has gone; false if told to stop.
    fn is_lost(&self) -> bool {
        let Some(stream) =
            self.connection().client.as_ref().map(|client| client.stream().try_clone())
        else {
            return false;
        };
        // Without a descriptor to watch it is as good as lost.
        let Ok(stream) = stream else { return true };
        let poll = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds =
            [poll(self.stop.as_raw_fd(), libc::POLLIN), poll(stream.as_raw_fd(), libc::POLLRDHUP)];
        loop {
            // SAFETY: two pollfd of ours.
            let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
            if fds[0].revents != 0 {
                return false;
            }
            if ready > 0 && fds[1].revents != 0 {
                return true;
            }
        }
    }

    /// Waits for `pause`; true if told to stop meanwhile.
    fn rests(&self, pause: Duration) -> bool {
        let mut stop = libc::pollfd { fd: self.stop.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // Less than a second.
        #[allow(clippy::cast_possible_wrap)]
        let pause = libc::timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() };
        // SAFETY: one pollfd and a timespec of ours; the mask of signals stays as it is.
        unsafe { libc::ppoll(&raw mut stop, 1, &raw const pause, std::ptr::null()) };
        stop.revents != 0
    }

    /// Goes on at the next server; says why if there is none.
    fn take_up(&self) -> Option<String> {
        let begun = Instant::now();
        let Some(path) = self.connection().path.clone() else {
            return Some(Error::NoPath.to_string());
        };
        loop {
            let connected = crate::vhost_user::connect(&path, Duration::ZERO);
            let taken_up = connected.and_then(|stream: UnixStream| {
                let mut connection = self.connection();
                connection.take_up(stream)?;
                connection.is_another = true;
                Ok(())
            });
            let Err(error) = taken_up else { return None };
            let passes = matches!(
                error,
                Error::NoSocket { .. }
                    | Error::NoListener { .. }
                    | Error::Disconnected { .. }
                    | Error::Silent { .. }
            );
            // A server that is about to be killed may refuse things in its last moment.
            let passes = passes || matches!(error, Error::Refused { .. });
            let waited = begun.elapsed();
            if !passes || waited >= self.timeout || self.rests(retry_after(waited)) {
                return Some(error.to_string());
            }
        }
    }
}
