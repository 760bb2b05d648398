//! Recovery from the record of what is in flight, on a record that was left in the middle of things,
//! torn between two states, or written by somebody who means harm.
//!
//! The oracle reads the bytes of the record itself, by the offsets of the protocol's text ("Inflight
//! I/O tracking": `QueueRegionSplit`, `QueueRegionPacked`). Of a record that nobody touched it knows
//! exactly what must come out; any other one may be refused, but if it is taken, then to the letter.

use super::fuzz_case::Choices;
use super::memory::RINGS;
use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use ringway_ring::virtqueue::{
    Areas, DESC_F_INDIRECT, Desc, Device, Driver, Format, Head, InflightError, PackedBase, Piece,
    Tables, inflight_bytes,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What was reached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Records nobody touched, and the chains recovered from them.
    pub plain: u64,
    pub recovered: u64,
    /// Records torn or damaged that were taken all the same, and the chains recovered from them.
    pub taken: u64,
    pub hostile: u64,
    pub refused: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.plain += more.plain;
        self.recovered += more.recovered;
        self.taken += more.taken;
        self.hostile += more.hostile;
        self.refused += more.refused;
    }
}

/// Runs the case that `data` describes. Panics where recovery does what it must not.
pub fn check(data: &[u8]) -> Counters {
    let mut choices = Choices::new(data);
    let mut world = World::new(&mut choices);
    let mut counters = Counters::default();
    let mut life = world.recover(&mut counters);
    // What there was before the last step, to tear the record with.
    let mut before = world.bytes();
    for _ in 0..48 {
        match choices.below(8) {
            0..3 => world.offer(&mut choices),
            3 => world.collect(),
            step => {
                before = world.bytes();
                match step {
                    4 | 5 => world.pop(&mut life),
                    6 => world.push(&mut life, &mut choices),
                    _ => {
                        let _ = life.device.publish();
                    }
                }
            }
        }
        if choices.rarely(16) {
            drop(life);
            life = world.recover(&mut counters);
            before = world.bytes();
        }
        if choices.is_empty() {
            break;
        }
    }
    drop(life);
    let torn = world.tear(&mut choices, &before);
    let damaged = world.damage(&mut choices);
    if torn || damaged {
        world.judge(&mut counters);
    } else {
        drop(world.recover(&mut counters));
    }
    counters
}

/// A device and the chains it has taken and not published, with their names.
struct Life {
    device: Device,
    held: Vec<(Head, u32)>,
}

/// A driver, and all that outlives a device.
struct World {
    format: Format,
    entries: u16,
    base: u32,
    rings: Arc<Mapping>,
    region: Mapping,
    driver: Driver,
    /// What each chain in flight is called, by head; its buffers tell.
    names: BTreeMap<u16, u32>,
    /// Chains taken and not published, in the order they were first taken in.
    open: Vec<u32>,
    added: u32,
}

const DRIVER_AT: usize = 1024;
const DEVICE_AT: usize = 2048;
const TABLES_AT: usize = 4096;

/// The buffers of a chain.
fn pieces(name: u32) -> Vec<Piece> {
    (0..=name % 3).map(|i| Piece { addr: u64::from(name << 8 | i), len: 16 + name }).collect()
}

fn copied(descs: &[Desc]) -> Vec<Piece> {
    descs.iter().map(|desc| Piece { addr: desc.addr, len: desc.len }).collect()
}

