//! What `reload` has done.

use serde::{Deserialize, Serialize};

/// What has become of the disks of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Reloaded {
    /// Images of disks that are served from now on.
    pub added: Vec<String>,
    /// Of those that are served no more.
    pub removed: Vec<String>,
    /// Of these the ones whose clone is deleted with them, as they are ephemeral.
    pub deleted: Vec<String>,
    /// Of those that have other limits now, and `limit-group NAME` of groups.
    pub limited: Vec<String>,
    /// Of those whose failed requests are treated in another way now.
    pub policies: Vec<String>,
    /// How many disks of the file stay as they are.
    pub unchanged: usize,
    /// What the file says now and the daemon cannot do while it runs.
    pub left: Vec<LeftOf>,
    /// What could not be done once it was too late to undo the rest.
    pub failed: Vec<FailedOf>,
    /// Nothing was done: this is what would be.
    pub dry_run: bool,
}

/// Words that take a restart.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LeftOf {
    /// Of this disk; of the daemon as a whole if there is none.
    pub image: Option<String>,
    pub words: Vec<String>,
}

/// A disk that could not be added, removed or limited.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailedOf {
    pub image: String,
    pub why: String,
}
