//! Exports of NBD servers.

use super::engine::check_block_size;
use super::serial::serial_bytes;
use super::{OpenError, OpenOptions};
use crate::choices::{Alignment, CacheMode};
use crate::disk::Disk;
use crate::new_image::Backing;
use crate::parts::Parts;
use crate::storage::{Export, NBD};
use ringway_core::{Geometry, SECTOR_BYTES};
use ringway_image::Format;
use ringway_nbd_client::{Remote, Target, TargetError, connect};
use ringway_nbd_words::offers;
use std::path::Path;
use std::sync::Arc;

/// The largest block that is told to guests as that of the disk itself.
const PHYSICAL_MAX: u32 = 64 << 10;

/// Connects to the server, and takes what it says of the export.
pub(super) fn open(target: &Target, options: &OpenOptions) -> Result<Disk, OpenError> {
    let name = target.to_string();
    let remote = |why: String| OpenError::Remote { target: name.clone(), why };
    check(options).map_err(|why| remote(why.to_owned()))?;
    if let Some(size) = options.block_size {
        check_block_size(size)?;
    }
    let serial = serial_bytes(options.serial.as_deref(), &name)?;
    let connected = connect(target).map_err(|error| remote(error.to_string()))?;
    let facts = connected.negotiated;
    let logical_block =
        options.block_size.unwrap_or(if facts.min_block > 512 { 4096 } else { 512 });
    let capacity = capacity(&name, facts.bytes, logical_block).map_err(remote)?;
    let read_only = options.read_only || facts.offers(offers::READ_ONLY);
    let preferred = facts.preferred_block;
    let physical_block = if preferred.is_power_of_two() { preferred.min(PHYSICAL_MAX) } else { 0 };
    let unit = facts.min_block.max(logical_block);
    let storage = Arc::new(Export(Arc::new(Remote::new(&name, &connected))));
    Ok(Disk::from(Parts {
        name,
        file: Arc::clone(&connected.socket),
        created: false,
        // What is discarded may read as anything, and in whole blocks only.
        block_device: true,
        incoming: false,
        erase_block: facts.min_block,
        geometry: Geometry {
            capacity,
            logical_block,
            physical_block: physical_block.max(logical_block),
            optimal_io: 0,
            read_only,
            discard: facts.offers(offers::SEND_TRIM) && !read_only,
            discard_granularity: unit,
        },
        serial,
        cache: options.cache.unwrap_or(CacheMode::Writeback),
        cache_why: match options.cache {
            Some(_) => "as asked".into(),
            None => "the server may have a cache".into(),
        },
        engine: NBD,
        engine_why: match connected.sockets().count() {
            1 => "an NBD server has the data".into(),
            several => format!("an NBD server has the data, {several} connections"),
        },
        alignment: match u64::from(facts.min_block) {
            ..=SECTOR_BYTES => Alignment::ANY,
            _ => Alignment { memory: 1, offset: facts.min_block },
        },
        path: options.path,
        image: None,
        storage,
    }))
}

/// An export, as what images are based on.
pub(super) fn backing(name: &Path, bytes: u64) -> Result<Backing, OpenError> {
    Ok(Backing::of_export(&base(name)?, bytes))
}

/// What tells whether the header of an image means this export.
pub(super) fn is_called(name: &Path) -> Result<impl Fn(&Path) -> bool + use<>, OpenError> {
    let target = base(name)?;
    Ok(move |name: &Path| name.to_str().is_some_and(|name| target.is_called(name)))
}

fn base(name: &Path) -> Result<Target, OpenError> {
    let target = name.display().to_string();
    let parsed = target.parse().map_err(|error: TargetError| error.to_string());
    parsed.map_err(|why| OpenError::Remote { target, why })
}

impl Backing {
    /// An export of so many bytes.
    #[must_use]
    pub fn of_export(target: &Target, bytes: u64) -> Self {
        let (path, format) = (target.uri().into(), Format::Raw);
        Self { path, format, virtual_size: bytes, is_elsewhere: true }
    }
}

/// Refuses what only files have.
fn check(options: &OpenOptions) -> Result<(), &'static str> {
    if options.engine.is_some_and(|engine| engine != NBD) {
        return Err("an NBD server has its own engine: leave --engine out");
    }
    if options.cache == Some(CacheMode::None) {
        return Err("whether a server has a cache is its own matter: --cache is writeback, \
                    writethrough or unsafe here");
    }
    if options.create_bytes.is_some() {
        return Err("the server says how large it is: leave --size out");
    }
    if options.qcow2.is_some() {
        return Err("exports are served as raw disks. Have the server understand the format \
                    (`qemu-nbd -f qcow2`, `ringway nbd --format qcow2`)");
    }
    if options.incoming {
        return Err("NBD has no lock that a migration could hand over: --incoming is for files");
    }
    Ok(())
}

/// The whole blocks of an export of so many bytes.
fn capacity(name: &str, bytes: u64, block: u32) -> Result<u64, String> {
    let block = u64::from(block);
    let rest = bytes % block;
    if rest == bytes {
        return Err(format!("the export has {bytes} bytes, which is less than a block of {block}"));
    }
    if rest > 0 {
        tracing::warn!(
            "{name}: the export has {bytes} bytes, which is no whole number of blocks of {block}: the last {rest} \
             are not part of the disk"
        );
    }
    Ok(bytes - rest)
}
