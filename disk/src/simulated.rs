//! A disk of which only the shape is real: for tests whose engine simulates the rest.

use crate::choices::{Alignment, CacheMode};
use crate::disk::Disk;
use crate::open::{OpenError, OpenOptions, Source, open};
use crate::{SimModel, locks::RangeLocks};
use ringway_scheduler::SchedulerMode;

/// The shape of a simulated disk. All else is as [`Source::Sim`] has it.
#[derive(Clone, Copy, Debug)]
pub struct Simulated {
    /// Capacity in bytes, a multiple of 4096.
    pub bytes: u64,
    /// Relation to the caches that the engine simulates.
    pub cache: CacheMode,
    /// What the engine asks of buffers and offsets, in bytes.
    pub alignment: Alignment,
    /// Discards go to the engine as to a block device, which refuses parts of its blocks.
    pub block_device: bool,
    /// How requests travel to it.
    pub path: SchedulerMode,
}

impl Simulated {
    /// A disk of this shape, open, with locks and marks of its own. Its file holds no data: the
    /// engine has to.
    ///
    /// # Errors
    /// As [`open()`].
    ///
    /// # Panics
    /// If the capacity is not a multiple of 4096 bytes.
    pub fn open(&self) -> Result<Disk, OpenError> {
        assert!(self.bytes.is_multiple_of(4096), "whole blocks");
        let mut options = OpenOptions::new(Source::Sim { model: SimModel::Ram, bytes: self.bytes });
        options.cache = Some(self.cache);
        options.path = self.path;
        let mut disk = open(&options)?;
        disk.alignment = self.alignment;
        disk.block_device = self.block_device;
        if self.block_device {
            disk.erase_block = self.alignment.offset;
        }
        disk.locks = RangeLocks::with_capacity(64);
        Ok(disk)
    }
}
