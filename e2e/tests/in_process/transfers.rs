//! Reads and writes of every size and alignment, through every engine, cache mode, kind of chain
//! and shape of memory.

use crate::scene::{DISK, PATIENCE, Queue, Scene, answer, engines_and_caches, flush, read, write};
use ringway_disk::{CacheMode, EngineKind, Source};
use ringway_driver::{Buffer, Indirect, Options, Status};
use ringway_testkit::pattern;
use ringway_testkit::rig::RigOptions;

const CAPACITY: usize = 6 << 20;
const SECTOR: usize = 512;

/// Where buffers begin, relative to a page: well aligned, to sectors, and not at all.
const SHIFTS: [usize; 6] = [0, 512, 1536, 1, 7, 2049];
/// First sectors: at the start, within blocks, far in.
const SECTORS: [u64; 5] = [0, 1, 7, 8, 2051];

/// The ways to lay requests out.
fn shapes() -> Vec<(Options, &'static str)> {
    let new = || Options::new().memory(12 << 20).queue_size(64);
    vec![
        (new().indirect(Indirect::Never), "chains in the ring"),
        (new().indirect(Indirect::Always).first_index(65530), "indirect tables, indices wrap"),
        (new().indirect(Indirect::WhenScarce).regions(2), "two regions"),
        (new().indirect(Indirect::Never).regions(3).first_index(65535), "three regions, wrap"),
        (new().event_idx(false).queue_size(4).one_table(true), "a ring of four, no EVENT_IDX"),
        (new().indirect(Indirect::Always).regions(3).one_table(true), "three regions in a table"),
    ]
}

/// The content that the disk should have, and requests that keep it up to date.
struct Checked {
    model: Vec<u8>,
    sequence: u64,
}

impl Checked {
    fn new() -> Self {
        Self { model: vec![0; CAPACITY], sequence: 0 }
    }

    /// Fills a buffer as the next write does.
    fn next(&mut self, sector: u64, buffer: &mut [u8]) {
        self.sequence += 1;
        pattern::fill(buffer, DISK, sector, self.sequence);
        let at = usize::try_from(sector).unwrap() * SECTOR;
        self.model[at..at + buffer.len()].copy_from_slice(buffer);
    }

    /// Writes from one place in memory and reads back to another.
    #[track_caller]
    fn round_trip(&mut self, queue: &mut Queue, sector: u64, mut from: Buffer, to: Buffer) {
        self.next(sector, &mut from);
        let mut from = write(queue, sector * 512, from);
        // A write that is carried out late would show.
        from.fill(0xdd);
        let to = read(queue, sector * 512, to);
        assert_eq!(pattern::first_difference(&to, DISK, sector, self.sequence), None);
    }
}

#[test]
fn every_size_and_alignment() {
    for (engine, cache) in engines_and_caches() {
        for (index, (front, shape)) in shapes().into_iter().enumerate() {
            let mut scene = Scene::new(engine, cache, CAPACITY as u64, 1, &front);
            let mut queue = scene.queue();
            let mut checked = Checked::new();
            for (n, &sectors) in [1, 2, 7, 8, 25, 128, 257].iter().enumerate() {
                // Of what is small every combination, of what is large some.
                let count = if sectors < 100 { SHIFTS.len() * SECTORS.len() } else { 6 };
                for i in 0..count {
                    let from = scene.buffer(sectors * SECTOR, SHIFTS[i % 6]);
                    let to = scene.buffer(sectors * SECTOR, SHIFTS[(i + n + index) % 6]);
                    checked.round_trip(&mut queue, SECTORS[(i / 6 + i) % 5], from, to);
                }
            }
            for (mib, shift) in [(1, 0), (4, index % 2)] {
                let (from, to) = (scene.buffer(mib << 20, shift), scene.buffer(mib << 20, 0));
                checked.round_trip(&mut queue, 2051, from, to);
            }
            flush(&mut queue);
            assert!(scene.found() == checked.model, "{engine}, {cache}, {shape}: the image");
            let counted = scene.counted();
            assert_eq!(counted.errors, 0);
            assert_eq!(counted.bounced > 0, cache == CacheMode::None, "{engine}, {cache}, {shape}");
        }
    }
}

/// Buffers that begin in one region of memory and end in another, and lists of buffers that end
/// anywhere.
#[test]
fn buffers_over_regions_and_lists_of_buffers() {
    const MEMORY: usize = 6 << 20;
    for (engine, cache) in engines_and_caches() {
        for indirect in [Indirect::Never, Indirect::Always] {
            for regions in 1..=3 {
                let front = Options::new()
                    .memory(MEMORY)
                    .regions(regions)
                    .indirect(indirect)
                    .first_index(65533);
                let mut scene = Scene::new(engine, cache, CAPACITY as u64, 1, &front);
                let mut queue = scene.queue();
                let mut checked = Checked::new();
                // The first seam; with one region it is none.
                let seam = MEMORY / regions.max(2);
                for before in [1, 100, 512, 700, 4096] {
                    let all = scene.device.pool().alloc(MEMORY).expect("all of it");
                    let (mut elsewhere, mut over_seam) = all.split_at(seam - before);
                    elsewhere.set_len(8192);
                    over_seam.set_len(8192);
                    checked.round_trip(&mut queue, 13, over_seam, elsewhere);
                    let all = scene.device.pool().alloc(MEMORY).expect("all of it");
                    let (mut elsewhere, mut over_seam) = all.split_at(seam - before);
                    elsewhere.set_len(8192);
                    over_seam.set_len(8192);
                    checked.round_trip(&mut queue, 14, elsewhere, over_seam);
                }
                lists_of_buffers(&scene, &mut queue, &mut checked);
                flush(&mut queue);
                assert!(scene.found() == checked.model, "{engine}, {cache}, {regions} regions");
            }
        }
    }
}

