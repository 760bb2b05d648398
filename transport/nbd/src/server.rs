//! Clients of one disk: they come and go, several at a time.

use crate::Export;
use crate::lines::Lines;
use crate::offer::Offer;
use crate::portal::{HANDSHAKES_MAX, Newcomer, Portal, Reservation, Room, Shaking};
use crate::session::{Ended, Session, is_rung, shake_hands};
use crate::tls::may_end_with_disconnect;
use ringway_core::thread::panic_message;
use ringway_nbd_tls::{FAREWELL, Peer, start as relay};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Scope};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long to leave the host alone when it has no descriptor for a new connection.
const BREATH: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How long a client may take for its handshake. A tenth of it is its own even if others wait.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Serves one disk to clients, each on a thread of its own; their requests are carried out by workers.
/// There are as many connections at a time as the export has queues.
pub struct Server<'a> {
    export: &'a Export,
    handshake_max: Duration,
    /// Which queues are taken.
    taken: Mutex<Vec<bool>>,
    lines: Lines,
    failed: AtomicBool,
}

impl<'a> Server<'a> {
    /// For a disk.
    #[must_use]
    pub fn new(export: &'a Export) -> Self {
        let queues = usize::from(export.options().queues);
        Self {
            export,
            handshake_max: HANDSHAKE_MAX,
            taken: Mutex::new(vec![false; queues]),
            lines: Lines::default(),
            failed: AtomicBool::new(false),
        }
    }

    /// With another time for handshakes.
    #[must_use]
    pub fn with_handshake_max(mut self, limit: Duration) -> Self {
        self.handshake_max = limit;
        self
    }

    /// Serves clients until `stop` becomes readable. What is in flight then is finished and answered.
    ///
    /// # Errors
    /// What the host says to waiting, and that a worker has failed.
    pub fn serve(&self, reservation: &Reservation, stop: BorrowedFd<'_>) -> io::Result<()> {
        let Reservation { portal, room } = reservation;
        room.open(self.export.disk(), self.export.options().queues.into());
        self.accept_all(portal, room, stop)?;
        if !self.export.has_failed() {
            // What clients have left behind that have gone counts, too. That it does not end is seen by whoever
            // asks whether the export is clear.
            let _ = self.export.await_clear();
        }
        Ok(())
    }

    fn accept_all(&self, portal: &Portal, room: &Room, stop: BorrowedFd<'_>) -> io::Result<()> {
        std::thread::scope(|scope| {
            loop {
                let fds = [stop, portal.listener.as_fd(), room.bell()];
                let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
                match poll(&mut polled, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
                let [stopped, knocked, chosen] = polled.map(|fd| !fd.revents().is_empty());
                if stopped {
                    return Ok(());
                }
                if chosen {
                    for (newcomer, place) in room.take() {
                        // There are as many queues as places, and it has one of these.
                        let Some(taken) = Taken::take(&self.taken) else { continue };
                        let task = move || {
                            self.attend(newcomer, taken, stop);
                            // After its queue.
                            drop(place);
                        };
                        self.spawn(scope, "nbd-client", task);
                    }
                }
                if knocked {
                    if let Some(shaking) = self.accept(portal, stop) {
                        let task = move || self.shake(portal, shaking, stop);
                        self.spawn(scope, "nbd-handshake", task);
                    }
                }
                if self.failed.load(SeqCst) {
                    return Err(io::Error::other("a worker failed; the log says why"));
                }
            }
        })
    }

    fn spawn<'s>(&self, scope: &'s Scope<'s, '_>, name: &str, task: impl FnOnce() + Send + 's) {
        let thread = std::thread::Builder::new().name(name.into());
        if let Err(error) = thread.spawn_scoped(scope, task) {
            self.tell_of_no_connection(&error);
        }
    }

    /// A client that may begin its handshake. Servers of other disks may have been faster.
    fn accept<'p>(&self, portal: &'p Portal, stop: BorrowedFd<'_>) -> Option<Shaking<'p>> {
        match portal.listener.accept() {
            Ok(stream) => {
                let begun = portal.begin(stream, self.handshake_max / 10);
                if begun.is_none() {
                    self.tell_of_refusal(HANDSHAKES_MAX, "are in their handshakes");
                }
                begun
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                self.tell_of_no_connection(&error);
                let mut polled = [PollFd::new(&stop, PollFlags::IN)];
                // Interrupted is as good as waited.
                let _ = poll(&mut polled, Some(&BREATH));
                None
            }
        }
    }

