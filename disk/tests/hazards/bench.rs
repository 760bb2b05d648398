//! A disk queue on an engine of the test's choice, driven by hand.

use ringway_aio::{
    Engine, IoUring, IoUringSetup, Limits, LinuxAio, Null, Reaped, Threads, ThreadsSetup,
};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{
    CacheMode, Disk, DiskQueue, ErrorPolicy, Finished, OnError, OpenError, OpenOptions,
    SchedulerMode, Source, open,
};
use ringway_testkit::rig::open_patiently;
use ringway_testkit::{Lack, LoopDevice, Need};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than anything takes on a host in trouble.
const PATIENCE: Duration = Duration::from_secs(20);
/// What guest memory holds before a test.
pub(crate) const UNTOUCHED: u8 = 0xee;
/// Bytes of a sector.
pub(crate) const SECTOR: u64 = 512;
/// What the engine calls the bell of an image's thread.
pub(crate) const BELL: u32 = 9;

/// The engines, those included that only take some files.
pub(crate) const ENGINES: [&str; 4] = ["null", "threads", "io_uring", "linux-aio"];

/// An engine, or what this machine lacks for it.
pub(crate) fn engine(name: &str, depth: u32) -> Result<Box<dyn Engine>, Lack> {
    let threads = ThreadsSetup { depth, threads: 2, cached_inline: true };
    Ok(match name {
        "null" => Box::new(Null::new(depth).expect("descriptors")),
        "threads" => Box::new(Threads::new(threads).expect("threads")),
        "io_uring" => Box::new(
            IoUring::new(IoUringSetup::new(depth))
                .map_err(|error| Lack::new(Need::IoUring, error))?,
        ),
        _ => Box::new(LinuxAio::new(depth).map_err(|error| Lack::new(Need::LinuxAio, error))?),
    })
}

/// On what a disk lies, and how requests meet it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    /// A file through the page cache.
    Cached,
    /// A file with O_DIRECT, with memory as it likes it.
    Direct,
    /// A file with O_DIRECT, with memory at odd addresses: everything is bounced.
    Bounced,
    /// A block device of 4096-byte blocks, with requests that begin and end within blocks:
    /// everything is bounced, writes read first.
    Modify,
}

impl Surface {
    pub(crate) const ALL: [Self; 4] = [Self::Cached, Self::Direct, Self::Bounced, Self::Modify];

    /// False for the engine that takes no file through the page cache, and such a file.
    pub(crate) fn takes(self, engine: &str) -> bool {
        engine != "linux-aio" || self != Self::Cached
    }

    /// What the file takes in one piece, in bytes.
    pub(crate) fn granule(self) -> u32 {
        if self == Self::Modify { 4096 } else { 512 }
    }

    /// How far requests are shifted off the blocks, in bytes.
    pub(crate) fn shift(self) -> u64 {
        if self == Self::Modify { 3 * SECTOR } else { 0 }
    }

    /// Where guest memory begins, relative to a page.
    pub(crate) fn memory_offset(self) -> usize {
        if self == Self::Bounced { 1 } else { 0 }
    }
}

/// A disk, and the file that shows what is on it.
pub(crate) struct Place {
    pub(crate) image: PathBuf,
    options: OpenOptions,
    _device: Option<LoopDevice>,
    _folder: TempDir,
}

impl Place {
    /// A new disk of `bytes` bytes, or what this machine lacks for it.
    pub(crate) fn new(surface: Surface, bytes: u64) -> Result<Self, Lack> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let mut device = None;
        let (path, image) = match surface {
            Surface::Modify => {
                let made = device.insert(LoopDevice::new(folder.path(), bytes, 4096)?);
                (made.path().to_owned(), made.backing().to_owned())
            }
            _ => {
                let path = ringway_testkit::rig::image(folder.path(), bytes);
                (path.clone(), path)
            }
        };
        let mut options = OpenOptions::new(Source::Path(path));
        options.cache =
            Some(if surface == Surface::Cached { CacheMode::Writeback } else { CacheMode::None });
        if surface == Surface::Modify {
            options.block_size = Some(512);
        }
        let place = Self { image, options, _device: device, _folder: folder };
        match open(&place.options) {
            Err(error @ OpenError::NoDirect { .. }) => Err(Lack::new(Need::Direct, error)),
            // Anything else shows when the disk is opened for good.
            _ => Ok(place),
        }
    }

    /// With requests travelling that way.
    pub(crate) fn by(mut self, path: SchedulerMode) -> Self {
        self.options.path = path;
        self
    }

    /// Opens it; the last one must have been dropped. What fails is reported.
    pub(crate) fn open(&self) -> Arc<Disk> {
        let disk = open_patiently(&self.options).unwrap_or_else(|error| panic!("{error}"));
        disk.set_error_policy(ErrorPolicy {
            on_enospc: Some(OnError::Report),
            ..ErrorPolicy::default()
        });
        Arc::new(disk)
    }

    /// As [`open`](Self::open), by an owner who says that it is raw.
    pub(crate) fn open_as_raw(&self) -> Arc<Disk> {
        let options = OpenOptions { raw: true, ..self.options.clone() };
        Arc::new(open_patiently(&options).unwrap_or_else(|error| panic!("{error}")))
    }

    /// Why it does not open.
    pub(crate) fn refused(&self) -> OpenError {
        open_patiently(&self.options).map(drop).expect_err("it must not open")
    }
}

/// Memory as a guest might share it, filled with [`UNTOUCHED`].
pub(crate) struct Memory {
    mapping: Mapping,
    offset: usize,
}

