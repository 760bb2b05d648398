//! Row F12 of docs/hazards.md: servers asked where they have data.

use crate::rig::{Rig, target};
use crate::server::{Asked, Conn, FACTS, Facts, Server};
use ringway_nbd_client::{Remote, Timeouts, connect};
use ringway_nbd_words::{chunk, command, state};
use std::io;

const CONTEXT: u32 = 7;
const GIB: u64 = 1 << 30;

/// A server of `bytes` that has block status, and does this with the first question of its first
/// connection; then it is honest, and says of the rest that it is data.
fn server(
    dir: &tempfile::TempDir,
    bytes: u64,
    act: impl Fn(&mut Conn, &Asked) -> io::Result<()> + Send + Sync + 'static,
) -> Server {
    let facts = Facts { bytes, context: Some(CONTEXT), ..FACTS };
    Server::start(
        dir.path(),
        move |_| facts,
        move |number, conn| {
            let mut first = number == 0;
            loop {
                let asked = conn.asked()?;
                match asked.kind {
                    command::BLOCK_STATUS if std::mem::take(&mut first) => act(conn, &asked)?,
                    command::BLOCK_STATUS => {
                        conn.chunk(true, 5, asked.cookie, &words(&[CONTEXT, asked.len, 0]))?
                    }
                    _ => conn.carry_out(&asked)?,
                }
            }
        },
    )
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

#[test]
fn f12_extents_of_many_replies_are_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let hole = state::HOLE | state::ZERO;
    let server = server(&dir, 3 * GIB, move |conn, asked| {
        assert_eq!((asked.flags, asked.offset, asked.len), (0, 0, 1 << 30));
        // Less than was asked for; a hole that need not read as zeroes; the next question begins there.
        let extents = words(&[CONTEXT, 4096, hole, 8192, 0, 4096, state::HOLE, 1 << 20, hole]);
        conn.chunk(true, chunk::BLOCK_STATUS, asked.cookie, &extents)
    });
    let (mut rig, map) = Rig::after_questions(&server.path, Timeouts::default());
    let map = map.unwrap();
    let (data, next) = (4096 + 8192 + 4096, (16 << 10) + (1 << 20));
    assert_eq!((map.next_data(0), map.next_hole(4096)), (Some(4096), data));
    assert_eq!((map.next_data(data), map.next_hole(next)), (Some(next), 3 * GIB));
    assert_eq!(map.data_bytes(), Some(3 * GIB - next + data - 4096));
    // The connection is of use.
    assert_eq!(rig.write(512, &[2; 512]), 512);
    assert_eq!(rig.read(512, 512).unwrap(), [2; 512]);
}

#[test]
fn f12_what_a_server_does_not_tell_is_data() {
    type Refusal = fn(&mut Conn, &Asked) -> io::Result<()>;
    let refusals: [Refusal; 2] = [
        |conn, asked| conn.simple(asked.cookie, 22),
        |conn, asked| {
            conn.chunk(false, chunk::BLOCK_STATUS, asked.cookie, &words(&[CONTEXT, 512, 3]))?;
            conn.chunk(true, chunk::ERROR, asked.cookie, &[0, 0, 0, 5, 0, 0])
        },
    ];
    for refusal in refusals {
        let dir = tempfile::tempdir().unwrap();
        let server = server(&dir, 1 << 20, refusal);
        let (mut rig, map) = Rig::after_questions(&server.path, Timeouts::default());
        let map = map.unwrap();
        assert_eq!((map.next_data(0), map.next_hole(0)), (Some(0), 1 << 20));
        assert_eq!(map.data_bytes(), None);
        assert_eq!(rig.write(512, &[2; 512]), 512);
    }
    for facts in [FACTS, Facts { structured: false, context: Some(CONTEXT), ..FACTS }] {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(dir.path(), move |_| facts, |_, conn| conn.serve());
        assert_eq!(Rig::after_questions(&server.path, Timeouts::default()).1, None);
    }
}

#[test]
fn f12_more_ranges_than_are_kept_are_data_and_nothing_more_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    // As many as one chunk has room for: data, zeroes, data, …
    let all: Vec<u32> = (0..(2 << 20) - 1).flat_map(|at| [512, (at & 1) * state::ZERO]).collect();
    let told = all.len() as u64 / 2 * 512;
    let server = server(&dir, 3 * GIB, move |conn, asked| {
        let extents = [words(&[CONTEXT]), words(&all)].concat();
        conn.chunk(true, chunk::BLOCK_STATUS, asked.cookie, &extents)
    });
    let map = Rig::after_questions(&server.path, Timeouts::default()).1.unwrap();
    assert_eq!((map.next_data(512), map.next_hole(1024)), (Some(1024), 1536));
    // The server would have said that it is data, too; then all would be known.
    assert_eq!(map.data_bytes(), None);
    assert_eq!((map.next_data(told), map.next_hole(told)), (Some(told), 3 * GIB));
}

#[test]
fn f12_extents_that_make_no_sense_end_the_questions() {
    let says = |words: Vec<u8>| {
        move |conn: &mut Conn, asked: &Asked| {
            conn.chunk(true, chunk::BLOCK_STATUS, asked.cookie, &words)
        }
    };
    type Crime = Box<dyn Fn(&mut Conn, &Asked) -> io::Result<()> + Send + Sync>;
    let crimes: [(&str, Crime); 15] = [
        ("without length", Box::new(says(words(&[CONTEXT, 0, 0])))),
        ("without length", Box::new(says(words(&[CONTEXT, 512, 0, 0, 0])))),
        ("beyond the end", Box::new(says(words(&[CONTEXT, (1 << 20) + 512, 0])))),
        ("beyond the end", Box::new(says(words(&[CONTEXT, 512, 0, u32::MAX, 0])))),
        ("behind what was asked", Box::new(says(words(&[CONTEXT, 1 << 20, 0, 512, 0])))),
        ("another metadata context", Box::new(says(words(&[CONTEXT + 1, 512, 0])))),
        ("another metadata context", Box::new(says(Vec::new()))),
        ("or none", Box::new(says(words(&[CONTEXT])))),
        ("half an extent", Box::new(says(words(&[CONTEXT, 512])))),
        ("half an extent", Box::new(says([words(&[CONTEXT, 512, 0]), vec![0]].concat()))),
        (
            "too many extents",
            Box::new(|conn, asked| {
                let mut head = crate::server::chunk_bytes(true, 5, asked.cookie, &[]);
                head[16..20].fill(0xff);
                conn.send(&head)
            }),
        ),
        (
            "extents twice",
            Box::new(|conn, asked| {
                conn.chunk(false, 5, asked.cookie, &words(&[CONTEXT, 512, 0]))?;
                conn.chunk(true, 5, asked.cookie, &words(&[CONTEXT, 512, 0]))
            }),
        ),
        ("not asked", Box::new(|conn, asked| conn.simple(asked.cookie + 1, 22))),
        ("success without extents", Box::new(|conn, asked| conn.simple(asked.cookie, 0))),
        (
            "has no end",
            Box::new(|conn, asked| {
                (0..32).try_for_each(|_| conn.chunk(false, chunk::NONE, asked.cookie, &[]))
            }),
        ),
    ];
    for (wanted, crime) in crimes {
        let dir = tempfile::tempdir().unwrap();
        let server = server(&dir, 1 << 20, crime);
        let connected = connect(&target(&server.path).with_block_status()).unwrap();
        let message = Remote::new("test", &connected).allocation().unwrap_err().to_string();
        assert!(message.contains(wanted), "'{message}' has no '{wanted}'");
    }
}
