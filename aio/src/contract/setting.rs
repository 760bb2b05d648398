//! What a case is run with: an engine, files of a kind, and a folder for them.

use super::rig::{BLOCK, Rig};
use crate::engine::Engine;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Through the page cache.
    Cached,
    /// With O_DIRECT.
    Direct,
}

/// The suite for one engine.
pub struct Suite<'a> {
    /// Makes the engine, for so many operations at a time.
    pub make: &'a dyn Fn(u32) -> Box<dyn Engine>,
    /// Where to put files.
    pub dir: &'a Path,
    /// Which files the engine takes.
    pub modes: &'a [Mode],
    /// False only for engines that say they move no data.
    pub moves_data: bool,
    /// The most system calls per operation in batches of 64.
    pub syscalls_per_io_max: f64,
    /// A block device whose content nobody needs, for [`crate::IoOp::Discard`].
    pub block_device: Option<&'a Path>,
}

impl Suite<'_> {
    pub(super) fn rig(&self, mode: Mode, depth: u32, len: usize) -> Rig {
        let path = temporary(self.dir);
        let plain = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let plain = plain.expect("the directory takes files");
        plain.set_len(len as u64).expect("room for the file");
        let file = open(&path, mode, true, true).expect("the file system takes this mode");
        fs::remove_file(&path).expect("ours");
        Rig::new((self.make)(depth), file, plain)
    }

    pub(super) fn open(&self, mode: Mode, read: bool, write: bool) -> Arc<File> {
        let path = temporary(self.dir);
        fs::write(&path, vec![1; 4 * BLOCK]).expect("room for the file");
        let file = open(&path, mode, read, write);
        fs::remove_file(&path).expect("ours");
        file.expect("the file system takes this mode")
    }
}

fn temporary(dir: &Path) -> std::path::PathBuf {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    dir.join(format!("ringway-contract-{}-{serial}", std::process::id()))
}

pub(super) fn open(path: &Path, mode: Mode, read: bool, write: bool) -> io::Result<Arc<File>> {
    let flags = if mode == Mode::Direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(read).write(write).custom_flags(flags).open(path).map(Arc::new)
}

/// True if files in `dir` can be opened with O_DIRECT.
#[must_use]
pub fn takes_direct(dir: &Path) -> bool {
    let path = temporary(dir);
    let took = File::create(&path).and_then(|_| open(&path, Mode::Direct, true, true));
    let _ = fs::remove_file(&path);
    took.is_ok()
}
