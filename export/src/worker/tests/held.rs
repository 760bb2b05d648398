//! Requests that a disk fails and that are held: what their worker does with them.

use super::*;
use ringway_aio::{Fault, Faulty, Io};
use ringway_core::{ByteRange, Op};
use ringway_disk::{Disk, ErrorPolicy, OnError};
use std::sync::Mutex;
use std::time::Instant;

/// A ring of writes, each of which is one sector further on.
struct Writes {
    kick: OwnedFd,
    asked: u64,
    /// How they were answered, and which were left.
    said: Arc<Mutex<Vec<(u64, Status)>>>,
    left: Arc<Mutex<Vec<u64>>>,
    recorded: bool,
}

impl RequestQueue for Writes {
    type Token = u64;

    fn pop(&mut self, request: &mut Request) -> Result<Pop<u64>, Broken> {
        let Some(number) = self.asked.checked_sub(1) else { return Ok(Pop::Empty) };
        self.asked = number;
        (request.op, request.unmap) = (Op::WriteZeroes, true);
        request.range = ByteRange::new(number * 512, 512).unwrap();
        request.segments.clear();
        Ok(Pop::Request(number))
    }

    fn has_work(&self) -> bool {
        self.asked > 0
    }

    fn effort(&self) -> u32 {
        1
    }

    fn complete(&mut self, token: u64, status: Status, _: u32) {
        self.said.lock().unwrap().push((token, status));
    }

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        Ok(if self.has_work() { Armed::WorkArrived } else { Armed::Quiet })
    }

    fn disarm(&mut self) {}
}

impl QueueLifecycle for Writes {
    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        8
    }

    fn can_leave(&self) -> bool {
        self.recorded
    }

    fn leave(&mut self, token: u64) {
        self.left.lock().unwrap().push(token);
    }
}

/// A worker on a disk that fails as it is told.
struct Scene {
    handle: crate::Handle<Writes>,
    worker: std::thread::JoinHandle<io::Result<()>>,
    disk: Arc<Disk>,
    errno: Arc<AtomicU32>,
    gate: Arc<Gate>,
    said: Arc<Mutex<Vec<(u64, Status)>>>,
    left: Arc<Mutex<Vec<u64>>>,
}

/// Where a worker waits, with its next operation in its hand.
#[derive(Default)]
struct Gate {
    shut: AtomicBool,
    reached: AtomicBool,
}

impl Gate {
    fn pass(&self) {
        while self.shut.load(SeqCst) {
            self.reached.store(true, SeqCst);
            std::thread::yield_now();
        }
    }
}

