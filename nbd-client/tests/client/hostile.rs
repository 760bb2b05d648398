//! Rows F1 to F3 of docs/hazards.md: servers that keep no rule.

use crate::rig::{Rig, target};
use crate::server::{
    ALL, Asked, Conn, FACTS, Facts, Server, chunk_bytes, greet, reply, reply_bytes, take,
};
use ringway_aio::{Engine, IoOp};
use ringway_nbd_client::{Timeouts, connect};
use ringway_nbd_words::{IHAVEOPT, NBDMAGIC, OLDSTYLE, answer, chunk, info, offers, option};
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// What somebody is told who connects to a server that does `act` and ends then.
fn refusal(act: impl Fn(&mut UnixStream) -> io::Result<()> + Send + 'static) -> String {
    refusal_within(Duration::from_secs(60), act)
}

fn refusal_within(
    limit: Duration,
    act: impl Fn(&mut UnixStream) -> io::Result<()> + Send + 'static,
) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = act(&mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // Until the client has gone.
        let _ = io::copy(&mut stream, &mut io::sink());
    });
    connect(&target(&path).with_connect_timeout(limit)).unwrap_err().to_string()
}

fn hello(second: u64, flags: u16) -> Vec<u8> {
    [&NBDMAGIC.to_be_bytes()[..], &second.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// As far as the answer to `NBD_OPT_GO`, which is `kind` with `data`; then an ACK.
fn go(kind: u32, data: Vec<u8>) -> impl Fn(&mut UnixStream) -> io::Result<()> + Send + 'static {
    move |stream| {
        stream.write_all(&hello(IHAVEOPT, 3))?;
        take::<20>(stream)?;
        reply(stream, option::STRUCTURED_REPLY, answer::ACK, &[])?;
        take::<26>(stream)?;
        reply(stream, option::GO, kind, &data)?;
        reply(stream, option::GO, answer::ACK, &[])
    }
}

fn export(bytes: u64, flags: u16) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat()
}

#[test]
fn f01_handshakes_that_make_no_sense_are_refused_with_the_reason() {
    let sends = |bytes: Vec<u8>| move |stream: &mut UnixStream| stream.write_all(&bytes);
    let long = [&hello(IHAVEOPT, 3)[..], &0x0003_e889_0455_65a9u64.to_be_bytes()].concat();
    let long = [&long[..], &8u32.to_be_bytes(), &1u32.to_be_bytes(), &u32::MAX.to_be_bytes()];
    for (message, wanted) in [
        (refusal(sends(Vec::new())), "handshake ended"),
        (refusal(sends(vec![0; 64])), "no NBD server"),
        (refusal(sends(b"HTTP/1.1 400 Bad Request\r\n".to_vec())), "no NBD server"),
        (refusal(sends(hello(OLDSTYLE, 0))), "oldstyle"),
        (refusal(sends(hello(IHAVEOPT, 0))), "fixed newstyle"),
        (refusal(sends([hello(IHAVEOPT, 3), vec![7; 64]].concat())), "does not begin as one"),
        (refusal(sends(long.concat())), "too long"),
        (refusal(go(answer::INFO, export(0, ALL))), "has 0 bytes"),
        (refusal(go(answer::INFO, export(511, ALL))), "a disk has 512 at least"),
        (refusal(go(answer::INFO, export(u64::MAX - 511, ALL))), "less than 8 EiB"),
        (refusal(go(answer::INFO, export(1 << 20, 0))), "make no sense"),
        (refusal(go(answer::INFO, vec![0, 0, 1])), "another length"),
        (refusal(go(answer::INFO, Vec::new())), "another length"),
        (refusal(go(answer::ACK, Vec::new())), "does not say how large"),
        (refusal(go(answer::ERR_UNSUP, Vec::new())), "NBD_OPT_GO"),
        (refusal(go(answer::ERR_POLICY, b"not you\x1b[2J".to_vec())), "export '': not you[2J"),
        (refusal(go(answer::ERR_TLS_REQD, Vec::new())), "TLS"),
        (refusal(go(77, Vec::new())), "not asked for"),
    ] {
        assert!(message.contains(wanted), "'{message}' has no '{wanted}'");
    }
    for blocks in [[0, 4096, 65536], [3, 4096, 65536], [4096, 512, 65536], [512, 4096, 512]] {
        let facts = Facts { blocks: Some(blocks), ..FACTS };
        let message = refusal(move |stream| greet(stream, facts));
        assert!(message.contains("make no sense"), "{blocks:?}: {message}");
    }
    let facts = Facts { blocks: Some([65536, 65536, 65536]), ..FACTS };
    assert!(refusal(move |stream| greet(stream, facts)).contains("65536 bytes only"));
}

