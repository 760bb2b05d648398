//! A device of 4096-byte blocks under a guest that writes sectors of 512: every write reads, modifies
//! and writes a block, and must not undo what its neighbours do meanwhile.

use crate::random::{campaign, capacity};
use crate::scene::{DISK, PATIENCE, Queue, Scene, flush, read, works, write};
use ringway_disk::{CacheMode, EngineKind, Source};
use ringway_driver::Options;
use ringway_testkit::{LoopDevice, Rng, pattern};

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];

/// A served device of 4096-byte blocks that shows 512 to the guest; its backing file is the image.
struct Blocks {
    scene: Scene,
    device: LoopDevice,
    _folder: tempfile::TempDir,
}

impl Blocks {
    fn new(engine: EngineKind, bytes: u64, queues: u16) -> Option<Self> {
        let folder = crate::scene::folder();
        let device = match LoopDevice::new(folder.path(), bytes, 4096) {
            Ok(device) => device,
            Err(lack) => {
                lack.skip();
                return None;
            }
        };
        if !works(engine, CacheMode::None) {
            return None;
        }
        let front = Options::new().queues(queues).queue_size(128);
        let mut scene = Scene::with(512, &front, |rig| {
            rig.disk.source = Source::Path(device.path().into());
            rig.disk.engine = Some(engine);
            rig.disk.cache = Some(CacheMode::None);
            rig.disk.block_size = Some(512);
            (rig.queues, rig.workers) = (queues, 3);
        });
        scene.image = device.backing().into();
        Some(Self { scene, device, _folder: folder })
    }
}

/// Each queue has one sector of every block, and writes all of them again and again.
#[test]
fn c03_neighbours_in_a_block_lose_nothing() {
    const QUEUES: u64 = 8;
    const BLOCKS: u64 = 12;
    const ROUNDS: u64 = 40;
    for engine in ENGINES {
        let Some(mut blocks) = Blocks::new(engine, BLOCKS * 4096, 8) else { continue };
        assert_eq!(blocks.scene.rig.disk().alignment().offset, 4096);
        assert_eq!(blocks.scene.device.block_size(), 512);
        let queues: Vec<Queue> = blocks.scene.device.queues().expect("not taken yet");
        let pool = blocks.scene.device.pool();
        std::thread::scope(|scope| {
            for (number, mut queue) in (0..QUEUES).zip(queues) {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        for block in 0..BLOCKS {
                            let sector = block * QUEUES + number;
                            let queued = if (round + sector) % 5 == 0 {
                                queue.write_zeroes(sector * 512, 512, false, sector)
                            } else {
                                let mut buffer = pool.alloc(512).expect("shared memory");
                                pattern::fill(&mut buffer, DISK, sector, round);
                                queue.write(sector * 512, buffer, sector)
                            };
                            queued.unwrap_or_else(|error| panic!("{error}"));
                        }
                        while queue.in_flight() > 0 {
                            assert!(queue.wait(Some(PATIENCE)).unwrap(), "a request hangs");
                            assert!(queue.completions().all(|done| done.is_ok()));
                        }
                        // Nobody else writes these sectors.
                        let at = (round % BLOCKS) * QUEUES + number;
                        let buffer = read(&mut queue, at * 512, pool.alloc(512).unwrap());
                        judge(&buffer, at, round);
                    }
                    flush(&mut queue);
                });
            }
        });
        let found = blocks.scene.found();
        for (sector, bytes) in (0..).zip(found.chunks(512)) {
            judge(bytes, sector, ROUNDS);
        }
        let counted = blocks.scene.counted();
        assert!(counted.bounced >= QUEUES * BLOCKS * ROUNDS, "every request is bounced");
    }
}

#[track_caller]
fn judge(bytes: &[u8], sector: u64, round: u64) {
    let right = if (round + sector) % 5 == 0 {
        bytes.iter().all(|&byte| byte == 0)
    } else {
        pattern::first_difference(bytes, DISK, sector, round).is_none()
    };
    assert!(right, "sector {sector} has lost its write of round {round}");
}

#[test]
fn c03_random_requests_within_blocks() {
    let mut rng = Rng::for_test("c03_random_requests_within_blocks");
    for engine in ENGINES {
        let Some(mut blocks) = Blocks::new(engine, capacity(5), 5) else { continue };
        campaign(&mut blocks.scene, &mut rng, &format!("{engine} on blocks of 4096"));
    }
}

/// A device says itself how often it was told to flush.
#[test]
fn c06_durable_writes_flush_the_device() {
    for engine in ENGINES {
        let Some(mut blocks) = Blocks::new(engine, 1 << 20, 1) else { continue };
        let mut queue = blocks.scene.queue();
        let mut buffer = blocks.scene.buffer(4096, 0);
        let mut flushes_of = |blocks: &mut Blocks, queue: &mut Queue, len: usize| {
            let before = blocks.device.flushes();
            for n in 0..8 {
                let mut part = blocks.scene.buffer(len, 0);
                part.copy_from_slice(&buffer[..len]);
                write(queue, n * 8192, part);
            }
            buffer.fill(1);
            blocks.device.flushes() - before
        };
        assert_eq!(flushes_of(&mut blocks, &mut queue, 4096), 0, "{engine}: nobody asked");
        let before = blocks.device.flushes();
        flush(&mut queue);
        assert!(blocks.device.flushes() > before, "{engine}: a flush flushes");
        blocks.scene.device.set_writeback(false).unwrap();
        assert!(!blocks.scene.device.info().writeback);
        assert!(flushes_of(&mut blocks, &mut queue, 4096) >= 8, "{engine}: every write flushes");
        assert!(flushes_of(&mut blocks, &mut queue, 512) >= 8, "{engine}: bounced ones, too");
        let before = blocks.device.flushes();
        let queued = queue.write_zeroes(8192, 4096, false, 0);
        assert_eq!(crate::scene::done(&mut queue, queued), ringway_driver::Status::Ok);
        assert!(blocks.device.flushes() > before, "{engine}: zeroing, too");
        blocks.scene.device.set_writeback(true).unwrap();
        assert_eq!(flushes_of(&mut blocks, &mut queue, 512), 0, "{engine}: no more");
    }
}
