//! The two sides of a virtqueue against each other, in the memory of one process: the same tests for
//! both formats.

use super::*;
use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

pub(super) const GUEST: u64 = 0x1_0000_0000;

/// What to test with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) packed: bool,
    pub(super) size: u16,
    pub(super) first: u16,
    pub(super) event_idx: bool,
    /// Entries of an indirect table (0: none), and whether short chains avoid it.
    pub(super) entries: u16,
    pub(super) when_scarce: bool,
}

impl Shape {
    pub(super) fn format(self) -> Format {
        let Self { packed, size, event_idx, entries, .. } = self;
        Format { packed, size, event_idx, indirect: entries > 0 }
    }
}

fn shapes() -> Vec<Shape> {
    let (split, packed) = if cfg!(miri) {
        (vec![1, 8], vec![1, 7])
    } else {
        (vec![1, 2, 4, 16, 128], vec![1, 2, 3, 5, 16, 100])
    };
    let mut shapes = Vec::new();
    for (packed, sizes) in [(false, split), (true, packed)] {
        for size in sizes {
            for event_idx in [false, true] {
                for (entries, when_scarce) in [(0, false), (5, false), (5, true)] {
                    let first = 65533;
                    shapes.push(Shape { packed, size, first, event_idx, entries, when_scarce });
                }
            }
        }
    }
    shapes
}

/// The memory of a queue and its parts.
pub(super) struct Memory {
    pub(super) mapping: Arc<Mapping>,
    pub(super) avail: usize,
    pub(super) used: usize,
    pub(super) tables: usize,
}

impl Memory {
    pub(super) fn new(shape: Shape) -> Self {
        // What a split queue needs is enough for a packed one.
        let avail = desc_bytes(shape.size).next_multiple_of(64);
        let used = (avail + avail_bytes(shape.size)).next_multiple_of(64);
        let tables = (used + used_bytes(shape.size)).next_multiple_of(64);
        let len = tables + Tables::bytes(shape.size, shape.entries);
        let mapping = Arc::new(Mapping::anonymous(len.next_multiple_of(4096)).unwrap());
        Self { mapping, avail, used, tables }
    }

    pub(super) fn areas(&self) -> Areas {
        let at = |part| self.mapping.at(part);
        Areas { desc: at(0), driver: at(self.avail), device: at(self.used) }
    }

    pub(super) fn driver(&self, shape: Shape) -> Driver {
        let tables = Tables {
            host: self.mapping.at(self.tables),
            guest: GUEST + self.tables as u64,
            entries: shape.entries,
            when_scarce: shape.when_scarce,
        };
        let tables = (shape.entries > 0).then_some(tables);
        // SAFETY: the parts lie in the mapping, which the tests keep as long as the queue.
        unsafe { Driver::new(shape.format(), self.areas(), shape.first, tables) }.unwrap()
    }

    pub(super) fn device(&self, shape: Shape) -> Device {
        let base = if shape.packed {
            PackedBase::after(shape.first, shape.size).0
        } else {
            shape.first.into()
        };
        // SAFETY: as in `driver`.
        unsafe { Device::new(shape.format(), self.areas(), Some(base)) }.unwrap()
    }

    pub(super) fn translator(&self) -> Translator {
        let len = self.mapping.len() as u64;
        let region = Region { guest: GUEST, user: 0, len, mapping: Arc::clone(&self.mapping) };
        Translator::new(Arc::new(GuestMap::new(vec![region]).unwrap()))
    }
}

pub(crate) struct Rng(u64);

impl Rng {
    /// Seeded by `RINGWAY_SEED` or by chance; the seed is printed, and shown when a test fails.
    pub(crate) fn seeded(test: &str) -> Self {
        let chance = || {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(0) | 1
        };
        let seed = if cfg!(miri) {
            42
        } else {
            std::env::var("RINGWAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(chance)
        };
        println!("{test}: RINGWAY_SEED={seed}");
        Self(seed)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 11) % bound as u64).unwrap()
    }

    pub(crate) fn piece(&mut self) -> Piece {
        Piece {
            addr: self.below(1 << 40) as u64,
            len: u32::try_from(self.below(9999)).unwrap() + 1,
        }
    }
}

