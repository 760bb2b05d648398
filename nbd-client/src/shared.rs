//! What engines, supervisor and owner of an export share.

use crate::connect::Connected;
use crate::handshake::Negotiated;
use crate::ledger::Ledger;
use ringway_aio::bells::Waker;
use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// What is called when an outage begins and when it is over.
pub(crate) struct OnOutage(pub(crate) Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for OnOutage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnOutage")
    }
}

/// An export in use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) negotiated: Negotiated,
    /// What the server calls it, if it tells.
    pub(crate) export: Option<String>,
    pub(crate) ledger: Ledger,
    /// Its owner has gone.
    pub(crate) ended: AtomicBool,
    /// Why there is no connection, from the moment when one is lost until all are there again.
    outage: Mutex<Option<String>>,
    /// Called when that begins and when it is over.
    pub(crate) on_outage: OnceLock<OnOutage>,
    /// There were connections after those that it was made with.
    pub(crate) came: AtomicBool,
    /// Its connections, at least one.
    pub(crate) lanes: Box<[Arc<Lane>]>,
    /// How many engines share them, at most as many as there are.
    pub(crate) engines: AtomicUsize,
    /// The seats of engines that are there.
    seats: Mutex<Vec<usize>>,
    wish: Sender<Wish>,
}

/// One connection of an export, and whoever replaces it when it is lost.
#[derive(Debug)]
pub(crate) struct Lane {
    /// An engine has it.
    taken: AtomicBool,
    /// There is mail.
    pub(crate) arrived: AtomicBool,
    /// Goes on where a reply begins or ends, with each part of a long one, and with each request that is sent while
    /// none is under way.
    pub(crate) progress: AtomicU64,
    /// Requests have been sent that are not answered.
    pub(crate) waits: AtomicBool,
    /// A reply has begun, and its rest has not come.
    pub(crate) amid: AtomicBool,
    /// Requests waited for its connection when that came.
    pub(crate) asked_at_once: AtomicBool,
    /// The server has answered a request since this was cleared.
    pub(crate) answered: AtomicBool,
    socket: Mutex<Weak<File>>,
    mail: Mutex<Option<Mail>>,
    waker: Mutex<Option<Waker>>,
}

/// What an engine is told of a connection.
#[derive(Debug)]
pub(crate) enum Mail {
    /// A new socket.
    Connected(Arc<File>),
    /// Another connection of the export is lost: nothing more may be sent on this one, and it is given up
    /// once what was sent is answered.
    Retreat,
    /// No new one has come for too long, and requests are no longer to wait for it. What was sent on the old
    /// one, if that is still there, may be answered: it is given up as with `Retreat`.
    GaveUp,
}

/// What a supervisor is told: a connection is lost.
#[derive(Debug)]
pub(crate) struct Wish {
    /// Which one.
    pub(crate) lane: usize,
    pub(crate) why: String,
    /// Its socket.
    pub(crate) old: Arc<File>,
    /// What was answered and not flushed may be lost with it, for the first time.
    pub(crate) lost: bool,
    /// It was never there: its server was away from the start, which was said.
    pub(crate) absent: bool,
}

impl Shared {
    /// An export with these connections.
    pub(crate) fn new(name: &str, connected: &Connected, wish: Sender<Wish>) -> Arc<Self> {
        let sockets: Vec<_> = connected.sockets().collect();
        Arc::new(Self {
            name: name.to_owned(),
            negotiated: connected.negotiated,
            export: connected.export.clone(),
            ledger: Ledger::default(),
            ended: AtomicBool::new(false),
            outage: Mutex::new(connected.away.clone()),
            on_outage: OnceLock::new(),
            came: AtomicBool::new(false),
            lanes: sockets.iter().map(|socket| Arc::new(Lane::new(socket))).collect(),
            engines: AtomicUsize::new(1),
            seats: Mutex::default(),
            wish,
        })
    }

    /// A number for an engine that has no connection yet; `None` if there are as many engines as may be.
    pub(crate) fn seat(&self) -> Option<usize> {
        let mut seats = lock(&self.seats);
        let seat = (0..self.engines.load(SeqCst)).find(|seat| !seats.contains(seat))?;
        seats.push(seat);
        Some(seat)
    }

