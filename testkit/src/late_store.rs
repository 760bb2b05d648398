//! A disk image whose writes land late: a file system of one file in the test's own process (FUSE),
//! which only root can mount.

use crate::skip::{Lack, Need};
use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags,
    ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const NAME: &str = "disk.img";
/// A name that is looked up for ever.
const HANGS: &str = "hangs";
/// Attributes may be kept for ever: nobody else changes them.
const TTL: Duration = Duration::from_secs(3600);

/// A write, as the store saw it.
#[derive(Clone, Copy, Debug)]
pub struct Landing {
    /// Where, in bytes.
    pub offset: u64,
    /// The first byte of what was written.
    pub byte: u8,
    /// When it came in.
    pub arrived: Instant,
    /// When its bytes were there; `None` if they are still on their way.
    pub landed: Option<Instant>,
}

/// With which error each operation of a kind fails, if with any.
#[derive(Clone, Copy, Debug, Default)]
struct Failing {
    read: Option<i32>,
    write: Option<i32>,
    sync: Option<i32>,
}

#[derive(Debug)]
struct Shared {
    bytes: Vec<u8>,
    delay: Duration,
    fails: Failing,
    log: Vec<Landing>,
    syncs: Vec<Instant>,
    /// Who looks that name up.
    hanging: Vec<ReplyEntry>,
    /// Reads that come have no answer, and these have none: where, and how much.
    reads_hang: bool,
    reading: Vec<(u64, u32, ReplyData)>,
    /// Nor have these, who ask about the file system.
    asking: Vec<ReplyStatfs>,
}

impl Shared {
    fn read(&self, offset: u64, size: u32, reply: ReplyData) {
        let bytes = self.bytes.get(usize::try_from(offset).unwrap_or(usize::MAX)..);
        let bytes = bytes.unwrap_or(&[]);
        reply.data(&bytes[..bytes.len().min(size as usize)]);
    }
}

/// What is stored, and the number of its file.
#[derive(Clone, Debug)]
struct Store(Arc<Mutex<Shared>>, INodeNo);

impl Store {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attr(&self, ino: INodeNo) -> FileAttr {
        let is_file = ino == self.1;
        let size = if is_file { self.lock().bytes.len() as u64 } else { 0 };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: if is_file { 0o644 } else { 0o755 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The bytes of write `number` are on the disk from now on.
    fn land(&self, number: usize, offset: u64, data: &[u8], reply: ReplyWrite) {
        let mut shared = self.lock();
        let place = usize::try_from(offset).ok().and_then(|from| {
            let end = from.checked_add(data.len())?;
            shared.bytes.get_mut(from..end)
        });
        let Some(place) = place else { return reply.error(Errno::ENOSPC) };
        place.copy_from_slice(data);
        shared.log[number].landed = Some(Instant::now());
        drop(shared);
        reply.written(u32::try_from(data.len()).unwrap_or(0));
    }
}

/// Nothing is known of it.
fn about(reply: ReplyStatfs) {
    reply.statfs(0, 0, 0, 0, 0, 512, 255, 0);
}

impl Filesystem for Store {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Several writes at a time, with nobody waiting for them in the kernel.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        // With more than this under way the kernel lets whoever submits one wait.
        let _ = config.set_max_background(1024);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&TTL, &self.attr(self.1), Generation(0));
        } else if name == HANGS {
            self.lock().hanging.push(reply);
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let mut shared = self.lock();
        if shared.reads_hang {
            return shared.asking.push(reply);
        }
        about(reply);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _changed: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut shared = self.lock();
        if let Some(errno) = shared.fails.read {
            return reply.error(Errno::from_i32(errno));
        }
        if shared.reads_hang {
            return shared.reading.push((offset, size, reply));
        }
        shared.read(offset, size, reply);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut shared = self.lock();
        if let Some(errno) = shared.fails.write {
            return reply.error(Errno::from_i32(errno));
        }
        let (number, delay) = (shared.log.len(), shared.delay);
        let byte = data.first().copied().unwrap_or(0);
        let arrived = Instant::now();
        shared.log.push(Landing { offset, byte, arrived, landed: None });
        drop(shared);
        if delay.is_zero() {
            return self.land(number, offset, data, reply);
        }
        let (store, data) = (self.clone(), data.to_vec());
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            store.land(number, offset, &data, reply);
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut shared = self.lock();
        if let Some(errno) = shared.fails.sync {
            return reply.error(Errno::from_i32(errno));
        }
        shared.syncs.push(Instant::now());
        reply.ok();
    }
}

