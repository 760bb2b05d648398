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

use ringway_core::Segment;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::{Engine, FileId, Full, Io, IoOp, Reaped};
use crate::random::Random;
use crate::sys;

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
    /// A block device whose content nobody needs, for [`IoOp::Discard`].
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

/// Memory that direct transfers accept.
struct Memory {
    base: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), BLOCK).expect("a small size");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, layout }
    }

    fn segment(&self, offset: usize, len: usize) -> Segment {
        assert!(offset + len <= self.layout.size());
        Segment { base: self.base.wrapping_add(offset), len }
    }

    /// Only between operations.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: ours, initialised, and the caller looks only while no operation is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.layout.size()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// An engine with a file, and another descriptor of the file to judge by.
struct Rig {
    engine: Box<dyn Engine>,
    file: Arc<File>,
    id: FileId,
    plain: File,
    out: Reaped,
    tag: u64,
}

impl Rig {
    fn new(mut engine: Box<dyn Engine>, file: Arc<File>, plain: File) -> Self {
        let id = engine.attach(&file).expect("the engine takes the file");
        let out = Reaped::with_capacity(engine.limits().depth as usize, 8);
        Self { engine, file, id, plain, out, tag: 0 }
    }

    /// Names the memory to the engine, for what it is worth.
    fn map(&mut self, memory: &Memory) {
        let all = [memory.segment(0, memory.layout.size())];
        // SAFETY: nothing is in flight, and no operation uses the memory after it is dropped.
        if let Err(e) = unsafe { self.engine.map_memory(&all) } {
            println!("contract: memory is not prepared: {e}");
        }
    }

    /// Queues an operation; the caller keeps the memory and the list until it is reaped.
    fn queue(&mut self, op: IoOp, offset: u64, segments: &[Segment]) -> Result<u64, Full> {
        self.queue_on(self.id, op, offset, segments.iter().map(|s| s.len as u64).sum(), segments)
    }

    fn queue_on(
        &mut self,
        file: FileId,
        op: IoOp,
        offset: u64,
        len: u64,
        segments: &[Segment],
    ) -> Result<u64, Full> {
        assert!(self.engine.limits().ops.has(op));
        self.tag += 1;
        let io = Io { tag: self.tag, op, file, offset, len, segments };
        // SAFETY: each case keeps memory and list until it has reaped or dropped the engine.
        unsafe { self.engine.queue(&io) }.map(|()| io.tag)
    }

    /// One operation from beginning to end.
    fn one(&mut self, op: IoOp, offset: u64, segments: &[Segment]) -> i32 {
        self.queue(op, offset, segments).expect("nothing else is in flight");
        self.finish_one()
    }

    fn one_without_data(&mut self, op: IoOp, offset: u64, len: u64) -> i32 {
        self.queue_on(self.id, op, offset, len, &[]).expect("nothing else is in flight");
        self.finish_one()
    }

    fn finish_one(&mut self) -> i32 {
        self.engine.submit().expect("a usable engine");
        self.reap(1);
        assert_eq!(self.out.done[0].tag, self.tag);
        self.out.done[0].result
    }

