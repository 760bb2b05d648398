//! What is special about the driver side of a split queue; the rest is in `virtqueue/tests.rs`.

use super::*;
use crate::virtqueue::Driver;
use crate::virtqueue::tests::{GUEST, Memory, Shape};

fn driver(memory: &Memory, shape: Shape) -> SplitDriver {
    match memory.driver(shape) {
        Driver::Split(driver) => driver,
        Driver::Packed(_) => unreachable!("the shape says split"),
    }
}

/// Writes to the ring memory behind everyone's back, as a hostile peer could.
fn poke_used(memory: &Memory, entry: usize, elem: UsedElem) {
    let at = memory.mapping.at(memory.used + 4 + 8 * entry);
    // SAFETY: the entry lies in the used ring, aligned to 4 bytes.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        at.cast::<UsedElem>().write_volatile(elem);
    }
}

fn poke_used_idx(memory: &Memory, idx: u16) {
    let at = memory.mapping.at(memory.used + 2);
    // SAFETY: the used index lies there, aligned to 2 bytes.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        std::sync::atomic::AtomicU16::from_ptr(at.cast()).store(idx, Release);
    }
}

#[test]
fn short_chains_go_direct_while_there_is_room() {
    let shape =
        Shape { packed: false, size: 16, first: 0, event_idx: true, entries: 8, when_scarce: true };
    let memory = Memory::new(shape);
    let mut driver = driver(&memory, shape);
    let piece = Piece { addr: GUEST, len: 512 };
    let free = |driver: &SplitDriver| driver.free_count;
    driver.add(&[piece], &[piece; 2]).unwrap();
    assert_eq!(free(&driver), 13, "three descriptors");
    driver.add(&[piece; 2], &[piece; 2]).unwrap();
    assert_eq!(free(&driver), 12, "a table: the chain is long");
    driver.add(&[piece], &[piece; 2]).unwrap();
    driver.add(&[piece], &[piece; 2]).unwrap();
    assert_eq!(free(&driver), 8, "a table: half of the ring is taken");
    for _ in 0..8 {
        driver.add(&[piece], &[piece; 2]).unwrap();
    }
    assert_eq!(driver.add(&[piece], &[piece; 2]), Err(NoRoom::Full));
}

#[test]
fn a_hostile_device_gets_an_error_and_nothing_else() {
    let shape =
        Shape { packed: false, size: 4, first: 7, event_idx: true, entries: 0, when_scarce: false };
    let piece = Piece { addr: GUEST, len: 512 };
    let queue = || {
        let memory = Memory::new(shape);
        let mut driver = driver(&memory, shape);
        assert_eq!(driver.add(&[piece], &[piece]), Ok(0));
        let _ = driver.publish();
        (memory, driver)
    };

    let (memory, mut driver) = queue();
    poke_used_idx(&memory, 9);
    let jump = DeviceFault::IndexJump { from: 7, to: 9, in_flight: 1 };
    assert_eq!(driver.pop_used(), Err(jump));
    assert_eq!(driver.arm(1), Err(jump), "it is reported by every look");
    poke_used_idx(&memory, 6);
    assert!(matches!(driver.pop_used(), Err(DeviceFault::IndexJump { .. })));

    for id in [4, 65536, u32::MAX] {
        let (memory, mut driver) = queue();
        poke_used(&memory, 3, UsedElem { id, len: 0 });
        poke_used_idx(&memory, 8);
        assert_eq!(driver.pop_used(), Err(DeviceFault::IdOutOfRange(id)));
        assert_eq!(driver.pop_used(), Err(DeviceFault::IdOutOfRange(id)));
    }
    // In the middle of a chain, or free.
    for id in [1, 2] {
        let (memory, mut driver) = queue();
        poke_used(&memory, 3, UsedElem { id: u32::from(id), len: 0 });
        poke_used_idx(&memory, 8);
        assert_eq!(driver.pop_used(), Err(DeviceFault::NotInFlight(id)));
    }
    // The same chain twice.
    let (memory, mut driver) = queue();
    assert_eq!(driver.add(&[piece], &[]), Ok(2));
    let _ = driver.publish();
    poke_used(&memory, 3, UsedElem { id: 0, len: u32::MAX });
    poke_used(&memory, 0, UsedElem { id: 0, len: 0 });
    poke_used_idx(&memory, 9);
    assert_eq!(driver.pop_used(), Ok(Some(Used { head: 0, len: u32::MAX })));
    assert_eq!(driver.pop_used(), Err(DeviceFault::NotInFlight(0)));
}
