//! The files that are measured.

use crate::bench::lab::Lab;
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// Where a benchmark's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Device {
    /// Nowhere: no data moves.
    Null,
    /// A simulated disk in memory, as fast as memory.
    SimRam,
    /// A simulated hard disk.
    SimHdd,
    /// A file on the disk, O_DIRECT.
    File,
    /// A file on tmpfs, O_DIRECT.
    Tmpfs,
}

impl Device {
    /// The word in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::SimRam => "sim:ram",
            Self::SimHdd => "sim:hdd",
            Self::File => "disk file",
            Self::Tmpfs => "tmpfs file",
        }
    }

    /// The file, if there is one.
    pub(crate) fn path(self, lab: &Lab) -> Option<&Path> {
        match self {
            Self::Null | Self::SimRam | Self::SimHdd => None,
            Self::File => Some(&lab.common.file),
            Self::Tmpfs => Some(&lab.common.tmpfs),
        }
    }

    /// What our daemon calls it, if it is no file. A client reads and writes all over a disk in
    /// memory, so that one is small.
    pub(crate) const fn unreal(self) -> &'static str {
        match self {
            Self::SimRam => "sim:ram:256M",
            Self::SimHdd => "sim:hdd:64G",
            _ => "null:1G",
        }
    }

    /// Makes and fills the file if that has not been done.
    pub(crate) fn prepare(self, lab: &Lab) -> Result<Option<Temporary>> {
        let common = &lab.common;
        match self {
            Self::Null | Self::SimRam | Self::SimHdd => Ok(None),
            Self::File => fill(&common.file, common.file_mib * MIB).map(|()| None),
            Self::Tmpfs => {
                let temporary = Temporary(common.tmpfs.clone());
                fill(&common.tmpfs, common.tmpfs_mib * MIB).map(|()| Some(temporary))
            }
        }
    }
}

/// A file that goes when this goes.
#[derive(Debug)]
pub(crate) struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Every byte written, none left in the page cache.
fn fill(path: &Path, bytes: u64) -> Result<()> {
    let name = path.display();
    if let Ok(meta) = std::fs::metadata(path) {
        anyhow::ensure!(meta.is_file(), "{name} is no regular file: give another one");
        if meta.len() == bytes && meta.blocks() * 512 >= bytes {
            return Ok(());
        }
    }
    eprintln!("filling {name} with {} MiB, once", bytes / MIB);
    let options = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = options.with_context(|| format!("cannot create {name}"))?;
    let written =
        ringway_bench::fill::fill(&file, bytes).with_context(|| format!("cannot fill {name}"));
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}
