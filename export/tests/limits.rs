//! Limits of a disk on a worker: what may not pass stays in the ring and costs nobody anything. Where a
//! limit is to hold for the whole of a test, it is a byte a second: one request passes, and the next
//! one would in an hour.
#![allow(missing_docs)]

use ringway_aio::Null;
use ringway_core::{ByteRange, Op, Request, Segment, Status};
use ringway_disk::{Disk, EngineKind, Source};
use ringway_export::{
    Armed, Broken, Handle, Polling, Pop, QueueId, QueueLifecycle, RequestQueue, Worker,
    WorkerOptions, command_channel,
};
use ringway_testkit::rig::{RigOptions, open_patiently};
use ringway_throttle::{LimitKind, Member, Rates, Throttle};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// What a queue is asked and does; the guest's side of it too.
#[derive(Default)]
struct Counts {
    offered: AtomicU64,
    /// A predecessor has left so many of them in flight.
    left: AtomicU64,
    popped: AtomicU64,
    completed: AtomicU64,
    /// Kicks are asked for.
    armed: AtomicBool,
    /// Somebody else can find what is left.
    recorded: bool,
}

struct Ring {
    counts: Arc<Counts>,
    bell: Arc<OwnedFd>,
    op: Op,
    winds_down: bool,
}

impl RequestQueue for Ring {
    type Token = ();

    fn pop(&mut self, request: &mut Request) -> Result<Pop<()>, Broken> {
        if !self.has_work() {
            return Ok(Pop::Empty);
        }
        self.counts.popped.fetch_add(1, SeqCst);
        request.op = self.op;
        request.range = ByteRange::default();
        request.segments.clear();
        if self.op.moves_data() {
            request.range = ByteRange::from_sector(0, 4096).unwrap();
            // The null engine moves no data.
            let base = std::ptr::without_provenance_mut(4096);
            assert!(request.segments.push(Segment { base, len: 4096 }));
        }
        Ok(Pop::Request(()))
    }

    fn effort(&self) -> u32 {
        3
    }

    fn complete(&mut self, (): (), status: Status, _written: u32) {
        assert_eq!(status, Status::Ok);
        self.counts.completed.fetch_add(1, SeqCst);
    }

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn has_work(&self) -> bool {
        let last = if self.winds_down { &self.counts.left } else { &self.counts.offered };
        last.load(SeqCst) > self.counts.popped.load(SeqCst)
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        self.counts.armed.store(true, SeqCst);
        Ok(if self.has_work() { Armed::WorkArrived } else { Armed::Quiet })
    }

    fn disarm(&mut self) {
        self.counts.armed.store(false, SeqCst);
    }
}

impl QueueLifecycle for Ring {
    fn doorbell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        64
    }

    fn wind_down(&mut self) {
        self.winds_down = true;
    }

    fn can_leave(&self) -> bool {
        self.counts.recorded
    }

    fn backlog(&self) -> usize {
        let (left, popped) = (self.counts.left.load(SeqCst), self.counts.popped.load(SeqCst));
        usize::try_from(left.saturating_sub(popped)).unwrap()
    }
}

/// A guest's hand on one queue.
struct Guest {
    id: QueueId,
    counts: Arc<Counts>,
    bell: Arc<OwnedFd>,
}

impl Guest {
    fn kick(&self) {
        rustix::io::write(&*self.bell, &1u64.to_ne_bytes()).unwrap();
    }

    fn popped(&self) -> u64 {
        self.counts.popped.load(SeqCst)
    }

    /// So many more requests, and their answers.
    fn ask(&self, more: u64) {
        let wanted = self.counts.offered.fetch_add(more, SeqCst) + more;
        self.kick();
        self.is_answered(wanted);
    }

    fn is_answered(&self, wanted: u64) {
        until("no answer", || self.counts.completed.load(SeqCst) >= wanted);
    }
}

