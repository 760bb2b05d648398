//! What a hostile client may do (docs/hazards.md, group D). Each case ends by asking a neighbour on the
//! same worker whether it still lives.
#![allow(missing_docs)]

use ringway_disk::{EngineKind, Source};
use ringway_export::PoolOptions;
use ringway_nbd::{Export, Pool};
use ringway_testkit::nbd::{
    CLOSED, Client, EXTENDED, NbdRig, SIMPLE, STRUCTURED, command as c, flag, request,
};
use ringway_testkit::rig::RigOptions;
use std::net::Shutdown;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(20);

fn rig_of(connections: u16, handshake_max: Duration) -> NbdRig {
    let source = Source::Null { bytes: GIB, latency_us: 0 };
    NbdRig::start(&RigOptions::new(source, EngineKind::Null).queues(connections, 1), handshake_max)
}

fn rig() -> NbdRig {
    rig_of(4, PATIENCE)
}

fn lives(client: &mut Client) {
    assert_eq!(client.call(c::READ, 0, (0, 4096), &[]).error, 0);
    assert_eq!(client.call(c::WRITE, flag::FUA, (0, 4096), &[0; 4096]).error, 0);
}

/// Connections that say what no handshake needs, or nothing at all.
#[test]
fn d01_handshakes_that_lead_nowhere_end() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    let long_option = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 7], &[0xff; 4]].concat();
    for said in [
        &b"\xff\xff\xff\xff"[..],
        b"\0\0\0\x03GET / HTTP/1.1\r\n\r\n",
        &long_option,
        b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04nine",
    ] {
        let mut client = rig.connect();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        std::io::Write::write_all(&mut client, said).unwrap();
        let mut received = Vec::new();
        // A reset is an end as well.
        let _ = std::io::Read::read_to_end(&mut client, &mut received);
        assert_eq!(received.len(), 18, "the greeting and nothing else");
    }
    lives(&mut neighbour);
}

/// Clients that never finish their handshakes neither keep others out nor stay.
#[test]
fn d03_idle_handshakes_end_and_keep_nobody_out() {
    // Long enough for those who do finish theirs, on a busy machine too.
    let rig = rig_of(2, Duration::from_secs(3));
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    let idle: Vec<_> = (0..12).map(|_| rig.connect()).collect();
    // They hold no queue: there is one left, for who asks.
    let mut second = Client::new(rig.connect(), STRUCTURED);
    lives(&mut second);
    for mut client in idle {
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut received = Vec::new();
        std::io::Read::read_to_end(&mut client, &mut received).expect("an end");
        assert_eq!(received.len(), 18);
    }
    lives(&mut neighbour);
}

/// Clients that say nothing, more than may be in their handshakes at a time, keep nobody out who comes
/// when they have had their time: the oldest makes room.
#[test]
fn d12_silent_clients_make_room() {
    let limit = Duration::from_secs(5);
    let rig = rig_of(2, limit);
    let mut silent: Vec<_> = (0..40).map(|_| rig.connect()).collect();
    // A handshake's time begins when the server accepts it, which is before it greets.
    silent[31].set_read_timeout(Some(PATIENCE)).unwrap();
    std::io::Read::read_exact(&mut silent[31], &mut [0; 18]).expect("a greeting");
    std::thread::sleep(limit / 10);
    for _ in 0..3 {
        lives(&mut Client::new(rig.connect(), STRUCTURED));
    }
    let mut received = Vec::new();
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    std::io::Read::read_to_end(&mut silent[0], &mut received).expect("an end");
    assert_eq!(received.len(), 18, "it was greeted, and left");
}

/// More connections than there are queues: those that are there stay, and a place that is free again is
/// given to the next.
#[test]
fn d04_connections_are_limited() {
    let rig = rig_of(2, PATIENCE);
    let mut first = Client::new(rig.connect(), SIMPLE);
    let second = Client::new(rig.connect(), SIMPLE);
    // It is told so before it believes that it is connected, and may go on.
    let full = "all connections that this export may have are taken";
    for mode in [SIMPLE, STRUCTURED, EXTENDED] {
        assert_eq!(Client::begin(rig.connect(), mode).unwrap_err(), full);
    }
    lives(&mut first);
    drop(second);
    rig.wait_for_queues(1);
    // Its thread may need a moment more to give its place back.
    let begun = Instant::now();
    loop {
        if let Ok(mut next) = Client::begin(rig.connect(), SIMPLE) {
            break lives(&mut next);
        }
        assert!(begun.elapsed() < PATIENCE, "no place is free");
    }
}

