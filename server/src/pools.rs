//! The workers of one engine, whatever the transport of their queues.

use super::served::Exported;
use super::spread::Spread;
#[cfg(feature = "xen")]
use super::xen;
use crate::sandbox::Guests;
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
    Nbd(ringway_nbd::Pool),
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

/// All workers, or so many of them; and which is the first.
fn chosen<Q: QueueLifecycle + 'static>(
    handles: &[Handle<Q>],
    first: usize,
    some: Option<usize>,
) -> (Vec<Handle<Q>>, usize) {
    match some {
        Some(some) => (handles.iter().cycle().skip(first).take(some).cloned().collect(), 0),
        None => (handles.to_vec(), first),
    }
}

/// How many of so many workers serve a disk: as many as its storage can be shared among.
pub(super) fn workers_of(disk: &Disk, workers: usize, queues: u16) -> usize {
    let most = disk.storage().engines_most().unwrap_or(workers);
    workers.min(queues.into()).min(most).max(1)
}

impl Pools {
    /// Starts them, for guests that come over one transport.
    ///
    /// # Errors
    /// As [`Pool::start_watched`].
    pub(super) fn start(
        guests: Guests,
        options: PoolOptions,
        (cpus, on_failure, rings): (Cpus, OnFailure, Option<RingPool>),
    ) -> io::Result<Self> {
        Ok(match guests {
            Guests::VhostUser | Guests::Cluster => {
                Self::VhostUser(Pool::start_watched(options, cpus, on_failure, rings)?)
            }
            Guests::Nbd => {
                let pool = ringway_nbd::Pool::start_watched(options, cpus, on_failure, rings)?;
                Self::Nbd(pool)
            }
            #[cfg(feature = "xen")]
            Guests::Xen => {
                let pool = ringway_export::Pool::start_watched(options, cpus, on_failure, rings)?;
                Self::Xen(pool)
            }
            #[cfg(not(feature = "xen"))]
            Guests::Xen => return Err(io::ErrorKind::Unsupported.into()),
        })
    }

    /// Until there are as many.
    ///
    /// # Errors
    /// As [`Pool::grow`].
    pub(super) fn grow(&mut self, workers: usize) -> io::Result<()> {
        match self {
            Self::VhostUser(pool) => pool.grow(workers),
            Self::Nbd(pool) => pool.grow(workers),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => pool.grow(workers),
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::VhostUser(pool) => pool.handles().len(),
            Self::Nbd(pool) => pool.handles().len(),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => pool.handles().len(),
        }
    }

    /// To ask them for their counts.
    pub(super) fn counts(&self) -> Vec<Box<dyn Counts>> {
        match self {
            Self::VhostUser(pool) => counts(pool.handles()),
            Self::Nbd(pool) => counts(pool.handles()),
            #[cfg(feature = "xen")]
            Self::Xen(pool) => counts(pool.handles()),
        }
    }

    /// Offers a disk that they serve, from worker `first` on; by fewer of them if its storage cannot be shared among
    /// all.
    pub(super) fn export(
        &self,
        disk: Arc<Disk>,
        options: ExportOptions,
        first: usize,
        (names, lock_wait): (Option<Arc<dyn Names>>, Option<Duration>),
    ) -> Exported {
        let some = disk.storage().engines_most().map(|_| {
            let workers = workers_of(&disk, self.len(), options.queues);
            disk.storage().share_among(workers);
            workers
        });
        match self {
            Self::VhostUser(pool) => {
                let (handles, first) = chosen(pool.handles(), first, some);
                let export = Export::new(disk, options, handles, first);
                Exported::VhostUser(Arc::new(export.with_names(names, lock_wait)))
            }
            Self::Nbd(pool) => {
                let (handles, first) = chosen(pool.handles(), first, some);
                Exported::Nbd(ringway_export::Export::new(disk, options, handles, first))
            }
            #[cfg(feature = "xen")]
            Self::Xen(pool) => {
                let (handles, first) = chosen(pool.handles(), first, some);
                Exported::Xen(ringway_export::Export::new(disk, options, handles, first))
            }
        }
    }
}
