//! How often the log is told of what clients and guests can provoke.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of one kind in a minute.
const LINES_MAX: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);

/// Lets ten lines of one kind pass in a minute and counts the others.
///
/// ```
/// # use ringway_export::Limit;
/// static REFUSED: Limit = Limit::new();
/// if let Some(pass) = REFUSED.pass() {
///     tracing::warn!(suppressed = pass.suppressed, "refused");
/// }
/// ```
#[derive(Debug, Default)]
pub struct Limit(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    begun: Option<Instant>,
    passed: u32,
    suppressed: u64,
}

/// Leave to log one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Lines of this kind that were not written since the last one that was; `None` if there were
    /// none.
    pub suppressed: Option<u64>,
}

impl Limit {
    /// A limit that nothing has met yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(Window { begun: None, passed: 0, suppressed: 0 }))
    }

    /// Asks to log one line.
    #[must_use]
    pub fn pass(&self) -> Option<Pass> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<Pass> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= MINUTE) {
            (window.begun, window.passed) = (Some(now), 0);
        }
        if window.passed == LINES_MAX {
            window.suppressed += 1;
            return None;
        }
        window.passed += 1;
        let suppressed = std::mem::take(&mut window.suppressed);
        Some(Pass { suppressed: (suppressed > 0).then_some(suppressed) })
    }
}

/// The kinds of lines that the clients and the guest of one disk can provoke.
#[derive(Debug, Default)]
pub struct Limits {
    /// A front-end is there.
    pub connected: Limit,
    /// It has gone, in order.
    pub disconnected: Limit,
    /// A connection could not be taken, or was given up.
    pub ended: Limit,
    /// Less is offered to a guest than there is.
    pub offered: Limit,
    /// A message or a ring was refused.
    pub refused: Limit,
    /// A queue was broken by its guest.
    pub broken: Limit,
    /// A front-end waits for the one that is there to go.
    pub waiting_clients: Limit,
    /// A queue that is to stop waits for the disk.
    pub waiting: Limit,
    /// What a predecessor left is carried out.
    pub recovered: Limit,
    /// What a guest has had set is not known, or is over.
    pub settled: Limit,
    /// The image's lock is waited for, comes or goes.
    pub locked: Limit,
    /// A front-end does not hear what it is told.
    pub deaf: Limit,
    /// Something of the host fails, and is tried again.
    pub retried: Limit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e04_ten_lines_a_minute_pass_and_the_rest_is_counted() {
        let (limit, begun) = (Limit::new(), Instant::now());
        let passed = |seconds| limit.pass_at(begun + Duration::from_secs(seconds));
        let first: Vec<_> = (0..10_000).filter_map(|_| passed(0)).collect();
        assert_eq!(first, [Pass { suppressed: None }; 10]);
        assert_eq!(passed(59), None);
        assert_eq!(passed(60), Some(Pass { suppressed: Some(9991) }));
        assert_eq!(passed(61), Some(Pass { suppressed: None }));
    }
}