impl World {
    fn new(choices: &mut Choices<'_>) -> Self {
        let packed = choices.byte() & 1 != 0;
        let size = if packed { 3 + choices.below(30) } else { 4 << choices.below(4) };
        let size = u16::try_from(size).unwrap();
        let entries = size + [0, 0, 0, 1, 7][choices.below(5)];
        let (event_idx, indirect) = (choices.byte() & 1 != 0, choices.byte() & 3 != 3);
        let format = Format { packed, size, event_idx, indirect };
        let first = match choices.below(4) {
            0 => 0,
            1 => size - 1,
            2 if packed => 2 * size - 1,
            2 => u16::MAX,
            _ => choices.half() % if packed { 2 * size } else { u16::MAX },
        };
        let base = if packed { PackedBase::after(first, size).0 } else { first.into() };
        let rings = Arc::new(Mapping::anonymous(8192).expect("a little memory"));
        let region = Mapping::anonymous(inflight_bytes(packed, entries)).expect("a little memory");
        let tables = Tables {
            host: rings.at(TABLES_AT),
            guest: RINGS + TABLES_AT as u64,
            entries: 3,
            when_scarce: choices.byte() & 1 != 0,
        };
        // SAFETY: the areas lie apart in the mapping, which `World` keeps; no device uses them yet.
        let driver = unsafe {
            let tables = indirect.then_some(tables);
            Driver::new(format, areas(&rings), first, tables).expect("a proper queue")
        };
        let (names, open) = (BTreeMap::new(), Vec::new());
        Self { format, entries, base, rings, region, driver, names, open, added: 0 }
    }

    fn translator(&self) -> Translator {
        let (mapping, len) = (Arc::clone(&self.rings), self.rings.len() as u64);
        let region = Region { guest: RINGS, user: 0, len, mapping };
        Translator::new(Arc::new(GuestMap::new(vec![region]).expect("one region")))
    }

    fn start(&self) -> Result<Device, InflightError> {
        let (format, at, region) = (self.format, areas(&self.rings), self.region.at(0));
        // SAFETY: both mappings outlive the device, and there is one device at a time.
        unsafe { Device::tracked(format, at, Some(self.base), region, self.entries) }
    }

    /// Rings and record.
    fn bytes(&self) -> [Vec<u8>; 2] {
        [&*self.rings, &self.region].map(|mapping| {
            // SAFETY: mapped, and nobody writes now.
            unsafe { std::slice::from_raw_parts(mapping.at(0), mapping.len()) }.to_vec()
        })
    }

    fn offer(&mut self, choices: &mut Choices<'_>) {
        for _ in 0..=choices.below(3) {
            let Ok(head) = self.driver.add(&pieces(self.added), &[]) else { break };
            self.names.insert(head, self.added);
            self.added += 1;
        }
        let _ = self.driver.publish();
    }

    /// What came back: each once, with what its own request was answered.
    fn collect(&mut self) {
        while let Some(used) = self.driver.pop_used().expect("the device keeps the rules") {
            let name = self.names.remove(&used.head).expect("came back once");
            assert_eq!(used.len, name + 1);
        }
    }

    fn pop(&mut self, life: &mut Life) {
        let popped = life.device.pop(&mut self.translator()).expect("the driver keeps the rules");
        let Some((head, chain)) = popped else { return };
        let name = self.names[&head.index()];
        assert_eq!(copied(chain.expect("a good chain").readable()), pieces(name));
        self.open.push(name);
        life.held.push((head, name));
    }

    fn push(&mut self, life: &mut Life, choices: &mut Choices<'_>) {
        if !life.held.is_empty() {
            let (head, name) = life.held.swap_remove(choices.below(life.held.len()));
            life.device.push(head, name + 1);
        }
    }

    /// A successor where nobody has touched the record: it gets exactly what was not published, in
    /// the old order. Those are what the driver waits for and a device has taken.
    fn recover(&mut self, counters: &mut Counters) -> Life {
        self.collect();
        self.open.retain(|name| self.names.values().any(|waited| waited == name));
        let device = self.start().expect("a record that nobody has touched");
        let mut life = Life { device, held: Vec::new() };
        assert_eq!(life.device.backlog(), self.open.len());
        let open = std::mem::take(&mut self.open);
        while self.open.len() < open.len() {
            self.pop(&mut life);
        }
        assert_eq!(self.open, open, "lost, invented or out of order");
        counters.plain += 1;
        counters.recovered += open.len() as u64;
        life
    }