/// A mounted image whose writes land late. Unmounted when dropped.
#[derive(Debug)]
pub struct LateStore {
    store: Store,
    path: PathBuf,
    _session: BackgroundSession,
}

impl LateStore {
    /// An image of `bytes` bytes in a file system that is mounted on `folder`.
    ///
    /// # Errors
    /// What this machine lacks.
    pub fn mount(folder: &Path, bytes: usize) -> Result<Self, Lack> {
        let (bytes, delay) = (vec![0; bytes], Duration::ZERO);
        let (fails, log, syncs, hanging, reads_hang, reading) = Default::default();
        let asking = Vec::new();
        let shared =
            Shared { bytes, delay, fails, log, syncs, hanging, reads_hang, reading, asking };
        // What a daemon keeps of an image is named after the numbers of device and file, and the kernel gives
        // devices' numbers again: another store must not be taken for this one.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(2, |time| time.as_nanos());
        #[allow(clippy::cast_possible_truncation)]
        let store = Store(Arc::new(Mutex::new(shared)), INodeNo((now as u64).max(2)));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("late".into())];
        let session = fuser::spawn_mount(store.clone(), folder, &config).map_err(|error| {
            Lack::new(Need::Fuse, format_args!("it takes root and /dev/fuse: {error}"))
        })?;
        Ok(Self { store, path: folder.join(NAME), _session: session })
    }

    /// The image.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many look up a file beside the image, `hangs`, or read it after [`LateStore::hang_reads`], and have no answer.
    #[must_use]
    pub fn hanging(&self) -> usize {
        let shared = self.store.lock();
        shared.hanging.len() + shared.reading.len() + shared.asking.len()
    }

    /// Reads of the image, and questions about its file system, that come from now on have no answer.
    pub fn hang_reads(&self) {
        self.store.lock().reads_hang = true;
    }

    /// All get one: there is no such file; what is read is there.
    pub fn let_go(&self) {
        let mut shared = self.store.lock();
        let hanging = std::mem::take(&mut shared.hanging);
        hanging.into_iter().for_each(|reply| reply.error(Errno::ENOENT));
        shared.reads_hang = false;
        std::mem::take(&mut shared.asking).into_iter().for_each(about);
        for (offset, size, reply) in std::mem::take(&mut shared.reading) {
            shared.read(offset, size, reply);
        }
    }

    /// How long each write that comes from now on is on its way.
    pub fn set_delay(&self, delay: Duration) {
        self.store.lock().delay = delay;
    }

    /// With which error each write fails that comes from now on, if with any. It is not in the log.
    pub fn set_error(&self, errno: Option<i32>) {
        self.store.lock().fails.write = errno;
    }

    /// The same for reads.
    pub fn set_read_error(&self, errno: Option<i32>) {
        self.store.lock().fails.read = errno;
    }

    /// The same for fsync and fdatasync.
    pub fn set_sync_error(&self, errno: Option<i32>) {
        self.store.lock().fails.sync = errno;
    }

    /// All writes so far, in the order in which they came.
    #[must_use]
    pub fn log(&self) -> Vec<Landing> {
        self.store.lock().log.clone()
    }

    /// When each fsync and fdatasync came in that did not fail.
    #[must_use]
    pub fn syncs(&self) -> Vec<Instant> {
        self.store.lock().syncs.clone()
    }

    /// What is on the disk at `offset`.
    ///
    /// # Panics
    /// If that is beyond its end.
    #[must_use]
    pub fn byte(&self, offset: usize) -> u8 {
        self.store.lock().bytes[offset]
    }
}
