//! What is known about a disk once it is open.

use crate::incidents::Incidents;
use crate::locks::RangeLocks;
use crate::state::State;
use ringway_core::{ByteRange, Geometry, Op, Request, Status};
use ringway_scheduler::SharedPolicy;
use std::fmt;
use std::fs::File;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// How writes relate to the host's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// O_DIRECT: past the host's page cache. A flush makes writes durable.
    None,
    /// Through the host's page cache. A flush makes writes durable.
    Writeback,
    /// Through the host's page cache; every write is durable before it completes.
    Writethrough,
    /// Through the host's page cache; flushes do nothing. A crash of the host loses data.
    Unsafe,
}

impl CacheMode {
    /// All modes, in the order of the help text.
    pub const ALL: [Self; 4] = [Self::None, Self::Writeback, Self::Writethrough, Self::Unsafe];

    /// The word used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Unsafe => "unsafe",
        }
    }

    /// True if the guest should be told of a volatile write cache.
    #[must_use]
    pub const fn write_back(self) -> bool {
        !matches!(self, Self::Writethrough)
    }
}

/// The engines a disk can be served with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// io_uring.
    IoUring,
    /// Linux AIO (`io_submit`), for O_DIRECT only.
    LinuxAio,
    /// A pool of threads that read and write synchronously.
    Threads,
    /// Completes everything at once and moves no data.
    Null,
    /// As `Null`, but each operation takes this many microseconds. A simulation.
    NullAfter(u32),
    /// A disk in memory that takes the time a real one would take. A simulation.
    Sim(SimModel),
}

/// Which disk [`EngineKind::Sim`] simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SimModel {
    /// A disk as fast as memory.
    Ram,
    /// A solid-state disk.
    Ssd,
    /// One head over turning platters.
    Hdd,
}

impl SimModel {
    /// All models.
    pub const ALL: [Self; 3] = [Self::Ram, Self::Ssd, Self::Hdd];

    /// The word used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Ssd => "ssd",
            Self::Hdd => "hdd",
        }
    }
}

impl FromStr for SimModel {
    type Err = UnknownWord;
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        choose(word, &Self::ALL, Self::name)
    }
}

impl EngineKind {
    /// The engines that can be asked for, in the order of preference.
    pub const ALL: [Self; 4] = [Self::IoUring, Self::LinuxAio, Self::Threads, Self::Null];

    /// True if the engine is only asynchronous past the page cache: Linux AIO without O_DIRECT
    /// silently carries each operation out within its submission.
    #[must_use]
    pub const fn needs_direct(self) -> bool {
        matches!(self, Self::LinuxAio)
    }

    /// The word used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
            Self::Null | Self::NullAfter(_) => "null",
            Self::Sim(SimModel::Ram) => "sim:ram",
            Self::Sim(SimModel::Ssd) => "sim:ssd",
            Self::Sim(SimModel::Hdd) => "sim:hdd",
        }
    }
}

/// A word that names no choice.
#[derive(Debug, thiserror::Error)]
#[error("'{word}' is not one of {choices}")]
pub struct UnknownWord {
    word: String,
    choices: String,
}

fn choose<T: Copy>(word: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, UnknownWord> {
    all.iter().copied().find(|&choice| name(choice) == word).ok_or_else(|| UnknownWord {
        word: word.to_owned(),
        choices: all.iter().map(|&choice| name(choice)).collect::<Vec<_>>().join(", "),
    })
}

impl FromStr for CacheMode {
    type Err = UnknownWord;
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        choose(word, &Self::ALL, Self::name)
    }
}

impl FromStr for EngineKind {
    type Err = UnknownWord;
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        choose(word, &Self::ALL, Self::name)
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What the file asks of memory and offsets, in bytes; powers of two. 1 means anything goes.
///
/// This is a matter between the disk and its file (O_DIRECT). The guest sees
/// [`Geometry::logical_block`], which is something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of buffer addresses.
    pub memory: u32,
    /// Of file offsets and lengths.
    pub offset: u32,
}

impl Alignment {
    /// No demands: the page cache takes anything.
    pub const ANY: Self = Self { memory: 1, offset: 1 };
}

/// An open disk, shared by all its queues.
#[derive(Debug)]
pub struct Disk {
    pub(crate) name: String,
    pub(crate) file: Arc<File>,
    /// Made by [`crate::open()`]: there was no such file before.
    pub(crate) created: bool,
    pub(crate) block_device: bool,
    /// Not locked when it was opened.
    pub(crate) incoming: bool,
    /// The unit in which ranges can be discarded or zeroed by the file itself, in bytes.
    pub(crate) erase_block: u32,
    pub(crate) geometry: Geometry,
    pub(crate) capacity: AtomicU64,
    pub(crate) serial: [u8; 20],
    pub(crate) cache: CacheMode,
    pub(crate) cache_why: String,
    pub(crate) engine: EngineKind,
    pub(crate) engine_why: String,
    pub(crate) alignment: Alignment,
    pub(crate) flush_failed: AtomicBool,
    /// It failed in an earlier process.
    pub(crate) failure_inherited: AtomicBool,
    /// What outlives this process.
    pub(crate) state: Option<State>,
    /// A sync of a cached disk is under way; there is one at a time.
    pub(crate) syncing: AtomicBool,
    pub(crate) locks: RangeLocks,
    pub(crate) policy: SharedPolicy,
    pub(crate) incidents: Incidents,
    /// When its clock began.
    pub(crate) begun: Instant,
    /// The time, if it was told: see [`Disk::set_now`].
    pub(crate) told: AtomicU64,
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

    /// True if a file or device holds the data: neither `null:` nor `sim:`.
    #[must_use]
    pub fn is_real(&self) -> bool {
        !matches!(self.engine, EngineKind::Null | EngineKind::NullAfter(_) | EngineKind::Sim(_))
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

    /// What went wrong on it.
    #[must_use]
    pub fn incidents(&self) -> &Incidents {
        &self.incidents
    }

    /// Nanoseconds since it was opened.
    pub(crate) fn now(&self) -> u64 {
        match self.told.load(Relaxed) {
            u64::MAX => u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
            told => told,
        }
    }

    /// From now on the time is what was told last, in nanoseconds: for tests that have to be
    /// repeated exactly.
    pub fn set_now(&self, ns: u64) {
        self.told.store(ns, Relaxed);
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The one place that says whether a request may be carried out: bounds and read-only, for
    /// every operation.
    ///
    /// # Errors
    /// The answer for the guest.
    #[inline]
    pub fn authorise(&self, request: &Request) -> Result<(), Status> {
        if request.op.changes_disk() && self.geometry.read_only {
            return Err(Status::IoError);
        }
        if request.range.end() > self.capacity.load(Relaxed) {
            return Err(Status::IoError);
        }
        if request.op == Op::Discard && !self.geometry.discard {
            return Err(Status::Unsupported);
        }
        Ok(())
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