/// What cannot be read past ends its connection, whatever was in flight.
#[test]
fn d02_streams_that_make_no_sense_end() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    for mode in [SIMPLE, STRUCTURED, EXTENDED] {
        let too_long = request(mode, c::WRITE, 0, 9, (0, 33 << 20));
        let endless = request(mode, c::WRITE, 0, 9, (0, u64::from(u32::MAX)));
        for garbage in [&[0xa5; 64][..], &too_long, &endless] {
            let mut client = Client::new(rig.connect(), mode);
            for cookie in 0..8 {
                client.ask(c::READ, 0, cookie, (0, 65536), &[]);
            }
            client.send(garbage);
            // What was asked before is answered before the end.
            for _ in 0..8 {
                assert_eq!(client.reply().expect("an answer").error, 0);
            }
            assert_eq!(client.reply(), CLOSED);
        }
    }
    lives(&mut neighbour);
    drop(neighbour);
    rig.wait_for_queues(0);
}

/// Requests that are refused cost their sender a reply; the stream goes on, behind their data.
#[test]
fn d05_requests_that_make_no_sense_are_refused_one_by_one() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    for mode in [SIMPLE, STRUCTURED, EXTENDED] {
        let mut client = Client::new(rig.connect(), mode);
        for round in 0..200 {
            for (kind, flags, range, data, error) in [
                (c::READ, 0, (GIB, 512), 0, 22),
                (c::READ, 0, (1, 512), 0, 22),
                (c::WRITE, 0, (GIB, 4096), 4096, 28),
                (c::WRITE, flag::NO_HOLE, (0, 70_000), 70_000, 22),
                (c::WRITE, 0, (3, 512), 512, 22),
                (c::TRIM, 0, (u64::MAX - 511, 512), 0, 28),
                (99, 0, (0, 0), 0, 22),
                (c::FLUSH, flag::FAST_ZERO, (0, 0), 0, 22),
            ] {
                let reply = client.call(kind, flags, range, &vec![0xee; data]);
                assert_eq!(reply.error, error, "{round}: {kind} {flags} {range:?}");
            }
        }
        lives(&mut client);
    }
    lives(&mut neighbour);
}

/// A client that asks for much and reads nothing: its memory is bounded, its requests stay where they
/// are, and when it reads after all everything is there.
#[test]
fn d06_who_does_not_read_answers_costs_itself_only() {
    const READS: usize = 256;
    const LEN: u32 = 1 << 20;
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    let mut slow = Client::new(rig.connect(), STRUCTURED);
    for cookie in 0..READS as u64 {
        slow.ask(c::READ, 0, cookie, (0, LEN), &[]);
    }
    for _ in 0..100 {
        lives(&mut neighbour);
    }
    let read: u64 = rig.stats().iter().map(|worker| worker.disk.read_bytes).sum();
    // Its own memory, what its socket took, and what the neighbour has read.
    assert!(read < (32 << 20) + (8 << 20), "{read} bytes were read for nobody");
    let mut seen = [false; READS];
    for _ in 0..READS {
        let reply = slow.reply().expect("the connection goes on");
        assert!(reply.error == 0 && reply.data.len() == LEN as usize);
        assert!(!std::mem::replace(&mut seen[usize::try_from(reply.cookie).unwrap()], true));
    }
    lives(&mut slow);
}

/// The same without ever reading, and gone: what it had is free again.
#[test]
fn d07_who_goes_in_the_middle_leaves_nothing_behind() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    for mode in [SIMPLE, STRUCTURED, EXTENDED] {
        for case in 0..6 {
            let mut client = Client::new(rig.connect(), mode);
            for cookie in 0..40 {
                client.ask(c::READ, 0, cookie, (0, 1 << 20), &[]);
            }
            match case {
                0 => {}
                1 => client.ask(c::WRITE, 0, 1, (0, 4096), &[0; 1000]),
                2 => client.ask(c::WRITE, 0, 1, (0, 32 << 20), &[0; 50_000]),
                3 => client.send(&[0x25, 0x60]),
                4 => client.ask(c::DISC, 0, 1, (0, 0), &[]),
                _ => client.stream.shutdown(Shutdown::Write).unwrap(),
            }
            drop(client);
            rig.wait_for_queues(1);
        }
    }
    lives(&mut neighbour);
}

