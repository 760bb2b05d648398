//! A disk that fails: every fault hits one request and nothing else. Rows C1–C4 of docs/hazards.md,
//! each a test of its name.

use crate::bench::{Ask, Bench, ENGINES, Memory, Place, SECTOR, Surface, UNTOUCHED, engine, moves};
use ringway_aio::faulty::seeded;
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp, Model, Sim, SimSetup};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{OpenOptions, SchedulerMode, Source, open};
use ringway_testkit::{Lack, Rng, pattern};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};

/// Takes a disk's place while it is closed.
const NOTHING: Source = Source::Null { bytes: 512, latency_us: 0 };

/// The requests of a case: so many, so long, so far apart.
const REQUESTS: usize = 5;
const LEN: usize = 8 << 10;
const STRIDE: u64 = 24 << 10;
const CAPACITY: u64 = REQUESTS as u64 * STRIDE;

/// What befalls which operation, how often, and whether it did.
#[derive(Debug, Default)]
struct Plan {
    fault: Option<Fault>,
    /// Operations that touch this range; for an empty one, syncs.
    target: ByteRange,
    times: u32,
    hit: Option<IoOp>,
}

impl Plan {
    fn choose(&mut self, io: &Io<'_>) -> Option<Fault> {
        let touched = match io.op {
            IoOp::Sync => self.target.is_empty(),
            _ => ByteRange::new(io.offset, io.len).is_some_and(|io| io.overlaps(self.target)),
        };
        if !touched || self.times == 0 {
            return None;
        }
        self.times -= 1;
        self.hit = Some(io.op);
        self.fault
    }
}

type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;
type FaultyBench = Bench<Faulty<Box<dyn Engine>, Choice>>;

/// A disk on an engine that fails as planned, and what should be on it.
struct Scene {
    name: &'static str,
    surface: Surface,
    place: Place,
    bench: FaultyBench,
    plan: Arc<Mutex<Plan>>,
    memory: Memory,
    /// What is on the disk.
    model: Vec<u8>,
    sequence: u64,
}

/// Calls `test` with every engine on every surface that takes it.
fn everywhere(mut test: impl FnMut(&mut Scene)) {
    for surface in Surface::ALL {
        for name in ENGINES.into_iter().filter(|name| surface.takes(name)) {
            for path in [SchedulerMode::Bio, SchedulerMode::Request] {
                match Scene::new(name, surface, CAPACITY, path) {
                    Ok(mut scene) => test(&mut scene),
                    Err(lack) => lack.skip(),
                }
            }
        }
    }
}

fn faulty_bench(
    name: &str,
    surface: Surface,
    disk: Arc<ringway_disk::Disk>,
    plan: &Arc<Mutex<Plan>>,
) -> Result<FaultyBench, Lack> {
    let plan = Arc::clone(plan);
    let choose: Choice = Box::new(move |io| plan.lock().unwrap().choose(io));
    Bench::new(Faulty::new(engine(name, 64)?, surface.granule(), choose), disk, 16)
}

impl Scene {
    fn new(
        name: &'static str,
        surface: Surface,
        capacity: u64,
        path: SchedulerMode,
    ) -> Result<Self, Lack> {
        let place = Place::new(surface, capacity)?.by(path);
        let plan = Arc::default();
        let bench = faulty_bench(name, surface, place.open(), &plan)?;
        let bytes = usize::try_from(capacity).unwrap();
        let memory = Memory::new(bytes, surface.memory_offset());
        let model = vec![0; bytes];
        let mut scene = Self { name, surface, place, bench, plan, memory, model, sequence: 0 };
        scene.write_everything();
        Ok(scene)
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap()
    }

    fn arm(&self, fault: Fault, target: ByteRange, times: u32) {
        *self.plan() = Plan { fault: Some(fault), target, times, hit: None };
    }

