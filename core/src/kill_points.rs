//! Places at which a daemon kills itself when it is told to: for campaigns that want to strike where
//! a blind kill seldom does.
//!
//! [`kill_point!`](crate::kill_point) marks a place. It is nothing at all, not even a branch, unless
//! this crate is built with debug assertions, as tests are, or with the feature `kill-points`, as
//! campaigns build a release. Neither is in a release. A process built so reads
//! `RINGWAY_KILL_POINT=name:count` when it calls `arm`, and dies by SIGKILL when it comes to the place
//! for the count-th time.
//!
//! ```
//! ringway_core::kill_point!(Submitting);
//! ```
//!
//! [`panic_point!`](crate::panic_point) marks a place at which the code of a thread can be told to
//! panic, by `RINGWAY_PANIC_POINT=name:count`; in the same builds, and nothing in others.

/// The variable that names a point and a count.
pub const VARIABLE: &str = "RINGWAY_KILL_POINT";

macro_rules! points {
    ($($(#[doc = $doc:literal])* $point:ident = $name:literal,)*) => {
        /// The places there are, in the order in which a request or a connection comes to them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Point {
            $($(#[doc = $doc])* $point,)*
        }

        impl Point {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$point,)*];

            /// The word for it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                }
            }
        }
    };
}

points! {
    /// The image is locked; nobody listens yet.
    Locked = "locked",
    /// The socket is there; no connection was accepted.
    Listening = "listening",
    /// GET_INFLIGHT_FD: a record was made, and not handed out.
    RecordMade = "record-made",
    /// SET_INFLIGHT_FD: the record is mapped, and no queue was started.
    RecordTaken = "record-taken",
    /// What a predecessor left was read and judged; nothing was written.
    Judged = "judged",
    /// The record was brought to one state; nothing was carried out again.
    Recovered = "recovered",
    /// A queue runs; others may not.
    QueueStarted = "queue-started",
    /// A chain that was left in flight was taken once more.
    Retaken = "retaken",
    /// A new chain was read from the ring, and not marked.
    Popped = "popped",
    /// A chain has its counter or part of its descriptors in the record.
    Marking = "marking",
    /// A chain is marked, and not issued.
    Marked = "marked",
    /// A batch is with the engine, and not with the kernel.
    Submitting = "submitting",
    /// A batch is with the kernel.
    Submitted = "submitted",
    /// The kernel is done with a request; its answer was not written.
    Completed = "completed",
    /// Answers of a batch are written; none is linked in the record.
    Linking = "linking",
    /// A batch is linked in the record; the used index was not moved.
    Linked = "linked",
    /// The used index was moved; the batch is still marked.
    Published = "published",
    /// One chain of a batch was unmarked.
    Unmarking = "unmarking",
    /// A batch is unmarked and the record complete; the driver was not called.
    Unmarked = "unmarked",
    /// The driver was called.
    Called = "called",
    /// Before a store to ring or record, whichever it is.
    Store = "store",
    /// A flush has failed; nothing says so yet.
    FlushFailing = "flush-failing",
    /// It is kept that a flush has failed; nobody was answered.
    FlushFailed = "flush-failed",
    /// The disk has failed a request that is to be held; nothing is done about it yet.
    Holding = "holding",
    /// A request is held; its guest waits.
    Held = "held",
    /// A held request is about to be tried again.
    Retrying = "retrying",
    /// A held request is over; it still counts as held, and nobody was answered.
    Releasing = "releasing",
    /// A disk grows: the file is longer, the guest cannot use it.
    Grown = "grown",
    /// A disk shrinks: nothing is in flight beyond the end, and the file not cut.
    Settled = "settled",
    /// A disk has its new size; nobody was told.
    Resized = "resized",
    /// A new image is to go on top of a disk's: it has no name.
    OverlayMade = "overlay-made",
    /// The old image has its new name as well; the new one has none. In the helper's process, if there is one.
    OverlayLinked = "overlay-linked",
    /// The new image has the name of the old one, which the disk is still served from.
    OverlayNamed = "overlay-named",
    /// The disk is served from the new image; nobody was told.
    OverlayOnTop = "overlay-on-top",
    /// A portion of what an image is based on was copied into it.
    Pulled = "pulled",
    /// The header of an image names no backing file any more; that is still in use.
    Detached = "detached",
    /// A portion of an image was copied into the one that it is based on.
    Merged = "merged",
    /// All of it was, durably; the header of the one on top still names the one in the middle.
    MergeDurable = "merge-durable",
    /// The name of another backing file is in the header, which does not say so.
    NameWritten = "name-written",
    /// The header names it; the other one is still in use.
    MiddleSkipped = "middle-skipped",
    /// A disk is served without a file of its chain; nobody was told.
    Reopened = "reopened",
    /// It is kept that the disk is paused; its queues run.
    Pausing = "pausing",
    /// SET_CONFIG: it is noted that the write cache is off; workers do not know.
    CacheNoted = "cache-noted",
    /// SET_CONFIG: it was answered that the write cache is on; nothing was noted.
    CacheAnswered = "cache-answered",
    /// GET_VRING_BASE: the queue is drained and stopped; the answer was not sent.
    Drained = "drained",
    /// GET_VRING_BASE: the answer was sent; the record is not marked as new.
    BaseAnswered = "base-answered",
    /// A guest has left during a migration; what it wrote is not durable.
    LeftUnsynced = "left-unsynced",
}

