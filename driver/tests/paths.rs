//! Requests that are merged in the front-end, against Ringway's own back-end in this process: what is
//! read and what the disk holds at the end follow from a model, whatever went along with what.

use ringway_aio::{Fault, Faulty, IoOp, Threads, ThreadsSetup};
use ringway_disk::{DiskStats, EngineKind, SimModel, Source};
use ringway_driver::{
    BlkQueue, Buffer, BufferPool, Completion, Data, Indirect, Options, Policy, SchedulerMode,
    Status,
};
use ringway_testkit::rig::{Rig, RigOptions, image, open_patiently};
use ringway_testkit::{Rng, pattern};
use std::ops::Range;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const SECTOR: usize = 512;
/// Sectors of the disk.
const SECTORS: usize = 4096;
const BYTES: u64 = (SECTORS * SECTOR) as u64;
/// The longest request, in sectors.
const LONGEST: usize = 16;
/// The disk's number in its content.
const DISK: u64 = 5;

/// A server of an image whose own path is bio, so that it sees what was sent.
fn options(path: &std::path::Path) -> RigOptions {
    let mut options = RigOptions::buffered(path, EngineKind::Threads);
    options.disk.path = SchedulerMode::Bio;
    options
}

fn sum(rig: &Rig) -> DiskStats {
    let mut sum = DiskStats::default();
    rig.stats().iter().for_each(|worker| sum.add(&worker.disk));
    sum
}

/// What a request is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum What {
    Read(Range<usize>),
    Write(Range<usize>, u64),
    Zero(Range<usize>),
    Flush,
}

/// One thread's part of the disk: what each sector holds, and which are in flight.
struct World {
    queue: BlkQueue<What>,
    part: Range<usize>,
    /// By sector of the part: the write it holds, 0 for none.
    holds: Vec<u64>,
    busy: Vec<bool>,
    /// Sectors that can be neither read nor written.
    bad: Range<usize>,
    sequence: u64,
    /// Where the next request of a stream begins.
    stream: usize,
    failed: u64,
}

impl World {
    fn new(queue: BlkQueue<What>, part: Range<usize>, bad: Range<usize>) -> Self {
        let count = part.len();
        let (holds, busy) = (vec![0; count], vec![false; count]);
        Self { queue, stream: part.start, part, holds, busy, bad, sequence: 0, failed: 0 }
    }

    fn at(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.part.start..range.end - self.part.start
    }

    fn is_bad(&self, range: &Range<usize>) -> bool {
        range.start < self.bad.end && self.bad.start < range.end
    }

    /// A range with nothing in flight: next to the last one, mostly.
    fn room(&mut self, rng: &mut Rng) -> Option<Range<usize>> {
        let count = below(rng, LONGEST) + 1;
        let start = match rng.below(8) {
            0 => self.part.start + below(rng, self.part.len()),
            // Before, or one further on.
            1 => self.stream.checked_sub(2 * count)?,
            2 => self.stream + 1,
            _ => self.stream,
        };
        let range = start..start + count;
        if range.start < self.part.start || range.end > self.part.end {
            self.stream = self.part.start + below(rng, self.part.len());
            return None;
        }
        let at = self.at(&range);
        if self.busy[at.clone()].iter().any(|&busy| busy) {
            return None;
        }
        self.busy[at].fill(true);
        self.stream = range.end;
        Some(range)
    }

    fn issue(&mut self, pool: &BufferPool, rng: &mut Rng) {
        let kind = rng.below(20);
        if kind == 0 {
            return self.queue.flush(What::Flush).expect("there is room");
        }
        let Some(range) = self.room(rng) else { return };
        let (offset, len) = ((range.start * SECTOR) as u64, range.len() * SECTOR);
        match kind {
            1 => {
                let what = What::Zero(range);
                self.queue.write_zeroes(offset, len as u64, false, what).expect("room");
            }
            2..=9 => {
                let buffers = buffers(pool, len, rng);
                let queue = &mut self.queue;
                match one(buffers) {
                    Ok(buffer) => queue.read(offset, buffer, What::Read(range)).expect("room"),
                    Err(many) => {
                        queue.read_vectored(offset, many, What::Read(range)).expect("room")
                    }
                }
            }
            _ => {
                self.sequence += 1;
                let mut content = vec![0; len];
                pattern::fill(&mut content, DISK, range.start as u64, self.sequence);
                let mut buffers = buffers(pool, len, rng);
                let mut from = &content[..];
                for buffer in &mut buffers {
                    let (part, rest) = from.split_at(buffer.len());
                    buffer.copy_from_slice(part);
                    from = rest;
                }
                let (queue, what) = (&mut self.queue, What::Write(range, self.sequence));
                match one(buffers) {
                    Ok(buffer) => queue.write(offset, buffer, what).expect("room"),
                    Err(many) => queue.write_vectored(offset, many, what).expect("room"),
                }
            }
        }
    }

