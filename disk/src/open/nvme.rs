//! NVMe namespaces past the block layer, by their generic character devices.

mod identify;

use super::engine::check_block_size;
use super::fence::{self, Fenced};
use super::file::permission;
use super::serial::{place, serial_bytes};
use super::{ForeignFormat, LockError, OpenError, OpenOptions, lock_image};
use crate::choices::{Alignment, CacheMode, EngineKind};
use crate::disk::Disk;
use crate::parts::Parts;
use crate::storage::{Passthrough, device_bytes};
use identify::{Identity, Queue, identify, namespace_id};
use ringway_aio::nvme::{Facts, Namespace};
use ringway_core::Geometry;
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the device and the kernel ask of memory: whole dwords.
const MEMORY: u32 = 4;

/// The name of the namespace (`0n1` of `ng0n1`) whose generic character device `path` is, by what the
/// kernel calls it.
fn name(path: &Path) -> Option<String> {
    let meta = path.metadata().ok().filter(|meta| meta.file_type().is_char_device())?;
    let number = meta.rdev();
    let node = format!("/sys/dev/char/{}:{}", libc::major(number), libc::minor(number));
    let folder = Path::new(&node).canonicalize().ok()?;
    namespace_name(folder.file_name()?.to_str()?)
}

/// `0n1` of `ng0n1`.
fn namespace_name(device: &str) -> Option<String> {
    let name = device.strip_prefix("ng")?;
    let (controller, namespace) = name.split_once('n')?;
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(controller) && is_number(namespace)).then(|| name.to_owned())
}

/// True if `path` is the generic character device of an NVMe namespace.
#[must_use]
pub fn is_namespace(path: &Path) -> bool {
    name(path).is_some()
}

/// What was found out of a namespace, all of it open.
struct Found {
    file: File,
    block: File,
    facts: Facts,
    bytes: u64,
    queue: Queue,
}

/// Opens a namespace, claims and locks it.
pub(super) fn open(path: &Path, options: &OpenOptions) -> Result<Disk, OpenError> {
    check(path, options)?;
    let serial = serial_bytes(options.serial.as_deref(), &place(path))?;
    let name = name(path).ok_or_else(|| refuse(path, "it is no NVMe namespace any more"))?;
    let opened = fence::locked(path, options, || {
        let found = find(path, &name, options)?;
        let file = found.file.try_clone().map_err(|source| host(path, "use it", source))?;
        Ok((file, found))
    });
    let found = match opened {
        Ok((_, found)) => found,
        Err(Fenced::Open(error) | Fenced::Theirs(error)) => return Err(error),
    };
    // Who looks at the block device alone learns of it, too.
    lock_block(path, &found.block, options)?;
    check_content(path, &found, options)?;
    disk(path, options, found, serial)
}

/// Refuses what such a device is not for.
fn check(path: &Path, options: &OpenOptions) -> Result<(), OpenError> {
    let engine = options.engine;
    let why = if engine.is_none() {
        "it is a character device of NVMe, which takes commands past the host's block layer: say \
         --engine nvme if that is what you want, or serve its block device"
    } else if engine != Some(EngineKind::Nvme) {
        "it is a character device of NVMe, which only --engine nvme serves"
    } else if options.cache.is_some_and(|mode| mode != CacheMode::None) {
        "commands of NVMe go past the page cache: leave --cache out, or say none"
    } else if options.create_bytes.is_some() {
        "it is as large as its device makes it: leave --size out"
    } else if options.incoming {
        "its claim cannot be handed over with a guest: leave --incoming out, or serve its block \
         device"
    } else {
        return options.block_size.map_or(Ok(()), check_block_size);
    };
    Err(refuse(path, why))
}

/// Opens both devices and asks what they are.
fn find(path: &Path, name: &str, options: &OpenOptions) -> Result<Found, OpenError> {
    let file = FileOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|source| cannot_open(path, options, source))?;
    let block = claim(path, name, options)?;
    let id = namespace_id(&file).map_err(|source| host(path, "ask for its namespace", source))?;
    let identity = identify(&file, id).map_err(|source| match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => refuse(
            path,
            "this host lets only processes with CAP_SYS_ADMIN send commands of NVMe (Linux 6.2 and \
             newer look at the device's mode instead). Start the daemon as root, or serve its block \
             device",
        ),
        _ => host(path, "identify its namespace", source),
    })?;
    let queue = Queue::of(&sysfs(name));
    let (facts, bytes) = judge(path, &block, &identity, &queue, id, options)?;
    Ok(Found { file, block, facts, bytes, queue })
}

