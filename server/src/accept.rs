//! One disk's front-ends: they come and go, one at a time, on the [session
//! threads](super::session_threads).

use super::bell::Bell;
use super::endpoint::Endpoint;
use super::served::{Outcome, Served};
use super::session_threads::{Linger, Task, Turn};
use ringway_core::panic_point;
use ringway_vhost_user::{Ended, Export, Session, Wakes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// How long to leave the host alone when it has no descriptor for a new connection.
const BREATH: Duration = Duration::from_millis(100);

/// Serves the front-ends of a disk until it is told to stop, or until the only one there can be has gone.
pub(crate) struct Acceptor {
    served: Arc<Served>,
    export: Arc<Export>,
    endpoint: Endpoint,
    bell: Arc<Bell>,
    outcome: SyncSender<Outcome>,
    state: State,
}

enum State {
    /// Whoever connects is accepted.
    Free,
    /// Nobody is accepted before this.
    Resting(Instant),
    /// Nobody is accepted any more.
    Closed,
    /// A front-end is connected. True once the log was told of another one that waits.
    Attending(Box<Session>, bool),
}

impl Acceptor {
    /// For `served`, whose disk is offered as `export`. `outcome` is told how it ends, and `bell` rings.
    pub(crate) fn new(
        (served, export): (Arc<Served>, Arc<Export>),
        endpoint: Endpoint,
        bell: Arc<Bell>,
        outcome: SyncSender<Outcome>,
    ) -> Self {
        // Its first turn is due at once.
        let state = State::Resting(Instant::now());
        Self { served, export, endpoint, bell, outcome, state }
    }

    fn listener(&self) -> Option<&UnixListener> {
        match &self.endpoint {
            Endpoint::Listener(listener, _) => Some(listener),
            _ => None,
        }
    }

    /// What to do while nobody is connected; `None` if told to stop, or if nobody can come any more.
    fn next(&self) -> io::Result<Option<State>> {
        if is_readable(self.served.stop.as_fd())? {
            return Ok(None);
        }
        let disk = self.export.disk().name();
        if self.export.is_closed() {
            if !matches!(self.state, State::Closed) {
                tracing::error!(
                    disk,
                    "its front-ends have sent too many descriptors that can neither be used nor \
                     closed without waiting for others: no more front-ends are served. Remove the \
                     disk and add it anew, or restart the daemon"
                );
            }
            return Ok(Some(State::Closed));
        }
        // Those who connect meanwhile wait with it.
        let pause = self.export.pause_before_next();
        if !pause.is_zero() {
            return Ok(Some(State::Resting(Instant::now() + pause)));
        }
        let accepted = match &self.endpoint {
            // Whoever has handed an inherited one over may have it block again.
            Endpoint::Listener(listener, _) if !is_readable(listener.as_fd())? => {
                return Ok(Some(State::Free));
            }
            Endpoint::Listener(listener, _) => listener.accept().map(|(stream, _)| stream),
            Endpoint::Connected(stream) => return self.attend(stream.try_clone()?),
            // Served over their own transports.
            _ => return Ok(None),
        };
        match accepted {
            Ok(stream) => self.attend(stream),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Some(State::Free)),
            Err(error) => {
                if let Some(pass) = self.export.limits().retried.pass() {
                    let suppressed = pass.suppressed;
                    tracing::warn!(disk, suppressed, "no connection accepted: {error}");
                }
                Ok(Some(State::Resting(Instant::now() + BREATH)))
            }
        }
    }

    fn attend(&self, stream: UnixStream) -> io::Result<Option<State>> {
        panic_point!("disk");
        let disk = self.export.disk().name();
        // Accepted sockets block or not as they like; an inherited one comes as it was.
        stream.set_nonblocking(false)?;
        if let Some(pass) = self.export.limits().connected.pass() {
            tracing::info!(disk, suppressed = pass.suppressed, "front-end connected");
        }
        match Session::new(&self.export, stream, &self.served.stop) {
            Ok(session) => Ok(Some(State::Attending(Box::new(session), false))),
            Err(error) => {
                if let Some(pass) = self.export.limits().ended.pass() {
                    let suppressed = pass.suppressed;
                    tracing::warn!(disk, suppressed, "connection refused: {error}");
                }
                Ok(self.listener().map(|_| State::Resting(Instant::now())))
            }
        }
    }

    /// Tells the log if another front-end waits for the disk.
    fn tell_of_others(&self) -> io::Result<bool> {
        let Some(listener) = self.listener() else { return Ok(false) };
        let waits = is_readable(listener.as_fd())?;
        if waits {
            if let Some(pass) = self.export.limits().waiting_clients.pass() {
                tracing::warn!(
                    disk = self.export.disk().name(),
                    suppressed = pass.suppressed,
                    "another front-end waits for this disk: it is served once the present one has gone"
                );
            }
        }
        Ok(waits)
    }
}

impl Task for Acceptor {
    fn wakes(&self) -> Wakes<'_> {
        let stop = || vec![self.served.stop.as_fd()];
        let listener = self.listener().map(AsFd::as_fd);
        match &self.state {
            State::Free => {
                Wakes { readable: stop().into_iter().chain(listener).collect(), at: None }
            }
            State::Resting(until) => Wakes { readable: stop(), at: Some(*until) },
            State::Closed => Wakes { readable: stop(), at: None },
            State::Attending(session, others_logged) => {
                let mut wakes = session.wakes();
                wakes.readable.extend(listener.filter(|_| !others_logged));
                wakes
            }
        }
    }

    fn turn(&mut self, linger: Linger<'_>) -> io::Result<Turn> {
        if !matches!(self.state, State::Attending(..)) {
            let Some(state) = self.next()? else {
                if !self.export.has_failed() {
                    // What those who have gone had in flight has its time, as that of one who is there has.
                    let _ = self.export.await_clear();
                }
                return Ok(Turn::Over);
            };
            self.state = state;
        }
        let (session, others_logged) = match std::mem::replace(&mut self.state, State::Free) {
            State::Attending(session, others_logged) => (session, others_logged),
            waiting => {
                self.state = waiting;
                return Ok(Turn::Waits);
            }
        };
        match session.turn(linger) {
            ControlFlow::Continue(session) => {
                // If the host does not say, it is asked again.
                let others_logged = others_logged || self.tell_of_others().unwrap_or(false);
                self.state = State::Attending(Box::new(session), others_logged);
                Ok(Turn::Waits)
            }
            ControlFlow::Break(Ended::ByPeer) if self.listener().is_some() => {
                self.state = State::Resting(Instant::now());
                Ok(Turn::Waits)
            }
            ControlFlow::Break(_) => Ok(Turn::Over),
        }
    }

    fn end(self: Box<Self>, outcome: Outcome) {
        let Self { served, export, endpoint, bell, outcome: tell, state } = *self;
        drop((state, export));
        // Its socket file goes before anybody hears that it has ended.
        drop(endpoint);
        served.ended.store(true, SeqCst);
        drop(served);
        bell.ended(outcome.is_err());
        // Nobody may wait for it.
        let _ = tell.send(outcome);
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = [PollFd::new(&fd, PollFlags::IN)];
    match poll(&mut polled, Some(&Timespec::default())) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
