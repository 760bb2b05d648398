//! Rows F6 and F15 of docs/hazards.md: how long a guest waits where one of several connections is lost, and
//! the server goes on with others.

use crate::rig::Rig;
use crate::server::{ALL, Conn, FACTS, Facts, Server};
use ringway_aio::IoOp;
use ringway_nbd_client::Timeouts;
use ringway_nbd_words::{command, offers};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MANY: Facts = Facts { flags: ALL | offers::CAN_MULTI_CONN, ..FACTS };

/// A read here ends the connection that it comes by.
const END: u64 = 1 << 19;

/// Writes here take their time.
const SLOW: u64 = 1 << 18;

#[test]
fn f06_what_is_not_sent_fails_in_time_while_a_server_is_at_work_on_another_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (word, words) = channel::<()>();
    let words = Mutex::new(words);
    let serve = move |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            if number < 2 && asked.kind == command::READ && asked.offset == END {
                return Ok(());
            }
            if number < 2 && asked.kind == command::WRITE && asked.offset == SLOW {
                let _ = words.lock().unwrap().recv();
            }
            conn.carry_out(&asked)?;
        }
    };
    let server = Server::start(dir.path(), |_| MANY, serve);
    let give_up = Some(Duration::from_millis(300));
    let timeouts = Timeouts { give_up, ..Timeouts::default() };
    let mut rig = Rig::several_within(&server.path, 2, 1, timeouts).pop().unwrap();
    let (busy, lost) = (rig.queue_in_use(), rig.attach());
    let write = rig.queue(IoOp::Write, SLOW, 512, &[1; 512]);
    rig.submit();
    rig.use_queue(lost);
    // The server has lost it, and could not be asked again yet.
    assert_eq!(rig.read(END, 512), Err(libc::ENOTCONN));
    // Nothing new is sent beside what the server is at.
    for queue in [busy, lost] {
        rig.use_queue(queue);
        assert_eq!(rig.read(0, 512), Err(libc::ENOTCONN));
    }
    word.send(()).unwrap();
    assert_eq!(rig.reap(1), [(write, 512)], "what was sent is answered");
    for queue in [busy, lost] {
        rig.use_queue(queue);
        let begun = Instant::now();
        while rig.read(0, 512).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never comes back");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // It was answered by a server that may be another one by now.
    assert_eq!(rig.flush(), -libc::EIO);
}

#[test]
fn f06_what_a_silent_server_was_sent_fails_too() {
    let dir = tempfile::tempdir().unwrap();
    let serve = |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            if number < 2 && asked.offset == END {
                let path = conn.stream.local_addr()?.as_pathname().unwrap().to_owned();
                std::fs::rename(&path, path.with_extension("away"))?;
                return Ok(());
            }
            if number >= 2 || asked.offset != SLOW {
                conn.carry_out(&asked)?;
            }
        }
    };
    let server = Server::start(dir.path(), |_| MANY, serve);
    let silence = Duration::from_secs(1);
    let timeouts = Timeouts { give_up: Some(Duration::from_millis(100)), silence };
    let mut rig = Rig::several_within(&server.path, 2, 1, timeouts).pop().unwrap();
    let queues = [rig.queue_in_use(), rig.attach()];
    let write = rig.queue(IoOp::Write, SLOW, 512, &[1; 512]);
    rig.submit();
    rig.use_queue(queues[1]);
    let read = rig.queue(IoOp::Read, END, 512, &[]);
    let failed = -libc::ENOTCONN;
    assert_eq!(rig.reap(2), [(write, failed), (read, failed)]);
    std::fs::rename(server.path.with_extension("away"), &server.path).unwrap();
    let begun = Instant::now();
    while rig.write(SLOW, &[2; 512]) != 512 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never comes back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True if the client ends the connection within so long.
