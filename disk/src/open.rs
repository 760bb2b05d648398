//! Opening a disk: the only place that probes the host and chooses.
//!
//! Nothing is created or changed unless everything else has succeeded.

mod clone;
mod created;
mod device;
mod direct;
mod engine;
mod error;
mod fence;
mod file;
mod foreign;
mod format;
mod holder;
mod image_lock;
mod mount;
mod nbd;
mod nvme;
mod options;
mod origin;
mod overlay;
pub(crate) mod probe;
mod qcow2;
mod rbd;
mod report;
mod serial;
mod unreal;
mod writable;

pub use device::Device;
pub use error::OpenError;
pub use fence::foreign_holder;
pub use foreign::ForeignFormat;
pub use image_lock::{LockError, lock_image, unlock_image};
pub(crate) use image_lock::{drop_flock, raise_lock, share_lock};
pub use mount::{ENDING, Mount, is_dying, parent};
pub use nvme::is_namespace;
pub use options::{Base, BaseExport, OpenOptions, OtherKind, Qcow2, Source};
pub use origin::Origin;
pub use overlay::{NewOverlay, OverlayError};
pub use qcow2::repair_counts;
pub use rbd::ClusterDisk;
pub use report::{Blocks, Choice, Direct, Report, holder, probe};
pub use writable::{NotWritable, reopen_for_writing};

use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
pub(crate) use crate::memory_file::memory_file;
use crate::parts::Parts;
use crate::storage::Local;
use created::Created;
use engine::{check_block_size, check_engine, choose_engine};
use fence::Fenced;
use file::open_file;
use probe::FileKind;
use ringway_core::Geometry;
pub(crate) use serial::{place, serial_bytes};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens a disk, probes what it can do, and makes the choices that were left open. The tables of an incoming
/// image are not read: [`Disk::map_image_again`] does that once its lock is ours.
///
/// # Errors
/// [`OpenError`]; nothing was created or changed then.
pub fn open(options: &OpenOptions) -> Result<Disk, OpenError> {
    let mut disk = open_unmapped(options)?;
    let path = PathBuf::from(disk.name());
    // One that is incoming is judged when its lock is ours.
    if !options.incoming && disk.waits_for_journal() {
        // Whoever has the state folder maps it by itself.
        return Err(OpenError::Waits(path));
    }
    let host = |source| OpenError::Host { path, what: "read its tables", source };
    disk.map_image().map_err(host)?;
    Ok(disk)
}

/// As [`open`], and reads nothing but the headers of an image that is not raw: for whoever hands the
/// disk over to another process, which has [`Disk::map_image`] do the rest.
///
/// # Errors
/// As [`open`].
pub fn open_unmapped(options: &OpenOptions) -> Result<Disk, OpenError> {
    match &options.source {
        Source::Null { bytes, latency_us: 0 } => {
            unreal::open(&format!("null:{}", short(*bytes)), *bytes, EngineKind::Null, options)
        }
        Source::Null { bytes, latency_us } => {
            let name = format!("null:{},latency={latency_us}us", short(*bytes));
            unreal::open(&name, *bytes, EngineKind::NullAfter(*latency_us), options)
        }
        Source::Sim { model, bytes } => {
            let name = format!("sim:{}:{}", model.name(), short(*bytes));
            unreal::open(&name, *bytes, EngineKind::Sim(*model), options)
        }
        Source::Path(path) => match &options.qcow2 {
            Some(qcow2) => qcow2::open(path, qcow2, options),
            None if is_namespace(path) => nvme::open(path, options),
            None => open_path(path, options),
        },
        Source::Nbd(target) => nbd::open(target, options),
        Source::Rbd { target, access } => ClusterDisk::prepare(target, access, options)?.open(),
        Source::Other { kind, name } => (kind.open)(name, options),
    }
}

