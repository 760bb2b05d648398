//! What is to be opened, and how.

use super::error::OpenError;
use crate::choices::{CacheMode, EngineKind, SimModel};
use crate::disk::Disk;
use ringway_image::Format;
use ringway_nbd_client::Target;
use ringway_rbd::{Access, Target as RbdTarget};
use ringway_scheduler::SchedulerMode;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A raw image file or a block device.
    Path(PathBuf),
    /// No disk at all: requests move no data.
    Null {
        /// Capacity in bytes.
        bytes: u64,
        /// How long each request takes, in microseconds; 0 is no time at all.
        latency_us: u32,
    },
    /// A simulated disk: data in memory, time as a model says. For tests and benchmarks.
    Sim {
        /// Which kind of disk.
        model: SimModel,
        /// Capacity in bytes.
        bytes: u64,
    },
    /// An export of an NBD server.
    Nbd(Target),
    /// An image of a Ceph cluster.
    Rbd {
        /// Which.
        target: RbdTarget,
        /// How to get to the cluster.
        access: Access,
    },
    /// A disk of a kind that is none of these.
    Other {
        /// Which kind.
        kind: OtherKind,
        /// What people call it.
        name: String,
    },
}

/// A kind of disk that its owner opens ([`Source::Other`]). Its name says which it is.
#[derive(Clone, Copy, Debug)]
pub struct OtherKind {
    /// What it is, in words.
    pub name: &'static str,
    /// Opens one of these, by what people call it.
    pub open: fn(&str, &OpenOptions) -> Result<Disk, OpenError>,
}

impl PartialEq for OtherKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for OtherKind {}

impl Source {
    /// What it is, in words.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Path(_) => "file",
            Self::Null { .. } => "null",
            Self::Sim { .. } => "simulation",
            Self::Nbd(_) => "NBD export",
            Self::Rbd { .. } => "RBD image",
            Self::Other { kind, .. } => kind.name,
        }
    }

    /// What others call it, and what it is whoever calls it what, if it is no file and others can have it. `real` says
    /// where a path leads.
    pub fn identity(&self, real: impl Fn(&Path) -> PathBuf) -> Option<(String, String)> {
        match self {
            Self::Nbd(target) => Some((target.to_string(), target.identity(real))),
            // One cluster after the other may have an image of such a name: who has its lock decides.
            Self::Rbd { target, access } => {
                let conf = access.conf.as_deref().map(real).unwrap_or_default();
                Some((target.to_string(), format!("{target} {}", conf.display())))
            }
            Self::Other { name, .. } => Some((name.clone(), name.clone())),
            Self::Path(_) | Self::Null { .. } | Self::Sim { .. } => None,
        }
    }

    /// The export that it is, if an NBD server has it.
    #[must_use]
    pub fn export(&self) -> Option<&Target> {
        match self {
            Self::Nbd(target) => Some(target),
            _ => None,
        }
    }
}

/// How a disk is to be opened. `None` leaves the choice to [`crate::open()`].
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What to open.
    pub source: Source,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
    /// Relation to the host's caches.
    pub cache: Option<CacheMode>,
    /// The engine; it must be one of `engines`.
    pub engine: Option<EngineKind>,
    /// The engines that work on this host, best first, each with the reason to take it, and those
    /// that do not with the reason.
    pub engines: Vec<(EngineKind, Result<String, String>)>,
    /// What GET_ID answers, at most 20 bytes.
    pub serial: Option<String>,
    /// The block size shown to the guest, in bytes: 512 or 4096.
    pub block_size: Option<u32>,
    /// Create a sparse file of this many bytes if there is none.
    pub create_bytes: Option<u64>,
    /// It was served before, as a file of this name in the daemon's state folder says: if there is none it is not made
    /// again.
    pub served_before: Option<String>,
    /// How long to wait for whoever has the image. Without it a living process is not waited for,
    /// and the last writes of a killed one for 30 seconds.
    pub lock_wait: Option<Duration>,
    /// The image is another daemon's until its guest arrives here: it is opened, and not locked. Who
    /// serves it calls [`crate::Disk::lock`] before the first request. It has to be there already.
    pub incoming: bool,
    /// How requests travel.
    pub path: SchedulerMode,
    /// Its owner says that it is raw, whatever it begins or ends with.
    pub raw: bool,
    /// Its owner says that it is qcow2, and how it is to be taken.
    pub qcow2: Option<Qcow2>,
}

/// How a qcow2 image is to be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qcow2 {
    /// The folder that names of backing files may not lead out of; without it that of the image.
    pub backing_root: Option<PathBuf>,
    /// It is a clone of this, and made if there is none.
    pub base: Option<Base>,
    /// With direct I/O on the image, what it is based on goes through the page cache.
    pub cache_base: bool,
    /// One that was not closed is refused, instead of having its reference counts made right.
    pub never_repair: bool,
}

/// What a clone is based on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Its file, or the name of its export.
    pub path: PathBuf,
    /// What it is, unless its name says so.
    pub format: Option<Format>,
    /// What its server says of it, if it is an export.
    pub export: Option<BaseExport>,
}

/// What is to be known of an export before an image is based on it ([`crate::Disk::base_export`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseExport {
    /// Bytes of disk.
    pub bytes: u64,
    /// What it is read in multiples of, in bytes.
    pub block: u32,
}

impl OpenOptions {
    /// All choices left open.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self {
            source,
            read_only: false,
            cache: None,
            engine: None,
            engines: vec![(EngineKind::Threads, Ok("works everywhere".into()))],
            serial: None,
            block_size: None,
            create_bytes: None,
            served_before: None,
            lock_wait: None,
            incoming: false,
            path: SchedulerMode::default(),
            raw: false,
            qcow2: None,
        }
    }
}
