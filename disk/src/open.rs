//! Opening a disk: the only place that probes the host and chooses.
//!
//! Nothing is created or changed unless everything else has succeeded.

mod device;
mod fence;
mod format;
mod image_lock;
mod mount;
pub(crate) mod probe;
mod report;

pub use device::Device;
pub use fence::foreign_holder;
pub use format::ForeignFormat;
pub use image_lock::{LockError, lock_image, unlock_image};
pub use mount::{Mount, is_dying, parent};
pub use report::{Blocks, Choice, Direct, ImageKind, Origin, Report, holder, probe};

use crate::choices::{Alignment, CacheMode, EngineKind, SimModel};
use crate::disk::Disk;
use crate::parts::Parts;
use fence::Fenced;
use probe::Kind;
use ringway_core::{Geometry, SECTOR_BYTES};
use ringway_scheduler::SchedulerMode;
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A raw image file or a block device.
    Path(PathBuf),
    /// No disk at all: requests move no data.
    Null {
        /// Capacity in bytes.
        bytes: u64,
        /// How long each request takes, in microseconds; 0 is no time at all.
        latency_us: u32,
    },
    /// A simulated disk: data in memory, time as a model says. For tests and benchmarks.
    Sim {
        /// Which kind of disk.
        model: SimModel,
        /// Capacity in bytes.
        bytes: u64,
    },
}

/// How a disk is to be opened. `None` leaves the choice to [`open`].
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What to open.
    pub source: Source,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
    /// Relation to the host's caches.
    pub cache: Option<CacheMode>,
    /// The engine; it must be one of `engines`.
    pub engine: Option<EngineKind>,
    /// The engines that work on this host, best first, each with the reason to take it, and those
    /// that do not with the reason.
    pub engines: Vec<(EngineKind, Result<String, String>)>,
    /// What GET_ID answers, at most 20 bytes.
    pub serial: Option<String>,
    /// The block size shown to the guest, in bytes: 512 or 4096.
    pub block_size: Option<u32>,
    /// Create a sparse file of this many bytes if there is none.
    pub create_bytes: Option<u64>,
    /// How long to wait for whoever has the image. Without it a living process is not waited for,
    /// and the last writes of a killed one for 30 seconds.
    pub lock_wait: Option<Duration>,
    /// The image is another daemon's until its guest arrives here: it is opened, and not locked. Who
    /// serves it calls [`Disk::lock`] before the first request. It has to be there already.
    pub incoming: bool,
    /// How requests travel.
    pub path: SchedulerMode,
    /// Its owner says that it is raw, whatever it begins or ends with.
    pub raw: bool,
}

impl OpenOptions {
    /// All choices left open.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self {
            source,
            read_only: false,
            cache: None,
            engine: None,
            engines: vec![(EngineKind::Threads, Ok("works everywhere".into()))],
            serial: None,
            block_size: None,
            create_bytes: None,
            lock_wait: None,
            incoming: false,
            path: SchedulerMode::default(),
            raw: false,
        }
    }
}

