//! A device is killed before each store that outlives it, and another one goes on.
//!
//! **How the order of stores is modelled.** A process that is killed has made some of its stores, in
//! the order of its program, and none of the others: signals are precise, and what a CPU has retired
//! reaches memory whether or not the process lives. `next_store` is called before each store of the
//! device to the rings and to the record, and ends the device when its time has come. So the states
//! tried are exactly those that a kill can leave: after every prefix of the stores.

use super::record::shape;
use super::*;
use crate::virtqueue::store::killed_at;
use crate::virtqueue::tests::{Memory, Rng, Shape};
use crate::virtqueue::{Device, Driver, Format, PackedBase, Piece, inflight_bytes, renew_inflight};
use ringway_core::mem::Mapping;
use std::collections::BTreeSet;

/// What is tried at a time.
#[derive(Clone, Debug)]
struct Case {
    shape: Shape,
    entries: u16,
    /// Descriptors of the chains, in turn.
    lengths: &'static [usize],
    /// Chains at the beginning, by number, in the order in which they complete.
    order: Vec<usize>,
    /// Sizes of the batches they complete in.
    batches: Vec<usize>,
    /// As many new chains follow as come back, until there were so many.
    most: u32,
    /// The driver takes what came back only once the next device is there.
    late: bool,
    /// The device puts each chain back once before it keeps it.
    hesitant: bool,
}

/// Everything that outlives a device.
struct World<'a> {
    case: &'a Case,
    memory: &'a Memory,
    region: &'a Mapping,
    driver: Driver,
    /// The request that each chain in flight carries, by head.
    names: Vec<u32>,
    added: u32,
    done: BTreeSet<u32>,
}

/// A device and the chains it has taken.
struct Life {
    device: Device,
    held: Vec<(Head, u32)>,
}

impl<'a> World<'a> {
    fn new(case: &'a Case, memory: &'a Memory, region: &'a Mapping) -> Self {
        // SAFETY: nobody uses the region now.
        unsafe { region.at(0).write_bytes(0, region.len()) };
        let names = vec![0; usize::from(case.shape.size)];
        let driver = memory.driver(case.shape);
        World { case, memory, region, driver, names, added: 0, done: BTreeSet::new() }
    }

    fn add(&mut self) {
        let name = self.added;
        let length = self.case.lengths[name as usize % self.case.lengths.len()];
        let pieces: Vec<_> = (0..length).map(|number| piece(name, number)).collect();
        let head = self.driver.add(&pieces, &[]).unwrap();
        let _ = self.driver.publish();
        self.names[usize::from(head)] = name;
        self.added += 1;
    }

    /// What came back: each once, and with the length that its own request was given.
    fn collect(&mut self) -> usize {
        let mut count = 0;
        while let Some(used) = self.driver.pop_used().unwrap() {
            let name = self.names[usize::from(used.head)];
            assert_eq!(used.len, name + 1, "{:?}", self.case);
            assert!(self.done.insert(name), "{name} came back twice: {:?}", self.case);
            count += 1;
        }
        count
    }

