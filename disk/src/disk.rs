//! What is known about a disk once it is open.

use crate::active::Active;
use crate::at_limit::AtLimit;
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::clock::Clock;
use crate::holding::Holding;
use crate::incidents::Incidents;
use crate::locks::{LateWrites, RangeLocks};
use crate::storage::{Flush, Nature, Storage};
use ringway_aio::{Engine, FileId};
use ringway_core::sync_turn::SyncTurn;
use ringway_core::{ByteRange, Geometry};
use ringway_scheduler::SharedPolicy;
use ringway_throttle::Member;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An open disk, shared by all its queues.
#[derive(Debug)]
pub struct Disk {
    pub(crate) name: String,
    pub(crate) active: Mutex<Active>,
    /// Made by [`crate::open()`]: there was no such file before.
    pub(crate) created: bool,
    pub(crate) block_device: bool,
    /// Not locked when it was opened.
    pub(crate) incoming: bool,
    /// The unit in which ranges can be discarded or zeroed by the file itself, in bytes.
    pub(crate) erase_block: u32,
    pub(crate) geometry: Geometry,
    pub(crate) capacity: AtomicU64,
    /// Where requests may end without another look: the capacity, or 0 while a write is late.
    pub(crate) open_to: AtomicU64,
    pub(crate) serial: [u8; 20],
    pub(crate) cache: CacheMode,
    pub(crate) cache_why: String,
    pub(crate) engine: EngineKind,
    pub(crate) engine_why: String,
    pub(crate) alignment: Alignment,
    /// What holds its bytes, and what that is like.
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) nature: Nature,
    /// See [`Disk::abandon`].
    pub(crate) abandoned: AtomicBool,
    pub(crate) flush_failed: AtomicBool,
    /// It failed in an earlier process.
    pub(crate) failure_inherited: AtomicBool,
    /// Whose turn it is to make it durable.
    pub(crate) turn: Arc<SyncTurn>,
    /// Erasures that its file is asked for now.
    pub(crate) erases: AtomicU32,
    pub(crate) locks: RangeLocks,
    pub(crate) late: LateWrites,
    pub(crate) policy: SharedPolicy,
    /// Its own limits and those of its group.
    pub(crate) limits: Mutex<Vec<Arc<Member>>>,
    pub(crate) at_limit: AtLimit,
    /// See [`Disk::is_not_polled`].
    pub(crate) not_polled: AtomicBool,
    pub(crate) incidents: Incidents,
    pub(crate) holding: Holding,
    pub(crate) clock: Clock,
}

impl Disk {
    /// What the user called it: a path, or `null:SIZE`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if opening it made the file, so that a caller who fails later can take it away again.
    #[must_use]
    pub fn created(&self) -> bool {
        self.created
    }