fn pieces(descs: &[Desc]) -> Vec<Piece> {
    descs.iter().map(|d| Piece { addr: d.addr, len: d.len }).collect()
}

pub(super) fn rounds() -> usize {
    if cfg!(miri) { 60 } else { 60_000 }
}

/// What a device tells of itself, chain by chain.
#[test]
fn a_device_tells_where_it_is() {
    let mut rng = Rng::seeded("where");
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        assert_eq!(device.size(), shape.size);
        assert!(device.goes_on());
        // One descriptor each.
        for chains in 0..2 {
            let at = shape.first + chains;
            let base = if shape.packed { PackedBase::after(at, shape.size).0 } else { at.into() };
            assert_eq!(device.base(), base, "{shape:?}");
            assert!(!device.has_work());
            driver.add(&[rng.piece()], &[]).unwrap();
            assert!(!device.has_work(), "not published");
            let sleeps = chains == 0;
            if sleeps {
                assert_eq!(device.arm(), Ok(Armed::Quiet));
            } else {
                device.disarm();
            }
            let kick = driver.publish();
            assert!(kick == sleeps || (shape.event_idx && !sleeps), "{shape:?}");
            assert!(device.has_work());
            let (head, _) = device.pop(&mut translator).unwrap().unwrap();
            assert!(!device.has_work());
            assert_eq!(device.unpublished().count, 0);
            device.push(head, 0);
            let unpublished = device.unpublished();
            assert_eq!((unpublished.first, unpublished.count), (at % shape.size, 1), "{shape:?}");
            let _ = device.publish();
            assert_eq!(device.unpublished().count, 0);
            assert!(driver.pop_used().unwrap().is_some());
        }
        let begins = Shape { first: 0, ..shape };
        let memory = Memory::new(begins);
        assert!(!memory.device(begins).goes_on());
    }
}

/// A ring that was used comes to where rings begin again and again: a split one after 65,536 chains, a packed one every
/// two laps. What a driver has offered before there was a device is no use of it.
#[test]
fn b64_a_ring_that_was_used_does_not_begin_where_it_wraps() {
    // Of split ones the simulator would take hours.
    for shape in shapes().into_iter().filter(|shape| shape.packed || !cfg!(miri)) {
        let shape = Shape { first: 0, size: 4, ..shape };
        let memory = Memory::new(shape);
        let mut driver = memory.driver(shape);
        driver.add(&[Piece { addr: GUEST, len: 16 }], &[]).unwrap();
        let _ = driver.publish();
        let mut device = memory.device(shape);
        assert!(!device.goes_on(), "{shape:?}");
        let (mut translator, start) = (memory.translator(), device.base());
        loop {
            let (head, _) = device.pop(&mut translator).unwrap().unwrap();
            device.push(head, 1);
            let _ = device.publish();
            assert!(driver.pop_used().unwrap().is_some());
            assert!(device.goes_on(), "{shape:?}");
            if device.base() == start {
                break;
            }
            driver.add(&[Piece { addr: GUEST, len: 16 }], &[]).unwrap();
            let _ = driver.publish();
        }
        assert!(memory.device(shape).goes_on(), "{shape:?}");
    }
}

/// A record may name an indirect table that this connection has not negotiated, or one among others.
#[test]
fn b04_a_table_in_a_record_is_alone_and_negotiated() {
    let indirect = |bytes| packed::Copied {
        addr: GUEST,
        word: packed_layout::Word::new(bytes, 0, DESC_F_INDIRECT),
    };
    let shape = |entries| {
        let (packed, size, event_idx) = (true, 8, false);
        Shape { packed, size, first: 0, event_idx, entries, when_scarce: false }
    };
    for (entries, records, refused) in [
        (0, &[indirect(16)][..], true),
        (5, &[indirect(16), indirect(16)], true),
        // An empty descriptor in the table, which is read, then.
        (5, &[indirect(16)], false),
    ] {
        let shape = shape(entries);
        let memory = Memory::new(shape);
        let Device::Packed(mut device) = memory.device(shape) else { panic!("packed") };
        let mut translator = memory.translator();
        let (_, verdict) = device.retake(0, records, &mut translator);
        let wanted = if refused { ChainError::BadIndirect } else { ChainError::ZeroLength };
        assert_eq!(verdict.unwrap_err(), wanted, "{entries}");
    }
}

