//! Syncs: one of a disk at a time, whatever its queues; who is answered by which.

use crate::bench::{Ask, Bench, Memory, Place, Surface};
use ringway_aio::{BellId, Counters, Done, Engine, FileId, Full, Io, IoOp, Limits, Reaped};
use ringway_core::{Op, Status};
use ringway_disk::open::open_unmapped;
use ringway_disk::{
    Alignment, CacheMode, CustomDisk, Disk, Finished, OpenError, OpenOptions, Qcow2, SchedulerMode,
    Source,
};
use ringway_image::NewImage;
use ringway_testkit::{Lack, Need};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub(crate) const FLUSH: Ask = Ask { op: Op::Flush, offset: 0, len: 0, at: 0, unmap: false };

/// What engines of one test were asked for, and the syncs that the test has not let go on.
#[derive(Debug, Default)]
struct Store {
    asked: Vec<IoOp>,
    /// Of which engine, and how it ends, once the test has said so.
    held: VecDeque<(usize, u64, Option<i32>)>,
    /// Whether a device that is to be polled has turned out to have no queues for that.
    cannot_poll: Option<bool>,
}

/// Where syncs end when the test says so, and all else at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<Mutex<Store>>);

impl Gate {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.lock().unwrap()
    }

    /// Syncs that were begun so far.
    pub(crate) fn syncs(&self) -> usize {
        self.store().asked.iter().filter(|op| **op == IoOp::Sync).count()
    }

    /// Syncs that are under way.
    pub(crate) fn under_way(&self) -> usize {
        self.store().held.iter().filter(|held| held.2.is_none()).count()
    }

    /// Operations that erase, begun so far.
    fn erases(&self) -> usize {
        self.store().asked.iter().filter(|op| !op.moves_data() && **op != IoOp::Sync).count()
    }

    /// The only one ends so.
    #[track_caller]
    pub(crate) fn end(&self, result: i32) {
        assert_eq!(self.under_way(), 1, "one at a time");
        let mut store = self.store();
        let held = store.held.iter_mut().find(|held| held.2.is_none());
        held.expect("one is under way").2 = Some(result);
    }

    /// An engine of a worker.
    pub(crate) fn engine(&self, number: usize) -> Gated {
        Gated { number, store: self.clone(), limits: Limits::new("gate", 1024), done: Vec::new() }
    }
}

#[derive(Debug)]
pub(crate) struct Gated {
    number: usize,
    store: Gate,
    limits: Limits,
    done: Vec<Done>,
}

