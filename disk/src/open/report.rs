//! A look at a disk that changes nothing: what it is, what [`open`] would choose, or why it would
//! refuse. Nothing is created, locked or opened for writing.

use super::device::Device;
use super::file::permission;
use super::foreign::ForeignFormat;
use super::format;
use super::holder::BY_HOST;
use super::image_lock::{LockError, marked_by_others};
use super::mount::{Locks, Mount, process};
use super::nvme::is_namespace;
use super::origin::Origin;
use super::probe::{self as host, FileKind};
use super::{Created, OpenError, OpenOptions, Source};
use super::{check_engine, check_size, choose_engine, open, open_cached, open_file};
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
use ringway_rbd::RbdError;
use std::ffi::CString;
use std::fs::{File, OpenOptions as FileOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What O_DIRECT needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direct {
    /// Of memory and offsets.
    pub alignment: Alignment,
    /// Who says so.
    pub origin: Origin,
}

/// Blocks and discarding, as a guest would see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Smallest unit of a request, in bytes.
    pub logical: u32,
    /// Smallest unit written at once, in bytes.
    pub physical: u32,
    /// The transfer it likes best, in bytes; 0 if it does not say.
    pub optimal_io: u32,
    /// Whether blocks can be discarded; `None` if only trying would tell.
    pub discard: Option<bool>,
    /// In units of this many bytes.
    pub discard_granularity: u32,
}

/// What [`open`] would choose, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The engine.
    pub engine: EngineKind,
    /// Why this one.
    pub engine_why: String,
    /// The cache mode.
    pub cache: CacheMode,
    /// Why this one.
    pub cache_why: String,
}

/// What can be known of a disk without opening it for good.
#[derive(Debug)]
pub struct Report {
    /// What it is, in words; `None` if it is nothing that could be served.
    pub kind: Option<&'static str>,
    /// Its size in bytes.
    pub bytes: Option<u64>,
    /// Bytes of a file that are really there.
    pub allocated: Option<u64>,
    /// The file system that holds a file.
    pub mount: Option<Mount>,
    /// The block device that it is, or that holds its file system.
    pub device: Option<Device>,
    /// What O_DIRECT needs, or why it does not work.
    pub direct: Option<Result<Direct, String>>,
    /// Blocks and discarding.
    pub blocks: Option<Blocks>,
    /// Who serves it now.
    pub holder: Option<String>,
    /// Another program holds a lock that is no hindrance, but may be a sign: QEMU does.
    pub locked_otherwise: bool,
    /// What it begins or ends with, if that is no raw image's.
    pub looks_like: Option<ForeignFormat>,
    /// What [`open`] would choose, or why it would refuse.
    pub verdict: Result<Choice, OpenError>,
}

impl Report {
    fn new(kind: Option<&'static str>, verdict: Result<Choice, OpenError>) -> Self {
        Self {
            kind,
            bytes: None,
            allocated: None,
            mount: None,
            device: None,
            direct: None,
            blocks: None,
            holder: None,
            locked_otherwise: false,
            looks_like: None,
            verdict,
        }
    }
}

/// Looks at what `options` name and says what [`open`] would find. A missing file is missing, even
/// where `options` would create it.
#[must_use]
pub fn probe(options: &OpenOptions) -> Report {
    match &options.source {
        Source::Path(path) if is_namespace(path) && options.qcow2.is_none() => {
            probe_namespace(path, options)
        }
        Source::Path(path) => {
            let options = OpenOptions { create_bytes: None, ..options.clone() };
            probe_path(path, &options)
        }
        Source::Rbd { .. } => probe_cluster(options),
        Source::Null { bytes, .. } | Source::Sim { bytes, .. } => probe_opened(*bytes, options),
        Source::Nbd(_) | Source::Other { .. } => probe_opened(0, options),
    }
}

/// There is nothing to be careful with: no file holds it.
fn probe_opened(bytes: u64, options: &OpenOptions) -> Report {
    let kind = options.source.kind();
    match open(options) {
        Ok(disk) => of_opened(kind, &disk),
        Err(error) => {
            let mut report = Report::new(Some(kind), Err(error));
            report.bytes = Some(bytes);
            report
        }
    }
}

