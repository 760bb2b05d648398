//! When a busy worker looks at doorbells that its engine does not see by itself.

use super::*;
use ringway_aio::{BellId, Counters, FileId, Full, Io, Limits, Reaped};

/// Counts operations between looks.
struct Looked {
    null: Null,
    since: u32,
    most: Arc<AtomicU32>,
}

impl Engine for Looked {
    fn limits(&self) -> &Limits {
        self.null.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        self.null.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.null.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.null.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.null.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        self.since += 1;
        self.most.fetch_max(self.since, SeqCst);
        // SAFETY: passed on to the caller.
        unsafe { self.null.queue(io) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.null.submit()
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.null.reap(out)
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.since = 0;
        self.null.poll_doorbells()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.since = 0;
        self.null.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.null.counters()
    }
}

/// A turn of many full queues takes long, so turns alone are no measure.
#[test]
fn a27_a_busy_worker_looks_at_doorbells_after_a_bounded_number_of_requests() {
    const QUEUES: u32 = 16;
    let most = Arc::new(AtomicU32::new(0));
    let (handle, inbox) = command_channel().unwrap();
    let engine = Looked { null: Null::new(256).unwrap(), since: 0, most: Arc::clone(&most) };
    let worker = std::thread::spawn(|| Worker::new(engine, inbox, &never_spins()).unwrap().run());
    let (asked, answered) = (Arc::new(AtomicU32::new(20_000)), Arc::new(AtomicU32::new(0)));
    for _ in 0..QUEUES {
        let kick = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (asked, answered) = (Arc::clone(&asked), Arc::clone(&answered));
        let ring = Silent { op: Op::Read, kick, asked, answered };
        handle.add(ring, null_disk(), false, Box::new(|_| {})).unwrap();
    }
    let begun = Instant::now();
    while answered.load(SeqCst) < 20_000 {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    // The look comes at the end of a turn, of four requests of each queue.
    assert!(most.load(SeqCst) <= 64 + 4 * QUEUES, "{most:?}");
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}
