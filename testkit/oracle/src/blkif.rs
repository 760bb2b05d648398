//! The back side of a block ring against an oracle written from `ring.h` and `blkif.h`, on a
//! front-end made from arbitrary bytes.
//!
//! The oracle has an image of the ring, to which it applies what the front-end writes and what a
//! back-end has to. Both must agree on each request, on each notification, and at the end on every
//! byte of the ring.

use super::fuzz_case::Choices;
use ringway_core::Status;
use ringway_core::mem::Mapping;
use ringway_ring::blkif::{
    Abi, Armed, Asked, Back, Command, NotGranted, Offered, Refused, RingAt, Token,
};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How often each kind of thing happened: a generator that reaches nothing proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub requests: u64,
    pub indirect: u64,
    pub discards: u64,
    pub failed: u64,
    pub unsupported: u64,
    pub broken: u64,
    pub calls: u64,
    pub silences: u64,
    pub laps: u64,
    pub longest: usize,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.requests += more.requests;
        self.indirect += more.indirect;
        self.discards += more.discards;
        self.failed += more.failed;
        self.unsupported += more.unsupported;
        self.broken += more.broken;
        self.calls += more.calls;
        self.silences += more.silences;
        self.laps += more.laps;
        self.longest = self.longest.max(more.longest);
    }
}

/// Runs the case that `data` describes. Panics where the code and the oracle disagree.
pub fn check(data: &[u8]) -> Counters {
    let mut bench = Bench::new(Choices::new(data));
    for _ in 0..400 {
        match bench.choices.below(8) {
            0..=2 => bench.offer(),
            3 => bench.pop(),
            4 => bench.answer(),
            5 => bench.publish(),
            6 => bench.arm(),
            _ => bench.meddle(),
        }
        if bench.broken || bench.choices.is_empty() {
            break;
        }
    }
    // The rest in the usual order.
    while !bench.broken && bench.oracle.wanting() != Ok(0) {
        bench.pop();
    }
    while !bench.pending.is_empty() {
        bench.answer();
    }
    bench.publish();
    bench.arm();
    bench.compare();
    bench.counters
}

/// Offsets of `blkif.h`, in bytes.
struct Offsets {
    slot: usize,
    response: usize,
    id: usize,
    sector: usize,
    segments: usize,
    nr_sectors: usize,
    pages: usize,
}

fn offsets(abi: Abi) -> Offsets {
    let [slot, response, id, sector, segments, nr_sectors, pages] = match abi {
        Abi::X86_64 => [112, 16, 8, 16, 24, 24, 28],
        Abi::X86_32 => [108, 12, 4, 12, 20, 20, 24],
    };
    Offsets { slot, response, id, sector, segments, nr_sectors, pages }
}

/// What a request says, according to the oracle: `Err` is `BLKIF_RSP_*`.
type Meaning = Result<Wanted, i16>;

#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    command: Command,
    offset: u64,
    len: u64,
    /// Grant, first and last sector.
    segments: Vec<(u32, u8, u8)>,
}

/// A back-end in the words of the headers.
struct Oracle {
    bytes: Vec<u8>,
    at: Offsets,
    size: u32,
    offered: Offered,
    pages: Vec<Option<Vec<u8>>>,
    req_cons: u32,
    rsp_prod_pvt: u32,
}

impl Oracle {
    fn get(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn slot_at(&self, counter: u32) -> usize {
        64 + (counter % self.size) as usize * self.at.slot
    }

    /// Requests to take; `Err` if there cannot be so many. What the front side cannot have seen is
    /// the difference between `req_cons` and `rsp_prod` in the ring.
    fn wanting(&self) -> Result<u32, ()> {
        let new = self.get(0).wrapping_sub(self.req_cons);
        let owed = self.req_cons.wrapping_sub(self.get(8));
        if u64::from(new) + u64::from(owed) > u64::from(self.size) { Err(()) } else { Ok(new) }
    }

    fn segments(bytes: &[u8], count: usize) -> Vec<(u32, u8, u8)> {
        let segment =
            |seg: &[u8]| (u32::from_le_bytes(seg[..4].try_into().unwrap()), seg[4], seg[5]);
        bytes.chunks_exact(8).take(count).map(segment).collect()
    }

    /// The id and the operation that the answer must have, and what the request means.
    fn take(&mut self) -> (u64, u8, Meaning) {
        let start = self.slot_at(self.req_cons);
        let slot = self.bytes[start..start + self.at.slot].to_vec();
        self.req_cons = self.req_cons.wrapping_add(1);
        let long = |at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().unwrap());
        let answer = if slot[0] == 6 { slot[1] } else { slot[0] };
        (long(self.at.id), answer, self.meaning(&slot, long(self.at.sector), &long))
    }