/// What is seen of a disk that could be opened.
fn of_opened(kind: &'static str, disk: &Disk) -> Report {
    let shape = disk.geometry();
    let choice = Choice {
        engine: disk.engine(),
        engine_why: disk.engine_why().into(),
        cache: disk.cache(),
        cache_why: disk.cache_why().into(),
    };
    let mut report = Report::new(Some(kind), Ok(choice));
    report.bytes = Some(shape.capacity);
    report.blocks = Some(Blocks {
        logical: shape.logical_block,
        physical: shape.physical_block,
        optimal_io: shape.optimal_io,
        discard: Some(shape.discard),
        discard_granularity: shape.discard_granularity,
    });
    report
}

/// It is opened for reading, as if --engine nvme had been said; who would keep it from being written is
/// looked for.
fn probe_namespace(path: &Path, options: &OpenOptions) -> Report {
    let engine = Some(options.engine.unwrap_or(EngineKind::Nvme));
    let reading = OpenOptions { read_only: true, raw: true, engine, ..options.clone() };
    let holder = holder(path, options.read_only);
    let disk = match open(&reading) {
        Ok(disk) => disk,
        Err(error) => {
            return Report { holder, ..Report::new(Some("NVMe namespace"), Err(error)) };
        }
    };
    let mut report = of_opened("NVMe namespace", &disk);
    let block = disk.storage.beside();
    report.device = block.and_then(Device::below);
    report.looks_like =
        block.and_then(|block| ForeignFormat::of(block, disk.capacity()).ok().flatten());
    report.holder = holder;
    let alignment = disk.alignment();
    report.direct = Some(Ok(Direct { alignment, origin: Origin::Device }));
    if let (Some(blocks), Some(device)) = (&mut report.blocks, &report.device) {
        blocks.discard = Some(device.discard_granularity > 0);
    }
    let allowed = may_open(path, options, report.device.as_ref());
    let holder = report.holder.clone().map_or(Ok(()), |who| Err(in_use(path, who)));
    let format = report.looks_like.filter(|format| !options.raw && *format != ForeignFormat::Luks);
    let format =
        format.map_or(Ok(()), |format| Err(OpenError::Foreign { path: path.into(), format }));
    if let Err(error) = allowed.and(holder).and(format) {
        report.verdict = Err(error);
    } else if let Ok(choice) = &mut report.verdict {
        choice.engine_why = "no other takes such a device; say --engine nvme".into();
    }
    report
}

/// It is opened for reading, which takes no lock; whether it could be written is asked.
fn probe_cluster(options: &OpenOptions) -> Report {
    let disk = match open(&OpenOptions { read_only: true, ..options.clone() }) {
        Ok(disk) => disk,
        Err(error) => return Report::new(Some("RBD image"), Err(error)),
    };
    let mut report = of_opened("RBD image", &disk);
    let image = disk.cluster_image().filter(|image| image.target().snapshot.is_none());
    let Some(image) = image.filter(|_| !options.read_only) else { return report };
    if let Some(blocks) = &mut report.blocks {
        blocks.discard = Some(true);
    }
    if let Err(error) = image.may_be_written() {
        if let RbdError::InUse(holder) = &error {
            report.holder = Some(holder.clone());
        }
        let (target, why) = (disk.name().to_owned(), error.to_string());
        report.verdict = Err(OpenError::Remote { target, why });
    }
    report
}

fn probe_path(path: &Path, options: &OpenOptions) -> Report {
    let reading = OpenOptions { read_only: true, ..options.clone() };
    let kind = match Created::if_missing(path, options).and_then(|_| host::kind(path)) {
        Ok(kind) => kind,
        Err(error) => return Report::new(None, Err(error)),
    };
    let file = match open_file(path, &reading, kind, 0) {
        Ok(file) => file,
        Err(error) => {
            let error = match error {
                // With the words for what `open` would do.
                OpenError::Permission { .. } => permission(path, options.read_only),
                error => may_open(path, options, None).err().unwrap_or(error),
            };
            return Report::new(Some(kind.name()), Err(error));
        }
    };
    let device = Device::below(&file);
    let mount = if kind == FileKind::File { Mount::of(&file) } else { None };
    let locks = Locks::on(&file);
    let holder = holder_of(&file, options.read_only, &locks);
    let below = device.as_ref().filter(|_| kind == FileKind::BlockDevice);
    let verdict = may_open(path, options, below)
        .and_then(|()| choose(path, options, &reading, kind, holder.as_ref()));
    let bytes = host::size(path, &file, kind).ok();
    Report {
        bytes,
        looks_like: bytes.and_then(|bytes| ForeignFormat::of(&file, bytes).ok().flatten()),
        // st_blocks counts 512 bytes each, whatever the file system's blocks are.
        allocated: file
            .metadata()
            .ok()
            .filter(|_| kind == FileKind::File)
            .map(|m| m.blocks() * 512),
        direct: Some(direct(path, &reading, kind)),
        blocks: Some(blocks(path, &file, kind, mount.as_ref(), device.as_ref())),
        locked_otherwise: locks.foreign && holder.is_none(),
        holder,
        mount,
        device,
        ..Report::new(Some(kind.name()), verdict)
    }
}

