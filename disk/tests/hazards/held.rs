//! A disk that fails and is mended: requests are held, others go on, and in the end all is right. Row
//! C18 of docs/hazards.md.

use crate::bench::{Ask, Bench, ENGINES, Memory, Place, SECTOR, Surface, engine};
use ringway_aio::{Engine, Fault, Faulty, Io, IoOp};
use ringway_core::{ByteRange, Op, Status};
use ringway_disk::{ErrorPolicy, FailedOp, Finished, OnError, SchedulerMode};
use ringway_testkit::{Lack, pattern};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const CAPACITY: u64 = 256 << 10;
const LEN: u64 = 8 << 10;
const SECOND: u64 = 1_000_000_000;
/// How often a request is tried again by itself, in seconds.
const RETRY: u64 = 3;

const HOLD_ALL: ErrorPolicy = ErrorPolicy {
    on_read: OnError::Hold,
    on_write: OnError::Hold,
    on_enospc: Some(OnError::Hold),
    hold_timeout: None,
};

/// What is broken, until it is mended.
#[derive(Debug, Default)]
struct Damage {
    fault: Option<Fault>,
    /// Where; everywhere if empty. Syncs are spared unless `syncs`.
    at: ByteRange,
    syncs: bool,
    /// Operations that met it.
    met: u32,
}

impl Damage {
    fn choose(&mut self, io: &Io<'_>) -> Option<Fault> {
        let touched = match io.op {
            IoOp::Sync => self.syncs,
            _ if self.at.is_empty() => !self.syncs,
            _ => ByteRange::new(io.offset, io.len).is_some_and(|io| io.overlaps(self.at)),
        };
        let fault = self.fault.filter(|_| touched);
        self.met += u32::from(fault.is_some());
        fault
    }
}

type Choice = Box<dyn FnMut(&Io<'_>) -> Option<Fault> + Send>;

struct Scene {
    bench: Bench<Faulty<Box<dyn Engine>, Choice>>,
    damage: Arc<Mutex<Damage>>,
    memory: Memory,
    surface: Surface,
    place: Place,
}

impl Scene {
    fn new(name: &str, surface: Surface, path: SchedulerMode) -> Result<Self, Lack> {
        let place = Place::new(surface, CAPACITY)?.by(path);
        let disk = place.open();
        disk.set_error_policy(HOLD_ALL);
        disk.set_now(0);
        let damage: Arc<Mutex<Damage>> = Arc::default();
        let plan = Arc::clone(&damage);
        let choose: Choice = Box::new(move |io| plan.lock().unwrap().choose(io));
        let engine = Faulty::new(engine(name, 64)?, surface.granule(), choose);
        let bench = Bench::new(engine, disk, 16)?;
        let memory = Memory::new(usize::try_from(CAPACITY).unwrap(), surface.memory_offset());
        Ok(Self { bench, damage, memory, surface, place })
    }

    /// Through the page cache, by the threads.
    fn plain() -> Self {
        Self::new("threads", Surface::Cached, SchedulerMode::Bio).unwrap_or_else(|_| panic!())
    }

    fn damage(&self) -> MutexGuard<'_, Damage> {
        self.damage.lock().unwrap()
    }

    fn break_at(&self, errno: i32, at: ByteRange) {
        *self.damage() = Damage { fault: Some(Fault::Error(errno)), at, ..Damage::default() };
    }

    fn mend(&self) {
        self.damage().fault = None;
    }

    fn ask(&mut self, context: u64, op: Op, offset: u64) {
        let at = usize::try_from(offset).unwrap();
        self.bench.start(&self.memory, Ask::new(op, offset, LEN).at(at), context);
    }

    fn fill(&mut self, sequence: u64) {
        pattern::fill(self.memory.bytes(), 1, 0, sequence);
    }

    /// Turns until nothing is under way; what was answered, by context.
    #[track_caller]
    fn rest(&mut self) -> Vec<(u64, Status)> {
        let mut answers: Vec<Finished<u64>> = Vec::new();
        for _ in 0..20_000 {
            self.bench.turn(&mut answers);
            let queue = &self.bench.queue;
            if queue.in_flight() == queue.held() && !queue.has_deferred() {
                answers.extend(std::iter::from_fn(|| self.bench.queue.take_late()));
                let mut said: Vec<_> = answers.iter().map(|a| (a.context, a.status)).collect();
                said.sort_unstable_by_key(|answer| answer.0);
                return said;
            }
            self.bench.engine.wait(Some(Duration::from_micros(200))).expect("a sound engine");
        }
        panic!("hangs: {:?}", self.bench.queue);
    }

    /// So many seconds after the beginning.
    fn at(&mut self, seconds: u64) -> Vec<(u64, Status)> {
        let disk = Arc::clone(self.bench.queue.disk());
        disk.set_now(seconds * SECOND);
        if self.bench.queue.wake_in() == Some(Duration::ZERO) {
            self.bench.queue.tend_held(&mut self.bench.engine);
        }
        self.rest()
    }

    fn retry(&mut self) -> Vec<(u64, Status)> {
        self.bench.queue.try_held(&mut self.bench.engine);
        self.rest()
    }

    fn on_disk(&self, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(LEN).unwrap()];
        let file = std::fs::File::open(&self.place.image).unwrap();
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn held(&self) -> u64 {
        self.bench.queue.disk().held().map_or(0, |held| held.count)
    }
}

