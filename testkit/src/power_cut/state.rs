//! What a simulated disk holds, and what it does next.

use super::setup::SimulatedSetup;
use super::{Lie, SECTOR, SECTORS_MAX};
use crate::Rng;
use ringway_aio::{Done, Io, IoOp};
use ringway_core::Segment;

/// The sectors of the blocks that [`Lie::StaleNeighbours`] rewrites.
const BLOCK_SECTORS: usize = 8;

/// What a sector holds, or may hold.
#[derive(Debug)]
struct Version {
    bytes: Box<[u8; SECTOR]>,
    /// Counts up with each version of any sector.
    serial: u64,
    op: u64,
    engine: usize,
    erased: bool,
    /// Its operation has completed, so the next flush covers it.
    completed: bool,
}

/// The versions of a sector, oldest first: the first is durable, the last is what reads see.
type Sector = Vec<Version>;

/// An operation that was submitted and has not completed.
#[derive(Debug)]
pub(super) struct Flying {
    id: u64,
    pub(super) engine: usize,
    tag: u64,
    op: IoOp,
    offset: usize,
    segments: Vec<Segment>,
    /// Sectors still to be moved, in no order.
    left: Vec<usize>,
    /// What it will be answered with.
    result: i32,
    /// Of a flush: the newest version it covers, of each sector.
    covers: Vec<u64>,
    /// Contents that a lie rewrites.
    stale: Vec<(usize, Box<[u8; SECTOR]>)>,
}

#[derive(Debug)]
pub(super) struct State {
    setup: SimulatedSetup,
    rng: Rng,
    sectors: Vec<Sector>,
    pub(super) flying: Vec<Flying>,
    /// Writes that are over, whose memory was not read: [`Lie::MemoryReadLate`].
    pub(super) zombies: Vec<Flying>,
    /// Completions to be reaped, by engine.
    pub(super) done: Vec<Vec<Done>>,
    serial: u64,
    ops: u64,
    dead: bool,
    pub(super) complaint: Option<String>,
}

impl State {
    pub(super) fn new(setup: SimulatedSetup, image: &[u8]) -> Self {
        assert_eq!(image.len(), setup.bytes);
        let sectors = image.chunks_exact(SECTOR);
        assert!(sectors.remainder().is_empty());
        let version = |bytes: &[u8]| Version {
            bytes: Box::new(bytes.try_into().unwrap()),
            serial: 0,
            op: 0,
            engine: 0,
            erased: false,
            completed: true,
        };
        Self {
            setup,
            rng: Rng::new(setup.seed),
            sectors: sectors.map(|bytes| vec![version(bytes)]).collect(),
            flying: Vec::new(),
            zombies: Vec::new(),
            done: Vec::new(),
            serial: 0,
            ops: 0,
            dead: false,
            complaint: None,
        }
    }

    fn lies(&self, lie: Lie) -> bool {
        self.setup.lie == Some(lie)
    }

    pub(super) fn start(&mut self, engine: usize, io: &Io<'_>) {
        self.ops += 1;
        let mut flying = Flying {
            id: self.ops,
            engine,
            tag: io.tag,
            op: io.op,
            offset: usize::try_from(io.offset).unwrap_or(usize::MAX),
            segments: io.memory.segments().to_vec(),
            left: Vec::new(),
            result: 0,
            covers: Vec::new(),
            stale: Vec::new(),
        };
        let len = usize::try_from(io.len).unwrap_or(usize::MAX);
        if let Err(errno) = self.admit(&mut flying, len) {
            flying.result = -errno;
        }
        if io.op == IoOp::Sync {
            flying.covers = self.covered(engine);
        }
        if self.lies(Lie::StaleNeighbours) && io.op != IoOp::Read {
            flying.stale = self.neighbours(&flying.left);
        }
        self.flying.push(flying);
    }

    /// Judges an operation, and chooses its fate.
    fn admit(&mut self, flying: &mut Flying, len: usize) -> Result<(), i32> {
        let faults = self.setup.faults;
        if self.dead {
            return Err(libc::EIO);
        }
        let mut hit = |rate: u16| self.rng.below(1000) < rate.into();
        if flying.op == IoOp::Sync {
            return if hit(faults.sync_error) { Err(libc::EIO) } else { Ok(()) };
        }
        let end = flying.offset.saturating_add(len);
        let memory: usize = flying.segments.iter().map(|segment| segment.len).sum();
        let SimulatedSetup { granule, erase_granule, .. } = self.setup;
        let granule = if flying.op.moves_data() { granule } else { erase_granule };
        let wrong = (flying.offset | len) % granule != 0
            || end > self.setup.bytes
            || len == 0
            || (flying.op.moves_data() && memory != len);
        if wrong {
            self.complaint = Some(format!("{:?} of {len} bytes at {}", flying.op, flying.offset));
            return Err(libc::EINVAL);
        }
        if !flying.op.moves_data() && faults.no_erase {
            return Err(libc::EOPNOTSUPP);
        }
        if hit(faults.again) {
            return Err(if hit(500) { libc::EINTR } else { libc::EAGAIN });
        }
        let (short, fails) = (flying.op.moves_data() && hit(faults.short), hit(faults.error));
        let granules = (len / granule) as u64;
        let part = self.rng.below(granules + 1);
        let moved = match usize::try_from(part) {
            // A transfer of nothing means that the file ends here.
            Ok(part) if fails || (short && part > 0) => part * granule,
            _ => len,
        };
        flying.left = (flying.offset / SECTOR..(flying.offset + moved) / SECTOR).collect();
        if flying.op.moves_data() {
            flying.result = i32::try_from(moved).expect("short transfers");
        }
        if fails { Err(libc::EIO) } else { Ok(()) }
    }

