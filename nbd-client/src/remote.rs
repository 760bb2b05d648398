//! An export that is in use: who has its connection, and how it comes back.
//!
//! ```text
//! engine (a worker)                         supervisor (a thread)
//!   connection lost  ── Wish ──────────▶      waits until the server has let go of the old one
//!                                             connects, again and again
//!   reap             ◀── Mail::Connected ──   the new socket
//!                    ◀── Mail::GaveUp ─────   it takes too long: requests fail until it comes
//! ```

use crate::allocation::{Allocation, AllocationError};
use crate::connect::{Connected, wait_until_closed};
use crate::handshake::Negotiated;
use ringway_aio::bells::Waker;
use std::error::Error;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long requests wait for a lost connection before they fail; `None` is for ever.
    pub give_up: Option<Duration>,
    /// How long a server may say nothing at all while requests wait for it, before its connection is
    /// given up. It may be twice as long until that is noticed.
    pub silence: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { give_up: None, silence: Duration::from_secs(60) }
    }
}

/// The shortest and longest time between two attempts to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How a connection is made anew.
pub type Connect = dyn Fn() -> Result<Connected, Box<dyn Error + Send + Sync>> + Send + Sync;

/// An export in use. Dropping it ends its connection.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    wishes: Mutex<Option<Receiver<Wish>>>,
}

/// What engine, supervisor and owner share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) negotiated: Negotiated,
    /// Writes that were answered and not flushed may be lost: no flush succeeds any more.
    pub(crate) lost: AtomicBool,
    /// An engine has it.
    pub(crate) taken: AtomicBool,
    /// Its owner has gone.
    pub(crate) ended: AtomicBool,
    /// There is mail.
    pub(crate) arrived: AtomicBool,
    /// Goes on with each byte that comes, and with each request that is sent while none is under way.
    pub(crate) progress: AtomicU64,
    /// Requests have been sent that are not answered.
    pub(crate) waits: AtomicBool,
    mail: Mutex<Option<Mail>>,
    waker: Mutex<Option<Waker>>,
    wish: Sender<Wish>,
}

/// What an engine is told.
#[derive(Debug)]
pub(crate) enum Mail {
    /// A new socket.
    Connected(Arc<File>),
    /// There is none, and requests are no longer to wait for it.
    GaveUp,
}

/// What a supervisor is told: a connection is lost.
#[derive(Debug)]
pub(crate) struct Wish {
    pub(crate) why: String,
    /// Its socket.
    pub(crate) old: Arc<File>,
    /// What was answered and not flushed may be lost with it, for the first time.
    pub(crate) lost: bool,
}

/// Sockets of exports in use, so that an engine that gets one knows which export it is.
static REMOTES: Mutex<Vec<(Weak<File>, Weak<Shared>)>> = Mutex::new(Vec::new());