/// Who has the image at `path` so that it cannot be opened, for reading or for writing; `None` if that
/// is nobody, or cannot be found out.
#[must_use]
pub fn holder(path: &Path, read_only: bool) -> Option<String> {
    let mut reading = FileOptions::new();
    // A path may have become a pipe that nobody writes to.
    let file = reading.read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    holder_of(&file, read_only, &Locks::on(&file))
}

/// Who would keep `open` from it. The lock itself is not tried: that would get in the way.
fn holder_of(file: &File, read_only: bool, locks: &Locks) -> Option<String> {
    if let Some(pid) = locks.pid {
        return Some(process(pid));
    }
    let byte = marked_by_others(file, read_only).ok()??;
    Some(LockError::Marked(byte).holder(file))
}

/// What `open` would be refused, found out without opening. `below` is the block device, if the
/// disk is one.
fn may_open(path: &Path, options: &OpenOptions, below: Option<&Device>) -> Result<(), OpenError> {
    let mode = if options.read_only { libc::R_OK } else { libc::R_OK | libc::W_OK };
    let allowed = CString::new(path.as_os_str().as_bytes()).is_ok_and(|name| {
        // SAFETY: the name is a C string.
        unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), mode, libc::AT_EACCESS) == 0 }
    });
    if !allowed || below.is_some_and(|device| device.read_only && !options.read_only) {
        return Err(permission(path, options.read_only));
    }
    if below.is_some_and(|device| device.used_by_host() && !options.read_only) {
        return Err(in_use(path, BY_HOST.into()));
    }
    Ok(())
}

fn in_use(path: &Path, holder: String) -> OpenError {
    OpenError::InUse { path: path.into(), holder, moves: true }
}

/// The steps of `open`, in its order, on a file opened for reading only.
fn choose(
    path: &Path,
    options: &OpenOptions,
    reading: &OpenOptions,
    kind: FileKind,
    holder: Option<&String>,
) -> Result<Choice, OpenError> {
    check_engine(options)?;
    let (file, cache, cache_why, alignment) = open_cached(path, reading, kind)?;
    let (engine, engine_why) = choose_engine(path, options, cache == CacheMode::None)?;
    if let Some(holder) = holder {
        return Err(in_use(path, holder.clone()));
    }
    let bytes = host::size(path, &file, kind)?;
    if options.qcow2.is_none() {
        format::check(path, &file, bytes, kind, options)?;
        check_size(path, bytes, options, alignment)?;
    }
    Ok(Choice { engine, engine_why, cache, cache_why })
}

fn direct(path: &Path, reading: &OpenOptions, kind: FileKind) -> Result<Direct, String> {
    let file = open_file(path, reading, kind, libc::O_DIRECT).map_err(|error| match error {
        OpenError::Host { source, .. } if source.raw_os_error() == Some(libc::EINVAL) => {
            "its file system does not offer it".into()
        }
        error => error.to_string(),
    })?;
    let (origin, alignment) = host::direct_alignment(&file, kind);
    alignment.map(|alignment| Direct { alignment, origin })
}

fn blocks(
    path: &Path,
    file: &File,
    kind: FileKind,
    mount: Option<&Mount>,
    device: Option<&Device>,
) -> Blocks {
    let found = host::Host::of(path, file, kind, false);
    Blocks {
        logical: found.logical_block,
        physical: found.physical_block,
        optimal_io: found.optimal_io,
        discard: match kind {
            FileKind::File => mount.and_then(Mount::punches_holes),
            FileKind::BlockDevice => device.map(|device| device.discard_granularity > 0),
        },
        discard_granularity: found.discard_granularity,
    }
}
