//! Places of the engine, which disks share.

use super::*;
use ringway_aio::{BellId, Counters, Done, FileId, Full, Io, Limits, Reaped};
use ringway_disk::{CustomDisk, Disk};

/// An engine of 64 places. What is asked of some files never ends.
struct Hanging {
    bells: Null,
    /// Where these files are.
    files: Vec<usize>,
    hung: Vec<FileId>,
    in_flight: u32,
    done: Vec<Done>,
    taken: Arc<AtomicU32>,
}

impl Engine for Hanging {
    fn limits(&self) -> &Limits {
        self.bells.limits()
    }

    fn attach(&mut self, file: &Arc<File>) -> io::Result<FileId> {
        let id = self.bells.attach(file)?;
        if self.files.contains(&(Arc::as_ptr(file) as usize)) {
            self.hung.push(id);
        }
        Ok(id)
    }

    fn detach(&mut self, file: FileId) {
        self.bells.detach(file);
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, bell: BellId, fd: RawFd) {
        self.bells.unwatch(bell, fd);
    }

    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits().depth {
            return Err(Full);
        }
        self.in_flight += 1;
        if self.hung.contains(&io.file) {
            self.taken.fetch_add(1, SeqCst);
        } else {
            self.done.push(Done { tag: io.tag, result: i32::try_from(io.len).unwrap() });
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, out: &mut Reaped) -> usize {
        self.bells.reap(out);
        let count = self.done.len();
        out.done.append(&mut self.done);
        self.in_flight -= u32::try_from(count).unwrap();
        count
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.done.is_empty() { self.bells.wait(timeout) } else { Ok(()) }
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// Half of the disks hang, with all that their guests ask for; the others have what they had.
#[test]
fn c62_disks_that_hang_leave_the_others_their_places() {
    let disks: Vec<Arc<Disk>> =
        (0..4).map(|_| Arc::new(CustomDisk::new(1 << 20).open(None).unwrap())).collect();
    let (hung, others) = disks.split_at(2);
    let files = hung.iter().map(|disk| Arc::as_ptr(&disk.file()) as usize).collect();
    let taken = Arc::new(AtomicU32::new(0));
    let engine = Hanging {
        bells: Null::new(64).unwrap(),
        files,
        hung: Vec::new(),
        in_flight: 0,
        done: Vec::new(),
        taken: Arc::clone(&taken),
    };
    let (handle, inbox) = command_channel().unwrap();
    let worker = std::thread::spawn(|| Worker::new(engine, inbox, &never_spins()).unwrap().run());
    let add = |disk: &Arc<Disk>, requests| {
        let kick = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (asked, answered) = (Arc::new(AtomicU32::new(requests)), Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&answered);
        let ring = Silent { op: Op::Write, kick, asked, answered };
        handle.add(ring, Arc::clone(disk), false, Box::new(|_| {})).unwrap();
        counted
    };
    // All are known before any hangs. A queue has four in flight: ten are more than all places have.
    let few: Vec<_> = disks.iter().map(|disk| add(disk, 0)).collect();
    let many: Vec<_> = hung.iter().flat_map(|disk| (0..10).map(|_| add(disk, 100))).collect();
    let busy: Vec<_> = others.iter().flat_map(|disk| (0..4).map(|_| add(disk, 500))).collect();
    let begun = Instant::now();
    while busy.iter().any(|answered| answered.load(SeqCst) < 500) {
        assert!(begun.elapsed() < Duration::from_secs(60), "they wait for places: {taken:?}");
        std::thread::yield_now();
    }
    let answered = |of: &[Arc<AtomicU32>]| of.iter().map(|of| of.load(SeqCst)).sum::<u32>();
    assert_eq!((taken.load(SeqCst), answered(&many), answered(&few)), (2 * 16, 0, 0));
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}
