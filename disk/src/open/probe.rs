//! What the host says about a file or block device.

use super::error::A_SOCKET;
use super::mount::Mount;
use super::{OpenError, Origin};
use crate::choices::Alignment;
use crate::storage::{block_ioctl, device_bytes};
use ringway_core::mem::Pool;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What can hold a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    File,
    BlockDevice,
}

impl FileKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::BlockDevice => "block device",
        }
    }
}

pub(super) fn kind(path: &Path) -> Result<FileKind, OpenError> {
    let meta = path.metadata().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing(path.into()),
        _ => OpenError::Host { path: path.into(), what: "look at it", source },
    })?;
    let kind = meta.file_type();
    let what = if kind.is_file() {
        return Ok(FileKind::File);
    } else if kind.is_block_device() {
        return Ok(FileKind::BlockDevice);
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        A_SOCKET
    } else {
        "a character device"
    };
    Err(OpenError::NotADisk { path: path.into(), what })
}

/// Size in bytes.
pub(super) fn size(path: &Path, file: &File, kind: FileKind) -> Result<u64, OpenError> {
    let bytes = match kind {
        FileKind::File => file.metadata().map(|meta| meta.len()),
        FileKind::BlockDevice => device_bytes(file),
    };
    bytes.map_err(|source| OpenError::Host { path: path.into(), what: "learn its size", source })
}

// <linux/fs.h>; libc does not name them for every target.
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKPBSZGET: libc::c_ulong = 0x127b;
const BLKIOOPT: libc::c_ulong = 0x1279;

/// What O_DIRECT asks for on this file, or why it does not work, and who says so.
///
/// The file says it itself (statx, since Linux 6.1); where it does not, small reads find out.
pub(super) fn direct_alignment(file: &File, kind: FileKind) -> (Origin, Result<Alignment, String>) {
    if let Some(alignment) = statx_alignment(file) {
        return (Origin::Statx, alignment);
    }
    if kind == FileKind::BlockDevice {
        if let Ok(block) = block_ioctl::<u32>(file, BLKSSZGET) {
            let alignment = Alignment { memory: block.max(512), offset: block.max(512) };
            return (Origin::Device, Ok(alignment));
        }
    }
    (Origin::Trial, try_alignments(file))
}

fn statx_alignment(file: &File) -> Option<Result<Alignment, String>> {
    // SAFETY: statx is a plain C struct for which zeroes are valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor itself; `stat` is ours.
    let rc = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if rc < 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if memory == 0 || offset == 0 {
        return Some(Err("its file system does not offer it for this file".into()));
    }
    if !memory.is_power_of_two() || !offset.is_power_of_two() {
        return Some(Err(format!("it asks for alignments of {memory} and {offset} bytes")));
    }
    Some(Ok(Alignment { memory, offset }))
}

fn try_alignments(file: &File) -> Result<Alignment, String> {
    let mut pool = Pool::new(8192).map_err(|e| e.to_string())?;
    let mut pages = pool.acquire(8192).ok_or("no memory to try it")?;
    let mut last = String::new();
    for align in [512u32, 4096] {
        let at = align as usize;
        // SAFETY: nothing else uses these pages.
        let bytes = unsafe { pages.bytes() };
        // A buffer aligned to `align` and no better.
        match file.read_at(&mut bytes[at..2 * at], 0) {
            Ok(_) => return Ok(Alignment { memory: align, offset: align }),
            Err(e) => last = e.to_string(),
        }
    }
    Err(format!("reading with it fails: {last}"))
}

/// What the host says about blocks and discarding.
pub(super) struct Host {
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) optimal_io: u32,
    pub(super) discard: bool,
    pub(super) discard_granularity: u32,
}

impl Host {
    /// Where nothing else tells, and if it `may_try`, it tries.
    pub(super) fn of(path: &Path, file: &File, kind: FileKind, may_try: bool) -> Self {
        match kind {
            FileKind::File => Self::of_file(file, may_try),
            FileKind::BlockDevice => Self::of_device(path, file),
        }
    }

    fn of_file(file: &File, may_try: bool) -> Self {
        let block = file.metadata().map_or(4096, |meta| meta.blksize());
        let block = u32::try_from(block).unwrap_or(4096).clamp(512, 65536).next_power_of_two();
        Self {
            // A raw image is addressed in sectors of 512 bytes, whatever holds it.
            logical_block: 512,
            physical_block: block.min(4096),
            optimal_io: 0,
            discard: punches_holes(file, may_try),
            discard_granularity: block,
        }
    }

    fn of_device(path: &Path, file: &File) -> Self {
        let logical = block_ioctl::<u32>(file, BLKSSZGET).unwrap_or(512);
        let physical = block_ioctl::<u32>(file, BLKPBSZGET).unwrap_or(logical);
        let optimal = block_ioctl::<u32>(file, BLKIOOPT).unwrap_or(0);
        let granularity = queue_limit(path, "discard_granularity").unwrap_or(0);
        Self {
            logical_block: logical,
            physical_block: physical.max(logical),
            optimal_io: optimal,
            discard: queue_limit(path, "discard_max_bytes").is_some_and(|max| max > 0),
            discard_granularity: u32::try_from(granularity).unwrap_or(0).max(logical),
        }
    }
}

/// What is known of the file system decides; where nothing is, a hole is punched beyond the end of
/// the file, which changes nothing but the file's times.
fn punches_holes(file: &File, may_try: bool) -> bool {
    if Mount::of(file).and_then(|mount| mount.punches_holes()) == Some(true) {
        return true;
    }
    if !may_try {
        return false;
    }
    let Ok(meta) = file.metadata() else { return false };
    let Ok(end) = libc::off_t::try_from(meta.len().next_multiple_of(65536)) else { return false };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no memory is involved.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, end, 65536) == 0 }
}

/// A number from the block device's queue folder in sysfs; a partition's is its disk's.
fn queue_limit(path: &Path, name: &str) -> Option<u64> {
    let rdev = path.metadata().ok()?.rdev();
    let (major, minor) = (libc::major(rdev), libc::minor(rdev));
    let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let text = [base.join("queue"), base.join("../queue")]
        .iter()
        .find_map(|queue| std::fs::read_to_string(queue.join(name)).ok())?;
    text.trim().parse().ok()
}
