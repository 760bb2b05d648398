//! The loop with a queue of the test's own.

mod deferred;
mod doorbells;
mod flush;
mod held;
mod late;
mod places;
mod woken;

use super::*;
use crate::command::{Alarm, QueueId, command_channel};
use crate::memory::SharedMemory;
use crate::polling::Polling;
use crate::pool::WorkerOptions;
use crate::queue::{Broken, Pop, RequestQueue};
use ringway_aio::Null;
use ringway_core::mem::{GuestMap, HostRange, Mapping};
use ringway_core::{Op, Request, Status};
use ringway_disk::{OpenOptions, Source, Watcher, open};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// An empty ring whose memory vanishes at the worst moment: after the last look, before the sleep.
struct Vanishing {
    file: File,
    memory: Mapping,
    map: Arc<GuestMap>,
    kick: Arc<OwnedFd>,
    now: Arc<AtomicBool>,
}

impl RequestQueue for Vanishing {
    type Token = ();

    fn pop(&mut self, _: &mut Request) -> Result<Pop<()>, Broken> {
        Ok(Pop::Empty)
    }

    fn has_work(&self) -> bool {
        false
    }

    fn effort(&self) -> u32 {
        1
    }

    fn complete(&mut self, (): (), _: Status, _: u32) {}

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        if !self.now.load(SeqCst) {
            return Ok(Armed::Quiet);
        }
        self.file.set_len(0).expect("a memfd");
        // SAFETY: the mapping is longer than one byte; what was behind it is replaced by zeroes.
        unsafe { self.memory.at(0).write_volatile(1) };
        Ok(Armed::Quiet)
    }

    fn disarm(&mut self) {}
}

impl QueueLifecycle for Vanishing {
    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        4
    }

    fn shared_memory(&self) -> Option<&dyn SharedMemory<()>> {
        Some(self)
    }
}

impl SharedMemory<()> for Vanishing {
    fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    fn watcher(&self) -> Option<Watcher> {
        None
    }

    fn answers_into(&self, (): &(), _: &[HostRange]) -> bool {
        false
    }
}

/// A worker on a thread of its own, which never spins.
fn worker<Q: QueueLifecycle + 'static>()
-> (crate::Handle<Q>, std::thread::JoinHandle<io::Result<()>>) {
    let (handle, inbox) = command_channel().unwrap();
    let worker = std::thread::spawn(move || {
        Worker::new(Null::new(16).unwrap(), inbox, &never_spins()).unwrap().run()
    });
    (handle, worker)
}

fn never_spins() -> WorkerOptions {
    WorkerOptions { polling: Polling::Never, ..WorkerOptions::default() }
}

fn null_disk() -> Arc<ringway_disk::Disk> {
    let options = OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 });
    Arc::new(open(&options).unwrap())
}

/// A ring into which requests of 512 bytes come without a kick, or with one.
struct Silent {
    op: Op,
    kick: Arc<OwnedFd>,
    asked: Arc<AtomicU32>,
    answered: Arc<AtomicU32>,
}

impl RequestQueue for Silent {
    type Token = ();

    fn pop(&mut self, request: &mut Request) -> Result<Pop<()>, Broken> {
        if !self.has_work() {
            return Ok(Pop::Empty);
        }
        self.asked.fetch_sub(1, SeqCst);
        request.op = self.op;
        request.range = ringway_core::ByteRange::new(0, 512).unwrap();
        request.segments.clear();
        // No engine here moves data.
        let base = std::ptr::without_provenance_mut(4096);
        assert!(request.segments.push(ringway_core::Segment { base, len: 512 }));
        Ok(Pop::Request(()))
    }

    fn has_work(&self) -> bool {
        self.asked.load(SeqCst) > 0
    }

    fn effort(&self) -> u32 {
        1
    }

    fn complete(&mut self, (): (), _: Status, _: u32) {
        self.answered.fetch_add(1, SeqCst);
    }

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        Ok(if self.has_work() { Armed::WorkArrived } else { Armed::Quiet })
    }

    fn disarm(&mut self) {}
}

impl QueueLifecycle for Silent {
    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn depth(&self) -> u16 {
        4
    }
}

/// Requests whose kick never comes are found by the next look, taken, and counted by the one after
/// it; a kick that is only late is none of these.
#[test]
fn c08_a_lost_kick_is_found_and_its_request_answered() {
    let (handle, worker) = worker();
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let (asked, answered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let queue = Silent {
        op: Op::Read,
        kick: Arc::clone(&kick),
        asked: Arc::clone(&asked),
        answered: Arc::clone(&answered),
    };
    handle.add(queue, null_disk(), false, Box::new(|_| {})).unwrap();
    let inspect = || {
        let found = handle.ask_inspect(0, u64::MAX, None).unwrap().recv().unwrap();
        found.queues.iter().map(|queue| queue.lost_kicks).sum::<u64>()
    };
    // After some sleeps without requests the queue rests. A look ends one, unless the next comes before
    // the worker, which may be slow, has begun another: so the sleeps are counted, not the looks.
    let rest = || {
        let sleeps = || handle.stats().unwrap().sleeps;
        let enough = sleeps() + 40;
        while sleeps() < enough {
            assert_eq!(inspect(), 0);
        }
    };
    let until = |number: u32| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while answered.load(SeqCst) < number && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(answered.load(SeqCst), number);
    };
    rest();
    // Without a kick: nobody notices before somebody looks.
    asked.store(1, SeqCst);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(answered.load(SeqCst), 0);
    assert_eq!(inspect(), 0, "its kick may be on its way");
    until(1);
    assert_eq!(inspect(), 1, "it never came");
    assert_eq!(handle.stats().unwrap().lost_kicks, 1);
    rest();
    // With a kick that is late.
    asked.store(1, SeqCst);
    assert_eq!(inspect(), 0);
    until(2);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    while handle.stats().unwrap().queues[0].totals.kicks == 0 {
        std::thread::yield_now();
    }
    assert_eq!(inspect(), 0, "it was late");
    // With a kick in time.
    rest();
    asked.store(1, SeqCst);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    until(3);
    rest();
    assert_eq!(handle.stats().unwrap().lost_kicks, 1);
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}

