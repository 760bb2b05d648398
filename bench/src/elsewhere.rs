//! Disks that are elsewhere, for tools: exports of NBD servers, images of Ceph clusters; and NVMe
//! namespaces past the block layer.

use crate::load::{AccessArgs, Load};
use anyhow::{Context, Result, ensure};
use ringway_control::config::{CephArgs, Format};
use ringway_disk::{Disk, EngineKind, OpenOptions, Source};
pub use ringway_nbd_client::Allocation as ExportAllocation;
use ringway_nbd_client::{Connections, Timeouts, connect};
pub use ringway_rbd::Allocated;
use ringway_rbd::Image;
use std::sync::Arc;
use std::time::Duration;

/// How long a tool waits for a server to come back. Its requests fail then.
const GIVE_UP: Duration = Duration::from_secs(30);

/// How long a server may answer nothing at all: a disk may take minutes to flush, and a flush that is
/// repeated on a new connection begins anew. A host that is gone is noticed by TCP.
const SILENCE: Duration = Duration::from_secs(3600);

/// Who tells where a disk has data.
#[derive(Clone, Debug)]
pub enum Allocation {
    /// An NBD server, which has told it.
    Export(Arc<ExportAllocation>),
    /// A cluster, which is asked with [`Allocated`].
    Cluster(Arc<Image>),
}

impl Allocation {
    /// Of an image of a cluster; `None` of other disks.
    #[must_use]
    pub fn of_cluster(disk: &Disk) -> Option<Self> {
        disk.cluster_image().map(|image| Self::Cluster(Arc::clone(image)))
    }

    /// How many bytes are data, if that was told.
    #[must_use]
    pub fn data_bytes(&self) -> Option<u64> {
        match self {
            Self::Export(export) => export.data_bytes(),
            Self::Cluster(_) => None,
        }
    }
}

/// Opens a disk; of one of an NBD server a connection that is lost comes back, for a while.
///
/// # Errors
/// What is wrong with it, and what to do.
pub fn open(source: &Source, ceph: &CephArgs, read_only: bool) -> Result<Disk> {
    let mut options = OpenOptions::new(ceph.on_the_way_to(source));
    options.read_only = read_only;
    if matches!(source, Source::Path(_)) {
        options.engine = Some(EngineKind::Nvme);
        // Tools mean its bytes, whatever these look like.
        options.raw = true;
    }
    let disk = ringway_disk::open(&options)?;
    if let (Source::Nbd(target), Some(remote)) = (source, disk.remote()) {
        let there = u16::try_from(remote.connections()).unwrap_or(u16::MAX);
        let target = target.with_connections(Connections::asked(there));
        let timeouts = Timeouts { give_up: Some(GIVE_UP), silence: SILENCE };
        let again = move || Ok(connect(&target)?);
        remote.supervise(Box::new(again), timeouts).context("cannot look after its connection")?;
    }
    Ok(disk)
}

/// Opens a disk that is to be read as a whole, and who tells where it has data, if anybody does.
///
/// # Errors
/// As [`open`].
pub fn open_with_allocation(
    source: &Source,
    ceph: &CephArgs,
) -> Result<(Disk, Option<Allocation>)> {
    let Source::Nbd(target) = source else {
        let disk = open(source, ceph, true)?;
        let allocation = Allocation::of_cluster(&disk);
        return Ok((disk, allocation));
    };
    let disk = open(&Source::Nbd(target.with_block_status()), ceph, true)?;
    match disk.remote().map_or(Ok(None), |remote| remote.allocation()) {
        Ok(allocation) => {
            Ok((disk, allocation.map(|allocation| Allocation::Export(Arc::new(allocation)))))
        }
        Err(error) => {
            tracing::warn!("{target}: {error}. All of it counts as data");
            drop(disk);
            Ok((open(source, ceph, true)?, None))
        }
    }
}

/// Opens a disk for a load.
///
/// # Errors
/// As [`open`], and that writing would destroy what it holds.
pub(crate) fn open_for(
    name: &str,
    source: &Source,
    load: &Load,
    access: &AccessArgs,
) -> Result<Disk> {
    let writes = load.rw.writes();
    ensure!(
        !writes || access.allow_write,
        "{name}: writing destroys what it holds. Add --allow-write if that is what you want"
    );
    ensure!(
        access.format != Some(Format::Qcow2),
        "{name}: it is measured as a raw disk: leave --format out"
    );
    let source = match source {
        Source::Nbd(target) => {
            Source::Nbd(target.with_connections(Connections::of_queues(load.all_queues())))
        }
        other => other.clone(),
    };
    open(&source, &access.ceph, !writes)
}