/// Why a disk could not be opened: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No such file.
    #[error("{0}: there is no such file. Check the path; `serve --size SIZE` makes a sparse image")]
    Missing(PathBuf),
    /// No such file, and none is to be made.
    #[error(
        "{0}: there is no such file. --incoming waits for an image that another daemon serves: check \
         the path, and that its storage is mounted here"
    )]
    NothingIncoming(PathBuf),
    /// The folder it should be in does not exist.
    #[error("{0}: its folder does not exist. Check the path")]
    NoFolder(PathBuf),
    /// Permission.
    #[error("{path}: no permission to open it for {mode}. {hint}")]
    Permission {
        /// The file.
        path: PathBuf,
        /// "reading and writing" or "reading".
        mode: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A directory, a pipe, …
    #[error("{path}: it is {what}, not a file or block device. Name a raw disk image")]
    NotADisk {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// It looks like another format, and nobody has said that it is raw.
    #[error(
        "{path}: it looks like {}, and only raw images are served: a guest could not use it, and its \
         first write could destroy it. Make a raw one of it (`qemu-img convert -O raw {path} NEW`). If \
         a guest has written what is there, do not convert it: --format raw serves it as it is",
        format.words()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        format: ForeignFormat,
    },
    /// Its length is no whole number of sectors.
    #[error(
        "{path}: its size, {bytes} bytes, is not a multiple of {unit}. A raw image is a whole \
         number of blocks; `truncate -s %{unit} {path}` rounds it up"
    )]
    NotWhole {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
        /// What it should be a multiple of.
        unit: u32,
    },
    /// Nothing to serve.
    #[error("{0}: it is empty. Give it a size first, for example `truncate -s 10G {0}`")]
    Empty(PathBuf),
    /// Somebody else serves it.
    #[error(
        "{path}: it is in use by {holder}. One image can be written by one daemon only; stop the \
         other one, serve it --read-only from both, or with --incoming if a guest is to be migrated \
         here"
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Who holds the lock, as far as is known.
        holder: String,
    },
    /// Another file has its name by now, or none.
    #[error(
        "{0}: it was removed, or replaced by another file, while it was being opened. Keep images \
         where they are while a daemon starts"
    )]
    Replaced(PathBuf),
    /// O_DIRECT was asked for and is not to be had.
    #[error("{path}: --cache none needs O_DIRECT, but {why}. Use --cache writeback")]
    NoDirect {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// An engine was asked for and does not work here.
    #[error("--engine {engine} does not work here: {why}. Use --engine auto")]
    Engine {
        /// The engine.
        engine: EngineKind,
        /// The reason.
        why: String,
    },
    /// The serial does not fit.
    #[error("serial '{0}': at most 20 bytes of printable ASCII can be shown to a guest")]
    Serial(String),
    /// A block size nobody can use.
    #[error("block size {size}: {why}")]
    BlockSize {
        /// What was asked for, in bytes.
        size: u32,
        /// The reason.
        why: String,
    },
    /// A size nobody can use.
    #[error("{name}: size {bytes} is not a positive multiple of 512 bytes")]
    Size {
        /// The disk.
        name: String,
        /// The size in bytes.
        bytes: u64,
    },
    /// Anything else the host says.
    #[error("{path}: cannot {what}: {source}")]
    Host {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
}

/// Opens a disk, probes what it can do, and makes the choices that were left open.
///
/// # Errors
/// [`OpenError`]; nothing was created or changed then.
pub fn open(options: &OpenOptions) -> Result<Disk, OpenError> {
    match &options.source {
        Source::Null { bytes, latency_us: 0 } => {
            open_unreal(&format!("null:{}", short(*bytes)), *bytes, EngineKind::Null, options)
        }
        Source::Null { bytes, latency_us } => {
            let name = format!("null:{},latency={latency_us}us", short(*bytes));
            open_unreal(&name, *bytes, EngineKind::NullAfter(*latency_us), options)
        }
        Source::Sim { model, bytes } => {
            let name = format!("sim:{}:{}", model.name(), short(*bytes));
            open_unreal(&name, *bytes, EngineKind::Sim(*model), options)
        }
        Source::Path(path) => open_path(path, options),
    }
}

/// A size as people write it, in the largest unit that loses nothing: `1T`, `1000`.
fn short(bytes: u64) -> String {
    let units = [(1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((unit, letter)) => format!("{}{letter}", bytes / unit),
        None => bytes.to_string(),
    }
}

/// A disk that no file holds: null, or a simulation on memory.
fn open_unreal(
    name: &str,
    bytes: u64,
    engine: EngineKind,
    options: &OpenOptions,
) -> Result<Disk, OpenError> {
    let name = name.to_owned();
    if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
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
    }))
}