    fn meaning(&self, slot: &[u8], sector: u64, long: &dyn Fn(usize) -> u64) -> Meaning {
        const ERROR: i16 = -1;
        const EOPNOTSUPP: i16 = -2;
        let offered = match slot[0] {
            0 | 1 => true,
            2 => self.offered.barrier,
            3 => self.offered.flush,
            5 => self.offered.discard,
            6 => self.offered.indirect_segments > 0,
            _ => false,
        };
        if !offered {
            return Err(EOPNOTSUPP);
        }
        let bounded = |sectors: u64| {
            let end = (u128::from(sector) + u128::from(sectors)) * 512;
            if end <= u128::from(u64::MAX) { Ok((sector * 512, sectors * 512)) } else { Err(ERROR) }
        };
        if slot[0] == 5 {
            let (offset, len) = bounded(long(self.at.nr_sectors))?;
            let command = Command::Discard { secure: slot[1] % 2 == 1 };
            return Ok(Wanted { command, offset, len, segments: Vec::new() });
        }
        let (operation, segments) = if slot[0] == 6 {
            let count = u16::from_le_bytes([slot[2], slot[3]]);
            if slot[1] > 1 || count == 0 || count > self.offered.indirect_segments {
                return Err(ERROR);
            }
            let pages = usize::from(count).div_ceil(512);
            let mut bytes = Vec::new();
            for page in slot[self.at.pages..].chunks_exact(4).take(pages) {
                let grant = u32::from_le_bytes(page.try_into().unwrap());
                let page = self.pages.get(grant as usize).and_then(Option::as_ref);
                bytes.extend(page.ok_or(ERROR)?);
            }
            (slot[1], Self::segments(&bytes, count.into()))
        } else {
            if slot[1] > 11 {
                return Err(ERROR);
            }
            (slot[0], Self::segments(&slot[self.at.segments..], slot[1].into()))
        };
        let sane = |(_, first, last): &(u32, u8, u8)| first <= last && *last < 8;
        if !segments.iter().all(sane) || (operation < 2 && segments.is_empty()) {
            return Err(ERROR);
        }
        let command = match operation {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::WriteBarrier,
            _ => Command::Flush,
        };
        let sectors = segments.iter().map(|(_, first, last)| u64::from(last - first + 1)).sum();
        let (offset, len) = if segments.is_empty() { (0, 0) } else { bounded(sectors)? };
        Ok(Wanted { command, offset, len, segments })
    }

    fn answer(&mut self, id: u64, operation: u8, status: i16) {
        let mut response = vec![0; self.at.response];
        response[..8].copy_from_slice(&id.to_le_bytes());
        response[8] = operation;
        response[10..12].copy_from_slice(&status.to_le_bytes());
        self.put(self.slot_at(self.rsp_prod_pvt), &response);
        self.rsp_prod_pvt = self.rsp_prod_pvt.wrapping_add(1);
    }

    /// `RING_PUSH_RESPONSES_AND_CHECK_NOTIFY`.
    fn publish(&mut self) -> bool {
        let (old, new) = (self.get(8), self.rsp_prod_pvt);
        self.put(8, &new.to_le_bytes());
        new.wrapping_sub(self.get(12)) < new.wrapping_sub(old)
    }
}

struct Bench<'a> {
    choices: Choices<'a>,
    mapping: Mapping,
    back: Back,
    oracle: Oracle,
    /// Where the front-end writes its next request.
    req_prod_pvt: u32,
    pending: Vec<(Token, u64, u8, Option<i16>)>,
    broken: bool,
    counters: Counters,
}