fn ok(contexts: impl IntoIterator<Item = u64>) -> Vec<(u64, Status)> {
    contexts.into_iter().map(|context| (context, Status::Ok)).collect()
}

fn everywhere(mut test: impl FnMut(&mut Scene, &str)) {
    for surface in Surface::ALL {
        for name in ENGINES.into_iter().filter(|&name| name != "null" && surface.takes(name)) {
            for path in [SchedulerMode::Bio, SchedulerMode::Request] {
                match Scene::new(name, surface, path) {
                    Ok(mut scene) => test(&mut scene, &format!("{name} on {surface:?}, {path}")),
                    Err(lack) => lack.skip(),
                }
            }
        }
    }
}

/// Six neighbours, which the path `request` merges. Two of them meet what is broken; the others do not
/// wait for them, and neither does one that shares a block with a held one.
#[test]
fn c18_what_fails_is_held_alone_until_the_disk_is_mended() {
    everywhere(|scene, what| {
        for (op, errno) in [
            (Op::Write, libc::ENOSPC),
            (Op::Write, libc::EDQUOT),
            (Op::Write, libc::EIO),
            (Op::WriteZeroes, libc::ENOSPC),
            (Op::Read, libc::EIO),
        ] {
            let what = format!("{what}: {op:?}, error {errno}");
            scene.mend();
            scene.fill(1);
            let before = scene.bench.queue.stats();
            let whole = Ask::new(Op::Write, 0, CAPACITY);
            assert_eq!(scene.bench.one(&scene.memory, whole), Status::Ok, "{what}");
            scene.fill(if op == Op::Read { 1 } else { 2 });
            let shift = scene.surface.shift();
            let offset = |n: u64| shift + n * LEN;
            scene.break_at(errno, ByteRange::new(offset(2) + 4096, LEN).unwrap());
            (0..6).for_each(|n| scene.ask(n, op, offset(n)));
            assert_eq!(scene.rest(), ok([0, 1, 4, 5]), "{what}");
            let queue = &scene.bench.queue;
            assert_eq!((queue.held(), queue.in_flight(), scene.held()), (2, 2, 2), "{what}");
            assert_eq!(queue.bounce_bytes(), 0, "{what}: held requests hold no pages");
            let held = queue.disk().held().unwrap();
            let failed = match op {
                Op::Read => FailedOp::Read,
                Op::Write => FailedOp::Write,
                _ => FailedOp::Erase,
            };
            assert_eq!((held.op, held.errno), (failed, errno), "{what}");
            assert_eq!(held.retry_in.is_some(), errno != libc::EIO, "{what}");
            // Tried again in vain, they are held again.
            assert_eq!(scene.retry(), [], "{what}");
            assert_eq!((scene.held(), scene.bench.queue.disk().held_under_way()), (2, 0), "{what}");
            scene.mend();
            if op == Op::Write && shift > 0 {
                // The sector before the first held one: in the same block of 4096 bytes.
                let neighbour = Ask::new(Op::Write, offset(2) - SECTOR, SECTOR);
                let at = usize::try_from(neighbour.offset).unwrap();
                scene.bench.start(&scene.memory, neighbour.at(at), 9);
                assert_eq!(scene.rest(), ok([9]), "{what}");
            }
            assert_eq!(scene.retry(), ok([2, 3]), "{what}");
            assert_eq!((scene.held(), scene.bench.queue.in_flight()), (0, 0), "{what}");
            let after = scene.bench.queue.stats();
            assert_eq!((after.held - before.held, after.errors), (2, before.errors), "{what}");
            for n in 0..6 {
                let at = usize::try_from(offset(n)).unwrap();
                let len = usize::try_from(LEN).unwrap();
                let expected = match op {
                    Op::WriteZeroes => vec![0; len],
                    _ => scene.memory.bytes()[at..][..len].to_vec(),
                };
                assert!(scene.on_disk(offset(n)) == expected, "{what}: request {n}");
            }
        }
        let disk = scene.bench.queue.disk();
        assert_eq!((disk.held_spells(), disk.incidents().all(1)), (5, None), "{what}");
    });
}

