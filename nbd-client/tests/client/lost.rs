//! Rows F4 to F7 of docs/hazards.md: connections that are lost, and come back.

use crate::rig::Rig;
use crate::server::{Asked, FACTS, Facts, Server};
use ringway_aio::IoOp;
use ringway_nbd_client::{Counts, Remote, Timeouts};
use ringway_nbd_words::{chunk, command, flag, offers};
use std::fs::File;
use std::sync::mpsc::channel;
use std::time::Duration;

#[test]
fn f04_what_was_not_answered_is_sent_again_in_order_before_anything_new() {
    let (sender, asked) = channel();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        move |number, conn| {
            for at in 0.. {
                let asked = conn.asked()?;
                sender.send((number, asked.kind, asked.offset)).unwrap();
                // The first connection answers the second request alone, and ends after the sixth.
                match (number, at) {
                    (0, 1) => conn.carry_out(&asked)?,
                    (0, 5) => return Ok(()),
                    (0, _) => {}
                    _ => conn.carry_out(&asked)?,
                }
            }
            Ok(())
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    for at in 0..6 {
        let op = if at % 2 == 0 { IoOp::WriteDurable } else { IoOp::Read };
        rig.queue(op, at * 512, 512, &[5; 512]);
    }
    rig.submit();
    let first: Vec<_> = (0..6).map(|_| asked.recv().unwrap()).collect();
    assert!(first.iter().map(|(_, _, offset)| *offset).eq((0..6).map(|at| at * 512)));
    // While there is no connection, or just when it is lost.
    rig.queue(IoOp::WriteDurable, 1 << 19, 512, &[6; 512]);
    assert!(rig.reap(7).iter().all(|&(_, result)| result == 512));
    let again: Vec<_> = asked.try_iter().filter(|(number, ..)| *number == 1).collect();
    let wanted: Vec<_> = [0, 2, 3, 4, 5].map(|at| (1, first[at].1, first[at].2)).into();
    assert_eq!(again[..5], wanted);
    assert_eq!(again[5..], [(1, command::WRITE, 1 << 19)]);
}

/// A server whose first connection ends at the first request after `writes` of them and, if asked,
/// a flush; whether a flush succeeds on the next one.
fn flush_after(flags: u16, op: IoOp, flushed: bool) -> (i32, i32) {
    let dir = tempfile::tempdir().unwrap();
    let facts = Facts { flags: flags | offers::HAS_FLAGS, ..FACTS };
    let server = Server::start(
        dir.path(),
        move |_| facts,
        |number, conn| {
            loop {
                let asked = conn.asked()?;
                if number == 0 && asked.kind == command::READ {
                    return Ok(());
                }
                conn.carry_out(&asked)?;
            }
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    rig.one(op, 0, 512, &[1; 512]);
    if flushed {
        assert_eq!(rig.flush(), 0);
    }
    assert_eq!(rig.read(0, 512).unwrap(), [1; 512]);
    (rig.flush(), rig.flush())
}

#[test]
fn f05_writes_that_may_be_lost_have_flushes_fail_for_good() {
    let (flush, fua) = (offers::SEND_FLUSH, offers::SEND_FUA);
    let failed = (-libc::EIO, -libc::EIO);
    assert_eq!(flush_after(flush | fua, IoOp::Write, false), failed);
    assert_eq!(flush_after(flush, IoOp::Write, false), failed);
    // What was flushed, or durable by itself, is not lost; nor is it where there is nothing to flush.
    assert_eq!(flush_after(flush | fua, IoOp::Write, true), (0, 0));
    assert_eq!(flush_after(flush | fua, IoOp::WriteDurable, false), (0, 0));
    assert_eq!(flush_after(flush, IoOp::WriteDurable, false), (0, 0));
    assert_eq!(flush_after(0, IoOp::Write, false), (0, 0));
}

#[test]
fn f05_a_flush_covers_what_was_answered_before_it_alone() {
    let (sender, asked) = channel();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        move |number, conn| {
            if number > 0 {
                return conn.serve();
            }
            // The flush is answered after a write that came later.
            let (flush, write) = (conn.asked()?, conn.asked()?);
            conn.carry_out(&write)?;
            conn.carry_out(&flush)?;
            sender.send(()).unwrap();
            conn.asked().map(drop)
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    rig.queue(IoOp::Sync, 0, 0, &[]);
    rig.queue(IoOp::Write, 0, 512, &[1; 512]);
    assert_eq!(rig.reap(2), [(0, 0), (1, 512)]);
    asked.recv().unwrap();
    assert_eq!(rig.read(512, 512).unwrap().len(), 512);
    assert_eq!(rig.flush(), -libc::EIO);
}

#[test]
fn f05_a_flush_that_was_under_way_does_not_hide_what_was_lost() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |number, conn| {
            loop {
                let asked: Asked = conn.asked()?;
                if number == 0 && asked.kind == command::FLUSH {
                    return Ok(());
                }
                conn.carry_out(&asked)?;
            }
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    assert_eq!(rig.write(0, &[1; 512]), 512);
    assert_eq!(rig.flush(), -libc::EIO);
}

/// A page as a daemon's state folder has it.
fn page() -> File {
    let page = tempfile::tempfile().unwrap();
    page.set_len(Counts::BYTES).unwrap();
    page
}

/// Each process of a guest's disk, one after the other, finds what the one before has left in the page.
#[test]
fn f17_a_process_that_ends_leaves_what_it_had_answered_to_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), |_| FACTS, |_, conn| conn.serve());
    let page = page();
    let mut told = Vec::new();
    for flushes in [false, true, true] {
        let mut lost = false;
        let keep = |remote: &Remote| {
            remote.keep_counts(Counts::map(&page, 0).unwrap(), || lost = true);
            assert!(!remote.wants_flush());
        };
        let mut rig = Rig::kept(&server.path, keep);
        told.push(lost);
        assert_eq!(rig.write(0, &[1; 512]), 512);
        assert!(rig.remote.wants_flush());
        if flushes {
            assert_eq!(rig.flush(), 0);
            assert!(!rig.remote.wants_flush());
        }
    }
    assert_eq!(told, [false, true, false]);
}

/// Nothing else is asked before: what an earlier process had answered, wherever it counted that, is durable.
#[test]
fn f17_the_first_request_of_a_process_is_a_flush() {
    let limit = Duration::from_secs(60);
    for (structured, fails) in [(true, false), (false, false), (true, true), (false, true)] {
        let (sender, asked) = channel();
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            move |_| Facts { structured, ..FACTS },
            move |_, conn| {
                let first = conn.asked()?;
                sender.send(first.kind).unwrap();
                match (fails, structured) {
                    (true, true) => {
                        conn.chunk(true, chunk::ERROR, first.cookie, &[0, 0, 0, 5, 0, 0])?
                    }
                    (true, false) => conn.simple(first.cookie, 5)?,
                    _ => conn.carry_out(&first)?,
                }
                conn.serve()
            },
        );
        let mut rig = Rig::kept(&server.path, |remote| {
            assert_eq!(remote.flush_first(limit).unwrap(), !fails);
        });
        assert_eq!(asked.recv().unwrap(), command::FLUSH);
        assert_eq!(rig.write(0, &[1; 512]), 512);
    }
    // A server without a flush is asked for none, and one that says nothing is given up.
    let dir = tempfile::tempdir().unwrap();
    let flags = FACTS.flags & !offers::SEND_FLUSH;
    let without =
        Server::start(dir.path(), move |_| Facts { flags, ..FACTS }, |_, conn| conn.serve());
    let mut rig = Rig::kept(&without.path, |remote| assert!(remote.flush_first(limit).unwrap()));
    assert_eq!(rig.write(0, &[1; 512]), 512);
    let dir = tempfile::tempdir().unwrap();
    let silent = Server::start(
        dir.path(),
        |_| FACTS,
        |_, conn| std::io::copy(&mut conn.stream, &mut std::io::sink()).map(drop),
    );
    Rig::kept(&silent.path, |remote| {
        let error = remote.flush_first(Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("response-timeout: 0.1 s"), "{error}");
    });
}