    fn settle(&mut self, done: Completion<What>) {
        let status = done.status;
        let range = match &done.ctx {
            What::Flush => return assert_eq!(status, Status::Ok),
            What::Read(range) | What::Zero(range) | What::Write(range, _) => range.clone(),
        };
        let at = self.at(&range);
        self.busy[at.clone()].fill(false);
        // Zeroing is no plain write to the engine, and never fails here.
        let fails = self.is_bad(&range) && !matches!(done.ctx, What::Zero(_));
        let expected = if fails { Status::IoError } else { Status::Ok };
        assert_eq!(status, expected, "{:?}", done.ctx);
        if fails {
            self.failed += 1;
            return;
        }
        match done.ctx {
            What::Zero(_) => self.holds[at].fill(0),
            What::Write(_, sequence) => self.holds[at].fill(sequence),
            _ => {
                let buffers = done.data.into_buffers();
                let bytes: Vec<u8> = buffers.iter().flat_map(|b| b.iter().copied()).collect();
                self.judge(&range, &bytes);
            }
        }
    }

    fn judge(&self, range: &Range<usize>, bytes: &[u8]) {
        for (sector, bytes) in range.clone().zip(bytes.chunks(SECTOR)) {
            match self.holds[sector - self.part.start] {
                0 => assert!(bytes.iter().all(|&byte| byte == 0), "sector {sector} is not zero"),
                write => {
                    let wrong = pattern::first_difference(bytes, DISK, sector as u64, write);
                    assert_eq!(wrong, None, "sector {sector} should hold write {write}");
                }
            }
        }
    }

    /// Issues `count` requests, up to `depth` at a time, in batches of any size, waiting in all ways.
    fn run(&mut self, pool: &BufferPool, rng: &mut Rng, count: usize, depth: u16) {
        let begun = Instant::now();
        let mut issued = 0;
        while issued < count || self.queue.in_flight() > 0 {
            assert!(begun.elapsed() < PATIENCE, "{} are missing", self.queue.in_flight());
            let batch = below(rng, usize::from(depth) + 1);
            for _ in 0..batch {
                if issued < count && self.queue.in_flight() < depth {
                    self.issue(pool, rng);
                    issued += 1;
                }
            }
            let ready = match rng.below(5) {
                0 => self.queue.submit().map(|()| false),
                1 => self.queue.wait_polling(Some(PATIENCE)),
                2 => self.queue.wait_for(u16::try_from(1 + below(rng, 9)).unwrap(), Some(PATIENCE)),
                3 => self.queue.arm(),
                _ => self.queue.wait(Some(PATIENCE)),
            };
            ready.expect("the server is there");
            // Now and then not all that is there.
            let most = if rng.below(3) == 0 { below(rng, 9) } else { usize::MAX };
            let done: Vec<_> = self.queue.completions().take(most).collect();
            done.into_iter().for_each(|done| self.settle(done));
        }
    }
}

fn below(rng: &mut Rng, bound: usize) -> usize {
    usize::try_from(rng.below(bound as u64)).unwrap()
}

/// Memory for `len` bytes in one to three pieces, cut anywhere.
fn buffers(pool: &BufferPool, len: usize, rng: &mut Rng) -> Vec<Buffer> {
    let buffer = pool.alloc(len).expect("shared memory for all in flight");
    if rng.below(3) > 0 {
        return vec![buffer];
    }
    let (a, b) = buffer.split_at(1 + below(rng, len - 1));
    if b.len() < 2 {
        return vec![a, b];
    }
    let at = 1 + below(rng, b.len() - 1);
    let (b, c) = b.split_at(at);
    vec![a, b, c]
}

fn one(mut buffers: Vec<Buffer>) -> Result<Buffer, Vec<Buffer>> {
    if buffers.len() == 1 { Ok(buffers.remove(0)) } else { Err(buffers) }
}

