//! What honest servers are asked, and what is made of their answers.

use crate::rig::{Rig, target};
use crate::server::{ALL, Asked, FACTS, Facts, Server};
use ringway_aio::IoOp;
use ringway_nbd_client::{Timeouts, connect};
use ringway_nbd_words::{chunk, command, flag, offers};
use std::sync::mpsc::channel;

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ seed).collect()
}

#[test]
fn what_is_written_is_read_whatever_the_replies() {
    for structured in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let facts = Facts { structured, ..FACTS };
        let server = Server::start(dir.path(), move |_| facts, |_, conn| conn.serve());
        let mut rig = Rig::new(&server.path, Timeouts::default());
        for (at, len) in [(0, 512), (4096, 4096), (8192, 200_000), (1 << 19, 1 << 19)] {
            let bytes = pattern(len as u8, len);
            assert_eq!(rig.write(at, &bytes), len as i32);
            assert_eq!(rig.read(at, len as u64).unwrap(), bytes);
        }
        assert_eq!(rig.flush(), 0);
        assert_eq!(rig.one(IoOp::PunchHole, 4096, 4096, &[]), 0);
        assert_eq!(rig.read(4096, 4096).unwrap(), [0; 4096]);
        assert_eq!(server.disk.lock().unwrap()[8192..8200], pattern(200_000u32 as u8, 8));
    }
}

#[test]
fn many_are_in_flight_and_answers_come_in_any_order_and_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |_, conn| {
            let asked: Vec<Asked> = (0..8).map(|_| conn.asked()).collect::<Result<_, _>>()?;
            for asked in asked.iter().rev() {
                let half = asked.len / 2;
                // The second half first; of one request the first half is said to be a hole.
                conn.data(false, asked.cookie, asked.offset + u64::from(half), half as usize)?;
                if asked.offset == 0 {
                    let hole = [&0u64.to_be_bytes()[..], &half.to_be_bytes()].concat();
                    conn.chunk(false, chunk::OFFSET_HOLE, asked.cookie, &hole)?;
                    conn.chunk(true, chunk::NONE, asked.cookie, &[])?;
                } else {
                    conn.data(true, asked.cookie, asked.offset, half as usize)?;
                }
            }
            conn.serve()
        },
    );
    let disk = pattern(3, 1 << 20);
    server.disk.lock().unwrap().copy_from_slice(&disk);
    let mut rig = Rig::new(&server.path, Timeouts::default());
    let tags: Vec<u64> = (0..8).map(|at| rig.queue(IoOp::Read, at * 65536, 65536, &[])).collect();
    rig.submit();
    assert!(rig.reap(8).iter().all(|&(_, result)| result == 65536));
    for (at, tag) in tags.into_iter().enumerate() {
        let mut wanted = disk[at * 65536..][..65536].to_vec();
        if at == 0 {
            wanted[..32768].fill(0);
        }
        assert!(rig.bytes(tag) == wanted, "read {at}");
    }
    assert_eq!(rig.read(512, 512).unwrap(), disk[512..1024]);
}

/// A guest takes memory away while requests of its other memory wait to be sent by the same call.
#[test]
fn f36_a_request_whose_memory_has_vanished_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), |_| FACTS, |_, conn| conn.serve());
    let mut rig = Rig::new(&server.path, Timeouts::default());
    let before: Vec<u64> =
        (0..3).map(|at| rig.queue(IoOp::Write, at * 512, 512, &pattern(at as u8, 512))).collect();
    let vanished = rig.queue_vanished(3 * 512, 512);
    let after = rig.queue(IoOp::Write, 4 * 512, 512, &pattern(4, 512));
    rig.submit();
    let mut wanted: Vec<(u64, i32)> = before.into_iter().map(|tag| (tag, 512)).collect();
    wanted.extend([(vanished, -libc::EFAULT), (after, 512)]);
    assert_eq!(rig.reap(5), wanted);
    let disk = server.disk.lock().unwrap();
    for at in [0, 1, 2, 4] {
        assert_eq!(disk[at * 512..][..512], pattern(at as u8, 512), "write {at}");
    }
    assert_eq!(disk[3 * 512..][..512], [0; 512]);
}

