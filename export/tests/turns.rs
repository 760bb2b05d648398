//! Whose turn it is: idle queues are not looked at, and full ones leave others their share. Counts
//! turns and requests, never time.
#![allow(missing_docs)]

use ringway_aio::Null;
use ringway_core::{ByteRange, Op, Request, Segment, Status};
use ringway_disk::{Disk, EngineKind, Source};
use ringway_export::{
    Armed, Broken, Handle, Polling, Pop, QueueLifecycle, RequestQueue, Worker, WorkerOptions,
    command_channel,
};
use ringway_testkit::rig::{RigOptions, open_patiently};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// How long anything may take before a test fails: a loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);
/// More than any test takes.
const FULL: u64 = 1 << 60;

/// What a queue is asked and does, counted; the guest's side of it too.
#[derive(Default)]
struct Counts {
    offered: AtomicU64,
    popped: AtomicU64,
    completed: AtomicU64,
    /// All that a worker does with the queue, whether it brings anything or not.
    touched: AtomicU64,
    /// The most requests of others that were taken between two looks at this queue.
    overtaken_max: AtomicU64,
}

struct Counted {
    counts: Arc<Counts>,
    /// Requests of all queues of the worker, as if there were no budgets.
    all: Arc<AtomicU64>,
    seen: Option<u64>,
    bell: Arc<OwnedFd>,
    bytes: u32,
    effort: u32,
}

impl Counted {
    fn touch(&self) {
        self.counts.touched.fetch_add(1, SeqCst);
    }

    fn is_offered(&self) -> bool {
        self.counts.offered.load(SeqCst) > self.counts.popped.load(SeqCst)
    }
}

impl RequestQueue for Counted {
    type Token = ();

    fn pop(&mut self, request: &mut Request) -> Result<Pop<()>, Broken> {
        self.touch();
        let all = self.all.load(SeqCst);
        if let Some(seen) = self.seen {
            self.counts.overtaken_max.fetch_max(all - seen, SeqCst);
        }
        self.seen = Some(all);
        if !self.is_offered() {
            return Ok(Pop::Empty);
        }
        self.counts.popped.fetch_add(1, SeqCst);
        self.all.fetch_add(1, SeqCst);
        self.seen = Some(all + 1);
        request.op = Op::Read;
        request.range = ByteRange::from_sector(0, self.bytes.into()).unwrap();
        request.segments.clear();
        // The null engine moves no data.
        let base = std::ptr::without_provenance_mut(4096);
        assert!(request.segments.push(Segment { base, len: self.bytes as usize }));
        Ok(Pop::Request(()))
    }

    fn effort(&self) -> u32 {
        self.effort
    }

    fn complete(&mut self, (): (), status: Status, _written: u32) {
        assert_eq!(status, Status::Ok);
        self.counts.completed.fetch_add(1, SeqCst);
    }

    fn publish(&mut self) -> io::Result<()> {
        self.touch();
        Ok(())
    }

    fn has_work(&self) -> bool {
        self.touch();
        self.is_offered()
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        self.touch();
        Ok(if self.is_offered() { Armed::WorkArrived } else { Armed::Quiet })
    }

    fn disarm(&mut self) {
        self.touch();
        // It slept, or its worker did.
        self.seen = None;
    }
}

impl QueueLifecycle for Counted {
    fn doorbell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        64
    }
}

/// A guest's hand on one queue.
struct Guest {
    counts: Arc<Counts>,
    bell: Arc<OwnedFd>,
}

impl Guest {
    fn kick(&self) {
        rustix::io::write(&*self.bell, &1u64.to_ne_bytes()).unwrap();
    }

    /// One request, and its answer.
    fn ask(&self) {
        let wanted = self.counts.completed.load(SeqCst) + 1;
        self.counts.offered.fetch_add(1, SeqCst);
        self.kick();
        let begun = Instant::now();
        while self.counts.completed.load(SeqCst) < wanted {
            assert!(begun.elapsed() < PATIENCE, "no answer");
            std::thread::yield_now();
        }
    }
}

