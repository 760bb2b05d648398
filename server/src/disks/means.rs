//! What disks are made with, here or in processes of their own.

use super::super::configured::{Configured, DiskWords};
use super::super::host::{Connecting, Host};
use super::super::isolate::{Isolated, LogWords, Mouth, Spawner, Starting};
use super::super::limits::LimitGroups;
use super::super::nbd_clients::Portals;
use super::super::served::{Served, lock};
use crate::sandbox::Guests;
use anyhow::{anyhow, ensure};
use ringway_control::config::{Claim, DaemonArgs, DiskSpec, LimitArgs, XenPlan};
use ringway_disk::Disk;
use ringway_disk::open::ClusterDisk;
use ringway_terminal::reasons::in_full;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// A disk, wherever it is served.
#[derive(Clone)]
pub(crate) enum AnyDisk {
    /// By this process.
    Here(Arc<Served>),
    /// By one of its own.
    Apart(Arc<Isolated>),
}

impl AnyDisk {
    /// What it takes for itself.
    pub(crate) fn claim(&self, host: &Host) -> Claim {
        match self {
            Self::Here(served) => lock(&served.claim).clone(),
            Self::Apart(disk) => disk.claim(host),
        }
    }

    /// Its number.
    pub(crate) fn id(&self) -> u64 {
        match self {
            Self::Here(served) => served.id,
            Self::Apart(disk) => disk.id,
        }
    }

    /// The words it is served by.
    pub(crate) fn words(&self) -> &Mutex<DiskWords> {
        match self {
            Self::Here(served) => &served.words,
            Self::Apart(disk) => &disk.words,
        }
    }

    /// It was told to go.
    pub(crate) fn is_leaving(&self) -> bool {
        match self {
            Self::Here(served) => served.is_leaving(),
            Self::Apart(disk) => disk.is_leaving(),
        }
    }

    /// True if its socket is called so.
    pub(crate) fn is_at_socket(&self, path: &Path) -> bool {
        match self {
            Self::Here(served) => served.socket.as_deref() == Some(path),
            Self::Apart(disk) => disk.is_at_socket(path),
        }
    }

    /// Its image goes with it.
    pub(crate) fn is_ephemeral(&self) -> bool {
        match self {
            Self::Here(served) => served.is_ephemeral(),
            Self::Apart(disk) => disk.is_ephemeral(),
        }
    }

    /// Its own limits, and its group.
    pub(crate) fn limits(&self) -> (LimitArgs, Option<String>) {
        match self {
            Self::Here(served) => {
                let limits = lock(&served.limits);
                (limits.own, limits.group.clone())
            }
            Self::Apart(disk) => (disk.limits(), None),
        }
    }

    /// Its image, as it was given.
    pub(crate) fn image(&self) -> String {
        match self {
            Self::Here(served) => served.name().to_owned(),
            Self::Apart(disk) => disk.image(),
        }
    }
}

/// What disks are made with.
pub(crate) struct Means {
    /// Where images and sockets are.
    pub(crate) host: Host,
    /// Who comes to them.
    pub(crate) guests: Guests,
    /// The toolstack that attaches disks, if it is one of Xen's.
    pub(crate) xen: Option<Arc<XenPlan>>,
    /// Where NBD clients come in.
    pub(crate) portals: Portals,
    /// What starts processes, if some disks have one of their own.
    pub(crate) spawner: Option<Arc<Spawner>>,
    /// How those log.
    pub(crate) log: LogWords,
    /// The file that says what is served, if there is one.
    pub(crate) configured: Option<Configured>,
    /// Requests are timed although there is no control socket here.
    pub(crate) sampled: bool,
    /// The daemon that has the disk, if this is the process of one.
    pub(crate) parent: Option<Arc<Mouth>>,
    /// Limits that some of them share.
    pub(crate) limit_groups: LimitGroups,
}

/// Whether it is to have a process of its own.
///
/// # Errors
/// That it has none, and the memory of that is limited.
pub(super) fn is_isolated(spec: &DiskSpec, options: &DaemonArgs) -> anyhow::Result<bool> {
    let isolated = spec.own_process().or(options.each.isolate).unwrap_or(false);
    ensure!(
        isolated || spec.words.memory_max.is_none(),
        "memory-max limits the process of a disk, and this one has none of its own: add isolate = true \
         (--isolate), or leave it out"
    );
    Ok(isolated)
}

/// Begins to connect to the export of a disk, if it is one and has no process of its own.
///
/// # Errors
/// What is wrong with its words, or what the host says.
pub(super) fn connect(
    host: &Host,
    spec: &DiskSpec,
    options: &DaemonArgs,
) -> anyhow::Result<Option<Connecting>> {
    if is_isolated(spec, options)? { Ok(None) } else { host.connect(spec) }
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
        let isolated = starting.wait(id, |path| host.locate(path), spawner);
        isolated.map(Arc::new).map_err(|error| with_origin(&origin, error))
    };
    list.into_iter().map(wait).collect()
}

/// Reads what a disk of a Ceph cluster needs of files; `None` if it is none.
///
/// # Errors
/// What is wrong with it; nothing was created or changed then.
pub(super) fn prepare_cluster(host: &Host, spec: &DiskSpec) -> anyhow::Result<Option<ClusterDisk>> {
    host.prepare(spec).map_err(|error| with_origin(&spec.origin, error))
}

/// Opens those: in the sandbox, as the cluster's library has threads, which are to be in it as well.
///
/// # Errors
/// As above.
pub(super) fn open_clusters(
    list: Vec<(u64, ClusterDisk, DiskSpec)>,
) -> anyhow::Result<Vec<(u64, Disk, DiskSpec)>> {
    let open = |(id, disk, spec): (u64, ClusterDisk, DiskSpec)| match disk.open() {
        Ok(disk) => Ok((id, disk, spec)),
        Err(error) => Err(with_origin(&spec.origin, error.into())),
    };
    list.into_iter().map(open).collect()
}

/// Says where in a configuration file a mistake is.
pub(super) fn with_origin(origin: &str, error: anyhow::Error) -> anyhow::Error {
    if origin.is_empty() { error } else { anyhow!("{origin}: {}", in_full(&error)) }
}