/// A server that never ends a handshake: silent from the first byte on, or amid it, or one byte at a time.
#[test]
fn f01_a_handshake_that_has_no_end_is_given_up_after_the_limit() {
    let until_it_goes = |stream: &mut UnixStream| io::copy(stream, &mut io::sink()).map(drop);
    let limit = Duration::from_millis(300);
    let drips = |stream: &mut UnixStream| -> io::Result<()> {
        stream.write_all(&hello(IHAVEOPT, 3))?;
        take::<20>(stream)?;
        reply(stream, option::STRUCTURED_REPLY, answer::ACK, &[])?;
        take::<26>(stream)?;
        loop {
            stream.write_all(&reply_bytes(option::GO, answer::INFO, &[0; 4096])[..20])?;
            for _ in 0..4096 {
                std::thread::sleep(Duration::from_millis(5));
                stream.write_all(&[9])?;
            }
        }
    };
    for message in [
        refusal_within(limit, until_it_goes),
        refusal_within(limit, move |stream| {
            stream.write_all(&hello(IHAVEOPT, 3)[..9])?;
            until_it_goes(stream)
        }),
        refusal_within(limit, drips),
    ] {
        assert!(message.contains("the limit is over (connect-timeout: 0.3 s)"), "{message}");
    }
}

#[test]
fn f01_an_export_that_is_not_there_is_told_with_those_that_are() {
    let message = refusal(|stream| {
        stream.write_all(&hello(IHAVEOPT, 3))?;
        take::<20>(stream)?;
        reply(stream, option::STRUCTURED_REPLY, answer::ERR_UNSUP, &[])?;
        take::<26>(stream)?;
        reply(stream, option::GO, answer::ERR_UNKNOWN, b"no")?;
        take::<16>(stream)?;
        for name in ["a", "b c"] {
            let len = u32::try_from(name.len()).unwrap().to_be_bytes();
            reply(stream, option::LIST, answer::SERVER, &[&len, name.as_bytes()].concat())?;
        }
        reply(stream, option::LIST, answer::ACK, &[])
    });
    assert_eq!(message, "the server has no export ''. It has: 'a', 'b c'");
}

/// What a server does with the first request of its first connection.
type Crime = fn(&mut Conn, &Asked) -> io::Result<()>;

/// A piece of the read that is asked for, which lies elsewhere.
fn astray(conn: &mut Conn, asked: &Asked, offset: u64, len: usize) -> io::Result<()> {
    let data = [&offset.to_be_bytes()[..], &vec![0xbd; len]].concat();
    conn.chunk(true, chunk::OFFSET_DATA, asked.cookie, &data)
}

const READ: (u64, usize) = (8192, 4096);

