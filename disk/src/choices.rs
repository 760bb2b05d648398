//! What can be chosen for a disk: its cache mode, its engine; and what its file asks for.

use ringway_aio::Engine;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::{fmt, io};

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
    /// Commands of NVMe for the generic character device of a namespace, past the block layer.
    Nvme,
    /// Completes everything at once and moves no data.
    Null,
    /// As `Null`, but each operation takes this many microseconds. A simulation.
    NullAfter(u32),
    /// A disk in memory that takes the time a real one would take. A simulation.
    Sim(SimModel),
    /// io_uring, and an NBD server that has what images are based on.
    IoUringNbd,
    /// The same with threads.
    ThreadsNbd,
    /// One that only one kind of storage has.
    Own(OwnEngine),
    /// An engine of whoever opened the disk ([`crate::CustomDisk`]).
    Custom,
}

/// The engine of one kind of storage. Its name says which it is.
#[derive(Clone, Copy, Debug)]
pub struct OwnEngine {
    /// The word that users see.
    pub name: &'static str,
    /// Makes one for so many operations at a time. Called on the thread that is to use it.
    pub make: fn(u32) -> io::Result<Box<dyn Engine>>,
}

impl PartialEq for OwnEngine {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for OwnEngine {}

impl Hash for OwnEngine {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
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
    pub const ALL: [Self; 5] =
        [Self::IoUring, Self::LinuxAio, Self::Threads, Self::Nvme, Self::Null];

    /// The pair of this engine and that of NBD servers, for images that are based on an export.
    #[must_use]
    pub const fn with_nbd(self) -> Option<Self> {
        match self {
            Self::IoUring => Some(Self::IoUringNbd),
            // The former has no descriptor that says when something is done.
            Self::LinuxAio | Self::Threads => Some(Self::ThreadsNbd),
            _ => None,
        }
    }

    /// True if the engine is only asynchronous past the page cache: Linux AIO without O_DIRECT
    /// silently carries each operation out within its submission.
    #[must_use]
    pub const fn needs_direct(self) -> bool {
        matches!(self, Self::LinuxAio)
    }

    /// The word used on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::Threads => "threads",
            Self::Nvme => "nvme",
            Self::Null | Self::NullAfter(_) => "null",
            Self::Sim(SimModel::Ram) => "sim:ram",
            Self::Sim(SimModel::Ssd) => "sim:ssd",
            Self::Sim(SimModel::Hdd) => "sim:hdd",
            Self::IoUringNbd => "io_uring+nbd",
            Self::ThreadsNbd => "threads+nbd",
            Self::Own(engine) => engine.name,
            Self::Custom => "custom",
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

pub(crate) fn choose<T: Copy>(
    word: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, UnknownWord> {
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
/// [`Geometry::logical_block`](ringway_core::Geometry::logical_block), which is something else.
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
