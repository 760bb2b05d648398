//! The path of one disk, shared by all its queues.

use crate::auto::{Auto, Seen};
use crate::kind::{Path, PathKind};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// What is told when the choice of a disk changes.
pub type OnSwitch = Box<dyn Fn(Path) + Send + Sync>;

/// The path of one disk: what was asked for, and what is in use.
///
/// Its queues report to it by their [`Follower`](crate::Follower)s and take the path from it. No way
/// of a request takes the lock: it is a `try_lock` fifty times a second.
pub struct PathBoard {
    kind: PathKind,
    /// A [`Path`], which may be on trial.
    present: AtomicU8,
    chosen: AtomicU8,
    switches: AtomicU64,
    /// Held for some nanoseconds, fifty times a second; nobody waits for it.
    pub(crate) auto: Mutex<Auto>,
    on_switch: OnceLock<OnSwitch>,
}

impl fmt::Debug for PathBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PathBoard").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl PathBoard {
    /// A board whose clock begins at 0.
    #[must_use]
    pub fn new(kind: PathKind) -> Self {
        let path = if kind == PathKind::Request { Path::Request } else { Path::Bio };
        Self {
            kind,
            present: AtomicU8::new(path as u8),
            chosen: AtomicU8::new(path as u8),
            switches: AtomicU64::new(0),
            auto: Mutex::new(Auto::new(0)),
            on_switch: OnceLock::new(),
        }
    }

    /// What was asked for.
    #[must_use]
    pub fn kind(&self) -> PathKind {
        self.kind
    }

    /// The path to use now, which may be on trial.
    #[must_use]
    pub fn present(&self) -> Path {
        path_of(&self.present)
    }

    /// The path that was chosen; short trials of the other one do not show.
    #[must_use]
    pub fn chosen(&self) -> Path {
        path_of(&self.chosen)
    }

    /// How often the choice has changed.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches.load(Relaxed)
    }

    /// Calls `tell` whenever the choice has changed, from the thread of a queue: it must neither block
    /// nor allocate. The first one is kept.
    pub fn on_switch(&self, tell: OnSwitch) {
        // A second listener would be a mistake of ours; the first one goes on hearing.
        let kept = self.on_switch.set(tell).is_ok();
        debug_assert!(kept, "one listener");
    }

    /// Hands in what a queue has seen. False if another queue is doing so right now.
    pub(crate) fn report(&self, now: u64, seen: &Seen) -> bool {
        let Ok(mut auto) = self.auto.try_lock() else { return false };
        auto.look(now, seen);
        self.present.store(auto.path() as u8, Relaxed);
        let chosen = auto.chosen();
        if self.chosen.swap(chosen as u8, Relaxed) != chosen as u8 {
            self.switches.store(auto.switches(), Relaxed);
            if let Some(tell) = self.on_switch.get() {
                tell(chosen);
            }
        }
        true
    }
}

fn path_of(word: &AtomicU8) -> Path {
    if word.load(Relaxed) == Path::Request as u8 { Path::Request } else { Path::Bio }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const MS: u64 = 1_000_000;

    /// A stream on a disk that carries three times as much if requests are merged.
    fn stream(path: Path) -> Seen {
        match path {
            Path::Bio => Seen {
                requests: 50,
                bytes: 50 * 4096,
                sampled: 50,
                adjacent: 50,
                in_flight: 50 * 32,
                timed: 50,
                latency: 50 * 100_000,
                ..Seen::default()
            },
            Path::Request => Seen {
                requests: 150,
                bytes: 150 * 4096,
                plugged: 150,
                merged: 140,
                ..Seen::default()
            },
        }
    }

    #[test]
    fn a_choice_is_told_once_and_shown() {
        let board = PathBoard::new(PathKind::Auto);
        assert_eq!((board.present(), board.chosen(), board.switches()), (Path::Bio, Path::Bio, 0));
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        board.on_switch(Box::new(move |path| hears.lock().unwrap().push(path)));
        let mut tried = false;
        for step in 1..400 {
            assert!(board.report(step * 5 * MS, &stream(board.present())));
            tried |= board.present() == Path::Request && board.chosen() == Path::Bio;
        }
        assert!(tried, "the other path is tried before it is chosen");
        assert_eq!((board.present(), board.chosen()), (Path::Request, Path::Request));
        assert_eq!((board.switches(), &*told.lock().unwrap()), (1, &vec![Path::Request]));
    }

    #[test]
    fn nobody_waits_for_a_board_that_another_queue_reports_to() {
        let board = PathBoard::new(PathKind::Auto);
        let held = board.auto.lock().unwrap();
        assert!(!board.report(1, &stream(Path::Bio)));
        drop(held);
        assert_eq!(board.auto.lock().unwrap().seen, Seen::default());
        assert!(board.report(1, &stream(Path::Bio)));
        assert_eq!(board.auto.lock().unwrap().seen, stream(Path::Bio));
    }

    #[test]
    fn a_board_begins_as_it_was_asked_to() {
        for (kind, path) in [
            (PathKind::Bio, Path::Bio),
            (PathKind::Request, Path::Request),
            (PathKind::Auto, Path::Bio),
        ] {
            let board = PathBoard::new(kind);
            assert_eq!((board.kind(), board.present(), board.chosen()), (kind, path, path));
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!((Path::Bio.name(), Path::Request.name()), ("bio", "request"));
        assert_eq!(PathKind::ALL.map(PathKind::name), ["bio", "request", "auto"]);
    }
}
