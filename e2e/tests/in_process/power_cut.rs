//! The power fails under the whole stack: driver, rings, workers, disk, and a simulated disk below.
//! Many more cuts, without threads, are made by `disk/tests/hazards/power_cut.rs`.

use crate::scene::PATIENCE;
use ringway_disk::{Alignment, CacheMode, CustomDisk, EngineKind, SchedulerMode, SimModel, Source};
use ringway_driver::{BlkQueue, BufferPool, Completion, Device, Options};
use ringway_testkit::power_cut::{
    Content, Faults, Lie, Oracle, PowerCutEngine, SimulatedDisk, SimulatedSetup, Ticket, Wrong,
};
use ringway_testkit::rig::{Rig, RigOptions};
use ringway_testkit::{Rng, pattern};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// The disk's number in the content of its sectors.
const DISK: u64 = 9;
/// Size in blocks of 4096 bytes: small, so that requests meet.
const BLOCKS: u64 = 24;
const QUEUES: u16 = 3;
/// Requests of one queue at a time.
const DEPTH: u16 = 8;

/// One way to serve and use the disk.
#[derive(Clone, Copy, Debug)]
struct Setup {
    cache: CacheMode,
    alignment: Alignment,
    packed: bool,
    /// The guest has switched its write cache off.
    through: bool,
    path: SchedulerMode,
}

const SETUPS: [Setup; 8] = {
    let small = Alignment { memory: 512, offset: 512 };
    let large = Alignment { memory: 512, offset: 4096 };
    let path = SchedulerMode::Bio;
    [
        Setup { cache: CacheMode::None, alignment: large, packed: false, through: false, path },
        Setup { cache: CacheMode::None, alignment: large, packed: true, through: true, path },
        Setup { cache: CacheMode::None, alignment: small, packed: true, through: false, path },
        Setup {
            cache: CacheMode::Writethrough,
            alignment: Alignment::ANY,
            packed: false,
            through: true,
            path,
        },
        Setup {
            cache: CacheMode::Writeback,
            alignment: Alignment::ANY,
            packed: true,
            through: false,
            path,
        },
        Setup {
            cache: CacheMode::None,
            alignment: small,
            packed: true,
            through: false,
            path: SchedulerMode::Request,
        },
        Setup {
            cache: CacheMode::Writethrough,
            alignment: Alignment::ANY,
            packed: false,
            through: true,
            path: SchedulerMode::Request,
        },
        Setup {
            cache: CacheMode::Writeback,
            alignment: Alignment::ANY,
            packed: false,
            through: false,
            path: SchedulerMode::Auto,
        },
    ]
};

/// What a request was, until its answer comes.
#[derive(Clone, Copy, Debug)]
struct Asked {
    ticket: Ticket,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Change,
    Flush,
    Read,
}

/// What the guests of all queues share.
struct Guests {
    oracle: Mutex<Oracle>,
    sequence: AtomicU64,
    /// The power has failed: answers count no more.
    dark: AtomicBool,
    through: bool,
}

/// A guest on one queue.
struct Guest<'a> {
    all: &'a Guests,
    queue: BlkQueue<Asked>,
    pool: BufferPool,
    rng: Rng,
}

impl Guest<'_> {
    /// Asks and hears answers until the power fails.
    fn run(&mut self) -> Result<(), Wrong> {
        while !self.all.dark.load(SeqCst) {
            while self.queue.in_flight() < DEPTH && self.rng.below(8) > 0 {
                self.ask();
            }
            self.queue.submit().expect("a server");
            if self.queue.in_flight() > 0 && self.rng.below(3) == 0 {
                assert!(self.queue.wait(Some(PATIENCE)).expect("a server"), "a request hangs");
            }
            self.hear()?;
        }
        while self.queue.in_flight() > 0 {
            assert!(self.queue.wait(Some(PATIENCE)).expect("a server"), "a request hangs");
            self.hear()?;
        }
        Ok(())
    }

    fn ask(&mut self) {
        let sector = self.rng.below(BLOCKS * 8);
        let most = if self.rng.below(4) == 0 { 20 } else { 3 };
        let sectors = 1 + self.rng.below((BLOCKS * 8 - sector).min(most));
        let (offset, bytes) = (sector * 512, sectors * 512);
        let len = usize::try_from(bytes).expect("a short request");
        let sequence = self.all.sequence.fetch_add(1, SeqCst);
        let change = |content| {
            let ticket = self.all.oracle.lock().unwrap().change(sector, sectors, content);
            Asked { ticket, kind: Kind::Change }
        };
        let ask = |kind| {
            let ticket = self.all.oracle.lock().unwrap().ask(sector, sectors);
            Asked { ticket, kind }
        };
        let choice = self.rng.below(16);
        let queued = match choice {
            0..9 => {
                let shift = self.rng.pick(&[0, 0, 512, 1, 700]);
                let Some(buffer) = self.pool.alloc(len + shift) else { return };
                let mut buffer = if shift == 0 { buffer } else { buffer.split_at(shift).1 };
                if choice < 7 {
                    pattern::fill(&mut buffer, DISK, sector, sequence);
                    self.queue.write(offset, buffer, change(Content::Write(sequence)))
                } else {
                    self.queue.read(offset, buffer, ask(Kind::Read))
                }
            }
            9..13 => self.queue.flush(ask(Kind::Flush)),
            13..15 => self.queue.write_zeroes(offset, bytes, choice == 13, change(Content::Zeroes)),
            _ => self.queue.discard(offset, bytes, change(Content::Anything)),
        };
        queued.unwrap_or_else(|error| panic!("{error}"));
    }

    fn hear(&mut self) -> Result<(), Wrong> {
        let answers: Vec<Completion<Asked>> = self.queue.completions().collect();
        for answer in answers {
            let (asked, done) = (answer.ctx, answer.is_ok());
            // Under the lock: an answer is heard before the power fails, or it is not heard at all.
            let mut oracle = self.all.oracle.lock().unwrap();
            if self.all.dark.load(SeqCst) {
                continue;
            }
            match asked.kind {
                Kind::Change => oracle.changed(asked.ticket, done, self.all.through),
                Kind::Flush => oracle.flushed(asked.ticket, done)?,
                Kind::Read if done => {
                    let buffer = answer.into_buffer().expect("the buffer");
                    oracle.read(asked.ticket, &buffer)?;
                }
                Kind::Read => {}
            }
        }
        Ok(())
    }
}

