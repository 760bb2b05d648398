//! What is special about packed queues, seen from both sides; the rest is in `virtqueue/tests.rs`.

use super::*;
use crate::virtqueue::packed::PackedDevice;
use crate::virtqueue::packed_layout::{DESC_F_AVAIL, DESC_F_USED};
use crate::virtqueue::tests::{GUEST, Memory, Shape};
use crate::virtqueue::{Broken, ChainError, Device, Driver};
use ringway_core::mem::Translator;

const PIECE: Piece = Piece { addr: GUEST, len: 512 };
/// The marks of a descriptor made available, and used, in the first lap.
const AVAIL: u16 = DESC_F_AVAIL;
const USED: u16 = DESC_F_AVAIL | DESC_F_USED;

/// A queue, its memory, and both sides.
struct Scene {
    memory: Memory,
    ring: PackedMemory,
    driver: PackedDriver,
    device: PackedDevice,
    translator: Translator,
}

fn scene(size: u16, event_idx: bool, entries: u16) -> Scene {
    let shape = Shape { packed: true, size, first: 0, event_idx, entries, when_scarce: false };
    let memory = Memory::new(shape);
    let (Driver::Packed(driver), Device::Packed(device)) =
        (memory.driver(shape), memory.device(shape))
    else {
        unreachable!("the shape says packed")
    };
    let (ring, translator) = (driver.ring, memory.translator());
    Scene { memory, ring, driver, device, translator }
}

impl Scene {
    /// Writes a descriptor behind everyone's back.
    fn poke(&self, index: u16, addr: u64, len: u32, id: u16, flags: u16) {
        // SAFETY: a descriptor of the ring.
        unsafe { self.ring.addr(index).write_volatile(addr) };
        self.ring.word(index).store(Word::new(len, id, flags).0, Release);
    }

    /// The next chain's id and how many descriptors it has.
    #[allow(clippy::type_complexity)]
    fn pop(&mut self) -> Result<Option<(u16, Result<usize, ChainError>)>, Broken> {
        let popped = self.device.pop(&mut self.translator)?;
        Ok(popped.map(|(head, chain)| {
            (head.index(), chain.map(|c| c.readable().len() + c.writable().len()))
        }))
    }

    /// A chain is popped with this error and can be returned; the next one is fine.
    fn fails(&mut self, id: u16, why: ChainError) {
        let popped = self.device.pop(&mut self.translator).unwrap();
        let (head, chain) = popped.expect("a chain");
        assert_eq!((head.index(), chain.map(drop)), (id, Err(why)));
        self.device.push(head, 0);
        let _ = self.device.publish();
    }
}

#[test]
fn verify_spec_2_8_6_a_chain_is_as_long_as_next_says_and_used_once() {
    let mut s = scene(4, false, 0);
    assert_eq!(s.driver.add(&[PIECE], &[PIECE; 2]), Ok(0));
    let word = |index: u16| Word(s.ring.word(index).load(Relaxed));
    assert_eq!(word(0).flags(), 0, "the first mark is held back");
    assert_eq!(word(1).flags(), AVAIL | DESC_F_NEXT | DESC_F_WRITE);
    let _ = s.driver.publish();
    assert_eq!(word(0).flags(), AVAIL | DESC_F_NEXT);
    assert_eq!(word(2).flags(), AVAIL | DESC_F_WRITE);
    let (head, _) = s.device.pop(&mut s.translator).unwrap().unwrap();
    s.device.push(head, 99);
    assert_eq!(word(0).flags(), AVAIL | DESC_F_NEXT, "not before it is published");
    let _ = s.device.publish();
    assert_eq!(word(0), Word::new(99, 0, USED | DESC_F_WRITE), "one used descriptor");
    assert_eq!(word(2).flags(), AVAIL | DESC_F_WRITE, "the others are skipped");
    assert_eq!(s.driver.pop_used(), Ok(Some(Used { head: 0, len: 99 })));
    // The next chain goes over the end of the ring.
    assert_eq!(s.driver.add(&[PIECE], &[PIECE; 2]), Ok(0));
    let _ = s.driver.publish();
    assert_eq!(word(3).flags(), AVAIL | DESC_F_NEXT);
    assert_eq!(word(0).flags(), DESC_F_USED | DESC_F_NEXT | DESC_F_WRITE, "the second lap");
    assert_eq!(s.pop(), Ok(Some((0, Ok(3)))));
    assert_eq!(s.device.base(), PackedBase(0x8003_0002));
}

