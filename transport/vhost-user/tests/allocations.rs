//! A worker allocates nothing for the requests of its queues once they are served, however many there are
//! and however many of them ring at a time.
#![allow(missing_docs)]

use ringway_aio::{
    BellId, Counters, Engine, FileId, Full, Io, IoUring, IoUringSetup, Limits, Null, Reaped,
};
use ringway_disk::{EngineKind, Source};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_export::{ExportOptions, Handle, WorkerOptions};
use ringway_testkit::rig::{RigOptions, image, open_patiently};
use ringway_testkit::{Need, skip};
use ringway_vhost_user::{Export, Pool, Queue, Session};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Allocations of workers.
static COUNT: AtomicU64 = AtomicU64::new(0);

fn count() {
    if IS_WORKER.try_with(Cell::get).unwrap_or(false) {
        COUNT.fetch_add(1, SeqCst);
    }
}

struct Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller vouches for both.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller vouches for all three.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Disks of one worker, and queues of each: 300 doorbells.
const DISKS: usize = 2;
const QUEUES: u16 = 150;
const PATIENCE: Duration = Duration::from_secs(60);

/// A front-end with all its queues.
type Guest = (Vec<BlkQueue<()>>, Device);

/// Has each queue read `depth` sectors at a time: all are told before one is waited for.
fn read(guests: &mut [Guest], depth: usize) {
    ask(guests, depth);
    take(guests, |_| depth);
}

fn ask(guests: &mut [Guest], depth: usize) {
    for (queues, device) in guests {
        for queue in queues {
            for _ in 0..depth {
                queue.read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
            }
            queue.submit().unwrap();
        }
    }
}

/// Takes so many answers of each queue, by its number.
fn take(guests: &mut [Guest], depth: impl Fn(usize) -> usize) {
    let queues = guests.iter_mut().flat_map(|(queues, _)| queues);
    for (queue, depth) in queues.enumerate().map(|(at, queue)| (queue, depth(at))) {
        assert!(queue.wait_for(u16::try_from(depth).unwrap(), Some(PATIENCE)).unwrap());
        assert_eq!(queue.completions().filter(|done| done.is_ok()).count(), depth);
    }
}

/// Most doorbells that [`AllAtOnce`] has told of at a time.
static MOST: AtomicU64 = AtomicU64::new(0);

/// An engine that tells of all doorbells at once, however many have rung. Those that learn of them by epoll
/// tell of 64 at a time, and so may io_uring, in portions that the kernel chooses.
struct AllAtOnce<E>(E);