    /// A device on what there is. The front-end only knows where the ring has begun.
    fn start(&self) -> Device {
        let Shape { packed, size, first, .. } = self.case.shape;
        let base = if packed { PackedBase::after(first, size).0 } else { first.into() };
        let (region, entries) = (self.region.at(0), self.case.entries);
        let (format, at) = (self.case.shape.format(), self.memory.areas());
        // SAFETY: ring and region outlive the device.
        unsafe { Device::tracked(format, at, Some(base), region, entries) }
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.case))
    }

    /// Takes all there is; every chain is whole.
    fn take(&self, life: &mut Life) {
        let mut translator = self.memory.translator();
        loop {
            if self.case.hesitant {
                if let Some((head, _)) = life.device.pop(&mut translator).unwrap() {
                    life.device.put_back(head);
                }
            }
            let Some((head, chain)) = life.device.pop(&mut translator).unwrap() else { break };
            let name = self.names[usize::from(head.index())];
            let length = self.case.lengths[name as usize % self.case.lengths.len()];
            let want: Vec<_> = (0..length).map(|number| piece(name, number)).collect();
            let have = chain.unwrap().readable();
            let have: Vec<_> = have.iter().map(|d| Piece { addr: d.addr, len: d.len }).collect();
            assert_eq!(have, want, "{:?}", self.case);
            life.held.push((head, name));
        }
    }

    /// The first device: all of the case.
    fn first_life(&mut self) {
        let mut life = Life { device: self.start(), held: Vec::new() };
        for _ in 0..self.case.order.len() {
            self.add();
        }
        self.take(&mut life);
        let mut order = self.case.order.iter();
        for &batch in &self.case.batches {
            for &number in order.by_ref().take(batch) {
                let at = life.held.iter().position(|(_, name)| *name as usize == number).unwrap();
                let (head, name) = life.held.remove(at);
                life.device.push(head, name + 1);
            }
            let _ = life.device.publish();
            if self.case.most > 0 {
                let room = self.collect();
                for _ in 0..room.min((self.case.most - self.added) as usize) {
                    self.add();
                }
                self.take(&mut life);
            }
        }
    }

    /// The next device: everything that did not come back comes out once more, in the old order;
    /// nothing else does. Then it all comes back, in the opposite order, one and two at a time.
    fn next_life(&mut self) {
        if !self.case.late {
            self.collect();
        }
        let mut life = Life { device: self.start(), held: Vec::new() };
        self.collect();
        self.take(&mut life);
        let names: Vec<_> = life.held.iter().map(|(_, name)| *name).collect();
        let want: Vec<_> = (0..self.added).filter(|name| !self.done.contains(name)).collect();
        assert_eq!(names, want, "lost, replayed or out of order: {:?}", self.case);
        let mut batch = 2;
        while !life.held.is_empty() {
            batch = 3 - batch;
            for _ in 0..batch {
                let Some((head, name)) = life.held.pop() else { break };
                life.device.push(head, name + 1);
            }
            let _ = life.device.publish();
            // At once: behind the batch the driver must not see what the last device has left.
            self.collect();
        }
        assert_eq!(self.done.len(), self.added as usize, "{:?}", self.case);
    }

    /// All that outlives a device, to try several next ones on it.
    fn bytes(&self) -> [Vec<u8>; 2] {
        [&*self.memory.mapping, self.region].map(|mapping| {
            // SAFETY: mapped, and nobody writes now.
            unsafe { std::slice::from_raw_parts(mapping.at(0), mapping.len()) }.to_vec()
        })
    }

    fn restore(&self, bytes: &[Vec<u8>; 2]) {
        for (mapping, bytes) in [&*self.memory.mapping, self.region].into_iter().zip(bytes) {
            // SAFETY: as long as it was, and nobody uses it now.
            unsafe { mapping.at(0).copy_from(bytes.as_ptr(), bytes.len()) };
        }
    }
}

fn piece(name: u32, number: usize) -> Piece {
    Piece { addr: u64::from(name) << 8 | number as u64, len: 16 + name }
}

/// All orders of 0..n.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let shorter = orders(n - 1);
    shorter
        .iter()
        .flat_map(|order| {
            (0..n).map(|at| {
                let mut order = order.clone();
                order.insert(at, n - 1);
                order
            })
        })
        .collect()
}

/// All ways to cut n into batches.
fn batches(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    (1..=n)
        .flat_map(|first| {
            batches(n - first).into_iter().map(move |rest| [vec![first], rest].concat())
        })
        .collect()
}

