//! In the place of `xen.rs` and `toolstack.rs`, in a build without the feature `xen`: [`prepare`] refuses, so that nothing
//! of Xen's ever comes about.

use super::disks::Disks;
use super::host::Host;
use anyhow::bail;
use ringway_control::config::XenPlan;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// What guests of a Xen host need: there is none.
pub(crate) trait Access: Send + Sync {}

/// Who could open it.
#[derive(Debug)]
pub(crate) enum Here {}

impl Access for Here {}

impl Here {
    pub(crate) fn records(&self) -> BorrowedFd<'_> {
        match *self {}
    }
}

/// How a session would be.
pub(crate) enum SessionOptions {}

/// A thread that would hear the toolstack.
pub(super) enum Toolstack {}

pub(super) fn session(_: &XenPlan, _: &Host) -> Option<SessionOptions> {
    None
}

/// # Errors
/// Always.
pub(super) fn prepare(_: &XenPlan) -> anyhow::Result<Here> {
    bail!(
        "--xen: this build of ringway serves no guests of Xen. Take one with the feature 'xen', which \
         is there unless it was left out"
    )
}

/// # Errors
/// Always.
pub(super) fn claim(plan: &XenPlan) -> anyhow::Result<Option<File>> {
    match prepare(plan)? {}
}

impl Toolstack {
    /// # Errors
    /// Always.
    pub(super) fn listen(
        _: &Arc<Disks>,
        plan: &Arc<XenPlan>,
        _: Option<File>,
    ) -> anyhow::Result<Self> {
        match prepare(plan)? {}
    }
}

/// System calls of its data threads.
pub(crate) fn worker_ioctls() -> Vec<u32> {
    Vec::new()
}

/// Those of its sessions.
pub(crate) fn session_ioctls() -> Vec<u32> {
    Vec::new()
}

pub(super) fn attach_line(_: &Path) -> String {
    String::new()
}
