//! Requests that cost much to read leave a neighbour on the same worker its share (hazard A21), in
//! both formats of rings. Counts requests and turns, never time.

use ringway_disk::{EngineKind, Source};
use ringway_export::usable_engines;
use ringway_testkit::raw::{
    DATA, Desc, F_EVENT_IDX, F_INDIRECT, F_PACKED, F_VERSION_1, GUEST_BASE, RawGuest,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Need, skip};
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

/// A guest whose ring is full of ordinary reads of 64 KiB, of which sixteen go in one turn.
fn reader(rig: &mut Rig) -> RawGuest {
    let guest = RawGuest::start(rig.connect(), 1, QUEUE, F_VERSION_1 | F_EVENT_IDX);
    guest.put_header(DATA - 64, IN, 0);
    let chain = [
        Desc { addr: DATA - 64, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 64 << 10, flags: WRITE, next: 0 },
        Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
    ];
    (0..QUEUE / 3).for_each(|number| guest.put_chain(0, 3 * number, &chain));
    guest
}

/// How many requests of queue 0 were ever answered, in 16 bits.
fn answered(guest: &RawGuest) -> u16 {
    let (_, _, used) = guest.rings(0);
    let bytes = guest.peek(used + 2, 2);
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// How often this thread has given its CPU up, by itself or not.
fn switches() -> i64 {
    let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let counts = text.lines().filter(|line| line.contains("ctxt_switches"));
    counts.map(|line| line.split_whitespace().last().unwrap().parse::<i64>().unwrap()).sum()
}

/// Reads of the neighbour that count.
const READS: usize = 200;

/// How many requests of `other`, whose ring is always full, are answered between the kick for a read
/// of the neighbour and its answer: in half of the reads at most, and in 99 of 100. A read counts only
/// if this thread was on its CPU all the time, and so has looked at once.
fn overtaken(neighbour: &mut RawGuest, other: &mut RawGuest, heads: &[u16]) -> (u16, u16) {
    heads.iter().for_each(|&head| other.offer_quietly(0, head));
    other.kick(0);
    let mut counts = Vec::new();
    neighbour.put_header(DATA - 64, IN, 0);
    let chain = [
        Desc { addr: DATA - 64, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 512, flags: WRITE, next: 0 },
        Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
    ];
    neighbour.put_chain(0, 0, &chain);
    for _ in 0..100 * READS {
        while let Some((head, _)) = other.next_used(0, Duration::ZERO) {
            other.offer_quietly(0, u16::try_from(head).unwrap());
        }
        other.kick(0);
        let (begun, switched) = (Instant::now(), switches());
        let (before, mine) = (answered(other), answered(neighbour));
        neighbour.offer(0, 0);
        while answered(neighbour) == mine {
            assert!(begun.elapsed() < SOON, "the neighbour gets no answer");
            std::hint::spin_loop();
        }
        let passed = answered(other).wrapping_sub(before);
        if switches() == switched {
            counts.push(passed);
        }
        assert!(neighbour.next_used(0, SOON).is_some());
        if counts.len() == READS {
            break;
        }
    }
    // Nothing of it is left for the next one.
    let mut left = heads.len();
    while left > 0 {
        assert!(other.next_used(0, SOON).is_some(), "it gets on as well");
        left -= 1;
    }
    assert_eq!(counts.len(), READS, "this machine leaves no thread alone for long enough");
    counts.sort_unstable();
    (counts[READS / 2], counts[READS * 99 / 100])
}

/// So many times the cost is too much. It is up to 4, and 30 and more without the budget of cost.
const TIMES: u64 = 12;

/// An attack costs the neighbour little more than a guest does that reads much and honestly: what is
/// read and moved for others between its kick and its answer, in the units of the budget, in half of
/// its reads and in 99 of 100. Counted and not timed, so what else the machine does is no matter.
#[test]
fn a21_an_attack_costs_the_neighbour_little_more_than_a_fair_guest() {
    // Copies from the page cache take a worker's time within its turn; with `threads` others do it.
    let usable = usable_engines();
    if !usable.iter().any(|(kind, usable)| *kind == EngineKind::IoUring && usable.is_ok()) {
        return skip(Need::IoUring, "io_uring is not usable here");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::IoUring));
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, F_VERSION_1 | F_EVENT_IDX);
    let mut fair = reader(&mut rig);
    let heads: Vec<_> = (0..QUEUE / 3).map(|number| 3 * number).collect();
    let fair = overtaken(&mut neighbour, &mut fair, &heads);
    // Descriptors, and units of 4 KiB.
    let cost = |count: u16, each: u64| u64::from(count) * each;
    let fair = (cost(fair.0, 3 + 16), cost(fair.1, 3 + 16));
    println!("fair: {fair:?}");
    assert!(fair.0 > 0, "nobody else had a turn: this tested nothing");
    let heads: Vec<_> = (0..QUEUE).collect();
    for (dear, each) in [(Dear::Garbage, u64::from(TABLE)), (Dear::Segments, 1002 + 125)] {
        let mut guest = attacker(&mut rig, dear, 0);
        let attack = overtaken(&mut neighbour, &mut guest, &heads);
        let attack = (cost(attack.0, each), cost(attack.1, each));
        println!("{dear:?}: {attack:?}");
        assert!(attack.1 > 0, "{dear:?}: it had no turn");
        assert!(attack.0 <= TIMES * fair.0, "{dear:?}: {} and {} units", attack.0, fair.0);
        assert!(attack.1 <= TIMES * fair.1, "{dear:?}, 99 %: {} and {} units", attack.1, fair.1);
    }
}