/// Ring sizes, lengths of chains and first indices: at the start, and where everything wraps.
fn rings(packed: bool) -> Vec<(Shape, u16, &'static [usize])> {
    let plain = |size, first| Shape {
        packed,
        size,
        first,
        event_idx: true,
        entries: 0,
        when_scarce: false,
    };
    if packed {
        vec![
            // Batches that go once around the ring.
            (plain(4, 0), 4, &[1]),
            (plain(4, 3), 4, &[1]),
            (plain(4, 7), 4, &[1]),
            // A region larger than the queue; chains over the seam.
            (plain(9, 7), 11, &[1, 2, 1, 3]),
            (plain(8, 15), 8, &[2, 1, 2, 1]),
        ]
    } else {
        vec![
            (plain(4, 0), 4, &[1]),
            (plain(4, 65534), 4, &[1]),
            (plain(8, 65535), 16, &[1, 2, 1, 3]),
        ]
    }
}

/// Calls `try_one` with all cases of one format.
fn each_case(packed: bool, mut try_one: impl FnMut(&Case, &Memory, &Mapping)) {
    let most_chains = if cfg!(miri) { 2 } else { 4 };
    for (shape, entries, lengths) in rings(packed) {
        let memory = Memory::new(shape);
        let region = Mapping::anonymous(inflight_bytes(packed, entries)).unwrap();
        for n in 1..=most_chains {
            for order in orders(n) {
                for batches in batches(n) {
                    for (most, late) in [(0, false), (0, true), (6, false)] {
                        let (order, batches) = (order.clone(), batches.clone());
                        let hesitant = false;
                        let case =
                            Case { shape, entries, lengths, order, batches, most, late, hesitant };
                        try_one(&case, &memory, &region);
                    }
                }
            }
        }
    }
}

/// Every prefix of the stores of a device, and on what it has left every prefix of the stores of the
/// next one's start (after up to three chains; whether a batch has three or four makes no difference
/// to that).
fn every_crash_point(packed: bool) {
    let (mut cases, mut kills, mut starts) = (0u64, 0u64, 0u64);
    each_case(packed, |case, memory, region| {
        cases += 1;
        for stores in 0.. {
            let mut world = World::new(case, memory, region);
            let lived = killed_at(stores, || world.first_life()).is_some();
            let left = world.bytes();
            for stores in 0.. {
                if case.order.len() > 3 {
                    break;
                }
                if killed_at(stores, || drop(world.start())).is_some() {
                    break;
                }
                starts += 1;
                // And the one after that.
                drop(world.start());
                world.restore(&left);
            }
            world.restore(&left);
            world.next_life();
            if lived {
                break;
            }
            kills += 1;
        }
    });
    println!(
        "{}: {cases} cases, {kills} kills of a device, {starts} kills of the next at its start",
        if packed { "packed" } else { "split" }
    );
    assert!(cfg!(miri) || (kills > 30_000 && starts > 30_000), "{kills} {starts}");
}

#[test]
fn c09_every_crash_point_of_a_split_queue() {
    every_crash_point(false);
}

#[test]
fn c09_every_crash_point_of_a_packed_queue() {
    every_crash_point(true);
}

/// The second device is killed at every store as well, and a third one goes on.
#[test]
fn c09_killed_twice() {
    let mut kills = 0u64;
    for packed in [false, true] {
        each_case(packed, |case, memory, region| {
            if case.order.len() > 2 || (cfg!(miri) && case.order.len() > 1) {
                return;
            }
            'first: for first in 0.. {
                for second in 0.. {
                    let mut world = World::new(case, memory, region);
                    if killed_at(first, || world.first_life()).is_some() {
                        break 'first;
                    }
                    if killed_at(second, || world.next_life()).is_some() {
                        break;
                    }
                    world.next_life();
                    kills += 1;
                }
            }
        });
    }
    println!("{kills} pairs of kills");
    assert!(cfg!(miri) || kills > 50_000);
}

/// A device that puts every chain back before it keeps it is killed at every store; nothing is lost,
/// nothing comes back twice, and the order stays.
#[test]
fn a22_a_chain_that_was_put_back_comes_again() {
    let mut kills = 0u64;
    for packed in [false, true] {
        each_case(packed, |case, memory, region| {
            let case = &Case { hesitant: true, ..case.clone() };
            for stores in 0.. {
                let mut world = World::new(case, memory, region);
                let lived = killed_at(stores, || world.first_life()).is_some();
                world.next_life();
                if lived {
                    break;
                }
                kills += 1;
            }
        });
    }
    println!("{kills} kills");
    assert!(cfg!(miri) || kills > 50_000, "{kills}");
}

