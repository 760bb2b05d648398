//! The place of measurement: options with nothing left open.

use crate::bench::options::{self, Common};
use std::path::PathBuf;

/// The place of measurement: options with nothing left open.
#[derive(Clone, Debug)]
pub(crate) struct Lab {
    pub(crate) common: Common,
    /// Seconds measured per cell.
    pub(crate) seconds: f64,
    /// The daemon's binary.
    pub(crate) daemon: PathBuf,
    /// The share of the cores in use that others may have, in percent: what was measured while they
    /// had more is measured again.
    pub(crate) foreign_max: Option<f64>,
}

impl Lab {
    /// The cores of the server, as `taskset` has them.
    pub(crate) fn server_list(&self) -> String {
        options::cpu_list(&self.common.server_cpus)
    }
}
