//! The device side of a packed ring (VIRTIO 1.2 §2.8) against an oracle that counts.
//!
//! The oracle numbers descriptors from the start of the ring on and on, and derives index and wrap
//! counter from the number. Marks, buffers, wishes: all of it is read and written byte by byte.

use super::device::{Buffer, Fault};
use super::fuzz_case::Choices;
use super::memory::{Bytes, Memory, RINGS};
use crate::chain::listed;
use ringway_core::mem::Translator;
use ringway_ring::virtqueue::{
    Armed, Broken, Chain, Head, PackedAddresses, PackedBase, PackedDevice,
};
use std::collections::BTreeMap;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Where the driver says what it wants to be told, and the device.
const DRIVER: u64 = RINGS + 6000;
const DEVICE: u64 = RINGS + 6004;
/// The largest ring that fits before them.
const SIZE_MAX: usize = 300;

/// What was reached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub chains: u64,
    pub malformed: u64,
    pub tables: u64,
    pub broken: u64,
    pub calls: u64,
    pub silences: u64,
    pub laps: u32,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.chains += more.chains;
        self.malformed += more.malformed;
        self.tables += more.tables;
        self.broken += more.broken;
        self.calls += more.calls;
        self.silences += more.silences;
        self.laps += more.laps;
    }
}

/// Runs the case that `data` describes. Panics where the code and the oracle disagree.
pub fn check(data: &[u8]) -> Counters {
    let mut choices = Choices::new(data);
    let mut bench = Bench::new(&mut choices);
    for _ in 0..400 {
        match choices.below(8) {
            0..3 => bench.offer(&mut choices),
            3 | 4 => {
                bench.pop();
            }
            5 => bench.push(&mut choices),
            6 => bench.publish(&mut choices),
            _ if choices.byte() & 1 == 0 => bench.arm(),
            _ => bench.disarm(),
        }
        if choices.is_empty() || bench.broken {
            break;
        }
    }
    while !bench.broken && bench.pop() {}
    while !bench.heads.is_empty() {
        bench.push(&mut choices);
    }
    bench.publish(&mut choices);
    bench.memory.assert_equal();
    bench.counters.laps = bench.oracle.next / u32::from(bench.oracle.size);
    bench.counters
}

/// What a device does next, and what it writes.
struct Oracle {
    size: u16,
    event_idx: bool,
    indirect: bool,
    /// The descriptors taken and used so far, those before the start included.
    next: u32,
    used: u32,
    /// Descriptors of each chain in flight, by buffer id.
    in_flight: BTreeMap<u16, u32>,
    /// Number, length, id of what was used and is not visible.
    first: Option<(u32, u32, u16)>,
    published: u32,
    armed: bool,
}

impl Oracle {
    fn place(&self, count: u32) -> (u16, bool) {
        let size = u32::from(self.size);
        (u16::try_from(count % size).unwrap(), (count / size) % 2 == 0)
    }

    fn desc(&self, count: u32) -> u64 {
        RINGS + 16 * u64::from(self.place(count).0)
    }

    /// §2.8.1: available if AVAIL is the wrap counter and USED is not.
    fn is_available(&self, mem: &Bytes, count: u32) -> bool {
        let flags = number(mem, self.desc(count) + 14, 2);
        let wrap = self.place(count).1;
        (flags & u64::from(AVAIL) != 0) == wrap && (flags & u64::from(USED) != 0) != wrap
    }

    #[allow(clippy::type_complexity)]
    fn pop(
        &mut self,
        mem: &Bytes,
    ) -> Result<Option<(u16, Result<Vec<Buffer>, Vec<Fault>>)>, Broken> {
        if !self.is_available(mem, self.next) {
            return Ok(None);
        }
        let room = u32::from(self.size) - (self.next - self.published);
        let most = usize::from(self.size).max(Chain::INDIRECT_MAX);
        let (mut chain, mut faults) = (Vec::new(), Vec::new());
        let mut count = self.next;
        let id = loop {
            if count - self.next == room {
                return Err(Broken::Overrun(self.size));
            }
            let at = self.desc(count);
            let (addr, len) = (number(mem, at, 8), number(mem, at + 8, 4));
            let flags = u16::try_from(number(mem, at + 14, 2)).unwrap();
            if flags & INDIRECT != 0 {
                // §2.8.7: a table is the only descriptor of its chain.
                let alone = count == self.next && flags & NEXT == 0 && self.indirect;
                if alone {
                    faults = table(mem, addr, len, most, &mut chain);
                } else if faults.is_empty() {
                    faults.push(Fault::BadIndirect);
                }
            } else if faults.is_empty() {
                faults = add(&mut chain, most, addr, len, flags & WRITE != 0);
            }
            let id = number(mem, at + 12, 2);
            count += 1;
            if flags & NEXT == 0 {
                break u16::try_from(id).unwrap();
            }
            // §2.8.6: the first descriptor of a chain is marked last.
            if !self.is_available(mem, count) {
                return Err(Broken::HalfChain(self.place(count).0));
            }
        };
        if id >= self.size {
            return Err(Broken::IdOutOfRange(id));
        }
        if self.in_flight.contains_key(&id) {
            return Err(Broken::IdInFlight(id));
        }
        self.in_flight.insert(id, count - self.next);
        self.next = count;
        Ok(Some((id, if faults.is_empty() { Ok(chain) } else { Err(faults) })))
    }