#[test]
fn each_operation_is_asked_as_the_protocol_has_it() {
    let (sender, asked) = channel();
    let dir = tempfile::tempdir().unwrap();
    let facts = Facts { bytes: 8 << 30, ..FACTS };
    let tell = move |_, conn: &mut crate::server::Conn| loop {
        let asked = conn.asked()?;
        conn.simple(asked.cookie, 0)?;
        let Asked { flags, kind, offset, len, .. } = asked;
        sender.send((kind, flags, offset, len)).unwrap();
    };
    let server = Server::start(dir.path(), move |_| facts, tell);
    let mut rig = Rig::new(&server.path, Timeouts::default());
    for (op, kind, flags) in [
        (IoOp::Write, command::WRITE, 0),
        (IoOp::WriteDurable, command::WRITE, flag::FUA),
        (IoOp::PunchHole, command::WRITE_ZEROES, 0),
        (IoOp::ZeroRange, command::WRITE_ZEROES, flag::NO_HOLE),
        (IoOp::Discard, command::TRIM, 0),
    ] {
        rig.one(op, 1 << 20, 512, &[1; 512]);
        assert_eq!(asked.recv().unwrap(), (kind, flags, 1 << 20, 512));
    }
    rig.flush();
    assert_eq!(asked.recv().unwrap(), (command::FLUSH, 0, 0, 0));
    // Lengths have 32 bits.
    assert_eq!(rig.one(IoOp::Discard, 0, 5 << 29, &[]), 0);
    for (offset, len) in [(0, 1 << 30), (1 << 30, 1 << 30), (2 << 30, 1 << 29)] {
        assert_eq!(asked.recv().unwrap(), (command::TRIM, 0, offset, len));
    }
}

/// A flush is answered without the server there, so all that was answered before has to be durable.
#[test]
fn f18_a_server_that_offers_fua_and_no_flush_gets_all_with_fua() {
    let (sender, asked) = channel();
    let dir = tempfile::tempdir().unwrap();
    let facts = Facts { flags: FACTS.flags & !offers::SEND_FLUSH, ..FACTS };
    let tell = move |_, conn: &mut crate::server::Conn| loop {
        let asked = conn.asked()?;
        conn.carry_out(&asked)?;
        sender.send((asked.kind, asked.flags)).unwrap();
    };
    let server = Server::start(dir.path(), move |_| facts, tell);
    let mut rig = Rig::new(&server.path, Timeouts::default());
    for (op, kind, flags) in [
        (IoOp::Write, command::WRITE, flag::FUA),
        (IoOp::WriteDurable, command::WRITE, flag::FUA),
        (IoOp::PunchHole, command::WRITE_ZEROES, flag::FUA),
        (IoOp::ZeroRange, command::WRITE_ZEROES, flag::NO_HOLE | flag::FUA),
        (IoOp::Discard, command::TRIM, flag::FUA),
        (IoOp::Read, command::READ, 0),
    ] {
        rig.one(op, 4096, 512, &[1; 512]);
        assert_eq!(asked.recv().unwrap(), (kind, flags), "{op:?}");
    }
    assert_eq!(rig.flush(), 0);
    assert!(asked.try_recv().is_err(), "there is no flush");
}

#[test]
fn what_a_server_does_not_offer_is_not_asked() {
    let (sender, asked) = channel();
    let dir = tempfile::tempdir().unwrap();
    let flags = [offers::HAS_FLAGS | offers::SEND_FLUSH, offers::HAS_FLAGS];
    let facts = move |at: usize| Facts { flags: flags[at], ..FACTS };
    let tell = move |_, conn: &mut crate::server::Conn| loop {
        let asked = conn.asked()?;
        conn.carry_out(&asked)?;
        sender.send((asked.kind, asked.flags)).unwrap();
    };
    let server = Server::start(dir.path(), facts, tell);
    for durable in [&[(command::WRITE, 0), (command::FLUSH, 0)][..], &[(command::WRITE, 0)]] {
        let mut rig = Rig::new(&server.path, Timeouts::default());
        for op in [IoOp::PunchHole, IoOp::ZeroRange, IoOp::Discard] {
            assert_eq!(rig.one(op, 0, 512, &[]), -libc::EOPNOTSUPP);
        }
        // Durable by a flush, where there is one.
        assert_eq!(rig.one(IoOp::WriteDurable, 0, 512, &[1; 512]), 512);
        for wanted in durable {
            assert_eq!(asked.recv().unwrap(), *wanted);
        }
    }
    assert!(asked.try_recv().is_err());
}