fn ends(stream: &UnixStream, within: Duration) -> bool {
    let begun = Instant::now();
    stream.set_nonblocking(true).unwrap();
    let ended = loop {
        // SAFETY: looks at one byte of a socket, into one of ours.
        let got = unsafe {
            let mut byte = 0u8;
            let at = std::ptr::from_mut(&mut byte).cast();
            libc::recv(std::os::fd::AsRawFd::as_raw_fd(stream), at, 1, libc::MSG_PEEK)
        };
        if got == 0 || begun.elapsed() > within {
            break got == 0;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    stream.set_nonblocking(false).unwrap();
    ended
}

/// Each of five connections answers what it was sent two seconds after the one before: in sum far more than
/// a server may take.
#[test]
fn f15_connections_that_end_one_after_the_other_have_one_limit_together() {
    const LANES: u16 = 6;
    let dir = tempfile::tempdir().unwrap();
    let (slow, cut) = (AtomicU32::new(0), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&cut);
    let serve = move |number: usize, conn: &mut Conn| -> io::Result<()> {
        loop {
            let asked = conn.asked()?;
            if number < usize::from(LANES) && asked.offset == END {
                return Ok(());
            }
            if number < usize::from(LANES) && asked.offset == SLOW {
                let turn = slow.fetch_add(1, SeqCst) + 1;
                if ends(&conn.stream, Duration::from_secs(2) * turn) {
                    seen.store(true, SeqCst);
                    return conn.stream.shutdown(Shutdown::Both);
                }
            }
            conn.carry_out(&asked)?;
        }
    };
    let server = Server::start(dir.path(), |_| MANY, serve);
    let timeouts = Timeouts { silence: Duration::from_secs(3), ..Timeouts::default() };
    let mut rig = Rig::several_within(&server.path, LANES, 1, timeouts).pop().unwrap();
    let mut queues = vec![rig.queue_in_use()];
    queues.extend((1..LANES).map(|_| rig.attach()));
    for &queue in &queues[1..] {
        rig.use_queue(queue);
        rig.queue(IoOp::WriteDurable, SLOW, 512, &[1; 512]);
    }
    rig.submit();
    rig.use_queue(queues[0]);
    rig.queue(IoOp::Read, END, 512, &[]);
    let results = rig.reap(usize::from(LANES));
    assert!(results.iter().all(|&(_, result)| result == 512), "{results:?}");
    // The server looks every now and then, and may see it after its client has all answers.
    let begun = Instant::now();
    while !cut.load(SeqCst) {
        assert!(begun.elapsed() < Duration::from_secs(20), "all were waited for");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A server that shakes hands and ends each connection at its first request, or at once.
#[test]
fn f21_a_server_that_takes_connections_and_drops_them_is_away() {
    for at_once in [false, true] {
        let count = Arc::new(AtomicUsize::new(0));
        let dir = tempfile::tempdir().unwrap();
        let (counts, drops) = (Arc::clone(&count), Arc::new(AtomicBool::new(true)));
        let dropping = Arc::clone(&drops);
        let server = Server::start(
            dir.path(),
            |_| FACTS,
            move |number, conn| {
                counts.fetch_add(1, SeqCst);
                if !dropping.load(SeqCst) {
                    return conn.serve();
                }
                if number == 0 || !at_once { conn.asked().map(drop) } else { Ok(()) }
            },
        );
        let give_up = Some(Duration::from_secs(1));
        let mut rig = Rig::new(&server.path, Timeouts { give_up, ..Timeouts::default() });
        // The time counts from the last answer, whatever connects in between.
        assert_eq!(rig.read(0, 512), Err(libc::ENOTCONN));
        assert_eq!(rig.write(0, &[1; 512]), -libc::ENOTCONN);
        // 50 ms, then twice as long each time: six connections in some seconds.
        let tried = count.load(SeqCst);
        assert!(tried < 50, "{tried} connections");
        drops.store(false, SeqCst);
        let begun = Instant::now();
        while rig.write(0, &[2; 512]) != 512 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never comes back");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(rig.read(0, 512).unwrap(), [2; 512]);
    }
}

/// A connection that came while nothing waited for it, was not used for longer than requests wait, and ends at
/// the first one.
#[test]
fn f41_idle_time_is_no_outage() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, came) = channel();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        move |number, conn| {
            sender.send(number).unwrap();
            match number {
                0 => conn.asked().and_then(|asked| conn.carry_out(&asked)),
                1 => conn.asked().map(drop),
                _ => conn.serve(),
            }
        },
    );
    let give_up = Some(Duration::from_secs(5));
    let mut rig = Rig::new(&server.path, Timeouts { give_up, ..Timeouts::default() });
    assert_eq!(rig.flush(), 0);
    let begun = Instant::now();
    while came.try_iter().all(|number| number != 1) {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come back");
        assert_eq!(rig.reap_soon(), []);
    }
    std::thread::sleep(Duration::from_secs(11));
    assert_eq!(rig.reap_soon(), []);
    assert_eq!(rig.write(0, &[1; 512]), 512);
}
