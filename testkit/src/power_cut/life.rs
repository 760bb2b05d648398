//! One life of a campaign: guests, queues and a disk, from a start to a power cut.

use super::config::{Config, Counts, DEPTH, DISK, ROOM};
use super::oracle::{Content, Oracle, Ticket, Wrong};
use super::{Lie, PowerCutEngine, SECTOR, SECTORS_MAX, SimulatedDisk, SimulatedSetup};
use crate::{Rng, pattern};
use ringway_aio::{Engine, FileId, Reaped};
use ringway_core::mem::{Mapping, Segment};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{CacheMode, CustomDisk, Disk, DiskQueue, DiskStats, Finished, SchedulerMode};
use std::sync::Arc;

/// What a disk may need to come to rest.
const STEPS_MAX: usize = 20_000;

/// Rounds of a worker in one round here: of so many it uses one to look at the path.
const TURNS: usize = 64;

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
struct QueueUnderTest {
    engine: PowerCutEngine,
    queue: DiskQueue<Asked>,
    /// Places in memory that no request uses.
    free: Vec<usize>,
    /// Where its last request ended, in sectors.
    head: u64,
}

/// From a start to a power cut.
pub(super) struct Life<'a> {
    config: Config,
    lie: Option<Lie>,
    memory: &'a Mapping,
    disk: SimulatedDisk,
    queues: Vec<QueueUnderTest>,
    oracle: Oracle,
    pub(super) sequence: u64,
    durable: bool,
    era: u64,
    /// Nanoseconds since the start.
    now: u64,
}

impl<'a> Life<'a> {
    pub(super) fn new(
        lie: Option<Lie>,
        memory: &'a Mapping,
        config: Config,
        image: &[u8],
        seed: u64,
    ) -> Self {
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
        let (bytes, path) = (image.len() as u64, config.path);
        let shape = CustomDisk { bytes, cache, alignment, block_device, path };
        let open = || Arc::new(shape.open(None).expect("a simulated disk"));
        let shared = open();
        let apart = match lie {
            Some(Lie::LocksPerQueue) => true,
            // Through the page cache nothing is locked.
            Some(Lie::FailedFlushPerQueue) => config.cache != CacheMode::None,
            _ => false,
        };
        let queues = (0..config.queues).map(|number| {
            let of_queue = if apart { open() } else { Arc::clone(&shared) };
            QueueUnderTest::new(&disk, of_queue, number)
        });
        let mut life = Self {
            config,
            lie,
            memory,
            queues: queues.collect(),
            disk,
            oracle: Oracle::new(DISK, image.to_vec()),
            sequence: 0,
            durable: false,
            era: 0,
            now: 0,
        };
        life.pass(0);
        life.set_durable(config.cache == CacheMode::Writethrough);
        life
    }

    fn set_durable(&mut self, durable: bool) {
        self.durable = durable;
        self.era += 1;
        let last = self.queues.len() - 1;
        for (number, each) in self.queues.iter_mut().enumerate() {
            let forgotten = self.lie == Some(Lie::OneQueueNotDurable) && number == last;
            each.queue.set_durable_writes(durable && !forgotten);
        }
    }

    /// Time passes: it does so here, not on the wall, so that a seed is a history.
    fn pass(&mut self, ns: u64) {
        self.now += ns;
        for each in &self.queues {
            each.queue.disk().set_now(self.now);
        }
    }

