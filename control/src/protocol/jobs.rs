//! Words about what takes its time while a disk is served.

#![allow(missing_docs, reason = "docs/control.md says what each field means, for all programs")]

use serde::{Deserialize, Serialize};

/// What is under way with the image of a disk, or was last.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobFacts {
    /// `flatten`, `commit`.
    pub job: String,
    pub state: JobState,
    /// So many bytes of the disk are looked through, of so many.
    pub done_bytes: u64,
    pub total_bytes: u64,
    /// What was copied: the rest was there, or is zeroes.
    pub copied_bytes: u64,
    /// How many bytes it may copy in a second.
    #[serde(default)]
    pub bps: Option<u64>,
    /// For how long no requests were taken, when it was done.
    #[serde(default)]
    pub blackout_us: Option<u64>,
    /// Why it has failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    Running,
    Done,
    Failed,
    Cancelled,
}

/// `flatten`, `commit`.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobOf {
    pub id: u64,
    pub image: String,
    pub job: JobFacts,
}
