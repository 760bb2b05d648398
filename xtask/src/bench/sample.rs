//! What one measurement of one contestant has given.

use serde::Serialize;

/// One measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    pub(crate) iops: f64,
    pub(crate) mb_s: f64,
    /// The server's CPU time per request, in nanoseconds.
    pub(crate) server_ns: Option<f64>,
    /// The client's CPU time per request, in nanoseconds.
    pub(crate) client_ns: Option<f64>,
    /// Client to server, per request.
    pub(crate) kicks: Option<f64>,
    /// Server to client, per request; at most so many.
    pub(crate) calls: Option<f64>,
    /// The server's context switches per request.
    pub(crate) switches: Option<f64>,
    pub(crate) latency: Option<Latency>,
    /// What others have had of the cores in use meanwhile, the host below included.
    pub(crate) foreign_percent: f64,
}

/// In microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) submit_us: f64,
    pub(crate) complete_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p9999_us: f64,
}
