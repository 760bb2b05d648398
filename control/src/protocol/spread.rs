//! How values are spread: exactly, and in few buckets.

use hdrhistogram::iterators::IterationValue;
use hdrhistogram::{Counter, Histogram};
use ringway_export::Latency;
use serde::{Deserialize, Serialize};

/// How long the timed requests of one operation took, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DurationsOf {
    /// `read`, `write`, `flush`, `erase`.
    pub operation: String,
    pub nanoseconds: Buckets,
}

/// How values are spread over a few buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Buckets {
    /// How many there are, also above the last bucket.
    pub count: u64,
    pub sum: u64,
    /// Pairs of the highest value of a bucket and how many are in it, rising.
    pub buckets: Vec<(u64, u64)>,
}

/// Latencies in nanoseconds, of the one request in about sixty that is timed.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Latencies {
    pub reads: Spread,
    pub writes: Spread,
    /// Flushes, discards, write-zeroes.
    pub others: Spread,
}

impl Latencies {
    /// With their buckets, if asked for.
    pub fn of(latency: &Latency, buckets: bool) -> Self {
        Self {
            reads: Spread::new(&latency.reads, buckets),
            writes: Spread::new(&latency.writes, buckets),
            others: Spread::new(&latency.others, buckets),
        }
    }
}

/// How values are spread; all 0 if there are none.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// How many there are.
    pub count: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
    /// If asked for: pairs of the highest value of a bucket and how many are in it, rising. The
    /// difference of two answers is the spread of what came in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<Vec<(u64, u64)>>,
}

impl Spread {
    /// With its buckets, if asked for.
    pub fn new<C: Counter>(histogram: &Histogram<C>, buckets: bool) -> Self {
        let pair =
            |step: IterationValue<C>| (step.value_iterated_to(), step.count_since_last_iteration());
        let buckets = buckets.then(|| histogram.iter_recorded().map(pair).collect());
        if histogram.is_empty() {
            return Self { buckets, ..Self::default() };
        }
        let at = |part| histogram.value_at_quantile(part);
        Self {
            count: histogram.len(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max(),
            buckets,
        }
    }
}
