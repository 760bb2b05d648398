//! What every engine must do, as one suite that each of them passes.
//!
//! ```no_run
//! # use ringway_aio::{Engine, Null, contract::{Mode, Suite}};
//! Suite {
//!     make: &|depth| Box::new(Null::new(depth).unwrap()),
//!     dir: std::path::Path::new("/var/tmp"),
//!     modes: &[Mode::Cached, Mode::Direct],
//!     moves_data: false,
//!     syscalls_per_io_max: 0.1,
//!     block_device: None,
//! }
//! .run();
//! ```

mod bells;
mod data;
mod rig;
mod turns;

use crate::engine::Engine;
use bells::{
    bell_amid_operations, bell_before_wait, bell_during_wait, many_bells, wait_ends_in_time,
    watch_and_unwatch,
};
use data::{
    discard, errors, random_mix, reads_and_writes, short_at_the_end, sync, vectors, zeroes,
};
use rig::Rig;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use turns::{dropped_in_flight, each_tag_once, few_system_calls, files_come_and_go, full_then_not};

/// The unit in which direct transfers are aligned here: good for every disk.
const BLOCK: usize = 4096;
/// Longer than any operation takes on a host in trouble.
const PATIENCE: Duration = Duration::from_secs(30);

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

type Case = (&'static str, fn(&Suite<'_>, Mode));

impl Suite<'_> {
    const DATA: [Case; 9] = [
        ("reads and writes", reads_and_writes),
        ("vectors of 1 to 1024 segments", vectors),
        ("sync", sync),
        ("punch hole, zero range", zeroes),
        ("short at the end of the file", short_at_the_end),
        ("errors are results", errors),
        ("random mix", random_mix),
        ("files come and go", files_come_and_go),
        ("dropped in flight", dropped_in_flight),
    ];

    const ANY: [Case; 9] = [
        ("full, then not", full_then_not),
        ("each tag once", each_tag_once),
        ("few system calls", few_system_calls),
        ("a bell before the wait", bell_before_wait),
        ("a bell during the wait", bell_during_wait),
        ("a bell with operations in flight", bell_amid_operations),
        ("many bells, many rings", many_bells),
        ("watch and unwatch", watch_and_unwatch),
        ("a wait ends in time", wait_ends_in_time),
    ];

    /// Runs it all; panics at the first rule that is broken, after the name of the case.
    pub fn run(&self) {
        let cases = Self::ANY.iter().chain(Self::DATA.iter().filter(|_| self.moves_data));
        for (name, case) in cases {
            for &mode in self.modes {
                println!("contract: {name}, {mode:?}");
                case(self, mode);
            }
        }
        if let Some(device) = self.block_device {
            println!("contract: discard");
            discard(self, device);
        }
    }

    fn rig(&self, mode: Mode, depth: u32, len: usize) -> Rig {
        let path = temporary(self.dir);
        let plain = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let plain = plain.expect("the directory takes files");
        plain.set_len(len as u64).expect("room for the file");
        let file = open(&path, mode, true, true).expect("the file system takes this mode");
        fs::remove_file(&path).expect("ours");
        Rig::new((self.make)(depth), file, plain)
    }

    fn open(&self, mode: Mode, read: bool, write: bool) -> Arc<File> {
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

fn open(path: &Path, mode: Mode, read: bool, write: bool) -> io::Result<Arc<File>> {
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
