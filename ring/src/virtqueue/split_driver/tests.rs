//! The two sides of a split virtqueue against each other, in the memory of one process.

use super::*;
use crate::virtqueue::{Head, SplitDevice, avail_bytes, desc_bytes, used_bytes};
use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use std::collections::VecDeque;
use std::sync::Arc;

const GUEST: u64 = 0x1_0000_0000;

/// What to test with.
#[derive(Clone, Copy, Debug)]
struct Shape {
    size: u16,
    first: u16,
    event_idx: bool,
    /// Entries of an indirect table (0: none), and whether short chains avoid it.
    entries: u16,
    when_scarce: bool,
}

fn shapes() -> impl Iterator<Item = Shape> {
    let sizes = if cfg!(miri) { vec![1, 8] } else { vec![1, 2, 4, 16, 128] };
    sizes.into_iter().flat_map(|size| {
        [false, true].into_iter().flat_map(move |event_idx| {
            [(0, false), (5, false), (5, true)].into_iter().map(move |(entries, when_scarce)| {
                Shape { size, first: 65533, event_idx, entries, when_scarce }
            })
        })
    })
}

/// The memory of a queue and its parts.
struct Memory {
    mapping: Arc<Mapping>,
    avail: usize,
    used: usize,
    tables: usize,
}

impl Memory {
    fn new(shape: Shape) -> Self {
        let avail = desc_bytes(shape.size);
        let used = (avail + avail_bytes(shape.size)).next_multiple_of(64);
        let tables = (used + used_bytes(shape.size)).next_multiple_of(64);
        let len = tables + Tables::bytes(shape.size, shape.entries);
        let mapping = Arc::new(Mapping::anonymous(len.next_multiple_of(4096)).unwrap());
        Self { mapping, avail, used, tables }
    }

    fn addresses(&self) -> SplitAddresses {
        SplitAddresses {
            desc: self.mapping.at(0),
            avail: self.mapping.at(self.avail),
            used: self.mapping.at(self.used),
        }
    }

    fn driver(&self, shape: Shape) -> SplitDriver {
        let tables = Tables {
            host: self.mapping.at(self.tables),
            guest: GUEST + self.tables as u64,
            entries: shape.entries,
            when_scarce: shape.when_scarce,
        };
        let tables = (shape.entries > 0).then_some(tables);
        // SAFETY: the parts lie in the mapping, which the tests keep as long as the queue.
        unsafe {
            SplitDriver::new(shape.size, self.addresses(), shape.first, shape.event_idx, tables)
        }
        .unwrap()
    }

    fn device(&self, shape: Shape) -> SplitDevice {
        let (event_idx, indirect) = (shape.event_idx, shape.entries > 0);
        // SAFETY: as in `driver`.
        unsafe { SplitDevice::new(shape.size, self.addresses(), shape.first, event_idx, indirect) }
            .unwrap()
    }

    fn translator(&self) -> Translator {
        let len = self.mapping.len() as u64;
        let region = Region { guest: GUEST, user: 0, len, mapping: Arc::clone(&self.mapping) };
        Translator::new(Arc::new(GuestMap::new(vec![region]).unwrap()))
    }

    /// Writes to the ring memory behind everyone's back, as a hostile peer could.
    fn poke_used(&self, entry: usize, elem: UsedElem) {
        let at = self.mapping.at(self.used + 4 + 8 * entry);
        // SAFETY: the entry lies in the used ring, aligned to 4 bytes.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            at.cast::<UsedElem>().write_volatile(elem);
        }
    }

    fn poke_used_idx(&self, idx: u16) {
        let at = self.mapping.at(self.used + 2);
        // SAFETY: the used index lies there, aligned to 2 bytes.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            std::sync::atomic::AtomicU16::from_ptr(at.cast()).store(idx, Release);
        }
    }
}

struct Rng(u64);

impl Rng {
    /// Seeded by `RINGWAY_SEED` or by chance; the seed is printed, and shown when a test fails.
    fn seeded(test: &str) -> Self {
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
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 11) % bound as u64).unwrap()
    }

    fn piece(&mut self) -> Piece {
        Piece {
            addr: self.below(1 << 40) as u64,
            len: u32::try_from(self.below(9999)).unwrap() + 1,
        }
    }
}

fn pieces(descs: &[Desc]) -> Vec<Piece> {
    descs.iter().map(|d| Piece { addr: d.addr, len: d.len }).collect()
}

