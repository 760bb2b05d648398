//! Disks without a file: null, and simulations.

use super::engine::check_block_size;
use super::serial::serial_bytes;
use super::{OpenError, OpenOptions};
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
use crate::memory_file::memory_file;
use crate::parts::Parts;
use crate::storage::Unreal;
use ringway_core::{Geometry, SECTOR_BYTES};
use std::sync::Arc;

/// A disk that no file holds: null, or a simulation on memory.
pub(super) fn open(
    name: &str,
    bytes: u64,
    engine: EngineKind,
    options: &OpenOptions,
) -> Result<Disk, OpenError> {
    let name = name.to_owned();
    if bytes == 0 || bytes % SECTOR_BYTES != 0 {
        return Err(OpenError::Size { name, bytes });
    }
    if let Some(asked) = options.engine.filter(|asked| asked.name() != engine.name()) {
        let why = format!("{name} is no file, only its own engine ({engine}) serves it");
        return Err(OpenError::Engine { engine: asked, why });
    }
    let logical_block = options.block_size.unwrap_or(512);
    check_block_size(logical_block)?;
    let simulated = matches!(engine, EngineKind::Sim(_));
    let host = |source| OpenError::Host { path: name.clone().into(), what: "make it", source };
    // A null disk's file only stands for it: nothing is ever asked of it.
    let file = memory_file(if simulated { bytes } else { 0 }).map_err(host)?;
    let engine_why = if simulated { "a simulation, data in memory" } else { "moves no data" };
    Ok(Disk::from(Parts {
        serial: serial_bytes(options.serial.as_deref(), &name)?,
        name,
        file: Arc::new(file),
        created: false,
        block_device: false,
        erase_block: 1,
        geometry: Geometry {
            capacity: bytes,
            logical_block,
            physical_block: logical_block,
            optimal_io: 0,
            read_only: options.read_only,
            discard: true,
            discard_granularity: logical_block,
        },
        cache: options.cache.unwrap_or(if simulated {
            CacheMode::Writeback
        } else {
            CacheMode::Unsafe
        }),
        cache_why: "there is nothing to keep".into(),
        incoming: false,
        engine,
        engine_why: engine_why.into(),
        alignment: Alignment::ANY,
        path: options.path,
        image: None,
        storage: Arc::new(Unreal { engine }),
    }))
}