    fn mark(&self, mem: &mut Bytes, (count, written, id): (u32, u32, u16)) {
        let wrap = if self.place(count).1 { AVAIL | USED } else { 0 };
        let flags = wrap | if written > 0 { WRITE } else { 0 };
        mem.set_number(self.desc(count) + 8, written.into(), 4);
        mem.set_number(self.desc(count) + 12, id.into(), 2);
        mem.set_number(self.desc(count) + 14, flags.into(), 2);
    }

    fn push(&mut self, mem: &mut Bytes, id: u16, written: u32) {
        let length = self.in_flight.remove(&id).expect("in flight");
        let used = (self.used, written, id);
        if self.first.is_none() {
            self.first = Some(used);
        } else {
            self.mark(mem, used);
        }
        self.used += length;
    }

    /// Whether the driver is to be called (§2.8.10, §2.8.14); nothing if it waits for a descriptor
    /// that the ring does not have: then it may be called or not.
    fn publish(&mut self, mem: &mut Bytes) -> Option<bool> {
        let Some(first) = self.first.take() else { return Some(false) };
        self.mark(mem, first);
        let from = std::mem::replace(&mut self.published, self.used);
        let (at, wish) = (number(mem, DRIVER, 2), number(mem, DRIVER + 2, 2) & 3);
        match wish {
            1 => Some(false),
            2 if self.event_idx && at & 0x7fff >= u64::from(self.size) => None,
            2 if self.event_idx => Some((from..self.used).any(|count| {
                let (index, wrap) = self.place(count);
                at == u64::from(index) | u64::from(wrap) << 15
            })),
            _ => Some(true),
        }
    }

    fn arm(&mut self, mem: &mut Bytes) -> bool {
        let (index, wrap) = self.place(self.next);
        let at = u64::from(index) | u64::from(wrap) << 15;
        mem.set_number(DEVICE, if self.event_idx { at | 2 << 16 } else { 0 }, 4);
        self.armed = true;
        self.is_available(mem, self.next)
    }

    fn disarm(&mut self, mem: &mut Bytes) {
        if std::mem::take(&mut self.armed) {
            mem.set_number(DEVICE, 1 << 16, 4);
        }
    }
}

fn number(mem: &Bytes, at: u64, len: u8) -> u64 {
    mem.number(at.into(), len).expect("the ring is in guest memory")
}

fn add(chain: &mut Vec<Buffer>, most: usize, addr: u64, len: u64, writable: bool) -> Vec<Fault> {
    let bytes: u64 = chain.iter().map(|buffer| u64::from(buffer.len)).sum();
    let faults: Vec<Fault> = [
        (len == 0, Fault::ZeroLength),
        (chain.len() == most, Fault::TooLong),
        (bytes + len >= 1 << 32, Fault::TooManyBytes),
        (!writable && chain.last().is_some_and(|last| last.writable), Fault::ReadableAfterWritable),
    ]
    .into_iter()
    .filter_map(|(wrong, fault)| wrong.then_some(fault))
    .collect();
    if faults.is_empty() {
        chain.push(Buffer { addr, len: u32::try_from(len).unwrap(), writable });
    }
    faults
}

/// §2.8.7: all entries of a table, in order; of their flags only WRITE means anything.
fn table(mem: &Bytes, at: u64, len: u64, most: usize, chain: &mut Vec<Buffer>) -> Vec<Fault> {
    if len == 0 || len % 16 != 0 || len / 16 > Chain::INDIRECT_MAX as u64 {
        return vec![Fault::BadIndirect];
    }
    for entry in 0..len / 16 {
        let at = u128::from(at) + 16 * u128::from(entry);
        let read = |skip, len| mem.number(at + skip, len);
        let (Some(addr), Some(len), Some(rest)) = (read(0, 8), read(8, 4), read(12, 4)) else {
            return vec![Fault::TableUnmapped];
        };
        let faults = add(chain, most, addr, len, rest >> 16 & u64::from(WRITE) != 0);
        if !faults.is_empty() {
            return faults;
        }
    }
    Vec::new()
}

