//! Guests, queues and a disk whose power fails, without threads: a seed is a history.

use super::oracle::{Content, Oracle, Ticket, Wrong};
use super::{Faults, Lie, PowerCutEngine, SECTOR, SimulatedDisk, SimulatedSetup};
use crate::{Rng, pattern};
use ringway_aio::{Engine, FileId, Reaped};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{Alignment, CacheMode, Disk, DiskQueue, Finished, Simulated};
use std::fmt;
use std::sync::Arc;

/// The disk's number in the content of its sectors.
const DISK: u64 = 3;
/// The most queues of a disk.
const QUEUES_MAX: usize = 4;
/// Requests of one queue at a time.
const DEPTH: u16 = 6;
/// The longest request, in sectors.
const SECTORS_MAX: u64 = 20;
/// Memory of one request, in bytes: the longest one at an odd address.
const ROOM: usize = 3 * 4096;
/// What a disk may need to come to rest.
const STEPS_MAX: usize = 20_000;

/// What a seed stands for; printed when it fails.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How the disk is opened.
    pub cache: CacheMode,
    /// What the disk asks of buffers and offsets, in bytes.
    pub alignment: Alignment,
    /// Discards go to it as to a block device.
    pub block_device: bool,
    /// Size in blocks of 4096 bytes.
    pub blocks: u64,
    /// Queues, each with its own engine.
    pub queues: usize,
    /// Requests of the guests in one life.
    pub requests: u64,
    /// The chance, of a thousand, that requests keep to blocks of 4096 bytes.
    pub whole_blocks: u16,
    /// The guest switches its write cache off and on.
    pub toggles: bool,
    /// Lives: after each cut the disk is opened again on what was found.
    pub lives: u32,
    /// What fails.
    pub faults: Faults,
}

/// What seeds have done: a campaign that reaches nothing proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Power cuts.
    pub cuts: u64,
    /// Of them, with requests in flight.
    pub cuts_in_flight: u64,
    /// Requests answered with success.
    pub done: u64,
    /// Requests answered with an error.
    pub failed: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// Writes whose answer promised that they are durable.
    pub durable: u64,
    /// Requests that went through bounce buffers.
    pub bounced: u64,
    /// Operations begun again after a fault.
    pub continued: u64,
    /// Sectors found after a cut.
    pub sectors: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.cuts += more.cuts;
        self.cuts_in_flight += more.cuts_in_flight;
        self.done += more.done;
        self.failed += more.failed;
        self.flushes += more.flushes;
        self.durable += more.durable;
        self.bounced += more.bounced;
        self.continued += more.continued;
        self.sectors += more.sectors;
    }
}

/// A seed after which something is on the disk that must not be.
#[derive(Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What it stands for.
    pub config: Config,
    /// What is wrong.
    pub wrong: Wrong,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, config, wrong } = self;
        write!(
            f,
            "seed {seed}: {wrong}\n{config:?}\nagain: cargo run --release -p xtask -- power-cut \
             --seed {seed}"
        )
    }
}

/// Runs seeds. The memory of its guests is taken once.
#[derive(Debug)]
pub struct Campaign {
    lie: Option<Lie>,
    memory: Mapping,
}

