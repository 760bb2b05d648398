//! Where clients come in: a listener, and the disks that they can choose from there.

use crate::handshake::Negotiated;
use crate::offer::Offer;
use crate::tls::Tls;
use ringway_disk::Disk;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Handshakes at a time. They take nothing from those that are connected.
pub(crate) const HANDSHAKES_MAX: usize = 32;

/// A listener that does not block.
#[derive(Debug)]
pub enum Listener {
    /// A socket file.
    Unix(UnixListener),
    /// A port.
    Tcp(TcpListener),
}

impl Listener {
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        Ok(match self {
            Self::Unix(listener) => listener.accept()?.0.into(),
            Self::Tcp(listener) => listener.accept()?.0.into(),
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// There is a disk of this name already.
#[derive(Debug, thiserror::Error)]
#[error("there is an export of this name already: '{0}'")]
struct NameTaken(String);

/// A listener with the disks behind it. Whichever disk's server accepts a client shakes hands with it;
/// the server of the disk that it chooses serves it.
pub struct Portal {
    pub(crate) listener: Listener,
    /// TLS, and whether clients need it.
    pub(crate) tls: Option<(Tls, bool)>,
    rooms: Mutex<Vec<Arc<Room>>>,
    /// The name of the disk that clients get who name none. It stays with that one: who connects again, after it
    /// has gone, must not go on with another disk.
    nameless: OnceLock<String>,
    /// Streams of clients that are in their handshakes, and since when; the oldest first.
    shaking: Mutex<VecDeque<(Arc<OwnedFd>, Instant)>>,
}

/// A client whose handshake is over.
pub(crate) struct Newcomer {
    pub(crate) stream: OwnedFd,
    pub(crate) negotiated: Negotiated,
    pub(crate) offer: Offer,
    /// The thread that speaks TLS with it.
    pub(crate) relay: Option<JoinHandle<()>>,
}

/// One disk of a portal.
pub(crate) struct Room {
    name: String,
    /// Once it is served, with how many clients it may have.
    disk: OnceLock<(Arc<Disk>, usize)>,
    /// How many it has, or is about to have.
    clients: Arc<AtomicUsize>,
    waiting: Mutex<Vec<(Newcomer, Place)>>,
    bell: OwnedFd,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the clients that a disk may have at a time.
pub(crate) struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Room {
    /// How many clients it may have at a time.
    pub(crate) fn most(&self) -> usize {
        self.disk.get().map_or(0, |(_, clients)| *clients)
    }

    /// A place for one more client, if there is one.
    pub(crate) fn reserve(&self) -> Option<Place> {
        let most = self.most();
        let one_more = |clients| (clients < most).then_some(clients + 1);
        self.clients
            .fetch_update(SeqCst, SeqCst, one_more)
            .ok()
            .map(|_| Place(Arc::clone(&self.clients)))
    }

    /// Leaves a client to its server.
    pub(crate) fn send(&self, newcomer: Newcomer, place: Place) {
        lock(&self.waiting).push((newcomer, place));
        // One write can not fill the counter.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Clients that have chosen it.
    pub(crate) fn take(&self) -> Vec<(Newcomer, Place)> {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.bell, &mut counter);
        std::mem::take(&mut *lock(&self.waiting))
    }

    /// Readable when there are some.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// It is served from now on, to so many clients at a time.
    pub(crate) fn open(&self, disk: &Arc<Disk>, clients: usize) {
        let _ = self.disk.set((Arc::clone(disk), clients));
    }
}

impl Portal {
    /// With nothing behind it yet.
    #[must_use]
    pub fn new(listener: Listener) -> Self {
        Self {
            listener,
            tls: None,
            rooms: Mutex::default(),
            nameless: OnceLock::new(),
            shaking: Mutex::default(),
        }
    }

    /// Clients may use TLS, and have to if it is `required`.
    #[must_use]
    pub fn with_tls(mut self, tls: Tls, required: bool) -> Self {
        self.tls = Some((tls, required));
        self
    }

    /// Clients without TLS are refused.
    #[must_use]
    pub fn needs_tls(&self) -> bool {
        matches!(self.tls, Some((_, true)))
    }

    /// A place for the disk `name`. Clients that name none get the one that was the first here, and nobody once it
    /// has gone, until there is one of its name again.
    ///
    /// # Errors
    /// That there is one of this name, or what the host says to a descriptor.
    pub fn reserve(self: &Arc<Self>, name: &str) -> io::Result<Reservation> {
        let mut rooms = lock(&self.rooms);
        if rooms.iter().any(|room| room.name == name) {
            return Err(io::Error::other(NameTaken(name.to_owned())));
        }
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.nameless.get_or_init(|| name.to_owned());
        let (name, disk) = (name.to_owned(), OnceLock::new());
        let (waiting, clients) = (Mutex::default(), Arc::default());
        let room = Arc::new(Room { name, disk, clients, waiting, bell });
        rooms.push(Arc::clone(&room));
        Ok(Reservation { portal: Arc::clone(self), room })
    }

    /// What clients can choose from now.
    pub(crate) fn offers(&self) -> Vec<(Offer, Arc<Room>)> {
        let rooms = lock(&self.rooms);
        let offer = |room: &Arc<Room>| {
            let offer = Offer::new(&room.name, "", &room.disk.get()?.0.geometry());
            let nameless = self.nameless.get() == Some(&room.name);
            Some((Offer { nameless, ..offer }, Arc::clone(room)))
        };
        rooms.iter().filter_map(offer).collect()
    }

    /// Counts a handshake that begins; `None` if there are too many. Then the one that takes longest
    /// is given up, if it has had `timeout`: clients that say nothing keep nobody out.
    pub(crate) fn begin(&self, stream: OwnedFd, timeout: Duration) -> Option<Shaking<'_>> {
        let mut shaking = lock(&self.shaking);
        if shaking.len() >= HANDSHAKES_MAX {
            let (oldest, _) = shaking.front().filter(|(_, since)| since.elapsed() >= timeout)?;
            // It may have gone itself.
            let _ = shutdown(oldest, Shutdown::Both);
            shaking.pop_front();
        }
        let stream = Arc::new(stream);
        shaking.push_back((Arc::clone(&stream), Instant::now()));
        Some(Shaking { portal: self, stream })
    }
}

/// A handshake that is under way.
pub(crate) struct Shaking<'a> {
    portal: &'a Portal,
    pub(crate) stream: Arc<OwnedFd>,
}

impl Shaking<'_> {
    /// It is over: the stream, unless the client was given up.
    pub(crate) fn end(self) -> Option<OwnedFd> {
        let stream = Arc::clone(&self.stream);
        drop(self);
        Arc::into_inner(stream)
    }
}

impl Drop for Shaking<'_> {
    fn drop(&mut self) {
        lock(&self.portal.shaking).retain(|(other, _)| !Arc::ptr_eq(other, &self.stream));
    }
}

/// A disk's place behind a portal, for as long as it is kept.
pub struct Reservation {
    pub(crate) portal: Arc<Portal>,
    pub(crate) room: Arc<Room>,
}

impl Reservation {
    /// So many clients at a time can choose the disk from now on. They wait until it is served.
    pub fn open(&self, disk: &Arc<Disk>, clients: usize) {
        self.room.open(disk, clients);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.portal.rooms).retain(|other| !Arc::ptr_eq(other, &self.room));
    }
}