fn lists_of_buffers(scene: &Scene, queue: &mut Queue, checked: &mut Checked) {
    let lists: [&[usize]; 5] = [
        &[512, 1536, 4096, 512],
        &[1, 511],
        &[100, 700, 224, 4096, 512 * 7],
        &[65536, 1, 510, 1],
        &[512; 100],
    ];
    for (n, lens) in lists.into_iter().enumerate() {
        let sector = 3 + 8 * n as u64;
        let mut bytes = vec![0; lens.iter().sum()];
        checked.next(sector, &mut bytes);
        let mut rest = &bytes[..];
        let buffers = lens.iter().map(|&len| {
            let mut buffer = scene.buffer(len, n);
            buffer.copy_from_slice(&rest[..len]);
            rest = &rest[len..];
            buffer
        });
        let buffers = buffers.collect();
        queue.write_vectored(sector * 512, buffers, 0).unwrap_or_else(|error| panic!("{error}"));
        let done = answer(queue);
        assert_eq!((done.status, done.used_len), (Status::Ok, 1));
        let mut buffers = done.data.into_buffers();
        buffers.iter_mut().for_each(|buffer| buffer.fill(0xdd));

        queue.read_vectored(sector * 512, buffers, 0).unwrap_or_else(|error| panic!("{error}"));
        let done = answer(queue);
        assert_eq!((done.status, done.used_len as usize), (Status::Ok, bytes.len() + 1));
        let found: Vec<u8> =
            done.data.into_buffers().iter().flat_map(|buffer| buffer.to_vec()).collect();
        assert!(found == bytes, "list {n}");
    }
}

/// One to eight queues on one to three workers, all full at the same time.
#[test]
fn one_to_eight_queues() {
    const EACH: usize = 256 << 10;
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        if !crate::scene::works(engine, CacheMode::Writeback) {
            continue;
        }
        for queues in 1..=8u16 {
            let front = Options::new().queues(queues).queue_size(16).first_index(65530);
            let bytes = EACH as u64 * u64::from(queues);
            let mut scene = Scene::new(engine, CacheMode::Writeback, bytes, queues, &front);
            let taken: Vec<Queue> = scene.device.queues().expect("not taken yet");
            assert_eq!(taken.len(), usize::from(queues));
            let pool = scene.device.pool();
            std::thread::scope(|scope| {
                for (index, mut queue) in taken.into_iter().enumerate() {
                    let pool = &pool;
                    scope.spawn(move || {
                        let first = (index * EACH / SECTOR) as u64;
                        let mut buffers: Vec<_> =
                            (0..9).map(|_| pool.alloc(4096).expect("shared memory")).collect();
                        for next in 0..(EACH / 4096) as u64 {
                            if buffers.is_empty() {
                                assert!(queue.wait(Some(PATIENCE)).unwrap(), "a request hangs");
                                buffers.extend(queue.completions().map(|done| {
                                    assert!(done.is_ok());
                                    done.into_buffer().expect("the buffer")
                                }));
                            }
                            let mut buffer = buffers.pop().expect("one came back");
                            let sector = first + next * 8;
                            pattern::fill(&mut buffer, DISK, sector, 1);
                            queue.write(sector * 512, buffer, next).expect("room");
                            queue.submit().unwrap();
                        }
                        while queue.in_flight() > 0 {
                            assert!(queue.wait(Some(PATIENCE)).unwrap(), "a request hangs");
                            assert!(queue.completions().all(|done| done.is_ok()));
                        }
                        let buffer = pool.alloc(EACH).expect("shared memory");
                        let buffer = read(&mut queue, first * 512, buffer);
                        assert_eq!(pattern::first_difference(&buffer, DISK, first, 1), None);
                    });
                }
            });
            let found = scene.found();
            assert_eq!(pattern::first_difference(&found, DISK, 0, 1), None, "{queues} queues");
            let workers = scene.rig.stats();
            assert!(workers.iter().all(|worker| worker.requests > 0), "no worker is idle");
        }
    }
}

/// The engine that moves nothing answers everything, with the lengths that are due.
#[test]
fn null_answers_everything() {
    let source = Source::Null { bytes: 1 << 40, latency_us: 0 };
    for (front, shape) in shapes() {
        let mut scene = Scene::with(512, &front, |rig| {
            *rig = RigOptions::new(source.clone(), EngineKind::Null);
        });
        assert_eq!(scene.device.capacity(), 1 << 40);
        let mut queue = scene.queue();
        for sectors in [1, 8, 257, 8192] {
            for shift in SHIFTS {
                let at = (1 << 40) - 512 * sectors as u64;
                let buffer = write(&mut queue, at, scene.buffer(sectors * SECTOR, shift));
                let buffer = read(&mut queue, 0, buffer);
                assert!(buffer.iter().all(|&byte| byte == 0xee), "{shape}: no byte moves");
            }
        }
        flush(&mut queue);
        assert_eq!(scene.counted().errors, 0);
    }
}