impl Scene {
    fn new() -> Self {
        let (handle, inbox) = command_channel().unwrap();
        let errno = Arc::new(AtomicU32::new(0));
        let gate = Arc::<Gate>::default();
        let (errno_now, door) = (Arc::clone(&errno), Arc::clone(&gate));
        let worker = std::thread::spawn(move || {
            let choose = move |_: &Io<'_>| {
                door.pass();
                match errno_now.load(SeqCst) {
                    0 => None,
                    errno => Some(Fault::Error(errno as i32)),
                }
            };
            let engine = Faulty::new(Null::new(16).unwrap(), 512, choose);
            Worker::new(engine, inbox, &never_spins()).unwrap().run()
        });
        let disk = null_disk();
        disk.set_now(0);
        disk.set_error_policy(ErrorPolicy {
            on_write: OnError::Hold,
            on_enospc: Some(OnError::Hold),
            ..ErrorPolicy::default()
        });
        Self { handle, worker, disk, errno, gate, said: Arc::default(), left: Arc::default() }
    }

    /// A queue with so many requests.
    fn ask(&self, asked: u64, recorded: bool) -> QueueId {
        let (said, left) = (Arc::clone(&self.said), Arc::clone(&self.left));
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let queue = Writes { kick, asked, said, left, recorded };
        let alarm = Box::new(|_| ());
        self.handle.add(queue, Arc::clone(&self.disk), false, alarm).unwrap()
    }

    fn held(&self) -> u64 {
        self.disk.held().map_or(0, |held| held.count)
    }

    #[track_caller]
    fn until(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !is(self) {
            assert!(begun.elapsed() < Duration::from_secs(30), "never: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn answers(&self) -> Vec<(u64, Status)> {
        let mut said = self.said.lock().unwrap().clone();
        said.sort_unstable_by_key(|said| said.0);
        said
    }

    fn stop(&self, id: QueueId) -> ringway_disk::DiskStats {
        let stopped = self.handle.stop(id).unwrap();
        stopped.recv_timeout(Duration::from_secs(30)).expect("it waits for nothing").stats
    }

    fn end(self) {
        self.handle.exit().unwrap();
        self.worker.join().unwrap().unwrap();
    }
}

#[test]
fn c18_a_queue_stops_without_its_held_requests() {
    let scene = Scene::new();
    scene.errno.store(libc::EIO as u32, SeqCst);
    let id = scene.ask(5, true);
    scene.until("all are held", |scene| scene.held() == 5);
    assert_eq!(scene.handle.stats().unwrap().queues[0].held, 5);
    let stats = scene.stop(id);
    assert_eq!((stats.held, stats.errors), (5, 0));
    assert_eq!(scene.answers(), []);
    let mut left = scene.left.lock().unwrap().clone();
    left.sort_unstable();
    assert_eq!(left, [0, 1, 2, 3, 4]);
    assert_eq!((scene.held(), scene.disk.held_and_left()), (0, 5));
    scene.end();
}

/// The last try may succeed; nothing is held any more then.
#[test]
fn c18_without_a_record_held_requests_are_reported() {
    let scene = Scene::new();
    for (mended, status) in [(false, Status::NoSpace), (true, Status::Ok)] {
        scene.errno.store(libc::ENOSPC as u32, SeqCst);
        let id = scene.ask(3, false);
        scene.until("all are held", |scene| scene.held() == 3);
        if mended {
            scene.errno.store(0, SeqCst);
        }
        scene.stop(id);
        assert_eq!(scene.answers(), [(0, status), (1, status), (2, status)]);
        assert_eq!((scene.held(), scene.disk.held_and_left()), (0, 0));
        scene.said.lock().unwrap().clear();
    }
    assert_eq!(*scene.left.lock().unwrap(), []);
    scene.end();
}

#[test]
fn c18_time_and_commands_move_held_requests() {
    let scene = Scene::new();
    scene.errno.store(libc::ENOSPC as u32, SeqCst);
    let _ = scene.ask(4, true);
    scene.until("all are held", |scene| scene.held() == 4);
    let disk = || Arc::clone(&scene.disk);
    let retry = |fail| scene.handle.retry(disk(), fail).unwrap().recv().unwrap();
    assert_eq!(retry(false), 4);
    scene.until("held again", |scene| scene.disk.held_under_way() == 0);
    assert_eq!((scene.held(), scene.answers().len()), (4, 0));
    // Those beyond the end of a disk that becomes smaller fail, and are not waited for.
    scene.disk.set_capacity(3 * 512);
    let settled = scene.handle.settle(disk(), 3 * 512).unwrap();
    settled.recv_timeout(Duration::from_secs(30)).expect("nothing is in flight there");
    scene.until("one fails", |scene| scene.answers() == [(3, Status::NoSpace)]);
    // The worker sleeps until something is due; its clock stands still until it is told.
    scene.errno.store(0, SeqCst);
    scene.disk.set_now(3_000_000_000);
    scene.until("all go by themselves", |scene| scene.held() == 0);
    scene.until("and are answered", |scene| scene.answers().len() == 4);
    assert_eq!(scene.answers()[..3], [(0, Status::Ok), (1, Status::Ok), (2, Status::Ok)]);
    assert_eq!(retry(true), 0);
    scene.errno.store(libc::EIO as u32, SeqCst);
    let _ = scene.ask(2, true);
    scene.until("both are held", |scene| scene.held() == 2);
    assert_eq!(retry(true), 2);
    scene.until("their guest is told", |scene| scene.answers().len() == 6);
    assert_eq!(scene.held(), 0);
    scene.end();
}

/// One that is being tried when its disk becomes smaller, and fails after that, is waited for in vain
/// unless it fails for good.
#[test]
fn c18_nothing_is_held_beyond_the_end_of_a_disk_that_becomes_smaller() {
    let scene = Scene::new();
    scene.errno.store(libc::EIO as u32, SeqCst);
    let _ = scene.ask(4, true);
    scene.until("all are held", |scene| scene.held() == 4);
    scene.gate.shut.store(true, SeqCst);
    let _ = scene.ask(1, true);
    scene.until("the worker is busy", |scene| scene.gate.reached.load(SeqCst));
    // Heard one after the other: nothing is parked when the second one is.
    let disk = || Arc::clone(&scene.disk);
    let tried = scene.handle.retry(disk(), false).unwrap();
    scene.disk.set_capacity(2 * 512);
    let settled = scene.handle.settle(disk(), 2 * 512).unwrap();
    scene.gate.shut.store(false, SeqCst);
    assert_eq!(tried.recv_timeout(Duration::from_secs(30)), Ok(5));
    settled.recv_timeout(Duration::from_secs(30)).expect("nothing is in flight there");
    let failed = [(2, Status::IoError), (3, Status::IoError)];
    scene.until("two fail", |scene| scene.answers() == failed);
    scene.until("the others are held", |scene| scene.held() == 3);
    scene.end();
}

#[test]
fn c18_a_disk_that_did_not_become_smaller_after_all_holds_as_before() {
    let scene = Scene::new();
    let capacity = scene.disk.capacity();
    scene.errno.store(libc::EIO as u32, SeqCst);
    scene.gate.shut.store(true, SeqCst);
    let _ = scene.ask(4, true);
    scene.until("the worker is busy", |scene| scene.gate.reached.load(SeqCst));
    scene.disk.set_capacity(2 * 512);
    let settled = scene.handle.settle(Arc::clone(&scene.disk), 2 * 512).unwrap();
    // It has taken too long.
    scene.disk.set_capacity(capacity);
    scene.gate.shut.store(false, SeqCst);
    settled.recv_timeout(Duration::from_secs(30)).expect("nobody is waited for");
    scene.until("all are held", |scene| scene.held() == 4);
    assert_eq!(scene.answers(), []);
    scene.end();
}