/// A region as a device leaves it in the middle of things, for one format.
fn left_over<'a>(case: &'a Case, memory: &'a Memory, region: &'a Mapping) -> World<'a> {
    let mut world = World::new(case, memory, region);
    let _ = killed_at(if case.shape.packed { 140 } else { 48 }, || world.first_life());
    world
}

fn noisy_case(packed: bool) -> Case {
    let (shape, entries, lengths) = rings(packed).pop().unwrap();
    let (order, batches) = (vec![2, 0, 1], vec![2, 1]);
    Case { shape, entries, lengths, order, batches, most: 0, late: false, hesitant: false }
}

/// A queue on a record that says anything: either it is refused and the record left alone, or it hands
/// out no more chains than it can hold.
fn try_hostile(case: &Case, world: &World<'_>) -> bool {
    let (format, at) = (case.shape.format(), world.memory.areas());
    let before = world.bytes();
    // SAFETY: ring and region outlive the device.
    let device = unsafe { Device::tracked(format, at, Some(0), world.region.at(0), case.entries) };
    let Ok(mut device) = device else {
        assert!(before == world.bytes(), "a refused record was written to");
        return false;
    };
    assert!(device.backlog() <= usize::from(case.shape.size));
    let mut translator = world.memory.translator();
    let mut held = Vec::new();
    while let Ok(Some((head, _))) = device.pop(&mut translator) {
        assert!(head.index() < case.shape.size);
        held.push(head);
    }
    assert!(held.len() <= usize::from(case.shape.size));
    for head in held {
        device.push(head, 0);
    }
    let _ = device.publish();
    true
}

/// Every bit of the region, one at a time, then noise.
#[test]
fn b04_every_field_of_the_region_is_judged() {
    let mut rng = Rng::seeded("b04");
    for packed in [false, true] {
        let case = noisy_case(packed);
        let memory = Memory::new(case.shape);
        let bytes = inflight_bytes(packed, case.entries);
        let region = Mapping::anonymous(bytes).unwrap();
        let (mut taken, mut refused) = (0, 0);
        for bit in 0..8 * bytes {
            if cfg!(miri) && bit % 37 != 0 {
                continue;
            }
            let world = left_over(&case, &memory, &region);
            // SAFETY: within the region.
            unsafe { *region.at(bit / 8) ^= 1 << (bit % 8) };
            *if try_hostile(&case, &world) { &mut taken } else { &mut refused } += 1;
        }
        println!("packed {packed}: of {} flipped bits {refused} refused", 8 * bytes);
        assert!(cfg!(miri) || (refused > 100 && taken > 100));
        for _ in 0..if cfg!(miri) { 20 } else { 50_000 } {
            let world = left_over(&case, &memory, &region);
            for _ in 0..=rng.below(6) {
                let (at, value) = (rng.below(bytes), rng.below(256));
                // Mostly small values, which lead further.
                let value = if rng.below(3) == 0 { value } else { value % 12 };
                // SAFETY: within the region.
                unsafe { *region.at(at) = u8::try_from(value).unwrap() };
            }
            try_hostile(&case, &world);
        }
    }
}