    fn tell_of_refusal(&self, most: usize, what: &str) {
        if let Some(pass) = self.export.limits().refused.pass() {
            let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
            warn!(disk, suppressed, "a client was refused: {most} {what} already");
        }
    }

    fn tell_of_no_connection(&self, error: &io::Error) {
        if let Some(pass) = self.export.limits().retried.pass() {
            let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
            warn!(disk, suppressed, "no connection accepted: {error}");
        }
    }

    /// Agrees with a client, and leaves it to the disk that it chooses.
    fn shake(&self, portal: &Portal, shaking: Shaking<'_>, stop: BorrowedFd<'_>) {
        let (offers, rooms): (Vec<Offer>, Vec<Arc<Room>>) = portal.offers().into_iter().unzip();
        let choice = (&offers[..], portal.tls.as_ref());
        let (mut place, limit) = (None, (self.handshake_max, stop));
        let mut admit = |export: usize| {
            place = rooms[export].reserve();
            if place.is_none() {
                self.tell_of_refusal(rooms[export].most(), "are connected");
            }
            place.is_some()
        };
        let shaken = shake_hands(shaking.stream.as_fd(), choice, limit, &mut admit);
        let Some(stream) = shaking.end() else { return };
        let (negotiated, tls) = match shaken {
            Ok(Some(shaken)) => shaken,
            // As clients do that only look.
            Ok(None) => return,
            Err(_) if is_rung(stop) => return,
            Err(why) => {
                if let Some(pass) = self.export.limits().refused.pass() {
                    let (disk, suppressed) = (self.export.disk().name(), pass.suppressed);
                    info!(disk, suppressed, "a client was left: {why}");
                }
                return;
            }
        };
        let (offer, room) = (offers[negotiated.export].clone(), &rooms[negotiated.export]);
        let Some(place) = place else { return };
        let (stream, relay) = match tls {
            None => (stream, None),
            Some(tls) => {
                let client = Peer::Client(may_end_with_disconnect);
                match relay(Box::new((*tls).into()), stream, client) {
                    Ok((stream, relay)) => (stream, Some(relay)),
                    Err(error) => return self.tell_of_no_connection(&error),
                }
            }
        };
        room.send(Newcomer { stream, negotiated, offer, relay }, place);
    }

    fn attend(&self, newcomer: Newcomer, taken: Taken<'_>, stop: BorrowedFd<'_>) {
        let attended = catch_unwind(AssertUnwindSafe(|| self.session(newcomer, &taken, stop)));
        let ended = attended.unwrap_or_else(|panic| {
            let disk = self.export.disk().name();
            tracing::error!(disk, "a session panicked: {}", panic_message(&*panic));
            Ended::Failed
        });
        if ended == Ended::Failed {
            self.failed.store(true, SeqCst);
        }
    }

    fn session(&self, newcomer: Newcomer, taken: &Taken<'_>, stop: BorrowedFd<'_>) -> Ended {
        let Newcomer { stream, negotiated, offer, relay } = newcomer;
        let (agreed, place) = ((&offer, negotiated), (taken.at, &self.lines));
        let ended = match Session::new(self.export, agreed, stream, place, stop) {
            Ok(session) => {
                if let Some(pass) = self.export.limits().connected.pass() {
                    let (queue, suppressed) = (taken.at, pass.suppressed);
                    let (disk, replies) = (self.export.disk().name(), negotiated.replies);
                    let tls = relay.is_some();
                    info!(disk, queue, ?replies, tls, suppressed, "client connected");
                }
                session.run()
            }
            Err(error) => {
                self.tell_of_no_connection(&error);
                Ended::ByPeer
            }
        };
        relay.into_iter().for_each(see_off);
        ended
    }
}

/// Waits until a client has its last answers, or for as long as it may take for them. A stuck disk may
/// keep its end of the line.
fn see_off(relay: JoinHandle<()>) {
    let begun = Instant::now();
    while !relay.is_finished() && begun.elapsed() < FAREWELL {
        // Nobody unparks this thread.
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// A queue that is taken.
struct Taken<'a> {
    of: &'a Mutex<Vec<bool>>,
    at: usize,
}

fn lock(of: &Mutex<Vec<bool>>) -> MutexGuard<'_, Vec<bool>> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Taken<'a> {
    fn take(of: &'a Mutex<Vec<bool>>) -> Option<Self> {
        let mut taken = lock(of);
        let at = taken.iter().position(|taken| !taken)?;
        taken[at] = true;
        Some(Self { of, at })
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        lock(self.of)[self.at] = false;
    }
}
