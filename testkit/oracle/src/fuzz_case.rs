//! From arbitrary bytes to a driver that mostly keeps the rules.
//!
//! The bytes are choices, read in order; when they run out every choice is 0, which is a plain one.
//! So a fuzzer that changes a byte changes a detail, and shorter inputs are simpler cases.

use super::device::Queue;
use super::memory::{Memory, REGIONS, RINGS};

/// The choices that are left.
pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.0 {
            [first, rest @ ..] => {
                self.0 = rest;
                *first
            }
            [] => 0,
        }
    }

    pub(crate) fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    /// A number below `bound`, which is at most 65536.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let choice = if bound <= 256 { usize::from(self.byte()) } else { usize::from(self.half()) };
        choice % bound.max(1)
    }

    /// True in about `chance` of 256 cases; never when the choices have run out.
    pub(crate) fn rarely(&mut self, chance: u8) -> bool {
        self.byte() > 255 - chance
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// An address of `len` bytes of guest memory, mostly.
    pub(crate) fn spot(&mut self, len: usize) -> u64 {
        // Headers and the like keep to one region, or data would soon have overwritten them all.
        let region = if len <= 32 { [4, 4, 4, 4, 4, 4, 2, 3] } else { [1, 2, 3, 1, 2, 3, 1, 2] };
        let region = if self.rarely(6) { self.below(REGIONS.len()) } else { region[self.below(8)] };
        let (start, room) = REGIONS[region];
        if self.rarely(1) {
            return self.word();
        }
        let offset = self.below(room);
        // Over the end of the region now and then: into its neighbour, or into nothing.
        let fits = offset + len <= room || self.rarely(16);
        start + if fits { offset } else { room.saturating_sub(len) } as u64
    }
}

/// A case: a queue with its memory, and the heads that a driver will make available.
pub(crate) struct Case<'a> {
    pub memory: Memory,
    pub queue: Queue,
    /// The first available entry.
    pub first: u16,
    /// Room for data segments.
    pub segments: usize,
    pub heads: Vec<u16>,
    /// What is left decides about the order of things.
    pub choices: Choices<'a>,
    /// Guest address of every descriptor written, to do damage to.
    descs: Vec<u64>,
    free: Vec<u16>,
}

