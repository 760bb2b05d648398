//! Doorbells, and waiting for them.

use super::rig::{BLOCK, Pages, Rig, TIMEOUT};
use super::setting::{Mode, Suite};
use crate::engine::IoOp;
use crate::sys;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Both ends of a new pipe: what is read, and what is written.
fn pipe() -> [File; 2] {
    let mut ends = [-1; 2];
    // SAFETY: there is room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: both were made just now and belong to nobody.
    ends.map(|end| unsafe { File::from_raw_fd(end) })
}

pub(super) fn bell(rig: &mut Rig, bell: u32) -> OwnedFd {
    let fd = sys::eventfd().unwrap();
    rig.engine.watch(bell, fd.as_raw_fd()).unwrap();
    fd
}

pub(super) fn bell_before_wait(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let fd = bell(&mut rig, 5);
    for _ in 0..100 {
        sys::ring(fd.as_raw_fd());
        assert!(rig.rung().iter().all(|&b| b == 5));
    }
    let early = sys::eventfd().unwrap();
    sys::ring(early.as_raw_fd());
    rig.settle();
    rig.engine.watch(6, early.as_raw_fd()).unwrap();
    assert_eq!(rig.rung(), [6], "what rang before it was watched shows");
    assert!(rig.engine.watch(7, -1).is_err(), "no descriptor, no bell");
}

pub(super) fn bell_during_wait(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let fd = bell(&mut rig, 0);
    let copy = fd.try_clone().unwrap();
    let answered = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&answered);
    // Each ring waits for the answer to the last one, now after a pause and now at once.
    let ringer = thread::spawn(move || {
        for i in 0..200 {
            if i % 10 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            sys::ring(copy.as_raw_fd());
            while seen.load(Ordering::Acquire) <= i {
                thread::yield_now();
            }
        }
    });
    for i in 1..=200 {
        assert_eq!(rig.rung(), [0], "ring {i}");
        answered.store(i, Ordering::Release);
    }
    ringer.join().unwrap();
}

pub(super) fn bell_amid_operations(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 16, 1 << 20);
    let fd = bell(&mut rig, 1);
    let memory = Pages::new(16 * BLOCK);
    let segments: Vec<_> = (0..16).map(|i| [memory.segment(i * BLOCK, BLOCK)]).collect();
    for _ in 0..50 {
        for (i, segment) in segments.iter().enumerate() {
            rig.queue(IoOp::Read, (i * BLOCK) as u64, segment).unwrap();
        }
        sys::ring(fd.as_raw_fd());
        rig.engine.submit().unwrap();
        rig.out.clear();
        let start = Instant::now();
        while rig.out.done.len() < 16 || rig.out.rung.is_empty() {
            assert!(start.elapsed() < TIMEOUT, "{:?}", rig.out);
            rig.engine.wait(Some(TIMEOUT)).unwrap();
            rig.engine.reap(&mut rig.out);
        }
        assert_eq!(rig.out.rung, [1]);
    }
}

pub(super) fn many_bells(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let bells: Vec<_> = (0..200).map(|i| bell(&mut rig, i)).collect();
    for round in 0..3 {
        for fd in &bells {
            for _ in 0..=round * 50 {
                sys::ring(fd.as_raw_fd());
            }
        }
        let mut heard = HashSet::new();
        while heard.len() < bells.len() {
            heard.extend(rig.rung());
        }
        rig.settle();
    }
    sys::ring(bells[123].as_raw_fd());
    assert_eq!(rig.rung(), [123], "each still rings by itself");
}

