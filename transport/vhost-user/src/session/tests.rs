//! Messages that come in the very moment in which a worker does something with their queue.

use super::*;
use crate::Pool;
use ringway_disk::{EngineKind, OpenOptions, Source, open};
use ringway_export::{ExportOptions, PoolOptions};
use ringway_testkit::raw::{DATA, F_VERSION_1, RawGuest, request, words};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::ops::ControlFlow;
use std::time::Duration;

/// A session between two messages, and its guest, whose queue runs.
fn started() -> (Pool, Session, RawGuest) {
    let disk = open(&OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 })).unwrap();
    let pool = Pool::start(PoolOptions::new(EngineKind::Null, 1)).unwrap();
    let options = ExportOptions { queues: 1, queue_size: 64 };
    let export = Arc::new(Export::new(Arc::new(disk), options, pool.handles().to_vec(), 0));
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut session = Session::new(&export, theirs, &stop).unwrap();
    let guest = std::thread::spawn(move || RawGuest::start(ours, 1, 64, F_VERSION_1));
    while !guest.is_finished() {
        session = match session.turn(&|| Some(Duration::from_millis(1))) {
            ControlFlow::Continue(session) => session,
            ControlFlow::Break(ended) => panic!("{ended:?}"),
        };
    }
    (pool, session, guest.join().unwrap())
}

/// A migration has begun, and its guest is reset: nobody leaves any more, and the image may have its journal again.
#[test]
fn b43_a_reset_ends_what_a_migration_has_begun() {
    const LOG_ALL: u64 = 1 << 26;
    let (_pool, mut session, _guest) = started();
    session.set_features(session.features | LOG_ALL).unwrap();
    assert!(session.without_journal.is_some());
    session.reset_device().unwrap();
    assert!(session.without_journal.is_none());
}

/// A call descriptor that comes when its queue has stopped, as for a pause, and the session has not heard so.
#[test]
fn b53_a_call_descriptor_that_meets_the_end_of_a_stop_is_kept() {
    let (_pool, mut session, mut guest) = started();
    let export = Arc::clone(&session.export);
    session.begin_stop(|_| true).unwrap();
    let begun = Instant::now();
    while !export.worker(0).stats().unwrap().queues.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let client = &guest.client;
    client.send(request::SET_VRING_CALL, 0, &words(&[0]), &[call.as_fd()]).unwrap();
    let mut message = session.channel.receive().unwrap().unwrap();
    session.set_vring_call(&mut message).unwrap();
    assert!(session.collect_stopped());
    session.start_ready().unwrap();

    let mut counter = [0; 8];
    assert_eq!(rustix::io::read(&call, &mut counter), Ok(8), "what was called before may be lost");
    assert_eq!(guest.simple(0, 0, 0, DATA, 512).0, 0);
    let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
    let called = poll(&mut [PollFd::new(&call, PollFlags::IN)], Some(&timeout));
    assert_eq!(called, Ok(1), "the answer is called there");
}