/// A size as people write it, in the largest unit that loses nothing: `1T`, `1000`.
fn short(bytes: u64) -> String {
    let units = [(1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit && bytes % *unit == 0) {
        Some((unit, letter)) => format!("{}{letter}", bytes / unit),
        None => bytes.to_string(),
    }
}

fn open_path(path: &Path, options: &OpenOptions) -> Result<Disk, OpenError> {
    if let Some(size) = options.block_size {
        check_block_size(size)?;
    }
    let serial = serial_bytes(options.serial.as_deref(), &place(path))?;
    check_engine(options)?;
    let mut created = Created::if_missing(path, options)?;
    let opened = fence::locked(path, options, || {
        let kind = probe::kind(path)?;
        let (file, cache, cache_why, alignment) = open_cached(path, options, kind)?;
        let engine = choose_engine(path, options, cache == CacheMode::None)?;
        Ok((file, (kind, cache, cache_why, alignment, engine)))
    });
    let (file, (kind, cache, cache_why, alignment, (engine, engine_why))) = match opened {
        Ok(opened) => opened,
        Err(Fenced::Open(error)) => return Err(error),
        Err(Fenced::Theirs(error)) => {
            // Who has the lock of a new file serves it: it is not ours to remove any more.
            created.keep(None);
            return Err(error);
        }
    };
    created.is_locked(&file);
    let bytes = probe::size(path, &file, kind)?;
    // First, as advice on its size would not help.
    format::check(path, &file, bytes, kind, options)?;
    check_size(path, bytes, options, alignment)?;
    let writable = !options.read_only;
    // Nothing of what is another daemon's is changed, however little.
    let host = probe::Host::of(path, &file, kind, writable && !options.incoming);
    let logical_block = options.block_size.unwrap_or(host.logical_block);
    let created = created.keep(Some(&file));
    Ok(Disk::from(Parts {
        name: path.display().to_string(),
        file: Arc::new(file),
        created,
        block_device: kind == FileKind::BlockDevice,
        erase_block: if kind == FileKind::BlockDevice { host.logical_block } else { 1 },
        geometry: Geometry {
            capacity: bytes,
            logical_block,
            physical_block: host.physical_block.max(logical_block),
            optimal_io: host.optimal_io,
            read_only: options.read_only,
            discard: host.discard && writable,
            discard_granularity: host.discard_granularity.max(logical_block),
        },
        serial,
        incoming: options.incoming,
        cache,
        cache_why,
        engine,
        engine_why,
        alignment,
        path: options.path,
        image: None,
        storage: Arc::new(Local { is_device: kind == FileKind::BlockDevice }),
    }))
}

/// Refuses what is empty or no whole number of blocks.
fn check_size(
    path: &Path,
    bytes: u64,
    options: &OpenOptions,
    alignment: Alignment,
) -> Result<(), OpenError> {
    if bytes == 0 {
        return Err(OpenError::Empty(path.into()));
    }
    let unit = options.block_size.unwrap_or(512).max(alignment.offset).max(512);
    if bytes % u64::from(unit) != 0 {
        return Err(OpenError::NotWhole { path: path.into(), bytes, unit });
    }
    Ok(())
}

/// Opens the file for the cache mode that was asked for, or for the best one.
fn open_cached(
    path: &Path,
    options: &OpenOptions,
    kind: FileKind,
) -> Result<(File, CacheMode, String, Alignment), OpenError> {
    let wanted = options.cache;
    if wanted.is_none_or(|mode| mode == CacheMode::None) {
        match open_direct(path, options, kind)? {
            Ok((file, alignment)) => {
                let why = match wanted {
                    Some(_) => "as asked".into(),
                    None => format!(
                        "O_DIRECT works, memory to {} and offsets to {} bytes",
                        alignment.memory, alignment.offset
                    ),
                };
                return Ok((file, CacheMode::None, why, alignment));
            }
            Err(why) if wanted.is_some() => {
                return Err(OpenError::NoDirect { path: path.into(), why });
            }
            Err(why) => {
                let file = open_file(path, options, kind, 0)?;
                return Ok((
                    file,
                    CacheMode::Writeback,
                    format!("no O_DIRECT: {why}"),
                    Alignment::ANY,
                ));
            }
        }
    }
    let file = open_file(path, options, kind, 0)?;
    Ok((file, wanted.unwrap_or(CacheMode::Writeback), "as asked".into(), Alignment::ANY))
}

/// The outer error ends the opening, the inner one says why O_DIRECT is not to be had.
#[allow(clippy::type_complexity)]
fn open_direct(
    path: &Path,
    options: &OpenOptions,
    kind: FileKind,
) -> Result<Result<(File, Alignment), String>, OpenError> {
    let file = match open_file(path, options, kind, libc::O_DIRECT) {
        Ok(file) => file,
        Err(OpenError::Host { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            return Ok(Err("its file system does not offer it".into()));
        }
        Err(error) => return Err(error),
    };
    let alignment = match probe::direct_alignment(&file, kind).1 {
        Ok(alignment) => alignment,
        Err(why) => return Ok(Err(why)),
    };
    let bytes = probe::size(path, &file, kind)?;
    if bytes % u64::from(alignment.offset) != 0 {
        return Ok(Err(format!(
            "its size, {bytes} bytes, is not a multiple of the {} bytes that O_DIRECT needs here",
            alignment.offset
        )));
    }
    Ok(Ok((file, alignment)))
}

#[cfg(test)]
mod tests;
