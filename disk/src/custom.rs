//! A disk whose data is in the hands of an engine of the caller's own.

use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
use crate::open::{OpenError, memory_file, serial_bytes};
use crate::parts::Parts;
use crate::storage::{Custom, Storage};
use ringway_core::Geometry;
use ringway_scheduler::SchedulerMode;
use std::sync::Arc;

/// The shape of a disk for an engine of your own: one that keeps its data in memory, computes it, or
/// fetches it from elsewhere. Its file, which the engine's `attach` gets, holds nothing.
#[derive(Clone, Copy, Debug)]
pub struct CustomDisk {
    /// Capacity in bytes, a multiple of 4096.
    pub bytes: u64,
    /// What is in front of the data: with [`CacheMode::Writeback`] flushes come as
    /// [`IoOp::Sync`](ringway_aio::IoOp::Sync), and writes that have to be durable as such.
    pub cache: CacheMode,
    /// What the engine asks of buffers and offsets, in bytes.
    pub alignment: Alignment,
    /// Discards go to the engine as to a block device, which refuses parts of its blocks.
    pub block_device: bool,
    /// How requests travel to it.
    pub path: SchedulerMode,
}

impl CustomDisk {
    /// A disk that takes any buffer and offset, and has a cache that flushes empty.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            cache: CacheMode::Writeback,
            alignment: Alignment::ANY,
            block_device: false,
            path: SchedulerMode::default(),
        }
    }

    /// The disk, open. Guests know it by `serial`, of at most 20 printable characters; without one it
    /// gets a number of its own.
    ///
    /// # Errors
    /// [`OpenError::Serial`], and what the host says to the file that stands for it.
    ///
    /// # Panics
    /// If the capacity is not a positive multiple of 4096 bytes.
    pub fn open(&self, serial: Option<&str>) -> Result<Disk, OpenError> {
        self.on(Arc::new(Custom), "custom", serial)
    }

    /// The same, on a storage of a kind of its own. People call it `name`.
    ///
    /// # Errors
    /// As [`CustomDisk::open`].
    ///
    /// # Panics
    /// As [`CustomDisk::open`].
    pub fn on(
        &self,
        storage: Arc<dyn Storage>,
        name: &str,
        serial: Option<&str>,
    ) -> Result<Disk, OpenError> {
        assert!(self.bytes > 0 && self.bytes % 4096 == 0, "whole blocks");
        let name = name.to_owned();
        let host = |source| OpenError::Host { path: name.clone().into(), what: "make it", source };
        Ok(Disk::from(Parts {
            serial: serial_bytes(serial, &name)?,
            file: Arc::new(memory_file(0).map_err(host)?),
            name,
            created: false,
            block_device: self.block_device,
            incoming: false,
            erase_block: if self.block_device { self.alignment.offset } else { 1 },
            geometry: Geometry {
                capacity: self.bytes,
                logical_block: 512,
                physical_block: 512,
                optimal_io: 0,
                read_only: false,
                discard: true,
                discard_granularity: 512,
            },
            cache: self.cache,
            cache_why: "as its owner says".into(),
            engine: storage.nature().engine.unwrap_or(EngineKind::Custom),
            engine_why: "its owner's".into(),
            alignment: self.alignment,
            path: self.path,
            image: None,
            storage,
        }))
    }
}