impl Engine for Gated {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, _: &Arc<File>) -> std::io::Result<FileId> {
        Ok(FileId(0))
    }

    fn detach(&mut self, _: FileId) {}

    fn cannot_poll(&self, _: FileId) -> bool {
        self.store.store().cannot_poll == Some(true)
    }

    fn watch(&mut self, _: BellId, _: RawFd) -> std::io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _: BellId, _: RawFd) {}

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        let mut store = self.store.store();
        store.asked.push(io.op);
        match io.op {
            IoOp::Sync => store.held.push_back((self.number, io.tag, None)),
            _ if store.cannot_poll == Some(false) => {
                store.cannot_poll = Some(true);
                self.done.push(Done { tag: io.tag, result: -libc::EAGAIN });
            }
            op => {
                let moved = if op.moves_data() { i32::try_from(io.len).unwrap() } else { 0 };
                self.done.push(Done { tag: io.tag, result: moved });
            }
        }
        Ok(())
    }

    fn submit(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        let before = out.done.len();
        out.done.append(&mut self.done);
        let number = self.number;
        self.store.store().held.retain(|&(of, tag, result)| match result {
            Some(result) if of == number => {
                out.done.push(Done { tag, result });
                false
            }
            _ => true,
        });
        out.done.len() - before
    }

    fn wait(&mut self, _: Option<Duration>) -> std::io::Result<()> {
        Ok(())
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

fn disk(cache: CacheMode) -> Arc<Disk> {
    let shape = CustomDisk {
        bytes: 1 << 20,
        cache,
        alignment: Alignment { memory: 512, offset: 512 },
        block_device: false,
        path: SchedulerMode::Bio,
    };
    Arc::new(shape.open(None).unwrap())
}

/// Two workers' queues of a disk.
fn two(cache: CacheMode) -> (Gate, [Bench<Gated>; 2]) {
    let (gate, disk) = (Gate::default(), disk(cache));
    let bench = |number| Bench::new(gate.engine(number), Arc::clone(&disk), 512).unwrap();
    let benches = [bench(0), bench(1)];
    (gate, benches)
}

/// Turns of both workers; what was answered, in order.
fn turns(benches: &mut [Bench<Gated>; 2]) -> Vec<(u64, Status)> {
    let mut answers: Vec<Finished<u64>> = Vec::new();
    for _ in 0..4 {
        benches.iter_mut().for_each(|bench| bench.turn(&mut answers));
    }
    answers.iter().map(|answer| (answer.context, answer.status)).collect()
}

const CACHES: [CacheMode; 2] = [CacheMode::Writeback, CacheMode::None];

#[test]
fn c61_a_flush_is_answered_by_a_sync_that_began_after_it_came() {
    let memory = Memory::new(4096, 0);
    for cache in CACHES {
        let (gate, mut benches) = two(cache);
        benches[0].start(&memory, FLUSH, 0);
        assert_eq!((gate.syncs(), gate.under_way()), (1, 1), "{cache:?}: a lone one at once");
        // They come while it is under way, and no write came in between.
        benches[1].start(&memory, FLUSH, 1);
        benches[0].start(&memory, FLUSH, 2);
        benches[1].start(&memory, FLUSH, 3);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 1), "{cache:?}: one at a time");
        gate.end(0);
        assert_eq!(turns(&mut benches), [(0, Status::Ok)], "{cache:?}: by that one alone");
        assert_eq!(gate.syncs(), 2, "{cache:?}: one for all three");
        // This one is too late for that, too.
        benches[1].start(&memory, FLUSH, 4);
        gate.end(0);
        let mut answers = turns(&mut benches);
        answers.sort_by_key(|answer| answer.0);
        assert_eq!(answers, [1, 2, 3].map(|context| (context, Status::Ok)), "{cache:?}");
        assert_eq!(gate.syncs(), 3, "{cache:?}");
        gate.end(0);
        assert_eq!(turns(&mut benches), [(4, Status::Ok)], "{cache:?}");
        assert_eq!((gate.syncs(), gate.under_way()), (3, 0), "{cache:?}");
    }
}

/// What a guest asks for together costs the workers that all disks share one operation at a time.
#[test]
fn c61_many_flushes_take_two_syncs_and_nobody_waits_for_more() {
    let memory = Memory::new(4096, 0);
    for cache in CACHES {
        let (gate, mut benches) = two(cache);
        (0..300).for_each(|context| benches[0].start(&memory, FLUSH, context));
        // Of another worker, behind all of these.
        benches[1].start(&memory, FLUSH, 1000);
        gate.end(0);
        assert_eq!(turns(&mut benches).len(), 1, "{cache:?}");
        gate.end(0);
        assert_eq!(turns(&mut benches).len(), 300, "{cache:?}: the other queue's, too");
        assert_eq!((gate.syncs(), gate.under_way()), (2, 0), "{cache:?}");
    }
}

#[test]
fn c61_a_sync_that_fails_fails_all_who_wait_and_all_who_come_later() {
    let memory = Memory::new(4096, 0);
    for cache in CACHES {
        let (gate, mut benches) = two(cache);
        (0..3).for_each(|context| benches[0].start(&memory, FLUSH, context));
        benches[1].start(&memory, FLUSH, 3);
        gate.end(-libc::EIO);
        let mut answers = turns(&mut benches);
        answers.sort_by_key(|answer| answer.0);
        assert_eq!(answers, [0, 1, 2, 3].map(|context| (context, Status::IoError)), "{cache:?}");
        benches[1].start(&memory, FLUSH, 4);
        assert_eq!(turns(&mut benches), [(4, Status::IoError)], "{cache:?}");
        assert_eq!((gate.syncs(), gate.under_way()), (1, 0), "{cache:?}: nothing makes it good");
    }
}

