//! Requests over a socket to a real worker and a real file: what each does, to the byte.

use ringway_disk::EngineKind;
use ringway_testkit::nbd::{
    Client, EXTENDED, Mode, NbdRig, QEMU, SIMPLE, STRUCTURED, command as c, extents_of, flag,
};
use ringway_testkit::rig::{RigOptions, image};
use ringway_testkit::{Need, Rng, skip};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const MODES: [Mode; 3] = [SIMPLE, STRUCTURED, EXTENDED];

fn rig(path: &Path, connections: u16) -> NbdRig {
    let options = RigOptions::buffered(path, EngineKind::Threads).queues(connections, 1);
    NbdRig::start(&options, PATIENCE)
}

fn syncs(rig: &NbdRig) -> u64 {
    rig.stats().iter().map(|worker| worker.disk.syncs).sum()
}

#[test]
fn every_command_does_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 4 * MIB);
    let file = std::fs::File::open(&path).unwrap();
    let rig = rig(&path, 4);
    // Row D17: as QEMU does it, too.
    for mode in MODES.into_iter().chain([QEMU]) {
        let mut client = Client::new(rig.connect(), mode);
        assert_eq!((client.bytes, client.flags & 1), (4 * MIB, 1));
        let there = |at: u64| {
            let mut bytes = vec![0; 4096];
            file.read_exact_at(&mut bytes, at).unwrap();
            bytes
        };
        let mut ok = |kind, flags, range, data: &[u8]| {
            let reply = client.call(kind, flags, range, data);
            assert_eq!(reply.error, 0, "{kind} {flags} {range:?}");
            reply.data
        };
        let page = (8192, 4096);
        ok(c::WRITE, 0, page, &[0x5a; 4096]);
        assert_eq!(there(8192), [0x5a; 4096]);
        assert_eq!(ok(c::READ, flag::DF, page, &[]), [0x5a; 4096]);
        ok(c::WRITE, flag::FUA, (12288, 512), &[1; 512]);
        assert_eq!(ok(c::READ, 0, (12288, 1024), &[])[..513], [&[1; 512][..], &[0]].concat());
        ok(c::FLUSH, 0, (0, 0), &[]);
        ok(c::CACHE, 0, page, &[]);
        ok(c::WRITE_ZEROES, flag::NO_HOLE, (8192, 512), &[]);
        assert_eq!(there(8192), [vec![0; 512], vec![0x5a; 3584]].concat());
        ok(c::TRIM, flag::FUA, page, &[]);
        ok(c::WRITE, 0, page, &[2; 4096]);
        ok(c::WRITE_ZEROES, flag::FAST_ZERO | flag::FUA, page, &[]);
        assert_eq!(there(8192), [0; 4096]);
        ok(c::WRITE_ZEROES, 0, (12288, 512), &[]);
        assert!(ok(c::READ, 0, (0, 0), &[]).is_empty());
        client.ask(c::DISC, 0, 1, (0, 0), &[]);
        assert_eq!(client.reply(), None);
    }
    rig.wait_for_queues(0);
}

