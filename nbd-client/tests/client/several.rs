//! Row F15 of docs/hazards.md: several connections to one export.

use crate::rig::Rig;
use crate::server::{ALL, Conn, FACTS, Facts, Server};
use ringway_aio::IoOp;
use ringway_nbd_client::Timeouts;
use ringway_nbd_words::{command, offers};
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MANY: Facts = Facts { flags: ALL | offers::CAN_MULTI_CONN, ..FACTS };

/// A read here ends the connection that it comes by, if that is one of the first ones.
const END: u64 = 1 << 19;

/// Writes here are done once somebody says so.
const SLOW: u64 = 1 << 18;

/// A server of the export whose first `first` connections end at a read of [`END`]. Each request is told,
/// with the number of its connection.
fn server(dir: &std::path::Path, first: usize) -> (Server, Receiver<(usize, u16, u64)>) {
    let (server, asked, _) = slow_server(dir, first);
    (server, asked)
}

/// The same, and writes to [`SLOW`] wait for a word each as long as somebody can say one.
fn slow_server(
    dir: &std::path::Path,
    first: usize,
) -> (Server, Receiver<(usize, u16, u64)>, Sender<()>) {
    let (told, asked) = channel();
    let (word, words) = channel();
    let words = Mutex::new(words);
    let serve = move |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            let _ = told.send((number, asked.kind, asked.offset));
            if number < first && asked.kind == command::READ && asked.offset == END {
                return Ok(());
            }
            if asked.kind == command::WRITE && asked.offset == SLOW {
                let _ = words.lock().unwrap().recv();
            }
            conn.carry_out(&asked)?;
        }
    };
    (Server::start(dir, |_| MANY, serve), asked, word)
}

/// The numbers of connections that were used for requests at these places.
fn used(asked: &Receiver<(usize, u16, u64)>, places: &[u64]) -> BTreeSet<usize> {
    let all: Vec<_> = asked.try_iter().collect();
    all.iter().filter(|(.., offset)| places.contains(offset)).map(|(number, ..)| *number).collect()
}

#[test]
fn f15_each_queue_has_a_connection_of_its_own_as_long_as_there_are_some() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked) = server(dir.path(), 0);
    let mut rig = Rig::several(&server.path, 3, 1).pop().unwrap();
    assert_eq!(rig.remote.connections(), 3);
    let queues = [rig.queue_in_use(), rig.attach(), rig.attach(), rig.attach()];
    for (at, queue) in (0..).zip(queues) {
        rig.use_queue(queue);
        assert_eq!(rig.write(at * 512, &[1; 512]), 512);
    }
    assert_eq!(used(&asked, &[0, 512, 1024, 1536]), BTreeSet::from([0, 1, 2]));
    assert_eq!(queues.map(|queue| queue.0).into_iter().collect::<BTreeSet<_>>().len(), 3);
    // They are this engine's alone.
    assert!(rig.another_engine().is_err());
}

#[test]
fn f15_engines_share_connections_evenly() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked) = server(dir.path(), 0);
    let mut rigs = Rig::several(&server.path, 4, 2);
    let mut places = Vec::new();
    for (at, rig) in (0..).zip(&mut rigs) {
        let queues = [rig.queue_in_use(), rig.attach(), rig.attach()];
        for (queue, place) in queues.into_iter().zip([at * 8, at * 8 + 1, at * 8 + 2]) {
            rig.use_queue(queue);
            assert_eq!(rig.write(place * 512, &[1; 512]), 512);
            places.push(place * 512);
        }
    }
    let of = |places: &[u64], all: &[(usize, u16, u64)]| -> BTreeSet<usize> {
        let here = all.iter().filter(|(.., offset)| places.contains(offset));
        here.map(|(number, ..)| *number).collect()
    };
    let all: Vec<_> = asked.try_iter().collect();
    let (one, other) = (of(&places[..3], &all), of(&places[3..], &all));
    assert_eq!((one.len(), other.len()), (2, 2));
    assert!(one.is_disjoint(&other), "{one:?} {other:?}");
    assert!(rigs[0].another_engine().is_err());
}