/// Nothing was asked of a server that cannot be reached: whoever's flush that was is told, and nobody else.
#[test]
fn c61_no_answer_of_a_lost_server_is_no_result() {
    let memory = Memory::new(4096, 0);
    let (gate, mut benches) = two(CacheMode::Writeback);
    benches[0].start(&memory, FLUSH, 0);
    (1..3).for_each(|context| benches[1].start(&memory, FLUSH, context));
    gate.end(-libc::ENOTCONN);
    assert_eq!((turns(&mut benches), gate.syncs()), (vec![(0, Status::IoError)], 2));
    // Those that would have been answered by the second one are not, when that is in vain.
    gate.end(-libc::ENOTCONN);
    assert_eq!((turns(&mut benches), gate.syncs()), (vec![(1, Status::IoError)], 3));
    gate.end(0);
    assert_eq!(turns(&mut benches), [(2, Status::Ok)], "the server is back");
    assert_eq!((gate.syncs(), gate.under_way()), (3, 0));
}

/// Discards and zeroing of a guest without a write cache are answered by a sync that began after them.
#[test]
fn c61_durable_zeroing_joins_when_it_is_done() {
    let memory = Memory::new(4096, 0);
    let (gate, mut benches) = two(CacheMode::Writeback);
    benches[1].queue.set_durable_writes(true);
    benches[0].start(&memory, FLUSH, 0);
    let zeroes = Ask::new(Op::WriteZeroes, 4096, 4096);
    (1..4).for_each(|context| benches[1].start(&memory, zeroes, context));
    assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 1));
    gate.end(0);
    assert_eq!((turns(&mut benches), gate.syncs()), (vec![(0, Status::Ok)], 2));
    gate.end(0);
    assert_eq!(turns(&mut benches), [1, 2, 3].map(|context| (context, Status::Ok)));
    assert_eq!((gate.syncs(), gate.under_way()), (2, 0));
}

/// The host tells a lost page once, to whoever syncs first: of durable writes that run together through the page cache all
/// hear it.
#[test]
fn c116_durable_writes_through_the_page_cache_share_their_syncs() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(1 << 20).unwrap();
    let memory = Memory::new(4096, 0);
    for path_of in [SchedulerMode::Bio, SchedulerMode::Request] {
        let mut options = OpenOptions::new(Source::Path(path.clone()));
        (options.cache, options.path) = (Some(CacheMode::Writethrough), path_of);
        let (gate, disk) = (Gate::default(), Arc::new(ringway_disk::open(&options).unwrap()));
        let bench = |number| Bench::new(gate.engine(number), Arc::clone(&disk), 512).unwrap();
        let mut benches = [bench(0), bench(1)];
        benches.iter_mut().for_each(|bench| bench.queue.set_durable_writes(true));
        let write = |context: u64| Ask::new(Op::Write, context * 4096, 4096);
        let ask = |benches: &mut [Bench<Gated>; 2], contexts: std::ops::Range<u64>| {
            for context in contexts {
                benches[usize::from(context % 2 == 1)].start(&memory, write(context), context);
            }
        };
        ask(&mut benches, 0..1);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 1), "{path_of:?}");
        // They are written while a sync is under way, which may have been too early for them.
        ask(&mut benches, 1..8);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 1), "{path_of:?}");
        gate.end(0);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![(0, Status::Ok)], 2), "{path_of:?}");
        ask(&mut benches, 8..10);
        gate.end(-libc::ENOSPC);
        let mut answers = turns(&mut benches);
        answers.sort_by_key(|answer| answer.0);
        let all: Vec<_> = (1..10).map(|context| (context, Status::IoError)).collect();
        assert_eq!((answers, gate.syncs()), (all, 2), "{path_of:?}");
        assert!(!gate.store().asked.contains(&IoOp::WriteDurable));
        assert!(disk.flush_failed_here(), "{path_of:?}");
        assert_eq!(benches[0].queue.stats().durable_bytes, 5 * 4096, "{path_of:?}");
    }
}

/// Nobody waits for those whose client has gone: what is under way ends for the others.
#[test]
fn c61_who_waits_may_go_and_the_sync_goes_on() {
    let memory = Memory::new(4096, 0);
    for cache in CACHES {
        let (gate, mut benches) = two(cache);
        (0..2).for_each(|context| benches[0].start(&memory, FLUSH, context));
        (2..4).for_each(|context| benches[1].start(&memory, FLUSH, context));
        let [first, _] = &mut benches;
        first.queue.drop_waiting(&mut first.engine);
        assert_eq!(turns(&mut benches), [(1, Status::IoError)], "{cache:?}: it waited");
        assert_eq!((benches[0].queue.in_flight(), gate.under_way()), (1, 1), "{cache:?}");
        gate.end(0);
        assert_eq!(turns(&mut benches), [(0, Status::Ok)], "{cache:?}");
        gate.end(0);
        assert_eq!(turns(&mut benches), [2, 3].map(|context| (context, Status::Ok)), "{cache:?}");
        assert_eq!((gate.syncs(), gate.under_way()), (2, 0), "{cache:?}");
    }
}