impl Campaign {
    /// A campaign in which everybody is honest, or one lies.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn new(lie: Option<Lie>) -> Self {
        let bytes = QUEUES_MAX * usize::from(DEPTH) * ROOM;
        Self { lie, memory: Mapping::anonymous(bytes).expect("memory") }
    }

    /// What `seed` stands for.
    #[must_use]
    pub fn config(&self, seed: u64) -> Config {
        let rng = &mut Rng::new(seed);
        let alignment = |memory, offset| Alignment { memory, offset };
        let (cache, alignment) = match rng.below(8) {
            0 | 1 => (CacheMode::None, alignment(512, 512)),
            2..5 => (CacheMode::None, alignment(512, 4096)),
            5 => (CacheMode::Writethrough, Alignment::ANY),
            6 => (CacheMode::Writeback, Alignment::ANY),
            _ if rng.below(4) == 0 => (CacheMode::Unsafe, Alignment::ANY),
            _ => (CacheMode::None, alignment(4, 4096)),
        };
        let faulty = rng.below(3) == 0;
        let mut rate = |most: u64| match faulty {
            true => u16::try_from(rng.below(most)).expect("of a thousand"),
            false => 0,
        };
        let (short, again, error, sync_error) = (rate(100), rate(100), rate(30), rate(60));
        Config {
            cache,
            alignment,
            block_device: cache == CacheMode::None && rng.below(2) == 0,
            blocks: 1 + rng.below(10),
            queues: 1 + usize::try_from(rng.below(QUEUES_MAX as u64)).expect("few"),
            requests: 4 + rng.below(60),
            whole_blocks: rng.pick(&[0, 0, 300, 1000]),
            toggles: rng.below(3) == 0,
            lives: 1 + u32::from(rng.below(3) == 0),
            faults: Faults { short, again, error, sync_error, no_erase: rng.below(4) == 0 },
        }
    }

    /// One seed, from a new disk to its last power cut.
    ///
    /// # Errors
    /// What must not be.
    pub fn run(&mut self, seed: u64) -> Result<Tally, Box<Failure>> {
        let config = self.config(seed);
        // The choices of the guests are not those that made the configuration.
        let mut rng = Rng::new(!seed);
        let mut tally = Tally::default();
        let mut image = vec![0; usize::try_from(config.blocks * 4096).expect("a small disk")];
        pattern::fill(&mut image, DISK, 0, 0);
        for life in 0..config.lives {
            let mut scene = Life::new(self, config, &image, rng.next_u64());
            scene.sequence = u64::from(life) << 32;
            let cut = scene.live(&mut rng, &mut tally);
            image = cut.map_err(|wrong| Box::new(Failure { seed, config, wrong }))?;
        }
        Ok(tally)
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Asked {
    op: Op,
    ticket: Ticket,
    memory: usize,
    len: usize,
    /// Which time of one cache mode it was issued in.
    era: u64,
    durable: bool,
}

/// One guest's queue. Dropped in the order of its fields: the engine lets go first.
struct Lane {
    engine: PowerCutEngine,
    queue: DiskQueue<Asked>,
    /// Places in memory that no request uses.
    free: Vec<usize>,
}

/// From a start to a power cut.
struct Life<'a> {
    config: Config,
    lie: Option<Lie>,
    memory: &'a Mapping,
    disk: SimulatedDisk,
    lanes: Vec<Lane>,
    oracle: Oracle,
    sequence: u64,
    durable: bool,
    era: u64,
}

impl<'a> Life<'a> {
    fn new(campaign: &'a Campaign, config: Config, image: &[u8], seed: u64) -> Self {
        let lie = campaign.lie;
        let granule = usize::try_from(config.alignment.offset).expect("a block").max(SECTOR);
        let setup = SimulatedSetup {
            bytes: image.len(),
            granule,
            erase_granule: if config.block_device { granule } else { SECTOR },
            failed_flush_loses: config.cache != CacheMode::None,
            faults: config.faults,
            lie,
            seed,
        };
        let disk = SimulatedDisk::new(setup, image);
        let cache = match lie {
            Some(Lie::FlushNotPassedOn) => CacheMode::Unsafe,
            _ => config.cache,
        };
        let (alignment, block_device) = (config.alignment, config.block_device);
        let shape = Simulated { bytes: image.len() as u64, cache, alignment, block_device };
        let open = || Arc::new(shape.open().expect("a simulated disk"));
        let shared = open();
        let apart = match lie {
            Some(Lie::LocksPerQueue) => true,
            // Through the page cache nothing is locked.
            Some(Lie::FailedFlushPerQueue) => config.cache != CacheMode::None,
            _ => false,
        };
        let lanes = (0..config.queues).map(|number| {
            let of_lane = if apart { open() } else { Arc::clone(&shared) };
            Lane::new(&disk, of_lane, number)
        });
        let mut life = Self {
            config,
            lie,
            memory: &campaign.memory,
            lanes: lanes.collect(),
            disk,
            oracle: Oracle::new(DISK, image.to_vec()),
            sequence: 0,
            durable: false,
            era: 0,
        };
        life.set_durable(config.cache == CacheMode::Writethrough);
        life
    }

