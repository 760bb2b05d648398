//! A disk, a back-end and a front-end, and requests that wait for their answer.

use ringway_disk::{CacheMode, EngineKind, OpenError, OpenOptions, Source, open};
use ringway_driver::{BlkQueue, Buffer, Completion, Device, Options, Rejected, Status};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Need, skip};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than anything takes on a host in trouble: a hang is a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The number of the disk in the content of its sectors.
pub(crate) const DISK: u64 = 1;

pub(crate) type Queue = BlkQueue<u64>;

/// A folder on a disk, not in memory.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// All engines that keep data, with all cache modes that they work with here.
pub(crate) fn engines_and_caches() -> Vec<(EngineKind, CacheMode)> {
    let engines = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];
    let pairs = engines.into_iter().flat_map(|engine| CacheMode::ALL.map(|cache| (engine, cache)));
    pairs.filter(|&(engine, cache)| works(engine, cache)).collect()
}

/// False, with the reason printed, if this host has no such thing.
pub(crate) fn works(engine: EngineKind, cache: CacheMode) -> bool {
    static DIRECT: OnceLock<Result<(), String>> = OnceLock::new();
    let direct = DIRECT.get_or_init(|| {
        let folder = folder();
        let mut options = OpenOptions::new(Source::Path(image(folder.path(), 1 << 20)));
        options.cache = Some(CacheMode::None);
        match open(&options) {
            Err(error @ OpenError::NoDirect { .. }) => Err(error.to_string()),
            _ => Ok(()),
        }
    });
    if cache == CacheMode::None {
        if let Err(why) = direct {
            skip(Need::Direct, why);
            return false;
        }
    }
    if engine.needs_direct() && cache != CacheMode::None {
        return false;
    }
    let usable = ringway_export::usable_engines();
    match usable.into_iter().find(|(kind, _)| *kind == engine) {
        Some((_, Err(why))) => {
            let need = if engine == EngineKind::LinuxAio { Need::LinuxAio } else { Need::IoUring };
            skip(need, why);
            false
        }
        _ => true,
    }
}

/// A served image and a device connected to it. Its queues are to be taken.
pub(crate) struct Scene {
    pub(crate) device: Device,
    pub(crate) rig: Rig,
    pub(crate) image: PathBuf,
    _folder: TempDir,
}

impl Scene {
    /// An image of `bytes` bytes, with as many queues as `front` asks for.
    pub(crate) fn new(
        engine: EngineKind,
        cache: CacheMode,
        bytes: u64,
        queues: u16,
        front: &Options,
    ) -> Self {
        Self::with(bytes, front, |rig| {
            rig.disk.engine = Some(engine);
            rig.disk.cache = Some(cache);
            (rig.queues, rig.workers) = (queues, usize::from(queues).min(3));
        })
    }

    /// Through threads and the page cache, unless `change` says otherwise.
    pub(crate) fn with(bytes: u64, front: &Options, change: impl FnOnce(&mut RigOptions)) -> Self {
        let folder = folder();
        let image = image(folder.path(), bytes);
        let mut options = RigOptions::buffered(&image, EngineKind::Threads);
        change(&mut options);
        let mut rig = Rig::start(&options);
        let device = front.over(rig.connect()).unwrap_or_else(|error| panic!("{error}"));
        Self { device, rig, image, _folder: folder }
    }

    pub(crate) fn queue(&mut self) -> Queue {
        self.device.queue().expect("one queue, not taken yet")
    }

    /// A buffer that begins `shift` bytes after a page's start.
    pub(crate) fn buffer(&self, len: usize, shift: usize) -> Buffer {
        let buffer = self.device.pool().alloc(len + shift).expect("enough shared memory");
        if shift == 0 { buffer } else { buffer.split_at(shift).1 }
    }

    /// What the disk layer has counted, of all workers.
    pub(crate) fn counted(&self) -> ringway_disk::DiskStats {
        let mut sum = ringway_disk::DiskStats::default();
        for worker in self.rig.stats() {
            sum.add(&worker.disk);
        }
        sum
    }

    /// The image as others see it.
    pub(crate) fn found(&self) -> Vec<u8> {
        std::fs::read(&self.image).expect("the image")
    }
}

/// The answer to the only request in flight.
#[track_caller]
pub(crate) fn answer(queue: &mut Queue) -> Completion<u64> {
    assert!(queue.wait(Some(PATIENCE)).expect("a server"), "a request hangs");
    let done = queue.pop().expect("a sound queue").expect("a completion");
    assert_eq!(queue.in_flight(), 0);
    done
}

/// Waits for the answer to a request that was just queued.
#[track_caller]
pub(crate) fn done(queue: &mut Queue, queued: Result<(), Rejected<u64>>) -> Status {
    queued.unwrap_or_else(|error| panic!("{error}"));
    let done = answer(queue);
    assert!(done.used_len <= 1 || done.is_ok(), "a failed request has written {}", done.used_len);
    done.status
}

/// Writes a buffer and gives it back.
#[track_caller]
pub(crate) fn write(queue: &mut Queue, offset: u64, buffer: Buffer) -> Buffer {
    queue.write(offset, buffer, 0).unwrap_or_else(|error| panic!("{error}"));
    let done = answer(queue);
    assert_eq!((done.status, done.used_len), (Status::Ok, 1));
    done.into_buffer().expect("the buffer")
}

/// Reads a buffer and gives it back.
#[track_caller]
pub(crate) fn read(queue: &mut Queue, offset: u64, mut buffer: Buffer) -> Buffer {
    buffer.fill(0xee);
    queue.read(offset, buffer, 0).unwrap_or_else(|error| panic!("{error}"));
    let done = answer(queue);
    let (status, used) = (done.status, done.used_len as usize);
    let buffer = done.into_buffer().expect("the buffer");
    assert_eq!((status, used), (Status::Ok, buffer.len() + 1));
    buffer
}

#[track_caller]
pub(crate) fn flush(queue: &mut Queue) {
    let queued = queue.flush(0);
    assert_eq!(done(queue, queued), Status::Ok);
}