/// Whoever has found a worker quiet is called once, by the next request or queue, and by nothing else.
#[test]
fn e08_a_quiet_worker_calls_when_it_is_asked_for_something() {
    let (handle, worker) = worker();
    let roused = Arc::new(AtomicU32::new(0));
    let inspect = || {
        let roused = Arc::clone(&roused);
        let rouse: Rouse = Arc::new(move || {
            roused.fetch_add(1, SeqCst);
        });
        handle.ask_inspect(0, u64::MAX, Some(rouse)).unwrap().recv().unwrap().quiet
    };
    assert!(inspect(), "nothing to do");
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let (asked, answered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let queue = Silent {
        op: Op::Read,
        kick: Arc::clone(&kick),
        asked: Arc::clone(&asked),
        answered: Arc::clone(&answered),
    };
    handle.add(queue, null_disk(), false, Box::new(|_| {})).unwrap();
    assert_eq!(roused.load(SeqCst), 1, "there is a new queue");
    let ask = |number: u32| {
        asked.store(1, SeqCst);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while answered.load(SeqCst) < number && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(answered.load(SeqCst), number);
    };
    ask(1);
    assert_eq!(roused.load(SeqCst), 1, "nobody waits to be called");
    assert!(!inspect(), "something was asked for since the look before");
    ask(2);
    assert_eq!(roused.load(SeqCst), 1, "whoever found it busy looks again without a call");
    assert!(!inspect());
    assert!(inspect());
    handle.stats().unwrap();
    assert_eq!(roused.load(SeqCst), 1, "a question is no work");
    (3..6).for_each(ask);
    assert_eq!(roused.load(SeqCst), 2, "once");
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}

/// Whoever has a queue that has stopped, and has not heard so yet, tells it something: that does not get to the queue of
/// somebody else which has its place by now.
#[test]
fn b47_a_queue_that_has_stopped_is_not_taken_for_another() {
    let (handle, worker) = worker();
    let (asked, answered) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let queue = || Silent {
        op: Op::Read,
        kick: Arc::clone(&kick),
        asked: Arc::clone(&asked),
        answered: Arc::clone(&answered),
    };
    let first = handle.add(queue(), null_disk(), false, Box::new(|_| {})).unwrap();
    handle.stop(first).unwrap().recv().unwrap();
    let disk = null_disk();
    let second = handle.add(queue(), Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
    assert_eq!(first.place, second.place, "another one has its place");

    handle.edit(first, |_| panic!("not this one")).unwrap();
    handle.set_durable(first, true).unwrap();
    handle.unused(first, vec![(0, usize::MAX)]).unwrap().recv().unwrap();
    assert!(handle.stop(first).unwrap().recv().is_err(), "it has stopped before");

    asked.store(1, SeqCst);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while answered.load(SeqCst) < 1 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(answered.load(SeqCst), 1, "the second one is served as ever");
    assert_eq!(handle.queue_stats(second).unwrap().reads, 1);
    assert_eq!(handle.queue_stats(first).unwrap().reads, 0);
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}

/// Nobody kicks again: the worker must not sleep over it.
#[test]
fn b03_memory_that_vanishes_just_before_the_sleep_is_noticed() {
    let (handle, worker) = worker();
    let fd = rustix::fs::memfd_create("vanishing", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(8192).unwrap();
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let now = Arc::new(AtomicBool::new(false));
    let queue = Vanishing {
        memory: Mapping::of_file(&file, 0, 8192).unwrap(),
        file,
        map: Arc::new(GuestMap::default()),
        kick: Arc::clone(&kick),
        now: Arc::clone(&now),
    };
    let (raise, raised) = sync_channel(16);
    let alarm = Box::new(move |broken| {
        // Told often enough if it is full.
        let _ = raise.try_send(broken);
    });
    handle.add(queue, null_disk(), false, alarm).unwrap();
    // By now it sleeps, and no bell of its own is on its way. One kick, and nothing after it.
    std::thread::sleep(Duration::from_millis(200));
    now.store(true, SeqCst);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    let broken = raised.recv_timeout(Duration::from_secs(60));
    assert!(matches!(broken, Ok(Alarm::Broken(Broken::MemoryGone))), "slept over");
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}

/// The lists grow with a command, not when they are needed in the loop.
#[test]
fn many_queues_leave_nothing_to_allocate_in_the_loop() {
    const QUEUES: usize = 300;
    let (_handle, inbox) = command_channel().unwrap();
    let mut worker = Worker::new(Null::new(16).unwrap(), inbox, &never_spins()).unwrap();
    let disk = null_disk();
    for _ in 0..QUEUES {
        let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let queue = Silent { op: Op::Read, kick, asked: Arc::default(), answered: Arc::default() };
        worker.add(queue, Arc::clone(&disk), None, false, Box::new(|_| {})).unwrap();
        // It rests.
        worker.active.clear();
        worker.queues.iter_mut().flatten().for_each(|queue| queue.active = false);
    }
    let room = (worker.active.capacity(), worker.reaped.rung.capacity());
    // The inbox has a bell, too.
    assert!(room.0 >= QUEUES && room.1 > 2 * QUEUES, "{room:?}");
    (0..).take(QUEUES).for_each(|id| worker.activate(id));
    assert_eq!((worker.active.len(), worker.active.capacity()), (QUEUES, room.0));
}