    /// Waits until `count` operations are done; they are then in `out`, and no others.
    fn reap(&mut self, count: usize) {
        self.out.clear();
        let start = Instant::now();
        loop {
            let before = self.out.done.len();
            let found = self.engine.reap(&mut self.out);
            assert_eq!(found, self.out.done.len() - before, "reap counts what it appends");
            if self.out.done.len() >= count {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{} of {count} are done", self.out.done.len());
            self.engine.wait(Some(PATIENCE)).expect("a usable engine");
        }
        assert_eq!(self.out.done.len(), count, "nothing is done twice");
    }

    /// Waits until something rings, and returns what did.
    fn rung(&mut self) -> Vec<u32> {
        self.out.clear();
        let start = Instant::now();
        while self.out.rung.is_empty() {
            assert!(start.elapsed() < PATIENCE, "no bell rang");
            self.engine.wait(Some(PATIENCE)).expect("a usable engine");
            self.engine.reap(&mut self.out);
        }
        std::mem::take(&mut self.out.rung)
    }

    /// Takes what rang so far, if anything.
    fn settle(&mut self) {
        for _ in 0..3 {
            self.engine.wait(Some(Duration::from_millis(1))).expect("a usable engine");
            self.engine.reap(&mut self.out);
        }
        self.out.clear();
    }

    fn judge(&self, offset: u64, expected: &[u8]) {
        let mut found = vec![0; expected.len()];
        self.plain.read_exact_at(&mut found, offset).expect("the file is that long");
        assert!(found == expected, "the file holds what was written at {offset}");
    }
}

/// Content as a function of where it is and of a seed.
fn fill(bytes: &mut [u8], offset: u64, seed: u64) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let place = offset / 8 + i as u64;
        let value = Random(seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next().to_ne_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

fn content(len: usize, offset: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, offset, seed);
    bytes
}

fn reads_and_writes(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 8, 8 << 20);
    let mut memory = Memory::new(4 << 20);
    for op in [IoOp::Write, IoOp::WriteDurable] {
        if op == IoOp::WriteDurable {
            rig.map(&memory);
        }
        for (round, len) in [BLOCK, 2 * BLOCK, 64 << 10, 1 << 20, 4 << 20].into_iter().enumerate() {
            let offset = (round * 5 * BLOCK) as u64;
            let expected = content(len, offset, 7);
            memory.bytes()[..len].copy_from_slice(&expected);
            let segment = [memory.segment(0, len)];
            assert_eq!(usize::try_from(rig.one(op, offset, &segment)), Ok(len));
            rig.judge(offset, &expected);
            memory.bytes().fill(0);
            assert_eq!(usize::try_from(rig.one(IoOp::Read, offset, &segment)), Ok(len));
            assert!(memory.bytes()[..len] == expected, "{len} bytes come back");
            assert!(memory.bytes()[len..].iter().all(|&b| b == 0), "nothing beyond is touched");
        }
    }
    if mode == Mode::Cached {
        let expected = content(777, 0, 8);
        memory.bytes()[3..780].copy_from_slice(&expected);
        let segment = [memory.segment(3, 777)];
        assert_eq!(rig.one(IoOp::Write, 12_345, &segment), 777);
        rig.judge(12_345, &expected);
    }
}

fn vectors(suite: &Suite<'_>, mode: Mode) {
    let piece = if mode == Mode::Direct { BLOCK } else { 24 };
    let mut rig = suite.rig(mode, 4, 1024 * BLOCK);
    let mut memory = Memory::new(2048 * piece);
    for mapped in [false, true] {
        if mapped {
            rig.map(&memory);
        }
        for count in [1, 2, 3, 4, 5, 64, rig.engine.limits().max_segments.min(1024)] {
            let len = count * piece;
            // The pieces lie apart and in reverse, so that one that is misplaced shows.
            let segments: Vec<_> =
                (0..count).map(|i| memory.segment((count - 1 - i) * 2 * piece, piece)).collect();
            let expected = content(len, 0, count as u64);
            for (i, bytes) in expected.chunks(piece).enumerate() {
                let at = (count - 1 - i) * 2 * piece;
                memory.bytes()[at..at + piece].copy_from_slice(bytes);
            }
            assert_eq!(usize::try_from(rig.one(IoOp::Write, 0, &segments)), Ok(len));
            rig.judge(0, &expected);
            memory.bytes().fill(0);
            assert_eq!(usize::try_from(rig.one(IoOp::Read, 0, &segments)), Ok(len));
            for (i, bytes) in expected.chunks(piece).enumerate() {
                let at = (count - 1 - i) * 2 * piece;
                assert!(memory.bytes()[at..at + piece] == *bytes, "segment {i} of {count}");
            }
        }
    }
}

fn sync(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let memory = Memory::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    rig.one(IoOp::Write, 0, &segment);
    assert_eq!(rig.one_without_data(IoOp::Sync, 0, 0), 0);
}

