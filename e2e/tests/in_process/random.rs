//! Random requests over all queues at the same time, judged sector by sector.
//!
//! Stripes of the disk belong to the queues in turn, and are no whole number of blocks: neighbours in
//! one block belong to different queues. Each queue knows what its sectors hold.

use crate::scene::{DISK, PATIENCE, Queue, Scene, flush, works};
use ringway_disk::{CacheMode, EngineKind};
use ringway_driver::{BufferPool, Completion, Indirect, Options};
use ringway_testkit::{Rng, pattern};
use std::collections::BTreeMap;

/// Sectors of a stripe.
const STRIPE: u64 = 61;
/// Stripes of each queue.
const STRIPES: u64 = 12;
/// Batches of each queue.
const BATCHES: u64 = 40;

/// What a sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// What this write put there; 0 is zeroes.
    Write(u64),
    /// That, or zeroes: it was discarded.
    Perhaps(u64),
}

impl Holds {
    pub(crate) fn is(self, bytes: &[u8], sector: u64) -> bool {
        let zero = || bytes.iter().all(|&byte| byte == 0);
        let by = |write| pattern::first_difference(bytes, DISK, sector, write).is_none();
        match self {
            Self::Write(0) => zero(),
            Self::Write(write) => by(write),
            Self::Perhaps(write) => zero() || by(write),
        }
    }

    fn discarded(self) -> Self {
        match self {
            Self::Write(write) | Self::Perhaps(write) => Self::Perhaps(write),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write,
    Zero { unmap: bool },
    Discard,
    Flush,
}

/// One request of a batch.
#[derive(Clone, Copy, Debug)]
struct Ask {
    kind: Kind,
    sector: u64,
    sectors: u64,
    sequence: u64,
}

/// One queue, what it may touch, and what is there.
pub(crate) struct Actor {
    queue: Queue,
    pool: BufferPool,
    rng: Rng,
    number: u64,
    queues: u64,
    sequence: u64,
    pub(crate) holds: BTreeMap<u64, Holds>,
}

/// Bytes of a disk for so many queues.
pub(crate) fn capacity(queues: u64) -> u64 {
    // Devices have whole blocks.
    (queues * STRIPES * STRIPE * 512).next_multiple_of(4096)
}

impl Actor {
    /// Of `queues` actors on a disk of zeroes.
    pub(crate) fn all(scene: &mut Scene, rng: &mut Rng) -> Vec<Self> {
        let queues: Vec<Queue> = scene.device.queues().expect("not taken yet");
        let count = queues.len() as u64;
        let pool = scene.device.pool();
        let actor = |(number, queue)| Self {
            queue,
            pool: pool.clone(),
            rng: Rng::new(rng.next_u64()),
            number,
            queues: count,
            // Sequences differ between queues.
            sequence: number << 32,
            holds: BTreeMap::new(),
        };
        (0..).zip(queues).map(actor).collect()
    }

    /// A batch of requests that do not touch each other, then what they did.
    fn batch(&mut self) {
        let mut stripes: Vec<u64> = (0..STRIPES).collect();
        let depth = 1 + self.rng.below(STRIPES);
        let mut asks = Vec::new();
        for _ in 0..depth {
            let at = usize::try_from(self.rng.below(stripes.len() as u64)).unwrap();
            let stripe = stripes.swap_remove(at);
            let first = (stripe * self.queues + self.number) * STRIPE;
            let skip = self.rng.below(STRIPE);
            let sectors = 1 + self.rng.below(STRIPE - skip);
            let kind = match self.rng.below(16) {
                0..6 => Kind::Read,
                6..12 => Kind::Write,
                12 => Kind::Zero { unmap: false },
                13 => Kind::Zero { unmap: true },
                14 => Kind::Discard,
                _ => Kind::Flush,
            };
            self.sequence += 1;
            asks.push(Ask { kind, sector: first + skip, sectors, sequence: self.sequence });
        }
        for (context, &ask) in asks.iter().enumerate() {
            self.ask(context as u64, ask);
        }
        let mut left = asks.len();
        while left > 0 {
            assert!(self.queue.wait(Some(PATIENCE)).expect("a server"), "a request hangs");
            while let Some(done) = self.queue.pop().expect("a sound queue") {
                let ask = asks[usize::try_from(done.ctx).unwrap()];
                self.judge(ask, done);
                left -= 1;
            }
        }
    }

    fn ask(&mut self, context: u64, ask: Ask) {
        let (offset, bytes) = (ask.sector * 512, ask.sectors * 512);
        let queued = match ask.kind {
            Kind::Read | Kind::Write => {
                let len = usize::try_from(bytes).unwrap();
                let shift = self.rng.pick(&[0, 0, 512, 1536, 1, 3, 700]);
                let buffer = self.pool.alloc(len + shift).expect("shared memory");
                let mut buffer = if shift == 0 { buffer } else { buffer.split_at(shift).1 };
                if matches!(ask.kind, Kind::Write) {
                    pattern::fill(&mut buffer, DISK, ask.sector, ask.sequence);
                } else {
                    buffer.fill(0xee);
                }
                // Some in several buffers that end anywhere.
                let cut = usize::try_from(self.rng.below(2 * bytes)).unwrap();
                let buffers = if cut > 0 && cut < len {
                    let (first, second) = buffer.split_at(cut);
                    vec![first, second]
                } else {
                    vec![buffer]
                };
                if matches!(ask.kind, Kind::Write) {
                    self.queue.write_vectored(offset, buffers, context)
                } else {
                    self.queue.read_vectored(offset, buffers, context)
                }
            }
            Kind::Zero { unmap } => self.queue.write_zeroes(offset, bytes, unmap, context),
            Kind::Discard => self.queue.discard(offset, bytes, context),
            Kind::Flush => self.queue.flush(context),
        };
        queued.unwrap_or_else(|error| panic!("{ask:?}: {error}"));
    }

    fn judge(&mut self, ask: Ask, done: Completion<u64>) {
        assert!(done.is_ok(), "{ask:?}: {:?}", done.status);
        let bytes: Vec<u8> =
            done.data.into_buffers().iter().flat_map(|buffer| buffer.to_vec()).collect();
        for i in 0..ask.sectors {
            let sector = ask.sector + i;
            let held = self.holds.entry(sector).or_insert(Holds::Write(0));
            match ask.kind {
                Kind::Read => {
                    let at = usize::try_from(i * 512).unwrap();
                    let right = held.is(&bytes[at..][..512], sector);
                    assert!(right, "sector {sector} should hold {held:?}");
                }
                Kind::Write => *held = Holds::Write(ask.sequence),
                Kind::Zero { .. } => *held = Holds::Write(0),
                Kind::Discard => *held = held.discarded(),
                Kind::Flush => {}
            }
        }
    }

    /// All batches, then a flush.
    pub(crate) fn run(mut self) -> BTreeMap<u64, Holds> {
        for _ in 0..BATCHES {
            self.batch();
        }
        flush(&mut self.queue);
        self.holds
    }
}

/// Runs all actors of a scene at the same time, then looks at the image.
pub(crate) fn campaign(scene: &mut Scene, rng: &mut Rng, what: &str) {
    let actors = Actor::all(scene, rng);
    let holds: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = actors.into_iter().map(|actor| scope.spawn(|| actor.run())).collect();
        running.into_iter().map(|actor| actor.join().expect("an actor panicked")).collect()
    });
    let found = scene.found();
    for (&sector, held) in holds.iter().flatten() {
        let bytes = &found[usize::try_from(sector * 512).unwrap()..][..512];
        assert!(held.is(bytes, sector), "{what}: sector {sector} of the image: {held:?}");
    }
    assert_eq!(scene.counted().errors, 0, "{what}");
}

