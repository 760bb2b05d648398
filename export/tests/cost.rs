//! Requests that cost much to read leave a neighbour on the same worker its share (hazard A21), in
//! both formats of rings. Counts requests and turns, never time, but for the one that is ignored.
#![allow(missing_docs)]

use ringway_disk::{EngineKind, Source};
use ringway_testkit::raw::{
    DATA, Desc, F_EVENT_IDX, F_INDIRECT, F_PACKED, F_VERSION_1, GUEST_BASE, RawGuest,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const IN: u32 = 0;
/// Entries of the largest indirect table there is.
const TABLE: u16 = 1026;
const QUEUE: u16 = 128;

/// What the attacker's requests are.
#[derive(Clone, Copy, Debug)]
enum Dear {
    /// Tables that are refused for their last entry.
    Garbage,
    /// Reads of a thousand segments of a sector each.
    Segments,
}

/// A guest whose chains all name one table.
fn attacker(rig: &mut Rig, dear: Dear, ring: u64) -> RawGuest {
    let features = F_VERSION_1 | F_INDIRECT | F_EVENT_IDX | ring;
    let guest = RawGuest::start(rig.connect(), 1, QUEUE, features);
    let table = DATA + 0x1_0000;
    let entries = match dear {
        Dear::Garbage => TABLE,
        Dear::Segments => 1002,
    };
    guest.put_header(DATA - 64, IN, 0);
    for at in 0..entries {
        let last = at + 1 == entries;
        let (addr, len, write) = match dear {
            Dear::Garbage => (GUEST_BASE, u32::from(!last), false),
            Dear::Segments if at == 0 => (DATA - 64, 16, false),
            Dear::Segments if last => (DATA - 32, 1, true),
            Dear::Segments => (DATA + 0x2_0000 + 1024 * u64::from(at), 512, true),
        };
        let flags = if write { WRITE } else { 0 };
        // Tables of packed rings have neither: they are read in order.
        let (flags, next) = if last { (flags, 0) } else { (flags | NEXT, at + 1) };
        guest.put_desc(table, at, Desc { addr, len, flags, next });
    }
    let head = Desc { addr: table, len: 16 * u32::from(entries), flags: INDIRECT, next: 0 };
    for chain in 0..QUEUE {
        guest.put_chain(0, chain, &[head]);
    }
    guest
}

fn rig() -> Rig {
    let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
    Rig::start(&RigOptions::new(source, EngineKind::Null))
}

#[test]
fn a21_dear_chains_are_taken_one_at_a_time() {
    for ring in [0, F_PACKED] {
        for dear in [Dear::Garbage, Dear::Segments] {
            let mut rig = rig();
            let mut neighbour = RawGuest::start(rig.connect(), 1, 16, F_VERSION_1 | ring);
            let mut guest = attacker(&mut rig, dear, ring);
            let before = rig.stats()[0].clone();
            (0..QUEUE).for_each(|chain| guest.offer_quietly(0, chain));
            guest.kick(0);
            for sector in 0..20 {
                assert_eq!(neighbour.simple(0, IN, sector, DATA, 512).0, 0);
            }
            for _ in 0..QUEUE {
                assert!(guest.next_used(0, SOON).is_some(), "{dear:?}: not answered");
            }
            let after = rig.stats()[0].clone();
            let (requests, turns) = (after.requests - before.requests, after.turns - before.turns);
            assert_eq!(requests, u64::from(QUEUE) + 20, "{dear:?}");
            let most = after.batches.max();
            assert!(most <= 2, "{dear:?}: {most} in one turn: one of each at most");
            assert!(turns >= u64::from(QUEUE), "{dear:?}: {turns} turns");
            let refused = if let Dear::Garbage = dear { u64::from(QUEUE) } else { 0 };
            assert_eq!(after.disk.errors - before.disk.errors, refused, "{dear:?}");
        }
    }
}

/// The control: sixteen ordinary requests still go in one turn.
#[test]
fn ordinary_requests_are_taken_sixteen_at_a_time() {
    for ring in [0, F_PACKED] {
        let mut rig = rig();
        let mut guest = RawGuest::start(rig.connect(), 1, QUEUE, F_VERSION_1 | F_EVENT_IDX | ring);
        // In packed rings a chain is named by its number, and takes the next places.
        guest.put_header(DATA - 64, IN, 0);
        let chain = [
            Desc { addr: DATA - 64, len: 16, ..Desc::default() },
            Desc { addr: DATA, len: 4096, flags: WRITE, next: 0 },
            Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
        ];
        for number in 0..32 {
            let head = if ring == F_PACKED { number } else { 3 * number };
            guest.put_chain(0, head, &chain);
            guest.offer_quietly(0, head);
        }
        guest.kick(0);
        for _ in 0..32 {
            assert!(guest.next_used(0, SOON).is_some(), "not answered");
        }
        assert_eq!(rig.stats()[0].batches.max(), 16);
    }
}

/// Microseconds that half, and 99 in 100, of the neighbour's reads take at most.
fn percentiles(neighbour: &mut RawGuest) -> (u128, u128) {
    let mut times: Vec<_> = (0..5000)
        .map(|at| {
            let begun = Instant::now();
            assert_eq!(neighbour.simple(0, IN, at % 1000, DATA, 512).0, 0);
            begun.elapsed().as_micros()
        })
        .collect();
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// `cargo test --release -p ringway-export --test cost -- --ignored --nocapture`
#[test]
#[ignore = "measures time, for the documentation"]
fn what_a_neighbour_waits_under_attack() {
    for dear in [Dear::Garbage, Dear::Segments] {
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path(), 1 << 20);
        let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::IoUring));
        let mut neighbour = RawGuest::start(rig.connect(), 1, 16, F_VERSION_1 | F_EVENT_IDX);
        let alone = percentiles(&mut neighbour);
        let mut guest = attacker(&mut rig, dear, 0);
        let over = AtomicBool::new(false);
        let attacked = std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..QUEUE).for_each(|chain| guest.offer(0, chain));
                while !over.load(Relaxed) {
                    if let Some((head, _)) = guest.next_used(0, SOON) {
                        guest.offer(0, u16::try_from(head).unwrap());
                    }
                }
            });
            let attacked = percentiles(&mut neighbour);
            over.store(true, Relaxed);
            attacked
        });
        println!(
            "{dear:?}: p50 {} us alone, {} us under attack; p99 {} us and {} us",
            alone.0, attacked.0, alone.1, attacked.1
        );
    }
}