#[test]
fn verify_spec_2_8_7_tables_ignore_all_flags_but_write() {
    let mut s = scene(8, false, 5);
    assert_eq!(s.driver.add(&[PIECE; 2], &[PIECE]), Ok(0));
    let table = s.memory.mapping.at(s.memory.tables);
    for (entry, flags) in [(0, 5u16), (1, 0x8080), (2, 2 | 4)] {
        // SAFETY: the flags of an entry of the table, aligned to 2 bytes.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            table.add(16 * entry + 14).cast::<u16>().write_volatile(flags);
        }
    }
    let _ = s.driver.publish();
    let (_, chain) = s.device.pop(&mut s.translator).unwrap().unwrap();
    let chain = chain.unwrap();
    assert_eq!((chain.readable().len(), chain.writable().len()), (2, 1));
}

#[test]
fn a_batch_becomes_visible_at_once() {
    let mut s = scene(16, true, 0);
    for _ in 0..4 {
        s.driver.add(&[PIECE], &[PIECE]).unwrap();
    }
    assert_eq!(s.pop(), Ok(None));
    assert!(s.driver.publish(), "a new device wants to be told of everything");
    let mut heads = Vec::new();
    while let Some((head, _)) = s.device.pop(&mut s.translator).unwrap() {
        heads.push(head);
    }
    assert_eq!(s.driver.arm(3), Ok(Armed::Quiet));
    // Out of order, in two batches.
    for at in [3, 0] {
        s.device.push(heads.remove(at), 1);
        assert_eq!(s.driver.pop_used(), Ok(None));
    }
    assert!(!s.device.publish(), "three were asked for");
    assert_eq!((s.driver.has_used(2), s.driver.has_used(3)), (Ok(true), Ok(false)));
    heads.drain(..).for_each(|head| s.device.push(head, 1));
    assert!(s.device.publish());
    let back: Vec<_> =
        std::iter::from_fn(|| s.driver.pop_used().unwrap()).map(|used| used.head).collect();
    assert_eq!(back, [3, 0, 1, 2]);
}

/// The place where the device is to call is counted in descriptors: a chain that came back already may
/// have been longer than what was counted for it.
#[test]
fn a_long_chain_that_came_back_does_not_hide_the_call() {
    let mut s = scene(16, true, 0);
    for pieces in [5, 1, 1] {
        s.driver.add(&vec![PIECE; pieces], &[]).unwrap();
    }
    assert!(s.driver.publish());
    let mut heads = Vec::new();
    while let Some((head, chain)) = s.device.pop(&mut s.translator).unwrap() {
        chain.unwrap();
        heads.push(head);
    }
    let mut heads = heads.into_iter();
    s.device.push(heads.next().unwrap(), 0);
    assert!(!s.device.publish(), "nobody waits yet");
    assert_eq!(s.driver.arm(2), Ok(Armed::Quiet));
    s.device.push(heads.next().unwrap(), 0);
    assert!(s.device.publish(), "this is the second one");
    assert_eq!(s.driver.arm(2), Ok(Armed::WorkArrived));
    assert_eq!(s.driver.arm(3), Ok(Armed::Quiet));
    s.device.push(heads.next().unwrap(), 0);
    assert!(s.device.publish());
    assert_eq!(s.driver.has_used(3), Ok(true));
}