/// Both sides take random steps. Chains arrive as they were added, come back with the length that
/// was pushed, in any order; and whoever was told `Quiet` is notified of the next news.
#[test]
fn a09_driver_and_device_agree_for_ever() {
    let mut rng = Rng::seeded("a09");
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        let mut added: VecDeque<(u16, Vec<Piece>, usize)> = VecDeque::new();
        let mut held: Vec<(Head, u32)> = Vec::new();
        let mut pushed: VecDeque<(u16, u32)> = VecDeque::new();
        let mut visible = 0;
        let (mut device_sleeps, mut driver_sleeps_for) = (false, None);
        let mut in_flight_then: Vec<u16> = Vec::new();
        for round in 0..rounds() {
            match rng.below(8) {
                0..=2 => {
                    let max = driver.max_pieces().min(5);
                    let chain: Vec<_> = (0..=rng.below(max)).map(|_| rng.piece()).collect();
                    let (readable, writable) = chain.split_at(rng.below(chain.len() + 1));
                    let next = driver.next_head();
                    match driver.add(readable, writable) {
                        Ok(head) => {
                            assert_eq!(Some(head), next);
                            added.push_back((head, chain.clone(), readable.len()));
                        }
                        Err(e) => assert_eq!(e, NoRoom::Full, "{shape:?}"),
                    }
                }
                3 => {
                    let news = added.len() > visible;
                    let kick = driver.publish();
                    visible = added.len();
                    assert!(!(news && device_sleeps && !kick), "a lost kick, {shape:?} at {round}");
                    device_sleeps &= !kick;
                }
                4 if !device_sleeps => {
                    assert_eq!(device.has_work(), visible > 0, "{shape:?} at {round}");
                    while let Some((head, chain)) = device.pop(&mut translator).unwrap() {
                        let chain = chain.unwrap();
                        let (id, want, readable) = added.pop_front().expect("never added");
                        visible -= 1;
                        assert_eq!((head.index(), chain.readable().len()), (id, readable));
                        assert_eq!(pieces(chain.readable()), want[..readable]);
                        assert_eq!(pieces(chain.writable()), want[readable..]);
                        held.push((head, u32::try_from(round).unwrap()));
                    }
                    if rng.below(2) == 0 {
                        device_sleeps = device.arm().unwrap() == Armed::Quiet;
                    } else {
                        device.disarm();
                    }
                }
                5 if !held.is_empty() => {
                    for _ in 0..=rng.below(held.len()) {
                        let (head, len) = held.swap_remove(rng.below(held.len()));
                        pushed.push_back((head.index(), len));
                        device.push(head, len);
                    }
                    if rng.below(3) > 0 {
                        if device.publish() {
                            driver_sleeps_for = None;
                        }
                        let back = pushed.iter().filter(|(id, _)| in_flight_then.contains(id));
                        let back = back.count();
                        let due = driver_sleeps_for.is_some_and(|wanted| back >= wanted);
                        assert!(!due, "a lost call, {shape:?} at {round}");
                    }
                }
                6 | 7 if driver_sleeps_for.is_none() => {
                    while let Some(used) = driver.pop_used().unwrap() {
                        assert_eq!(Some((used.head, used.len)), pushed.pop_front());
                    }
                    let after = u16::try_from(rng.below(4)).unwrap();
                    if rng.below(2) == 0 && driver.in_flight() > 0 {
                        if driver.arm(after).unwrap() == Armed::Quiet {
                            let wanted = if shape.event_idx {
                                after.clamp(1, driver.in_flight())
                            } else {
                                1
                            };
                            driver_sleeps_for = Some(usize::from(wanted));
                            in_flight_then.clear();
                            in_flight_then.extend(added.iter().map(|chain| chain.0));
                            in_flight_then.extend(held.iter().map(|(head, _)| head.index()));
                            in_flight_then.extend(pushed.iter().map(|used| used.0));
                            assert_eq!(in_flight_then.len(), usize::from(driver.in_flight()));
                        }
                    } else {
                        driver.disarm();
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_full_queue_says_so_and_recovers() {
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        let piece = Piece { addr: GUEST, len: 512 };
        for _ in 0..4 {
            let mut count = 0;
            while let Ok(head) = driver.add(&[piece], &[]) {
                assert!(head < shape.size);
                count += 1;
            }
            assert_eq!((count, driver.in_flight()), (shape.size, shape.size));
            assert_eq!(driver.add(&[piece], &[]), Err(NoRoom::Full));
            assert_eq!(driver.next_head(), None);
            assert!(!driver.pop_used().is_ok_and(|used| used.is_some()));
            let _ = driver.publish();
            while let Some((head, chain)) = device.pop(&mut translator).unwrap() {
                chain.unwrap();
                device.push(head, 0);
            }
            let _ = device.publish();
            while driver.pop_used().unwrap().is_some() {}
        }
        let long = vec![piece; driver.max_pieces() + 1];
        let max = long.len() - 1;
        let too_long = NoRoom::TooLong { pieces: long.len(), max };
        assert_eq!(driver.add(&long, &[]), Err(too_long));
        assert_eq!(driver.add(&[], &[]), Err(NoRoom::NoPieces));
        assert!(driver.add(&long[1..], &[]).is_ok(), "{shape:?}");
    }
}

/// A word that a confused or hostile peer may leave in a ring: often one that means something.
fn noise(rng: &mut Rng) -> u16 {
    match rng.below(4) {
        0 => u16::try_from(rng.below(65536)).unwrap(),
        1 => u16::try_from(rng.below(4)).unwrap(),
        _ => [0x80, 0x8000, 0x8080, 0][rng.below(4)] | u16::try_from(rng.below(8)).unwrap(),
    }
}

/// Writes a word somewhere into the ring behind everyone's back.
fn scribble(memory: &Memory, shape: Shape, rng: &mut Rng) {
    let noise = noise(rng);
    if shape.packed {
        return scribble_packed(memory, shape, noise, rng);
    }
    let at = memory.mapping.at(rng.below(memory.tables / 2) * 2);
    // SAFETY: an aligned word of the ring. Atomic, as both sides read indices and flags.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        std::sync::atomic::AtomicU16::from_ptr(at.cast()).store(noise, Relaxed);
    }
}

/// As `scribble`, in accesses as wide as those of the ring, because Miri has no others.
fn scribble_packed(memory: &Memory, shape: Shape, noise: u16, rng: &mut Rng) {
    let shift = 16 * rng.below(4);
    // SAFETY: aligned words of the ring: half a descriptor, or an event.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        if rng.below(8) > 0 {
            let at = memory.mapping.at(8 * rng.below(2 * usize::from(shape.size)));
            let word = AtomicU64::from_ptr(at.cast());
            word.store(
                word.load(Relaxed) & !(0xffff << shift) | u64::from(noise) << shift,
                Relaxed,
            );
        } else {
            let at = memory.mapping.at([memory.avail, memory.used][rng.below(2)]);
            AtomicU32::from_ptr(at.cast()).store(u32::from(noise) << (shift % 32), Relaxed);
        }
    }
}

/// The device scribbles over all of the ring, all the time; the driver must survive, whatever
/// comes out. Mostly for Miri.
#[test]
fn noise_does_no_harm_to_the_driver() {
    let mut rng = Rng::seeded("noise_does_no_harm_to_the_driver");
    for shape in shapes() {
        let memory = Memory::new(shape);
        let mut driver = memory.driver(shape);
        for _ in 0..rounds() / 10 {
            scribble(&memory, shape, &mut rng);
            let chain = vec![rng.piece(); rng.below(4)];
            let (readable, writable) = chain.split_at(chain.len() / 2);
            let _ = driver.add(readable, writable);
            let _ = driver.publish();
            let _ = driver.pop_used();
            if rng.below(4) == 0 {
                let _ = driver.arm(2);
            }
            let _ = driver.has_used(3);
            driver.disarm();
            assert!(driver.in_flight() <= shape.size, "{shape:?}");
        }
    }
}

/// The same with a driver that scribbles now and then: no more chains are in flight than the ring
/// holds, and none has the number of another.
#[test]
fn noise_does_no_harm_to_the_device() {
    let mut rng = Rng::seeded("noise_does_no_harm_to_the_device");
    let mut all_broken = 0;
    for shape in shapes() {
        let memory = Memory::new(shape);
        let mut translator = memory.translator();
        let (mut popped, mut malformed, mut broken) = (0, 0, 0);
        for _ in 0..rounds() / 200 {
            let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
            let mut held: Vec<Head> = Vec::new();
            for _ in 0..100 {
                let chain = vec![rng.piece(); rng.below(4)];
                let (readable, writable) = chain.split_at(chain.len() / 2);
                let _ = driver.add(readable, writable);
                let _ = driver.publish();
                let _ = driver.pop_used();
                if rng.below(4) == 0 {
                    scribble(&memory, shape, &mut rng);
                }
                if rng.below(2) == 0 && !held.is_empty() {
                    device.push(held.swap_remove(rng.below(held.len())), 7);
                }
                match device.pop(&mut translator) {
                    Ok(Some((head, chain))) => {
                        malformed += u32::from(chain.is_err());
                        assert!(!held.contains(&head) && head.index() < shape.size);
                        held.push(head);
                        popped += 1;
                        assert!(held.len() <= shape.size.into());
                    }
                    Ok(None) => {
                        let _ = (device.publish(), device.arm());
                        device.disarm();
                    }
                    Err(_) => {
                        broken += 1;
                        break;
                    }
                }
            }
        }
        println!("{shape:?}: {popped} chains, {malformed} malformed, {broken} queues broken");
        assert!(cfg!(miri) || popped > 300, "the queue is stuck");
        all_broken += broken;
    }
    assert!(cfg!(miri) || all_broken > 100, "the noise does not reach deep code");
}

/// Two threads, each asleep unless it was notified: every chain comes back, so no notification is
/// ever lost.
#[test]
fn no_wakeup_is_lost_between_threads() {
    use std::sync::mpsc;
    for shape in shapes().into_iter().filter(|shape| shape.size > 1) {
        let memory = Memory::new(shape);
        let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
        let mut translator = memory.translator();
        let (kick, kicked) = mpsc::channel::<()>();
        let (call, called) = mpsc::channel::<()>();
        let total = if cfg!(miri) { 40 } else { 20_000 };
        let serve = move || {
            let mut served = 0;
            while served < total {
                while let Some((head, chain)) = device.pop(&mut translator).unwrap() {
                    let first = chain.unwrap().readable()[0];
                    device.push(head, first.len);
                    served += 1;
                }
                if device.publish() {
                    let _ = call.send(());
                }
                if served < total && device.arm().unwrap() == Armed::Quiet {
                    kicked.recv().unwrap();
                }
                device.disarm();
            }
        };
        let server = std::thread::spawn(serve);
        let (mut sent, mut back, mut sum) = (0u32, 0, 0u64);
        while back < total {
            let len = sent + 1;
            while sent < total && driver.add(&[Piece { addr: GUEST, len }], &[]).is_ok() {
                sent += 1;
                if sent % 3 == 0 {
                    break;
                }
            }
            if driver.publish() {
                let _ = kick.send(());
            }
            while let Some(used) = driver.pop_used().unwrap() {
                (back, sum) = (back + 1, sum + u64::from(used.len));
            }
            if back < total && driver.in_flight() > 0 {
                if driver.arm(2).unwrap() == Armed::Quiet {
                    called.recv().unwrap();
                }
                driver.disarm();
            }
        }
        server.join().unwrap();
        assert!(sum >= u64::from(total), "{shape:?}");
    }
}

/// Whatever was in the used ring before, a device must not take it for what it has written itself.
#[test]
fn the_first_answer_is_written_whatever_the_used_ring_held() {
    let shape = Shape {
        packed: false,
        size: 4,
        first: 0,
        event_idx: false,
        entries: 0,
        when_scarce: false,
    };
    let memory = Memory::new(shape);
    let mut driver = memory.driver(shape);
    // Flags and index (4 bytes) stay.
    for word in 1..used_bytes(shape.size) / 4 - 1 {
        let at = memory.mapping.at(memory.used + 4 * word);
        // SAFETY: an aligned word of the used ring, which nobody else has by now.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU32::from_ptr(at.cast()).store(3, Relaxed);
        }
    }
    let mut device = memory.device(shape);
    let head = driver.add(&[Piece { addr: GUEST, len: 512 }], &[]).unwrap();
    assert_eq!(head, 0, "the answer of which all is zero");
    let _ = driver.publish();
    let (head, _) = device.pop(&mut memory.translator()).unwrap().unwrap();
    device.push(head, 0);
    let _ = device.publish();
    let used = driver.pop_used().unwrap().map(|used| (used.head, used.len));
    assert_eq!(used, Some((0, 0)));
}

