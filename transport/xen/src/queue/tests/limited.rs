//! Limits of a guest's disk: what may not pass waits in its ring.

use super::*;
use ringway_aio::Null;
use ringway_disk::{OpenOptions, Source, open};
use ringway_export::{QueueLifecycle, Worker, WorkerOptions, command_channel};
use ringway_throttle::{LimitKind, Member, Rates};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(15);

/// Reads as many answers as are wanted.
fn answered(front: &mut Front, wanted: usize) {
    let (begun, mut got) = (Instant::now(), 0);
    while got < wanted {
        while let Some(answer) = front.pop_response().unwrap() {
            assert_eq!(answer.status, Status::Ok);
            got += 1;
        }
        assert!(begun.elapsed() < TIMEOUT, "{got} of {wanted}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A byte a second: one request passes, and the next one would in an hour.
#[test]
fn a23_a_xen_guest_is_limited_too() {
    let Rig { guest: _guest, mut front, queue, .. } = Rig::new(Movement::Copy);
    // SAFETY: the queue has it open, and is given away only below.
    let bell = unsafe { BorrowedFd::borrow_raw(queue.doorbell()) }.try_clone_to_owned().unwrap();
    let ask = |front: &mut Front, count: u64| {
        for at in 0..count {
            let piece = [GrantPiece::whole(grant(1))];
            let with = With::Pieces(&piece);
            front.push(Ask { command: Command::Read, sector: 8 * at, with }).unwrap();
        }
        let _ = front.publish();
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
    };
    let disk = open(&OpenOptions::new(Source::Null { bytes: 1 << 30, latency_us: 0 })).unwrap();
    let mut rates = Rates::default();
    rates[LimitKind::Bps].avg = Some(1);
    disk.set_limits(vec![Member::alone(&rates).unwrap()]);
    let disk = Arc::new(disk);
    let (handle, inbox) = command_channel().unwrap();
    let worker = std::thread::spawn(move || {
        let engine = Null::new(64).unwrap();
        Worker::new(engine, inbox, &WorkerOptions::default()).unwrap().run().unwrap();
    });
    handle.add(queue, Arc::clone(&disk), false, Box::new(|_| {})).unwrap();
    ask(&mut front, 10);
    answered(&mut front, 1);
    std::thread::sleep(Duration::from_millis(250));
    assert!(front.pop_response().unwrap().is_none(), "the rest waits");
    let stats = handle.stats().unwrap();
    assert_eq!((stats.disk.throttled, stats.queues[0].in_flight), (1, 0), "in its ring");
    assert!(disk.is_at_limit());
    disk.set_limits(Vec::new());
    handle.adopt_limits(Arc::clone(&disk)).unwrap().recv().unwrap();
    answered(&mut front, 9);
    ask(&mut front, 20);
    answered(&mut front, 20);
    handle.exit().unwrap();
    worker.join().unwrap();
}
