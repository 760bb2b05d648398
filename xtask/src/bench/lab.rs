//! The place of measurement: options with nothing left open.

use crate::bench::options::{self, Common};
use std::path::PathBuf;

/// The place of measurement: options with nothing left open.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) common: Common,
    /// Seconds measured per cell.
    pub(crate) seconds: f64,
    /// The daemon's binary.
    pub(crate) daemon: PathBuf,
}

impl Lab {
    /// The cores of the server, as `taskset` has them.
    pub(crate) fn server_list(&self) -> String {
        options::cpu_list(&self.common.server_cpus)
    }
}