const CRIMES: &[(&str, Crime)] = &[
    ("noise", |conn, _| conn.send(&[0x5a; 64])),
    ("nothing", |_, _| Ok(())),
    ("half a head", |conn, asked| {
        conn.send(&chunk_bytes(true, chunk::NONE, asked.cookie, &[])[..9])
    }),
    ("half of the data", |conn, asked| {
        let data = [&READ.0.to_be_bytes()[..], &[0xbd; READ.1]].concat();
        conn.send(&chunk_bytes(true, chunk::OFFSET_DATA, asked.cookie, &data)[..2000])
    }),
    ("another's handle", |conn, asked| conn.simple(asked.cookie ^ 1, 0)),
    ("a handle of times gone by", |conn, asked| conn.simple(asked.cookie ^ (1 << 32), 0)),
    ("a handle beyond the table", |conn, asked| conn.simple(asked.cookie | 0xffff_0000, 0)),
    ("a simple reply to a read", |conn, asked| conn.simple(asked.cookie, 0)),
    ("an end without the data", |conn, asked| conn.chunk(true, chunk::NONE, asked.cookie, &[])),
    ("an end with half of the data", |conn, asked| {
        conn.data(true, asked.cookie, READ.0, READ.1 / 2)
    }),
    ("too much data", |conn, asked| astray(conn, asked, READ.0, READ.1 + 1)),
    ("data of 4 GiB", |conn, asked| {
        let mut bytes = chunk_bytes(true, chunk::OFFSET_DATA, asked.cookie, &[0; 8]);
        bytes[16..20].fill(0xff);
        conn.send(&bytes)
    }),
    ("data twice", |conn, asked| {
        conn.data(false, asked.cookie, READ.0, READ.1)?;
        conn.data(true, asked.cookie, READ.0, 1)
    }),
    ("a half twice", |conn, asked| {
        conn.data(false, asked.cookie, READ.0, READ.1 / 2)?;
        conn.data(true, asked.cookie, READ.0, READ.1 / 2)
    }),
    ("the end twice", |conn, asked| {
        let half = READ.0 + READ.1 as u64 / 2;
        conn.data(false, asked.cookie, half, READ.1 / 2)?;
        conn.data(true, asked.cookie, half, READ.1 / 2)
    }),
    ("a hole over data", |conn, asked| {
        conn.data(false, asked.cookie, READ.0, READ.1 / 2)?;
        let half = u32::try_from(READ.1 / 2).unwrap();
        let hole = [&READ.0.to_be_bytes()[..], &half.to_be_bytes()].concat();
        conn.chunk(true, chunk::OFFSET_HOLE, asked.cookie, &hole)
    }),
    ("pieces without order, two of which overlap", |conn, asked| {
        let (quarter, len) = (READ.1 as u64 / 4, READ.1 / 4);
        conn.data(false, asked.cookie, READ.0 + 3 * quarter, len)?;
        conn.data(false, asked.cookie, READ.0 + quarter, len)?;
        conn.data(false, asked.cookie, READ.0, len)?;
        conn.data(true, asked.cookie, READ.0 + quarter + 1, len)
    }),
    ("data before it", |conn, asked| astray(conn, asked, READ.0 - 1, 512)),
    ("data behind it", |conn, asked| astray(conn, asked, READ.0 + READ.1 as u64 - 511, 512)),
    ("data beyond all", |conn, asked| astray(conn, asked, u64::MAX - 100, 512)),
    ("a chunk without data", |conn, asked| astray(conn, asked, READ.0, 0)),
    ("a hole that is too large", |conn, asked| {
        let hole = [&READ.0.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
        conn.chunk(true, chunk::OFFSET_HOLE, asked.cookie, &hole)
    }),
    ("a hole of another length", |conn, asked| {
        conn.chunk(true, chunk::OFFSET_HOLE, asked.cookie, &[0; 13])
    }),
    ("an empty chunk with data", |conn, asked| conn.chunk(true, chunk::NONE, asked.cookie, &[1])),
    ("an empty chunk that ends nothing", |conn, asked| {
        conn.chunk(false, chunk::NONE, asked.cookie, &[])
    }),
    ("an error that is none", |conn, asked| conn.chunk(true, chunk::ERROR, asked.cookie, &[0; 6])),
    ("an error that is too short", |conn, asked| {
        conn.chunk(true, chunk::ERROR, asked.cookie, &[0, 0, 0, 5])
    }),
    ("an error without end", |conn, asked| {
        conn.chunk(true, chunk::ERROR, asked.cookie, &vec![1; 60_000])
    }),
    ("block status", |conn, asked| conn.chunk(true, chunk::BLOCK_STATUS, asked.cookie, &[0; 12])),
    ("a chunk that nobody knows", |conn, asked| conn.chunk(true, 99, asked.cookie, &[0; 12])),
    ("an answer twice", |conn, asked| {
        let mut bytes = chunk_bytes(
            true,
            chunk::OFFSET_DATA,
            asked.cookie,
            &[&READ.0.to_be_bytes()[..], &[0; READ.1]].concat(),
        );
        bytes.extend_from_within(..);
        // The first one is right, so this read is answered, and the next one sent again.
        conn.send(&bytes)
    }),
    ("a shutdown", |conn, asked| conn.simple(asked.cookie, 108)),
];

#[test]
fn f02_replies_that_make_no_sense_cost_the_connection_and_no_request() {
    for (name, crime) in CRIMES {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            |_| FACTS,
            |number, conn| {
                if number > 0 {
                    return conn.serve();
                }
                let asked = conn.asked()?;
                crime(conn, &asked)?;
                conn.stream.shutdown(std::net::Shutdown::Write)?;
                io::copy(&mut conn.stream, &mut io::sink()).map(drop)
            },
        );
        let content: Vec<u8> = (0..1 << 20).map(|at| (at / 11) as u8).collect();
        server.disk.lock().unwrap().copy_from_slice(&content);
        let at = usize::try_from(READ.0).unwrap();
        let mut rig = Rig::new(&server.path, Timeouts::default());
        let twice = *name == "an answer twice";
        let got = rig.read(READ.0, READ.1 as u64).unwrap();
        assert!(twice || got == content[at..][..READ.1], "{name}");
        // And the next one, by the connection that is good, or by another one.
        assert!(rig.read(READ.0, READ.1 as u64).unwrap() == content[at..][..READ.1], "{name}");
        assert_eq!(rig.write(0, &[9; 512]), 512, "{name}");
    }
}