    /// Fills the disk, without faults.
    fn write_everything(&mut self) {
        *self.plan() = Plan::default();
        self.sequence += 1;
        pattern::fill(&mut self.model, 1, 0, self.sequence);
        self.memory.bytes().copy_from_slice(&self.model);
        let whole = Ask::new(Op::Write, 0, self.model.len() as u64);
        assert_eq!(self.bench.one(&self.memory, whole), Status::Ok);
    }

    /// What is on the disk now.
    fn found(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.model.len()];
        let file = std::fs::File::open(&self.place.image).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Request number `index` of a case. Blocks of a device are discarded whole or not at all.
    fn ask(&self, op: Op, index: usize) -> Ask {
        let shift = if op == Op::Discard { 0 } else { self.surface.shift() };
        let at = index * usize::try_from(STRIDE).unwrap();
        Ask::new(op, index as u64 * STRIDE + shift, LEN as u64).at(at)
    }

    /// One batch of requests of which number `victim` meets `fault`.
    fn case(&mut self, op: Op, fault: Fault, victim: usize) {
        let what = format!("{} on {:?}: {op:?}, {fault:?} at {victim}", self.name, self.surface);
        // Flushes go along with reads: one that fails would rightly fail the others.
        let op_of = |index| if op == Op::Flush && index != victim { Op::Read } else { op };
        let asks: Vec<_> = (0..REQUESTS).map(|i| self.ask(op_of(i), i)).collect();
        self.sequence += 1;
        self.memory.bytes().fill(UNTOUCHED);
        if op == Op::Write {
            for ask in &asks {
                let bytes = &mut self.memory.bytes()[ask.at..][..LEN];
                pattern::fill(bytes, 1, ask.offset / SECTOR, self.sequence);
            }
        }
        self.arm(fault, ByteRange::new(asks[victim].offset, asks[victim].len).unwrap(), 1);
        for (context, &ask) in asks.iter().enumerate() {
            self.bench.start(&self.memory, ask, context as u64);
        }
        let answers = self.bench.finish();
        assert_eq!(answers.len(), REQUESTS, "{what}: one answer each");

        let hit = self.plan().hit;
        let expected = self.expected(op, fault, hit);
        for (answer, ask) in answers.iter().zip(&asks) {
            let status = if answer.context == victim as u64 { expected } else { Status::Ok };
            assert_eq!(answer.status, status, "{what} ({hit:?}): request {}", answer.context);
            let read = ask.op == Op::Read && status == Status::Ok;
            assert_eq!(answer.written as usize, if read { LEN } else { 0 }, "{what}");
        }
        if moves(self.name) {
            let ok = |index: usize| index != victim || expected == Status::Ok;
            self.check_memory(&asks, ok, &what);
            self.check_disk(&asks, ok, &what);
        }
    }

    fn expected(&self, op: Op, fault: Fault, hit: Option<IoOp>) -> Status {
        let Some(hit) = hit else {
            let ops = self.bench.engine.limits().ops;
            let may = ops.has(IoOp::PunchHole) && ops.has(IoOp::Discard);
            assert!(op == Op::Discard && !may, "{op:?}: the fault was never met");
            return Status::Ok;
        };
        match fault {
            Fault::Error(libc::EINTR | libc::EAGAIN) => Status::Ok,
            // The file may not like the memory: ours will do.
            Fault::Error(libc::EINVAL) if self.surface == Surface::Direct && op.moves_data() => {
                Status::Ok
            }
            // Zeroes are written then, and a discard is a wish.
            Fault::Error(errno) if NOT_KNOWN.contains(&errno) && !hit.moves_data() => Status::Ok,
            Fault::Short(0) if hit.moves_data() => Status::IoError,
            Fault::Error(libc::ENOSPC | libc::EDQUOT) if !matches!(hit, IoOp::Sync) => {
                Status::NoSpace
            }
            Fault::Error(_) => Status::IoError,
            Fault::Short(_) => Status::Ok,
        }
    }

