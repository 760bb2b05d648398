//! How often there is a line in the log about what clients and guests can provoke.

use crate::command::Rouse;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::{Level, info, warn};

/// Lines of one kind in a minute.
const LINES_MAX: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);

/// Lets ten lines of one kind pass in a minute and counts the others.
///
/// ```
/// # use ringway_export::WarningLimit;
/// # use std::sync::LazyLock;
/// static REFUSED: LazyLock<WarningLimit> = LazyLock::new(|| WarningLimit::warnings(None, "what was refused"));
/// if let Some(pass) = REFUSED.pass() {
///     tracing::warn!(suppressed = pass.suppressed, "refused");
/// }
/// ```
#[derive(Debug)]
pub struct WarningLimit(Arc<LimitInner>);

#[derive(Debug)]
struct LimitInner {
    disk: Option<Box<str>>,
    level: Level,
    /// What its lines tell of.
    what: &'static str,
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    begun: Option<Instant>,
    passed: u32,
    suppressed: u64,
}

/// Leave to log one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Lines of this kind that were not written since the last one that was, and not counted by a line since;
    /// `None` if there were none.
    pub suppressed: Option<u64>,
}

/// Kinds with lines that nobody has reported yet, if there is somebody who reports them.
struct Unreported {
    kinds: Mutex<Vec<Arc<LimitInner>>>,
    rouse: OnceLock<Rouse>,
}

static UNREPORTED: Unreported = Unreported::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on `rouse` is called when [`report_suppressed`] has something to do. Only the first call of a
/// process counts.
pub fn on_suppressed(rouse: Rouse) {
    let _ = UNREPORTED.rouse.set(rouse);
}

/// Logs how many lines of a kind were suppressed once its minute is over, or of `all` kinds: no line of theirs has
/// named the count. In how long there is more to log, if there is.
pub fn report_suppressed(now: Instant, all: bool) -> Option<Duration> {
    UNREPORTED.report(now, all)
}

impl Unreported {
    const fn new() -> Self {
        Self { kinds: Mutex::new(Vec::new()), rouse: OnceLock::new() }
    }

    #[cold]
    fn add(&self, kind: &Arc<LimitInner>) {
        let Some(rouse) = self.rouse.get() else { return };
        let mut kinds = lock(&self.kinds);
        if !kinds.iter().any(|other| Arc::ptr_eq(other, kind)) {
            kinds.push(Arc::clone(kind));
        }
        drop(kinds);
        rouse();
    }

    fn report(&self, now: Instant, all: bool) -> Option<Duration> {
        let (mut next, mut due) = (None::<Duration>, Vec::new());
        lock(&self.kinds).retain(|kind| {
            let mut window = lock(&kind.window);
            let over = window.begun.map_or(now, |begun| begun + MINUTE);
            let left = over.saturating_duration_since(now);
            if window.suppressed > 0 && !left.is_zero() && !all {
                next = Some(next.map_or(left, |next| next.min(left)));
                return true;
            }
            due.push((Arc::clone(kind), std::mem::take(&mut window.suppressed)));
            false
        });
        for (kind, suppressed) in due.into_iter().filter(|(_, suppressed)| *suppressed > 0) {
            let (disk, what) = (kind.disk.as_deref(), kind.what);
            if kind.level == Level::INFO {
                info!(disk, suppressed, "lines were left out: {what}");
            } else {
                warn!(disk, suppressed, "lines were left out: {what}");
            }
        }
        next
    }
}

impl WarningLimit {
    /// A limit of warnings that nothing has met yet; `what` they tell of, in a few words.
    #[must_use]
    pub fn warnings(disk: Option<&str>, what: &'static str) -> Self {
        Self::new(disk, Level::WARN, what)
    }

    /// As [`WarningLimit::warnings`], of what is no reason to worry.
    #[must_use]
    pub fn notes(disk: Option<&str>, what: &'static str) -> Self {
        Self::new(disk, Level::INFO, what)
    }

    fn new(disk: Option<&str>, level: Level, what: &'static str) -> Self {
        let (disk, window) = (disk.map(Box::from), Mutex::default());
        Self(Arc::new(LimitInner { disk, level, what, window }))
    }

    /// Asks to log one line.
    #[must_use]
    pub fn pass(&self) -> Option<Pass> {
        self.pass_at(Instant::now(), &UNREPORTED)
    }

    fn pass_at(&self, now: Instant, unreported: &Unreported) -> Option<Pass> {
        let mut window = lock(&self.0.window);
        if window.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= MINUTE) {
            (window.begun, window.passed) = (Some(now), 0);
        }
        if window.passed == LINES_MAX {
            window.suppressed += 1;
            let first = window.suppressed == 1;
            drop(window);
            if first {
                unreported.add(&self.0);
            }
            return None;
        }
        window.passed += 1;
        let suppressed = std::mem::take(&mut window.suppressed);
        Some(Pass { suppressed: (suppressed > 0).then_some(suppressed) })
    }
}