#[test]
fn f02_what_comes_unasked_costs_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |number, conn| {
            if number == 0 {
                conn.simple(0, 0)?;
            }
            conn.serve()
        },
    );
    let mut rig = Rig::new(&server.path, Timeouts::default());
    assert_eq!(rig.write(0, &[1; 512]), 512);
    assert_eq!(rig.read(0, 512).unwrap(), [1; 512]);
}

#[test]
fn f03_a_server_that_falls_silent_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(
        dir.path(),
        |_| FACTS,
        |number, conn| {
            if number > 0 {
                return conn.serve();
            }
            let asked = conn.asked()?;
            conn.carry_out(&asked)?;
            // Takes all, and answers nothing.
            io::copy(&mut conn.stream, &mut io::sink()).map(drop)
        },
    );
    let timeouts = Timeouts { silence: Duration::from_millis(50), ..Timeouts::default() };
    let mut rig = Rig::new(&server.path, timeouts);
    assert_eq!(rig.flush(), 0);
    // Nobody waits for an answer: however long that is, the connection stays.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(rig.write(512, &[2; 512]), 512);
    assert_eq!(rig.read(512, 512).unwrap(), [2; 512]);
}

/// Each byte of its reply comes in time, and the reply never ends; the same beside another connection that is
/// answered.
#[test]
fn f42_a_server_that_answers_a_byte_at_a_time_is_left() {
    for lanes in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(
            dir.path(),
            |_| Facts { flags: ALL | offers::CAN_MULTI_CONN, ..FACTS },
            move |number, conn| {
                loop {
                    let asked = conn.asked()?;
                    if number >= lanes || asked.offset == 0 {
                        conn.carry_out(&asked)?;
                        continue;
                    }
                    let data = [&asked.offset.to_be_bytes()[..], &[0; 65536]].concat();
                    for byte in chunk_bytes(true, chunk::OFFSET_DATA, asked.cookie, &data) {
                        conn.send(&[byte])?;
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            },
        );
        let timeouts = Timeouts { silence: Duration::from_millis(500), ..Timeouts::default() };
        let most = u16::try_from(lanes).unwrap();
        let mut rig = Rig::several_within(&server.path, most, 1, timeouts).pop().unwrap();
        let slow = rig.queue(IoOp::Read, 65536, 65536, &[]);
        rig.submit();
        if lanes > 1 {
            let other = rig.attach();
            rig.use_queue(other);
        }
        let begun = Instant::now();
        let mut answered = false;
        while !answered {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it is waited for, {lanes} connections"
            );
            if lanes > 1 {
                rig.queue(IoOp::Read, 0, 512, &[]);
                rig.submit();
            }
            answered = rig.reap_soon().contains(&(slow, 65536));
        }
    }
}

/// What came and its end ring once.
#[test]
fn f43_an_end_amid_a_reply_is_seen_at_once() {
    for reply in [6, 28 + 100, 28 + 512, 28 + 512 + 28] {
        let dir = tempfile::tempdir().unwrap();
        let ((word, words), (sender, ended)) = (channel::<()>(), channel());
        let words = Mutex::new(words);
        let server = Server::start(
            dir.path(),
            |_| FACTS,
            move |number, conn| {
                if number > 0 {
                    return conn.serve();
                }
                let _ = words.lock().unwrap().recv();
                let asked = [conn.asked()?, conn.asked()?];
                let bytes = asked.map(|asked| {
                    let data = [&asked.offset.to_be_bytes()[..], &[0; 512]].concat();
                    chunk_bytes(true, chunk::OFFSET_DATA, asked.cookie, &data)
                });
                conn.send(&bytes.concat()[..reply])?;
                conn.stream.shutdown(std::net::Shutdown::Both)?;
                // To close it would ring once more.
                sender.send(conn.stream.try_clone()?).unwrap();
                Ok(())
            },
        );
        let mut rig = Rig::new(&server.path, Timeouts::default());
        let reads = [0, 512].map(|offset| rig.queue(IoOp::Read, offset, 512, &[]));
        rig.submit();
        assert_eq!(rig.reap_now(), []);
        word.send(()).unwrap();
        let _stream = ended.recv().unwrap();
        let mut done = Vec::new();
        while done.len() < 2 {
            let begun = Instant::now();
            rig.engine.wait(Some(Duration::from_secs(30))).unwrap();
            assert!(begun.elapsed() < Duration::from_secs(25), "{reply} bytes: nothing has rung");
            done.extend(rig.reap_now());
        }
        done.sort_unstable();
        assert_eq!(done, reads.map(|tag| (tag, 512)));
    }
}