    /// A successful read is right; a failed one has left only right bytes behind, or none. All
    /// other memory is untouched.
    fn check_memory(&mut self, asks: &[Ask], ok: impl Fn(usize) -> bool, what: &str) {
        let model = &self.model;
        let memory = self.memory.bytes();
        let mut expected = vec![UNTOUCHED; memory.len()];
        for (index, ask) in asks.iter().enumerate() {
            let (from, len) = (usize::try_from(ask.offset).unwrap(), LEN);
            let found = &mut memory[ask.at..][..len];
            match ask.op {
                Op::Read if ok(index) => {
                    expected[ask.at..][..len].copy_from_slice(&model[from..][..len]);
                }
                Op::Read => {
                    let right = model[from..][..len].iter();
                    let stale = found
                        .iter()
                        .zip(right)
                        .position(|(found, right)| found != right && *found != UNTOUCHED);
                    assert_eq!(stale, None, "{what}: foreign bytes in the guest's memory");
                    found.fill(UNTOUCHED);
                }
                Op::Write => found.fill(UNTOUCHED),
                _ => {}
            }
        }
        assert!(memory == expected, "{what}: the guest's memory");
    }

    /// What succeeded is on the disk, what failed may be, everything else is as it was.
    fn check_disk(&mut self, asks: &[Ask], ok: impl Fn(usize) -> bool, what: &str) {
        let found = self.found();
        let mut expected = self.model.clone();
        for (index, ask) in asks.iter().enumerate() {
            let from = usize::try_from(ask.offset).unwrap();
            let mut new = vec![0; LEN];
            match ask.op {
                Op::Write => pattern::fill(&mut new, 1, ask.offset / SECTOR, self.sequence),
                Op::WriteZeroes | Op::Discard => {}
                _ => continue,
            }
            let sure = ok(index) && ask.op != Op::Discard;
            let range = from..from + LEN;
            for (i, byte) in expected[range.clone()].iter_mut().enumerate() {
                let found = found[range.start + i];
                *byte = if sure || found == new[i] { new[i] } else { *byte };
            }
        }
        let first = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(first, None, "{what}: the first wrong byte on the disk");
        self.model = found;
    }

    /// Lets go of the disk and opens it again.
    fn reopen(&mut self) {
        *self.plan() = Plan::default();
        let null = Arc::new(open(&OpenOptions::new(NOTHING)).unwrap());
        self.bench = faulty_bench("null", self.surface, null, &self.plan).unwrap();
        self.bench = faulty_bench(self.name, self.surface, self.place.open(), &self.plan).unwrap();
    }
}

/// First, middle, last.
const VICTIMS: [usize; 3] = [0, REQUESTS / 2, REQUESTS - 1];

/// Every operation but flush, whose failures last. Reads follow writes, so that there is something
/// to tell apart.
const OPS: [Op; 4] = [Op::Write, Op::Read, Op::WriteZeroes, Op::Discard];

/// What files and devices answer to an operation that they do not have.
const NOT_KNOWN: [i32; 3] = [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV];

fn matrix(faults: &[Fault]) {
    everywhere(|scene| {
        for op in OPS {
            for &fault in faults {
                for victim in VICTIMS {
                    scene.case(op, fault, victim);
                }
            }
        }
        // All of it still works.
        scene.write_everything();
    });
}

#[test]
fn c01_an_error_fails_its_request_alone() {
    let errors = [libc::EIO, libc::ENOSPC, libc::EINVAL, libc::EDQUOT, libc::ETIMEDOUT];
    matrix(&errors.map(Fault::Error));
}

#[test]
fn c01_only_what_erases_has_another_way() {
    matrix(&NOT_KNOWN.map(Fault::Error));
}

#[test]
fn c02_interrupted_operations_begin_again() {
    matrix(&[libc::EINTR, libc::EAGAIN].map(Fault::Error));
}

#[test]
fn c02_short_transfers_continue_where_they_ended() {
    matrix(&[512, 1024, 4096, 777, 1, 8191].map(Fault::Short));
}

