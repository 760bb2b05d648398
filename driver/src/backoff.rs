//! How often to try to reach a server that is not there.

use std::time::Duration;

/// How long to wait before trying once more to reach a server that has not been there for `waited`: a
/// sixteenth of that, so that a short absence is not made much longer and a long one costs nothing.
pub(crate) fn retry_after(waited: Duration) -> Duration {
    (waited / 16).clamp(Duration::from_micros(250), Duration::from_millis(20))
}