    /// What the guests do until the power is cut, and what is on the disk then.
    pub(super) fn live(mut self, rng: &mut Rng, sum: &mut Counts) -> Result<Vec<u8>, Wrong> {
        let (mut asked, mut steps) = (0u64, 0u64);
        while asked < self.config.requests {
            steps += 1;
            if steps > STEPS_MAX as u64 + 100 * self.config.requests {
                return Err(self.hang());
            }
            let at = pick(rng, self.queues.len());
            if self.config.path != SchedulerMode::Bio {
                self.pass(rng.below(self.config.step_ns));
            }
            match rng.below(10) {
                0..4 => asked += u64::from(self.ask(rng, at)),
                4..6 => self.turn(at, sum)?,
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
            1 => self.rest(sum)?,
            _ => {
                self.rest(sum)?;
                let at = pick(rng, self.queues.len());
                self.ask_flush(at);
                self.rest(sum)?;
            }
        }
        sum.cuts += 1;
        sum.cuts_in_flight += u64::from(self.queues.iter().any(|each| each.queue.in_flight() > 0));
        let image = self.disk.cut();
        sum.sectors += (image.len() / SECTOR) as u64;
        for each in &self.queues {
            sum.bounced += each.queue.stats().bounced;
            sum.continued += each.queue.stats().continued;
            sum.merged += each.queue.stats().path.merged;
        }
        sum.both_ways += u64::from(self.went_both_ways());
        if let Some(complaint) = self.disk.complaint() {
            return Err(Wrong(format!("the disk was asked for {complaint}")));
        }
        if self.config.cache != CacheMode::Unsafe {
            self.oracle.found(&image)?;
        }
        Ok(image)
    }

    fn went_both_ways(&self) -> bool {
        let sum = |count: fn(&DiskStats) -> u64| -> u64 {
            self.queues.iter().map(|each| count(&each.queue.stats())).sum()
        };
        let plugged = sum(|stats| stats.path.plugged);
        let auto = self.config.path == SchedulerMode::Auto;
        auto && plugged > 0 && plugged < sum(|stats| stats.reads + stats.writes)
    }

    /// Lets everything come to its end.
    fn rest(&mut self, sum: &mut Counts) -> Result<(), Wrong> {
        for _ in 0..STEPS_MAX {
            if self.queues.iter().all(|each| each.queue.in_flight() == 0) {
                return Ok(());
            }
            while self.disk.step() {}
            // What is held for company goes at last.
            self.pass(1_000_000);
            for at in 0..self.queues.len() {
                self.turn(at, sum)?;
            }
        }
        Err(self.hang())
    }

    fn hang(&self) -> Wrong {
        let left: Vec<usize> = self.queues.iter().map(|each| each.queue.in_flight()).collect();
        Wrong(format!("requests hang: {left:?} of each queue"))
    }

    /// One round of what a worker does.
    fn turn(&mut self, at: usize, sum: &mut Counts) -> Result<(), Wrong> {
        for finished in self.queues[at].turn() {
            self.answer(at, &finished, sum)?;
        }
        Ok(())
    }

    fn answer(&mut self, at: usize, end: &Finished<Asked>, sum: &mut Counts) -> Result<(), Wrong> {
        let asked = end.context;
        let done = end.status == Status::Ok;
        *(if done { &mut sum.done } else { &mut sum.failed }) += 1;
        match asked.op {
            Op::Flush => {
                sum.flushes += u64::from(done);
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
                sum.durable += u64::from(durable && done);
                self.oracle.changed(asked.ticket, done, durable);
            }
        }
        if asked.len > 0 {
            // The guest uses its memory for something else at once.
            self.bytes(asked.memory, asked.len).fill(0xee);
            self.queues[at].free.push(asked.memory / ROOM * ROOM);
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
        let (first, sectors) = self.place(rng, at);
        let moves = op.moves_data();
        let Some(tag) = self.queues[at].queue.acquire() else { return false };
        let room = if moves { self.queues[at].free.pop() } else { Some(0) };
        let Some(room) = room else {
            self.queues[at].queue.abandon(tag);
            return false;
        };
        let len = if moves { usize::try_from(sectors).expect("few") * SECTOR } else { 0 };
        // What goes by bounce pages is not merged.
        let plain = self.config.path != SchedulerMode::Bio && rng.below(4) > 0;
        let shift = rng.pick(&[0, 0, 512, 1024, 1, 4, 700]);
        let memory = if plain { room } else { room + shift };
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
        let request = self.queues[at].queue.request_mut(tag);
        (request.op, request.unmap) = (op, rng.below(2) == 0);
        request.range = ByteRange::new(first * 512, sectors * 512).expect("a small disk");
        request.segments.clear();
        // One piece, or two that meet anywhere.
        let cut = if plain { 0 } else { pick(rng, 2 * len + 1) };
        let parts =
            if cut > 0 && cut < len { vec![(0, cut), (cut, len - cut)] } else { vec![(0, len)] };
        for (skip, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            assert!(request.segments.push(Segment { base: base.wrapping_add(skip), len }));
        }
        let durable = self.durable && self.config.cache != CacheMode::Unsafe;
        let asked = Asked { op, ticket, memory, len, era: self.era, durable };
        self.queues[at].start(tag, asked);
        true
    }

    fn ask_flush(&mut self, at: usize) -> bool {
        let Some(tag) = self.queues[at].queue.acquire() else { return false };
        let request = self.queues[at].queue.request_mut(tag);
        (request.op, request.range) = (Op::Flush, ByteRange::default());
        request.segments.clear();
        let ticket = self.oracle.ask(0, 0);
        let asked =
            Asked { op: Op::Flush, ticket, memory: 0, len: 0, era: self.era, durable: false };
        self.queues[at].start(tag, asked);
        true
    }

    /// Where a request goes, in sectors: mostly a few, sometimes whole blocks.
    fn place(&mut self, rng: &mut Rng, at: usize) -> (u64, u64) {
        let (first, sectors) = self.place_of(rng, at);
        self.queues[at].head = first + sectors;
        (first, sectors)
    }

    fn place_of(&self, rng: &mut Rng, at: usize) -> (u64, u64) {
        let all = self.config.blocks * 8;
        let head = self.queues[at].head;
        if self.config.path != SchedulerMode::Bio && head < all && rng.below(3) > 0 {
            // A stream: what it asks for can be merged.
            let block = head % 8 == 0 && all - head >= 8 && rng.below(2) == 0;
            return (head, if block { 8 } else { 1 + rng.below((all - head).min(SECTORS_MAX)) });
        }
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

impl QueueUnderTest {
    fn new(disk: &SimulatedDisk, of_queue: Arc<Disk>, number: usize) -> Self {
        let engine = PowerCutEngine::by_hand(disk);
        let base = (number as u64) << 16;
        let queue = DiskQueue::new(of_queue, engine.limits(), FileId(0), base, DEPTH);
        let first = number * usize::from(DEPTH);
        let free = (first..first + usize::from(DEPTH)).map(|room| room * ROOM).collect();
        Self { engine, queue: queue.expect("memory"), free, head: 0 }
    }

    fn start(&mut self, tag: u16, asked: Asked) {
        // SAFETY: the memory belongs to this request until it is answered, and to the campaign,
        // which outlives the queue.
        unsafe { self.queue.start(&mut self.engine, tag, asked) };
    }

    fn turn(&mut self) -> Vec<Finished<Asked>> {
        if self.queue.has_deferred() {
            self.queue.retry(&mut self.engine, usize::MAX);
        }
        // Rounds with nothing to do are rounds as well: once in many the path is looked at.
        for _ in 0..TURNS {
            self.queue.unplug(&mut self.engine);
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