struct Bench {
    memory: Memory,
    translator: Translator,
    device: PackedDevice,
    oracle: Oracle,
    /// The driver: what it has offered, and which ids it may use.
    offered: u32,
    free: Vec<u16>,
    heads: Vec<Head>,
    broken: bool,
    counters: Counters,
}

impl Bench {
    fn new(c: &mut Choices<'_>) -> Self {
        let most = if c.rarely(64) { SIZE_MAX } else { 12 };
        let size = u16::try_from(1 + c.below(most)).unwrap();
        let (event_idx, indirect) = (c.byte() & 1 != 0, !c.rarely(32));
        // Up to two laps, so that either wrap counter is met.
        let start = u16::try_from(c.below(2 * usize::from(size))).unwrap();
        let oracle = Oracle {
            size,
            event_idx,
            indirect,
            next: start.into(),
            used: start.into(),
            in_flight: BTreeMap::new(),
            first: None,
            published: start.into(),
            armed: true,
        };
        let mut memory = Memory::new();
        // The marks of the lap before: all used.
        for count in u32::from(start)..u32::from(start) + u32::from(size) {
            let flags = if oracle.place(count).1 { 0 } else { AVAIL | USED };
            memory.write_number(oracle.desc(count) + 14, flags.into(), 2);
        }
        let at = PackedAddresses {
            desc: memory.ring_host(RINGS),
            driver: memory.ring_host(DRIVER),
            device: memory.ring_host(DEVICE),
        };
        let base = PackedBase::after(start, size);
        // SAFETY: the three parts lie in the first region of `memory`, which lives as long as this.
        let device = unsafe { PackedDevice::new(size, at, base, event_idx, indirect) };
        Self {
            translator: memory.translator(),
            device: device.expect("a proper ring"),
            oracle,
            memory,
            offered: start.into(),
            free: (0..size).rev().collect(),
            heads: Vec::new(),
            broken: false,
            counters: Counters::default(),
        }
    }

    /// The driver offers a chain, with a mistake now and then.
    fn offer(&mut self, c: &mut Choices<'_>) {
        let size = u32::from(self.oracle.size);
        // What was written over the ring may have made more available than was offered.
        self.offered = self.offered.max(self.oracle.next);
        let mut room = size.saturating_sub(self.offered - self.oracle.published) as usize;
        if c.rarely(4) {
            room += 1 + c.below(4);
        }
        let length = 1 + c.below(5);
        if length > room || self.free.is_empty() {
            return;
        }
        let pick = c.below(self.free.len());
        let id = if c.rarely(4) { u16::from(c.byte()) } else { self.free.swap_remove(pick) };
        let writable_from = c.below(length + 1);
        let mut descs = Vec::new();
        for i in 0..length {
            let len = if c.rarely(8) { c.length() } else { 1 + c.below(600) as u64 };
            let addr = c.spot(usize::try_from(len.min(600)).unwrap());
            let mut flags = if i >= writable_from { WRITE } else { 0 };
            flags |= if i + 1 < length { NEXT } else { 0 };
            // Buffer ids count in the last descriptor only.
            let id = if i + 1 < length && c.rarely(64) { c.half() } else { id };
            descs.push((addr, len, id, flags));
        }
        if length == 1 && c.rarely(96) {
            descs[0] = self.put_table(c, id);
        }
        if c.rarely(10) {
            let at = c.below(descs.len());
            match c.below(4) {
                0 => descs[at].3 ^= NEXT,
                1 => descs[at].3 ^= INDIRECT,
                2 => descs[at].3 ^= WRITE,
                _ => descs[at].2 = c.half(),
            }
        }
        // Marks: mostly all of them; without one in the middle the chain is half there.
        let unmarked = if c.rarely(4) { c.below(descs.len()) } else { usize::MAX };
        for (i, &(addr, len, id, flags)) in descs.iter().enumerate() {
            let count = self.offered + u32::try_from(i).unwrap();
            let at = self.oracle.desc(count);
            let marks = if self.oracle.place(count).1 { AVAIL } else { USED };
            let marks = if i == unmarked { marks ^ (AVAIL | USED) } else { marks };
            self.memory.write_number(at, addr, 8);
            self.memory.write_number(at + 8, len, 4);
            self.memory.write_number(at + 12, id.into(), 2);
            self.memory.write_number(at + 14, (flags | marks).into(), 2);
        }
        self.offered += u32::try_from(length).unwrap();
    }