impl Memory {
    /// `len` bytes that begin `offset` bytes after a page's start.
    pub(crate) fn new(len: usize, offset: usize) -> Self {
        let mut memory =
            Self { mapping: Mapping::anonymous(len + offset).expect("memory"), offset };
        memory.bytes().fill(UNTOUCHED);
        memory
    }

    pub(crate) fn segment(&self, at: usize, len: usize) -> Segment {
        assert!(self.offset + at + len <= self.mapping.len());
        Segment { base: self.mapping.at(self.offset + at), len }
    }

    /// All bytes. Nothing may be in flight.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let len = self.mapping.len() - self.offset;
        // SAFETY: the mapping is ours; by contract nothing is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.at(self.offset), len) }
    }
}

/// A request to make: where on the disk, how long, where in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) at: usize,
    pub(crate) unmap: bool,
}

impl Ask {
    pub(crate) fn new(op: Op, offset: u64, len: u64) -> Self {
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, len) };
        Self { op, offset, len, at: 0, unmap: true }
    }

    pub(crate) fn at(self, at: usize) -> Self {
        Self { at, ..self }
    }
}

/// A queue on a disk, and its engine. Contexts are the caller's numbers.
pub(crate) struct Bench<E: Engine> {
    // First, so that it is dropped first.
    pub(crate) engine: E,
    pub(crate) queue: DiskQueue<u64>,
    reaped: Reaped,
}

impl<E: Engine> Bench<E> {
    /// `Err` if the engine does not take this file.
    pub(crate) fn new(engine: E, disk: Arc<Disk>, depth: u16) -> Result<Self, Lack> {
        Self::limited(engine, disk, depth, |_| ())
    }

    /// As [`new`](Self::new); the queue takes the engine's limits for what `change` makes of them.
    pub(crate) fn limited(
        mut engine: E,
        disk: Arc<Disk>,
        depth: u16,
        change: impl FnOnce(&mut Limits),
    ) -> Result<Self, Lack> {
        let file = engine.attach(&disk.file()).map_err(|error| Lack::new(Need::Direct, error))?;
        let mut limits = engine.limits().clone();
        change(&mut limits);
        let client = disk.image_client(depth).expect("a thread");
        let mut queue = DiskQueue::new(disk, &limits, file, 7 << 16, depth).expect("memory");
        if let Some(client) = client {
            queue.attach_image(&mut engine, client, BELL).expect("descriptors");
        }
        Ok(Self { engine, queue, reaped: Reaped::with_capacity(64, 8) })
    }

    /// Starts a request with one piece of memory.
    pub(crate) fn start(&mut self, memory: &Memory, ask: Ask, context: u64) {
        let len = usize::try_from(ask.len).expect("a short request");
        let pieces =
            if ask.op.moves_data() { vec![memory.segment(ask.at, len)] } else { Vec::new() };
        self.start_pieces(&pieces, ask, context);
    }

    /// Starts a request with any pieces of memory.
    pub(crate) fn start_pieces(&mut self, pieces: &[Segment], ask: Ask, context: u64) {
        let tag = self.queue.acquire().expect("a free slot");
        let request = self.queue.request_mut(tag);
        (request.op, request.unmap) = (ask.op, ask.unmap);
        request.range = ByteRange::new(ask.offset, ask.len).expect("a range");
        request.segments.clear();
        for &piece in pieces {
            assert!(request.segments.push(piece));
        }
        // SAFETY: the test's memory outlives the bench, and is looked at after `finish`.
        unsafe { self.queue.start(&mut self.engine, tag, context) };
    }

    /// One round of what a worker does.
    pub(crate) fn turn(&mut self, answers: &mut Vec<Finished<u64>>) {
        if self.queue.has_deferred() {
            self.queue.retry(&mut self.engine, usize::MAX);
        }
        self.queue.unplug(&mut self.engine);
        self.engine.submit().expect("a sound engine");
        self.reaped.clear();
        self.engine.reap(&mut self.reaped);
        for done in &self.reaped.done {
            assert_eq!(done.tag >> 16, 7, "a tag of this queue");
            let slot = u16::try_from(done.tag & 0xffff).expect("16 bits");
            answers.extend(self.queue.finish(&mut self.engine, slot, done.result));
        }
        if self.reaped.rung.contains(&BELL) {
            self.queue.take_answers(&mut self.engine);
        }
        answers.extend(std::iter::from_fn(|| self.queue.take_late()));
    }

    /// Drives everything to its end; the answers by context. Whatever happened, nothing is left.
    #[track_caller]
    pub(crate) fn finish(&mut self) -> Vec<Finished<u64>> {
        let begun = Instant::now();
        let mut answers = Vec::new();
        while self.queue.in_flight() > 0 {
            self.turn(&mut answers);
            assert!(begun.elapsed() < PATIENCE, "hangs: {:?}", self.queue);
            if self.queue.in_flight() > 0 && self.reaped.done.is_empty() {
                self.engine.wait(Some(Duration::from_micros(200))).expect("a sound engine");
            }
        }
        answers.extend(std::iter::from_fn(|| self.queue.take_late()));
        assert_eq!(self.queue.bounce_bytes(), 0, "all bounce pages came back");
        assert!(!self.queue.has_deferred());
        answers.sort_by_key(|answer| answer.context);
        let mut contexts: Vec<_> = answers.iter().map(|answer| answer.context).collect();
        contexts.dedup();
        assert_eq!(contexts.len(), answers.len(), "one answer each");
        answers
    }

    /// A request by itself.
    #[track_caller]
    pub(crate) fn one(&mut self, memory: &Memory, ask: Ask) -> Status {
        self.start(memory, ask, 0);
        let answers = self.finish();
        assert_eq!(answers.len(), 1);
        answers[0].status
    }
}

/// True for engines that move bytes.
pub(crate) fn moves(name: &str) -> bool {
    name != "null"
}