#[test]
fn f15_a_server_that_does_not_promise_it_has_one_connection() {
    for facts in [
        |_| FACTS,
        // One that offers something else where it is connected to again.
        |number| if number == 0 { MANY } else { Facts { bytes: 1 << 19, ..MANY } },
    ] {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(dir.path(), facts, |_, conn| conn.serve());
        let mut rig = Rig::several(&server.path, 4, 1).pop().unwrap();
        assert_eq!(rig.remote.connections(), 1);
        assert_eq!(rig.attach(), rig.queue_in_use());
        assert_eq!(rig.write(0, &[1; 512]), 512);
    }
}

/// A write is answered by one connection, and flushed by another one or not at all; a third one is lost, and
/// its requests are done by the next one. Whether flushes succeed then, on each of the three.
fn flushes_after_a_loss(flushed: bool) -> Vec<i32> {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked) = server(dir.path(), 3);
    let mut rig = Rig::several(&server.path, 3, 1).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach(), rig.attach()];
    assert_eq!(rig.write(0, &[1; 512]), 512);
    rig.use_queue(queues[1]);
    if flushed {
        assert_eq!(rig.flush(), 0);
    }
    rig.use_queue(queues[2]);
    assert_eq!(rig.read(END, 512).unwrap().len(), 512);
    // None of the old ones is used any more, though the server would have gone on with two of them.
    for queue in queues {
        rig.use_queue(queue);
        assert_eq!(rig.write(4096, &[2; 512]), 512);
    }
    assert_eq!(used(&asked, &[4096]), BTreeSet::from([3, 4, 5]));
    let flush = |queue| {
        rig.use_queue(queue);
        rig.flush()
    };
    queues.map(flush).into()
}

#[test]
fn f15_what_one_connection_had_answered_may_be_lost_with_another() {
    assert_eq!(flushes_after_a_loss(false), [-libc::EIO; 3]);
    // A flush on one covers what was answered on all.
    assert_eq!(flushes_after_a_loss(true), [0; 3]);
}

#[test]
fn f15_no_connection_is_made_anew_before_all_old_ones_are_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked) = server(dir.path(), 2);
    let mut rigs = Rig::several(&server.path, 2, 2);
    let mut one = rigs.pop().unwrap();
    let mut other = rigs.pop().unwrap();
    // The server has done it, and nobody has read its answer.
    let write = one.queue(IoOp::Write, 0, 512, &[1; 512]);
    one.submit();
    assert_eq!(asked.recv().unwrap().2, 0);
    let read = other.queue(IoOp::Read, END, 512, &[]);
    other.submit();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        assert_eq!(other.reap_soon(), [], "an old connection is left");
    }
    // Now it is read that the server has answered, or the write is sent once more: in both cases what
    // comes after the loss is told.
    let answered = one.reap(1);
    assert_eq!(answered, [(write, 512)]);
    let again = asked.try_iter().any(|(number, kind, _)| number >= 2 && kind == command::WRITE);
    assert_eq!(other.reap(1), [(read, 512)]);
    assert_eq!(other.flush(), if again { 0 } else { -libc::EIO });
}

#[test]
fn f15_what_was_not_answered_is_sent_again_on_all_connections_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (told, asked) = channel();
    let (ended, end) = (AtomicBool::new(false), AtomicUsize::new(0));
    let serve = move |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            told.send((number, asked.offset)).unwrap();
            if number >= 2 {
                conn.carry_out(&asked)?;
            } else if end.fetch_add(1, SeqCst) == 11 && !ended.swap(true, SeqCst) {
                return Ok(());
            }
        }
    };
    let server = Server::start(dir.path(), |_| MANY, serve);
    // The other connection says nothing any more.
    let timeouts = Timeouts { silence: Duration::from_secs(2), ..Timeouts::default() };
    let mut rig = Rig::several_within(&server.path, 2, 1, timeouts).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach()];
    for at in 0..12u64 {
        rig.use_queue(queues[usize::try_from(at % 2).unwrap()]);
        rig.queue(IoOp::WriteDurable, at * 512, 512, &[5; 512]);
    }
    rig.submit();
    assert!(rig.reap(12).iter().all(|&(_, result)| result == 512));
    let all: Vec<_> = asked.try_iter().collect();
    let on = |number: usize| -> Vec<u64> {
        all.iter().filter(|(on, _)| *on == number).map(|(_, offset)| offset / 512).collect()
    };
    let mut again = [on(2), on(3)];
    again.sort();
    assert_eq!(again, [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]);
    assert_eq!(rig.flush(), 0);
}