impl<'a> Bench<'a> {
    fn new(mut choices: Choices<'a>) -> Self {
        let abi = [Abi::X86_64, Abi::X86_32][choices.below(2)];
        let order = [0, 1, 0, 2, 3, 4][choices.below(6)];
        let first = [0, u32::MAX - 3, 0x7fff_fffe][choices.below(3)];
        let segments = [256, 32, 4096, 600, 1, 0][choices.below(6)];
        let offered = Offered {
            flush: !choices.rarely(40),
            barrier: !choices.rarely(40),
            discard: !choices.rarely(40),
            indirect_segments: segments,
        };
        let mapping = Mapping::anonymous(4096 << order).unwrap();
        let mut oracle = Oracle {
            bytes: vec![0; 4096 << order],
            at: offsets(abi),
            size: 32 << order,
            offered,
            pages: pages(&mut choices),
            req_cons: first,
            rsp_prod_pvt: first,
        };
        for (at, value) in [(0, first), (4, first.wrapping_add(1)), (8, first)] {
            oracle.put(at, &value.to_le_bytes());
            word(&mapping, at).store(value, Relaxed);
        }
        let at = RingAt { base: mapping.at(0), order, abi };
        // SAFETY: the mapping lives as long as the ring; nobody else uses it.
        let back = unsafe { Back::new(at, offered) }.expect("a proper ring");
        assert_eq!(back.size(), oracle.size);
        Self {
            choices,
            mapping,
            back,
            oracle,
            req_prod_pvt: first,
            pending: Vec::new(),
            broken: false,
            counters: Counters::default(),
        }
    }

