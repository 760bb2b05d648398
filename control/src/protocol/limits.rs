//! Words about limits.

#![allow(missing_docs, reason = "docs/control.md says what each field means, for all programs")]

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Limits that disks share.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LimitGroupFacts {
    pub name: String,
    pub limits: BTreeMap<String, u64>,
    /// The numbers of its disks.
    pub disks: Vec<u64>,
}

/// `limit`, of a disk or of a group.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Limited {
    pub id: Option<u64>,
    pub image: Option<String>,
    /// The group itself, or that of the disk.
    pub group: Option<String>,
    pub limits: BTreeMap<String, u64>,
    /// The group is no more.
    #[serde(default)]
    pub removed: bool,
}