#[test]
fn c02_a_transfer_of_nothing_fails() {
    matrix(&[Fault::Short(0)]);
}

/// How often an operation that does not get on is tried: once, and a hundred times more.
const TRIES: u32 = 101;

#[test]
fn c02_a_disk_that_never_gets_on_is_given_up() {
    everywhere(|scene| {
        for errno in [libc::EINTR, libc::EAGAIN] {
            for op in [Op::Write, Op::Read, Op::WriteZeroes] {
                let ask = scene.ask(op, 1);
                let target = ByteRange::new(ask.offset, ask.len).unwrap();
                scene.arm(Fault::Error(errno), target, u32::MAX);
                assert_eq!(scene.bench.one(&scene.memory, ask), Status::IoError, "{op:?}");
                assert_eq!(u32::MAX - scene.plan().times, TRIES, "{op:?}");
                // One that gets there with its last try was worth them all.
                scene.arm(Fault::Error(errno), target, TRIES - 1);
                assert_eq!(scene.bench.one(&scene.memory, ask), Status::Ok, "{op:?}");
                scene.arm(Fault::Short(0), target, 0);
                assert_eq!(scene.bench.one(&scene.memory, ask), Status::Ok, "{op:?}");
            }
        }
    });
}

/// Where blocks are read whole, what comes may end before the request begins.
#[test]
fn c02_a_disk_that_ends_before_the_request_is_tried_again_and_given_up() {
    everywhere(|scene| {
        if scene.surface != Surface::Modify {
            return;
        }
        for op in [Op::Read, Op::Write] {
            let ask = scene.ask(op, 1);
            let target = ByteRange::new(ask.offset, ask.len).unwrap();
            let before = scene.bench.queue.stats().continued;
            scene.arm(Fault::Short(512), target, u32::MAX);
            assert_eq!(scene.bench.one(&scene.memory, ask), Status::IoError, "{op:?}");
            assert_eq!(u32::MAX - scene.plan().times, TRIES, "{op:?}");
            assert_eq!(scene.bench.queue.stats().continued - before, u64::from(TRIES) - 1);
            scene.arm(Fault::Short(512), target, TRIES - 1);
            assert_eq!(scene.bench.one(&scene.memory, ask), Status::Ok, "{op:?}");
        }
    });
}

/// One sector, or one byte, at a time.
#[test]
fn c02_a_disk_that_is_always_short_gets_there() {
    everywhere(|scene| {
        // Less than a block does not get ahead where blocks are written whole.
        let most: &[u32] = match scene.surface {
            Surface::Cached => &[1, 512, 4095],
            Surface::Direct | Surface::Bounced => &[512, 1536],
            Surface::Modify => return,
        };
        for &most in most {
            for (op, check) in [(Op::Write, true), (Op::Read, true)] {
                let ask = scene.ask(op, 2);
                let (at, from) = (ask.at, usize::try_from(ask.offset).unwrap());
                let mut bytes = vec![UNTOUCHED; LEN];
                if op == Op::Write {
                    scene.sequence += 1;
                    pattern::fill(&mut bytes, 1, ask.offset / SECTOR, scene.sequence);
                    scene.model[from..][..LEN].copy_from_slice(&bytes);
                }
                scene.memory.bytes()[at..][..LEN].copy_from_slice(&bytes);
                scene.arm(
                    Fault::Short(most),
                    ByteRange::new(ask.offset, ask.len).unwrap(),
                    u32::MAX,
                );
                assert_eq!(scene.bench.one(&scene.memory, ask), Status::Ok);
                if check && moves(scene.name) {
                    let right = &scene.model[from..][..LEN];
                    assert!(scene.memory.bytes()[at..][..LEN] == *right, "{op:?} {most}");
                    assert!(scene.found() == scene.model, "{op:?} {most}");
                }
            }
        }
        assert!(scene.bench.queue.stats().continued > 0);
    });
}