/// Nobody polls: the worker of who waits is woken when a sync ends that somebody else has begun.
#[test]
fn c61_who_waits_is_woken_by_its_worker() {
    let memory = Memory::new(4096, 0);
    let (gate, mut benches) = two(CacheMode::Writeback);
    let rung = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    for (bench, rung) in benches.iter_mut().zip(&rung) {
        let rung = Arc::clone(rung);
        bench.queue.wake_by(move || {
            rung.fetch_add(1, SeqCst);
        });
    }
    let count = || [0, 1].map(|at| rung[at].load(SeqCst));
    (0..2).for_each(|context| benches[0].start(&memory, FLUSH, context));
    (2..4).for_each(|context| benches[1].start(&memory, FLUSH, context));
    assert_eq!((turns(&mut benches), count()), (vec![], [0, 0]));
    assert!(!benches[1].queue.has_to_look(), "and time moves nothing");
    assert_eq!(benches[1].queue.wake_in(), None);
    gate.end(0);
    let mut answers = Vec::new();
    benches[0].turn(&mut answers);
    assert_eq!((answers.len(), count()), (1, [0, 1]), "the first has the next sync, too");
    gate.end(0);
    benches[0].turn(&mut answers);
    assert_eq!((answers.len(), count()), (2, [0, 1]), "it has not looked since");
    assert_eq!(turns(&mut benches), [2, 3].map(|context| (context, Status::Ok)));
    // Who waits for nothing is not woken.
    benches[0].start(&memory, FLUSH, 4);
    gate.end(0);
    assert_eq!((turns(&mut benches), count()), (vec![(4, Status::Ok)], [0, 1]));
}

/// A device whose paths change says EAGAIN for seconds.
#[test]
fn c61_an_interrupted_sync_is_begun_again_after_a_pause() {
    const MS: u64 = 1_000_000;
    let memory = Memory::new(4096, 0);
    for errno in [libc::EINTR, libc::EAGAIN] {
        let (gate, mut benches) = two(CacheMode::None);
        let disk = Arc::clone(benches[0].queue.disk());
        disk.set_now(0);
        benches[0].start(&memory, FLUSH, 0);
        gate.end(-errno);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 1), "not at once");
        assert_eq!(benches[0].queue.wake_in(), Some(Duration::from_millis(1)));
        // It has the turn still, and is closed.
        benches[1].start(&memory, FLUSH, 1);
        disk.set_now(MS);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![], 2));
        assert_eq!(benches[0].queue.wake_in(), None);
        gate.end(0);
        assert_eq!((turns(&mut benches), gate.syncs()), (vec![(0, Status::Ok)], 3));
        // For a minute, and then it has failed.
        let mut now = MS;
        for again in 0..250 {
            gate.end(-errno);
            assert_eq!(turns(&mut benches), [], "{again}");
            now += u64::try_from(benches[1].queue.wake_in().unwrap().as_nanos()).unwrap();
            disk.set_now(now);
            assert_eq!(turns(&mut benches), [], "{again}");
        }
        assert!(now > 60_000 * MS);
        gate.end(-errno);
        assert_eq!(turns(&mut benches), [(1, Status::IoError)]);
        benches[0].start(&memory, FLUSH, 2);
        assert_eq!(turns(&mut benches), [(2, Status::IoError)]);
    }
}

/// A thread of the daemon waits for the sync under way, and then it is its turn; its sync answers guests, too.
#[test]
fn c61_threads_take_the_same_turn() {
    let memory = Memory::new(4096, 0);
    for surface in [Surface::Cached, Surface::Direct] {
        let place = match Place::new(surface, 1 << 20) {
            Ok(place) => place,
            Err(lack) => return lack.skip(),
        };
        let (gate, disk) = (Gate::default(), place.open());
        let mut bench = Bench::new(gate.engine(0), Arc::clone(&disk), 8).unwrap();
        let mut answers = Vec::new();
        bench.start(&memory, FLUSH, 0);
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let own = scope.spawn(|| {
                let synced = disk.sync();
                has_ended.store(true, SeqCst);
                synced
            });
            (0..100).for_each(|_| std::thread::yield_now());
            assert!(!has_ended.load(SeqCst), "{surface:?}: it takes turns with the guest's");
            gate.end(0);
            bench.turn(&mut answers);
            own.join().unwrap().unwrap();
        });
        assert_eq!((answers.len(), gate.syncs()), (1, 1), "{surface:?}");
        // What it hears, guests hear: all who wait fail.
        bench.start(&memory, FLUSH, 1);
        std::thread::scope(|scope| {
            let own = scope.spawn(|| disk.sync());
            // Mostly it waits by now.
            std::thread::sleep(Duration::from_millis(50));
            gate.end(-libc::EIO);
            bench.turn(&mut answers);
            assert!(own.join().unwrap().is_err(), "{surface:?}");
        });
        assert_eq!(answers.last().map(|answer| answer.status), Some(Status::IoError));
    }
}