/// The variable that says which operations fail: see [`injected!`](crate::injected).
pub const FAULTS: &str = "RINGWAY_FAULTS";

/// The result of an operation on a file, or the error that a test wants instead: `injected!(result,
/// write, sync, offset, len)`. Nothing but `result` in a release.
///
/// `RINGWAY_FAULTS=eio=509:7,enospc=701:11,sync=3` lets writes fail that touch a sector whose number
/// leaves 7 when divided by 509 (EIO), or 11 by 701 (ENOSPC), and once the third sync (EIO).
/// `full=64:4` lets the first four of each 64 writes fail (ENOSPC), as on a disk that is full now and
/// then. The operations were carried out.
#[cfg(not(any(feature = "kill-points", debug_assertions)))]
#[macro_export]
macro_rules! injected {
    ($result:expr, $what:expr) => {
        ::core::convert::identity($result)
    };
}

/// As described for a release.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[macro_export]
macro_rules! injected {
    ($result:expr, $what:expr) => {{
        let (write, sync, offset, len) = $what;
        $crate::kill_points::injected($result, write, sync, offset, len)
    }};
}

/// Marks a place at which a process may be told to die; see [`kill_points`](crate::kill_points).
#[cfg(not(any(feature = "kill-points", debug_assertions)))]
#[macro_export]
macro_rules! kill_point {
    ($point:ident) => {};
}

/// Marks a place at which a process may be told to die; see [`kill_points`](crate::kill_points).
#[cfg(any(feature = "kill-points", debug_assertions))]
#[macro_export]
macro_rules! kill_point {
    ($point:ident) => {
        $crate::kill_points::reached($crate::kill_points::Point::$point)
    };
}

/// Marks a place at which a thread may be told to panic; see [`kill_points`](crate::kill_points).
#[cfg(not(any(feature = "kill-points", debug_assertions)))]
#[macro_export]
macro_rules! panic_point {
    ($name:literal) => {};
}

/// Marks a place at which a thread may be told to panic; see [`kill_points`](crate::kill_points).
#[cfg(any(feature = "kill-points", debug_assertions))]
#[macro_export]
macro_rules! panic_point {
    ($name:literal) => {
        $crate::kill_points::panics_at($name)
    };
}

#[cfg(any(feature = "kill-points", debug_assertions))]
pub use armed::{arm, injected, panics_at, reached};

#[cfg(any(feature = "kill-points", debug_assertions))]
mod armed {
    use super::{FAULTS, Point, VARIABLE};
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::atomic::{AtomicU64, AtomicUsize};

    /// The variable that names a place to panic at, and a count.
    const PANIC_VARIABLE: &str = "RINGWAY_PANIC_POINT";

    /// The point's place in [`Point::ALL`], and one; 0 for none.
    static POINT: AtomicUsize = AtomicUsize::new(0);
    static LEFT: AtomicU64 = AtomicU64::new(0);

