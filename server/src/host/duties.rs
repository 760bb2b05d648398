//! What the helper is there for.

use super::state::StateDir;
use crate::sandbox::Account;
use crate::xen::Here;
use ringway_nbd_client::Target;
use std::path::PathBuf;

/// What a helper is to do.
#[derive(Debug)]
pub(crate) struct Duties {
    /// Whom it acts for once the daemon has started.
    pub(crate) account: Option<Account>,
    /// Whether it acts for that user from its beginning: the daemon becomes it before it names anything.
    pub(crate) acts_for_it: bool,
    /// Whether disks may be added later.
    pub(crate) adds: bool,
    /// Whether those that it starts with may be told to change their files.
    pub(crate) changes: bool,
    /// Whether sockets are given to other groups from the start.
    pub(crate) groups: bool,
    /// Whether clones may have to be made, or reference counts made right, for disks that it starts with.
    pub(crate) clones: bool,
    /// Whether disks have to be polled.
    pub(crate) iopoll: bool,
    /// Whether there are disks with --engine nvme.
    pub(crate) nvme: bool,
    /// Exports that are disks from the start.
    pub(crate) exports: Vec<Target>,
    /// What guests of this Xen host need.
    pub(crate) xen: Option<Here>,
    /// The file that may be read again.
    pub(crate) configuration: Option<PathBuf>,
    /// Where to keep what outlives the daemon.
    pub(crate) state_dir: Option<StateDir>,
}
