//! Merged requests: one operation for several, and whatever befalls it befalls none of them more
//! than it must. Rows A20, C1, C2, C5 and C7 of docs/hazards.md.

use crate::bench::{Ask, Bench, Memory, Place, SECTOR, Surface, UNTOUCHED, engine};
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{CacheMode, SchedulerMode};
use ringway_testkit::{Lack, Rng, pattern};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

const LEN: u64 = 4096;
const COUNT: u64 = 8;
/// Where the neighbours begin: others' data lies on both sides.
const FIRST: u64 = 5 * LEN;
const CAPACITY: u64 = 32 * LEN;

type Seen = (IoOp, u64, u64, usize);

/// What the engine was asked, and what is to befall it.
#[derive(Default)]
struct Watch {
    seen: Vec<Seen>,
    fault: Option<(Fault, ByteRange, u32)>,
}

type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;

struct Scene {
    name: &'static str,
    place: Place,
    bench: Bench<Faulty<Box<dyn Engine>, Choice>>,
    watch: Arc<Mutex<Watch>>,
    memory: Memory,
    /// What is on the disk.
    model: Vec<u8>,
}

/// Calls `test` with every engine that moves bytes, through the page cache and past it.
fn everywhere(mut test: impl FnMut(&mut Scene)) {
    for surface in [Surface::Cached, Surface::Direct] {
        let engines = ["threads", "io_uring", "linux-aio"];
        for name in engines.into_iter().filter(|name| surface.takes(name)) {
            match Scene::new(name, surface) {
                Ok(mut scene) => test(&mut scene),
                Err(lack) => lack.skip(),
            }
        }
    }
}

impl Scene {
    fn new(name: &'static str, surface: Surface) -> Result<Self, Lack> {
        let place = Place::new(surface, CAPACITY)?.by(SchedulerMode::Request);
        let watch: Arc<Mutex<Watch>> = Arc::default();
        let seer = Arc::clone(&watch);
        let choose: Choice = Box::new(move |io| {
            let mut watch = seer.lock().unwrap();
            watch.seen.push((io.op, io.offset, io.len, io.memory.segments().len()));
            let (fault, target, times) = watch.fault.as_mut()?;
            let hit = ByteRange::new(io.offset, io.len)?.overlaps(*target) && *times > 0;
            *times -= u32::from(hit);
            hit.then_some(*fault)
        });
        let inner = Faulty::new(engine(name, 64)?, surface.granule(), choose);
        let mut bench = Bench::new(inner, place.open(), 64)?;
        let mut memory = Memory::new(usize::try_from(CAPACITY).unwrap(), 0);
        let mut model = vec![0; memory.bytes().len()];
        pattern::fill(&mut model, 1, 0, 1);
        memory.bytes().copy_from_slice(&model);
        assert_eq!(bench.one(&memory, Ask::new(Op::Write, 0, CAPACITY)), Status::Ok);
        memory.bytes().fill(UNTOUCHED);
        watch.lock().unwrap().seen.clear();
        Ok(Self { name, place, bench, watch, memory, model })
    }

    /// Neighbour number `index`, in memory far from the others and the other way round.
    fn ask(op: Op, index: u64) -> Ask {
        let at = (COUNT - 1 - index) * 3 * LEN;
        Ask::new(op, FIRST + index * LEN, LEN).at(usize::try_from(at).unwrap())
    }

    fn memory_of(&mut self, index: u64) -> &mut [u8] {
        let at = Self::ask(Op::Read, index).at;
        &mut self.memory.bytes()[at..][..usize::try_from(LEN).unwrap()]
    }

    fn sector(index: u64) -> u64 {
        (FIRST + index * LEN) / SECTOR
    }

    /// Starts all neighbours in any order; context is the number.
    fn start(&mut self, op: Op, order: &[u64]) {
        for &index in order {
            if op == Op::Write {
                pattern::fill(self.memory_of(index), 1, Self::sector(index), 2);
            }
            self.bench.start(&self.memory, Self::ask(op, index), index);
        }
    }

    fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.watch.lock().unwrap().seen)
    }

    fn on_disk(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.model.len()];
        let file = std::fs::File::open(&self.place.image).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// One operation for all, which meets `fault` if it touches `target`. `failed` are those that
    /// must fail.
    fn case(
        &mut self,
        op: Op,
        order: &[u64],
        fault: Fault,
        target: ByteRange,
        times: u32,
        failed: &[u64],
    ) {
        let what = format!("{}: {op:?}, {fault:?} at {target:?} × {times}", self.name);
        self.watch.lock().unwrap().fault = Some((fault, target, times));
        self.memory.bytes().fill(UNTOUCHED);
        self.start(op, order);
        let answers = self.bench.finish();
        self.watch.lock().unwrap().fault = None;
        let whole = (FIRST, COUNT * LEN, usize::try_from(COUNT).unwrap());
        let seen = self.seen();
        assert_eq!((seen[0].1, seen[0].2, seen[0].3), whole, "{what}: one operation first");
        assert_eq!(answers.len(), order.len(), "{what}");
        let disk = self.on_disk();
        for answer in answers {
            let index = answer.context;
            let right = match (failed.contains(&index), fault) {
                (false, _) => Status::Ok,
                (true, Fault::Error(libc::ENOSPC)) => Status::NoSpace,
                (true, _) => Status::IoError,
            };
            assert_eq!(answer.status, right, "{what}: {index}");
            let place = usize::try_from(FIRST + index * LEN).unwrap()..;
            let place = &disk[place][..usize::try_from(LEN).unwrap()];
            let new = pattern::first_difference(place, 1, Self::sector(index), 2).is_none();
            let old = place == &self.model[usize::try_from(FIRST + index * LEN).unwrap()..][..4096];
            match (op, right) {
                (Op::Write, Status::Ok) => assert!(new, "{what}: {index} is written"),
                (Op::Write, _) => assert!(old || new || matches!(fault, Fault::Short(_)), "{what}"),
                (_, Status::Ok) => {
                    let read = self.memory_of(index).to_vec();
                    assert!(
                        pattern::first_difference(&read, 1, Self::sector(index), 1).is_none(),
                        "{what}: {index} is read"
                    );
                }
                _ => {}
            }
        }
        let [before, after] =
            [FIRST, FIRST + COUNT * LEN].map(|place| usize::try_from(place).unwrap());
        assert_eq!(disk[..before], self.model[..before], "{what}: the neighbours before");
        assert_eq!(disk[after..], self.model[after..], "{what}: the neighbours behind");
        if op == Op::Write {
            // As it was, for the next case.
            self.memory.bytes().copy_from_slice(&self.model);
            assert_eq!(self.bench.one(&self.memory, Ask::new(Op::Write, 0, CAPACITY)), Status::Ok);
            self.seen();
        }
    }
}

fn shuffled(rng: &mut Rng) -> Vec<u64> {
    let mut order: Vec<_> = (0..COUNT).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, usize::try_from(rng.below(i as u64 + 1)).unwrap());
    }
    order
}

#[test]
fn a20_merged_requests_keep_their_own_memory() {
    let mut rng = Rng::for_test("a20_merged_requests_keep_their_own_memory");
    everywhere(|scene| {
        for op in [Op::Write, Op::Read] {
            let nothing = ByteRange::default();
            scene.case(op, &shuffled(&mut rng), Fault::Short(0), nothing, 0, &[]);
        }
        let path = scene.bench.queue.stats().path;
        assert_eq!((path.merged, path.split), (2 * (COUNT - 1), 0));
    });
}

#[test]
fn c01_a_merged_request_fails_alone() {
    let mut rng = Rng::for_test("c01_a_merged_request_fails_alone");
    everywhere(|scene| {
        for op in [Op::Read, Op::Write] {
            for bad in [0, 3, COUNT - 1] {
                let target = ByteRange::new(FIRST + bad * LEN, LEN).unwrap();
                for errno in [libc::EIO, libc::ENOSPC, libc::EINVAL] {
                    let fault = Fault::Error(errno);
                    // For good: that request fails. Once: nobody does.
                    let bounced = errno == libc::EINVAL;
                    if !bounced {
                        scene.case(op, &shuffled(&mut rng), fault, target, u32::MAX, &[bad]);
                    }
                    scene.case(op, &shuffled(&mut rng), fault, target, 1, &[]);
                }
            }
        }
    });
}