impl<E: Engine> Engine for AllAtOnce<E> {
    fn limits(&self) -> &Limits {
        self.0.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.0.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.0.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.0.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.0.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { self.0.queue(io) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.0.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        let mut found = self.0.reap(out);
        loop {
            let rung = out.rung.len();
            self.0.poll_doorbells().unwrap();
            found += self.0.reap(out);
            if out.rung.len() == rung {
                MOST.fetch_max(rung as u64, SeqCst);
                return found;
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.0.counters()
    }
}

/// Stops the worker with its next request, until it is let go.
struct Gate {
    stopped: Arc<AtomicBool>,
    open: Arc<AtomicBool>,
}

impl Gate {
    fn before_next_request(worker: &Handle<Queue>) -> Self {
        let begun = Instant::now();
        let (stopped, open) = (Arc::default(), Arc::default());
        let gate = Self { stopped: Arc::clone(&stopped), open: Arc::clone(&open) };
        let stop = Arc::new(move || {
            stopped.store(true, SeqCst);
            while !open.load(SeqCst) {
                std::thread::yield_now();
            }
        });
        // A worker that has taken requests since it was asked last is not quiet.
        while !worker.ask_inspect(0, u64::MAX, Some(stop.clone())).unwrap().recv().unwrap().quiet {
            assert!(begun.elapsed() < PATIENCE, "it is never quiet");
        }
        gate
    }

    fn wait(&self) {
        let begun = Instant::now();
        while !self.stopped.load(SeqCst) {
            assert!(begun.elapsed() < PATIENCE, "no request comes");
            std::thread::yield_now();
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open.store(true, SeqCst);
    }
}

/// All queues are at rest, each of them rings while the worker is kept from looking, and then all of them are
/// busy: none of it costs an allocation.
fn no_request_allocates<E: Engine + 'static>(
    disks: &[RigOptions],
    make: impl Fn() -> io::Result<E> + Clone + Send + 'static,
) {
    let pool = Pool::with_engines(1, WorkerOptions::default(), Arc::new(|| {}), move |_| {
        IS_WORKER.set(true);
        make()
    });
    let pool = pool.unwrap();
    let exports: Vec<_> = disks
        .iter()
        .map(|options| {
            let disk = Arc::new(open_patiently(&options.disk).unwrap());
            let options = ExportOptions { queues: QUEUES, queue_size: 16 };
            Arc::new(Export::new(disk, options, pool.handles().to_vec(), 0))
        })
        .collect();
    let (_stopper, stop) = UnixStream::pair().unwrap();
    let stop = Arc::new(OwnedFd::from(stop));
    std::thread::scope(|scope| {
        let guest = |export: &Arc<Export>| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let session = Session::new(export, theirs, &stop).unwrap();
            scope.spawn(move || session.run());
            let options = Options::new().queues(QUEUES).queue_size(16).memory(32 << 20);
            let mut device = options.patience(PATIENCE).over(ours).unwrap();
            (device.queues().unwrap(), device)
        };
        let mut guests: Vec<Guest> = exports.iter().map(guest).collect();
        let worker = &pool.handles()[0];
        // While one queue is busy the others are put to rest: from then on they ring.
        let (queues, device) = &mut guests[0];
        for _ in 0..5000 {
            queues[0].read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
            queues[0].wait_for(1, Some(PATIENCE)).unwrap();
            assert!(queues[0].completions().all(|done| done.is_ok()));
        }
        let kicks = || -> u64 {
            worker.stats().unwrap().queues.iter().map(|queue| queue.totals.kicks).sum()
        };
        let kicks_before = kicks();
        let gate = Gate::before_next_request(worker);
        let before = COUNT.load(SeqCst);
        assert!(before > 0, "workers are counted");
        queues[0].read(0, device.pool().alloc(512).unwrap(), ()).unwrap();
        queues[0].submit().unwrap();
        gate.wait();
        ask(&mut guests, 4);
        drop(gate);
        take(&mut guests, |at| if at == 0 { 5 } else { 4 });
        assert_eq!(COUNT.load(SeqCst) - before, 0, "allocations while all ring");
        let kicks = kicks() - kicks_before;
        // The worker may have found the request that stopped it before its bell rang.
        assert!(kicks + 1 >= u64::from(QUEUES) * disks.len() as u64, "{kicks} have rung");
        let before = COUNT.load(SeqCst);
        for _ in 0..20 {
            read(&mut guests, 8);
        }
        assert_eq!(COUNT.load(SeqCst) - before, 0, "allocations while all are busy");
        drop(guests);
    });
}

/// Each queue has four eventfds, with both sides in this process.
fn lacks_descriptors() -> bool {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let needed = 6 * u64::from(QUEUES) * DISKS as u64;
    limit.maximum.is_some_and(|most| most < needed)
}

#[test]
fn three_hundred_queues_cost_no_allocation() {
    assert!(!lacks_descriptors(), "too few descriptors may be open");
    let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
    let nothing = || RigOptions::new(source.clone(), EngineKind::Null);
    no_request_allocates(&[nothing(), nothing()], || Null::new(1024));
    MOST.store(0, SeqCst);
    no_request_allocates(&[nothing(), nothing()], || Null::new(1024).map(AllAtOnce));
    let most = MOST.load(SeqCst);
    assert!(most + 1 >= u64::from(QUEUES) * DISKS as u64, "{most} at a time");
    match IoUring::new(IoUringSetup::new(8)) {
        Ok(_) => {
            let folders = [(); DISKS].map(|()| tempfile::tempdir().unwrap());
            let disks = folders.each_ref().map(|folder| {
                RigOptions::buffered(&image(folder.path(), 1 << 20), EngineKind::IoUring)
            });
            no_request_allocates(&disks, || IoUring::new(IoUringSetup::new(1024)));
        }
        Err(error) => skip(Need::IoUring, error),
    }
}