    /// The front-end writes to the ring.
    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.oracle.put(at, bytes);
        for (at, bytes) in (at..).step_by(4).zip(bytes.chunks_exact(4)) {
            let value = u32::from_le_bytes(bytes.try_into().unwrap());
            word(&self.mapping, at).store(value, Relaxed);
        }
    }

    /// The front-end adds a request, and mostly shows it.
    fn offer(&mut self) {
        let room = self.oracle.get(8).wrapping_add(self.oracle.size);
        if self.req_prod_pvt == room && !self.choices.rarely(2) {
            return;
        }
        let slot = self.request();
        self.write(self.oracle.slot_at(self.req_prod_pvt), &slot);
        self.req_prod_pvt = self.req_prod_pvt.wrapping_add(1);
        if !self.choices.rarely(64) {
            self.write(0, &self.req_prod_pvt.to_le_bytes());
        }
    }

    /// A slot: a good request, mostly.
    fn request(&mut self) -> Vec<u8> {
        let choices = &mut self.choices;
        let at = &self.oracle.at;
        let mut slot = vec![0; at.slot];
        let kind = [0, 1, 6, 0, 1, 6, 3, 2, 5, 1, 0][choices.below(11)];
        slot[0] = if choices.rarely(6) { choices.byte() } else { kind };
        let id = if choices.rarely(16) { choices.word() } else { choices.below(64) as u64 };
        slot[at.id..at.id + 8].copy_from_slice(&id.to_le_bytes());
        let sector = match choices.byte() {
            0..=239 => u64::from(choices.half()),
            240..=247 => u64::MAX / 512 - choices.below(100) as u64,
            _ => choices.word(),
        };
        slot[at.sector..at.sector + 8].copy_from_slice(&sector.to_le_bytes());
        match slot[0] {
            5 => {
                slot[1] = choices.byte();
                let rare = choices.rarely(16);
                let sectors = if rare { choices.word() } else { u64::from(choices.half()) };
                slot[at.nr_sectors..at.nr_sectors + 8].copy_from_slice(&sectors.to_le_bytes());
            }
            6 => {
                slot[1] = if choices.rarely(8) { choices.byte() } else { slot[8] % 2 };
                let most = usize::from(self.oracle.offered.indirect_segments).max(1);
                let count = match choices.byte() {
                    0..=200 => 1 + choices.below(most),
                    201..=240 => most,
                    241..=247 => most + 1,
                    _ => usize::from(choices.half()),
                };
                let count = u16::try_from(count).unwrap_or(u16::MAX);
                slot[2..4].copy_from_slice(&count.to_le_bytes());
                for page in slot[at.pages..].chunks_exact_mut(4).take(8) {
                    let bad = choices.rarely(3);
                    let grant = if bad { word_of(choices) } else { below(choices, 7) };
                    page.copy_from_slice(&grant.to_le_bytes());
                }
            }
            _ => {
                let most = if slot[0] < 2 { 11 } else { 12 };
                let count = choices.below(most) + 12 - most;
                slot[1] =
                    if choices.rarely(6) { choices.byte() } else { u8::try_from(count).unwrap() };
                let count = usize::from(slot[1]).min(11);
                for segment in slot[at.segments..].chunks_exact_mut(8).take(count) {
                    segment.copy_from_slice(&segment_of(choices));
                }
            }
        }
        slot
    }

    fn pop(&mut self) {
        let wanting = self.oracle.wanting();
        // The code looks at the index only when it has taken all that it saw.
        let pages = &self.oracle.pages;
        let mut grants = |grant: u32, into: &mut [u8]| {
            let page = pages.get(grant as usize).and_then(Option::as_ref).ok_or(NotGranted)?;
            assert!(into.len() <= page.len() && into.len() % 8 == 0);
            into.copy_from_slice(&page[..into.len()]);
            Ok(())
        };
        let popped = match self.back.pop(&mut grants) {
            Err(_) => {
                assert_eq!(wanting, Err(()), "a good index is refused");
                self.broken = true;
                self.counters.broken += 1;
                return;
            }
            Ok(None) => return assert_eq!(wanting, Ok(0), "a request is not seen"),
            Ok(Some((token, asked))) => (token, seen(asked)),
        };
        assert_ne!(wanting, Ok(0), "a request that nobody made");
        let (id, operation, meaning) = self.oracle.take();
        let (token, asked) = popped;
        assert_eq!(token.id(), id);
        assert_eq!(asked, meaning);
        self.counters.requests += 1;
        self.counters.laps += u64::from(self.oracle.req_cons % self.oracle.size == 0);
        let refused = match &meaning {
            Ok(wanted) => {
                self.counters.longest = self.counters.longest.max(wanted.segments.len());
                self.counters.indirect += u64::from(wanted.segments.len() > 11);
                let discard = matches!(wanted.command, Command::Discard { .. });
                self.counters.discards += u64::from(discard);
                None
            }
            Err(status) => {
                self.counters.failed += u64::from(*status == -1);
                self.counters.unsupported += u64::from(*status == -2);
                Some(*status)
            }
        };
        self.pending.push((token, id, operation, refused));
    }

    fn answer(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let chosen = self.choices.below(self.pending.len());
        let (token, id, operation, refused) = self.pending.swap_remove(chosen);
        let status = refused.unwrap_or([0, 0, -1, -2][self.choices.below(4)]);
        let said = match status {
            0 => Status::Ok,
            -1 => Status::IoError,
            _ => Status::Unsupported,
        };
        self.back.push(token, said);
        self.oracle.answer(id, operation, status);
    }

    fn publish(&mut self) {
        let news = self.oracle.rsp_prod_pvt != self.oracle.get(8);
        let call = self.back.publish();
        if news {
            assert_eq!(call, self.oracle.publish(), "does the front-end want to be called?");
            self.counters.calls += u64::from(call);
            self.counters.silences += u64::from(!call);
        } else {
            assert!(!call, "a notification of nothing");
        }
    }

    fn arm(&mut self) {
        if self.broken {
            return;
        }
        let wanting = self.oracle.wanting();
        self.oracle.put(4, &self.oracle.req_cons.wrapping_add(1).to_le_bytes());
        match self.back.arm() {
            Ok(Armed::Quiet) => assert_eq!(wanting, Ok(0), "asleep on work"),
            Ok(Armed::WorkArrived) => assert!(matches!(wanting, Ok(1..)), "woken for nothing"),
            Err(_) => {
                assert_eq!(wanting, Err(()));
                self.broken = true;
                self.counters.broken += 1;
            }
        }
    }

    /// What else a front-end can do: ask for notifications, and write what makes no sense. Only to
    /// indices when the code has nothing left that it saw earlier: it would be judged by what it saw.
    fn meddle(&mut self) {
        let drained = self.oracle.wanting() == Ok(0);
        match self.choices.below(16) {
            0..=9 => {
                let event = self.oracle.get(8).wrapping_add(below(&mut self.choices, 5));
                self.write(12, &event.to_le_bytes());
            }
            10 | 11 => {
                let noise = (word_of(&mut self.choices)).to_le_bytes();
                let at = 64 + 4 * self.choices.below((self.oracle.bytes.len() - 64) / 4);
                self.write(at, &noise);
            }
            12 if drained && self.choices.rarely(64) => {
                let jump = match self.choices.below(4) {
                    0 => word_of(&mut self.choices),
                    1 => self.req_prod_pvt.wrapping_sub(1),
                    2 => self.oracle.get(8).wrapping_add(self.oracle.size),
                    _ => self.oracle.get(8).wrapping_add(self.oracle.size + 1),
                };
                self.write(0, &jump.to_le_bytes());
                self.req_prod_pvt = jump;
            }
            _ => {
                let noise = (word_of(&mut self.choices)).to_le_bytes();
                self.write(12, &noise);
            }
        }
    }

    fn compare(&self) {
        for at in (0..self.oracle.bytes.len()).step_by(4) {
            let have = word(&self.mapping, at).load(Relaxed);
            assert_eq!(have, self.oracle.get(at), "the ring differs at byte {at}");
        }
    }
}