#[track_caller]
fn until(what: &str, so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// One worker with a null engine.
struct Scene {
    handle: Handle<Ring>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scene {
    fn new() -> Self {
        Self::polling(Polling::default())
    }

    fn polling(polling: Polling) -> Self {
        let (handle, inbox) = command_channel().unwrap();
        let options = WorkerOptions { polling, ..WorkerOptions::default() };
        let thread = std::thread::spawn(move || {
            let engine = Null::new(64).unwrap();
            Worker::new(engine, inbox, &options).unwrap().run().unwrap();
        });
        Self { handle, thread: Some(thread) }
    }

    fn queue(&self, disk: &Arc<Disk>, op: Op, counts: Counts) -> Guest {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let counts = Arc::new(counts);
        let (counts_of, bell_of) = (Arc::clone(&counts), Arc::clone(&bell));
        let ring = Ring { counts: counts_of, bell: bell_of, op, winds_down: false };
        let id = self.handle.add(ring, Arc::clone(disk), false, Box::new(|_| {})).unwrap();
        Guest { id, counts, bell }
    }

    fn change(&self, disk: &Arc<Disk>, limits: Vec<Arc<Member>>) {
        disk.set_limits(limits);
        self.handle.adopt_limits(Arc::clone(disk)).unwrap().recv().unwrap();
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

fn rates(kind: LimitKind, avg: u64) -> Rates {
    let mut rates = Rates::default();
    rates[kind].avg = Some(avg);
    rates
}

fn disk(kind: LimitKind, avg: u64) -> Arc<Disk> {
    let disk = unlimited();
    disk.set_limits(vec![Member::alone(&rates(kind, avg)).unwrap()]);
    disk
}

fn unlimited() -> Arc<Disk> {
    let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
    Arc::new(open_patiently(&RigOptions::new(source, EngineKind::Null).disk).unwrap())
}

fn offering(offered: u64) -> Counts {
    Counts { offered: offered.into(), ..Counts::default() }
}

/// A queue of ten requests, one of which has passed.
fn throttled(scene: &Scene) -> (Arc<Disk>, Guest) {
    let disk = disk(LimitKind::Bps, 1);
    let guest = scene.queue(&disk, Op::Read, offering(10));
    guest.is_answered(1);
    (disk, guest)
}

#[test]
fn a23_throttled_requests_stay_in_the_ring_and_the_worker_sleeps() {
    for polling in [Polling::default(), Polling::Never] {
        let scene = Scene::polling(polling);
        let (_, guest) = throttled(&scene);
        let before = scene.handle.stats().unwrap();
        let begun = Instant::now();
        // A guest that kicks although nobody asks for it.
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(60));
            guest.kick();
        }
        let after = scene.handle.stats().unwrap();
        assert_eq!(guest.popped(), 1, "the rest stays in the ring");
        assert!(!guest.counts.armed.load(SeqCst), "kicks are asked for in vain");
        // Ten looks a second, five kicks, and the questions of this test.
        let wakes = u64::try_from(begun.elapsed().as_millis()).unwrap() / 100 + 1;
        let sleeps = after.sleeps - before.sleeps;
        assert!(sleeps <= wakes + 5 + 4, "{sleeps} sleeps in {:?}", begun.elapsed());
        assert_eq!(after.queues[0].in_flight, 0);
        let waited = u128::from(after.disk.throttled_ns);
        assert!(2 * waited >= begun.elapsed().as_nanos(), "{waited} ns of {:?}", begun.elapsed());
    }
}

#[test]
fn a23_neighbours_on_the_same_worker_are_served_as_ever() {
    let scene = Scene::new();
    let (_, guest) = throttled(&scene);
    let neighbour = scene.queue(&unlimited(), Op::Read, Counts::default());
    // More turns than an idle queue stays in the list for.
    (0..3000).for_each(|_| neighbour.ask(1));
    neighbour.ask(1000);
    assert_eq!(guest.popped(), 1);
}

#[test]
fn a23_limits_that_are_lifted_or_raised_wake_who_waits() {
    let scene = Scene::new();
    let (disk, guest) = throttled(&scene);
    scene.change(&disk, vec![Member::alone(&rates(LimitKind::Bps, 1 << 30)).unwrap()]);
    guest.is_answered(10);
    scene.change(&disk, vec![Member::alone(&rates(LimitKind::Bps, 1)).unwrap()]);
    guest.counts.offered.fetch_add(100, SeqCst);
    guest.kick();
    guest.is_answered(11);
    scene.change(&disk, Vec::new());
    guest.is_answered(110);
    assert!(scene.handle.stats().unwrap().disk.throttled_ns > 0, "what was counted is kept");
    guest.ask(1000);
}

#[test]
fn a23_a_throttled_queue_stops_at_once_and_goes_on_from_there() {
    let scene = Scene::new();
    let (_, guest) = throttled(&scene);
    let stopped = scene.handle.stop(guest.id).unwrap().recv_timeout(PATIENCE);
    let stopped = stopped.unwrap_or_else(|_| panic!("it does not stop"));
    assert_eq!((guest.popped(), stopped.stats.reads), (1, 1));
    // As after a reset, a pause or a drain: the same ring, on a disk without limits here.
    let ring = Ring { winds_down: false, ..stopped.ring };
    scene.handle.add(ring, unlimited(), false, Box::new(|_| {})).unwrap();
    guest.is_answered(10);
}

/// A queue that is stopped takes no more of what its predecessor left than its limit lets pass, whoever
/// claims that there is a predecessor: the rest stays in the record, and is taken from there.
#[test]
fn a23_what_a_predecessor_left_is_limited_too_and_never_dropped() {
    let scene = Scene::new();
    let disk = disk(LimitKind::Bps, 1);
    let counts = Counts { offered: 10.into(), left: 8.into(), recorded: true, ..Counts::default() };
    let guest = scene.queue(&disk, Op::Read, counts);
    guest.is_answered(1);
    let mut id = guest.id;
    for _ in 0..20 {
        let stopped = scene.handle.stop(id).unwrap().recv_timeout(PATIENCE);
        let ring = stopped.unwrap_or_else(|_| panic!("it does not stop")).ring;
        assert_eq!((guest.popped(), ring.backlog()), (1, 7), "the rest stays in the record");
        let ring = Ring { winds_down: false, ..ring };
        id = scene.handle.add(ring, Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
    }
    scene.change(&disk, Vec::new());
    guest.is_answered(10);
}

/// Without a limit, or within one, it is all carried out before the queue stops.
#[test]
fn a23_what_a_predecessor_left_is_carried_out_before_a_queue_stops() {
    for (rate, recorded) in [(None, false), (None, true), (Some(1000), false), (Some(5), false)] {
        let scene = Scene::new();
        let disk = rate.map_or_else(unlimited, |rate| disk(LimitKind::Iops, rate));
        let counts = Counts { offered: 10.into(), left: 8.into(), recorded, ..Counts::default() };
        let guest = scene.queue(&disk, Op::Read, counts);
        let stopped = scene.handle.stop(guest.id).unwrap().recv_timeout(PATIENCE);
        assert!(stopped.is_ok(), "it does not stop");
        assert!(guest.popped() >= 8, "{rate:?}, {recorded}: {}", guest.popped());
    }
}

/// Where nothing can be left to anybody, as while a guest is migrated, its limit lets all of it pass: nobody
/// waits, and nothing is lost. A limit that is set meanwhile changes nothing.
#[test]
fn a23_a_queue_that_cannot_leave_its_backlog_carries_it_out_and_stops() {
    let scene = Scene::new();
    let counts = Counts { offered: 10.into(), left: 8.into(), ..Counts::default() };
    let guest = scene.queue(&disk(LimitKind::Bps, 1), Op::Read, counts);
    guest.is_answered(1);
    let stopped = scene.handle.stop(guest.id).unwrap().recv_timeout(PATIENCE);
    let stopped = stopped.unwrap_or_else(|_| panic!("it does not stop"));
    assert!(guest.popped() >= 8, "{} of 8", guest.popped());
    assert_eq!(stopped.ring.backlog(), 0);
}

/// A front-end that forges the record of what is in flight, and stops its queue again and again: a bounded number
/// passes its limit, and then nothing until that is paid for.
#[test]
fn a26_a_record_that_is_forged_again_and_again_gains_nothing() {
    const LEFT: u64 = 1024;
    let (scene, disk) = (Scene::new(), disk(LimitKind::Bps, 1));
    let counts = Arc::new(Counts::default());
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let mut ring = Ring { counts: Arc::clone(&counts), bell, op: Op::Read, winds_down: false };
    for round in 1..=40 {
        counts.left.fetch_add(LEFT, SeqCst);
        let id = scene.handle.add(ring, Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
        let stopped = scene.handle.stop(id).unwrap().recv_timeout(PATIENCE);
        ring = stopped.unwrap_or_else(|_| panic!("it does not stop")).ring;
        ring.winds_down = false;
        if round <= 16 {
            assert_eq!(ring.backlog(), 0, "what a killed daemon may have left is carried out");
        }
    }
    let popped = counts.popped.load(SeqCst);
    assert!(popped <= 16 * LEFT + 2 * 16, "{popped} requests of a disk with a byte a second");
}

/// Queues that are stopped and started again and again, with one request each: of the limits of one
/// kind too, nothing is had in advance but once.
#[test]
fn a23_a_queue_that_is_restarted_gets_no_more_than_its_limit() {
    for (kind, op) in [(LimitKind::BpsWrite, Op::Write), (LimitKind::BpsRead, Op::Read)] {
        let (scene, disk) = (Scene::new(), disk(kind, 1));
        let counts = Arc::new(offering(1000));
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let mut ring =
            Ring { counts: Arc::clone(&counts), bell: Arc::clone(&bell), op, winds_down: false };
        for _ in 0..50 {
            let id = scene.handle.add(ring, Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
            // Once its worker has looked at it, which it may be asked to before.
            let turns = || scene.handle.stats().unwrap().turns;
            let begun = turns();
            until("no turn", || turns() > begun);
            let stopped = scene.handle.stop(id).unwrap().recv_timeout(PATIENCE);
            ring = stopped.unwrap_or_else(|_| panic!("it does not stop")).ring;
            ring.winds_down = false;
        }
        // One with credit and one in advance.
        assert_eq!(counts.popped.load(SeqCst), 2, "{kind:?}");
    }
}

#[test]
fn a23_flushes_cost_nothing_and_get_on_beside_data() {
    let scene = Scene::new();
    let bytes = disk(LimitKind::Bps, 1);
    let flushes = scene.queue(&bytes, Op::Flush, Counts::default());
    flushes.ask(1000);
    let requests = disk(LimitKind::IopsWrite, 500);
    let data = scene.queue(&requests, Op::Write, offering(u64::MAX >> 1));
    let flushes = scene.queue(&requests, Op::Flush, Counts::default());
    (0..20).for_each(|_| flushes.ask(3));
    assert!(data.popped() > 0);
}

#[test]
fn a23_a_limit_of_writes_leaves_reads_alone() {
    let scene = Scene::new();
    let disk = disk(LimitKind::BpsWrite, 1);
    let writes = scene.queue(&disk, Op::Write, offering(100));
    // One with credit, and one in advance. Before reads come: the queue that asks first has the first
    // credit, even one that does not need it.
    until("it waits", || writes.popped() == 2);
    let reads = scene.queue(&disk, Op::Read, Counts::default());
    (0..100).for_each(|_| reads.ask(10));
    assert_eq!(writes.popped(), 2);
}

#[test]
fn a23_an_idle_queue_with_limits_wakes_nobody() {
    let scene = Scene::new();
    let guest = scene.queue(&disk(LimitKind::Iops, 1000), Op::Read, Counts::default());
    (0..20).for_each(|_| guest.ask(10));
    let sleeps = || scene.handle.stats().unwrap().sleeps;
    // A worker that got no CPU may have something left to do in the first half second.
    let rests = (0..10).any(|_| {
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(500));
        sleeps() <= before + 2
    });
    assert!(rests, "it wakes without a reason");
    until("kicks are not asked for", || guest.counts.armed.load(SeqCst));
    guest.ask(1);
}

/// A disk that is the only one to ask gets all of its group's rate, and equal parts of it get those
/// that all ask, whatever their number of queues. By counts of each other, not by the clock.
#[test]
fn a24_disks_of_a_group_share_it() {
    let scene = Scene::new();
    let throttle = Arc::new(Throttle::new(&rates(LimitKind::Iops, 4000)).unwrap());
    let member = || {
        let disk = unlimited();
        disk.set_limits(vec![Member::of_group(&throttle)]);
        disk
    };
    let (one, many) = (member(), member());
    let one = scene.queue(&one, Op::Read, offering(u64::MAX >> 1));
    let many: Vec<_> =
        (0..4).map(|_| scene.queue(&many, Op::Read, offering(u64::MAX >> 1))).collect();
    let sum = || many.iter().map(Guest::popped).sum::<u64>();
    // Who shares is known by then.
    until("it does not get on", || one.popped() > 1000);
    // Both counts go on while this thread waits for a CPU between them: one of ten looks is in time.
    let mut samples = Vec::new();
    let equal = (0..10).any(|_| {
        let before = (one.popped(), sum());
        until("it does not get on", || one.popped() > before.0 + 3000);
        let (one, many) = (one.popped() - before.0, sum() - before.1);
        samples.push((one, many));
        one.abs_diff(many) * 20 <= one
    });
    assert!(equal, "{samples:?}");
}
