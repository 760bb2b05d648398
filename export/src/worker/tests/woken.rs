//! A queue that waits for what ends on another worker, and a bell that rings between its look and the harvest.

use super::*;
use ringway_aio::{BellId, Counters, Done, FileId, Full, Io, Limits, Reaped};
use ringway_disk::CustomDisk;

/// Its sync ends when the test lets it; or it lets the other one's end between a look at the queues and the harvest.
struct Told {
    null: Null,
    holds: bool,
    held: Vec<Done>,
    under_way: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    asked: Arc<AtomicU32>,
    other_answered: Arc<AtomicU32>,
    submits: u32,
}

impl Engine for Told {
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
        if self.holds {
            self.held.push(Done { tag: io.tag, result: 0 });
            self.under_way.store(true, SeqCst);
            return Ok(());
        }
        // SAFETY: passed on to the caller.
        unsafe { self.null.queue(io) }
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.holds && self.asked.load(SeqCst) == 0 {
            self.submits += 1;
            // The first is of the turn that took the request.
            if self.submits == 2 {
                self.ends.store(true, SeqCst);
                while self.other_answered.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
            }
        }
        self.null.submit()
    }

    /// As io_uring: bells are found with what is done.
    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.null.poll_doorbells().unwrap();
        let mut count = self.null.reap(out);
        if self.ends.load(SeqCst) {
            count += self.held.len();
            out.done.append(&mut self.held);
        }
        count
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let look = Duration::from_millis(1);
        let timeout = if self.held.is_empty() { timeout } else { Some(look) };
        self.null.wait(timeout)
    }

    fn counters(&self) -> Counters {
        self.null.counters()
    }
}

#[test]
fn c61_a_bell_that_rings_after_the_look_is_not_slept_over() {
    let disk = Arc::new(CustomDisk::new(1 << 20).open(None).unwrap());
    let under_way = Arc::new(AtomicBool::new(false));
    let ends = Arc::new(AtomicBool::new(false));
    let answered = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
    let mut workers = Vec::new();
    for at in 0..2 {
        let asked = Arc::new(AtomicU32::new(1));
        let (handle, inbox) = command_channel().unwrap();
        let engine = Told {
            null: Null::new(16).unwrap(),
            holds: at == 0,
            held: Vec::new(),
            under_way: Arc::clone(&under_way),
            ends: Arc::clone(&ends),
            asked: Arc::clone(&asked),
            other_answered: Arc::clone(&answered[0]),
            submits: 0,
        };
        let worker =
            std::thread::spawn(|| Worker::new(engine, inbox, &never_spins()).unwrap().run());
        let kick = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let ring = Silent { op: Op::Flush, kick, asked, answered: Arc::clone(&answered[at]) };
        handle.add(ring, Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
        workers.push((handle, worker));
        let begun = Instant::now();
        while at == 0 && !under_way.load(SeqCst) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
    let begun = Instant::now();
    while answered.iter().any(|it| it.load(SeqCst) == 0) {
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody wakes it: {answered:?}");
        std::thread::yield_now();
    }
    for (handle, worker) in workers {
        handle.exit().unwrap();
        worker.join().unwrap().unwrap();
    }
}