#[test]
fn c02_a_merged_operation_that_falls_short_is_finished_one_by_one() {
    let mut rng = Rng::for_test("c02_a_merged_operation_that_falls_short");
    everywhere(|scene| {
        for op in [Op::Read, Op::Write] {
            let all = ByteRange::new(FIRST, COUNT * LEN).unwrap();
            for most in [0, 1, 511, 4096, 4097, 5 * 4096 + 512, 8 * 4096 - 1] {
                scene.case(op, &shuffled(&mut rng), Fault::Short(most), all, 1, &[]);
            }
        }
    });
}

#[test]
fn c05_a_flush_is_not_overtaken_and_nothing_is_merged_across_it() {
    everywhere(|scene| {
        for between in [Op::Flush, Op::Discard, Op::WriteZeroes] {
            scene.start(Op::Write, &[0, 1, 2]);
            scene.bench.start(&scene.memory, Ask::new(between, 0, LEN), 100);
            scene.start(Op::Write, &[3, 4]);
            let answers = scene.bench.finish();
            assert!(answers.iter().all(|answer| answer.status == Status::Ok));
            let seen = scene.seen();
            let places: Vec<_> = seen.iter().map(|seen| (seen.1, seen.2)).collect();
            assert_eq!(places[0], (FIRST, 3 * LEN), "{between:?}: what came before goes before");
            assert!(!seen[1].0.moves_data(), "{between:?}: {seen:?}");
            assert_eq!(places[2], (FIRST + 3 * LEN, 2 * LEN), "{between:?}: and what came behind");
        }
    });
}

#[test]
fn c07_reads_writes_and_durable_writes_are_not_merged_with_each_other() {
    everywhere(|scene| {
        let direct = scene.bench.queue.disk().cache() == CacheMode::None;
        scene.start(Op::Write, &[0, 1]);
        scene.bench.queue.set_durable_writes(true);
        scene.start(Op::Write, &[2, 3]);
        scene.bench.queue.set_durable_writes(false);
        scene.start(Op::Read, &[4, 5]);
        scene.bench.finish();
        let mut seen = scene.seen();
        seen.sort_by_key(|seen| seen.1);
        let kinds: Vec<_> = seen.iter().map(|seen| (seen.0, seen.2)).collect();
        let two = 2 * LEN;
        let durable = match direct {
            true => vec![(IoOp::WriteDurable, two)],
            // By themselves, and then the disk is synced for both.
            false => vec![(IoOp::Write, LEN), (IoOp::Write, LEN)],
        };
        let right = [vec![(IoOp::Write, two)], durable, vec![(IoOp::Read, two)]].concat();
        let moves = |kind: &&(IoOp, u64)| kind.0.moves_data();
        let moved: Vec<_> = kinds.iter().filter(moves).copied().collect();
        assert_eq!(moved, right, "a write is as durable as it was meant to be when it came");
    });
}

/// A merged durable write that fails was refused: its requests go again by themselves, and well. Through the page cache
/// none is merged.
#[test]
fn c04_eio_of_a_merged_durable_write_fails_no_later_flushes() {
    everywhere(|scene| {
        if scene.bench.queue.disk().cache() != CacheMode::None {
            return;
        }
        scene.bench.queue.set_durable_writes(true);
        let all = ByteRange::new(FIRST, COUNT * LEN).unwrap();
        let order: Vec<u64> = (0..COUNT).collect();
        scene.case(Op::Write, &order, Fault::Error(libc::ENOSPC), all, 1, &[]);
        let flush = Ask::new(Op::Flush, 0, 0);
        assert_eq!(scene.bench.one(&scene.memory, flush), Status::Ok, "{}: ENOSPC", scene.name);
        scene.seen();
        scene.case(Op::Write, &order, Fault::Error(libc::EIO), all, 1, &[]);
        assert_eq!(scene.bench.one(&scene.memory, flush), Status::Ok, "{}", scene.name);
    });
}