#[test]
fn b04_a_bad_region_is_refused_with_a_reason() {
    let start = |case: &Case, memory: &Memory, region: &Mapping, entries| {
        let (format, at) = (case.shape.format(), memory.areas());
        // SAFETY: ring and region outlive the device.
        unsafe { Device::tracked(format, at, Some(0), region.at(0), entries) }.map(drop)
    };
    for packed in [false, true] {
        let case = noisy_case(packed);
        let memory = Memory::new(case.shape);
        let region = Mapping::anonymous(inflight_bytes(packed, case.entries)).unwrap();
        let world = left_over(&case, &memory, &region);
        let left = world.bytes();
        let size = case.shape.size;
        let wrong = |region| Err(InflightError::Entries { region, queue: size });
        assert_eq!(start(&case, &memory, &region, size - 1), wrong(size - 1));
        let put = |at, value: u8| {
            world.restore(&left);
            // SAFETY: within the region.
            unsafe { *region.at(at) = value };
        };
        put(8, 2);
        let version = Err(InflightError::Version { version: 2, features: 0 });
        assert_eq!(start(&case, &memory, &region, case.entries), version);
        put(3, 1);
        let features = Err(InflightError::Version { version: 1, features: 1 << 24 });
        assert_eq!(start(&case, &memory, &region, case.entries), features);
        put(10, 3);
        assert_eq!(start(&case, &memory, &region, case.entries), wrong(3));
        let entry = shape(packed).0;
        put(entry, 2);
        let error = start(&case, &memory, &region, case.entries).unwrap_err();
        assert!(error.to_string().contains("damaged at entry 0"), "{error}");
        world.restore(&left);
        assert_eq!(start(&case, &memory, &region, case.entries), Ok(()));
    }
}

/// After a stop that the front-end knows of, the queue may begin anywhere; a new region does not hide
/// that requests were lost before.
#[test]
fn a_drained_queue_begins_where_it_is_told() {
    for packed in [false, true] {
        let case = Case { order: vec![0, 1], batches: vec![2], ..noisy_case(packed) };
        let memory = Memory::new(case.shape);
        let region = Mapping::anonymous(inflight_bytes(packed, case.entries)).unwrap();
        let mut world = World::new(&case, &memory, &region);
        world.first_life();
        world.collect();
        assert_eq!(world.done.len(), 2);
        // SAFETY: no queue uses the region.
        unsafe { renew_inflight(region.at(0), packed, case.entries) };
        // The driver makes its ring anew, at another place.
        let elsewhere = Case { shape: Shape { first: 3, ..case.shape }, ..case.clone() };
        let mut world = World {
            case: &elsewhere,
            driver: memory.driver(elsewhere.shape),
            added: 0,
            done: BTreeSet::new(),
            ..world
        };
        world.add();
        world.next_life();
        // SAFETY: as above.
        unsafe { renew_inflight(region.at(0), packed, case.entries) };
        let (format, at) = (case.shape.format(), memory.areas());
        let base = if packed { 0x8001_8002 } else { 9 };
        // SAFETY: ring and region outlive the device.
        let error = unsafe { Device::tracked(format, at, Some(base), region.at(0), case.entries) };
        let error = error.map(drop).unwrap_err();
        assert!(matches!(error, InflightError::Base { .. }), "{error}");
    }
}

/// What sessions and workers ask of a queue with a record.
#[test]
fn a_queue_with_a_record_tells_of_itself() {
    // Headers of 16 and 32 bytes, entries as large, to the next multiple of 64 (vhost-user, "Inflight I/O
    // tracking").
    let bytes = [(false, 1), (false, 128), (true, 1), (true, 128)]
        .map(|(packed, n)| inflight_bytes(packed, n));
    assert_eq!(bytes, [64, 2112, 64, 4160]);
    for packed in [false, true] {
        let shape =
            Shape { packed, size: 8, first: 0, event_idx: true, entries: 0, when_scarce: false };
        let (order, batches) = (vec![], vec![]);
        let case = Case {
            shape,
            entries: 8,
            lengths: &[1, 2],
            order,
            batches,
            most: 0,
            late: false,
            hesitant: false,
        };
        let memory = Memory::new(shape);
        let region = Mapping::anonymous(inflight_bytes(packed, 8)).unwrap();
        let mut world = World::new(&case, &memory, &region);
        let base = |chains| if packed { PackedBase::after(chains, 8).0 } else { chains.into() };
        let mut translator = memory.translator();

        let mut device = world.start();
        assert_eq!((device.size(), device.base(), device.backlog()), (8, base(0), 0));
        assert!(!device.goes_on() && !device.has_work());
        world.add();
        world.add();
        for (descriptors, next, more) in [(1, 1, true), (2, if packed { 3 } else { 2 }, false)] {
            assert!(device.has_work());
            let _ = device.pop(&mut translator).unwrap().unwrap().1.unwrap();
            // Of a packed ring, the lower half is what is available next.
            let at = |base: u32| base & 0xffff;
            assert_eq!((device.walked(), at(device.base())), (descriptors, at(base(next))));
            assert_eq!(device.has_work(), more);
        }
        assert!(device.goes_on(), "it is not where it began");
        drop(device);

        // Its successor has what was in flight, and nothing that is new.
        let mut device = world.start();
        assert_eq!(device.backlog(), 2);
        assert!(device.goes_on());
        for left in [1, 0] {
            assert!(device.has_work());
            // The ring has nothing new, but who sleeps now sleeps on requests.
            assert_eq!(device.arm(), Ok(Armed::WorkArrived));
            let (head, _) = device.pop(&mut translator).unwrap().unwrap();
            device.push(head, 0);
            assert_eq!((device.backlog(), device.has_work()), (left, left > 0));
        }
        assert_eq!(device.arm(), Ok(Armed::Quiet));
        drop(device);

        // One that took up a record and found nothing goes on, too, though it is where rings begin.
        let memory = Memory::new(shape);
        let world = World::new(&case, &memory, &region);
        assert!(!world.start().goes_on(), "the record is new");
        assert!(world.start().goes_on(), "and now it is not");
    }
}