impl Remote {
    /// Has engines know the socket of `connected`, which must not block, as that of an export. The log
    /// calls it `name`.
    #[must_use]
    pub fn new(name: &str, connected: &Connected) -> Self {
        let (wish, wishes) = channel();
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            negotiated: connected.negotiated,
            lost: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            arrived: AtomicBool::new(true),
            progress: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            mail: Mutex::new(Some(Mail::Connected(Arc::clone(&connected.socket)))),
            waker: Mutex::default(),
            wish,
        });
        let mut remotes = lock(&REMOTES);
        remotes.retain(|(_, shared)| shared.strong_count() > 0);
        remotes.push((Arc::downgrade(&connected.socket), Arc::downgrade(&shared)));
        Self { shared, wishes: Mutex::new(Some(wishes)) }
    }

    /// What was agreed upon.
    #[must_use]
    pub fn negotiated(&self) -> Negotiated {
        self.shared.negotiated
    }

    /// Asks where the export has data, over its first connection, before an engine uses that. `None` if
    /// the server does not tell. After an error the connection is of no use.
    ///
    /// # Errors
    /// [`AllocationError`].
    pub fn allocation(&self) -> Result<Option<Allocation>, AllocationError> {
        let negotiated = &self.shared.negotiated;
        match &*lock(&self.shared.mail) {
            Some(Mail::Connected(socket)) if negotiated.block_status.is_some() => {
                Allocation::ask(socket, negotiated).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Starts the thread that has lost connections come back, by `connect`. Requests wait meanwhile, or
    /// fail after a while if `timeouts` has it so, until there is a connection again. Without this
    /// thread a lost connection stays lost, and its requests wait for ever.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub fn supervise(&self, connect: Box<Connect>, timeouts: Timeouts) -> io::Result<()> {
        let Some(wishes) = lock(&self.wishes).take() else { return Ok(()) };
        let shared = Arc::downgrade(&self.shared);
        let supervisor = Supervisor { shared, connect, timeouts };
        std::thread::Builder::new().name("nbd".into()).spawn(move || supervisor.run(&wishes))?;
        Ok(())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.ended.store(true, SeqCst);
        self.shared.ring();
    }
}

impl Shared {
    /// The export whose socket this is.
    pub(crate) fn of(socket: &Arc<File>) -> Option<Arc<Self>> {
        let remotes = lock(&REMOTES);
        let here = |(known, _): &&(Weak<File>, _)| known.as_ptr() == Arc::as_ptr(socket);
        remotes.iter().find(here).and_then(|(_, shared)| shared.upgrade())
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

    /// Tells the supervisor that the connection is lost.
    pub(crate) fn ask(&self, wish: Wish) {
        // Without a supervisor nobody hears it, and nothing comes.
        let _ = self.wish.send(wish);
    }

    fn deliver(&self, mail: Mail) {
        *lock(&self.mail) = Some(mail);
        self.ring();
    }

    fn ring(&self) {
        self.arrived.store(true, SeqCst);
        if let Some(waker) = &*lock(&self.waker) {
            waker.wake();
        }
    }
}

/// Looks after the connection of an export.
struct Supervisor {
    shared: Weak<Shared>,
    connect: Box<Connect>,
    timeouts: Timeouts,
}

impl Supervisor {
    fn run(&self, wishes: &Receiver<Wish>) {
        let (mut socket, mut seen): (Option<Arc<File>>, _) = (None, None);
        loop {
            match wishes.recv_timeout(self.timeouts.silence) {
                Ok(wish) => match self.bring_back(wish) {
                    Some(new) => (socket, seen) = (Some(new), None),
                    None => return,
                },
                Err(RecvTimeoutError::Timeout) => {
                    let Some(shared) = self.shared.upgrade() else { return };
                    let now = shared.progress.load(Relaxed);
                    let stuck = shared.waits.load(Relaxed) && seen == Some(now);
                    if stuck && shared.end_silent(socket.as_deref()) {
                        tracing::warn!(
                            disk = shared.name,
                            "the NBD server has said nothing for {} s while requests wait for it: \
                             the connection is given up",
                            self.timeouts.silence.as_secs()
                        );
                    }
                    seen = shared.waits.load(Relaxed).then_some(now);
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Connects until it works. `None` once nobody needs it any more.
    fn bring_back(&self, wish: Wish) -> Option<Arc<File>> {
        let shared = self.shared.upgrade()?;
        tracing::warn!(
            disk = shared.name,
            "the connection to the NBD server is lost: {}. Requests wait for a new one",
            wish.why
        );
        if wish.lost {
            tracing::error!(
                disk = shared.name,
                "writes that the NBD server had answered, and that were not flushed yet, may be lost \
                 with it: flushes fail from now on. --cache writethrough leaves nothing to be lost"
            );
        }
        wait_until_closed(&wish.old);
        drop(shared);
        let (begun, mut pause, mut logged, mut gave_up) = (Instant::now(), PAUSE.0, false, false);
        loop {
            let tried = (self.connect)();
            let shared = self.shared.upgrade()?;
            if shared.ended.load(SeqCst) {
                return None;
            }
            let error = match tried.and_then(|new| shared.check(&new).map(|()| new)) {
                Ok(new) => {
                    shared.deliver(Mail::Connected(Arc::clone(&new.socket)));
                    // Whoever reads it can rely on it.
                    tracing::info!(
                        disk = shared.name,
                        "connected to the NBD server again after {:.1} s",
                        begun.elapsed().as_secs_f32()
                    );
                    return Some(new.socket);
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut logged, true) {
                tracing::warn!(disk = shared.name, "not connected yet: {error}");
            }
            if !gave_up && self.timeouts.give_up.is_some_and(|most| begun.elapsed() >= most) {
                gave_up = true;
                tracing::error!(
                    disk = shared.name,
                    "no connection to the NBD server for {} s: requests fail until there is one",
                    begun.elapsed().as_secs()
                );
                shared.deliver(Mail::GaveUp);
            }
            drop(shared);
            // Nobody unparks this thread.
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }
}

impl Shared {
    /// Whether it is the same export as before, as far as its guest can tell.
    fn check(&self, new: &Connected) -> Result<(), Box<dyn Error + Send + Sync>> {
        // What was asked before the disk was used is not asked again.
        let was = Negotiated { block_status: None, ..self.negotiated };
        let is = Negotiated { block_status: None, ..new.negotiated };
        if was == is {
            return Ok(());
        }
        let what = if was.bytes == is.bytes { "offers other things" } else { "has another size" };
        Err(format!(
            "the export {what} than before ({} bytes, flags {:#x}; now {}, {:#x}): serve the disk anew",
            was.bytes, was.flags, is.bytes, is.flags
        )
        .into())
    }

    /// Ends a connection whose server is silent: its engine sees that it is closed.
    fn end_silent(&self, socket: Option<&File>) -> bool {
        let remotes = lock(&REMOTES);
        let first = remotes.iter().find(|(_, shared)| std::ptr::eq(shared.as_ptr(), self));
        let first = first.and_then(|(socket, _)| socket.upgrade());
        let socket = socket.or(first.as_deref());
        socket.is_some_and(|socket| {
            rustix::net::shutdown(socket, rustix::net::Shutdown::Both).is_ok()
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