/// The kinds of lines that the clients and the guest of one disk can provoke.
#[derive(Debug)]
pub struct WarningLimits {
    /// A front-end is there.
    pub connected: WarningLimit,
    /// It has gone, in order.
    pub disconnected: WarningLimit,
    /// A connection could not be taken, or was given up.
    pub ended: WarningLimit,
    /// Less is offered to a guest than there is.
    pub offered: WarningLimit,
    /// A message or a ring was refused.
    pub refused: WarningLimit,
    /// A queue was broken by its guest.
    pub broken: WarningLimit,
    /// A front-end waits for the one that is there to go.
    pub waiting_clients: WarningLimit,
    /// A queue that is to stop waits for the disk.
    pub waiting: WarningLimit,
    /// What a predecessor left is carried out.
    pub recovered: WarningLimit,
    /// What a guest has had set is not known, or is over.
    pub settled: WarningLimit,
    /// The image's lock is waited for, comes or goes.
    pub locked: WarningLimit,
    /// A front-end does not take what it is sent.
    pub undelivered: WarningLimit,
    /// Held requests were left to whoever serves the guest next.
    pub left: WarningLimit,
    /// Something of the host fails, and is tried again.
    pub retried: WarningLimit,
}

impl WarningLimits {
    /// Of one disk.
    #[must_use]
    pub fn new(disk: &str) -> Self {
        let note = |what| WarningLimit::notes(Some(disk), what);
        let warning = |what| WarningLimit::warnings(Some(disk), what);
        Self {
            connected: note("front-ends that connected"),
            disconnected: note("front-ends that disconnected"),
            ended: warning("connections that were not taken, or given up"),
            offered: note("what is offered to a guest"),
            refused: warning("what was refused"),
            broken: warning("queues that their guest broke"),
            waiting_clients: warning("front-ends that wait for another to go"),
            waiting: warning("queues that wait for the disk"),
            recovered: note("what a predecessor left in flight"),
            settled: note("what the guest has had set"),
            locked: warning("the image's lock"),
            undelivered: note("messages that could not be delivered to a front-end"),
            left: note("held requests that stay unanswered"),
            retried: warning("what fails on this host, and is tried again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn e04_ten_lines_a_minute_pass_and_the_rest_is_counted() {
        let (limit, begun) = (WarningLimit::notes(None, "tests"), Instant::now());
        let unreported = Unreported::new();
        let passed = |seconds| limit.pass_at(begun + Duration::from_secs(seconds), &unreported);
        let first: Vec<_> = (0..10_000).filter_map(|_| passed(0)).collect();
        assert_eq!(first, [Pass { suppressed: None }; 10]);
        assert_eq!(passed(59), None);
        assert_eq!(passed(60), Some(Pass { suppressed: Some(9991) }));
        assert_eq!(passed(61), Some(Pass { suppressed: None }));
    }

    /// What no line of its kind has said is logged when the minute is over, or at the end, once.
    #[test]
    fn e04_the_count_is_logged_without_another_line() {
        let roused = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&roused);
        let unreported = Unreported::new();
        let rouse: Rouse = Arc::new(move || {
            counter.fetch_add(1, SeqCst);
        });
        assert!(unreported.rouse.set(rouse).is_ok());
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let limit = WarningLimit::warnings(Some("disk.img"), "tests");
        let suppressed = || lock(&limit.0.window).suppressed;
        let meet = |times, seconds| {
            let passes = (0..times).filter(|_| limit.pass_at(at(seconds), &unreported).is_some());
            passes.count()
        };
        assert_eq!(meet(10, 0), 10);
        assert_eq!((roused.load(SeqCst), unreported.report(at(0), false)), (0, None));
        assert_eq!(meet(5, 20), 0);
        assert_eq!(roused.load(SeqCst), 1, "once, and not for each");
        assert_eq!(unreported.report(at(20), false), Some(Duration::from_secs(40)));
        assert_eq!((suppressed(), unreported.report(at(60), false)), (5, None), "reported");
        assert_eq!(suppressed(), 0);
        assert_eq!(
            limit.pass_at(at(61), &unreported),
            Some(Pass { suppressed: None }),
            "not twice"
        );
        // A line has it first.
        assert_eq!(meet(10, 61), 9);
        assert_eq!((roused.load(SeqCst), suppressed()), (2, 1));
        assert_eq!(limit.pass_at(at(130), &unreported), Some(Pass { suppressed: Some(1) }));
        assert_eq!(unreported.report(at(130), false), None);
        // The end comes before the minute is over.
        assert_eq!(meet(10, 130), 9);
        assert_eq!((unreported.report(at(131), true), suppressed()), (None, 0));
    }
}