/// Without event indices: those say by themselves that nobody waits any more.
#[test]
fn a_queue_with_a_record_asks_for_kicks_only_before_it_sleeps() {
    for packed in [false, true] {
        let shape =
            Shape { packed, size: 8, first: 0, event_idx: false, entries: 0, when_scarce: false };
        let case = Case { shape, entries: 8, lengths: &[1], ..noisy_case(packed) };
        let memory = Memory::new(shape);
        let region = Mapping::anonymous(inflight_bytes(packed, 8)).unwrap();
        let mut world = World::new(&case, &memory, &region);
        let mut device = world.start();
        for asks in [false, true, false] {
            if asks {
                let _ = device.arm().unwrap();
            } else {
                device.disarm();
            }
            world.driver.add(&[piece(0, 0)], &[]).unwrap();
            assert_eq!(world.driver.publish(), asks, "packed {packed}");
        }
    }
}

/// A record may have room for more than the queue that is given to it.
#[test]
fn b04_more_in_flight_than_the_queue_holds_is_refused() {
    let shape =
        Shape { packed: true, size: 8, first: 0, event_idx: true, entries: 0, when_scarce: false };
    let (order, batches) = (vec![0, 1], vec![]);
    let case = Case { shape, entries: 8, lengths: &[3], order, batches, ..noisy_case(true) };
    let memory = Memory::new(shape);
    let region = Mapping::anonymous(inflight_bytes(true, 8)).unwrap();
    World::new(&case, &memory, &region).first_life();
    let start = |size| {
        let (format, base) = (Format { size, ..shape.format() }, PackedBase::after(0, size).0);
        // SAFETY: ring and region outlive the device.
        unsafe { Device::tracked(format, memory.areas(), Some(base), region.at(0), 8) }.map(drop)
    };
    let error = start(5).unwrap_err().to_string();
    assert!(error.contains("more is in flight than the queue holds"), "{error}");
    assert_eq!(start(6), Ok(()));
}

/// With nothing in flight there is nothing to clear, wherever the record says that the ring was.
#[test]
fn the_record_of_an_idle_split_queue_is_taken_up_at_any_index() {
    let case = Case { order: vec![0, 1], batches: vec![2], ..noisy_case(false) };
    let memory = Memory::new(case.shape);
    let region = Mapping::anonymous(inflight_bytes(false, case.entries)).unwrap();
    let mut world = World::new(&case, &memory, &region);
    world.first_life();
    // SAFETY: `used_idx` of the header, which nobody uses now.
    unsafe { region.at(14).cast::<u16>().write(1000) };
    world.next_life();
}
