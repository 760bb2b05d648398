//! The clock of a world.

use super::world::here;
use std::ops::{Add, Sub};
use std::time::Duration;

/// As of std.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// As of std.
    #[must_use]
    pub fn now() -> Self {
        Self(Duration::from_nanos(here().map_or(0, |(world, _)| world.now())))
    }

    /// As of std.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, more: Duration) -> Self {
        Self(self.0 + more)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, other: Self) -> Duration {
        self.0.saturating_sub(other.0)
    }
}