/// An engine that ends with a sync of it under way: nobody hears how that ended, and nobody waits for it for ever.
#[test]
fn c61_a_sync_whose_worker_has_ended_keeps_nobody_waiting() {
    let memory = Memory::new(4096, 0);
    let (_gate, [mut first, mut second]) = two(CacheMode::Writeback);
    first.start(&memory, FLUSH, 0);
    second.start(&memory, FLUSH, 1);
    drop(first);
    let mut answers = Vec::new();
    second.turn(&mut answers);
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [Status::IoError]);
}

/// The thread of an image makes durable what has an order. Through the page cache it waits for what is under way, and
/// for nothing else.
#[test]
fn c61_the_thread_of_an_image_takes_the_same_turn() {
    let memory = Memory::new(4096, 0);
    for (cache, waits) in [(CacheMode::Writeback, true), (CacheMode::None, false)] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("top.qcow2");
        let new = NewImage { virtual_size: 1 << 20, cluster_bits: 16, backing: None };
        new.write(&File::create_new(&path).unwrap()).unwrap();
        let mut options = OpenOptions::new(Source::Path(path));
        (options.qcow2, options.cache) = (Some(Qcow2::default()), Some(cache));
        let mut disk = match open_unmapped(&options) {
            Err(error @ OpenError::NoDirect { .. }) => {
                return Lack::new(Need::Direct, error).skip();
            }
            disk => disk.unwrap(),
        };
        disk.map_image().unwrap();
        let (gate, disk) = (Gate::default(), Arc::new(disk));
        let mut bench = Bench::new(gate.engine(0), Arc::clone(&disk), 8).unwrap();
        bench.start(&memory, FLUSH, 0);
        assert_eq!(gate.under_way(), 1);
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let grows = scope.spawn(|| {
                let grown = disk.set_file_bytes(2 << 20);
                has_ended.store(true, SeqCst);
                grown
            });
            if !waits {
                return grows.join().unwrap().unwrap();
            }
            (0..100).for_each(|_| std::thread::yield_now());
            assert!(!has_ended.load(SeqCst));
            let mut answers = Vec::new();
            gate.end(0);
            bench.turn(&mut answers);
            assert_eq!(answers.len(), 1);
            grows.join().unwrap().unwrap();
        });
    }
}

/// A file system may take long for each, and they go to threads that all disks share.
#[test]
fn d22_few_erasures_of_a_disk_are_under_way_at_a_time() {
    let memory = Memory::new(4096, 0);
    let (gate, mut benches) = two(CacheMode::Writeback);
    let rung = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&rung);
    benches[1].queue.wake_by(move || {
        counted.fetch_add(1, SeqCst);
    });
    let zeroes = |context: u64| Ask::new(Op::WriteZeroes, context * 4096, 4096);
    (0..10).for_each(|context| benches[0].start(&memory, zeroes(context), context));
    (10..12).for_each(|context| benches[1].start(&memory, zeroes(context), context));
    assert_eq!(gate.erases(), 4, "of the disk, whatever its queues");
    // Others go past them.
    benches[0].start(&memory, Ask::new(Op::Read, 0, 4096), 12);
    let mut answers = Vec::new();
    benches[1].turn(&mut answers);
    assert!(answers.is_empty() && !benches[1].queue.has_to_look(), "it is woken instead");
    benches[0].turn(&mut answers);
    assert_eq!((answers.len(), gate.erases(), rung.load(SeqCst)), (5, 8, 1));
    let mut rest = turns(&mut benches);
    rest.sort_by_key(|answer| answer.0);
    assert_eq!(rest, (4..12).map(|context| (context, Status::Ok)).collect::<Vec<_>>());
    assert_eq!(gate.erases(), 12);
    // Those that have not begun are dropped with their client, and leave their places to others.
    (0..6).for_each(|context| benches[0].start(&memory, zeroes(context), context));
    let [first, _] = &mut benches;
    first.queue.drop_waiting(&mut first.engine);
    let mut dropped = turns(&mut benches);
    dropped.sort_by_key(|answer| answer.0);
    assert_eq!(dropped.iter().filter(|answer| answer.1 == Status::IoError).count(), 2);
    assert_eq!((dropped.len(), gate.erases()), (6, 16));
    // One that is interrupted, or whose engine has gone, gives its place back.
    (0..4).for_each(|context| benches[0].start(&memory, zeroes(context), context));
    benches[1].start(&memory, zeroes(4), 4);
    let [first, mut second] = benches;
    drop(first);
    assert!(rung.load(SeqCst) > 1);
    let mut answers = Vec::new();
    (0..2).for_each(|_| second.turn(&mut answers));
    assert_eq!(answers.len(), 1);
}

