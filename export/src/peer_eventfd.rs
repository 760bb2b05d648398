//! Ringing an eventfd that a hostile peer shares.
//!
//! The peer can make the descriptor blocking again behind our back and fill its counter: the write
//! would then sleep for as long as the peer likes, and everything else this thread serves with it.
//! So each thread marks when it begins and ends such a write, and a watchdog interrupts a thread
//! that stays in one. The interrupted write fails. No honest peer fills a counter of 64 bits, and every
//! such write costs all that the thread serves up to 200 ms: so the peer is rung no more, by whatever
//! descriptor and whatever thread, its connection ends, and the next one has to wait
//! ([`crate::penalty`]).
//!
//! The watchdog looks as long as there are such writes, and sleeps without a time limit as soon as
//! none has begun or ended from one look to the next. Whoever begins one then wakes it.
//!
//! A write that cannot block would need none of this. On Linux 6.18 there is none at this price: pwritev2
//! refuses RWF_NOWAIT for an eventfd, io_uring hands such a write to a thread that blocks, an eventfd
//! cannot be opened a second time to get flags of our own, and asking poll(2) first costs a system call
//! more and leaves a moment to fill it. The kernel itself rings without blocking, at the end of an
//! operation of Linux AIO or as the bell of a whole io_uring, which would cost every notification of
//! honest guests an operation more.

use crate::session_inbox::SessionInbox;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Once, OnceLock, Weak};
use std::thread::Thread;
use std::time::Duration;

/// How often the watchdog looks. A write lasts that long at least before it is interrupted.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// A thread's mark.
///
/// # Invariants
/// 1. While this is alive so is the thread `id`, because only its thread-local holds it; the
///    watchdog holds the registry's lock when it uses `id`, and the drop takes that lock.
// Written with every call: on lines of its own (ADR 0010).
#[repr(align(128))]
struct ThreadMark {
    id: libc::pthread_t,
    /// Odd while the thread is in a write; never the same for two writes.
    writes: AtomicU64,
}

const _: () = assert!(size_of::<ThreadMark>() == 128 && align_of::<ThreadMark>() == 128);

/// Whether the watchdog sleeps until it is woken. Read with every call, by all threads: on lines of
/// its own (ADR 0010).
#[repr(align(128))]
struct Asleep(AtomicBool);

static ASLEEP: Asleep = Asleep(AtomicBool::new(false));
static WATCHING: OnceLock<Thread> = OnceLock::new();

static MARKS: Mutex<Vec<Weak<ThreadMark>>> = Mutex::new(Vec::new());
static HANDLER: Once = Once::new();
static WATCHDOG: Once = Once::new();

/// What a thread-local holds: unregisters the mark before the thread is gone.
struct Registered(Arc<ThreadMark>);

impl Registered {
    fn new() -> Self {
        watch();
        // SAFETY: no preconditions.
        let id = unsafe { libc::pthread_self() };
        let mark = Arc::new(ThreadMark { id, writes: AtomicU64::new(0) });
        MARKS.lock().unwrap_or_else(|e| e.into_inner()).push(Arc::downgrade(&mark));
        Self(mark)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mine = Arc::as_ptr(&self.0);
        MARKS.lock().unwrap_or_else(|e| e.into_inner()).retain(|mark| mark.as_ptr() != mine);
    }
}

thread_local! {
    static MARK: Registered = Registered::new();
}

/// An eventfd of a peer, and the inbox of the session that has the peer's connection.
#[derive(Debug)]
pub struct PeerEventfd {
    fd: OwnedFd,
    inbox: Arc<SessionInbox>,
}

impl PeerEventfd {
    /// `inbox` hears of it if a write to `fd` blocks.
    pub fn new(fd: OwnedFd, inbox: &Arc<SessionInbox>) -> Self {
        Self { fd, inbox: Arc::clone(inbox) }
    }

    /// Writes 1 to the eventfd. A full counter has rung already.
    ///
    /// # Errors
    /// What the host says; `Interrupted` if the peer made this write block, or an earlier one to any of
    /// its descriptors.
    pub fn signal(&self) -> io::Result<()> {
        // Written once in the life of a connection.
        if self.inbox.was_blocked() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        write_one(&self.fd).inspect_err(|error| {
            if error.kind() == io::ErrorKind::Interrupted {
                self.inbox.block();
            }
        })
    }
}