#[test]
fn f06_after_a_while_requests_fail_until_there_is_a_server_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |number, conn| {
            if number == 0 {
                let asked = conn.asked()?;
                std::fs::rename(
                    conn.stream.local_addr()?.as_pathname().unwrap(),
                    conn.stream.local_addr()?.as_pathname().unwrap().with_extension("away"),
                )?;
                drop(asked);
                return Ok(());
            }
            conn.serve()
        },
    );
    let timeouts = Timeouts { give_up: Some(Duration::from_millis(100)), ..Timeouts::default() };
    let mut rig = Rig::new(&server.path, timeouts);
    // One that was under way, and one that comes later.
    assert_eq!(rig.read(0, 512), Err(libc::ENOTCONN));
    assert_eq!(rig.write(0, &[1; 512]), -libc::ENOTCONN);
    std::fs::rename(server.path.with_extension("away"), &server.path).unwrap();
    let begun = std::time::Instant::now();
    while rig.write(0, &[1; 512]) != 512 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never comes back");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(rig.read(0, 512).unwrap(), [1; 512]);
}

/// What was used of a server has to be there, and what it can do besides may change, as when it is upgraded.
#[test]
fn f07_a_server_that_offers_more_is_the_same_and_one_that_offers_less_is_not() {
    let more = [
        Facts { flags: FACTS.flags | offers::SEND_CACHE | offers::SEND_DF, ..FACTS },
        Facts { flags: FACTS.flags | offers::CAN_MULTI_CONN, ..FACTS },
        Facts { blocks: Some([1, 65536, 64 << 20]), ..FACTS },
    ];
    let less = [
        Facts { flags: FACTS.flags & !offers::SEND_FLUSH, ..FACTS },
        Facts { flags: FACTS.flags & !offers::SEND_FUA, ..FACTS },
        Facts { flags: FACTS.flags & !offers::SEND_TRIM, ..FACTS },
        Facts { flags: FACTS.flags & !offers::SEND_WRITE_ZEROES, ..FACTS },
        Facts { blocks: Some([512, 512, 32 << 20]), ..FACTS },
        Facts { blocks: Some([1, 4096, 65536]), ..FACTS },
        Facts { structured: false, ..FACTS },
    ];
    let all = more.map(|facts| (facts, true)).into_iter().chain(less.map(|facts| (facts, false)));
    for (other, same) in all {
        let (sender, asked) = channel();
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            move |number| if number == 1 { other } else { FACTS },
            move |number, conn| {
                if number == 0 {
                    return conn.asked().map(drop);
                }
                loop {
                    let asked = conn.asked()?;
                    sender.send(number).unwrap();
                    conn.carry_out(&asked)?;
                }
            },
        );
        let mut rig = Rig::new(&server.path, Timeouts::default());
        assert_eq!(rig.write(0, &[1; 512]), 512);
        let wanted = if same { 1 } else { 2 };
        assert_eq!(asked.recv().unwrap(), wanted, "{:#x} {:?}", other.flags, other.blocks);
    }
}

