//! Disks with processes of their own, beside the others.

use super::super::departure::Departure;
use super::super::isolate::{Isolated, Leaving, Spawner};
use super::super::served::lock;
use super::{BeingRemoved, Disks};
use anyhow::{anyhow, ensure};
use ringway_control::config::{Claim, DiskSpec};
use ringway_control::protocol::Happened;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

impl Disks {
    pub(super) fn spawner(&self) -> anyhow::Result<&Arc<Spawner>> {
        self.spawner.as_ref().ok_or_else(|| {
            anyhow!(
                "this daemon starts no processes for disks: start it with --isolate, or with \
                 isolate = true for one of its disks"
            )
        })
    }

    /// What hangs up when no process can be started any more; `None` if none ever could.
    pub(crate) fn end_of_spawner(&self) -> Option<BorrowedFd<'_>> {
        self.spawner.as_ref().map(|spawner| spawner.end())
    }

    /// Why processes of disks have no cgroups of their own, if there can be such processes.
    pub(crate) fn no_cgroups(&self) -> Option<&str> {
        self.spawner.as_ref().and_then(|spawner| spawner.no_cgroups.as_deref())
    }

    /// Lets those with processes of their own serve.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn launch_isolated(&self) -> anyhow::Result<()> {
        for disk in self.isolated() {
            disk.launch(self.spawner()?, &self.bell, &self.events)?;
        }
        Ok(())
    }

    /// The disks with processes of their own, in the order they came.
    pub(crate) fn isolated(&self) -> Vec<Arc<Isolated>> {
        lock(&self.isolated).clone()
    }

    /// Prints what was counted, here and in the processes of disks.
    pub(crate) fn tell_counts(&self) {
        self.workers().tell();
        self.isolated().iter().for_each(|disk| disk.tell_counts());
    }

    /// The daemon has started: from now on others have no more rights than it.
    ///
    /// # Errors
    /// That one of them is gone.
    pub(crate) fn started(&self) -> anyhow::Result<()> {
        self.host.started()?;
        self.spawner.as_ref().map_or(Ok(()), |spawner| spawner.started())
    }

    /// As [`Disks::remove`], of a disk with a process of its own.
    ///
    /// # Errors
    /// As [`Disks::remove`].
    pub(crate) fn remove_isolated(&self, disk: &Arc<Isolated>) -> anyhow::Result<Departure> {
        self.take_isolated(disk, true)
    }

    /// As [`Disks::remove_isolated`]; unless it is `removed` for good, a clone stays.
    ///
    /// # Errors
    /// As [`Disks::remove_isolated`].
    pub(crate) fn take_isolated(
        &self,
        disk: &Arc<Isolated>,
        removed: bool,
    ) -> anyhow::Result<Departure> {
        let _removing = self.removals.begin();
        let how = if removed { Leaving::Removed } else { Leaving::Ends };
        ensure!(disk.begin_to_leave(how), BeingRemoved);
        disk.stop();
        let departure = disk.join();
        lock(&self.isolated).retain(|other| !Arc::ptr_eq(other, disk));
        tracing::info!(disk = disk.image(), id = disk.id, "disk removed");
        let Departure { clear, held, unsaved } = departure;
        let removed = Happened::Removed { drained: clear, held };
        self.events.tell(Some((disk.id, &disk.image())), removed);
        ensure!(!unsaved, disk.not_in_order());
        Ok(departure)
    }

    pub(super) fn check_apart(&self, spec: &DiskSpec) -> anyhow::Result<()> {
        self.check_claim_apart(&spec.claim(|path| self.host.locate(path)))
    }

    pub(super) fn check_claim_apart(&self, claim: &Claim) -> anyhow::Result<()> {
        let (list, isolated) = (self.list(), self.isolated());
        let here = list.iter().map(|served| lock(&served.claim).clone());
        here.chain(isolated.iter().map(|disk| disk.claim(&self.host)))
            .try_for_each(|other| claim.check_apart(&other))
            .map_err(anyhow::Error::msg)
    }
}