fn zeroes(suite: &Suite<'_>, mode: Mode) {
    for (op, flags) in [(IoOp::PunchHole, sys::PUNCH_HOLE), (IoOp::ZeroRange, sys::ZERO_RANGE)] {
        let mut rig = suite.rig(mode, 4, 1 << 20);
        let before = content(1 << 20, 0, 3);
        rig.plain.write_all_at(&before, 0).unwrap();
        // SAFETY: no memory is involved.
        let host = sys::check(unsafe { libc::fallocate(rig.plain.as_raw_fd(), flags, 0, 4096) });
        let expected = host.map_or_else(|e| -e.raw_os_error().unwrap_or(0), |_| 0);
        // From the second block to beyond the end: the size must not change.
        assert_eq!(rig.one_without_data(op, 2 * 4096, 2 << 20), expected, "{op:?}");
        assert_eq!(rig.plain.metadata().unwrap().len(), 1 << 20);
        if expected == 0 {
            rig.judge(4096, &before[4096..8192]);
            rig.judge(8192, &vec![0; (1 << 20) - 8192]);
        } else {
            println!("contract: {op:?} is not for this file system ({expected})");
        }
    }
}

fn short_at_the_end(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 3 * BLOCK + 512);
    let memory = Memory::new(2 * BLOCK);
    let segments = [memory.segment(0, BLOCK), memory.segment(BLOCK, BLOCK)];
    assert_eq!(rig.one(IoOp::Read, 2 * BLOCK as u64, &segments), 4096 + 512);
    assert_eq!(rig.one(IoOp::Read, 8 * BLOCK as u64, &segments), 0);
    assert_eq!(rig.one(IoOp::Read, 3 * BLOCK as u64, &segments[..1]), 512);
}

fn errors(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 8, 1 << 20);
    let memory = Memory::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    let read_only = rig.engine.attach(&suite.open(mode, true, false)).unwrap();
    let write_only = rig.engine.attach(&suite.open(mode, false, true)).unwrap();
    // Good ones and bad ones in one batch: each gets its own.
    let batch = [
        (rig.id, IoOp::Write, 0, 4096),
        (read_only, IoOp::Write, 0, -libc::EBADF),
        (read_only, IoOp::WriteDurable, 0, -libc::EBADF),
        (rig.id, IoOp::Read, 1 << 63, -libc::EINVAL),
        (rig.id, IoOp::Read, u64::MAX, -libc::EINVAL),
        (write_only, IoOp::Read, 0, -libc::EBADF),
        (rig.id, IoOp::Read, (1 << 63) - 4096, -libc::EINVAL),
        (read_only, IoOp::Read, 0, 4096),
    ];
    let mut expected = Vec::new();
    for (file, op, offset, result) in batch {
        let tag = rig.queue_on(file, op, offset, BLOCK as u64, &segment).expect("depth 8");
        expected.push((tag, result));
    }
    rig.engine.submit().unwrap();
    rig.reap(batch.len());
    let mut found: Vec<_> = rig.out.done.iter().map(|d| (d.tag, d.result)).collect();
    found.sort_unstable();
    assert_eq!(found, expected);
    if mode == Mode::Cached {
        let full = open(Path::new("/dev/full"), mode, true, true).unwrap();
        let full = rig.engine.attach(&full).unwrap();
        rig.queue_on(full, IoOp::Write, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), -libc::ENOSPC);
    }
    assert_eq!(rig.one(IoOp::Read, 0, &segment), 4096, "the engine is as good as before");
}