    /// Puts some of the bytes back that the last step has changed: states that no order of stores
    /// leaves, too. True if there was anything to put back.
    fn tear(&self, choices: &mut Choices<'_>, before: &[Vec<u8>; 2]) -> bool {
        if !choices.rarely(96) {
            return false;
        }
        let now = self.bytes();
        let mut torn = false;
        for (mapping, (old, new)) in [&*self.rings, &self.region].iter().zip(before.iter().zip(now))
        {
            for at in (0..old.len()).filter(|&at| old[at] != new[at]) {
                if choices.byte() & 1 != 0 {
                    // SAFETY: within the mapping, and no device is there.
                    unsafe { mapping.at(at).write(old[at]) };
                    torn = true;
                }
            }
        }
        torn
    }

    /// Sets a few fields to what they should not be, in some of the cases.
    fn damage(&self, choices: &mut Choices<'_>) -> bool {
        let damages = choices.below(8).saturating_sub(4);
        let (header, entry) = if self.format.packed { (32, 32) } else { (16, 16) };
        for _ in 0..damages {
            let value = match choices.below(6) {
                0 => u64::from(self.format.size),
                1 => u64::from(self.entries),
                2 => choices.word(),
                _ => u64::from(choices.byte() % 16),
            };
            let index = choices.below(self.entries.into());
            let (mapping, at, bytes) = match choices.below(8) {
                0 => (&self.region, choices.below(header / 2) * 2, 2),
                1 => (&self.region, choices.below(self.region.len()), 1),
                // `inflight`, `next`, and what else an entry has.
                2 | 3 => (&self.region, header + entry * index, 1),
                4 | 5 => (&self.region, header + entry * index + choices.below(entry / 2) * 2, 2),
                6 => (&*self.rings, DEVICE_AT + 2, 2),
                _ => (&*self.rings, choices.below(DEVICE_AT + 512), 1),
            };
            for (at, byte) in (at..).zip(value.to_le_bytes()).take(bytes) {
                // SAFETY: within the mapping, and no device is there.
                unsafe { mapping.at(at).write(byte) };
            }
        }
        damages > 0
    }

    /// A successor on a record that may say anything.
    fn judge(&mut self, counters: &mut Counters) {
        let [rings, record] = self.bytes();
        let Ok(mut device) = self.start() else {
            assert!(self.bytes() == [rings, record], "what was refused was written to");
            counters.refused += 1;
            return;
        };
        let backlog = device.backlog();
        let size = usize::from(self.format.size);
        let mut allowed = self.recorded(&record, &rings);
        assert!(backlog <= size && backlog == allowed.len(), "not as many as the record says");
        let mut translator = self.translator();
        let (mut held, mut counter, mut sum) = (Vec::new(), 0, 0);
        for _ in 0..backlog {
            let popped = device.pop(&mut translator).expect("a backlog is judged at the start");
            let (head, chain) = popped.expect("as many as it said");
            let says = allowed.remove(&head.index()).expect("not in the record, or twice");
            assert!(says.counter >= counter, "out of order");
            (counter, sum) = (says.counter, sum + says.descs.len());
            if let Ok(chain) = chain {
                if self.format.packed
                    && says.descs.iter().all(|desc| desc.flags & DESC_F_INDIRECT == 0)
                {
                    let mut descs = copied(chain.readable());
                    descs.extend(copied(chain.writable()));
                    descs.sort_unstable_by_key(|piece| (piece.addr, piece.len));
                    let mut want = copied(&says.descs);
                    want.sort_unstable_by_key(|piece| (piece.addr, piece.len));
                    assert_eq!(descs, want, "not what the record says");
                }
            }
            held.push(head);
        }
        assert!(sum <= size, "more descriptors than the queue has");
        assert!(device.backlog() == 0 && allowed.is_empty());
        // Then what the driver offers, which may be anything now; nothing twice.
        while let Ok(Some((head, _))) = device.pop(&mut translator) {
            assert!(usize::from(head.index()) < size);
            assert!(held.iter().all(|other| other.index() != head.index()), "in flight twice");
            held.push(head);
        }
        assert!(held.len() <= size);
        held.into_iter().for_each(|head| device.push(head, 0));
        let _ = device.publish();
        drop(device);
        let next = self.start().expect("a record that this code has left");
        assert_eq!(next.backlog(), 0, "everything was published");
        counters.taken += 1;
        counters.hostile += backlog as u64;
    }