/// A client that sends byte by byte is served, and holds up nobody.
#[test]
fn d08_a_byte_at_a_time_is_understood() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    for mode in [SIMPLE, EXTENDED] {
        let mut slow = Client::new(rig.connect(), mode);
        let paid = if mode == EXTENDED { flag::PAYLOAD_LEN } else { 0 };
        let mut said = request(mode, c::WRITE, paid, 5, (4096, 512));
        said.extend([7; 512]);
        said.extend(request(mode, c::FLUSH, 0, 6, (0, 0)));
        for byte in said {
            slow.send(&[byte]);
        }
        lives(&mut neighbour);
        let replies = [slow.reply().unwrap(), slow.reply().unwrap()];
        assert_eq!(replies.map(|reply| (reply.cookie, reply.error)), [(5, 0), (6, 0)]);
    }
}

/// A client that keeps its socket full has its share of the worker and no more: between two answers of
/// a neighbour it gets on by a bounded number of requests.
#[test]
fn d09_a_flood_leaves_a_neighbour_its_share() {
    let rig = rig();
    let mut neighbour = Client::new(rig.connect(), SIMPLE);
    let flood = Client::new(rig.connect(), SIMPLE);
    let mut stream = flood.stream.try_clone().unwrap();
    let mut answers = flood.stream.try_clone().unwrap();
    let part: Vec<u8> =
        (0..1024).flat_map(|cookie| request(SIMPLE, c::CACHE, 0, cookie, (0, 512))).collect();
    std::thread::scope(|scope| {
        scope.spawn(move || while std::io::Write::write_all(&mut stream, &part).is_ok() {});
        scope.spawn(move || {
            let mut received = vec![0; 1 << 16];
            while std::io::Read::read(&mut answers, &mut received).is_ok_and(|got| got > 0) {}
        });
        for _ in 0..200 {
            lives(&mut neighbour);
        }
        flood.stream.shutdown(Shutdown::Both).unwrap();
    });
    flood.stream.shutdown(Shutdown::Both).ok();
    rig.wait_for_queues(1);
}

/// A disk that does not answer holds up its own connections only, and these end within the time that a
/// disk has.
#[test]
fn d10_a_stuck_disk_does_not_keep_the_server_from_stopping() {
    let source = Source::Null { bytes: GIB, latency_us: 3_000_000 };
    let mut options = RigOptions::new(source, EngineKind::NullAfter(3_000_000));
    options.drain_max = Duration::from_millis(100);
    let mut rig = NbdRig::start(&options, PATIENCE);
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::READ, 0, 1, (0, 512), &[]);
    let begun = Instant::now();
    while rig.stats().iter().flat_map(|w| &w.queues).map(|q| q.in_flight).sum::<usize>() == 0 {
        assert!(begun.elapsed() < PATIENCE, "it is not taken");
    }
    rig.stop().unwrap();
    assert!(!rig.export().is_clear(), "it counts until it is over");
    // It is answered when the disk is through with it.
    assert_eq!(client.reply().unwrap().cookie, 1);
}

/// Queues of one type in a pool and an export: what others of this workspace have as well.
#[test]
fn an_export_of_connections_is_an_export() {
    let pool: Pool = Pool::start(PoolOptions::new(EngineKind::Null, 1)).unwrap();
    let options = RigOptions::new(Source::Null { bytes: GIB, latency_us: 0 }, EngineKind::Null);
    let disk = std::sync::Arc::new(ringway_disk::open(&options.disk).unwrap());
    let shape = ringway_export::ExportOptions { queues: 1, queue_size: 8 };
    let export = Export::new(disk, shape, pool.handles().to_vec(), 0);
    assert!(ringway_export::Offered::is_clear(&export) && !export.is_connected());
}