/// Reads and writes of random blocks, none overlapping; every read is verified.
fn random_mix(suite: &Suite<'_>, mode: Mode) {
    const BLOCKS: usize = 128;
    const DEPTH: usize = 32;
    let seed = std::env::var("RINGWAY_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("contract: RINGWAY_SEED={seed}");
    let mut random = Random(seed);
    let mut rig = suite.rig(mode, 32, BLOCKS * BLOCK);
    let mut memory = Memory::new(DEPTH * BLOCK);
    if seed % 2 == 1 {
        rig.map(&memory);
    }
    let segments: Vec<_> = (0..DEPTH).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    // What each block holds, as the seed of its content; 0 is zeroes. Slots: (tag, block, write).
    let mut holds = [0u64; BLOCKS];
    let mut slots: Vec<Option<(u64, usize, Option<u64>)>> = vec![None; DEPTH];
    for _ in 0..400 {
        for slot in 0..DEPTH {
            let block = usize::try_from(random.below(BLOCKS as u64)).unwrap();
            if slots[slot].is_some() || slots.iter().flatten().any(|s| s.1 == block) {
                continue;
            }
            let offset = (block * BLOCK) as u64;
            let write = (random.below(2) == 0).then(|| random.next() | 1);
            let bytes = &mut memory.bytes()[slot * BLOCK..][..BLOCK];
            match write {
                Some(seed) => fill(bytes, offset, seed),
                None => bytes.fill(0xee),
            }
            let op = match write {
                Some(seed) if seed % 8 == 1 => IoOp::WriteDurable,
                Some(_) => IoOp::Write,
                None => IoOp::Read,
            };
            let tag = rig.queue(op, offset, &segments[slot]).expect("a slot is free");
            slots[slot] = Some((tag, block, write));
        }
        rig.engine.submit().unwrap();
        rig.out.clear();
        while rig.engine.reap(&mut rig.out) == 0 {
            rig.engine.wait(Some(PATIENCE)).unwrap();
        }
        for done in std::mem::take(&mut rig.out.done) {
            let mine = |s: &Option<(u64, usize, _)>| s.is_some_and(|s| s.0 == done.tag);
            let slot = slots.iter().position(mine).expect("a tag in flight");
            let (_, block, write) = slots[slot].take().expect("found");
            assert_eq!(done.result, 4096);
            let Some(seed) = write else {
                let offset = (block * BLOCK) as u64;
                let expected = match holds[block] {
                    0 => vec![0; BLOCK],
                    seed => content(BLOCK, offset, seed),
                };
                assert!(memory.bytes()[slot * BLOCK..][..BLOCK] == expected, "block {block}");
                continue;
            };
            holds[block] = seed;
        }
    }
    rig.reap(slots.iter().flatten().count());
}

fn files_come_and_go(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let memory = Memory::new(BLOCK);
    let segment = [memory.segment(0, BLOCK)];
    for _ in 0..100 {
        let file = suite.open(mode, true, true);
        let id = rig.engine.attach(&file).unwrap();
        rig.queue_on(id, IoOp::Read, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), 4096);
        rig.engine.detach(id);
        assert_eq!(Arc::strong_count(&file), 1, "a detached file is let go");
    }
    let many: Vec<_> = (0..300)
        .map(|_| rig.engine.attach(&rig.file).expect("as many files as descriptors"))
        .collect();
    for id in many {
        rig.queue_on(id, IoOp::Read, 0, BLOCK as u64, &segment).unwrap();
        assert_eq!(rig.finish_one(), 4096);
    }
}

fn dropped_in_flight(suite: &Suite<'_>, mode: Mode) {
    for submit in [false, true] {
        let mut rig = suite.rig(mode, 64, 8 << 20);
        rig.plain.write_all_at(&vec![1; 8 << 20], 0).unwrap();
        rig.plain.sync_data().unwrap();
        let mut memory = Memory::new(4 << 20);
        let segments: Vec<_> = (0..64).map(|i| [memory.segment(i << 16, 1 << 16)]).collect();
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i << 17) as u64, segment).unwrap();
        }
        if submit {
            rig.engine.submit().unwrap();
        }
        let file = rig.file;
        drop(rig.engine);
        memory.bytes().fill(0x55);
        assert_eq!(Arc::strong_count(&file), 1, "the file is let go");
        thread::sleep(Duration::from_millis(20));
        assert!(memory.bytes().iter().all(|&b| b == 0x55), "nobody writes here any more");
    }
}

