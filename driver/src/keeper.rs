//! A thread that looks after a connection: when the server goes, it waits for another one and takes
//! the device up there.

use crate::Error;
use crate::line::Line;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How long one attempt waits for a server, so that an order to stop is heard.
const ATTEMPT: Duration = Duration::from_millis(50);
/// How long to wait after a server that hung up in the middle.
const BREATH: Duration = Duration::from_millis(20);

/// The thread; dropping this ends it.
#[derive(Debug)]
pub(crate) struct Keeper {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Looks after the connection that `line` has, for `patience` after each loss.
    pub(crate) fn start(line: &Arc<Mutex<Line>>, patience: Duration) -> Result<Self, Error> {
        let host = |what| move |source| Error::Host { what, source };
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(host("cannot create an eventfd"))?);
        let watch = Watch { line: Arc::clone(line), stop: Arc::clone(&stop), patience };
        let thread = std::thread::Builder::new()
            .name("reconnect".into())
            .spawn(move || watch.run())
            .map_err(host("cannot start a thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watch {
    line: Arc<Mutex<Line>>,
    stop: Arc<EventFd>,
    patience: Duration,
}

impl Watch {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while self.is_lost() {
            self.line().lost();
            if let Some(reason) = self.take_up() {
                // Whoever waits hears why; the requests in flight are not done.
                for queue in &self.line().started {
                    queue.link.give_up(&reason);
                }
                return;
            }
        }
    }

    /// Waits until the server has gone; false if told to stop.
    fn is_lost(&self) -> bool {
        let Some(stream) = self.line().client.as_ref().map(|client| client.stream().try_clone())
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

    fn is_stopped(&self) -> bool {
        self.stop.read().is_ok_and(|count| self.stop.write(count).is_ok())
    }

    /// Goes on at the next server; says why if there is none.
    fn take_up(&self) -> Option<String> {
        let deadline = Instant::now() + self.patience;
        let Some(path) = self.line().path.clone() else { return Some(Error::NoPath.to_string()) };
        loop {
            let connected = crate::vhost_user::connect(&path, ATTEMPT);
            let error = match connected.and_then(|stream: UnixStream| self.line().take_up(stream)) {
                Ok(_) => return None,
                Err(error) => error,
            };
            let passes = matches!(
                error,
                Error::NoSocket { .. }
                    | Error::NoListener { .. }
                    | Error::Disconnected { .. }
                    | Error::Silent { .. }
            );
            // A server that is about to be killed may refuse things in its last moment.
            let passes = passes || matches!(error, Error::Refused { .. });
            if !passes || Instant::now() >= deadline || self.is_stopped() {
                return Some(error.to_string());
            }
            std::thread::sleep(BREATH);
        }
    }
}
