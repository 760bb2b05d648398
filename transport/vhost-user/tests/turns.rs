//! A session that is carried in turns says when the next one is due.

use ringway_disk::{EngineKind, Source, lock_image, unlock_image};
use ringway_export::ChangeError;
use ringway_testkit::raw::{F_FLUSH, F_VERSION_1, RawClient, RawGuest, request};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_vhost_user::{Ended, Session};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BASIC: u64 = F_VERSION_1 | F_FLUSH;
const SOON: Duration = Duration::from_secs(20);

/// A session of a rig's disk that no thread carries, and the other end of its connection.
fn session(rig: &Rig) -> (Session, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    (Session::new(rig.export(), theirs, &stop).unwrap(), ours)
}

/// Takes a turn that ends as soon as nothing has come.
fn turn(session: Session) -> Session {
    match session.turn(&|| Some(Duration::ZERO)) {
        ControlFlow::Continue(session) => session,
        ControlFlow::Break(ended) => panic!("it has ended: {ended:?}"),
    }
}

#[test]
fn half_a_message_is_waited_for_until_its_time_is_over() {
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let rig = Rig::start(&RigOptions::new(source, EngineKind::Null));
    let (mut session, socket) = session(&rig);
    session = turn(session);
    assert_eq!(session.wakes().at, None, "it waits for nothing");
    let client = RawClient::new(socket);
    let before = Instant::now();
    // GET_FEATURES without its last byte.
    let header = [request::GET_FEATURES, 1, 0].map(u32::to_ne_bytes).concat();
    client.send_bytes(&header[..11], &[]).unwrap();
    session = turn(session);
    let at = session.wakes().at.expect("the rest is to come");
    assert!(at > before, "not at once");
    client.send_bytes(&header[11..], &[]).unwrap();
    session = turn(session);
    assert_eq!(client.receive().unwrap().0, request::GET_FEATURES);
    assert_eq!(session.wakes().at, None, "it has come");
    client.hang_up();
    let ended = session.turn(&|| Some(Duration::ZERO));
    assert!(matches!(ended, ControlFlow::Break(Ended::ByPeer)));
}

#[test]
fn c17_the_lock_of_an_image_is_asked_for_again_after_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.disk.incoming = true;
    let rig = Rig::start(&options);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    lock_image(&file, false).unwrap();
    let (mut session, socket) = session(&rig);
    let guest = std::thread::spawn(move || RawGuest::start(socket, 1, 64, BASIC));
    let begun = Instant::now();
    while !guest.is_finished() {
        assert!(begun.elapsed() < SOON, "the queue is not set up");
        session = turn(session);
    }
    let _guest = guest.join().unwrap();
    let running = || rig.stats()[0].queues.len();
    assert_eq!(running(), 0);
    for _ in 0..3 {
        let before = Instant::now();
        session = turn(session);
        assert!(session.wakes().at.expect("it is to be asked again") > before, "not at once");
    }
    unlock_image(&file);
    while running() == 0 {
        assert!(begun.elapsed() < SOON, "the queue does not start");
        session = turn(session);
    }
    session = turn(session);
    assert_eq!(session.wakes().at, None, "it has the lock");
}

/// A session that nobody carries says nothing to those who ask it. It is given up after a while, and ends
/// with its next turn: what it would do by then nobody waits for.
#[test]
fn a_session_that_was_silent_for_too_long_ends() {
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let mut options = RigOptions::new(source, EngineKind::Null);
    options.drain_max = Duration::from_millis(1);
    let rig = Rig::start(&options);
    let (session, _socket) = session(&rig);
    let session = turn(session);
    let refused = rig.export().pause().unwrap_err();
    assert!(matches!(refused, ChangeError::Unanswered), "{refused}");
    let ended = session.turn(&|| Some(Duration::ZERO));
    assert!(matches!(ended, ControlFlow::Break(Ended::ByPeer)));
}