#[test]
fn random_requests_over_all_queues() {
    let mut rng = Rng::for_test("random_requests_over_all_queues");
    let configurations = [
        (EngineKind::IoUring, CacheMode::None, 4, Indirect::WhenScarce, 1),
        (EngineKind::IoUring, CacheMode::Writeback, 8, Indirect::Always, 3),
        (EngineKind::IoUring, CacheMode::Writethrough, 3, Indirect::Never, 2),
        (EngineKind::Threads, CacheMode::None, 8, Indirect::Never, 1),
        (EngineKind::Threads, CacheMode::Writeback, 2, Indirect::WhenScarce, 3),
        (EngineKind::Threads, CacheMode::Unsafe, 5, Indirect::Always, 2),
        (EngineKind::LinuxAio, CacheMode::None, 6, Indirect::WhenScarce, 2),
    ];
    for (engine, cache, queues, indirect, regions) in configurations {
        if !works(engine, cache) {
            continue;
        }
        let front = Options::new()
            .queues(queues)
            .queue_size(64)
            .indirect(indirect)
            .regions(regions)
            .first_index(65530);
        let bytes = capacity(queues.into());
        let mut scene = Scene::new(engine, cache, bytes, queues, &front);
        campaign(&mut scene, &mut rng, &format!("{engine}, {cache}, {queues} queues"));
    }
}