/// Whether a server has a cache is known when the disk is opened: without one its flushes are not sent.
#[test]
fn f40_a_server_that_gains_a_cache_is_not_taken_for_the_same() {
    let plain = FACTS.flags & !(offers::SEND_FLUSH | offers::SEND_FUA);
    for (was, is, same) in [
        (plain, plain | offers::SEND_FLUSH, false),
        (plain, FACTS.flags, false),
        (plain, plain | offers::SEND_FUA, true),
        (plain | offers::SEND_FUA, FACTS.flags, true),
    ] {
        let (sender, asked) = channel();
        let dir = tempfile::tempdir().unwrap();
        let facts = move |number| Facts { flags: if number == 1 { is } else { was }, ..FACTS };
        let server = Server::start(dir.path(), facts, move |number, conn| {
            if number == 0 {
                return conn.asked().map(drop);
            }
            loop {
                let asked = conn.asked()?;
                sender.send((number, asked.flags)).unwrap();
                conn.carry_out(&asked)?;
            }
        });
        let mut rig = Rig::new(&server.path, Timeouts::default());
        assert_eq!(rig.write(0, &[1; 512]), 512);
        let fua = if was & offers::SEND_FUA == 0 { 0 } else { flag::FUA };
        assert_eq!(asked.recv().unwrap(), (if same { 1 } else { 2 }, fua), "{was:#x} {is:#x}");
        assert_eq!(rig.flush(), 0);
    }
}