/// The shapes of a queue.
fn shapes() -> impl Iterator<Item = Options> {
    [false, true].into_iter().flat_map(|packed| {
        [Indirect::Never, Indirect::WhenScarce, Indirect::Always].map(|indirect| {
            let options = Options::new().packed(packed).indirect(indirect).queue_size(256);
            options.memory(4 << 20).regions(3).event_idx(indirect != Indirect::Always)
        })
    })
}

#[test]
fn random_requests_are_merged_and_nothing_is_lost_or_misplaced() {
    let mut rng = Rng::for_test("merged");
    for shape in shapes() {
        let dir = tempfile::tempdir().unwrap();
        let path = image(dir.path(), BYTES);
        let mut rig = Rig::start(&options(&path).queues(2, 2));
        let options = shape.path(SchedulerMode::Request).queues(2);
        let mut device = options.over(rig.connect()).unwrap();
        let free = device.pool().available();
        let queues = device.queues().unwrap();
        let half = SECTORS / 2;
        let mut worlds: Vec<_> = queues
            .into_iter()
            .zip([0..half, half..SECTORS])
            .map(|(queue, part)| World::new(queue, part, 0..0))
            .collect();
        let pool = device.pool();
        std::thread::scope(|scope| {
            for world in &mut worlds {
                let (pool, mut rng) = (&pool, Rng::new(rng.next_u64()));
                scope.spawn(move || world.run(pool, &mut rng, 1500, 40));
            }
        });
        let (mut merged, mut runs) = (0, 0);
        for world in &worlds {
            let stats = world.queue.stats();
            assert_eq!((stats.completed, stats.path.split), (stats.queued, 0));
            assert_eq!(stats.path.plugged, stats.path.runs + stats.path.merged);
            merged += stats.path.merged;
            runs += stats.path.runs;
        }
        assert!(merged > 300, "only {merged} were merged");
        let served = sum(&rig);
        assert_eq!(served.reads + served.writes, runs, "the server saw what was sent");
        assert_eq!(device.pool().available(), free, "every buffer came back");
        device.stop().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for world in &worlds {
            let at = world.part.start * SECTOR..world.part.end * SECTOR;
            world.judge(&world.part, &bytes[at]);
        }
    }
}

#[test]
fn on_a_disk_with_bad_sectors_only_requests_that_touch_them_fail() {
    let mut rng = Rng::for_test("bad sectors");
    let bad = 1000..1040;
    for shape in shapes() {
        let dir = tempfile::tempdir().unwrap();
        let path = image(dir.path(), BYTES);
        let options = options(&path);
        let disk = open_patiently(&options.disk).unwrap();
        let bytes = (bad.start * SECTOR) as u64..(bad.end * SECTOR) as u64;
        let mut rig = Rig::with_engines(disk, &options, move || {
            let setup = ThreadsSetup { depth: 256, threads: 4, cached_inline: false };
            let bytes = bytes.clone();
            Faulty::new(Threads::new(setup).unwrap(), 512, move |io| {
                let touches = io.offset < bytes.end && bytes.start < io.offset + io.len;
                let moves = matches!(io.op, IoOp::Read | IoOp::Write | IoOp::WriteDurable);
                (moves && touches).then_some(Fault::Error(libc::EIO))
            })
        });
        let mut device = shape.path(SchedulerMode::Request).over(rig.connect()).unwrap();
        let mut world = World::new(device.queue().unwrap(), 900..1200, bad.clone());
        world.run(&device.pool(), &mut rng, 2000, 32);
        let stats = world.queue.stats();
        assert!(world.failed > 20 && stats.path.split > 5, "{} {stats:?}", world.failed);
        device.stop().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let at = world.part.start * SECTOR..world.part.end * SECTOR;
        world.judge(&world.part, &bytes[at]);
    }
}

/// Queues reads that lie end to end, shows them at once, and waits for all.
fn read_stream(options: &Options, count: u64, len: usize) -> (u64, u64) {
    let ram = Source::Sim { model: SimModel::Ram, bytes: 8 << 20 };
    let mut server = RigOptions::new(ram, EngineKind::Sim(SimModel::Ram));
    server.disk.path = SchedulerMode::Bio;
    let mut rig = Rig::start(&server);
    let mut device = options.over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    for i in 0..count {
        let buffer = device.pool().alloc(len).unwrap();
        queue.read(i * len as u64, buffer, i).unwrap();
    }
    while queue.wait_for(u16::MAX, Some(PATIENCE)).unwrap() {
        assert!(queue.completions().all(|done| done.is_ok()));
    }
    let (path, served) = (queue.stats().path, sum(&rig));
    assert_eq!((path.plugged, served.read_bytes), (count, count * len as u64));
    assert_eq!(served.reads, path.runs);
    (path.merged, served.reads)
}

