//! Words about requests that the disk has failed and that are held.

#![allow(missing_docs, reason = "docs/control.md says what each field means, for all programs")]

use ringway_disk::{Disk, HeldRequests};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What becomes of requests that a disk fails.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorFacts {
    /// `report`, `hold`
    pub on_read_error: String,
    pub on_write_error: String,
    pub on_enospc: String,
    /// In seconds; `None` is for ever.
    pub hold_timeout: Option<u64>,
}

impl From<&Disk> for ErrorFacts {
    fn from(disk: &Disk) -> Self {
        let policy = disk.error_policy();
        Self {
            on_read_error: policy.on_read.to_string(),
            on_write_error: policy.on_write.to_string(),
            on_enospc: disk.on_enospc().to_string(),
            hold_timeout: policy.hold_timeout.map(|time| time.as_secs()),
        }
    }
}

/// Requests that are held.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HeldFacts {
    pub count: u64,
    /// For how long there have been some.
    pub age_us: u64,
    /// Of the latest one: `read`, `write`, `erase`.
    pub operation: String,
    /// Its error; `None` if the host told none.
    pub errno: Option<i32>,
    /// The same in words.
    pub error: String,
    /// In how long one is tried again by itself; `None` if they wait for `retry`.
    pub retry_us: Option<u64>,
}

impl From<HeldRequests> for HeldFacts {
    fn from(held: HeldRequests) -> Self {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            count: held.count,
            age_us: micros(held.age),
            operation: held.op.name().into(),
            errno: (held.errno != 0).then_some(held.errno),
            error: held.reason(),
            retry_us: held.retry_in.map(micros),
        }
    }
}

/// `retry`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Retried {
    pub id: u64,
    pub image: String,
    /// Requests that were tried again, or failed.
    pub requests: usize,
    /// Their guest was told that they have failed.
    pub failed: bool,
    /// Of `flushes`: true if one had failed. `null` if that was not asked for.
    pub flushes: Option<bool>,
    /// What is still held.
    pub held: Option<HeldFacts>,
}