const PIECE: Piece = Piece { addr: GUEST, len: 512 };

/// Both sides of a queue whose device has read one good chain, and answered it.
fn after_a_chain_of_five(memory: &Memory, shape: Shape) -> (Driver, Device, Translator) {
    let (mut driver, mut device) = (memory.driver(shape), memory.device(shape));
    let mut translator = memory.translator();
    driver.add(&[PIECE; 5], &[]).unwrap();
    let _ = driver.publish();
    let (head, chain) = device.pop(&mut translator).unwrap().unwrap();
    assert!(chain.is_ok());
    assert_eq!(device.walked(), 5, "{shape:?}");
    device.push(head, 0);
    (driver, device, translator)
}

#[test]
fn a21_what_a_chain_has_cost_to_read_is_known_even_if_it_is_refused() {
    for packed in [false, true] {
        let shape =
            Shape { packed, size: 8, first: 0, event_idx: false, entries: 5, when_scarce: false };
        let memory = Memory::new(shape);
        let (mut driver, mut device, mut translator) = after_a_chain_of_five(&memory, shape);
        // The last entry of the table has no bytes.
        let head = driver.add(&[PIECE; 5], &[]).unwrap();
        let table = memory.tables + Tables::bytes(head, shape.entries);
        let len = memory.mapping.at(table + 4 * 16 + 8);
        // SAFETY: an aligned word of the table, which nobody reads by now.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU32::from_ptr(len.cast()).store(0, Relaxed);
        }
        let _ = driver.publish();
        let (head, chain) = device.pop(&mut translator).unwrap().unwrap();
        assert_eq!(chain.err(), Some(ChainError::ZeroLength));
        assert_eq!(device.walked(), 5, "packed: {packed}: four, and the one that was refused");
        device.push(head, 0);
    }
}