    /// Of each sector, the newest version that a flush beginning now covers.
    fn covered(&mut self, engine: usize) -> Vec<u64> {
        let (own, whole) = (self.lies(Lie::FlushOfOneQueue), self.lies(Lie::FlushForgetsZeroes));
        let counts = |version: &&Version| {
            version.completed && !(own && version.engine != engine) && !(whole && version.erased)
        };
        let newest =
            |sector: &Sector| sector.iter().rev().find(counts).map_or(0, |found| found.serial);
        self.sectors.iter().map(newest).collect()
    }

    /// The other sectors of the blocks that `sectors` lie in, as they are now.
    fn neighbours(&self, sectors: &[usize]) -> Vec<(usize, Box<[u8; SECTOR]>)> {
        let (Some(first), Some(last)) = (sectors.iter().min(), sectors.iter().max()) else {
            return Vec::new();
        };
        let start = first / BLOCK_SECTORS * BLOCK_SECTORS;
        let end = (last + 1).next_multiple_of(BLOCK_SECTORS);
        let others = (start..end).filter(|sector| !sectors.contains(sector));
        others.map(|sector| (sector, self.newest(sector).bytes.clone())).collect()
    }

    fn newest(&self, sector: usize) -> &Version {
        self.sectors[sector].last().expect("a sector has a version")
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.rng.below(len as u64)).expect("below the length")
    }

    /// Some sectors of some operation, or its end.
    pub(super) fn step(&mut self) -> bool {
        if !self.zombies.is_empty() && self.rng.below(4) == 0 {
            let mut zombie = self.zombies.swap_remove(0);
            self.move_sectors(&mut zombie, usize::MAX);
        }
        if self.flying.is_empty() {
            return false;
        }
        let at = self.index(self.flying.len());
        let mut flying = self.flying.swap_remove(at);
        if flying.left.len() > 1 && self.rng.below(2) == 0 {
            let some = 1 + self.index(flying.left.len() - 1);
            self.move_sectors(&mut flying, some);
            self.flying.push(flying);
            return true;
        }
        let writes = matches!(flying.op, IoOp::Write | IoOp::WriteDurable);
        if self.lies(Lie::MemoryReadLate) && writes {
            self.done[flying.engine].push(Done { tag: flying.tag, result: flying.result });
            self.zombies.push(flying);
            return true;
        }
        if self.lies(Lie::MergedForgetsItsEnd) && writes && is_merged(&flying) {
            let last = flying.left.iter().copied().max();
            flying.left.retain(|&sector| Some(sector) != last);
        }
        self.move_sectors(&mut flying, usize::MAX);
        self.complete(flying);
        true
    }

    /// Moves up to `most` of an operation's sectors, in random order.
    fn move_sectors(&mut self, flying: &mut Flying, most: usize) {
        for _ in 0..most.min(flying.left.len()) {
            let at = self.index(flying.left.len());
            let sector = flying.left.swap_remove(at);
            if flying.op == IoOp::Read {
                let bytes = *self.newest(sector).bytes;
                // SAFETY: the operation has not completed: its memory is ours to write.
                unsafe { copy(flying, sector, |memory, at| *memory = bytes[at]) };
                continue;
            }
            let bytes = self.content(flying, sector);
            self.put(sector, bytes, flying);
        }
    }

    /// What a write or an erasure puts into a sector.
    fn content(&mut self, flying: &Flying, sector: usize) -> Box<[u8; SECTOR]> {
        let mut bytes = Box::new([0; SECTOR]);
        if flying.op.moves_data() {
            // SAFETY: the operation has not completed (or a test's lie has its memory outlive it):
            // its memory is ours to read.
            unsafe { copy(flying, sector, |memory, at| bytes[at] = *memory) };
        } else if flying.op == IoOp::Discard {
            match self.rng.below(3) {
                0 => bytes.fill(0xdd),
                1 => bytes.clone_from(&self.newest(sector).bytes),
                _ => {}
            }
        }
        bytes
    }

    fn put(&mut self, sector: usize, bytes: Box<[u8; SECTOR]>, flying: &Flying) {
        self.serial += 1;
        self.sectors[sector].push(Version {
            bytes,
            serial: self.serial,
            op: flying.id,
            engine: flying.engine,
            erased: !flying.op.moves_data(),
            completed: false,
        });
    }

    fn complete(&mut self, mut flying: Flying) {
        for (sector, bytes) in std::mem::take(&mut flying.stale) {
            self.put(sector, bytes, &flying);
        }
        let failed = flying.result < 0;
        if flying.op == IoOp::Sync {
            self.complete_sync(&flying, failed);
        } else if flying.op != IoOp::Read && !failed {
            let plain = self.lies(Lie::DurableIsPlain)
                || (self.lies(Lie::MergedIsPlain) && is_merged(&flying));
            let durable = flying.op == IoOp::WriteDurable && !plain;
            for sector in &mut self.sectors {
                let mut mine = sector.iter_mut().filter(|version| version.op == flying.id);
                let Some(version) = mine.next() else { continue };
                version.completed = true;
                let serial = version.serial;
                if durable {
                    make_durable(sector, serial);
                }
            }
        }
        self.done[flying.engine].push(Done { tag: flying.tag, result: flying.result });
    }

    fn complete_sync(&mut self, flying: &Flying, failed: bool) {
        if self.lies(Lie::FlushDoesNothing) {
            return;
        }
        let news = |(_, (sector, covers)): &(usize, (&Sector, &u64))| sector[0].serial < **covers;
        let pairs = self.sectors.iter().zip(&flying.covers).enumerate();
        let mut owed: Vec<usize> = pairs.filter(news).map(|(at, _)| at).collect();
        if self.lies(Lie::FlushForgetsASector) && !owed.is_empty() {
            let at = self.index(owed.len());
            owed.swap_remove(at);
        }
        for at in owed {
            let (sector, covers) = (&mut self.sectors[at], flying.covers[at]);
            if !failed {
                make_durable(sector, covers);
            } else if self.setup.failed_flush_loses {
                let lost = sector.iter_mut().skip(1).filter(|version| version.serial <= covers);
                lost.for_each(|version| version.completed = false);
            }
        }
    }

    /// Any subset of what is not durable, sector by sector, goes with the rest.
    pub(super) fn cut(&mut self) -> Vec<u8> {
        self.dead = true;
        for mut zombie in std::mem::take(&mut self.zombies) {
            self.move_sectors(&mut zombie, usize::MAX);
        }
        // What is under way may have arrived, too, and in any order.
        for mut flying in std::mem::take(&mut self.flying) {
            if flying.op != IoOp::Read {
                self.move_sectors(&mut flying, usize::MAX);
            }
            self.done[flying.engine].push(Done { tag: flying.tag, result: -libc::EIO });
        }
        // All of it, nothing, whole operations, or each sector by itself.
        let how = self.rng.below(4);
        let salt = self.rng.next_u64();
        let mut image = Vec::with_capacity(self.setup.bytes);
        let mut torn = None;
        for at in 0..self.sectors.len() {
            let mut survives = |version: &&Version| match how {
                0 => true,
                1 => false,
                2 => Rng::new(salt ^ version.op).below(2) == 0,
                _ => self.rng.below(2) == 0,
            };
            let sector = &self.sectors[at];
            let mut volatile = sector[1..].iter().rev();
            let found = volatile.find(&mut survives);
            if found.is_some() && at + 1 < self.sectors.len() {
                torn = Some(at + 1);
            }
            image.extend_from_slice(&*found.unwrap_or(&sector[0]).bytes);
        }
        if let Some(at) = torn {
            if self.lies(Lie::TornBeyondTheEnd) {
                image[at * SECTOR] ^= 1;
            }
        }
        image
    }
}

/// True if no request of a guest is as long.
fn is_merged(flying: &Flying) -> bool {
    let bytes: usize = flying.segments.iter().map(|segment| segment.len).sum();
    bytes as u64 > SECTORS_MAX * SECTOR as u64
}

/// Version `serial` is durable, and so nothing older will be seen again.
fn make_durable(sector: &mut Sector, serial: u64) {
    if let Some(at) = sector.iter().position(|version| version.serial == serial) {
        sector.drain(..at);
    }
}

/// Calls `byte` with each byte of memory that belongs to `sector`, and its place in the sector.
///
/// # Safety
/// The memory of the operation is valid, and `byte` does with it what the operation may do.
unsafe fn copy(flying: &Flying, sector: usize, mut byte: impl FnMut(&mut u8, usize)) {
    let skip = sector * SECTOR - flying.offset;
    let (mut at, mut from) = (0, skip);
    for segment in &flying.segments {
        while from < segment.len && at < SECTOR {
            // SAFETY: `from` lies in the segment, which is valid by contract.
            byte(unsafe { &mut *segment.base.add(from) }, at);
            (at, from) = (at + 1, from + 1);
        }
        if at == SECTOR {
            return;
        }
        from -= segment.len.min(from);
    }
}