#[test]
fn a06_an_id_in_flight_is_refused() {
    let mut s = scene(8, false, 0);
    s.poke(0, GUEST, 512, 5, AVAIL);
    s.poke(1, GUEST, 512, 5, AVAIL);
    assert_eq!(s.pop(), Ok(Some((5, Ok(1)))));
    assert_eq!(s.pop(), Err(Broken::IdInFlight(5)));
    s.poke(1, GUEST, 512, 8, AVAIL);
    assert_eq!(s.pop(), Err(Broken::IdOutOfRange(8)));
}

#[test]
fn a09_more_than_the_ring_holds_is_refused() {
    let mut s = scene(4, false, 0);
    // A chain that goes all around the ring and on: each descriptor is marked for its lap.
    for index in 0..4 {
        s.poke(index, GUEST, 512, 0, AVAIL | DESC_F_NEXT);
    }
    assert_eq!(s.pop(), Err(Broken::HalfChain(0)), "the second lap is not marked");
    let mut s = scene(4, false, 0);
    for index in 0..4 {
        s.poke(index, GUEST, 512, index, AVAIL);
        assert_eq!(s.pop(), Ok(Some((index, Ok(1)))));
    }
    s.poke(0, GUEST, 512, 0, DESC_F_USED);
    assert_eq!(s.pop(), Err(Broken::Overrun(4)), "in flight, all of them");
    // Returned, but not shown to the driver yet: still not the driver's.
    s.device.push(crate::virtqueue::Head(2), 0);
    assert_eq!(s.pop(), Err(Broken::Overrun(4)));
    let _ = s.device.publish();
    s.poke(0, GUEST, 512, 2, DESC_F_USED);
    assert_eq!(s.pop(), Ok(Some((2, Ok(1)))));
}

#[test]
fn a09_half_a_chain_is_refused() {
    let mut s = scene(4, false, 0);
    s.poke(0, GUEST, 512, 0, AVAIL | DESC_F_NEXT);
    assert_eq!(s.pop(), Err(Broken::HalfChain(1)));
    s.poke(1, GUEST, 512, 3, AVAIL);
    assert_eq!(s.pop(), Ok(Some((3, Ok(2)))), "the id is that of the last descriptor");
}

#[test]
fn a04_malformed_chains_come_back_alone() {
    let table = |s: &Scene| GUEST + s.memory.tables as u64;
    let bad = ChainError::BadIndirect;
    for (len, flags) in
        [(0, AVAIL | DESC_F_INDIRECT), (47, AVAIL | DESC_F_INDIRECT), (1 << 20, AVAIL | 4)]
    {
        let mut s = scene(8, false, 5);
        s.poke(0, table(&s), len, 1, flags);
        s.fails(1, bad);
        s.poke(1, GUEST, 512, 1, AVAIL);
        assert_eq!(s.pop(), Ok(Some((1, Ok(1)))));
    }
    // With NEXT, or at the end of a chain: the whole chain fails, and is as long as it says.
    for flags in [[4 | 1, 0], [1, 4], [4 | 1, 4]] {
        let mut s = scene(8, false, 5);
        s.poke(0, table(&s), 16, 7, AVAIL | flags[0]);
        s.poke(1, table(&s), 16, 2, AVAIL | flags[1]);
        s.fails(2, bad);
        s.poke(2, GUEST, 512, 7, AVAIL);
        assert_eq!(s.pop(), Ok(Some((7, Ok(1)))));
    }
    let mut s = scene(8, false, 5);
    s.poke(0, 16, 48, 0, AVAIL | DESC_F_INDIRECT);
    s.fails(0, ChainError::TableUnmapped);
    // Not negotiated.
    let mut s = scene(8, false, 0);
    s.poke(0, GUEST, 48, 0, AVAIL | DESC_F_INDIRECT);
    s.fails(0, bad);
}

