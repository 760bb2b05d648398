//! How long a disk is shut after its front-end has held up other disks.
//!
//! A client that makes a worker's notification block costs all guests of that worker up to 200 ms, and
//! its connection. Were that all, it could connect again and go on. So the next connection waits, twice
//! as long each time: in the long run one disk's clients cost neighbours 200 ms a minute at most.

use std::time::{Duration, Instant};

/// The first pause.
const FIRST: Duration = Duration::from_secs(1);
/// The longest.
const LONGEST: Duration = Duration::from_secs(64);
/// After so long without an offence the next pause is the first again.
const FORGIVEN: Duration = Duration::from_secs(3600);

/// The offences of the front-ends of one disk.
#[derive(Debug, Default)]
pub(crate) struct Penalty {
    /// The last pause, and when it is over.
    last: Option<(Duration, Instant)>,
}

impl Penalty {
    /// Another one. Returns the pause that begins.
    pub(crate) fn offended(&mut self, now: Instant) -> Duration {
        let pause = match self.last {
            Some((pause, end)) if now < end + FORGIVEN => (2 * pause).min(LONGEST),
            _ => FIRST,
        };
        self.last = Some((pause, now + pause));
        pause
    }

    /// What is left of the pause.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.last.map_or(Duration::ZERO, |(_, end)| end.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b21_pauses_double_and_are_forgiven() {
        let (mut penalty, mut now) = (Penalty::default(), Instant::now());
        assert_eq!(penalty.left(now), Duration::ZERO);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let pause = penalty.offended(now);
            pauses.push(pause.as_secs());
            assert_eq!(penalty.left(now), pause);
            now += pause;
            assert_eq!(penalty.left(now), Duration::ZERO);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(penalty.offended(now + Duration::from_secs(3000)), LONGEST);
        assert_eq!(penalty.offended(now + Duration::from_secs(10_000)), FIRST);
    }
}