/// Refuses what cannot be served; gives facts and size.
fn judge(
    path: &Path,
    block: &File,
    identity: &Identity,
    queue: &Queue,
    id: u32,
    options: &OpenOptions,
) -> Result<(Facts, u64), OpenError> {
    let shift = identity.block_shift().map_err(|why| refuse(path, &why))?;
    if queue.is_zoned {
        return Err(refuse(path, "it is zoned, and guests would not keep to its zones"));
    }
    if identity.is_write_protected() && !options.read_only {
        return Err(refuse(path, "it is write protected. Serve it with --read-only"));
    }
    let bytes = identity.blocks().checked_mul(1 << shift);
    let known = device_bytes(block).map_err(|source| host(path, "learn its size", source))?;
    let bytes = bytes.filter(|&bytes| bytes == known).ok_or_else(|| {
        let why = format!(
            "it says that it has {} blocks of {} bytes, and the host believes {known} bytes. Rescan it \
             (`nvme ns-rescan`)",
            identity.blocks(),
            1u32 << shift
        );
        refuse(path, &why)
    })?;
    if bytes == 0 {
        return Err(OpenError::Empty(path.into()));
    }
    Ok((queue.facts(id, identity, shift), bytes))
}

/// Opens the block device of the same namespace, and to write claims it for all the host: so that it is
/// neither mounted nor part of another device, now and as long as it is served.
fn claim(path: &Path, name: &str, options: &OpenOptions) -> Result<File, OpenError> {
    let beside = block_path(path, name)?;
    let mut lock_wait = fence::LockWait::new(&beside, options, false);
    let claims = if options.read_only { 0 } else { libc::O_EXCL };
    // What is read here must not stay in a cache that is not told of what guests write.
    loop {
        let opened = FileOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(claims | libc::O_DIRECT | libc::O_CLOEXEC)
            .open(&beside);
        match opened {
            Ok(file) => return Ok(file),
            Err(source) if source.raw_os_error() == Some(libc::EBUSY) => lock_wait.claimed()?,
            Err(source) => return Err(cannot_open(&beside, options, source)),
        }
    }
}

/// The block device, in the same folder as the character device. Its number is what the kernel says.
fn block_path(path: &Path, name: &str) -> Result<PathBuf, OpenError> {
    let real = path.canonicalize().map_err(|source| host(path, "look at it", source))?;
    let beside = real.with_file_name(format!("nvme{name}"));
    let number = std::fs::read_to_string(sysfs(name).join("dev")).ok();
    let number = number.as_deref().and_then(|text| {
        let (major, minor) = text.trim().split_once(':')?;
        Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
    });
    let is_it = beside
        .metadata()
        .is_ok_and(|meta| meta.file_type().is_block_device() && Some(meta.rdev()) == number);
    if is_it {
        return Ok(beside);
    }
    let why = format!(
        "its block device, {}, is not there: without it nothing keeps the host from using the \
         namespace meanwhile. Have both devices here",
        beside.display()
    );
    Err(refuse(path, &why))
}

fn sysfs(name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/class/block/nvme{name}"))
}

fn lock_block(path: &Path, block: &File, options: &OpenOptions) -> Result<(), OpenError> {
    lock_image(block, options.read_only).map_err(|error| match error {
        LockError::Host(source) => host(path, "lock its block device", source),
        error => {
            let holder = error.holder(block);
            OpenError::InUse { path: path.into(), holder, moves: false }
        }
    })
}

/// Refuses what looks as if it were not raw. What programs have written through the host's page cache
/// goes to the device first.
fn check_content(path: &Path, found: &Found, options: &OpenOptions) -> Result<(), OpenError> {
    if !options.read_only {
        let synced = found.block.sync_data();
        synced.map_err(|source| host(path, "sync its block device", source))?;
    }
    if options.raw {
        return Ok(());
    }
    let format = ForeignFormat::of(&found.block, found.bytes);
    match format.map_err(|source| host(path, "read it", source))? {
        None | Some(ForeignFormat::Luks) => Ok(()),
        Some(format) => Err(OpenError::Foreign { path: path.into(), format }),
    }
}