/// A snapshot: what was served until then gives back what it had taken ahead while its guest goes on.
#[test]
fn c61_a_sync_of_the_image_below_answers_nobody() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("top.qcow2");
    let new = NewImage { virtual_size: 1 << 20, cluster_bits: 16, backing: None };
    new.write(&File::create_new(&path).unwrap()).unwrap();
    let mut options = OpenOptions::new(Source::Path(path.clone()));
    (options.qcow2, options.cache) = (Some(Qcow2::default()), Some(CacheMode::Writeback));
    let mut disk = open_unmapped(&options).unwrap();
    disk.map_image().unwrap();
    let (gate, disk) = (Gate::default(), Arc::new(disk));
    let memory = Memory::new(65536, 0);
    {
        let mut bench = Bench::new(gate.engine(9), Arc::clone(&disk), 8).unwrap();
        bench.start(&memory, Ask::new(Op::Write, 0, 65536), 0);
        let mut answers = Vec::new();
        while answers.is_empty() {
            bench.turn(&mut answers);
        }
        assert_eq!(answers[0].status, Status::Ok);
    }
    disk.sync().unwrap();
    let shape = disk.overlay_shape().unwrap();
    let snapshot = std::path::Path::new("snapshot.qcow2");
    let (mut made, layer, _) =
        ringway_disk::NewOverlay::make(&path, &disk.file(), snapshot, shape).unwrap();
    made.take_name().unwrap();
    let new = disk.prepare_on_top(layer, &folder.path().join(snapshot)).unwrap();
    let beneath = disk.put_on_top(new, &Arc::default()).unwrap();
    made.keep();
    let before = gate.syncs();
    let mut one = Bench::new(gate.engine(0), Arc::clone(&disk), 8).unwrap();
    let mut other = Bench::new(gate.engine(1), Arc::clone(&disk), 8).unwrap();
    one.start(&memory, FLUSH, 0);
    assert_eq!((gate.syncs() - before, gate.under_way()), (1, 1));
    // It joins the next one.
    other.start(&memory, FLUSH, 1);
    // It waits for nobody's sync of another file.
    beneath.settle(&Arc::default()).unwrap();
    let mut answers = Vec::new();
    gate.end(0);
    one.turn(&mut answers);
    assert_eq!(answers.len(), 1);
    other.turn(&mut answers);
    let begun = (answers.len(), gate.syncs() - before);
    assert_eq!(begun, (1, 2), "the second flush waits for a sync of its own file");
    gate.end(0);
    other.turn(&mut answers);
    assert_eq!(answers.len(), 2);
}

#[test]
fn e64_a_disk_whose_device_has_no_queues_to_poll_says_so() {
    let memory = Memory::new(4096, 0);
    let (gate, disk) = (Gate::default(), disk(CacheMode::None));
    let mut bench = Bench::new(gate.engine(0), Arc::clone(&disk), 512).unwrap();
    assert_eq!(bench.one(&memory, Ask::new(Op::Read, 0, 512)), Status::Ok);
    assert!(!disk.is_not_polled());
    gate.store().cannot_poll = Some(false);
    assert_eq!(bench.one(&memory, Ask::new(Op::Read, 0, 512)), Status::Ok);
    assert!(disk.is_not_polled());
}