    fn set_durable(&mut self, durable: bool) {
        self.durable = durable;
        self.era += 1;
        let last = self.lanes.len() - 1;
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            let forgotten = self.lie == Some(Lie::OneQueueNotDurable) && number == last;
            lane.queue.set_durable_writes(durable && !forgotten);
        }
    }

    /// What the guests do until the power is cut, and what is on the disk then.
    fn live(mut self, rng: &mut Rng, tally: &mut Tally) -> Result<Vec<u8>, Wrong> {
        let mut asked = 0;
        while asked < self.config.requests {
            let at = pick(rng, self.lanes.len());
            match rng.below(10) {
                0..4 => asked += u64::from(self.ask(rng, at)),
                4..6 => self.turn(at, tally)?,
                6..9 => {
                    for _ in 0..=rng.below(6) {
                        self.disk.step();
                    }
                }
                _ if self.config.toggles && rng.below(6) == 0 => {
                    let through = self.config.cache == CacheMode::Writethrough;
                    self.set_durable(through || !self.durable);
                }
                _ => {}
            }
        }
        match rng.below(3) {
            0 => {}
            1 => self.rest(tally)?,
            _ => {
                self.rest(tally)?;
                let at = pick(rng, self.lanes.len());
                self.ask_flush(at);
                self.rest(tally)?;
            }
        }
        tally.cuts += 1;
        tally.cuts_in_flight += u64::from(self.lanes.iter().any(|lane| lane.queue.in_flight() > 0));
        let image = self.disk.cut();
        tally.sectors += (image.len() / SECTOR) as u64;
        for lane in &self.lanes {
            tally.bounced += lane.queue.stats().bounced;
            tally.continued += lane.queue.stats().continued;
        }
        if let Some(complaint) = self.disk.complaint() {
            return Err(Wrong(format!("the disk was asked for {complaint}")));
        }
        if self.config.cache != CacheMode::Unsafe {
            self.oracle.found(&image)?;
        }
        Ok(image)
    }

    /// Lets everything come to its end.
    fn rest(&mut self, tally: &mut Tally) -> Result<(), Wrong> {
        for _ in 0..STEPS_MAX {
            if self.lanes.iter().all(|lane| lane.queue.in_flight() == 0) {
                return Ok(());
            }
            while self.disk.step() {}
            for at in 0..self.lanes.len() {
                self.turn(at, tally)?;
            }
        }
        let left: Vec<usize> = self.lanes.iter().map(|lane| lane.queue.in_flight()).collect();
        Err(Wrong(format!("requests hang: {left:?} of each queue")))
    }

    /// One round of what a worker does.
    fn turn(&mut self, at: usize, tally: &mut Tally) -> Result<(), Wrong> {
        for finished in self.lanes[at].turn() {
            self.answer(at, &finished, tally)?;
        }
        Ok(())
    }

    fn answer(&mut self, at: usize, end: &Finished<Asked>, tally: &mut Tally) -> Result<(), Wrong> {
        let asked = end.context;
        let done = end.status == Status::Ok;
        *(if done { &mut tally.done } else { &mut tally.failed }) += 1;
        match asked.op {
            Op::Flush => {
                tally.flushes += u64::from(done);
                // Nothing is promised, and nothing is passed on.
                if self.config.cache != CacheMode::Unsafe {
                    self.oracle.flushed(asked.ticket, done)?;
                }
            }
            Op::Read if done => {
                // SAFETY: the request is answered: its memory is the guest's again.
                let bytes =
                    unsafe { std::slice::from_raw_parts(self.memory.at(asked.memory), asked.len) };
                self.oracle.read(asked.ticket, bytes)?;
            }
            Op::Read | Op::GetId => {}
            Op::Write | Op::Discard | Op::WriteZeroes => {
                let durable = asked.durable && asked.era == self.era;
                tally.durable += u64::from(durable && done);
                self.oracle.changed(asked.ticket, done, durable);
            }
        }
        if asked.len > 0 {
            // The guest uses its memory for something else at once.
            self.bytes(asked.memory, asked.len).fill(0xee);
            self.lanes[at].free.push(asked.memory / ROOM * ROOM);
        }
        Ok(())
    }

    fn bytes(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at + len <= self.memory.len());
        // SAFETY: the range lies in the mapping, and no request uses it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(at), len) }
    }

    /// A guest asks for something. False if it has no room for it.
    fn ask(&mut self, rng: &mut Rng, at: usize) -> bool {
        let op = match rng.below(20) {
            0..10 => Op::Write,
            10..13 => Op::Read,
            13..16 => Op::Flush,
            16..18 => Op::WriteZeroes,
            _ => Op::Discard,
        };
        if op == Op::Flush {
            return self.ask_flush(at);
        }
        let (first, sectors) = self.place(rng);
        let moves = op.moves_data();
        let Some(tag) = self.lanes[at].queue.acquire() else { return false };
        let room = if moves { self.lanes[at].free.pop() } else { Some(0) };
        let Some(room) = room else {
            self.lanes[at].queue.abandon(tag);
            return false;
        };
        let len = if moves { usize::try_from(sectors).expect("few") * SECTOR } else { 0 };
        let memory = room + rng.pick(&[0, 0, 512, 1024, 1, 4, 700]);
        let ticket = match op {
            Op::Read => self.oracle.ask(first, sectors),
            _ => {
                self.sequence += 1;
                let content = match op {
                    Op::Write => Content::Write(self.sequence),
                    Op::WriteZeroes => Content::Zeroes,
                    _ => Content::Anything,
                };
                self.oracle.change(first, sectors, content)
            }
        };
        if op == Op::Write {
            let sequence = self.sequence;
            pattern::fill(self.bytes(memory, len), DISK, first, sequence);
        }
        let base = self.memory.at(memory);
        let request = self.lanes[at].queue.request_mut(tag);
        (request.op, request.unmap) = (op, rng.below(2) == 0);
        request.range = ByteRange::new(first * 512, sectors * 512).expect("a small disk");
        request.segments.clear();
        // One piece, or two that meet anywhere.
        let cut = pick(rng, 2 * len + 1);
        let parts =
            if cut > 0 && cut < len { vec![(0, cut), (cut, len - cut)] } else { vec![(0, len)] };
        for (skip, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            assert!(request.segments.push(Segment { base: base.wrapping_add(skip), len }));
        }
        let durable = self.durable && self.config.cache != CacheMode::Unsafe;
        let asked = Asked { op, ticket, memory, len, era: self.era, durable };
        self.lanes[at].start(tag, asked);
        true
    }

    fn ask_flush(&mut self, at: usize) -> bool {
        let Some(tag) = self.lanes[at].queue.acquire() else { return false };
        let request = self.lanes[at].queue.request_mut(tag);
        (request.op, request.range) = (Op::Flush, ByteRange::default());
        request.segments.clear();
        let ticket = self.oracle.ask(0, 0);
        let asked =
            Asked { op: Op::Flush, ticket, memory: 0, len: 0, era: self.era, durable: false };
        self.lanes[at].start(tag, asked);
        true
    }

    /// Where a request goes, in sectors: mostly a few, sometimes whole blocks.
    fn place(&self, rng: &mut Rng) -> (u64, u64) {
        let all = self.config.blocks * 8;
        if rng.below(1000) < self.config.whole_blocks.into() {
            let first = rng.below(self.config.blocks);
            let most = (self.config.blocks - first).min(SECTORS_MAX / 8);
            return (first * 8, (1 + rng.below(most)) * 8);
        }
        let first = rng.below(all);
        let most = (all - first).min(if rng.below(4) == 0 { SECTORS_MAX } else { 4 });
        (first, 1 + rng.below(most))
    }
}

