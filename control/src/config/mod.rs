//! What a daemon is told to do, whether by options or by a file.

#[cfg(any(test, fuzzing))]
pub mod case;
mod claim;
mod cpus;
mod disk;
mod file;
mod limits;
mod metrics;
mod nearest;
mod plan;
mod sockets;
mod xen;
mod xen_args;

pub use claim::{Claim, Location};
pub use cpus::CpuList;
pub use disk::{
    Choice, DiskArgs, DiskSpec, Format, Place, XenDevice, cache_modes, engines, is_unreal, paths,
    source,
};
pub use file::read;
pub use limits::{LimitArgs, LimitGroup, limit_words};
pub use metrics::MetricsAt;
pub use nearest::hint;
pub use plan::{DaemonArgs, EachDisk, Plan, Sandbox, check_limit_group, cpus};
pub use sockets::{SocketMode, SocketRule};
pub use xen::{Attached, XenPlan};
pub use xen_args::{XenArgs, XenData};

use std::path::Path;

/// The folder that a path needs and that is not there.
pub fn missing_folder(path: &Path) -> Option<std::path::Display<'_>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    (!folder.exists()).then(|| folder.display())
}
