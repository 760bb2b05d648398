//! The workers of one engine, whatever the transport of their queues.

use super::served::Exported;
use super::spread::Spread;
#[cfg(feature = "xen")]
use super::xen;
use ringway_disk::{Disk, EngineKind};
use ringway_export::{
    Counts, Cpus, ExportOptions, Handle, Names, OnFailure, PoolOptions, QueueLifecycle, RingPool,
};

use ringway_vhost_user::{Export, Pool};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The workers of one engine, for the transport of the daemon.
pub(super) enum Pools {
    VhostUser(Pool),
    #[cfg(feature = "xen")]
    Xen(ringway_export::Pool<xen::Queue>),
}

/// The workers of one engine, and how queues are spread over them.
pub(super) struct Engine {
    pub(super) kind: EngineKind,
    pub(super) pool: Pools,
    pub(super) spread: Spread,
}

fn counts<Q: QueueLifecycle + 'static>(handles: &[Handle<Q>]) -> Vec<Box<dyn Counts>> {
    handles.iter().map(|handle| Box::new(handle.clone()) as Box<dyn Counts>).collect()
}

impl Pools {
    /// Starts them, for guests of a Xen host or for those that come over vhost-user.
    ///
    /// # Errors
    /// As [`Pool::start_watched`].
    pub(super) fn start(
        xen: bool,
        options: PoolOptions,
        (cpus, on_failure, rings): (Cpus, OnFailure, Option<RingPool>),
    ) -> io::Result<Self> {
        if xen {
            #[cfg(feature = "xen")]
            return Ok(Self::Xen(ringway_export::Pool::start_watched(
                options, cpus, on_failure, rings,
            )?));
            #[cfg(not(feature = "xen"))]
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self::VhostUser(Pool::start_watched(options, cpus, on_failure, rings)?))
    }

    /// Until there are as many.
    ///
    /// # Errors
    /// As [`Pool::grow`].
    pub(super) fn grow(&mut self, workers: usize) -> io::Result<()> {
        match self {
            Self::VhostUser(pool) => pool.grow(workers),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => pool.grow(workers),
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::VhostUser(pool) => pool.handles().len(),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => pool.handles().len(),
        }
    }

    /// To ask them for their counts.
    pub(super) fn counts(&self) -> Vec<Box<dyn Counts>> {
        match self {
            Self::VhostUser(pool) => counts(pool.handles()),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => counts(pool.handles()),
        }
    }

    /// Offers a disk that they serve, from worker `first` on.
    pub(super) fn export(
        &self,
        disk: Arc<Disk>,
        options: ExportOptions,
        first: usize,
        (names, lock_wait): (Option<Arc<dyn Names>>, Option<Duration>),
    ) -> Exported {
        match self {
            Self::VhostUser(pool) => Exported::VhostUser(
                Export::new(disk, options, pool.handles().to_vec(), first)
                    .with_names(names, lock_wait),
            ),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => Exported::Xen(ringway_export::Export::new(
                disk,
                options,
                pool.handles().to_vec(),
                first,
            )),
        }
    }
}