/// Size and abilities are the same: who named no export would go on with another disk.
#[test]
fn f20_an_export_of_another_name_is_not_taken_for_the_same() {
    let called = |name| Facts { name, ..FACTS };
    // What is told later, and was not at first, cannot be compared.
    for (was, others) in
        [(Some("vm1"), [Some("vm2"), None, Some("vm11")]), (None, [Some("vm2"); 3])]
    {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            move |number| match number {
                1..4 => called(others[number - 1]),
                _ => called(was),
            },
            move |number, conn| match number {
                0 => conn.asked().map(drop),
                1..4 if was.is_some() => {
                    // Nobody asks it anything.
                    let asked = conn.asked();
                    assert!(asked.is_err(), "{asked:?}");
                    Ok(())
                }
                _ => conn.serve(),
            },
        );
        let mut rig = Rig::new(&server.path, Timeouts::default());
        assert_eq!(rig.write(0, &[1; 512]), 512);
        assert_eq!(server.disk.lock().unwrap()[..512], [1; 512]);
    }
}

/// A disk that is removed while its server is silent, or away.
#[test]
fn f19_an_export_that_is_given_up_sends_nothing_any_more() {
    for away in [false, true] {
        let (sender, asked) = channel();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.sock");
        let other = path.with_extension("away");
        let (from, to) = (path.clone(), other.clone());
        let server = Server::start(
            dir.path(),
            |_| FACTS,
            move |number, conn| {
                loop {
                    let asked = conn.asked()?;
                    sender.send(number).unwrap();
                    if number == 0 && away {
                        std::fs::rename(&from, &to)?;
                        return Ok(());
                    }
                    if number > 0 {
                        conn.carry_out(&asked)?;
                    }
                }
            },
        );
        let mut rig = Rig::new(&server.path, Timeouts::default());
        rig.queue(IoOp::Write, 0, 512, &[1; 512]);
        rig.queue(IoOp::Read, 512, 512, &[]);
        rig.submit();
        assert_eq!(asked.recv().unwrap(), 0);
        if away {
            let begun = std::time::Instant::now();
            while !other.exists() {
                assert!(begun.elapsed() < Duration::from_secs(60), "the server never goes");
                assert_eq!(rig.reap_soon(), []);
            }
        }
        rig.remote.end();
        assert_eq!(rig.reap(2), [(0, -libc::ENOTCONN), (1, -libc::ENOTCONN)]);
        // Whoever waits for that can rely on it: nobody connects any more.
        rig.remote.await_end(Duration::from_secs(60));
        if away {
            std::fs::rename(&other, &path).unwrap();
        }
        assert_eq!(rig.write(0, &[2; 512]), -libc::ENOTCONN);
        assert_eq!(rig.flush(), -libc::ENOTCONN);
        // Another disk of the same export is served.
        let mut next = Rig::new(&server.path, Timeouts::default());
        assert_eq!(next.write(0, &[3; 512]), 512);
        assert_eq!(rig.write(0, &[2; 512]), -libc::ENOTCONN);
        assert_eq!(next.read(0, 512).unwrap(), [3; 512]);
        assert!(asked.try_iter().all(|number| number <= 1), "the old one came back");
    }
}

#[test]
fn f53_who_comes_after_the_end_hears_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), |_| FACTS, |_, conn| conn.serve());
    let mut rig = Rig::kept(&server.path, Remote::end);
    assert_eq!(rig.read(0, 512), Err(libc::ENOTCONN));
    rig.attach();
    assert_eq!(rig.flush(), -libc::ENOTCONN);
}

#[test]
fn f07_another_export_is_not_taken_for_the_same() {
    for other in [Facts { bytes: 1 << 19, ..FACTS }, Facts { flags: FACTS.flags | 2, ..FACTS }] {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            move |number| if (1..4).contains(&number) { other } else { FACTS },
            |number, conn| match number {
                0 => conn.asked().map(drop),
                1..4 => {
                    // Nobody asks it anything.
                    let asked = conn.asked();
                    assert!(asked.is_err(), "{asked:?}");
                    Ok(())
                }
                _ => conn.serve(),
            },
        );
        let mut rig = Rig::new(&server.path, Timeouts::default());
        assert_eq!(rig.write(0, &[1; 512]), 512);
        assert_eq!(server.disk.lock().unwrap()[..512], [1; 512]);
    }
}
