//! What a daemon is told to do, whether by options or by a file.

mod ceph;
mod claim;
mod clone;
mod counts;
mod cpus;
mod disk;
mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzz_case;
mod limits;
mod metrics;
mod nbd;
mod nbd_disk;
mod nbd_server;
mod nearest;
mod origins;
mod overrule;
mod plan;
mod seconds;
mod sockets;
mod source;
mod xen;
mod xen_args;

pub use ceph::CephArgs;
pub use claim::{Claim, FileIdentity, Location};
pub use cpus::CpuList;
pub use disk::{
    Choice, DiskArgs, DiskSpec, Format, Place, Repair, XenDevice, cache_modes, engines, paths,
};
pub use file::{parse, read};
pub use limits::{LimitArgs, LimitGroup, limit_words};
pub use metrics::MetricsAt;
pub use nbd::{NbdAddress, NbdPlace, NbdSecurity};
pub use nearest::hint;
pub(crate) use nearest::with_hint;
pub use origins::Origins;
pub use plan::{DaemonArgs, EachDisk, Plan, Sandbox, check_limit_group, cpus};
pub use sockets::{SocketMode, SocketRule};
pub use source::{base_source, is_elsewhere, is_unreal, source};
pub use xen::{Attached, XenPlan};
pub use xen_args::{XenArgs, XenData};

use std::path::Path;

/// The folder that a path needs and that is not there.
pub fn missing_folder(path: &Path) -> Option<std::path::Display<'_>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    (!folder.exists()).then(|| folder.display())
}