/// One worker with a null engine.
struct Scene {
    handle: Handle<Counted>,
    disk: Arc<Disk>,
    all: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scene {
    fn new(polling: Polling, depth: u32) -> Self {
        let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
        let disk = open_patiently(&RigOptions::new(source, EngineKind::Null).disk).unwrap();
        let (handle, inbox) = command_channel().unwrap();
        let options = WorkerOptions { polling, ..WorkerOptions::default() };
        let thread = std::thread::spawn(move || {
            let engine = Null::new(depth).unwrap();
            Worker::new(engine, inbox, &options).unwrap().run().unwrap();
        });
        Self { handle, disk: Arc::new(disk), all: Arc::default(), thread: Some(thread) }
    }

    /// A queue that has `offered` requests of `bytes` bytes from the start.
    fn queue(&self, offered: u64, bytes: u32) -> Guest {
        self.dear_queue(offered, bytes, 3)
    }

    /// As [`Scene::queue`], with requests of `effort` descriptors.
    fn dear_queue(&self, offered: u64, bytes: u32, effort: u32) -> Guest {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let guest = Guest { counts: Arc::default(), bell: Arc::new(bell) };
        guest.counts.offered.store(offered, SeqCst);
        let queue = Counted {
            counts: Arc::clone(&guest.counts),
            all: Arc::clone(&self.all),
            seen: None,
            bell: Arc::clone(&guest.bell),
            bytes,
            effort,
        };
        self.handle.add(queue, Arc::clone(&self.disk), false, Box::new(|_| {})).unwrap();
        guest
    }

    fn sleeps(&self) -> u64 {
        self.handle.stats().unwrap().sleeps
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.handle.exit();
        if let Some(thread) = self.thread.take() {
            if thread.join().is_err() && !std::thread::panicking() {
                panic!("the worker panicked");
            }
        }
    }
}

/// As 100 disks of 16 queues have them. Fewer where not so many descriptors may be open.
fn many() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: limit.maximum, ..limit },
    );
    let most = limit.maximum.map_or(1600, |most| usize::try_from(most / 2).unwrap_or(1600));
    most.min(1600)
}

fn idle_queues_are_left_alone(polling: Polling) {
    let scene = Scene::new(polling, 64);
    let idle: Vec<_> = (0..many()).map(|_| scene.queue(0, 512)).collect();
    let busy = scene.queue(0, 512);
    let touched = || idle.iter().map(|guest| guest.counts.touched.load(SeqCst)).sum::<u64>();
    // They are looked at for a while after they came: 2000 turns at most, and a turn answers one
    // request where the worker finds the next before it has armed all queues and never sleeps.
    let mut asked = 0;
    loop {
        let before = touched();
        (0..200).for_each(|_| busy.ask());
        asked += 200;
        if touched() == before {
            break;
        }
        assert!(asked < 6000, "idle queues go on being looked at");
    }
    let before = touched();
    (0..500).for_each(|_| busy.ask());
    assert_eq!(touched(), before, "500 requests of one queue touch no other");
    // Without any load the worker is not woken. Asking wakes it once or twice.
    let sleeps = scene.sleeps();
    std::thread::sleep(Duration::from_millis(300));
    assert!(scene.sleeps() <= sleeps + 3, "it wakes without a reason");
    // Each of them is served when it rings, and left alone again.
    idle.iter().step_by(100).for_each(Guest::ask);
    busy.ask();
}

#[test]
fn idle_queues_are_left_alone_by_a_worker_that_polls() {
    idle_queues_are_left_alone(Polling::default());
}

#[test]
fn idle_queues_are_left_alone_by_a_worker_that_sleeps_at_once() {
    idle_queues_are_left_alone(Polling::Never);
}

/// One queue full of the largest requests, one full of the smallest, both kicked without a pause:
/// between two looks at a neighbour each has two turns at most, 16 requests or 2 MiB each.
#[test]
fn a19_full_queues_leave_the_neighbour_its_share() {
    let scene = Scene::new(Polling::default(), 2048);
    let (large, small) = (scene.queue(FULL, 4 << 20), scene.queue(FULL, 512));
    let neighbour = scene.queue(0, 4096);
    let storm = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while storm.load(SeqCst) {
                large.kick();
                small.kick();
            }
        });
        (0..200).for_each(|_| neighbour.ask());
        storm.store(false, SeqCst);
    });
    let overtaken = neighbour.counts.overtaken_max.load(SeqCst);
    assert!(overtaken <= 2 * (16 + 1), "{overtaken} requests of others between two looks");
    assert!(overtaken > 0, "nobody else had a turn: this tested nothing");
    let (large, small) = (&large.counts.completed, &small.counts.completed);
    assert!(large.load(SeqCst) > 200 && small.load(SeqCst) > 200, "these get on, too");
}