#[test]
fn f15_what_a_server_works_at_is_waited_for_when_another_connection_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked, word) = slow_server(dir.path(), 2);
    let mut rig = Rig::several(&server.path, 2, 1).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach()];
    let write = rig.queue(IoOp::Write, SLOW, 512, &[1; 512]);
    rig.submit();
    assert_eq!(asked.recv().unwrap().2, SLOW);
    rig.use_queue(queues[1]);
    let read = rig.queue(IoOp::Read, END, 512, &[]);
    // Not sent any more once the other connection is lost, or answered by it.
    rig.submit();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        assert_eq!(rig.reap_soon(), []);
    }
    word.send(()).unwrap();
    assert_eq!(rig.reap(2), [(write, 512), (read, 512)]);
    let all: Vec<_> = asked.try_iter().collect();
    assert!(!all.iter().any(|&(_, _, offset)| offset == SLOW), "it is not sent again: {all:?}");
    // It was answered by a server that may be another one by now.
    assert_eq!(rig.flush(), -libc::EIO);
}

#[test]
fn f15_a_server_that_is_long_about_one_request_is_not_silent_while_it_answers_others() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked, word) = slow_server(dir.path(), 0);
    let timeouts = Timeouts { silence: Duration::from_millis(1500), ..Timeouts::default() };
    let mut rig = Rig::several_within(&server.path, 2, 1, timeouts).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach()];
    let write = rig.queue(IoOp::Write, SLOW, 512, &[1; 512]);
    rig.submit();
    rig.use_queue(queues[1]);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        assert_eq!(rig.read(4096, 512).unwrap().len(), 512);
        std::thread::sleep(Duration::from_millis(10));
    }
    word.send(()).unwrap();
    assert_eq!(rig.reap(1), [(write, 512)]);
    assert_eq!(rig.flush(), 0);
    assert!(asked.try_iter().all(|(number, ..)| number < 2), "no connection is lost");
}

#[test]
fn f15_a_server_with_fewer_connections_than_before_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let facts = |number| match number {
        // The second one of the first two attempts offers something else.
        3 | 5 => Facts { bytes: 1 << 19, ..MANY },
        _ => MANY,
    };
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let here = Arc::clone(&seen);
    let serve = move |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            here.lock().unwrap().insert(number);
            if number < 2 {
                return Ok(());
            }
            conn.carry_out(&asked)?;
        }
    };
    let server = Server::start(dir.path(), facts, serve);
    let mut rig = Rig::several(&server.path, 2, 1).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach()];
    for queue in queues {
        rig.use_queue(queue);
        assert_eq!(rig.write(0, &[1; 512]), 512);
    }
    assert_eq!(*seen.lock().unwrap(), BTreeSet::from([0, 6, 7]));
}

#[test]
fn f15_connections_that_nobody_uses_are_replaced_too() {
    let dir = tempfile::tempdir().unwrap();
    let (server, asked) = server(dir.path(), 3);
    let mut rig = Rig::several(&server.path, 3, 1).pop().unwrap();
    assert_eq!(rig.read(END, 512).unwrap().len(), 512);
    let queues = [rig.attach(), rig.attach()];
    for queue in queues {
        rig.use_queue(queue);
        assert_eq!(rig.write(4096, &[2; 512]), 512);
    }
    assert!(used(&asked, &[4096]).is_subset(&BTreeSet::from([3, 4, 5])));
}

#[test]
fn f15_an_engine_that_has_gone_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let (server, _asked) = server(dir.path(), 2);
    let mut rigs = Rig::several(&server.path, 2, 2);
    drop(rigs.pop());
    assert_eq!(rigs[0].read(END, 512).unwrap().len(), 512);
    assert_eq!(rigs[0].flush(), 0);
}