#[test]
fn a02_a03_a12_each_descriptor_is_judged_and_the_end_is_found() {
    let cases = [
        ([(0, 0), (512, 2)], ChainError::ZeroLength),
        ([(512, 0), (0, 2)], ChainError::ZeroLength),
        ([(u32::MAX, 0), (1, 2)], ChainError::TooManyBytes),
        ([(512, 2), (512, 0)], ChainError::ReadableAfterWritable),
    ];
    for (descs, why) in cases {
        let mut s = scene(4, false, 0);
        s.poke(1, GUEST, descs[1].0, 3, AVAIL | descs[1].1);
        s.poke(0, GUEST, descs[0].0, 1, AVAIL | descs[0].1 | DESC_F_NEXT);
        s.fails(3, why);
        s.poke(2, GUEST, 1, 3, AVAIL);
        assert_eq!(s.pop(), Ok(Some((3, Ok(1)))), "the queue goes on");
    }
}

#[test]
fn a_hostile_device_gets_an_error_and_nothing_else() {
    let mut s = scene(4, true, 0);
    assert_eq!(s.driver.add(&[PIECE], &[PIECE]), Ok(0));
    s.poke(0, 0, 0, 0, USED);
    assert_eq!(s.driver.pop_used(), Ok(None), "it was not even shown");
    let _ = s.driver.publish();
    for id in [4, 65535] {
        s.poke(0, 0, 0, id, USED);
        assert_eq!(s.driver.pop_used(), Err(DeviceFault::IdOutOfRange(id.into())));
    }
    s.poke(0, 0, 0, 1, USED);
    assert_eq!(s.driver.pop_used(), Err(DeviceFault::NotInFlight(1)));
    assert_eq!(s.driver.add(&[PIECE], &[]), Ok(1));
    let _ = s.driver.publish();
    s.poke(0, 0, u32::MAX, 0, USED);
    s.poke(2, 0, 0, 0, USED);
    assert_eq!(s.driver.pop_used(), Ok(Some(Used { head: 0, len: u32::MAX })));
    assert_eq!(s.driver.pop_used(), Err(DeviceFault::NotInFlight(0)), "the same chain twice");
    assert_eq!(s.driver.in_flight(), 1);
}

#[test]
fn a_new_ring_at_base_zero_is_new() {
    let shape =
        Shape { packed: true, size: 4, first: 0, event_idx: false, entries: 0, when_scarce: false };
    let memory = Memory::new(shape);
    let Driver::Packed(driver) = memory.driver(shape) else { unreachable!() };
    let at = memory.areas();
    let at = PackedAddresses { desc: at.desc, driver: at.driver, device: at.device };
    // SAFETY: the parts of a queue of this size, which `memory` keeps.
    let device = |base| unsafe { PackedDevice::new(4, at, base, false, false) };
    assert_eq!(device(PackedBase(0)).unwrap().base(), PackedBase::START);
    driver.ring.word(0).store(Word::new(0, 0, USED).0, Relaxed);
    assert_eq!(device(PackedBase(0)).unwrap().base(), PackedBase(0), "it has been used for a lap");
    assert!(device(PackedBase(0x8004_8004)).is_err());
}

#[test]
fn tables_are_used_as_asked_for() {
    let shape =
        Shape { packed: true, size: 16, first: 0, event_idx: true, entries: 8, when_scarce: true };
    let memory = Memory::new(shape);
    let Driver::Packed(mut driver) = memory.driver(shape) else { unreachable!() };
    for (pieces, free, why) in [
        (3, 13, "three descriptors"),
        (4, 12, "a table: the chain is long"),
        (3, 9, "three descriptors"),
        (3, 8, "a table: half of the ring is taken"),
    ] {
        driver.add(&vec![PIECE; pieces - 1], &[PIECE]).unwrap();
        assert_eq!(driver.free, free, "{why}");
    }
    for _ in 0..8 {
        driver.add(&[PIECE], &[PIECE; 2]).unwrap();
    }
    assert_eq!(driver.add(&[PIECE], &[PIECE; 2]), Err(NoRoom::Full));
}
