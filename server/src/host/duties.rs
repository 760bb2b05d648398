//! What the helper is there for.

use super::state::StateDir;
use crate::sandbox::Account;
use crate::xen::Here;

/// What a helper is to do.
#[derive(Debug)]
pub(crate) struct Duties {
    /// Whom it acts for once the daemon has started.
    pub(crate) account: Option<Account>,
    /// Whether disks may be added later.
    pub(crate) adds: bool,
    /// Whether sockets are given to other groups from the start.
    pub(crate) groups: bool,
    /// Whether disks have to be polled.
    pub(crate) iopoll: bool,
    /// What guests of this Xen host need.
    pub(crate) xen: Option<Here>,
    /// Where to keep what outlives the daemon.
    pub(crate) state_dir: Option<StateDir>,
}
