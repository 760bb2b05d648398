//! An open disk in parts, so that one process can open it and another one serve it.

use crate::active::Active;
use crate::at_limit::AtLimit;
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::clock::Clock;
use crate::disk::Disk;
use crate::holding::Holding;
use crate::incidents::Incidents;
use crate::locks::{LateWrites, RangeLocks};
use crate::open::{LockError, drop_flock, lock_image, unlock_image};
use crate::storage::Storage;
use crate::unmapped::Unmapped;
use ringway_core::Geometry;
use ringway_scheduler::{SchedulerMode, SharedPolicy};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

/// How many requests that change a disk may be in flight on all its queues together before the
/// table of locked ranges has to grow.
const LOCKS_MAX: usize = 4096;

/// All that opening a disk has found out and decided.
#[derive(Debug)]
pub struct Parts {
    /// The file, locked unless it is incoming.
    pub file: Arc<File>,
    /// See [`Disk::name`].
    pub name: String,
    /// See [`Disk::created`].
    pub created: bool,
    /// A block device, not a file.
    pub block_device: bool,
    /// See [`Disk::is_incoming`].
    pub incoming: bool,
    /// The unit in which ranges can be discarded or zeroed by the file itself, in bytes.
    pub erase_block: u32,
    /// See [`Disk::geometry`].
    pub geometry: Geometry,
    /// See [`Disk::serial`].
    pub serial: [u8; 20],
    /// See [`Disk::cache`].
    pub cache: CacheMode,
    /// See [`Disk::cache_why`].
    pub cache_why: String,
    /// See [`Disk::engine`].
    pub engine: EngineKind,
    /// See [`Disk::engine_why`].
    pub engine_why: String,
    /// See [`Disk::alignment`].
    pub alignment: Alignment,
    /// See [`SharedPolicy::mode`].
    pub path: SchedulerMode,
    /// The files of the disk's image, if that is no raw one; `file` is the first of them.
    pub image: Option<Unmapped>,
    /// What holds the bytes.
    pub storage: Arc<dyn Storage>,
}

impl Disk {
    /// Takes a disk apart that is not served yet.
    #[must_use]
    pub fn into_parts(self) -> Parts {
        let geometry = self.geometry();
        let active = self.active.into_inner().unwrap_or_else(PoisonError::into_inner);
        Parts {
            geometry,
            file: active.file,
            name: self.name,
            created: self.created,
            block_device: self.block_device,
            incoming: self.incoming,
            erase_block: self.erase_block,
            serial: self.serial,
            cache: self.cache,
            cache_why: self.cache_why,
            engine: self.engine,
            engine_why: self.engine_why,
            alignment: self.alignment,
            path: self.policy.mode(),
            image: active.unmapped,
            storage: self.storage,
        }
    }

    /// Locks the file for this process, as opening it does: one writer, or any number of readers.
    ///
    /// # Errors
    /// That somebody else has it, or what the host says.
    pub fn lock(&self) -> Result<(), LockError> {
        lock_image(&self.file(), self.geometry.read_only)?;
        let Some(beside) = self.storage.beside() else { return Ok(()) };
        lock_image(beside, self.geometry.read_only).inspect_err(|_| unlock_image(&self.file()))
    }

    /// Prepares a file for being handed to another process, which has to lock it then: the kernel
    /// names as the holder of an `flock` who has taken it. What QEMU looks at stays.
    pub fn hand_over(&self) {
        // Without a lock there is nothing to let go.
        let _ = drop_flock(&self.file());
        let _ = self.storage.beside().map(drop_flock);
    }
}

impl From<Parts> for Disk {
    fn from(parts: Parts) -> Self {
        let disk = Self {
            nature: parts.storage.nature(),
            storage: parts.storage,
            name: parts.name,
            created: parts.created,
            block_device: parts.block_device,
            incoming: parts.incoming,
            erase_block: parts.erase_block,
            capacity: AtomicU64::new(parts.geometry.capacity),
            open_to: AtomicU64::new(parts.geometry.capacity),
            late: LateWrites::default(),
            geometry: parts.geometry,
            serial: parts.serial,
            cache: parts.cache,
            cache_why: parts.cache_why,
            engine: parts.engine,
            engine_why: parts.engine_why,
            alignment: parts.alignment,
            abandoned: AtomicBool::new(false),
            flush_failed: AtomicBool::new(false),
            failure_inherited: AtomicBool::new(false),
            turn: Arc::default(),
            erases: AtomicU32::new(0),
            locks: RangeLocks::with_capacity(LOCKS_MAX),
            policy: SharedPolicy::new(parts.path),
            active: Mutex::new(Active {
                image: None,
                unmapped: parts.image,
                bases: Arc::default(),
                journal: None,
                defers: false,
                without_journal: 0,
                is_unsure: false,
                state: None,
                file: parts.file,
            }),
            limits: Mutex::default(),
            at_limit: AtLimit::default(),
            not_polled: AtomicBool::new(false),
            incidents: Incidents::default(),
            holding: Holding::default(),
            clock: Clock::start(),
        };
        disk.find_holes();
        disk
    }
}