/// A request of several pieces, from memory in many parts, with a fault in the first, the middle or
/// the last piece.
#[test]
fn c02_faults_within_a_long_request() {
    const LONG: u64 = (3 << 20) - 512;
    for surface in [Surface::Cached, Surface::Bounced, Surface::Modify] {
        for name in ["threads", "io_uring"] {
            let mut scene = match Scene::new(name, surface, 4 << 20, SchedulerMode::default()) {
                Ok(scene) => scene,
                Err(lack) => {
                    lack.skip();
                    continue;
                }
            };
            let ask = Ask::new(Op::Write, surface.shift(), LONG);
            for at in [0, LONG / 2, LONG - 1] {
                for fault in
                    [Fault::Error(libc::EIO), Fault::Error(libc::EINTR), Fault::Short(99_999)]
                {
                    for op in [Op::Write, Op::Read] {
                        long_case(&mut scene, Ask { op, ..ask }, fault, at);
                    }
                }
            }
        }
    }
}

fn long_case(scene: &mut Scene, ask: Ask, fault: Fault, at: u64) {
    let what = format!("{} on {:?}: {ask:?}, {fault:?} at {at}", scene.name, scene.surface);
    let (from, len) = (usize::try_from(ask.offset).unwrap(), usize::try_from(ask.len).unwrap());
    let mut bytes = vec![UNTOUCHED; len];
    if ask.op == Op::Write {
        scene.sequence += 1;
        pattern::fill(&mut bytes, 1, ask.offset / SECTOR, scene.sequence);
    }
    scene.memory.bytes()[..len].copy_from_slice(&bytes);
    // Parts of any length: these files take them, or they are bounced.
    let cuts = [0, 1, 513, 70_000, 1 << 20, (1 << 20) + 4096, len];
    let parts: Vec<_> =
        cuts.windows(2).map(|cut| scene.memory.segment(cut[0], cut[1] - cut[0])).collect();
    scene.arm(fault, ByteRange::new(ask.offset + at, 1).unwrap(), 1);
    scene.bench.start_pieces(&parts, ask, 5);
    let answer = scene.bench.finish().remove(0);
    assert!(scene.plan().hit.is_some(), "{what}: the fault was met");
    let failed = fault == Fault::Error(libc::EIO);
    assert_eq!(answer.status, if failed { Status::IoError } else { Status::Ok }, "{what}");
    let found = scene.found();
    for (i, &byte) in bytes.iter().enumerate().filter(|_| ask.op == Op::Write) {
        if !failed || found[from + i] == byte {
            scene.model[from + i] = byte;
        }
    }
    let first = found.iter().zip(&scene.model).position(|(a, b)| a != b);
    assert_eq!(first, None, "{what}: the first wrong byte on the disk");
    if ask.op == Op::Read {
        let right = &scene.model[from..][..len];
        let memory = &scene.memory.bytes()[..len];
        let stale = memory
            .iter()
            .zip(right)
            .position(|(found, right)| found != right && !(failed && *found == UNTOUCHED));
        assert_eq!(stale, None, "{what}: the first wrong byte in memory");
    }
}

/// Random requests, random faults, completions in random order: each is answered once, and what is
/// said to be done is done.
#[test]
fn c02_random_faults_in_random_order() {
    let mut rng = Rng::for_test("c02_random_faults_in_random_order");
    let both = Surface::ALL
        .into_iter()
        .flat_map(|s| [(s, SchedulerMode::Bio), (s, SchedulerMode::Request)]);
    for (surface, path) in both {
        let place = match Place::new(surface, 1 << 20) {
            Ok(place) => place.by(path),
            Err(lack) => {
                lack.skip();
                continue;
            }
        };
        let mut setup = SimSetup::new(Model::RAM);
        (setup.seed, setup.reorder) = (rng.next_u64(), true);
        let inner = Faulty::new(
            engine("threads", 64).unwrap(),
            surface.granule(),
            seeded(rng.next_u64(), 150),
        );
        let bench = Bench::new(Sim::new(inner, setup), place.open(), 16).unwrap();
        random_mix(bench, surface, &mut rng);
    }
}