/// The dearest requests cost their queue its turns: between two looks at a neighbour there is one of
/// them at most, and in the long run one in two turns.
#[test]
fn a21_dear_requests_leave_the_neighbour_its_share() {
    let scene = Scene::new(Polling::default(), 2048);
    let dear = scene.dear_queue(FULL, 512, 1026);
    let neighbour = scene.queue(0, 4096);
    (0..500).for_each(|_| neighbour.ask());
    let overtaken = neighbour.counts.overtaken_max.load(SeqCst);
    // Up to two turns lie between two looks.
    assert!((1..=2).contains(&overtaken), "{overtaken} dear requests between two looks");
    let (before, begun) = (scene.handle.stats().unwrap(), Instant::now());
    let popped = dear.counts.popped.load(SeqCst);
    while dear.counts.popped.load(SeqCst) < popped + 10_000 {
        assert!(begun.elapsed() < PATIENCE, "it does not get on");
        std::thread::yield_now();
    }
    // Both of one moment: the worker goes on while this thread waits for a CPU.
    let after = scene.handle.stats().unwrap();
    let (turns, popped) = (after.turns - before.turns, after.requests - before.requests);
    // Two turns each; a little is forgiven when nobody waits.
    assert!(2 * popped <= turns + turns / 8 + 4, "{popped} requests in {turns} turns");
}

/// An engine with room for less than one queue has: every queue gets an equal part of it.
#[test]
fn a19_a_small_engine_is_shared_by_full_queues() {
    let scene = Scene::new(Polling::default(), 4);
    let guests: Vec<_> = (0..5).map(|_| scene.queue(FULL, 4096)).collect();
    // Those that came first have a start.
    let all = || guests.iter().map(|guest| guest.counts.completed.load(SeqCst)).collect::<Vec<_>>();
    // The counts go on while this thread waits for a CPU between two of them: one of ten looks is in time.
    let mut samples = Vec::new();
    let equal = (0..10).any(|_| {
        let (start, until) = (all(), scene.all.load(SeqCst) + 200_000);
        let begun = Instant::now();
        while scene.all.load(SeqCst) < until {
            assert!(begun.elapsed() < PATIENCE, "it does not get on");
            std::thread::sleep(Duration::from_millis(1));
        }
        let done: Vec<_> = all().iter().zip(start).map(|(now, then)| now - then).collect();
        let (least, most) = (*done.iter().min().unwrap(), *done.iter().max().unwrap());
        samples.push(done);
        4 * least > 3 * most
    });
    assert!(equal, "{samples:?}");
}

/// Commands that are there at once, as those of many front-ends are that ask without a pause: after 64 of
/// them it is the queues' turn.
#[test]
fn b31_commands_without_a_pause_leave_requests_their_turns() {
    let scene = Scene::new(Polling::default(), 64);
    let _busy = scene.queue(FULL, 512);
    let (go, held) = std::sync::mpsc::channel::<()>();
    let (begins, begun) = std::sync::mpsc::channel();
    let promises: Vec<_> = std::thread::scope(|scope| {
        let (id, handle) = (scene.handle.stats().unwrap().queues[0].id, scene.handle.clone());
        let hold = move |_: &mut Counted| {
            begins.send(()).unwrap();
            let _ = held.recv();
        };
        scope.spawn(move || handle.edit(id, hold).unwrap());
        begun.recv().unwrap();
        let promises = (0..1000).map(|_| scene.handle.ask_stats(false).unwrap()).collect();
        go.send(()).unwrap();
        promises
    });
    let turns: Vec<_> = promises.iter().map(|promise| promise.recv().unwrap().turns).collect();
    let most = turns.chunk_by(|one, next| one == next).map(<[u64]>::len).max().unwrap();
    assert_eq!(most, 64, "commands in one turn");
}
