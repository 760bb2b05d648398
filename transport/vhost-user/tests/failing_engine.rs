//! Workers whose engine fails.

use ringway_aio::{Counters, Engine, FileId, Full, Io, Limits, Null, Reaped};
use ringway_disk::{OpenOptions, Source, open};
use ringway_export::{ExportOptions, OnFailure, WorkerOptions};
use ringway_testkit::raw::{DATA, F_VERSION_1, RawGuest};
use ringway_vhost_user::{Ended, Export, Pool, Session};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Fails for good when it is told to.
struct Failing(Null, Arc<AtomicBool>, Arc<Refusals>);

/// Whether it takes no file, and how often it took none.
#[derive(Default)]
struct Refusals(AtomicBool, AtomicU32);

impl Engine for Failing {
    fn limits(&self) -> &Limits {
        self.0.limits()
    }
    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        if self.2.0.load(SeqCst) {
            self.2.1.fetch_add(1, SeqCst);
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        self.0.attach(file)
    }
    fn detach(&mut self, file: FileId) {
        self.0.detach(file);
    }
    fn watch(&mut self, bell: u32, fd: RawFd) -> io::Result<()> {
        self.0.watch(bell, fd)
    }
    fn unwatch(&mut self, bell: u32, fd: RawFd) {
        self.0.unwatch(bell, fd);
    }
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.queue(io) }
    }
    fn submit(&mut self) -> io::Result<()> {
        match self.1.load(SeqCst) {
            true => Err(io::Error::other("the engine is on fire")),
            false => self.0.submit(),
        }
    }
    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.0.reap(out)
    }
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.wait(timeout)
    }
    fn counters(&self) -> Counters {
        self.0.counters()
    }
}

/// The session of its queue ends, later ones are refused, and whoever watches the pool is told.
#[test]
fn b41_a_worker_that_fails_leaves_nobody_waiting() {
    let fails = Arc::new(AtomicBool::new(false));
    let (sender, hears) = channel();
    let on_failure: OnFailure = Arc::new(move || sender.send(()).unwrap());
    let engine = Arc::clone(&fails);
    let pool = Pool::with_engines(1, WorkerOptions::default(), on_failure, move |_| {
        Ok(Failing(Null::new(64)?, Arc::clone(&engine), Arc::default()))
    })
    .unwrap();
    let handle = pool.handles()[0].clone();
    let disk = OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 });
    let disk = Arc::new(open(&disk).unwrap());
    let options = ExportOptions { queues: 1, queue_size: 64 };
    let export = Arc::new(Export::new(disk, options, vec![handle.clone()], 0));
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let serve = |theirs| Session::new(&export, theirs, &stop).unwrap().run();
    std::thread::scope(|scope| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let session = scope.spawn(|| serve(theirs));
        let mut guest = RawGuest::start(ours, 1, 64, F_VERSION_1);
        assert_eq!(guest.simple(0, 0, 0, DATA, 512).0, 0);
        fails.store(true, SeqCst);
        guest.kick(0);
        hears.recv_timeout(Duration::from_secs(60)).expect("nobody is told");
        assert!(guest.client.is_closed(), "its session goes on");
        assert_eq!(session.join().unwrap(), Ended::ByPeer);
        // One that comes now is refused; it does not hang.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let session = scope.spawn(|| serve(theirs));
        let mut guest = RawGuest::connect(ours, F_VERSION_1);
        // What was said before is kept, and not refused: there is nobody any more to say it to.
        assert!(guest.start_queue(0).is_err(), "a dead worker serves, or refuses what was right");
        drop(guest);
        session.join().unwrap();
    });
    assert!(handle.stats().is_err());
    // Its thread ends, although nobody told it to.
    drop(pool);
    assert!(export.resize(Some(1 << 19), true).is_ok(), "nothing is in flight");
}

/// A queue is to go on after a pause, as of a snapshot, when the host has no descriptor for it: it goes on once there is
/// one. Its front-end, which knows nothing of that, has nothing more to say.
#[test]
fn a30_a_queue_that_cannot_go_on_after_a_pause_does_so_later() {
    let refusals = Arc::new(Refusals::default());
    let engine = Arc::clone(&refusals);
    let pool = Pool::with_engines(1, WorkerOptions::default(), Arc::new(|| {}), move |_| {
        Ok(Failing(Null::new(64)?, Arc::default(), Arc::clone(&engine)))
    })
    .unwrap();
    let disk = OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 });
    let disk = Arc::new(open(&disk).unwrap());
    let options = ExportOptions { queues: 1, queue_size: 64 };
    let export = Arc::new(Export::new(disk, options, vec![pool.handles()[0].clone()], 0));
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    std::thread::scope(|scope| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let session = scope.spawn(|| Session::new(&export, theirs, &stop).unwrap().run());
        let mut guest = RawGuest::start(ours, 1, 64, F_VERSION_1);
        assert_eq!(guest.simple(0, 0, 0, DATA, 512).0, 0);
        export.pause().unwrap();
        refusals.0.store(true, SeqCst);
        export.resume().unwrap();
        let begun = Instant::now();
        while refusals.1.load(SeqCst) < 2 && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let tries = refusals.1.load(SeqCst);
        refusals.0.store(false, SeqCst);
        if tries >= 2 {
            assert_eq!(guest.simple(0, 0, 0, DATA, 512).0, 0);
        }
        drop(guest);
        session.join().unwrap();
        assert!(tries >= 2, "it is not tried again");
    });
}