    /// The chains that a record has in flight and that were not published, by head.
    fn recorded(&self, record: &[u8], rings: &[u8]) -> BTreeMap<u16, Recorded> {
        let half = |at: usize| u16::try_from(number(record, at, 2)).unwrap();
        let mut found = BTreeMap::new();
        // struct QueueRegionSplit, QueueRegionPacked: features, version, desc_num, …
        if half(8) == 0 {
            return found;
        }
        if !self.format.packed {
            // … last_batch_head, used_idx. struct DescStateSplit: inflight, padding, next, counter.
            let entry = |index: u16| 16 + 16 * usize::from(index);
            let used = u16::try_from(number(rings, DEVICE_AT + 2, 2)).unwrap();
            let last = self.reached(half(12), |index| half(entry(index) + 6));
            let published = &last[..last.len().min(used.wrapping_sub(half(14)).into())];
            for index in (0..self.entries).filter(|&index| record[entry(index)] == 1) {
                if !published.contains(&index) {
                    let counter = number(record, entry(index) + 8, 8);
                    found.insert(index, Recorded { counter, descs: Vec::new() });
                }
            }
            return found;
        }
        // … free_head, old_free_head, used_idx, old_used_idx, used_wrap_counter,
        // old_used_wrap_counter. struct DescStatePacked: inflight, padding, next, last, num, counter,
        // id, flags, len, addr.
        let entry = |index: u16| 32 + 32 * usize::from(index);
        let next = |index: u16| half(entry(index) + 2);
        let (used, old) = ((half(16), record[20]), (half(18), record[21]));
        // VIRTIO 1.2 §2.8.1: still available means that the batch was not published.
        let flags = number(rings, 16 * usize::from(old.0) + 14, 2);
        let (avail_mark, used_mark) = (flags >> 7 & 1, flags >> 15 & 1);
        let is_available = avail_mark == u64::from(old.1) && used_mark != u64::from(old.1);
        let free_head = if used != old && !is_available { half(12) } else { half(14) };
        let free = self.reached(free_head, next);
        for first in (0..self.entries).filter(|&index| record[entry(index)] == 1) {
            if free.contains(&first) {
                continue;
            }
            let (mut descs, mut at, mut id) = (Vec::new(), first, 0);
            for _ in 0..half(entry(first) + 6) {
                let (addr, len) = (number(record, entry(at) + 24, 8), half(entry(at) + 20));
                let len = u32::from(len) | u32::from(half(entry(at) + 22)) << 16;
                descs.push(Desc { addr, len, flags: half(entry(at) + 18), next: 0 });
                id = half(entry(at) + 16);
                at = next(at);
            }
            let counter = number(record, entry(first) + 8, 8);
            let twice = found.insert(id, Recorded { counter, descs });
            assert!(twice.is_none(), "a record with an id twice was taken");
        }
        found
    }

    /// Entries that a list leads to.
    fn reached(&self, first: u16, next: impl Fn(u16) -> u16) -> Vec<u16> {
        let mut reached = Vec::new();
        let mut at = first;
        while at < self.entries && !reached.contains(&at) {
            reached.push(at);
            at = next(at);
        }
        reached
    }
}

/// What a record says of a chain in flight.
struct Recorded {
    counter: u64,
    /// Of a packed queue.
    descs: Vec<Desc>,
}

/// A little-endian number of `len` bytes.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

fn areas(rings: &Mapping) -> Areas {
    Areas { desc: rings.at(0), driver: rings.at(DRIVER_AT), device: rings.at(DEVICE_AT) }
}
