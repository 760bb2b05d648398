//! The block device below: what sysfs says about it.

use super::mount::{self, Mount};
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A block device that holds a disk, or the file system of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name in sysfs: `vda1`.
    pub name: String,
    /// Major and minor number.
    pub number: (u32, u32),
    /// True for platters. Simulated and virtual devices say what they like.
    pub rotational: Option<bool>,
    /// `write back` if it keeps writes in a volatile cache until it is told to flush, or
    /// `write through`.
    pub write_cache: Option<String>,
    /// Unit in which it forgets blocks, in bytes; 0 if it cannot.
    pub discard_granularity: u64,
    /// Smallest unit it can be asked for, in bytes.
    pub logical_block: Option<u64>,
    /// Smallest unit it writes at once, in bytes.
    pub physical_block: Option<u64>,
    /// The transfer it likes best, in bytes; 0 if it does not say.
    pub optimal_io: u64,
    /// Refuses to be written.
    pub read_only: bool,
}

impl Device {
    /// The device that `file` is, or that holds its file system. Memory and networks have none.
    #[must_use]
    pub fn below(file: &File) -> Option<Self> {
        let meta = file.metadata().ok()?;
        if meta.file_type().is_block_device() {
            return Self::of(meta.rdev());
        }
        if let Some(device) = Self::of(meta.dev()) {
            return Some(device);
        }
        // Some file systems (btrfs) have numbers of their own; their mount names the device.
        let source = PathBuf::from(Mount::of(file)?.source);
        let meta = source.metadata().ok().filter(|meta| meta.file_type().is_block_device())?;
        Self::of(meta.rdev())
    }

    fn of(device: u64) -> Option<Self> {
        let number = (libc::major(device), libc::minor(device));
        let folder = folder(number).canonicalize().ok()?;
        let limit = |name| queue(&folder, name)?.parse::<u64>().ok();
        let can_discard = limit("discard_max_bytes").is_some_and(|max| max > 0);
        Some(Self {
            name: folder.file_name()?.to_string_lossy().into_owned(),
            number,
            rotational: queue(&folder, "rotational").map(|word| word == "1"),
            write_cache: queue(&folder, "write_cache"),
            discard_granularity: limit("discard_granularity").filter(|_| can_discard).unwrap_or(0),
            logical_block: limit("logical_block_size"),
            physical_block: limit("physical_block_size"),
            optimal_io: limit("optimal_io_size").unwrap_or(0),
            read_only: word(&folder.join("ro")).is_some_and(|word| word == "1"),
        })
    }

    /// True if it, or a partition of it, is mounted or part of another device.
    #[must_use]
    pub fn used_by_host(&self) -> bool {
        let folder = folder(self.number);
        let parts = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        is_used(self.number, &folder)
            || parts.map(|entry| entry.path()).any(|part| {
                // Only a partition has both.
                part.join("partition").exists()
                    && number(&part).is_some_and(|number| is_used(number, &part))
            })
    }
}

fn folder((major, minor): (u32, u32)) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

fn is_used(number: (u32, u32), folder: &Path) -> bool {
    let holders = folder.join("holders").read_dir();
    mount::is_mounted(number) || holders.is_ok_and(|mut holders| holders.next().is_some())
}

fn number(folder: &Path) -> Option<(u32, u32)> {
    let number = word(&folder.join("dev"))?;
    let (major, minor) = number.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A word from the device's queue folder; a partition's is its disk's.
fn queue(folder: &Path, name: &str) -> Option<String> {
    word(&folder.join("queue").join(name))
        .or_else(|| word(&folder.parent()?.join("queue").join(name)))
}

fn word(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