    /// An engine has left a connection, and is about to leave all that it has.
    pub(crate) fn free(&self, lane: usize) {
        let seat = self.seat_of(lane);
        self.lanes[lane].taken.store(false, SeqCst);
        lock(&self.seats).retain(|taken| *taken != seat);
    }

    /// Which engine may have a connection, by its seat.
    pub(crate) fn seat_of(&self, lane: usize) -> usize {
        lane % self.engines.load(SeqCst)
    }

    /// A connection for the engine with this seat, for good, if one is left.
    pub(crate) fn take(&self, seat: usize) -> Option<usize> {
        let mut own = (0..self.lanes.len()).filter(|&lane| self.seat_of(lane) == seat);
        own.find(|&lane| !self.lanes[lane].taken.swap(true, SeqCst))
    }

    /// Why there is no connection, if a server is away.
    pub(crate) fn outage(&self) -> Option<String> {
        lock(&self.outage).clone()
    }

    /// There is no connection, for this reason; or there is one.
    pub(crate) fn set_outage(&self, why: Option<&str>) {
        let before = std::mem::replace(&mut *lock(&self.outage), why.map(str::to_owned));
        if before.is_some() != why.is_some() {
            if let Some(call) = self.on_outage.get() {
                (call.0)();
            }
        }
    }

    /// Tells the supervisor that a connection is lost.
    pub(crate) fn ask(&self, wish: Wish) {
        // Without a supervisor nobody hears it, and nothing comes.
        let _ = self.wish.send(wish);
    }
}

impl Lane {
    fn new(socket: &Arc<File>) -> Self {
        Self {
            taken: AtomicBool::new(false),
            arrived: AtomicBool::new(true),
            progress: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            amid: AtomicBool::new(false),
            asked_at_once: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            socket: Mutex::new(Arc::downgrade(socket)),
            mail: Mutex::new(Some(Mail::Connected(Arc::clone(socket)))),
            waker: Mutex::default(),
        }
    }

    /// Whom to wake when there is mail.
    pub(crate) fn listen(&self, waker: Waker) {
        *lock(&self.waker) = Some(waker);
    }

    /// What has come.
    pub(crate) fn take_mail(&self) -> Option<Mail> {
        self.arrived.store(false, SeqCst);
        lock(&self.mail).take()
    }

    /// A new connection, for whoever has this one or will take it.
    pub(crate) fn connect(&self, socket: &Arc<File>) {
        *lock(&self.socket) = Arc::downgrade(socket);
        self.deliver(Mail::Connected(Arc::clone(socket)));
    }

    pub(crate) fn deliver(&self, mail: Mail) {
        *lock(&self.mail) = Some(mail);
        self.ring();
    }

    /// Has the connection be given up. Its socket, if no engine has had that yet; else the engine's wish
    /// brings it, which may be under way.
    pub(crate) fn retreat(&self) -> Option<Arc<File>> {
        let mut mail = lock(&self.mail);
        if let Some(Mail::Connected(socket)) = mail.take() {
            return Some(socket);
        }
        *mail = Some(Mail::Retreat);
        drop(mail);
        self.ring();
        None
    }

    /// The engine that has it ends. Its socket again, if the supervisor waits for that.
    pub(crate) fn leave(&self, socket: Arc<File>) -> Option<Arc<File>> {
        let mut mail = lock(&self.mail);
        if matches!(*mail, Some(Mail::Retreat | Mail::GaveUp)) {
            return Some(socket);
        }
        *mail = Some(Mail::Connected(socket));
        self.waits.store(false, SeqCst);
        None
    }

    /// The socket, if no engine has it.
    pub(crate) fn unused(&self) -> Option<Arc<File>> {
        match &*lock(&self.mail) {
            Some(Mail::Connected(socket)) => Some(Arc::clone(socket)),
            _ => None,
        }
    }

    /// Ends a connection whose server is silent: its engine sees that it is closed.
    pub(crate) fn end(&self) -> bool {
        let socket = lock(&self.socket).upgrade();
        socket.is_some_and(|socket| {
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).is_ok()
        })
    }

    /// There is mail, or its owner has gone.
    pub(crate) fn ring(&self) {
        self.arrived.store(true, SeqCst);
        if let Some(waker) = &*lock(&self.waker) {
            waker.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