    /// True if a file or device holds the data: neither `null:`, `sim:`, a server, a cluster nor a
    /// custom disk.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.nature.flush == Flush::Host
    }

    /// True if only an engine can make durable what was written: the data are with a server, in a cluster or
    /// wherever a custom engine has them.
    #[must_use]
    pub fn has_no_sync(&self) -> bool {
        self.nature.flush == Flush::Engine
    }

    /// What holds its bytes.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// What its storage is like.
    #[must_use]
    pub fn nature(&self) -> &Nature {
        &self.nature
    }

    /// True if it was opened without its lock ([`crate::OpenOptions::incoming`]).
    #[must_use]
    pub fn is_incoming(&self) -> bool {
        self.incoming
    }

    /// The shape of the disk. The capacity is the present one.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry { capacity: self.capacity.load(Relaxed), ..self.geometry.clone() }
    }

    /// What GET_ID answers, zero padded.
    #[must_use]
    pub fn serial(&self) -> &[u8; 20] {
        &self.serial
    }

    /// The cache mode in force.
    #[must_use]
    pub fn cache(&self) -> CacheMode {
        self.cache
    }

    /// Why this cache mode, in a few words.
    #[must_use]
    pub fn cache_why(&self) -> &str {
        &self.cache_why
    }

    /// The engine in use.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.engine
    }

    /// Why this engine, in a few words.
    #[must_use]
    pub fn engine_why(&self) -> &str {
        &self.engine_why
    }

    /// What its file asks of buffers and offsets.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// How requests are scheduled on it.
    #[must_use]
    pub fn policy(&self) -> &SharedPolicy {
        &self.policy
    }

    /// The limits of its queues: its own, and those of a group.
    #[must_use]
    pub fn limits(&self) -> Vec<Arc<Member>> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Queues that start from now on have these limits. Those that run have to be told.
    pub fn set_limits(&self, limits: Vec<Arc<Member>>) {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// Requests of a queue wait for a limit: said by the queue's worker, as often as it finds that. The
    /// first one since that was taken rings as an incident does.
    #[cold]
    pub fn mark_at_limit(&self) {
        if self.at_limit.mark(self.now()) {
            self.incidents.ring();
        }
    }

    /// True if requests have waited for a limit within the last second.
    #[must_use]
    pub fn is_at_limit(&self) -> bool {
        self.at_limit.is_so(self.now())
    }

    /// True if requests have waited for a limit since [`Disk::take_limit_reached`].
    #[must_use]
    pub fn has_reached_limit(&self) -> bool {
        self.at_limit.is_untold()
    }

    /// As [`Disk::has_reached_limit`]; the next one that waits rings.
    pub fn take_limit_reached(&self) -> bool {
        self.at_limit.take()
    }

    /// True if completions were to be polled for (`iopoll`), and its device has turned out to have no queues for that:
    /// they come by interrupts.
    #[must_use]
    pub fn is_not_polled(&self) -> bool {
        self.not_polled.load(Relaxed)
    }

    /// A worker has ended, and left to the kernel what it had in flight: nobody will know when that is over.
    pub fn abandon(&self) {
        self.abandoned.store(true, SeqCst);
    }

    /// True once a worker has left something in flight ([`Disk::abandon`]).
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(SeqCst)
    }

    /// What went wrong on it.
    #[must_use]
    pub fn incidents(&self) -> &Incidents {
        &self.incidents
    }

    /// Nanoseconds since it was opened.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// From now on the time is what was told last, in nanoseconds: for tests that have to be
    /// repeated exactly.
    #[cfg(feature = "manual-clock")]
    pub fn set_now(&self, ns: u64) {
        self.clock.set(ns);
    }

    /// What it is served from; locked for a moment. Queues have what they need of their own.
    pub(crate) fn active(&self) -> MutexGuard<'_, Active> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that is written; after a snapshot it is another one.
    #[must_use]
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.active().file)
    }

    /// Has an engine know the file that is written.
    ///
    /// # Errors
    /// As [`Engine::attach`].
    pub fn attach(&self, engine: &mut dyn Engine) -> io::Result<FileId> {
        self.storage.attach(engine, &self.file())
    }

    /// The file by which is known what outlives a process, whatever its disk is called: of a device with two nodes the
    /// one that others use.
    ///
    /// # Errors
    /// What the host says.
    pub fn known_by(&self) -> io::Result<File> {
        self.storage.beside().map_or_else(|| self.file().try_clone(), File::try_clone)
    }

    /// The file with the data of its image, if that is another one.
    #[must_use]
    pub fn data_file(&self) -> Option<Arc<File>> {
        self.active().data_file()
    }

    /// True if guests may write less than what the file takes in one piece, so that writes must be
    /// kept apart from the read-modify-write of their neighbours.
    pub(crate) fn needs_locks(&self) -> bool {
        u64::from(self.alignment.offset) > ringway_core::SECTOR_BYTES
    }

    /// `range` widened to what the file takes in one piece.
    pub(crate) fn widened(&self, range: ByteRange) -> ByteRange {
        // The capacity is a multiple of the alignment (checked by `open`) and the range lies within.
        range.widened(u64::from(self.alignment.offset)).unwrap_or(range)
    }
}