/// Only the oldest is tried, so that a full file system is not asked by all of them; what it finds
/// holds for the others.
#[test]
fn c18_a_full_disk_is_tried_again_by_itself() {
    let mut scene = Scene::plain();
    scene.fill(1);
    scene.break_at(libc::ENOSPC, ByteRange::default());
    (0..8).for_each(|n| scene.ask(n, Op::Write, n * LEN));
    assert_eq!(scene.rest(), []);
    assert_eq!((scene.held(), scene.damage().met), (8, 8));
    assert_eq!(scene.bench.queue.wake_in(), Some(Duration::from_secs(RETRY)));
    for n in 1..=3 {
        assert_eq!(scene.at(RETRY * n - 1), []);
        assert_eq!(scene.at(RETRY * n), []);
        assert_eq!((scene.held(), scene.damage().met), (8, 8 + u32::try_from(n).unwrap()));
    }
    // Others go on meanwhile, and one that is held later is not tried before its turn.
    scene.break_at(libc::EIO, ByteRange::default());
    scene.ask(20, Op::Read, 0);
    assert_eq!(scene.rest(), []);
    assert_eq!(scene.bench.queue.disk().held().unwrap().op, FailedOp::Read);
    scene.mend();
    scene.ask(21, Op::Read, 0);
    assert_eq!(scene.rest(), ok([21]));
    assert_eq!(scene.at(RETRY * 4), ok(0..8), "the read waits to be told");
    assert_eq!(scene.at(RETRY * 5), []);
    assert_eq!(scene.bench.queue.wake_in(), None);
    assert_eq!(scene.retry(), ok([20]));
    assert_eq!(scene.held(), 0);
    for n in 0..8 {
        let at = usize::try_from(n * LEN).unwrap();
        let len = usize::try_from(LEN).unwrap();
        assert!(scene.on_disk(n * LEN) == scene.memory.bytes()[at..][..len]);
    }
}

#[test]
fn c18_what_is_held_for_too_long_is_reported() {
    let mut scene = Scene::plain();
    let policy = ErrorPolicy { hold_timeout: Some(Duration::from_secs(10)), ..HOLD_ALL };
    scene.bench.queue.disk().set_error_policy(policy);
    scene.break_at(libc::EIO, ByteRange::default());
    scene.ask(0, Op::Write, 0);
    assert_eq!(scene.rest(), []);
    scene.bench.queue.disk().set_now(4 * SECOND);
    scene.break_at(libc::ENOSPC, ByteRange::default());
    scene.ask(1, Op::Write, LEN);
    assert_eq!(scene.rest(), []);
    // Trying again makes it no younger.
    assert_eq!(scene.at(RETRY + 4), []);
    scene.break_at(libc::EIO, ByteRange::default());
    scene.bench.queue.disk().set_now(9 * SECOND);
    assert_eq!(scene.retry(), []);
    assert_eq!(scene.at(9), []);
    assert_eq!(scene.at(10), [(0, Status::IoError)]);
    assert_eq!(scene.held(), 1);
    assert_eq!(scene.at(14), [(1, Status::IoError)]);
    assert_eq!((scene.held(), scene.bench.queue.in_flight()), (0, 0));
    assert_eq!(scene.bench.queue.stats().errors, 2);
    // One that has no time left when it fails again is reported at once.
    scene.ask(2, Op::Write, 0);
    assert_eq!(scene.rest(), []);
    scene.bench.queue.disk().set_now(30 * SECOND);
    assert_eq!(scene.retry(), [(2, Status::IoError)]);
}