fn full_then_not(suite: &Suite<'_>, mode: Mode) {
    for depth in [1, 4, 7] {
        let mut rig = suite.rig(mode, depth, 1 << 20);
        let memory = Memory::new(BLOCK);
        let segment = [memory.segment(0, BLOCK)];
        let depth = rig.engine.limits().depth;
        for _ in 0..20 {
            for _ in 0..depth {
                rig.queue(IoOp::Read, 0, &segment).expect("depth is what limits() says");
            }
            assert_eq!(rig.queue(IoOp::Read, 0, &segment), Err(Full));
            rig.engine.submit().unwrap();
            assert_eq!(rig.queue(IoOp::Read, 0, &segment), Err(Full), "done is not yet reaped");
            rig.reap(depth as usize);
            assert!(rig.out.done.iter().all(|d| d.result == 4096));
        }
    }
}

fn each_tag_once(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 128, 1 << 20);
    let memory = Memory::new(128 * BLOCK);
    let segments: Vec<_> = (0..128).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    let mut in_flight = HashSet::new();
    let mut left = 3000;
    while left > 0 || !in_flight.is_empty() {
        while left > 0 && in_flight.len() < 128 {
            let at = left % 128;
            let tag = rig.queue(IoOp::Read, (at * BLOCK) as u64, &segments[at]).unwrap();
            assert!(in_flight.insert(tag));
            left -= 1;
        }
        rig.engine.submit().unwrap();
        rig.out.clear();
        if rig.engine.reap(&mut rig.out) == 0 {
            rig.engine.wait(Some(PATIENCE)).unwrap();
        }
        for done in &rig.out.done {
            assert!(in_flight.remove(&done.tag), "tag {} is in flight", done.tag);
            assert_eq!(done.result, 4096);
        }
    }
    rig.engine.submit().unwrap();
    assert_eq!(rig.engine.reap(&mut rig.out), 0, "nothing is left");
    assert_eq!(rig.engine.counters().queued, 3000);
}

fn few_system_calls(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 64, 1 << 20);
    rig.plain.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    let memory = Memory::new(64 * BLOCK);
    let segments: Vec<_> = (0..64).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    for _ in 0..20 {
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i * BLOCK) as u64, segment).unwrap();
        }
        rig.engine.submit().unwrap();
        // A busy worker would look again and again; the calls that sleeping costs depend on the disk.
        rig.out.clear();
        let start = Instant::now();
        while rig.out.done.len() < 64 && start.elapsed() < PATIENCE {
            if rig.engine.reap(&mut rig.out) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(rig.out.done.len(), 64);
    }
    let counters = rig.engine.counters();
    // Exact: both are small.
    #[allow(clippy::cast_precision_loss)]
    let per_io = counters.syscalls as f64 / counters.queued as f64;
    println!("contract: {per_io:.4} system calls per operation");
    assert!(per_io <= suite.syscalls_per_io_max, "{per_io} system calls per operation");
}

fn bell(rig: &mut Rig, bell: u32) -> OwnedFd {
    let fd = sys::eventfd().unwrap();
    rig.engine.watch(bell, fd.as_raw_fd()).unwrap();
    fd
}

fn bell_before_wait(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let fd = bell(&mut rig, 5);
    for _ in 0..100 {
        sys::ring(fd.as_raw_fd());
        assert!(rig.rung().iter().all(|&b| b == 5));
    }
    let early = sys::eventfd().unwrap();
    sys::ring(early.as_raw_fd());
    rig.settle();
    rig.engine.watch(6, early.as_raw_fd()).unwrap();
    assert_eq!(rig.rung(), [6], "what rang before it was watched shows");
    assert!(rig.engine.watch(7, -1).is_err(), "no descriptor, no bell");
}

fn bell_during_wait(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let fd = bell(&mut rig, 0);
    let copy = fd.try_clone().unwrap();
    let answered = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&answered);
    // Each ring waits for the answer to the last one, now after a pause and now at once.
    let ringer = thread::spawn(move || {
        for i in 0..200 {
            if i % 10 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            sys::ring(copy.as_raw_fd());
            while seen.load(Ordering::Acquire) <= i {
                thread::yield_now();
            }
        }
    });
    for i in 1..=200 {
        assert_eq!(rig.rung(), [0], "ring {i}");
        answered.store(i, Ordering::Release);
    }
    ringer.join().unwrap();
}