/// Guests on all queues, a power cut after `delay`, and what the oracle says of it.
fn cut(setup: Setup, lie: Option<Lie>, delay: Duration, rng: &mut Rng) -> Result<(), Wrong> {
    let bytes = BLOCKS * 4096;
    let mut image = vec![0; usize::try_from(bytes).expect("a small disk")];
    pattern::fill(&mut image, DISK, 0, 0);
    let granule = usize::try_from(setup.alignment.offset).expect("a block").max(512);
    let disk = SimulatedDisk::new(
        SimulatedSetup {
            bytes: image.len(),
            granule,
            erase_granule: 512,
            failed_flush_loses: setup.cache != CacheMode::None,
            faults: Faults { short: 20, again: 20, ..Faults::default() },
            lie,
            seed: rng.next_u64(),
        },
        &image,
    );
    let Setup { cache, alignment, path, .. } = setup;
    let shape = CustomDisk { bytes, cache, alignment, block_device: false, path };
    let source = Source::Sim { model: SimModel::Ram, bytes };
    let options = RigOptions::new(source, EngineKind::Sim(SimModel::Ram)).queues(QUEUES, 2);
    let of_workers = disk.clone();
    let mut rig =
        Rig::with_engines(shape.open(None).expect("a simulated disk"), &options, move || {
            PowerCutEngine::for_worker(&of_workers)
        });
    let front = Options::new().queues(QUEUES).queue_size(64).packed(setup.packed);
    let mut device: Device = front.over(rig.connect()).unwrap_or_else(|error| panic!("{error}"));
    if setup.through {
        device.set_writeback(false).unwrap();
    }
    let all = Guests {
        oracle: Mutex::new(Oracle::new(DISK, image)),
        sequence: AtomicU64::new(1),
        dark: AtomicBool::new(false),
        through: setup.through,
    };
    let queues: Vec<BlkQueue<Asked>> = device.queues().expect("not taken yet");
    let guests: Vec<Guest<'_>> = queues
        .into_iter()
        .map(|queue| {
            let (pool, rng) = (device.pool(), Rng::new(rng.next_u64()));
            Guest { all: &all, queue, pool, rng }
        })
        .collect();
    let (image, heard) = std::thread::scope(|scope| {
        let run = |mut guest: Guest<'_>| guest.run();
        let running: Vec<_> =
            guests.into_iter().map(|guest| scope.spawn(move || run(guest))).collect();
        std::thread::sleep(delay);
        let oracle = all.oracle.lock().unwrap();
        all.dark.store(true, SeqCst);
        drop(oracle);
        let image = disk.cut();
        let heard: Vec<_> =
            running.into_iter().map(|guest| guest.join().expect("no panic")).collect();
        (image, heard)
    });
    heard.into_iter().collect::<Result<(), Wrong>>()?;
    assert_eq!(disk.complaint(), None);
    all.oracle.into_inner().unwrap().found(&image)
}

#[test]
fn c05_power_cuts_under_the_whole_stack() {
    let mut rng = Rng::for_test("c05_power_cuts_under_the_whole_stack");
    for round in 0..30 {
        for setup in SETUPS {
            let delay = Duration::from_micros(500 + rng.below(12_000));
            let end = cut(setup, None, delay, &mut rng);
            end.unwrap_or_else(|wrong| panic!("round {round}, {setup:?}: {wrong}"));
        }
    }
}

/// The same, with a disk that lies: it is noticed through the whole stack as well.
#[test]
fn power_cuts_show_lies_through_the_whole_stack() {
    let mut rng = Rng::for_test("power_cuts_show_lies_through_the_whole_stack");
    for (lie, setup) in [
        (Lie::FlushDoesNothing, SETUPS[0]),
        (Lie::FlushOfOneQueue, SETUPS[2]),
        (Lie::DurableIsPlain, SETUPS[3]),
        (Lie::StaleNeighbours, SETUPS[2]),
        (Lie::FlushOfOneQueue, SETUPS[5]),
        (Lie::DurableIsPlain, SETUPS[6]),
    ] {
        let noticed =
            (0..200).find(|_| cut(setup, Some(lie), Duration::from_millis(5), &mut rng).is_err());
        let Some(cuts) = noticed else { panic!("{lie:?} goes unnoticed") };
        println!("{lie:?}: {} cuts", cuts + 1);
    }
}