/// What a failed sync has lost is lost: a flush is reported whatever was chosen, and no later one
/// succeeds. So is a durable write through the page cache, whose error may be that of the sync.
#[test]
fn c18_flushes_are_never_held() {
    let mut scene = Scene::plain();
    let broken = Some(Fault::Error(libc::EIO));
    *scene.damage() = Damage { fault: broken, syncs: true, ..Damage::default() };
    scene.ask(0, Op::Flush, 0);
    assert_eq!(scene.rest(), [(0, Status::IoError)]);
    scene.mend();
    scene.ask(1, Op::Flush, 0);
    assert_eq!(scene.rest(), [(1, Status::IoError)]);

    let mut scene = Scene::plain();
    scene.bench.queue.set_durable_writes(true);
    // A full disk has refused the write itself.
    scene.break_at(libc::ENOSPC, ByteRange::default());
    scene.ask(0, Op::Write, 0);
    assert_eq!(scene.rest(), []);
    scene.mend();
    assert_eq!(scene.retry(), ok([0]));
    for errno in [libc::ENOSPC, libc::EIO] {
        let broken = Some(Fault::Error(errno));
        *scene.damage() = Damage { fault: broken, syncs: true, ..Damage::default() };
        scene.ask(1, Op::Write, 0);
        assert_eq!(scene.rest(), [(1, Status::IoError)], "{errno}");
    }
}

/// A flush covers what was answered before it. A held write was not: the flush does not wait for it.
#[test]
fn c18_a_flush_does_not_wait_for_held_writes() {
    let mut scene = Scene::plain();
    scene.break_at(libc::ENOSPC, ByteRange::new(0, LEN).unwrap());
    scene.ask(0, Op::Write, 0);
    scene.ask(1, Op::Write, LEN);
    assert_eq!(scene.rest(), ok([1]));
    scene.ask(2, Op::Flush, 0);
    assert_eq!(scene.rest(), ok([2]));
    assert_eq!(scene.held(), 1);
    scene.mend();
    assert_eq!(scene.retry(), ok([0]));
}

/// Half of a request has got through: it goes on where it ended. A file that has come to its end
/// counts as a disk that fails.
#[test]
fn c18_what_was_done_of_a_request_stays_done() {
    let mut scene = Scene::plain();
    scene.fill(1);
    let fault = Some(Fault::Short(4096));
    *scene.damage() = Damage { fault, at: ByteRange::new(0, LEN).unwrap(), ..Damage::default() };
    scene.ask(0, Op::Write, 0);
    let mut answers = Vec::new();
    while scene.bench.queue.stats().continued == 0 {
        scene.bench.turn(&mut answers);
        if scene.bench.queue.stats().continued == 0 {
            scene.damage().fault = Some(Fault::Short(4096));
        }
    }
    scene.damage().fault = Some(Fault::Short(0));
    let _ = scene.rest();
    scene.mend();
    let _ = scene.retry();
    assert_eq!((scene.held(), scene.bench.queue.in_flight()), (0, 0));
    let len = usize::try_from(LEN).unwrap();
    assert!(scene.on_disk(0) == scene.memory.bytes()[..len]);

    let at = ByteRange::new(LEN, LEN).unwrap();
    *scene.damage() = Damage { fault: Some(Fault::Short(0)), at, ..Damage::default() };
    scene.ask(1, Op::Read, LEN);
    assert_eq!(scene.rest(), []);
    let held = scene.bench.queue.disk().held().unwrap();
    assert_eq!((held.errno, held.retry_in), (0, None));
    scene.mend();
    assert_eq!(scene.retry(), ok([1]));
}