/// Random requests, many at a time, on three connections: each answer is its own, and the file holds
/// what was written last.
#[test]
fn many_at_a_time_are_answered_once_with_their_own_data() {
    const BLOCK: u32 = 8192;
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 64 * MIB);
    let rig = rig(&path, 3);
    let mut rng = Rng::for_test("many_at_a_time_are_answered_once_with_their_own_data");
    let mut clients = MODES.map(|mode| Client::new(rig.connect(), mode));
    let mut content = vec![0u8; 3 * 256];
    for round in 0..40u8 {
        for (at, client) in clients.iter_mut().enumerate() {
            let mut wanted = std::collections::HashMap::new();
            let mut touched = [false; 256];
            for cookie in 0..64u64 {
                let mine = rng.below(256);
                if std::mem::replace(&mut touched[usize::try_from(mine).unwrap()], true) {
                    continue;
                }
                let block = at * 256 + usize::try_from(mine).unwrap();
                let range = (u64::from(BLOCK) * block as u64, BLOCK);
                if rng.below(2) == 0 {
                    content[block] = round.wrapping_mul(7).wrapping_add(mine.to_le_bytes()[0]);
                    let fua = if rng.below(4) == 0 { flag::FUA } else { 0 };
                    client.ask(c::WRITE, fua, cookie, range, &[content[block]; BLOCK as usize]);
                    wanted.insert(cookie, Vec::new());
                } else {
                    client.ask(c::READ, 0, cookie, range, &[]);
                    wanted.insert(cookie, vec![content[block]; BLOCK as usize]);
                }
            }
            while !wanted.is_empty() {
                let reply = client.reply().expect("the connection goes on");
                let expected = wanted.remove(&reply.cookie).expect("answered once");
                assert!(reply.error == 0 && reply.data == expected, "{}", reply.cookie);
            }
        }
    }
    let mut there = vec![0; 3 * 256 * BLOCK as usize];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut there, 0).unwrap();
    for (block, bytes) in there.chunks(BLOCK as usize).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == content[block]), "block {block}");
    }
}

/// The longest there are, also several at once, which wait for memory in turn.
#[test]
fn requests_of_32_mib_are_carried_out() {
    const LEN: u32 = 32 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 64 * MIB);
    let rig = rig(&path, 1);
    let mut client = Client::new(rig.connect(), STRUCTURED);
    let pattern: Vec<u8> = (0..LEN).map(|at| (at / 512 * 31).to_le_bytes()[1]).collect();
    assert_eq!(client.call(c::WRITE, 0, (4096, LEN), &pattern).error, 0);
    for cookie in 0..3 {
        client.ask(c::READ, 0, cookie, (4096, LEN), &[]);
    }
    for cookie in 0..3 {
        let reply = client.reply().unwrap();
        assert!(reply.cookie == cookie && reply.error == 0 && reply.data == pattern);
    }
    assert_eq!(client.call(c::READ, 0, (0, LEN + 512), &[]).error, 75);
    assert_eq!(client.call(c::READ, 0, (0, 512), &[]).error, 0);
}

/// A durable write is followed by a sync, and those that wait for one share the next.
#[test]
fn durable_writes_are_synced_before_they_are_answered_and_share_syncs() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 4 * MIB);
    let rig = rig(&path, 2);
    let mut client = Client::new(rig.connect(), SIMPLE);
    for (number, kind) in [(1, c::WRITE), (2, c::WRITE_ZEROES), (3, c::TRIM)] {
        let data: &[u8] = if kind == c::WRITE { &[1; 4096] } else { &[] };
        assert_eq!(client.call(kind, flag::FUA, (0, 4096), data).error, 0);
        assert_eq!(syncs(&rig), number);
        assert_eq!(client.call(kind, 0, (0, 4096), data).error, 0);
        assert_eq!(syncs(&rig), number);
    }
    // A flush on one connection is one of the disk, for whatever was written on the others.
    let mut other = Client::new(rig.connect(), SIMPLE);
    assert_eq!(other.call(c::FLUSH, 0, (0, 0), &[]).error, 0);
    assert_eq!(syncs(&rig), 4);
    for cookie in 0..64 {
        client.ask(c::WRITE, flag::FUA, cookie, (4096 * cookie, 4096), &[2; 4096]);
    }
    for _ in 0..64 {
        assert_eq!(client.reply().unwrap().error, 0);
    }
    assert!((5..=68).contains(&syncs(&rig)), "{}", syncs(&rig));
}