fn word_of(choices: &mut Choices<'_>) -> u32 {
    u32::from(choices.half()) << 16 | u32::from(choices.half())
}

fn below(choices: &mut Choices<'_>, bound: u16) -> u32 {
    u32::try_from(choices.below(bound.into())).unwrap()
}

fn word(mapping: &Mapping, at: usize) -> &AtomicU32 {
    assert!(at % 4 == 0 && at + 4 <= mapping.len());
    // SAFETY: an aligned word of the mapping, and one thread.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        AtomicU32::from_ptr(mapping.at(at).cast())
    }
}

/// What the code made of a request, in the oracle's words.
fn seen(asked: Result<&Asked, Refused>) -> Meaning {
    match asked {
        Ok(asked) => Ok(Wanted {
            command: asked.command(),
            offset: asked.range().offset(),
            len: asked.range().len(),
            segments: asked
                .pieces()
                .iter()
                .map(|piece| (piece.grant(), piece.first(), piece.last()))
                .collect(),
        }),
        Err(refused) => Err(match refused.status() {
            Status::Ok => panic!("{refused} is no error"),
            Status::IoError | Status::NoSpace => -1,
            Status::Unsupported => -2,
        }),
    }
}

/// A segment: a good one, mostly.
fn segment_of(choices: &mut Choices<'_>) -> [u8; 8] {
    let [grant, shape] = [choices.byte(), choices.byte()];
    let (first, last) = if choices.rarely(2) {
        (choices.byte(), choices.byte())
    } else {
        let first = shape % 8;
        (first, first + shape / 8 % (8 - first))
    };
    // The last two bytes mean nothing and may be anything.
    [grant, 0, 0, 1, first, last, shape, grant]
}

/// Seven pages, number 5 without a grant; some have a segment that is wrong.
fn pages(choices: &mut Choices<'_>) -> Vec<Option<Vec<u8>>> {
    let mut page = |number: u32| {
        let list = (0..512).flat_map(|entry| {
            let mut segment = [0; 8];
            segment[..4].copy_from_slice(&(512 * number + entry).to_le_bytes());
            segment[4] = u8::try_from(entry * number % 8).unwrap();
            segment[5] = 7;
            segment[7] = 0xee;
            segment
        });
        let mut list: Vec<u8> = list.collect();
        if choices.rarely(40) {
            let at = 8 * choices.below(512);
            list[at..at + 8].copy_from_slice(&segment_of(choices));
            list[at + 4] = choices.byte();
        }
        (number != 5).then_some(list)
    };
    (0..7).map(&mut page).collect()
}