    fn put_table(&mut self, c: &mut Choices<'_>, id: u16) -> (u64, u64, u16, u16) {
        let entries = 1 + c.below(9);
        let at = c.spot(16 * entries);
        let at = if c.rarely(32) { at } else { at & !15 };
        let writable_from = c.below(entries + 1);
        for i in 0..entries {
            let entry = at.wrapping_add(16 * i as u64);
            let len = if c.rarely(8) { c.length() } else { 1 + c.below(600) as u64 };
            let flags = if i >= writable_from { WRITE } else { 0 };
            let addr = c.spot(16);
            self.memory.write_number(entry, addr, 8);
            self.memory.write_number(entry.wrapping_add(8), len, 4);
            let ignored = if c.rarely(32) { c.half() & !WRITE } else { 0 };
            self.memory.write_number(entry.wrapping_add(14), (flags | ignored).into(), 2);
        }
        let len = if c.rarely(16) { c.length() } else { 16 * entries as u64 };
        (at, len, id, INDIRECT | if c.rarely(16) { WRITE } else { 0 })
    }

    /// True if there was a chain.
    fn pop(&mut self) -> bool {
        let wanted = self.oracle.pop(&self.memory.bytes);
        match (self.device.pop(&mut self.translator), wanted) {
            (Ok(None), Ok(None)) => false,
            (Err(error), Err(wanted)) => {
                assert_eq!(error, wanted);
                self.broken = true;
                self.counters.broken += 1;
                false
            }
            (Ok(Some((head, chain))), Ok(Some((id, wanted)))) => {
                assert_eq!(head.index(), id);
                match (chain, wanted) {
                    (Ok(chain), Ok(wanted)) => {
                        assert_eq!(listed(chain), wanted, "the buffers of a chain");
                        self.counters.tables += u64::from(wanted.len() > 5);
                    }
                    (Err(error), Err(faults)) => {
                        assert!(faults.contains(&error.into()), "{error:?}, and not {faults:?}");
                        self.counters.malformed += 1;
                    }
                    (got, wanted) => panic!("walked to {got:?}, the oracle says {wanted:?}"),
                }
                self.heads.push(head);
                self.counters.chains += 1;
                true
            }
            (got, wanted) => panic!("popped {got:?}, the oracle says {wanted:?}"),
        }
    }

    fn push(&mut self, c: &mut Choices<'_>) {
        if self.heads.is_empty() {
            return;
        }
        let at = c.below(self.heads.len());
        let head = self.heads.swap_remove(at);
        let (id, written) = (head.index(), u32::from(c.byte()) * u32::from(c.byte()));
        self.device.push(head, written);
        self.oracle.push(&mut self.memory.bytes, id, written);
        if !self.free.contains(&id) {
            self.free.push(id);
        }
    }

    fn publish(&mut self, c: &mut Choices<'_>) {
        if c.rarely(128) {
            let near = self
                .oracle
                .place(self.oracle.published + u32::try_from(c.below(4)).expect("small"));
            let at = if c.rarely(16) { c.half() } else { near.0 | u16::from(near.1) << 15 };
            let wish = [0u64, 1, 2, 2, 2, 2, 3, 0x8002][c.below(8)];
            self.memory.write_number(DRIVER, at.into(), 2);
            self.memory.write_number(DRIVER + 2, wish, 2);
        }
        let (call, wanted) = (self.device.publish(), self.oracle.publish(&mut self.memory.bytes));
        assert!(wanted.is_none_or(|wanted| call == wanted), "called {call}, wanted {wanted:?}");
        *(if call { &mut self.counters.calls } else { &mut self.counters.silences }) += 1;
        assert_eq!(self.device.base(), self.base(), "where the ring goes on");
    }

    fn base(&self) -> PackedBase {
        let bits = |count| {
            let (index, wrap) = self.oracle.place(count);
            u32::from(index) | u32::from(wrap) << 15
        };
        PackedBase(bits(self.oracle.next) | bits(self.oracle.used) << 16)
    }

    fn arm(&mut self) {
        let (armed, work) = (self.device.arm(), self.oracle.arm(&mut self.memory.bytes));
        assert_eq!(armed == Armed::WorkArrived, work, "whether there is work");
    }

    fn disarm(&mut self) {
        self.device.disarm();
        self.oracle.disarm(&mut self.memory.bytes);
    }
}