fn random_mix(mut bench: Bench<impl Engine>, surface: Surface, rng: &mut Rng) {
    const SLICES: u64 = 16;
    const SLICE_SECTORS: u64 = (1 << 20) / SECTOR / SLICES;
    /// What a sector holds: the write that put it there, or nobody knows.
    type Holds = Vec<Option<u64>>;
    let mut memory = Memory::new(1 << 20, surface.memory_offset());
    let mut holds: Holds = vec![Some(0); usize::try_from(SLICES * SLICE_SECTORS).unwrap()];
    let mut failed = 0;
    for round in 1..=60u64 {
        // One request in each slice of disk and memory; a slice begins within a block.
        let asks: Vec<_> = (0..SLICES)
            .map(|slice| {
                let first = rng.below(SLICE_SECTORS - 24);
                let sectors = 1 + rng.below(24);
                let op = rng.pick(&[Op::Read, Op::Read, Op::Write, Op::Write, Op::WriteZeroes]);
                let sector = slice * SLICE_SECTORS + first;
                let at = usize::try_from(slice * SLICE_SECTORS * SECTOR).unwrap();
                Ask::new(op, sector * SECTOR, sectors * SECTOR).at(at)
            })
            .collect();
        memory.bytes().fill(UNTOUCHED);
        for (context, &ask) in asks.iter().enumerate() {
            if ask.op == Op::Write {
                let bytes = &mut memory.bytes()[ask.at..][..usize::try_from(ask.len).unwrap()];
                pattern::fill(bytes, 1, ask.offset / SECTOR, round);
            }
            bench.start(&memory, ask, context as u64);
        }
        let answers = bench.finish();
        assert_eq!(answers.len(), asks.len());
        for (answer, ask) in answers.iter().zip(&asks) {
            let ok = answer.status == Status::Ok;
            failed += u32::from(!ok);
            for i in 0..ask.len / SECTOR {
                let sector = ask.offset / SECTOR + i;
                let held = &mut holds[usize::try_from(sector).unwrap()];
                match ask.op {
                    Op::Read if ok => {
                        let at = ask.at + usize::try_from(i * SECTOR).unwrap();
                        let bytes = &memory.bytes()[at..][..512];
                        let right = match *held {
                            None => true,
                            Some(0) => bytes.iter().all(|&byte| byte == 0),
                            Some(by) => pattern::first_difference(bytes, 1, sector, by).is_none(),
                        };
                        assert!(right, "{surface:?}: sector {sector} should be of {held:?}");
                    }
                    Op::Read => {}
                    Op::Write => *held = ok.then_some(round),
                    _ => *held = ok.then_some(0),
                }
            }
        }
    }
    assert!(failed > 20, "{surface:?}: only {failed} requests failed");
}

