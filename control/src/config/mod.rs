//! What a daemon is told to do, whether by options or by a file.

#[cfg(any(test, fuzzing))]
pub mod case;
mod claim;
mod cpus;
mod disk;
mod file;
mod plan;
mod sockets;
mod xen;
mod xen_args;

pub use claim::{Claim, Location};
pub use cpus::CpuList;
pub use disk::{
    Choice, DiskArgs, DiskSpec, Format, Place, cache_modes, engines, is_unreal, paths, source,
};
pub use file::read;
pub use plan::{DaemonArgs, EachDisk, Plan, Sandbox, cpus};
pub use sockets::{SocketMode, SocketRule};
pub use xen::Attached;
pub use xen_args::{XenArgs, XenPlan};
