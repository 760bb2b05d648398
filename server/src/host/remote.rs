//! Disks that are elsewhere: connections to servers, made anew, and images of Ceph clusters.

use super::Host;
use anyhow::Context;
use ringway_control::config::DiskSpec;
use ringway_disk::open::ClusterDisk;
use ringway_disk::{Disk, Source};
use ringway_nbd_client::{Connected, Timeouts};
use ringway_terminal::reasons::in_full;

impl Host {
    /// Reads what has to be read from files for a disk of a Ceph cluster; `None` if it is none. It is opened
    /// in the sandbox.
    ///
    /// # Errors
    /// What is wrong with it; nothing was created or changed then.
    pub(crate) fn prepare(&self, spec: &DiskSpec) -> anyhow::Result<Option<ClusterDisk>> {
        let options = self.local.options(spec);
        let Source::Rbd { target, access } = &options.source else { return Ok(None) };
        Ok(Some(ClusterDisk::prepare(target, access, &options)?))
    }

    /// From now on a lost connection of a disk to its server comes back by itself.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn supervise(&self, disk: &Disk, spec: &DiskSpec) -> anyhow::Result<()> {
        let Some(remote) = disk.remote() else { return Ok(()) };
        let (helper, options) = (self.helper.clone(), self.local.options(spec));
        let again = move || {
            let disk = match &helper {
                Some(helper) => helper.open(&options, false)?.disk,
                None => ringway_disk::open(&options)?,
            };
            let negotiated = disk.remote().context("it is an export no more")?.negotiated();
            Ok(Connected { socket: disk.file(), negotiated })
        };
        let again = move || again().map_err(|error: anyhow::Error| in_full(&error).into());
        let timeouts = Timeouts { give_up: spec.reconnect_timeout, ..Timeouts::default() };
        remote.supervise(Box::new(again), timeouts).context("cannot look after its connection")
    }
}
