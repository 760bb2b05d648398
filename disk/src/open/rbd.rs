//! Images of Ceph clusters.

use super::engine::check_block_size;
use super::serial::serial_bytes;
use super::{OpenError, OpenOptions};
use crate::choices::{Alignment, CacheMode};
use crate::disk::Disk;
use crate::parts::Parts;
use crate::storage::{Cluster, RBD};
use ringway_core::Geometry;
use ringway_rbd::{Access, Configured, RbdError, Target};
use std::sync::Arc;

/// What librbd discards at least, unless the cluster is configured otherwise
/// (`rbd_discard_granularity_bytes`).
const DISCARD: u32 = 64 << 10;

/// A disk of a cluster, for which all files are read that have to be; the cluster was not spoken with.
#[derive(Debug)]
pub struct ClusterDisk {
    configured: Configured,
    name: String,
    serial: [u8; 20],
    options: OpenOptions,
}

impl ClusterDisk {
    /// Reads what has to be read from files, and starts no thread.
    ///
    /// # Errors
    /// [`OpenError`]; nothing was created or changed.
    pub fn prepare(
        target: &Target,
        access: &Access,
        options: &OpenOptions,
    ) -> Result<Self, OpenError> {
        let name = target.to_string();
        let refused = |why: &str| OpenError::Remote { target: name.clone(), why: why.to_owned() };
        check(options).map_err(refused)?;
        if let Some(size) = options.block_size {
            check_block_size(size)?;
        }
        let serial = serial_bytes(options.serial.as_deref(), &name)?;
        let configured = Configured::new(target, access);
        let configured = configured.map_err(|error| refused(&error.to_string()))?;
        Ok(Self { configured, name, serial, options: options.clone() })
    }

    /// Connects and opens the image. From here on there are threads and sockets of librbd.
    ///
    /// # Errors
    /// [`OpenError`]. If the cluster does not answer threads may stay: the process should end.
    pub fn open(self) -> Result<Disk, OpenError> {
        let Self { configured, name, serial, options } = self;
        let refused =
            |error: RbdError| OpenError::Remote { target: name.clone(), why: error.to_string() };
        let image = configured.open(options.read_only, options.lock_wait).map_err(refused)?;
        let bytes = image.bytes().map_err(refused)?;
        let logical_block = options.block_size.unwrap_or(512);
        if bytes == 0 || bytes % u64::from(logical_block) != 0 {
            let why = format!(
                "it has {bytes} bytes, which is no whole number of blocks of {logical_block}"
            );
            return Err(OpenError::Remote { target: name, why });
        }
        let read_only = image.is_read_only();
        Ok(Disk::from(Parts {
            file: Arc::clone(image.file()),
            name,
            created: false,
            // What is discarded may read as anything: librbd leaves out what is no whole unit.
            block_device: true,
            incoming: false,
            erase_block: 512,
            geometry: Geometry {
                capacity: bytes,
                logical_block,
                physical_block: logical_block,
                optimal_io: 0,
                read_only,
                discard: !read_only,
                discard_granularity: DISCARD,
            },
            serial,
            cache: options.cache.unwrap_or(CacheMode::Writeback),
            cache_why: match options.cache {
                Some(_) => "as asked".into(),
                None => "what is answered is in the cluster".into(),
            },
            engine: RBD,
            engine_why: "a Ceph cluster has the data".into(),
            alignment: Alignment::ANY,
            path: options.path,
            image: None,
            storage: Arc::new(Cluster(image)),
        }))
    }
}

/// Refuses what only files have.
fn check(options: &OpenOptions) -> Result<(), &'static str> {
    if options.engine.is_some_and(|engine| engine != RBD) {
        return Err("a Ceph cluster has its own engine: leave --engine out");
    }
    if options.cache == Some(CacheMode::None) {
        return Err("there is no page cache in between, and librbd's is switched off: --cache is \
                    writeback, writethrough or unsafe here");
    }
    if options.create_bytes.is_some() {
        return Err("images are made by `rbd create`: leave --size out");
    }
    if options.qcow2.is_some() {
        return Err(
            "images of a cluster are served as raw disks, and have snapshots and clones of \
                    their own: leave --format out",
        );
    }
    if options.incoming {
        return Err(
            "its lock cannot be handed over by a live migration yet: --incoming is for files",
        );
    }
    Ok(())
}
