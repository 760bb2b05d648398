//! Connections to servers that have disks, made anew.

use super::Host;
use anyhow::Context;
use ringway_control::config::DiskSpec;
use ringway_disk::Disk;
use ringway_nbd_client::{Connected, Patience};
use ringway_terminal::reasons::in_full;

impl Host {
    /// From now on a lost connection of a disk to its server comes back by itself.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn look_after(&self, disk: &Disk, spec: &DiskSpec) -> anyhow::Result<()> {
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
        let patience = Patience { give_up: spec.reconnect_timeout, ..Patience::default() };
        remote.supervise(Box::new(again), patience).context("cannot look after its connection")
    }
}