fn rounds() -> usize {
    if cfg!(miri) { 60 } else { 60_000 }
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
                        let call = device.publish();
                        if driver_sleeps_for.is_some_and(|wanted| pushed.len() >= wanted) {
                            assert!(call, "a lost call, {shape:?} at {round}");
                            driver_sleeps_for = None;
                        }
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

#[test]
fn short_chains_go_direct_while_there_is_room() {
    let shape = Shape { size: 16, first: 0, event_idx: true, entries: 8, when_scarce: true };
    let memory = Memory::new(shape);
    let mut driver = memory.driver(shape);
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
    let shape = Shape { size: 4, first: 7, event_idx: true, entries: 0, when_scarce: false };
    let piece = Piece { addr: GUEST, len: 512 };
    let queue = || {
        let memory = Memory::new(shape);
        let mut driver = memory.driver(shape);
        assert_eq!(driver.add(&[piece], &[piece]), Ok(0));
        let _ = driver.publish();
        (memory, driver)
    };

    let (memory, mut driver) = queue();
    memory.poke_used_idx(9);
    let jump = DeviceFault::IndexJump { from: 7, to: 9, in_flight: 1 };
    assert_eq!(driver.pop_used(), Err(jump));
    assert_eq!(driver.arm(1), Err(jump), "it is reported by every look");
    memory.poke_used_idx(6);
    assert!(matches!(driver.pop_used(), Err(DeviceFault::IndexJump { .. })));

    for id in [4, 65536, u32::MAX] {
        let (memory, mut driver) = queue();
        memory.poke_used(3, UsedElem { id, len: 0 });
        memory.poke_used_idx(8);
        assert_eq!(driver.pop_used(), Err(DeviceFault::IdOutOfRange(id)));
        assert_eq!(driver.pop_used(), Err(DeviceFault::IdOutOfRange(id)));
    }
    // In the middle of a chain, or free.
    for id in [1, 2] {
        let (memory, mut driver) = queue();
        memory.poke_used(3, UsedElem { id: u32::from(id), len: 0 });
        memory.poke_used_idx(8);
        assert_eq!(driver.pop_used(), Err(DeviceFault::NotInFlight(id)));
    }
    // The same chain twice.
    let (memory, mut driver) = queue();
    assert_eq!(driver.add(&[piece], &[]), Ok(2));
    let _ = driver.publish();
    memory.poke_used(3, UsedElem { id: 0, len: u32::MAX });
    memory.poke_used(0, UsedElem { id: 0, len: 0 });
    memory.poke_used_idx(9);
    assert_eq!(driver.pop_used(), Ok(Some(Used { head: 0, len: u32::MAX })));
    assert_eq!(driver.pop_used(), Err(DeviceFault::NotInFlight(0)));
}

/// The device scribbles over all of the ring, all the time; the driver must survive, whatever
/// comes out. Mostly for Miri.
#[test]
fn noise_in_the_ring_does_no_harm() {
    let mut rng = Rng::seeded("noise");
    for shape in shapes() {
        let memory = Memory::new(shape);
        let mut driver = memory.driver(shape);
        let end = memory.tables;
        for _ in 0..rounds() / 10 {
            let at = memory.mapping.at(rng.below(end / 2) * 2);
            let noise = if rng.below(2) == 0 { rng.below(65536) } else { rng.below(4) };
            let noise = u16::try_from(noise).unwrap();
            // SAFETY: an aligned word of the ring. Atomic, as the driver reads the indices.
            #[allow(clippy::cast_ptr_alignment)]
            unsafe {
                std::sync::atomic::AtomicU16::from_ptr(at.cast()).store(noise, Relaxed);
            }
            let chain = vec![rng.piece(); rng.below(4)];
            let (readable, writable) = chain.split_at(chain.len() / 2);
            let _ = driver.add(readable, writable);
            let _ = driver.publish();
            let _ = driver.pop_used();
            if rng.below(4) == 0 {
                let _ = driver.arm(2);
            }
            driver.disarm();
            assert!(driver.free_count <= u32::from(shape.size) && driver.in_flight() <= shape.size);
        }
    }
}

/// Two threads, each asleep unless it was notified: every chain comes back, so no notification is
/// ever lost.
#[test]
fn no_wakeup_is_lost_between_threads() {
    use std::sync::mpsc;
    for shape in shapes().filter(|shape| shape.size > 1) {
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
