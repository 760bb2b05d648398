//! Disks with processes of their own, beside the others.

use super::super::host::Host;
use super::super::isolate::{Isolated, LogWords, Spawner, Starting};
use super::super::served::{Served, lock};
use super::{Disks, with_origin};
use anyhow::anyhow;
use ringway_control::config::{Claim, DaemonArgs, DiskSpec, XenPlan};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A disk, wherever it is served.
pub(crate) enum AnyDisk {
    /// By this process.
    Here(Arc<Served>),
    /// By one of its own.
    Apart(Arc<Isolated>),
}

/// What disks are made with.
pub(crate) struct Means {
    /// Where images and sockets are.
    pub(crate) host: Host,
    /// The toolstack that attaches disks, if it is one of Xen's.
    pub(crate) xen: Option<Arc<XenPlan>>,
    /// What starts processes, if some disks have one of their own.
    pub(crate) spawner: Option<Arc<Spawner>>,
    /// How those log.
    pub(crate) log: LogWords,
    /// Requests are timed although there is no control socket here.
    pub(crate) sampled: bool,
}

impl Disks {
    fn spawner(&self) -> anyhow::Result<&Arc<Spawner>> {
        self.spawner.as_ref().ok_or_else(|| {
            anyhow!(
                "this daemon starts no processes for disks: start it with --isolate, or with \
                 isolate = true for one of its disks"
            )
        })
    }

    /// Lets those with processes of their own serve.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn launch_isolated(&self) -> anyhow::Result<()> {
        for disk in self.isolated() {
            disk.launch(self.spawner()?, &self.bell)?;
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

    pub(super) fn add_isolated(&self, spec: DiskSpec) -> anyhow::Result<Arc<Isolated>> {
        let spawner = self.spawner()?;
        let id = self.next_id.fetch_add(1, SeqCst);
        let turn = usize::try_from(id).unwrap_or_default();
        let starting = Starting::new(spawner, spec, &self.options, self.log, turn)?;
        // With --lock-wait this takes its time; the daemon can stop meanwhile.
        let disk = Arc::new(wait(starting, id, &self.host, spawner)?);
        let open = lock(&self.open);
        // Another one may have come meanwhile.
        let apart = match *open {
            true => self.check_claim_apart(&disk.claim),
            false => Err(anyhow!("the daemon is stopping")),
        };
        if let Err(error) = apart.and_then(|()| disk.launch(spawner, &self.bell)) {
            disk.abandon(spawner);
            return Err(error);
        }
        lock(&self.isolated).push(Arc::clone(&disk));
        tracing::info!(disk = disk.image(), id, "disk added");
        Ok(disk)
    }

    /// As [`Disks::remove`], of a disk with a process of its own.
    ///
    /// # Errors
    /// That somebody else removes it already.
    pub(crate) fn remove_isolated(&self, disk: &Arc<Isolated>) -> anyhow::Result<bool> {
        disk.stop_once()?;
        let clear = disk.join();
        lock(&self.isolated).retain(|other| !Arc::ptr_eq(other, disk));
        tracing::info!(disk = disk.image(), id = disk.id, "disk removed");
        Ok(clear)
    }

    pub(super) fn check_apart(&self, spec: &DiskSpec) -> anyhow::Result<()> {
        self.check_claim_apart(&spec.claim(|path| self.host.locate(path)))
    }

    fn check_claim_apart(&self, claim: &Claim) -> anyhow::Result<()> {
        let (list, isolated) = (self.list(), self.isolated());
        let here = list.iter().map(|served| &served.claim);
        here.chain(isolated.iter().map(|disk| &disk.claim))
            .try_for_each(|other| claim.check_apart(other))
            .map_err(anyhow::Error::msg)
    }
}

pub(super) fn is_isolated(spec: &DiskSpec, options: &DaemonArgs) -> bool {
    spec.isolate.or(options.each.isolate).unwrap_or(false)
}

/// Waits until those that were started with the daemon could serve.
///
/// # Errors
/// What is wrong with one of them; nothing was created or changed then.
pub(super) fn wait_for_all(
    list: Vec<(u64, Starting)>,
    host: &Host,
    spawner: Option<&Arc<Spawner>>,
) -> anyhow::Result<Vec<Arc<Isolated>>> {
    let Some(spawner) = spawner else { return Ok(Vec::new()) };
    let wait = |(id, starting): (u64, Starting)| {
        let origin = starting.spec().origin.clone();
        let isolated = wait(starting, id, host, spawner);
        isolated.map(Arc::new).map_err(|error| with_origin(&origin, error))
    };
    list.into_iter().map(wait).collect()
}

fn wait(starting: Starting, id: u64, host: &Host, spawner: &Spawner) -> anyhow::Result<Isolated> {
    let claim = starting.spec().claim(|path| host.locate(path));
    starting.wait(id, claim, spawner)
}
