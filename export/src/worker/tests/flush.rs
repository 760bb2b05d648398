//! Flushes that no guest has asked for.

use super::*;
use ringway_aio::{Immediate, IoOp};
use ringway_disk::{CustomDisk, Disk};
use std::sync::Mutex;

/// A worker whose engine carries out one operation at a time, and says of flushes what it is told to.
struct Scene {
    handle: crate::Handle<Silent>,
    worker: std::thread::JoinHandle<io::Result<()>>,
    /// Results of the flushes to come; 0 when there are no more.
    results: Arc<Mutex<Vec<i32>>>,
    flushes: Arc<AtomicU32>,
    asked: Arc<AtomicU32>,
    answered: Arc<AtomicU32>,
}

impl Scene {
    fn new() -> Self {
        let (handle, inbox) = command_channel().unwrap();
        let (results, flushes) = (Arc::<Mutex<Vec<i32>>>::default(), Arc::new(AtomicU32::new(0)));
        let (told, counted) = (Arc::clone(&results), Arc::clone(&flushes));
        let worker = std::thread::spawn(move || {
            let engine = Immediate::new(1, move |io: &ringway_aio::Io<'_>| match io.op {
                IoOp::Sync => {
                    counted.fetch_add(1, SeqCst);
                    told.lock().unwrap().pop().unwrap_or(0)
                }
                _ => 0,
            });
            Worker::new(engine.unwrap(), inbox, &never_spins()).unwrap().run()
        });
        let (asked, answered) = (Arc::default(), Arc::default());
        Self { handle, worker, results, flushes, asked, answered }
    }

    fn add(&self, disk: &Arc<Disk>, op: Op) -> QueueId {
        let kick = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (asked, answered) = (Arc::clone(&self.asked), Arc::clone(&self.answered));
        let ring = Silent { op, kick, asked, answered };
        self.handle.add(ring, Arc::clone(disk), false, Box::new(|_| {})).unwrap()
    }

    fn flush(&self, disk: &Arc<Disk>) -> io::Result<()> {
        self.handle.flush(Arc::clone(disk)).unwrap().recv().unwrap()
    }

    fn flushes(&self) -> u32 {
        self.flushes.load(SeqCst)
    }

    fn end(self) {
        self.handle.exit().unwrap();
        self.worker.join().unwrap().unwrap();
    }
}

fn disk() -> Arc<Disk> {
    Arc::new(CustomDisk::new(1 << 20).open(None).unwrap())
}

/// One whose queue has gone may have left what is not durable. One that was never here has not, and to attach it
/// could keep it from others.
#[test]
fn c06_a_worker_flushes_the_disks_that_it_has_served_and_no_others() {
    let (scene, served, unknown) = (Scene::new(), disk(), disk());
    let queue = scene.add(&served, Op::Flush);
    assert!(scene.flush(&served).is_ok());
    assert_eq!(scene.flushes(), 1);
    scene.handle.stop(queue).unwrap().recv().unwrap();
    assert!(scene.flush(&served).is_ok());
    assert_eq!(scene.flushes(), 2);
    assert!(scene.flush(&unknown).is_ok());
    assert_eq!(scene.flushes(), 2);
    scene.end();
}

/// Whoever asked hears of it, and so does the disk, even if nobody waited so long.
#[test]
fn c06_a_flush_that_fails_is_told_and_kept() {
    for waits in [true, false] {
        let (scene, disk) = (Scene::new(), disk());
        scene.add(&disk, Op::Flush);
        scene.results.lock().unwrap().push(-libc::ENOSPC);
        let promise = scene.handle.flush(Arc::clone(&disk)).unwrap();
        if waits {
            let error = promise.recv().unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        } else {
            drop(promise);
            // It is answered after that one.
            scene.handle.stats().unwrap();
            assert!(scene.flush(&disk).is_ok(), "the engine's word; the disk has its own");
        }
        assert!(disk.sync().is_err(), "an earlier one has failed");
        scene.end();
    }
}

/// An engine may have no room at the moment, or say that it could not just then, but not for ever.
#[test]
fn c06_a_flush_is_tried_again() {
    let (scene, disk) = (Scene::new(), disk());
    scene.add(&disk, Op::Flush);
    scene.results.lock().unwrap().extend([-libc::EINTR, -libc::EAGAIN]);
    let promises: Vec<_> = (0..8).map(|_| scene.handle.flush(Arc::clone(&disk)).unwrap()).collect();
    assert!(promises.into_iter().all(|promise| promise.recv().unwrap().is_ok()));
    assert_eq!(scene.flushes(), 8 + 2);
    scene.results.lock().unwrap().extend([-libc::EAGAIN; 100]);
    assert_eq!(scene.flush(&disk).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    assert!(disk.sync().is_ok(), "what was not carried out has lost nothing");
    scene.end();
}

/// Flushes of a queue's guest and those of nobody's are told apart.
#[test]
fn c06_requests_go_on_beside_flushes() {
    let (scene, disk) = (Scene::new(), disk());
    scene.add(&disk, Op::Flush);
    const REQUESTS: u32 = 200;
    scene.asked.store(REQUESTS, SeqCst);
    let begun = Instant::now();
    while scene.answered.load(SeqCst) < REQUESTS {
        assert!(scene.flush(&disk).is_ok());
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", scene.answered);
    }
    scene.end();
}