pub(crate) fn memory_file(bytes: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the descriptor is new and nobody else's.
    let file = unsafe {
        let fd = libc::memfd_create(c"ringway-sim".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    file.set_len(bytes)?;
    Ok(file)
}

fn open_path(path: &Path, options: &OpenOptions) -> Result<Disk, OpenError> {
    if let Some(size) = options.block_size {
        check_block_size(size)?;
    }
    let serial = serial_bytes(options.serial.as_deref(), &path.to_string_lossy())?;
    check_engine(options)?;
    let created = Created::if_missing(path, options)?;
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
        block_device: kind == Kind::BlockDevice,
        erase_block: if kind == Kind::BlockDevice { host.logical_block } else { 1 },
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
    if !bytes.is_multiple_of(u64::from(unit)) {
        return Err(OpenError::NotWhole { path: path.into(), bytes, unit });
    }
    Ok(())
}

fn check_block_size(size: u32) -> Result<(), OpenError> {
    match size {
        512 | 4096 => Ok(()),
        _ => Err(OpenError::BlockSize { size, why: "it must be 512 or 4096".into() }),
    }
}

/// Refuses an engine that cannot work whatever the disk is.
fn check_engine(options: &OpenOptions) -> Result<(), OpenError> {
    let Some(engine) = options.engine else { return Ok(()) };
    let why = if engine == EngineKind::Null {
        "it would lose every write; it serves null:SIZE only".into()
    } else if let Some(cache) = options.cache.filter(|&mode| mode != CacheMode::None)
        && engine.needs_direct()
    {
        format!(
            "it needs O_DIRECT (--cache none), not --cache {cache}: without it the kernel carries \
             each request out while it is submitted"
        )
    } else {
        match options.engines.iter().find(|(kind, _)| *kind == engine) {
            Some((_, Ok(_))) => return Ok(()),
            Some((_, Err(why))) => why.clone(),
            None => "it is not built in".into(),
        }
    };
    Err(OpenError::Engine { engine, why })
}

/// The engine that was asked for, or the best one that works here for this file.
fn choose_engine(
    path: &Path,
    options: &OpenOptions,
    direct: bool,
) -> Result<(EngineKind, String), OpenError> {
    match options.engine {
        Some(engine) if engine.needs_direct() && !direct => Err(OpenError::Engine {
            engine,
            why: format!("it needs O_DIRECT, which does not work on {}", path.display()),
        }),
        Some(engine) => Ok((engine, "as asked".into())),
        None => options
            .engines
            .iter()
            .filter(|(engine, _)| direct || !engine.needs_direct())
            .find_map(|(engine, works)| works.as_ref().ok().map(|why| (*engine, why.clone())))
            .ok_or_else(|| OpenError::Engine {
                engine: EngineKind::Threads,
                why: "this host offers no engine at all".into(),
            }),
    }
}

/// Opens the file for the cache mode that was asked for, or for the best one.
fn open_cached(
    path: &Path,
    options: &OpenOptions,
    kind: Kind,
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
    kind: Kind,
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
    if !bytes.is_multiple_of(u64::from(alignment.offset)) {
        return Ok(Err(format!(
            "its size, {bytes} bytes, is not a multiple of the {} bytes that O_DIRECT needs here",
            alignment.offset
        )));
    }
    Ok(Ok((file, alignment)))
}

fn open_file(
    path: &Path,
    options: &OpenOptions,
    kind: Kind,
    flags: i32,
) -> Result<File, OpenError> {
    // A block device that is mounted must not be written behind the file system's back.
    let claims = kind == Kind::BlockDevice && !options.read_only;
    let mut exclusive = if claims { libc::O_EXCL } else { 0 };
    let mut patience = fence::Patience::new(path, options);
    loop {
        let file = FileOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(flags | exclusive | libc::O_CLOEXEC)
            .open(path);
        let source = match file {
            Ok(file) => return Ok(file),
            Err(source) => source,
        };
        return Err(match source.raw_os_error() {
            // The source of a migration on this very host.
            Some(libc::EBUSY) if options.incoming && patience.is_claimed_by_a_process() => {
                exclusive = 0;
                continue;
            }
            Some(libc::EBUSY) => {
                patience.claimed()?;
                continue;
            }
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => permission(path, options.read_only),
            _ => OpenError::Host { path: path.into(), what: "open it", source },
        });
    }
}

/// Who uses a block device that is mounted, or that a RAID or a volume is made of.
const BY_HOST: &str = "the host itself (mounted, or part of another device)";

fn permission(path: &Path, read_only: bool) -> OpenError {
    OpenError::Permission {
        path: path.into(),
        mode: if read_only { "reading" } else { "reading and writing" },
        hint: if read_only {
            "Run as a user who may read it"
        } else {
            "Run as a user who may write it, or use `serve --read-only`"
        },
    }
}

/// The serial as the guest reads it; without one a word that is the same for the same path.
pub(crate) fn serial_bytes(serial: Option<&str>, name: &str) -> Result<[u8; 20], OpenError> {
    let word = match serial {
        Some(word) => word.to_owned(),
        None => format!("rw-{:016x}", fnv1a(name.as_bytes())),
    };
    if word.len() > 20
        || word.is_empty()
        || !word.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
    {
        return Err(OpenError::Serial(word));
    }
    let mut bytes = [0; 20];
    bytes[..word.len()].copy_from_slice(word.as_bytes());
    Ok(bytes)
}

/// The FNV-1a hash: short, and the same in every release.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A file that this process has made and will remove again unless the disk opens: its path, device and
/// inode. Whatever else has got that name by then is not ours.
struct Created(Option<(PathBuf, (u64, u64))>);

impl Created {
    fn if_missing(path: &Path, options: &OpenOptions) -> Result<Self, OpenError> {
        match path.symlink_metadata() {
            Ok(_) => return Ok(Self(None)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(permission(path, options.read_only));
            }
            Err(source) => {
                return Err(OpenError::Host { path: path.into(), what: "look at it", source });
            }
        }
        if options.incoming {
            return Err(OpenError::NothingIncoming(path.into()));
        }
        let Some(bytes) = options.create_bytes else {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            return Err(match folder.is_some_and(|folder| !folder.exists()) {
                true => OpenError::NoFolder(path.into()),
                false => OpenError::Missing(path.into()),
            });
        };
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(OpenError::Size { name: path.display().to_string(), bytes });
        }
        let file = FileOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => OpenError::NoFolder(path.into()),
            io::ErrorKind::PermissionDenied => permission(path, false),
            _ => OpenError::Host { path: path.into(), what: "create it", source },
        })?;
        let host = |what| move |source| OpenError::Host { path: path.into(), what, source };
        let meta = file.metadata().map_err(host("look at it"))?;
        let created = Self(Some((path.into(), (meta.dev(), meta.ino()))));
        file.set_len(bytes).map_err(host("give it its size"))?;
        Ok(created)
    }

    /// Keeps the file. True if there is one to keep, and `file` is it.
    fn keep(mut self, file: Option<&File>) -> bool {
        let made = self.0.take().map(|(_, made)| made);
        let opened = file.and_then(|file| file.metadata().ok());
        made.is_some() && made == opened.map(|meta| (meta.dev(), meta.ino()))
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        if let Some((path, made)) = &self.0
            && path.symlink_metadata().is_ok_and(|meta| (meta.dev(), meta.ino()) == *made)
        {
            // Best effort: the error that brought us here is the one worth telling.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests;
