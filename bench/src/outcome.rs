//! What was seen of a target.

use crate::backend::Effort;
use crate::counters::{Frames, Tick};
use crate::host::Host;
use crate::verifier::Judged;

/// What was seen of a target.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How long was counted.
    pub seconds: f64,
    /// All requests.
    pub(crate) tick: Tick,
    /// Over time.
    pub(crate) frames: Frames,
    /// CPU time of this process but the server in it, in nanoseconds.
    pub client_ns: u64,
    /// CPU time of the server, in nanoseconds, if it is known.
    pub server_ns: Option<u64>,
    /// What else went on meanwhile.
    pub host: Host,
    /// Of targets with rings.
    pub(crate) effort: Option<Effort>,
    /// What `--verify` has found.
    pub(crate) judged: Judged,
}

impl Outcome {
    /// Requests that were counted.
    pub fn done(&self) -> u64 {
        self.tick.done()
    }

    /// Bytes read and written.
    pub fn bytes(&self) -> u64 {
        self.tick.bytes()
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.done() as f64 / self.seconds
    }

    /// What the queues of a served disk have counted.
    pub fn effort(&self) -> Option<&Effort> {
        self.effort.as_ref()
    }

    /// From a request being due to its completion being seen, in nanoseconds: the mean, or a percentile
    /// (0 to 100). `None` if no times were taken.
    pub fn latency_ns(&self, percentile: Option<f64>) -> Option<f64> {
        let lat = self.tick.total().lat;
        if lat.is_empty() {
            return None;
        }
        Some(percentile.map_or_else(|| lat.mean(), |p| lat.value_at_percentile(p) as f64))
    }
}