#[test]
fn block_status_tells_holes_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 8 * MIB);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[1; 65536], MIB).unwrap();
    file.write_all_at(&[1; 65536], 3 * MIB).unwrap();
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
    if hole != 0 {
        return skip(Need::Holes, "a file system that tells holes");
    }
    let rig = rig(&path, 2);
    for mode in [STRUCTURED, EXTENDED] {
        let mut client = Client::new(rig.connect(), mode);
        let mut status = |flags, offset: u64, len: u32| {
            let reply = client.call(c::BLOCK_STATUS, flags, (offset, len), &[]);
            assert_eq!(reply.error, 0);
            extents_of(mode, &reply.data)
        };
        let all =
            vec![(MIB, 3), (65536, 0), (2 * MIB - 65536, 3), (65536, 0), (5 * MIB - 65536, 3)];
        assert_eq!(status(0, 0, 8 << 20), all);
        assert_eq!(status(flag::REQ_ONE, 512, 8 << 19), [(MIB - 512, 3)]);
        assert_eq!(status(0, MIB + 4096, 4096), [(4096, 0)]);
        // Many at a time, more than there is memory for.
        for cookie in 0..32 {
            client.ask(c::BLOCK_STATUS, 0, cookie, (0, 8 << 20), &[]);
        }
        for _ in 0..32 {
            assert_eq!(extents_of(mode, &client.reply().unwrap().data), all);
        }
    }
    // Without structured replies there is no such command.
    let mut client = Client::new(rig.connect(), SIMPLE);
    assert_eq!(client.call(c::BLOCK_STATUS, 0, (0, 4096), &[]).error, 22);
}

#[test]
fn a_disk_that_is_only_read_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), MIB);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.disk.read_only = true;
    let rig = NbdRig::start(&options, PATIENCE);
    let mut client = Client::new(rig.connect(), STRUCTURED);
    assert_eq!(client.flags & 2, 2);
    assert_eq!(client.call(c::WRITE, 0, (0, 512), &[1; 512]).error, 1);
    assert_eq!(client.call(c::TRIM, 0, (0, 512), &[]).error, 1);
    assert_eq!(client.call(c::WRITE_ZEROES, 0, (0, 512), &[]).error, 1);
    assert_eq!(client.call(c::FLUSH, 0, (0, 0), &[]).error, 0);
    assert_eq!(client.call(c::READ, 0, (0, 512), &[]).data, [0; 512]);
}

/// Pauses stop queues in the middle of a stream; what was sent meanwhile is done when they go on.
#[test]
fn a_pause_keeps_requests_until_it_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), MIB);
    let rig = rig(&path, 1);
    let mut client = Client::new(rig.connect(), SIMPLE);
    assert_eq!(client.call(c::WRITE, 0, (0, 512), &[1; 512]).error, 0);
    rig.export().pause().unwrap();
    rig.wait_for_queues(0);
    client.ask(c::WRITE, 0, 1, (512, 512), &[2; 512]);
    rig.export().resume().unwrap();
    assert_eq!(client.reply().unwrap().cookie, 1);
    assert_eq!(client.call(c::READ, 0, (512, 512), &[]).data, [2; 512]);
}

/// What is in flight when the server is told to stop is answered before the connection ends.
#[test]
fn a_stop_answers_what_was_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 4 * MIB);
    let mut rig = rig(&path, 1);
    let mut client = Client::new(rig.connect(), SIMPLE);
    for cookie in 0..32u64 {
        let fua = if cookie % 2 == 0 { flag::FUA } else { 0 };
        client.ask(c::WRITE, fua, cookie, (4096 * cookie, 4096), &[7; 4096]);
    }
    let first = client.reply().unwrap();
    rig.stop().unwrap();
    let mut done = vec![first.cookie];
    while let Some(reply) = client.reply() {
        assert_eq!(reply.error, 0);
        done.push(reply.cookie);
    }
    let file = std::fs::read(&path).unwrap();
    for cookie in done {
        let at = usize::try_from(4096 * cookie).unwrap();
        assert!(file[at..at + 4096].iter().all(|&byte| byte == 7), "{cookie} was acknowledged");
    }
}