    /// Reads [`VARIABLE`]. True if there is one.
    ///
    /// # Panics
    /// If it is not `name:count` with a point's name and a count of at least 1.
    pub fn arm() -> bool {
        let Ok(word) = std::env::var(VARIABLE) else { return false };
        let read = || {
            let (name, count) = word.split_once(':')?;
            let at = Point::ALL.iter().position(|point| point.name() == name)?;
            Some((at, count.parse().ok().filter(|&count: &u64| count > 0)?))
        };
        let (at, count) = read().unwrap_or_else(|| panic!("{VARIABLE}={word}: not name:count"));
        LEFT.store(count, Relaxed);
        POINT.store(at + 1, Relaxed);
        true
    }

    /// Which operations fail.
    #[derive(Debug, Default)]
    struct Faults {
        eio: Option<(u64, u64)>,
        enospc: Option<(u64, u64)>,
        full: Option<(u64, u64)>,
        sync: u64,
    }

    impl Faults {
        fn read() -> Self {
            let word = std::env::var(FAULTS).unwrap_or_default();
            let mut faults = Self::default();
            for part in word.split(',').filter(|part| !part.is_empty()) {
                let place = |text: &str| {
                    let (every, at) = text.split_once(':')?;
                    Some((every.parse().ok().filter(|&every: &u64| every > 0)?, at.parse().ok()?))
                };
                let read = match part.split_once('=') {
                    Some(("eio", text)) => place(text).map(|place| faults.eio = Some(place)),
                    Some(("enospc", text)) => place(text).map(|place| faults.enospc = Some(place)),
                    Some(("full", text)) => place(text).map(|part| faults.full = Some(part)),
                    Some(("sync", text)) => text.parse().ok().map(|sync| faults.sync = sync),
                    _ => None,
                };
                assert!(read.is_some(), "{FAULTS}={word}: '{part}' is none of them");
            }
            faults
        }
    }

    /// See [`injected!`](crate::injected).
    pub fn injected(result: i32, write: bool, sync: bool, offset: u64, len: u64) -> i32 {
        static FAULTY: OnceLock<Faults> = OnceLock::new();
        static SYNCS: AtomicU64 = AtomicU64::new(0);
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let faults = FAULTY.get_or_init(Faults::read);
        let (first, end) = (offset / 512, (offset + len).div_ceil(512));
        let hits = |place: Option<(u64, u64)>| {
            place.is_some_and(|(every, at)| (first..end).any(|sector| sector % every == at))
        };
        let is_full = |full: Option<(u64, u64)>| {
            full.is_some_and(|(every, fail)| WRITES.fetch_add(1, Relaxed) % every < fail)
        };
        if result < 0 {
            result
        } else if write && hits(faults.eio) {
            -libc::EIO
        } else if write && (hits(faults.enospc) || is_full(faults.full)) {
            -libc::ENOSPC
        } else if sync && faults.sync != 0 && SYNCS.fetch_add(1, Relaxed) + 1 == faults.sync {
            -libc::EIO
        } else {
            result
        }
    }

    /// A place was reached.
    #[inline]
    pub fn reached(point: Point) {
        if POINT.load(Relaxed) == point as usize + 1 && LEFT.fetch_sub(1, Relaxed) == 1 {
            die();
        }
    }

    /// Where to panic, and how often the place is passed before that, and one.
    static PANIC: OnceLock<Option<(String, AtomicU64)>> = OnceLock::new();

    /// A place was reached at which a panic can be asked for.
    ///
    /// # Panics
    /// If that is asked for; or if the variable is not `name:count`.
    #[inline]
    pub fn panics_at(name: &str) {
        let asked = PANIC.get_or_init(|| {
            let word = std::env::var(PANIC_VARIABLE).ok()?;
            let read = word.split_once(':').and_then(|(name, n)| Some((name, n.parse().ok()?)));
            let (name, count) = read.unwrap_or_else(|| panic!("{PANIC_VARIABLE}={word}"));
            Some((name.to_owned(), AtomicU64::new(count)))
        });
        if let Some((place, left)) = asked {
            if place == name && left.fetch_sub(1, Relaxed) == 1 {
                panic!("told to panic at {name}");
            }
        }
    }

    #[cold]
    fn die() -> ! {
        // SAFETY: no memory is involved. The kernel lets this thread make no further step.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        // A filter of system calls may forbid that.
        std::process::abort()
    }
}