fn bell_amid_operations(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 16, 1 << 20);
    let fd = bell(&mut rig, 1);
    let memory = Memory::new(16 * BLOCK);
    let segments: Vec<_> = (0..16).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    for _ in 0..50 {
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i * BLOCK) as u64, segment).unwrap();
        }
        sys::ring(fd.as_raw_fd());
        rig.engine.submit().unwrap();
        rig.out.clear();
        let start = Instant::now();
        while rig.out.done.len() < 16 || rig.out.rung.is_empty() {
            assert!(start.elapsed() < PATIENCE, "{:?}", rig.out);
            rig.engine.wait(Some(PATIENCE)).unwrap();
            rig.engine.reap(&mut rig.out);
        }
        assert_eq!(rig.out.rung, [1]);
    }
}

fn many_bells(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let bells: Vec<_> = (0..200).map(|i| bell(&mut rig, i)).collect();
    for round in 0..3 {
        for fd in &bells {
            for _ in 0..=round * 50 {
                sys::ring(fd.as_raw_fd());
            }
        }
        let mut heard = HashSet::new();
        while heard.len() < bells.len() {
            heard.extend(rig.rung());
        }
        rig.settle();
    }
    sys::ring(bells[123].as_raw_fd());
    assert_eq!(rig.rung(), [123], "each still rings by itself");
}

fn watch_and_unwatch(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    for i in 0..100 {
        // A descriptor that is closed makes way for the next of the same number.
        let fd = bell(&mut rig, i);
        if i % 3 == 0 {
            sys::ring(fd.as_raw_fd());
        }
        if i % 2 == 0 {
            rig.settle();
        }
        rig.engine.unwatch(i, fd.as_raw_fd());
    }
    rig.settle();
    let fd = bell(&mut rig, 1000);
    sys::ring(fd.as_raw_fd());
    assert_eq!(rig.rung(), [1000]);
    rig.engine.unwatch(1000, fd.as_raw_fd());
    rig.settle();
    sys::ring(fd.as_raw_fd());
    rig.engine.wait(Some(Duration::from_millis(5))).unwrap();
    rig.engine.reap(&mut rig.out);
    assert!(rig.out.rung.is_empty(), "nobody listens");
}

fn wait_ends_in_time(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let _fd = bell(&mut rig, 0);
    rig.settle();
    let start = Instant::now();
    rig.engine.wait(Some(Duration::ZERO)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1));
    while start.elapsed() < Duration::from_millis(20) {
        let left = Duration::from_millis(20).saturating_sub(start.elapsed());
        rig.engine.wait(Some(left)).unwrap();
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "took {took:?}");
    assert!(rig.engine.counters().sleeps > 0);
}

fn discard(suite: &Suite<'_>, device: &Path) {
    let engine = (suite.make)(4);
    if !engine.limits().ops.has(IoOp::Discard) {
        println!("contract: the engine does not offer discard");
        return;
    }
    let plain = OpenOptions::new().read(true).write(true).open(device).unwrap();
    plain.write_all_at(&vec![1; 1 << 20], 0).unwrap();
    plain.sync_data().unwrap();
    let file = open(device, Mode::Direct, true, true).unwrap();
    let mut rig = Rig::new(engine, file, plain);
    assert_eq!(rig.one_without_data(IoOp::Discard, 64 << 10, 64 << 10), 0);
    rig.judge(0, &vec![1; 64 << 10]);
    // What a discarded range reads as is open; on the loop devices of the tests it is a hole.
    rig.judge(64 << 10, &vec![0; 64 << 10]);
    rig.judge(128 << 10, &vec![1; 64 << 10]);
    assert_eq!(rig.one_without_data(IoOp::PunchHole, 256 << 10, 4096), 0);
    rig.judge(256 << 10, &[0; 4096]);
    let rejected = rig.one_without_data(IoOp::Discard, 0, 100);
    assert_eq!(rejected, -libc::EINVAL, "not whole sectors");
}