impl<'a> Case<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        let mut choices = Choices::new(data);
        let size = 1 << ((u16::from(choices.byte()) + 4) % 9);
        let desc = RINGS;
        let avail = desc + 16 * u64::from(size);
        let used = (avail + 6 + 2 * u64::from(size)).next_multiple_of(4);
        let queue = Queue {
            size,
            desc,
            avail,
            used,
            event_idx: choices.byte() & 1 != 0,
            indirect: !choices.rarely(32),
        };
        let mut case = Self {
            memory: Memory::new(),
            queue,
            first: choices.half().wrapping_sub(8),
            segments: [1026, 1026, 64, 64, 1026, 64, 8, 4][choices.below(8)],
            heads: Vec::new(),
            choices,
            descs: Vec::new(),
            free: (0..size).rev().collect(),
        };
        let first = u64::from(case.first);
        case.memory.write_number(avail + 2, first, 2);
        let used_idx = if case.choices.rarely(64) { case.choices.half().into() } else { first };
        case.memory.write_number(used + 2, used_idx, 2);
        for _ in 0..case.choices.below(10) {
            case.request();
        }
        case.damage();
        case
    }

    /// Lays one request out.
    fn request(&mut self) {
        const KINDS: [u32; 16] = [0, 1, 0, 1, 4, 8, 11, 13, 0, 1, 0, 1, 11, 13, 1, 2];
        let c = &mut self.choices;
        let kind = KINDS[c.below(16)];
        let sector = match c.below(16) {
            0..15 => u64::from(c.half()),
            _ if c.byte() & 1 == 0 => u64::MAX / 512 - u64::from(c.byte() % 16),
            _ => c.word(),
        };
        let mut body = Vec::new();
        body.extend_from_slice(&kind.to_le_bytes());
        body.extend_from_slice(&[0; 4]);
        body.extend_from_slice(&sector.to_le_bytes());
        let blocks = 512 * (1 + c.below(8));
        let (mut reads, mut writes) = match kind {
            1 => (16 + blocks, 1),
            0 => (16, blocks + 1),
            8 => (16, 21),
            11 | 13 => {
                let turn = if c.rarely(16) { c.byte().into() } else { 0 };
                let sectors =
                    if c.rarely(16) { 1 << 22 | u32::from(c.byte()) } else { c.half().into() };
                body.extend_from_slice(&sector.rotate_left(turn).to_le_bytes());
                body.extend_from_slice(&sectors.to_le_bytes());
                let flags =
                    if c.rarely(16) { c.byte() } else { u8::from(kind == 13 && c.rarely(128)) };
                body.extend_from_slice(&u32::from(flags).to_le_bytes());
                (32, 1)
            }
            _ => (16, 1),
        };
        if c.rarely(12) {
            reads = (reads + c.below(33)).saturating_sub(16);
        }
        if c.rarely(12) {
            writes = (writes + c.below(33)).saturating_sub(16);
        }
        let mut buffers = Vec::new();
        for (bytes, writable) in [(reads, false), (writes, true)] {
            let mut skip = 0;
            for len in cuts(c, bytes) {
                let addr = c.spot(len);
                if !writable && skip < body.len() {
                    self.memory.write(addr, &body[skip..body.len().min(skip + len)]);
                }
                buffers.push((addr, len, writable));
                skip += len;
            }
        }
        self.link(&buffers);
    }

    /// Writes the descriptors of a chain: in the ring, in a table of their own, or some here and
    /// some there.
    fn link(&mut self, buffers: &[(u64, usize, bool)]) {
        let room = self.free.len();
        let direct = match self.choices.below(4) {
            0 | 1 => buffers.len(),
            2 => 0,
            _ => self.choices.below(buffers.len() + 1),
        };
        let direct = if direct > room { 0 } else { direct };
        let indirect = buffers.len() - direct;
        if direct + usize::from(indirect > 0) > room || buffers.is_empty() {
            return;
        }
        // The ring's descriptors in an order of their own.
        let turn = self.choices.below(self.free.len());
        self.free.rotate_left(turn);
        let mut places: Vec<(u64, u16)> = Vec::new();
        for _ in 0..direct + usize::from(indirect > 0) {
            let index = self.free.pop().expect("counted above");
            places.push((self.queue.desc + 16 * u64::from(index), index));
        }
        self.heads.push(places[0].1);
        if indirect > 0 {
            let slots = indirect + self.choices.below(4);
            // Drivers align tables, but need not.
            let odd = self.choices.rarely(48);
            let table = self.choices.spot(16 * slots);
            let table = if odd { table } else { table & !15 };
            let (at, _) = places[direct];
            let write = self.choices.rarely(16);
            self.put(at, table, 16 * slots, 4 | u16::from(write) << 1, self.choices_next());
            // Entry 0 is the head; the others lie as they like.
            let reversed = self.choices.byte() & 1 != 0;
            let entry = |i: usize| if reversed && i > 0 { slots - i } else { i };
            let number = |i: usize| u16::try_from(entry(i)).unwrap_or(u16::MAX);
            places.truncate(direct);
            places.extend(
                (0..indirect).map(|i| (table.wrapping_add(16 * entry(i) as u64), number(i))),
            );
            // The last direct descriptor leads to the one that names the table.
            if direct > 0 {
                places[direct].1 = index_of(at, self.queue.desc);
            }
        }
        for (i, &(addr, len, writable)) in buffers.iter().enumerate() {
            let follows = i + 1 < buffers.len();
            let next = if follows { places[i + 1].1 } else { self.choices_next() };
            self.put(places[i].0, addr, len, u16::from(follows) | u16::from(writable) << 1, next);
        }
    }

    /// `next` of a descriptor without NEXT: no one may look at it.
    fn choices_next(&self) -> u16 {
        self.queue.size.wrapping_sub(self.choices.0.first().copied().unwrap_or(0).into())
    }

    fn put(&mut self, at: u64, addr: u64, len: usize, flags: u16, next: u16) {
        self.memory.write_number(at, addr, 8);
        self.memory.write_number(at.wrapping_add(8), len as u64, 4);
        self.memory.write_number(at.wrapping_add(12), flags.into(), 2);
        self.memory.write_number(at.wrapping_add(14), next.into(), 2);
        self.descs.push(at);
    }

    /// A few fields set to what they should not be, in some of the cases.
    fn damage(&mut self) {
        for _ in 0..self.choices.below(8).saturating_sub(4) {
            let c = &mut self.choices;
            let at = match self.descs.len() {
                0 => RINGS,
                n => self.descs[c.below(n)],
            };
            let wrong = match c.below(8) {
                0 => (at, c.edge(), 8),
                1 => (at.wrapping_add(8), c.length(), 4),
                2 => (at.wrapping_add(12), u64::from(c.byte() % 8), 2),
                3 => (at.wrapping_add(14), c.below(2 * usize::from(self.queue.size)) as u64, 2),
                4 => (at.wrapping_add(8), c.word(), 8),
                5 => (c.spot(8), c.word(), 8),
                6 => (RINGS + c.below(8192) as u64, u64::from(c.half()), 2),
                _ if self.heads.is_empty() => continue,
                // A head that is not one, or one that comes twice.
                _ => {
                    let (i, head) =
                        (c.below(self.heads.len()), c.below(2 * usize::from(self.queue.size)));
                    self.heads[i] = u16::try_from(head).unwrap();
                    continue;
                }
            };
            self.memory.write_number(wrong.0, wrong.1, wrong.2);
        }
    }
}

impl Choices<'_> {
    /// An address near the edge of a region.
    pub(crate) fn edge(&mut self) -> u64 {
        let (start, len) = REGIONS[self.below(REGIONS.len())];
        let edge = if self.byte() & 1 == 0 { start } else { start.wrapping_add(len as u64) };
        edge.wrapping_add(u64::from(self.byte() % 40)).wrapping_sub(20)
    }

    pub(crate) fn length(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => 0xffff_ffff - u64::from(self.byte() % 4),
            2 => 0x8000_0000,
            3 => 16 * u64::from(self.half() % 1100),
            _ => u64::from(self.half()),
        }
    }
}

/// Cuts `bytes` in pieces that are not empty: few anywhere, or many of one length.
fn cuts(c: &mut Choices<'_>, bytes: usize) -> Vec<usize> {
    if c.rarely(8) {
        let grain = 1 + c.below(16);
        return (0..bytes).step_by(grain).map(|at| grain.min(bytes - at)).collect();
    }
    let mut at: Vec<usize> =
        (0..c.below(8).saturating_sub(3)).map(|_| c.below(bytes + 1)).collect();
    // The edges that matter most: behind the header, before the status.
    at.extend((c.byte() & 3 != 3).then_some(if bytes > 16 { 16 } else { 0 }));
    at.extend((c.byte() & 3 != 3).then_some(bytes.saturating_sub(1)));
    at.extend([0, bytes]);
    at.sort_unstable();
    at.dedup();
    at.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn index_of(at: u64, table: u64) -> u16 {
    u16::try_from((at - table) / 16).unwrap_or(u16::MAX)
}