/// Without a table, where the descriptors of a chain lie in the ring itself.
#[test]
fn a21_a_refused_chain_in_the_ring_does_not_count_the_one_before_it() {
    for (pieces, bad) in [(1, 0), (3, 0), (3, 1), (3, 2)] {
        let shape = Shape {
            packed: true,
            size: 8,
            first: 0,
            event_idx: false,
            entries: 0,
            when_scarce: false,
        };
        let memory = Memory::new(shape);
        let (mut driver, mut device, mut translator) = after_a_chain_of_five(&memory, shape);
        driver.add(&[PIECE; 3][..pieces], &[]).unwrap();
        let _ = driver.publish();
        // One of its descriptors has no bytes: the length is the lower half of a descriptor's second word.
        // SAFETY: an aligned word of the ring, which nobody reads by now.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            let word = AtomicU64::from_ptr(memory.mapping.at((5 + bad) * 16 + 8).cast());
            word.store(word.load(Relaxed) & !0xffff_ffff, Relaxed);
        }
        let (head, chain) = device.pop(&mut translator).unwrap().unwrap();
        assert_eq!(chain.err(), Some(ChainError::ZeroLength));
        assert_eq!(device.walked(), pieces, "descriptor {bad} of {pieces}");
        device.push(head, 0);
    }
}