/// Given up by an operator; beyond the end of a disk that was made smaller; told to hold no more; left
/// to a successor.
#[test]
fn c18_held_requests_can_be_given_up_in_every_way() {
    let mut scene = Scene::plain();
    scene.break_at(libc::ENOSPC, ByteRange::default());
    (0..4).for_each(|n| scene.ask(n, Op::Write, n * LEN));
    assert_eq!(scene.rest(), []);
    let (engine, queue) = (&mut scene.bench.engine, &mut scene.bench.queue);
    assert_eq!(queue.fail_held(engine, |_, &context| context == 2), 1);
    assert_eq!(scene.rest(), [(2, Status::NoSpace)]);
    scene.bench.queue.disk().set_capacity(2 * LEN);
    scene.mend();
    assert_eq!(scene.retry(), [(0, Status::Ok), (1, Status::Ok), (3, Status::IoError)]);
    scene.bench.queue.disk().set_capacity(CAPACITY);

    scene.break_at(libc::ENOSPC, ByteRange::default());
    (0..3).for_each(|n| scene.ask(n, Op::Write, n * LEN));
    assert_eq!(scene.rest(), []);
    let queue = &mut scene.bench.queue;
    let mut left = Vec::new();
    queue.leave_held(|context| left.push(context));
    assert_eq!((left, queue.in_flight(), queue.held()), (vec![0, 1, 2], 0, 0));
    let disk = queue.disk();
    assert_eq!((disk.held(), disk.held_and_left(), disk.held_under_way()), (None, 3, 0));

    (0..2).for_each(|n| scene.ask(n, Op::Write, n * LEN));
    assert_eq!(scene.rest(), []);
    scene.bench.queue.hold_no_more(&mut scene.bench.engine);
    assert_eq!(scene.rest(), [(0, Status::NoSpace), (1, Status::NoSpace)]);
    scene.ask(5, Op::Write, 0);
    assert_eq!(scene.rest(), [(5, Status::NoSpace)]);
    assert_eq!(scene.held(), 0);
}

/// A held request waits for its operator, not for the disk.
#[test]
fn c18_held_requests_are_not_overdue() {
    let mut scene = Scene::plain();
    scene.break_at(libc::EIO, ByteRange::default());
    scene.ask(0, Op::Write, 0);
    assert_eq!(scene.rest(), []);
    assert_eq!(scene.bench.queue.scan_overdue(0, SECOND).requests, 0);
    assert_eq!(scene.bench.queue.scan_overdue(100 * SECOND, SECOND).requests, 0);
    scene.mend();
    assert_eq!(scene.retry(), ok([0]));
    assert_eq!(scene.bench.queue.stats().overdue, 0);
}

/// Without a choice, a full disk holds the requests of a sparse image and reports those of one that
/// has all its blocks. Other errors are reported.
#[test]
fn c18_sparse_images_hold_what_finds_no_space_by_default() {
    let mut scene = Scene::plain();
    let disk = Arc::clone(scene.bench.queue.disk());
    disk.set_error_policy(ErrorPolicy::default());
    assert_eq!(disk.on_enospc(), OnError::Hold, "the image was made as one hole");
    scene.break_at(libc::EIO, ByteRange::default());
    scene.ask(0, Op::Write, 0);
    scene.ask(1, Op::Read, LEN);
    assert_eq!(scene.rest(), [(0, Status::IoError), (1, Status::IoError)]);
    scene.break_at(libc::ENOSPC, ByteRange::default());
    scene.ask(2, Op::Write, 0);
    assert_eq!(scene.rest(), []);
    disk.set_error_policy(ErrorPolicy { on_enospc: Some(OnError::Report), ..disk.error_policy() });
    assert_eq!(scene.retry(), [(2, Status::NoSpace)]);
}