#[test]
fn what_is_merged_keeps_to_what_server_and_options_allow() {
    let options = Options::new().path(SchedulerMode::Request);
    // Buffers of a request: of ours, and of the server's offer.
    assert_eq!(read_stream(&options.clone().max_buffers(4), 12, 4096), (9, 3));
    assert_eq!(read_stream(&options, 252, 512), (250, 2));
    // Bytes of a request: a mebibyte.
    assert_eq!(read_stream(&options, 8, 256 << 10), (6, 2));
    // A request that is longer goes as it is.
    assert_eq!(read_stream(&options, 2, 2 << 20), (0, 2));
}

#[test]
fn bio_sends_each_by_itself() {
    let ram = Source::Sim { model: SimModel::Ram, bytes: 8 << 20 };
    let mut rig = Rig::start(&RigOptions::new(ram, EngineKind::Sim(SimModel::Ram)));
    let mut device = Options::new().over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    for i in 0..32 {
        queue.read(i * 512, device.pool().alloc(512).unwrap(), i).unwrap();
    }
    while queue.wait_for(32, Some(PATIENCE)).unwrap() {
        queue.completions().for_each(drop);
    }
    assert_eq!((queue.stats().path, queue.policy()), (Default::default(), Policy::Bio));
    assert_eq!(rig.stats().iter().map(|worker| worker.requests).sum::<u64>(), 32);
}

/// The path changes under requests that are judged: a disk that gains by merging, and a client whose
/// requests lie end to end.
#[test]
fn auto_takes_up_merging_on_a_slow_disk_and_nothing_goes_wrong() {
    let mut rng = Rng::for_test("auto");
    let hdd = Source::Sim { model: SimModel::Hdd, bytes: BYTES };
    let mut rig_options = RigOptions::new(hdd, EngineKind::Sim(SimModel::Hdd));
    rig_options.disk.path = SchedulerMode::Bio;
    let mut rig = Rig::start(&rig_options);
    let options = Options::new().path(SchedulerMode::Auto).memory(4 << 20);
    let mut device = options.over(rig.connect()).unwrap();
    let mut world = World::new(device.queue().unwrap(), 0..SECTORS, 0..0);
    assert_eq!((world.queue.policy(), world.queue.policy_switches()), (Policy::Bio, 0));
    let begun = Instant::now();
    while world.queue.policy_switches() == 0 {
        assert!(begun.elapsed() < PATIENCE, "it never comes");
        stream(&mut world, &device.pool(), 64);
    }
    assert_eq!(world.queue.policy(), Policy::Request);
    stream(&mut world, &device.pool(), 256);
    let stats = world.queue.stats();
    assert!(stats.path.merged > 0, "{stats:?}");
    world.run(&device.pool(), &mut rng, 200, 16);
    assert_eq!(world.queue.stats().completed, world.queue.stats().queued);
}

/// Writes of a sector end to end, 32 in flight.
fn stream(world: &mut World, pool: &BufferPool, count: usize) {
    let mut issued = 0;
    while issued < count || world.queue.in_flight() > 0 {
        while issued < count && world.queue.in_flight() < 32 {
            let sector = usize::try_from(world.sequence).unwrap() % SECTORS;
            world.sequence += 1;
            let mut buffer = pool.alloc(SECTOR).unwrap();
            pattern::fill(&mut buffer, DISK, sector as u64, world.sequence);
            let what = What::Write(sector..sector + 1, world.sequence);
            world.busy[sector] = true;
            world.queue.write((sector * SECTOR) as u64, buffer, what).unwrap();
            issued += 1;
        }
        assert!(world.queue.wait(Some(PATIENCE)).unwrap(), "no answer");
        let done: Vec<_> = world.queue.completions().collect();
        assert!(done.iter().all(|done| matches!(done.data, Data::One(_))));
        done.into_iter().for_each(|done| world.settle(done));
    }
}