/// Sectors of the same blocks, written and zeroed over two queues at a time: none is lost.
#[test]
fn c03_writes_within_a_block_lose_nothing() {
    for name in ["threads", "io_uring", "linux-aio"] {
        let place = match Place::new(Surface::Modify, 64 << 10) {
            Ok(place) => place,
            Err(lack) => {
                lack.skip();
                return;
            }
        };
        let disk = place.open();
        let mut benches = Vec::new();
        for _ in 0..2 {
            match engine(name, 64).and_then(|e| Bench::new(e, Arc::clone(&disk), 128)) {
                Ok(bench) => benches.push(bench),
                Err(lack) => lack.skip(),
            }
        }
        let [first, second] = &mut benches[..] else { continue };
        let mut memory = Memory::new(64 << 10, 0);
        for round in 1..=20 {
            pattern::fill(memory.bytes(), 1, 0, round);
            // Every seventh sector is zeroed instead, so that zeroes and data share blocks.
            let zeroed = |sector: u64| (sector + round) % 7 == 0;
            for sector in 0..128u64 {
                let op = if zeroed(sector) { Op::WriteZeroes } else { Op::Write };
                let ask = Ask::new(op, sector * SECTOR, SECTOR)
                    .at(usize::try_from(sector * SECTOR).unwrap());
                let bench = if sector % 2 == 0 { &mut *first } else { &mut *second };
                bench.start(&memory, ask, sector);
            }
            let (mut answers, begun) = (Vec::new(), std::time::Instant::now());
            while answers.len() < 128 {
                assert!(begun.elapsed().as_secs() < 20, "{name}: hangs");
                first.turn(&mut answers);
                second.turn(&mut answers);
            }
            assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{name}");
            for bench in [&mut *first, &mut *second] {
                assert!(bench.finish().is_empty());
            }
            let found = std::fs::read(&place.image).unwrap();
            for sector in 0..128u64 {
                let bytes = &found[usize::try_from(sector * SECTOR).unwrap()..][..512];
                let right = match zeroed(sector) {
                    true => bytes.iter().all(|&byte| byte == 0),
                    false => pattern::first_difference(bytes, 1, sector, round).is_none(),
                };
                assert!(right, "{name}, round {round}: sector {sector} was lost");
            }
        }
        assert!(first.queue.stats().bounced > 0);
    }
}

/// O_DIRECT with memory at every byte of a sector, in parts that end anywhere.
#[test]
fn c03_any_memory_does() {
    for name in ["threads", "io_uring", "linux-aio"] {
        for offset in [0, 1, 2, 255, 511, 512, 513, 4095] {
            let place = match Place::new(Surface::Bounced, 256 << 10) {
                Ok(place) => place,
                Err(lack) => return lack.skip(),
            };
            let made = engine(name, 64).and_then(|engine| Bench::new(engine, place.open(), 4));
            let mut bench = match made {
                Ok(bench) => bench,
                Err(lack) => {
                    lack.skip();
                    break;
                }
            };
            let mut memory = Memory::new(64 << 10, offset);
            let cuts = [0, 3, 515, 4096, 4097, 40_000, 64 << 10];
            let parts: Vec<_> =
                cuts.windows(2).map(|cut| memory.segment(cut[0], cut[1] - cut[0])).collect();
            pattern::fill(memory.bytes(), 1, 64, 3);
            bench.start_pieces(&parts, Ask::new(Op::Write, 64 * SECTOR, 64 << 10), 0);
            assert_eq!(bench.finish()[0].status, Status::Ok);
            memory.bytes().fill(UNTOUCHED);
            bench.start_pieces(&parts, Ask::new(Op::Read, 64 * SECTOR, 64 << 10), 0);
            assert_eq!(bench.finish()[0].status, Status::Ok);
            assert_eq!(
                pattern::first_difference(memory.bytes(), 1, 64, 3),
                None,
                "{name} {offset}"
            );
            let found = std::fs::read(&place.image).unwrap();
            assert_eq!(pattern::first_difference(&found[32 << 10..][..64 << 10], 1, 64, 3), None);
            let beside = found[..32 << 10].iter().chain(&found[96 << 10..]);
            assert!(beside.into_iter().all(|&byte| byte == 0), "{name} {offset}: neighbours");
            assert_eq!(bench.queue.stats().bounced, 2);
        }
    }
}