pub(super) fn watch_and_unwatch(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    for i in 0..100 {
        // A descriptor that is closed makes way for the next of the same number.
        let fd = bell(&mut rig, i);
        if i % 3 == 0 {
            sys::ring(fd.as_raw_fd());
        }
        if i % 2 == 0 {
            rig.settle();
        }
        rig.engine.unwatch(i, fd.as_raw_fd());
    }
    rig.settle();
    let fd = bell(&mut rig, 1000);
    sys::ring(fd.as_raw_fd());
    assert_eq!(rig.rung(), [1000]);
    rig.engine.unwatch(1000, fd.as_raw_fd());
    rig.settle();
    sys::ring(fd.as_raw_fd());
    rig.engine.wait(Some(Duration::from_millis(5))).unwrap();
    rig.engine.reap(&mut rig.out);
    assert!(rig.out.rung.is_empty(), "nobody listens");
}

/// All that can be read of `from` until it would block or ends.
fn drain(from: &mut impl Read) -> Vec<u8> {
    let (mut all, mut piece) = (Vec::new(), [0; 64]);
    loop {
        match from.read(&mut piece) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&piece[..count]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return all,
            Err(e) => panic!("a socket reads: {e}"),
        }
    }
}

pub(super) fn sockets_and_pipes(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.write_all(b"early").unwrap();
    rig.engine.watch(1, ours.as_raw_fd()).unwrap();
    assert!(rig.rung().iter().all(|&b| b == 1), "what is there when it is watched");
    assert_eq!(drain(&mut ours), b"early");
    for i in 0..100 {
        theirs.write_all(&[i]).unwrap();
        rig.rung();
        assert_eq!(drain(&mut ours), [i]);
        rig.settle();
    }
    theirs.write_all(b"left ").unwrap();
    rig.rung();
    rig.quiet();
    theirs.write_all(b"alone").unwrap();
    assert!(rig.rung().iter().all(|&b| b == 1), "more rings, whatever was left unread");
    assert_eq!(drain(&mut ours), b"left alone");
    drop(theirs);
    rig.rung();
    assert_eq!(ours.read(&mut [0]).unwrap(), 0, "the end of the other side rings");
    rig.engine.unwatch(1, ours.as_raw_fd());

    let [from, mut to] = pipe();
    rig.settle();
    rig.engine.watch(2, from.as_raw_fd()).unwrap();
    rig.quiet();
    to.write_all(b"x").unwrap();
    assert!(rig.rung().iter().all(|&b| b == 2));
    rig.engine.unwatch(2, from.as_raw_fd());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    rig.settle();
    rig.engine.watch(3, listener.as_raw_fd()).unwrap();
    rig.quiet();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(rig.rung().iter().all(|&b| b == 3));
    let (_server, from) = listener.accept().unwrap();
    assert_eq!(from, client.local_addr().unwrap());
}

/// Who reads until it would block each time it rings misses nothing, whenever bytes arrive.
pub(super) fn no_byte_without_a_ring(suite: &Suite<'_>, mode: Mode) {
    const BYTES: usize = 5000;
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    rig.engine.watch(4, ours.as_raw_fd()).unwrap();
    let writer = thread::spawn(move || {
        for i in 0..BYTES {
            theirs.write_all(&[0]).unwrap();
            match i % 100 {
                0 => thread::sleep(Duration::from_micros(300)),
                1..20 => thread::yield_now(),
                _ => {}
            }
        }
        theirs
    });
    let mut found = 0;
    while found < BYTES {
        rig.rung();
        found += drain(&mut ours).len();
    }
    assert_eq!(found, BYTES);
    drop(writer.join().unwrap());
}

pub(super) fn wait_ends_in_time(suite: &Suite<'_>, mode: Mode) {
    let mut rig = suite.rig(mode, 4, 1 << 20);
    let _fd = bell(&mut rig, 0);
    rig.settle();
    let start = Instant::now();
    rig.engine.wait(Some(Duration::ZERO)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    while start.elapsed() < Duration::from_millis(20) {
        let left = Duration::from_millis(20).saturating_sub(start.elapsed());
        rig.engine.wait(Some(left)).unwrap();
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "took {took:?}");
    assert!(rig.engine.counters().sleeps > 0);
}
