//! What a daemon is told to do, whether by options or by a file.

#[cfg(any(test, fuzzing))]
mod case;
mod claim;
mod cpus;
mod disk;
mod file;
mod plan;
mod sockets;
mod xen;
mod xen_args;

pub(crate) use claim::{Claim, Location};
pub(crate) use cpus::CpuList;
pub(crate) use disk::{
    Choice, DiskArgs, DiskSpec, Format, Place, cache_modes, engines, is_unreal, paths, source,
};
pub(crate) use file::read;
pub(crate) use plan::{DaemonArgs, EachDisk, Plan, Sandbox, cpus};
pub(crate) use sockets::{SocketMode, SocketRule};
pub(crate) use xen::Attached;
pub(crate) use xen_args::{XenArgs, XenPlan};