fn disk(
    path: &Path,
    options: &OpenOptions,
    found: Found,
    serial: [u8; 20],
) -> Result<Disk, OpenError> {
    let Found { file, block, facts, bytes, queue } = found;
    let block_bytes = 1u32 << facts.block_shift;
    let small = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
    let logical_block = options.block_size.unwrap_or(block_bytes);
    if bytes % u64::from(logical_block) != 0 {
        let unit = logical_block;
        return Err(OpenError::NotWhole { path: path.into(), bytes, unit });
    }
    let physical = small(queue.physical_block).max(block_bytes).max(logical_block);
    Ok(Disk::from(Parts {
        name: path.display().to_string(),
        file: Arc::new(file),
        created: false,
        block_device: true,
        incoming: false,
        erase_block: block_bytes,
        geometry: Geometry {
            capacity: bytes,
            logical_block,
            physical_block: physical,
            optimal_io: small(queue.optimal_io),
            read_only: options.read_only,
            discard: facts.discard_blocks > 0 && !options.read_only,
            discard_granularity: small(queue.discard_granularity).max(block_bytes),
        },
        serial,
        cache: CacheMode::None,
        cache_why: match options.cache {
            Some(_) => "as asked".into(),
            None => "commands of NVMe go past the page cache".into(),
        },
        engine: EngineKind::Nvme,
        engine_why: "as asked".into(),
        alignment: Alignment { memory: MEMORY, offset: block_bytes },
        path: options.path,
        image: None,
        storage: Arc::new(Passthrough(Arc::new(Namespace { facts, block }))),
    }))
}

fn cannot_open(path: &Path, options: &OpenOptions, source: io::Error) -> OpenError {
    match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => permission(path, options.read_only),
        _ => host(path, "open it", source),
    }
}

fn host(path: &Path, what: &'static str, source: io::Error) -> OpenError {
    OpenError::Host { path: path.into(), what, source }
}

fn refuse(path: &Path, why: &str) -> OpenError {
    OpenError::Nvme { path: path.into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::open as open_disk;
    use crate::{Source, open::Choice};

    #[test]
    fn namespaces_are_known_by_the_kernels_names() {
        for (device, name) in [("ng0n1", "0n1"), ("ng12n34", "12n34")] {
            assert_eq!(namespace_name(device).as_deref(), Some(name));
        }
        for device in ["nvme0n1", "ng0", "ngn1", "ng0n", "ng0n1p1", "ng0c0n1", "nvme0", "null"] {
            assert_eq!(namespace_name(device), None, "{device}");
        }
        assert!(!is_namespace(Path::new("/dev/null")) && !is_namespace(Path::new("/")));
    }

    #[test]
    fn the_engine_is_for_namespaces_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let mut options = OpenOptions::new(Source::Path(path));
        options.engine = Some(EngineKind::Nvme);
        options.engines = vec![(EngineKind::Nvme, Ok("as asked".into()))];
        let error = open_disk(&options).unwrap_err();
        assert!(error.to_string().contains("/dev/ng0n1"), "{error}");
        let refused: Result<Choice, _> = crate::probe(&options).verdict;
        assert!(refused.is_err());
    }

    /// Whoever serves it by its block device next has to find that it is paused, and that a flush has failed.
    #[test]
    fn c113_a_namespace_is_known_by_its_block_device() {
        let file = File::open("/dev/null").unwrap();
        let block = tempfile::tempfile().unwrap();
        let number = |file: &File| file.metadata().unwrap().ino();
        let known = number(&block);
        let facts = Facts {
            id: 1,
            block_shift: 9,
            max_bytes: 1 << 17,
            discard_blocks: 0,
            zero_blocks: 0,
            deallocates_zeroed: false,
        };
        let queue = Queue::of(Path::new("/dev/null"));
        let path = Path::new("/dev/ng0n1");
        let options = OpenOptions::new(Source::Path(path.into()));
        let found = Found { file, block, facts, bytes: 1 << 20, queue };
        let disk = disk(path, &options, found, [0; 20]).unwrap();
        assert_eq!(number(&disk.known_by().unwrap()), known);
    }
}
