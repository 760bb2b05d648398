//! What the helper process gives up: it opens what it is told to, and does nothing else.

use super::{Account, calls, files, filter, filters};
use anyhow::Context;
use ringway_control::config::Sandbox as Mode;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// What only some helpers do.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HelperNeeds {
    /// It acts as another user.
    pub(crate) account: bool,
    /// It tries whether a device can be polled, with a ring of io_uring.
    pub(crate) iopoll: bool,
    /// It makes sockets for groups that are named.
    pub(crate) groups: bool,
    /// It makes clones, or reference counts of images right, or may have to.
    pub(crate) clones: bool,
    /// It may have to give them to those afterwards, because it is not root.
    pub(crate) gives: bool,
    /// It asks NVMe namespaces what they are.
    pub(crate) nvme: bool,
    /// It connects to NBD servers of other hosts.
    pub(crate) network: bool,
}

/// To be called by its only thread.
///
/// # Errors
/// That the kernel takes no filter; the helper should end then.
pub(crate) fn confine_helper(mode: Mode, needs: HelperNeeds) -> anyhow::Result<()> {
    files::close_the_rest(needs.network);
    if !filters(mode) {
        return Ok(());
    }
    let calls = calls::helper(needs);
    let others = filter::compile(&calls, mode)?;
    filter::install(&filter::compile_refusals(&calls)?)?;
    filter::install(&others)
}

/// For the process that looks up hosts, by its only thread: it reads files and asks servers of names as the
/// host's resolver does it, which may be done by any library. So there is no list of its system calls.
///
/// # Errors
/// That it keeps rights; it should end then.
pub(crate) fn confine_resolver(mode: Mode, account: Option<&Account>) -> anyhow::Result<()> {
    if mode != Mode::Off {
        files::close_all_but_reading();
    }
    match account {
        Some(account) => account.become_it(),
        None => {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).context("cannot give up capabilities")
        }
    }
}