impl Lane {
    fn new(disk: &SimulatedDisk, of_lane: Arc<Disk>, number: usize) -> Self {
        let engine = PowerCutEngine::by_hand(disk);
        let base = (number as u64) << 16;
        let queue = DiskQueue::new(of_lane, engine.limits(), FileId(0), base, DEPTH);
        let first = number * usize::from(DEPTH);
        let free = (first..first + usize::from(DEPTH)).map(|room| room * ROOM).collect();
        Self { engine, queue: queue.expect("memory"), free }
    }

    fn start(&mut self, tag: u16, asked: Asked) {
        // SAFETY: the memory belongs to this request until it is answered, and to the campaign,
        // which outlives the lane.
        unsafe { self.queue.start(&mut self.engine, tag, asked) };
    }

    fn turn(&mut self) -> Vec<Finished<Asked>> {
        if self.queue.has_deferred() {
            self.queue.retry(&mut self.engine, usize::MAX);
        }
        self.engine.submit().expect("a sound engine");
        let mut reaped = Reaped::default();
        self.engine.reap(&mut reaped);
        let mut answers = Vec::new();
        for done in reaped.done {
            let slot = u16::try_from(done.tag & 0xffff).expect("16 bits");
            answers.extend(self.queue.finish(&mut self.engine, slot, done.result));
        }
        answers.extend(std::iter::from_fn(|| self.queue.take_late()));
        answers
    }
}

fn pick(rng: &mut Rng, below: usize) -> usize {
    usize::try_from(rng.below(below as u64)).expect("below the bound")
}
