//! The daemon is killed again and again under verified writes, and started again: the front-end
//! reconnects, and nothing is lost, done twice, or late.
#![allow(missing_docs)]

mod common;

use common::{Daemon, PATIENCE, folder};
use ringway_driver::{BlkQueue, Buffer, BufferPool, Device, Error, Options};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Writes in flight on each queue.
const DEPTH: u16 = 32;
/// Sectors that each queue writes to.
const SECTORS: u64 = 256;

/// Deaths of the daemon in one test.
fn deaths() -> u32 {
    std::env::var("RINGWAY_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(8)
}

/// Random numbers; the seed is printed and can be set with `RINGWAY_SEED`.
struct Random(u64);

impl Random {
    fn seeded() -> Self {
        use std::hash::{BuildHasher, RandomState};
        let given = std::env::var("RINGWAY_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(|| RandomState::new().hash_one(0) | 1);
        println!("RINGWAY_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// What a sector holds after so many writes to it.
fn content(sector: u64, sequence: u64) -> impl Iterator<Item = [u8; 8]> {
    (0..64u64)
        .map(move |word| if word % 2 == 0 { sector } else { sequence << 8 | word })
        .map(u64::to_le_bytes)
}

fn fill(buffer: &mut Buffer, sector: u64, sequence: u64) {
    for (to, from) in buffer.chunks_mut(8).zip(content(sector, sequence)) {
        to.copy_from_slice(&from);
    }
}

/// One queue's writes: at most one of each sector in flight, each answered exactly once, and at the
/// end every sector holds what was written last.
struct Writer {
    queue: BlkQueue<(u64, u64)>,
    pool: BufferPool,
    first: u64,
    random: Random,
    /// Writes issued to each sector, and whether one is in flight.
    sectors: Vec<(u64, bool)>,
}

impl Writer {
    fn write_until(&mut self, stop: &AtomicBool, done: &AtomicU64) {
        while !stop.load(Relaxed) || self.queue.in_flight() > 0 {
            while self.queue.in_flight() < DEPTH && !stop.load(Relaxed) {
                let at = self.random.below(SECTORS);
                let (sequence, in_flight) = &mut self.sectors[usize::try_from(at).unwrap()];
                if std::mem::replace(in_flight, true) {
                    continue;
                }
                *sequence += 1;
                let sector = self.first + at;
                let mut buffer = self.pool.alloc(512).unwrap();
                fill(&mut buffer, sector, *sequence);
                self.queue.write(sector * 512, buffer, (at, *sequence)).unwrap();
            }
            if self.queue.in_flight() == 0 {
                continue;
            }
            assert!(self.queue.wait(Some(PATIENCE)).unwrap(), "requests are lost");
            while let Some(completion) = self.queue.pop().unwrap() {
                assert!(completion.is_ok(), "{:?}", completion.status);
                let (at, sequence) = completion.ctx;
                let (issued, in_flight) = &mut self.sectors[usize::try_from(at).unwrap()];
                assert_eq!((sequence, std::mem::take(in_flight)), (*issued, true));
                // Whoever carries the write out once more writes this.
                completion.into_buffer().unwrap().fill(0xee);
                done.fetch_add(1, Relaxed);
            }
        }
    }

    fn verify(&mut self) {
        for at in 0..SECTORS {
            let (sequence, _) = self.sectors[usize::try_from(at).unwrap()];
            if sequence == 0 {
                continue;
            }
            let sector = self.first + at;
            self.queue.read(sector * 512, self.pool.alloc(512).unwrap(), (0, 0)).unwrap();
            assert!(self.queue.wait(Some(PATIENCE)).unwrap());
            let read = self.queue.pop().unwrap().unwrap().into_buffer().unwrap();
            let want: Vec<u8> = content(sector, sequence).flatten().collect();
            assert!(read[..] == want[..], "sector {sector} does not hold write {sequence}");
        }
    }
}

fn serve(dir: &Path, engine: &str) -> Daemon {
    let args = ["disk.img", "--socket", "s", "--queues", "2", "--cache", "writeback"];
    Daemon::serve(dir, &[&args[..], &["--engine", engine]].concat())
}

/// How a daemon ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Told,
}

fn writes_survive(end: End, packed: bool, engine: &str) {
    let dir = folder();
    let mut random = Random::seeded();
    let mut daemon = serve(dir.path(), engine);
    let mut device = Options::new()
        .queues(2)
        .queue_size(128)
        .packed(packed)
        .reconnect(PATIENCE)
        .connect(dir.path().join("s"))
        .unwrap();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut writers: Vec<_> = device
        .queues()
        .unwrap()
        .into_iter()
        .zip(0..)
        .map(|(queue, number)| Writer {
            queue,
            pool: device.pool(),
            first: SECTORS * number,
            random: Random(random.below(u64::MAX >> 11) | 1),
            sectors: vec![(0, false); usize::try_from(SECTORS).unwrap()],
        })
        .collect();
    // The daemon comes back out: it has to live until the threads are done.
    let _last = std::thread::scope(|scope| {
        for writer in &mut writers {
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                writer.write_until(stop, done);
                writer.verify();
            });
        }
        for _ in 0..deaths() {
            // It has to get somewhere first.
            let (before, begun) = (done.load(Relaxed), Instant::now());
            while done.load(Relaxed) < before + 100 && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(done.load(Relaxed) >= before + 100, "it does not go on");
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            match end {
                End::Killed => daemon.kill(),
                End::Told => drop(daemon.stop()),
            }
            daemon = serve(dir.path(), engine);
        }
        stop.store(true, Relaxed);
        daemon
    });
    println!("{} writes over {} daemons", done.load(Relaxed), deaths() + 1);
    assert!(done.load(Relaxed) >= u64::from(deaths()) * 100);
    device.stop().unwrap();
}

#[test]
fn c09_killed_under_writes_split() {
    writes_survive(End::Killed, false, "threads");
}

#[test]
fn c09_killed_under_writes_packed() {
    writes_survive(End::Killed, true, "threads");
}

#[test]
fn c09_killed_under_writes_auto_engine() {
    for packed in [false, true] {
        writes_survive(End::Killed, packed, "auto");
    }
}

#[test]
fn a_daemon_is_replaced_under_writes() {
    for packed in [false, true] {
        writes_survive(End::Told, packed, "threads");
    }
}

/// Nobody comes back: whoever waits is told, and nothing hangs.
#[test]
fn patience_ends_with_a_reason() {
    let dir = folder();
    let daemon = serve(dir.path(), "threads");
    let options = Options::new().reconnect(Duration::from_millis(300));
    let mut device = options.connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<u8>().unwrap();
    daemon.kill();
    queue.read(0, device.pool().alloc(512).unwrap(), 7).unwrap();
    let error = queue.wait(Some(PATIENCE)).unwrap_err();
    assert!(matches!(&error, Error::GivenUp(why) if why.contains("ringway serve")), "{error}");
    assert!(!device.is_connected());
    assert_eq!(queue.abandon(), [7]);
}

/// Without the option a lost connection stays lost, with or without requests in flight.
#[test]
fn without_the_option_nothing_is_sent_twice() {
    let dir = folder();
    let daemon = serve(dir.path(), "threads");
    let mut device = Device::connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<u8>().unwrap();
    daemon.kill();
    queue.read(0, device.pool().alloc(512).unwrap(), 7).unwrap();
    assert!(matches!(queue.wait(Some(PATIENCE)), Err(Error::NotConnected)));
    let _daemon = serve(dir.path(), "threads");
    assert!(device.stop().is_err());
    assert!(matches!(device.reconnect(), Err(Error::NotStopped)));
}
