//! What is answered of a disk that is served no more.

use serde::{Deserialize, Serialize};

/// `add` answers with `DiskFacts`, `remove` with this.
#[derive(Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Removed {
    pub id: u64,
    pub image: String,
    /// False if the disk is stuck: what was in flight may still land.
    pub drained: bool,
    /// A front-end was connected: its guest has lost the disk.
    #[serde(default)]
    pub connected: bool,
    /// Requests that were held and that nobody has answered: whoever serves this front-end next at its
    /// socket carries them out.
    #[serde(default)]
    pub held: u64,
}