#[test]
fn requests_are_no_larger_than_the_server_takes() {
    let dir = tempfile::tempdir().unwrap();
    let facts = Facts { blocks: Some([512, 4096, 65536]), ..FACTS };
    let server = Server::start(dir.path(), move |_| facts, |_, conn| conn.serve());
    let mut rig = Rig::new(&server.path, Timeouts::default());
    // A short result: whoever asked goes on with the rest.
    assert_eq!(rig.write(0, &[7; 100_000]), 65536);
    assert_eq!(rig.read(0, 100_000).unwrap(), [7; 65536]);
    assert_eq!(rig.remote.negotiated().max_block, 65536);
}

#[test]
fn errors_of_the_server_are_those_of_the_operation_and_end_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |_, conn| {
            loop {
                let asked = conn.asked()?;
                match (asked.offset / 512, asked.kind) {
                    (0, command::READ) => {
                        let no_space = [&28u32.to_be_bytes()[..], &[0, 3], b"why"].concat();
                        conn.chunk(true, chunk::ERROR, asked.cookie, &no_space)?;
                    }
                    // After some data, with an offset, and with more to come.
                    (1, command::READ) => {
                        conn.data(false, asked.cookie, asked.offset, 256)?;
                        let at = asked.offset.to_be_bytes();
                        let io = [&5u32.to_be_bytes()[..], &[0, 0], &at].concat();
                        conn.chunk(false, chunk::ERROR + 1, asked.cookie, &io)?;
                        conn.chunk(true, chunk::NONE, asked.cookie, &[])?;
                    }
                    (0, _) => conn.simple(asked.cookie, 1)?,
                    (1, _) => conn.simple(asked.cookie, 77)?,
                    _ => conn.carry_out(&asked)?,
                }
            }
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    assert_eq!(rig.read(0, 512), Err(libc::ENOSPC));
    assert_eq!(rig.read(512, 512), Err(libc::EIO));
    assert_eq!(rig.write(0, &[1; 512]), -libc::EPERM);
    assert_eq!(rig.write(512, &[1; 512]), -libc::EIO);
    assert_eq!(rig.write(1024, &[1; 512]), 512);
    assert_eq!(rig.read(1024, 512).unwrap(), [1; 512]);
}

#[test]
fn requests_that_wait_together_go_by_one_call() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), |_| FACTS, |_, conn| conn.serve());
    let mut rig = Rig::new(&server.path, Timeouts::default());
    use ringway_aio::Engine as _;
    let before = rig.engine.counters().syscalls;
    for at in 0..32 {
        rig.queue(IoOp::Write, at * 4096, 4096, &[1; 4096]);
    }
    rig.submit();
    assert_eq!(rig.engine.counters().syscalls - before, 1);
    assert_eq!(rig.reap(32).len(), 32);
}

#[test]
fn a_pipe_that_is_full_holds_up_nothing_but_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (go, wait) = channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        move |_, conn| {
            // Reads nothing until much more was sent than a socket holds.
            let _ = wait.lock().unwrap().recv();
            conn.serve()
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    for at in 0..32u64 {
        rig.queue(IoOp::Write, at << 15, 1 << 15, &pattern(at as u8, 1 << 15));
    }
    rig.submit();
    go.send(()).unwrap();
    assert!(rig.reap(32).iter().all(|&(_, result)| result == 1 << 15));
    for at in 0..32u64 {
        assert!(rig.read(at << 15, 1 << 15).unwrap() == pattern(at as u8, 1 << 15));
    }
}

#[test]
fn a_server_says_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let facts = Facts { blocks: Some([4096, 65536, u32::MAX]), flags: ALL, ..FACTS };
    let server = Server::start(dir.path(), move |_| facts, |_, conn| conn.serve());
    let found = connect(&target(&server.path)).unwrap().negotiated;
    assert_eq!((found.bytes, found.flags, found.structured), (1 << 20, ALL, true));
    assert_eq!((found.min_block, found.preferred_block), (4096, 65536));
    assert_eq!(found.max_block, 32 << 20);
}