/// After a failed fsync the host has forgotten what was not written: no later one may succeed.
#[test]
fn c04_failed_fsync_keeps_failing_until_reopen() {
    let flush = Ask::new(Op::Flush, 0, 0);
    everywhere(|scene| {
        assert_eq!(scene.bench.one(&scene.memory, flush), Status::Ok);
        let cases = VICTIMS.map(|victim| (libc::EIO, victim));
        let others = [libc::ENOSPC, libc::EINVAL, libc::EDQUOT].map(|errno| (errno, 1));
        for (errno, victim) in cases.into_iter().chain(others) {
            scene.case(Op::Flush, Fault::Error(errno), victim);
            // Nobody fails it any more, yet it does.
            assert_eq!(scene.bench.one(&scene.memory, flush), Status::IoError);
            // Over other queues of the disk, too.
            let disk = Arc::clone(scene.bench.queue.disk());
            let mut other = Bench::new(engine(scene.name, 4).unwrap(), disk, 4).unwrap();
            assert_eq!(other.one(&scene.memory, flush), Status::IoError);
            // Requests that owe a sync at their end owe it still.
            other.queue.set_durable_writes(true);
            let zeroes = scene.ask(Op::WriteZeroes, 0);
            if scene.surface != Surface::Modify && scene.name != "linux-aio" {
                assert_eq!(other.one(&scene.memory, zeroes), Status::IoError);
            }
            drop(other);
            // Reads and writes go on; their failures would be told by themselves.
            scene.write_everything();
            scene.reopen();
            assert_eq!(scene.bench.one(&scene.memory, flush), Status::Ok, "{}", scene.name);
        }
    });
}

/// Interrupted is not failed.
#[test]
fn c04_interrupted_fsync_begins_again() {
    everywhere(|scene| {
        for errno in [libc::EINTR, libc::EAGAIN] {
            for victim in VICTIMS {
                scene.case(Op::Flush, Fault::Error(errno), victim);
            }
        }
    });
}

/// Two flushes at a time: the host tells only one of them that it failed.
#[test]
fn c04_a_flush_that_ends_after_a_failed_one_fails() {
    everywhere(|scene| {
        scene.arm(Fault::Error(libc::EIO), ByteRange::default(), 1);
        for context in 0..4 {
            scene.bench.start(&scene.memory, Ask::new(Op::Flush, 0, 0), context);
        }
        let answers = scene.bench.finish();
        assert!(answers.iter().all(|answer| answer.status == Status::IoError), "{answers:?}");
    });
}

/// A durable write through the page cache is a write and a sync: if that fails, nobody knows what else the host has
/// forgotten.
#[test]
fn c04_failed_durable_write_fails_later_flushes() {
    let flush = Ask::new(Op::Flush, 0, 0);
    everywhere(|scene| {
        let fails_flushes = |scene: &mut Scene, ask: Ask, errno, durable| {
            scene.bench.queue.set_durable_writes(durable);
            let target = ByteRange::new(ask.offset, ask.len).unwrap();
            scene.arm(Fault::Error(errno), target, 1);
            let full = errno == libc::ENOSPC;
            let right = if full { Status::NoSpace } else { Status::IoError };
            assert_eq!(scene.bench.one(&scene.memory, ask), right);
            scene.bench.one(&scene.memory, flush) == Status::IoError
        };
        let (read, write) = (scene.ask(Op::Read, 1), scene.ask(Op::Write, 1));
        // A full disk refuses the write before there is anything to sync.
        assert!(!fails_flushes(scene, write, libc::ENOSPC, true));
        assert!(!fails_flushes(scene, write, libc::EIO, false));
        assert!(!fails_flushes(scene, read, libc::EIO, true));
        // What a slot did before says nothing: first a durable write in parts, then a read.
        for _ in 0..16 {
            scene.bench.queue.set_durable_writes(true);
            let target = ByteRange::new(write.offset, write.len).unwrap();
            scene.arm(Fault::Short(4096), target, 1);
            assert_eq!(scene.bench.one(&scene.memory, write), Status::Ok);
            assert!(!fails_flushes(scene, read, libc::EIO, false));
        }
        // A bad sector is no reason to give up.
        assert!(!fails_flushes(scene, write, libc::EIO, true));
        if scene.surface == Surface::Cached {
            scene.arm(Fault::Error(libc::ENOSPC), ByteRange::default(), 1);
            assert_eq!(scene.bench.one(&scene.memory, write), Status::IoError);
            assert_eq!(scene.bench.one(&scene.memory, flush), Status::IoError, "{}", scene.name);
        }
    });
}