fn write_one(bell: &OwnedFd) -> io::Result<()> {
    MARK.with(|mark| {
        let writes = &mark.0.writes;
        let begun = writes.load(Relaxed).wrapping_add(1);
        // Either the watchdog sees this write, or this thread sees that the watchdog sleeps: each
        // stores its own before it loads the other's.
        writes.store(begun, SeqCst);
        if ASLEEP.0.load(SeqCst) {
            wake_watchdog();
        }
        let result = rustix::io::write(bell, &1u64.to_ne_bytes());
        writes.store(begun.wrapping_add(1), Relaxed);
        match result {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    })
}

#[cold]
fn wake_watchdog() {
    if ASLEEP.0.swap(false, SeqCst) {
        if let Some(thread) = WATCHING.get() {
            thread.unpark();
        }
    }
}

/// The signal by which a thread is interrupted.
#[must_use]
pub fn watchdog_signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

extern "C" fn interrupt(_signal: libc::c_int) {}

/// Installs the handler of the signal that interrupts. Starting the watchdog does so as well; a
/// process that is to lose the right to install handlers calls this before.
pub(crate) fn prepare() {
    HANDLER.call_once(install_handler);
}

fn install_handler() {
    // SAFETY: the handler does nothing; without SA_RESTART a sleeping write ends with EINTR.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = interrupt as *const () as usize;
        libc::sigaction(watchdog_signal(), &action, std::ptr::null_mut());
    }
}

/// Starts the watchdog, if there is none: a thread of its own.
pub(crate) fn watch() {
    WATCHDOG.call_once(start_watchdog);
}

fn start_watchdog() {
    HANDLER.call_once(install_handler);
    let watchdog = std::thread::Builder::new().name("bell-watch".into()).spawn(|| {
        let _ = WATCHING.set(std::thread::current());
        let mut seen = Vec::new();
        loop {
            // Woken too early is as good: a thread that is interrupted for nothing goes on.
            std::thread::park_timeout(WATCH_EVERY);
            let now = sample(&seen);
            let is_over = |(_, writes): &(_, u64)| writes % 2 == 0;
            if now == seen && now.iter().all(is_over) {
                ASLEEP.0.store(true, SeqCst);
                // One may have begun before it could see that.
                while ASLEEP.0.load(SeqCst) && sample(&seen) == seen {
                    std::thread::park();
                }
                ASLEEP.0.store(false, SeqCst);
            }
            seen = now;
        }
    });
    if let Err(error) = watchdog {
        tracing::error!("no watchdog for notifications: {error}");
    }
}

/// How far each thread has come; one that is in the same write as when it was `seen` is interrupted.
fn sample(seen: &[(libc::pthread_t, u64)]) -> Vec<(libc::pthread_t, u64)> {
    let marks = MARKS.lock().unwrap_or_else(|e| e.into_inner());
    let mut now = Vec::with_capacity(marks.len());
    for mark in marks.iter().filter_map(Weak::upgrade) {
        let writes = mark.writes.load(SeqCst);
        if writes % 2 == 1 && seen.contains(&(mark.id, writes)) {
            // SAFETY: the thread is alive while its mark is registered and the lock is held (Mark
            // invariant 1).
            unsafe { libc::pthread_kill(mark.id, watchdog_signal()) };
        }
        now.push((mark.id, writes));
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn bell() -> PeerEventfd {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        PeerEventfd::new(fd, &Arc::new(SessionInbox::new().unwrap()))
    }

    #[test]
    fn a_write_that_blocks_is_interrupted() {
        let bell = bell();
        bell.signal().unwrap();
        rustix::io::write(&bell.fd, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        assert_eq!(bell.signal().unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    /// Neither by another descriptor of the same peer nor by another thread.
    #[test]
    fn b21_who_made_a_write_block_is_rung_no_more() {
        let inbox = Arc::new(SessionInbox::new().unwrap());
        let new = || PeerEventfd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap(), &inbox);
        let (one, other) = (new(), new());
        rustix::io::write(&one.fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        other.signal().unwrap();
        assert!(!inbox.was_blocked() && one.signal().is_err() && inbox.was_blocked());
        let there = std::thread::scope(|scope| scope.spawn(|| other.signal()).join().unwrap());
        assert_eq!(there.unwrap_err().kind(), io::ErrorKind::Interrupted);
        let mut counter = [0; 8];
        rustix::io::read(&other.fd, &mut counter).unwrap();
        assert_eq!(u64::from_ne_bytes(counter), 1, "it was written again");
    }

    #[test]
    fn a_write_that_blocks_wakes_the_watchdog() {
        for _ in 0..5 {
            let bell = bell();
            bell.signal().unwrap();
            // Long enough for it to fall asleep, if no other test rings meanwhile.
            std::thread::sleep(5 * WATCH_EVERY);
            rustix::io::write(&bell.fd, &(u64::MAX - 2).to_ne_bytes()).unwrap();
            assert_eq!(bell.signal().unwrap_err().kind(), io::ErrorKind::Interrupted);
        }
    }
}
