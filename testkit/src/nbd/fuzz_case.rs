//! One case of the fuzzer: whatever a client sends, from its first byte to its end.

use crate::nbd::{EXTENDED, NbdRig, SIMPLE, command, request};
use crate::rig::RigOptions;
use ringway_disk::{EngineKind, Source};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::AddAssign;
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The size of the disk in bytes.
const BYTES: u64 = 1 << 20;

/// How long the server may take to end a connection before its client does.
const PATIENCE: Duration = Duration::from_millis(50);

/// What clients were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaseCounters {
    /// Answers to options.
    pub options: u64,
    /// Replies to requests that were carried out.
    pub done: u64,
    /// Replies to requests that were refused.
    pub refused: u64,
}

impl AddAssign for CaseCounters {
    fn add_assign(&mut self, other: Self) {
        self.options += other.options;
        self.done += other.done;
        self.refused += other.refused;
    }
}

/// One server for all cases of a process: it has to outlive them all.
fn rig() -> &'static Mutex<NbdRig> {
    static RIG: OnceLock<Mutex<NbdRig>> = OnceLock::new();
    RIG.get_or_init(|| {
        let source = Source::Null { bytes: BYTES, latency_us: 0 };
        let options = RigOptions::new(source, EngineKind::Null).queues(2, 1);
        Mutex::new(NbdRig::start(&options, Duration::from_secs(10)))
    })
}

/// Sends `data` and takes all that is answered. The first byte says how the rest begins: bit 0, with a
/// handshake that is done already; bit 1, with structured replies; bit 2, with extended headers.
///
/// # Panics
/// If the server does not end the connection, says what the protocol does not know, or keeps anything
/// of it.
pub fn check(data: &[u8]) -> CaseCounters {
    let rig = rig().lock().unwrap_or_else(PoisonError::into_inner);
    let mut stream = rig.connect();
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
    let reader = stream.try_clone().expect("a socket");
    let sent = std::thread::scope(|scope| {
        let (end, ended) = sync_channel(1);
        let sent = scope.spawn(move || {
            let sent = read_all(reader);
            let _ = end.send(());
            sent
        });
        let (first, rest) = data.split_first().unwrap_or((&0, &[]));
        let _ = stream.write_all(&beginning(*first));
        let _ = stream.write_all(rest);
        let _ = stream.write_all(&farewell(*first));
        // Of a client that has gone nothing is carried out.
        let _ = ended.recv_timeout(PATIENCE);
        let _ = stream.shutdown(Shutdown::Write);
        sent.join().expect("no panic")
    });
    drop(stream);
    // What it had is free again, and the next one is served.
    rig.wait_for_queues(0);
    count(&sent)
}

/// More disconnect requests than the rest of a short write takes: the server ends the connection itself, unless
/// a length has become a large one.
fn farewell(first: u8) -> Vec<u8> {
    let mode = if first & 5 == 5 { EXTENDED } else { SIMPLE };
    request(mode, command::DISC, 0, 0, (0, 0)).repeat(200)
}

fn beginning(first: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    if first & 1 == 0 {
        return bytes;
    }
    let mut option = |option: u32, data: &[u8]| {
        bytes.extend_from_slice(b"IHAVEOPT");
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).expect("short").to_be_bytes());
        bytes.extend_from_slice(data);
    };
    if first & 4 != 0 {
        option(11, &[]);
    } else if first & 2 != 0 {
        option(8, &[]);
    }
    if first & 6 != 0 {
        option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
    }
    option(7, &[0; 6]);
    [&3u32.to_be_bytes()[..], &bytes].concat()
}

fn read_all(mut stream: std::os::unix::net::UnixStream) -> Vec<u8> {
    let (mut sent, mut part) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match stream.read(&mut part) {
            Ok(0) => return sent,
            // A read of 32 MiB is as good as one of 64 KiB, to count.
            Ok(got) if sent.len() < 1 << 20 => sent.extend_from_slice(&part[..got]),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return sent,
            Err(error) => panic!("the server neither answers nor ends: {error}"),
        }
    }
}

/// Answers are sent by how they begin; the data of reads is zeroes on this disk.
fn count(sent: &[u8]) -> CaseCounters {
    let mut counters = CaseCounters::default();
    for at in 0..sent.len().saturating_sub(15) {
        let part = &sent[at..];
        match part[..4] {
            [0, 3, 0xe8, 0x89] if part[4..8] == [0x04, 0x55, 0x65, 0xa9] => counters.options += 1,
            [0x67, 0x44, 0x66, 0x98] if part[4..8] == [0; 4] => counters.done += 1,
            [0x66, 0x8e, 0x33, 0xef] | [0x6e, 0x8a, 0x27, 0x8c] if part[6] & 0x80 == 0 => {
                counters.done += 1;
            }
            [0x67, 0x44, 0x66, 0x98] | [0x66, 0x8e, 0x33, 0xef] | [0x6e, 0x8a, 0x27, 0x8c] => {
                counters.refused += 1;
            }
            _ => {}
        }
    }
    counters
}
