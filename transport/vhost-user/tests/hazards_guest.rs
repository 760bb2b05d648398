//! A hostile guest costs itself a chain or its queue, and nothing else. Rows A1–A20 of the table in
//! docs/hazards.md, each a test of its name.

use ringway_disk::EngineKind;
use ringway_testkit::raw::{
    DATA, Desc, F_EVENT_IDX, F_FLUSH, F_INDIRECT, F_PACKED, F_VERSION_1, GUEST_BASE, MEMORY,
    RawGuest, USER_DELTA, halves, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Rng, pattern};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const IN: u32 = 0;
const OUT: u32 = 1;
const SCSI: u32 = 2;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const SOON: Duration = Duration::from_secs(20);
const CAPACITY: u64 = 16 << 20;

/// The format of the guest's rings, as feature bits.
const SPLIT: u64 = 0;
const PACKED: u64 = F_PACKED;

/// Each test runs on both formats.
macro_rules! on_both_formats {
    ($($test:ident)*) => {
        mod split {
            $(#[test] fn $test() { super::$test(super::SPLIT) })*
        }
        mod packed {
            $(#[test] fn $test() { super::$test(super::PACKED) })*
        }
    };
}

on_both_formats! {
    a02_zero_length_descriptor
    a03_huge_lengths_sums_and_sectors
    a04_indirect_abuse
    a04_indirect_without_the_feature
    a05_a_failed_fetch_fails_the_whole_request
    a06_the_same_head_twice_in_flight
    a07_a_running_queue_is_not_reconfigured
    a08_queue_sizes
    a09_available_ring_names_no_descriptor
    a11_no_more_is_reported_than_was_written
    a12_wrong_directions
    a13_beyond_the_end
    a13_a_read_only_disk_refuses_every_change
    a14_scsi_passthrough_does_not_exist
    a15_more_than_fits_is_answered_once_each
    a16_error_paths_leak_nothing
    a17_nothing_is_written_after_a_stop
    a17_reset_during_io
    a18_any_legal_layout
    a19_a_kick_storm_leaves_the_neighbour_its_share
    a20_neighbouring_sectors_from_scattered_memory
}

struct Scene {
    ring: u64,
    guest: RawGuest,
    rig: Rig,
    _folder: TempDir,
}

fn scene_with(ring: u64, change: impl FnOnce(&mut RigOptions)) -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), CAPACITY);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1);
    change(&mut options);
    let mut rig = Rig::start(&options);
    let guest = RawGuest::start(rig.connect(), 2, 128, BASIC | ring);
    Scene { ring, guest, rig, _folder: folder }
}

fn scene(ring: u64) -> Scene {
    scene_with(ring, |_| {})
}

impl Scene {
    /// Queue 1 still serves, and so does a new connection.
    fn neighbours_live(&mut self) {
        assert_eq!(self.guest.simple(1, IN, 0, DATA, 4096).0, OK, "the guest's other queue lives");
        let mut other = RawGuest::start(self.rig.connect(), 1, 16, BASIC | self.ring);
        assert_eq!(other.simple(0, IN, 8, DATA, 512).0, OK, "a neighbour lives");
    }

    /// The malformed chain at `head` of queue 0 comes back with nothing written, and the queue goes
    /// on serving.
    fn chain_fails(&mut self, head: u16) {
        let begun = Instant::now();
        self.guest.offer(0, head);
        let used = self.guest.next_used(0, SOON);
        assert_eq!(used, Some((u32::from(head), 0)), "the chain fails alone");
        // Within a second, and as long as a busy machine may keep us from looking.
        assert!(begun.elapsed() < SOON / 2);
        assert_eq!(self.guest.simple(0, IN, 0, DATA, 512).0, OK, "the queue goes on");
    }

    /// Queue 0 answers nothing any more; the rest does.
    fn queue_is_broken(&mut self) {
        assert_eq!(self.guest.next_used(0, Duration::from_millis(300)), None);
        self.neighbours_live();
    }
}

#[test]
fn a01_descriptor_loop() {
    let mut s = scene(SPLIT);
    let (table, _, _) = s.guest.rings(0);
    let link = |next| Desc { addr: DATA, len: 16, flags: 1, next };
    s.guest.put_desc(table, 3, link(4));
    s.guest.put_desc(table, 4, link(3));
    s.chain_fails(3);
    s.guest.put_desc(table, 5, link(5));
    s.chain_fails(5);
    s.neighbours_live();
}

fn a02_zero_length_descriptor(ring: u64) {
    let mut s = scene(ring);
    let header = DATA - 64;
    s.guest.put_header(header, IN, 0);
    let status = Desc { addr: DATA + 512, len: 1, flags: WRITE, next: 0 };
    let empty = Desc { addr: DATA, len: 0, flags: WRITE, next: 0 };
    let head = Desc { addr: header, len: 16, ..Desc::default() };
    s.guest.put_chain(0, 10, &[head, empty, status]);
    s.chain_fails(10);
    s.guest.put_chain(0, 20, &[Desc { len: 0, ..head }, status]);
    s.chain_fails(20);
    s.neighbours_live();
}

fn a03_huge_lengths_sums_and_sectors(ring: u64) {
    let mut s = scene(ring);
    for sector in [u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, CAPACITY / 512, 1 << 55] {
        for kind in [IN, OUT] {
            assert_eq!(s.guest.simple(0, kind, sector, DATA, 512).0, IOERR, "sector {sector:#x}");
        }
    }
    for len in [1, 511, 513, 4095] {
        assert_eq!(s.guest.simple(0, IN, 0, DATA, len), (IOERR, 1), "{len} bytes are no sectors");
        assert_eq!(s.guest.simple(0, OUT, 0, DATA, len), (IOERR, 1));
    }
    // The sum of the lengths leaves 32 bits.
    let long = Desc { addr: DATA, len: u32::MAX, flags: WRITE, next: 0 };
    let header = Desc { addr: DATA - 64, len: 16, ..Desc::default() };
    s.guest.put_header(DATA - 64, IN, 0);
    s.guest.put_chain(0, 30, &[header, long, long]);
    s.chain_fails(30);
    // A length beyond the end of memory, and one that wraps around.
    assert_eq!(s.guest.simple(0, IN, 0, GUEST_BASE + MEMORY - 512, 1024).0, IOERR);
    assert_eq!(s.guest.simple(0, IN, 0, u64::MAX - 255, 512).0, IOERR);
    s.neighbours_live();
}

fn a04_indirect_abuse(ring: u64) {
    let mut s = scene(ring);
    let table = DATA + 0x10000;
    let good = Desc { addr: DATA - 64, len: 16, ..Desc::default() };
    let cases: [(&str, Desc, Option<Desc>); 8] = [
        ("with NEXT", Desc { addr: table, len: 48, flags: INDIRECT | 1, next: 1 }, None),
        ("no bytes", Desc { addr: table, len: 0, flags: INDIRECT, next: 0 }, None),
        ("an odd length", Desc { addr: table, len: 47, flags: INDIRECT, next: 0 }, None),
        ("a giant table", Desc { addr: table, len: 1 << 20, flags: INDIRECT, next: 0 }, None),
        (
            "nested",
            Desc { addr: table, len: 48, flags: INDIRECT, next: 0 },
            Some(Desc { flags: INDIRECT, ..good }),
        ),
        (
            "next outside the table",
            Desc { addr: table, len: 48, flags: INDIRECT, next: 0 },
            Some(Desc { flags: 1, next: 3, ..good }),
        ),
        (
            "a loop in the table",
            Desc { addr: table, len: 48, flags: INDIRECT, next: 0 },
            Some(Desc { flags: 1, next: 0, ..good }),
        ),
        ("outside memory", Desc { addr: 16, len: 48, flags: INDIRECT, next: 0 }, None),
    ];
    for (name, head, entry) in cases {
        println!("indirect table: {name}");
        s.guest.put_desc(table, 0, entry.unwrap_or(good));
        if ring == PACKED && head.flags & 1 != 0 {
            continue; // What follows belongs to it: half a chain, below.
        }
        s.guest.put_chain(0, 40, &[head]);
        s.chain_fails(40);
    }
    s.neighbours_live();
}

fn a04_indirect_without_the_feature(ring: u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), CAPACITY);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut guest = RawGuest::start(rig.connect(), 1, 128, F_VERSION_1 | ring);
    guest.put_chain(0, 0, &[Desc { addr: DATA, len: 48, flags: INDIRECT, next: 0 }]);
    guest.offer(0, 0);
    assert_eq!(guest.next_used(0, SOON), Some((0, 0)));
}

fn a05_a_failed_fetch_fails_the_whole_request(ring: u64) {
    let mut s = scene(ring);
    let before = vec![0x11; 1024];
    s.guest.poke(DATA, &before);
    assert_eq!(s.guest.simple(0, OUT, 0, DATA, 1024).0, OK);
    // The first buffer is fine, the second is not memory: not even the first may be written.
    s.guest.poke(DATA, &[0x22; 512]);
    let header = DATA - 64;
    s.guest.put_header(header, OUT, 0);
    let chain = [
        Desc { addr: header, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 512, ..Desc::default() },
        Desc { addr: 64, len: 512, ..Desc::default() },
        Desc { addr: header + 32, len: 1, flags: WRITE, next: 0 },
    ];
    s.guest.put_chain(0, 50, &chain);
    s.guest.offer(0, 50);
    assert_eq!(s.guest.next_used(0, SOON), Some((50, 1)));
    assert_eq!(s.guest.peek(header + 32, 1), [IOERR]);
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 1024), (OK, 1025));
    assert_eq!(s.guest.peek(DATA, 1024), before);
    s.neighbours_live();
}

fn a06_the_same_head_twice_in_flight(ring: u64) {
    let mut s = scene(ring);
    let header = DATA - 64;
    s.guest.put_header(header, IN, 0);
    let chain = [
        Desc { addr: header, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 4096, flags: WRITE, next: 0 },
        Desc { addr: header + 32, len: 1, flags: WRITE, next: 0 },
    ];
    s.guest.put_chain(0, 0, &chain);
    // Both become visible at once, so they are popped in one batch.
    s.guest.offer_twice(0, 0);
    s.guest.kick(0);
    assert_eq!(s.guest.next_used(0, SOON), Some((0, 4097)), "the first is served");
    s.queue_is_broken();
}

fn a07_a_running_queue_is_not_reconfigured(ring: u64) {
    let mut s = scene(ring);
    let c = &s.guest.client;
    let mut elsewhere = halves(&[0, 0]);
    elsewhere.extend(words(&[DATA + USER_DELTA, DATA + USER_DELTA, DATA + USER_DELTA, 0]));
    assert!(!c.acked(request::SET_VRING_NUM, &halves(&[0, 16]), &[]).unwrap());
    assert!(!c.acked(request::SET_VRING_BASE, &halves(&[0, 7]), &[]).unwrap());
    assert!(!c.acked(request::SET_VRING_ADDR, &elsewhere, &[]).unwrap());
    assert!(!c.acked(request::SET_FEATURES, &words(&[F_VERSION_1]), &[]).unwrap());
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 512).0, OK, "the queue is as it was");
    s.neighbours_live();
}

fn a08_queue_sizes(ring: u64) {
    let mut s = scene(ring);
    assert_eq!(s.guest.stop_queue(0).unwrap(), s.guest.base(0));
    let c = &s.guest.client;
    for size in [3, 127] {
        // Packed rings need not be a power of two.
        let taken = c.acked(request::SET_VRING_NUM, &halves(&[0, size]), &[]).unwrap();
        assert_eq!(taken, ring == PACKED, "{size}");
    }
    for size in [0, 2048, 32768, 32769, 65536, 65536 + 128, u32::MAX] {
        assert!(!c.acked(request::SET_VRING_NUM, &halves(&[0, size]), &[]).unwrap(), "{size}");
    }
    for size in [1, 2, 64, 1024] {
        assert!(c.acked(request::SET_VRING_NUM, &halves(&[0, size]), &[]).unwrap(), "{size}");
    }
    assert!(!c.acked(request::SET_VRING_NUM, &halves(&[2, 128]), &[]).unwrap(), "no queue 2");
    s.neighbours_live();
}

#[test]
fn a09_available_index_jumps() {
    let mut s = scene(SPLIT);
    s.guest.set_avail_index(0, 129);
    s.guest.kick(0);
    s.queue_is_broken();
}

fn a09_available_ring_names_no_descriptor(ring: u64) {
    let mut s = scene(ring);
    s.guest.offer(0, 128);
    s.queue_is_broken();
}

#[test]
fn a09_packed_half_a_chain() {
    let mut s = scene(PACKED);
    s.guest.put_chain(0, 0, &[Desc { addr: DATA, len: 16, flags: 1, next: 0 }]);
    s.guest.offer(0, 0);
    s.queue_is_broken();
}

#[test]
fn a09_packed_chain_around_the_ring() {
    let mut s = scene(PACKED);
    let endless = vec![Desc { addr: DATA, len: 16, flags: 1, next: 0 }; 128];
    s.guest.put_chain(0, 0, &endless);
    s.guest.offer(0, 0);
    s.queue_is_broken();
}

fn a11_no_more_is_reported_than_was_written(ring: u64) {
    let mut s = scene(ring);
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 4096), (OK, 4097));
    assert_eq!(s.guest.simple(0, OUT, 0, DATA, 4096), (OK, 1));
    assert_eq!(s.guest.simple(0, FLUSH, 0, DATA, 0), (OK, 1));
    assert_eq!(s.guest.simple(0, IN, CAPACITY / 512, DATA, 512), (IOERR, 1));
    // A longer buffer than the serial: only the serial's twenty bytes are written.
    s.guest.poke(DATA, &[0xaa; 64]);
    assert_eq!(s.guest.simple(0, GET_ID, 0, DATA, 64), (OK, 21));
    let id = s.guest.peek(DATA, 64);
    assert!(id.starts_with(b"rw-"), "{id:?}");
    assert!(id[19..20] == [0] && id[20..].iter().all(|&b| b == 0xaa));
    s.neighbours_live();
}

fn a12_wrong_directions(ring: u64) {
    let mut s = scene(ring);
    let header = DATA - 64;
    let status = header + 32;
    let head = Desc { addr: header, len: 16, ..Desc::default() };
    let data = Desc { addr: DATA, len: 512, ..Desc::default() };
    let end = Desc { addr: status, len: 1, flags: WRITE, next: 0 };
    // A read into memory the device may only read.
    s.guest.poke(DATA, &[0x77; 512]);
    s.guest.put_header(header, IN, 0);
    s.guest.put_chain(0, 0, &[head, data, end]);
    s.guest.offer(0, 0);
    assert_eq!(s.guest.next_used(0, SOON), Some((0, 1)));
    assert_eq!(s.guest.peek(status, 1), [IOERR]);
    assert_eq!(s.guest.peek(DATA, 512), [0x77; 512], "read-only memory is not written");
    // No writable byte at all: nowhere to answer.
    s.guest.poke(status, &[0xee]);
    s.guest.put_chain(0, 10, &[head, data, Desc { flags: 0, ..end }]);
    s.chain_fails(10);
    assert_eq!(s.guest.peek(status, 1), [0xee]);
    // A readable buffer after a writable one.
    s.guest.put_chain(
        0,
        20,
        &[
            head,
            Desc { flags: WRITE, ..data },
            Desc { addr: DATA, len: 16, ..Desc::default() },
            end,
        ],
    );
    s.chain_fails(20);
    // A header that is too short.
    s.guest.put_chain(0, 30, &[Desc { len: 15, ..head }, end]);
    s.guest.offer(0, 30);
    assert_eq!(s.guest.next_used(0, SOON), Some((30, 1)));
    assert_eq!(s.guest.peek(status, 1), [IOERR]);
    // Status over header and data over status: whatever it says, it harms nobody else.
    s.guest.put_chain(
        0,
        40,
        &[
            head,
            Desc { addr: header, len: 512, flags: WRITE, next: 0 },
            Desc { addr: header + 3, ..end },
        ],
    );
    s.guest.put_header(header, IN, 0);
    s.guest.offer(0, 40);
    assert_eq!(s.guest.next_used(0, SOON), Some((40, 513)));
    s.neighbours_live();
}

fn erase(s: &mut Scene, kind: u32, sector: u64, sectors: u32, flags: u32) -> (u8, u32) {
    let mut segment = words(&[sector]);
    segment.extend(halves(&[sectors, flags]));
    s.guest.poke(DATA, &segment);
    s.guest.simple(0, kind, 0, DATA, 16)
}

fn a13_beyond_the_end(ring: u64) {
    let mut s = scene(ring);
    let end = CAPACITY / 512;
    for (sector, ok) in [(end - 1, OK), (end, IOERR), (end + 1, IOERR), (u64::MAX / 512, IOERR)] {
        assert_eq!(s.guest.simple(0, IN, sector, DATA, 512).0, ok);
        assert_eq!(s.guest.simple(0, OUT, sector, DATA, 512).0, ok);
        assert_eq!(erase(&mut s, DISCARD, sector, 1, 0).0, ok);
        assert_eq!(erase(&mut s, WRITE_ZEROES, sector, 1, 0).0, ok);
        assert_eq!(erase(&mut s, WRITE_ZEROES, sector, 1, 1).0, ok);
    }
    assert_eq!(s.guest.simple(0, IN, end - 1, DATA, 1024).0, IOERR, "half of it is too much");
    assert_eq!(erase(&mut s, DISCARD, end - 1, 2, 0).0, IOERR);
    assert_eq!(erase(&mut s, DISCARD, 0, u32::MAX, 0).0, IOERR);
    assert_eq!(erase(&mut s, DISCARD, 0, 1, 1).0, UNSUPP, "reserved flags");
    assert_eq!(erase(&mut s, WRITE_ZEROES, 0, 1, 2).0, UNSUPP, "reserved flags");
    assert_eq!(erase(&mut s, WRITE_ZEROES, 0, 1, 0x8000_0001).0, UNSUPP);
    s.guest.poke(DATA, &[0; 32]);
    // As QEMU's back-end answers, and its own tests ask.
    assert_eq!(s.guest.simple(0, DISCARD, 0, DATA, 32).0, UNSUPP, "one segment is offered");
    assert_eq!(s.guest.simple(0, WRITE_ZEROES, 0, DATA, 32).0, UNSUPP, "one segment is offered");
    assert_eq!(s.guest.simple(0, DISCARD, 0, DATA, 8).0, IOERR, "half a segment");
    s.neighbours_live();
}

fn a13_a_read_only_disk_refuses_every_change(ring: u64) {
    let mut s = scene_with(ring, |options| options.disk.read_only = true);
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 512).0, OK);
    assert_eq!(s.guest.simple(0, OUT, 0, DATA, 512).0, IOERR);
    assert_eq!(erase(&mut s, DISCARD, 0, 8, 0).0, IOERR);
    assert_eq!(erase(&mut s, WRITE_ZEROES, 0, 8, 0).0, IOERR);
    assert_eq!(s.guest.simple(0, FLUSH, 0, DATA, 0).0, OK);
    s.neighbours_live();
}

fn a14_scsi_passthrough_does_not_exist(ring: u64) {
    let mut s = scene(ring);
    for kind in [SCSI, 3, 5, 6, 7, 9, 14, 16, 0x8000_0000, u32::MAX] {
        assert_eq!(s.guest.simple(0, kind, 0, DATA, 512), (UNSUPP, 1), "request type {kind}");
    }
    s.neighbours_live();
}

/// What takes memory here is bounded in flood.rs.
fn a15_more_than_fits_is_answered_once_each(ring: u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), CAPACITY);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut guest = RawGuest::start(rig.connect(), 1, 1024, BASIC | ring);
    // 340 requests of one MiB at once, all into the same memory, many times over.
    guest.put_header(DATA - 64, IN, 0);
    for i in 0..340u16 {
        let chain = [
            Desc { addr: DATA - 64, len: 16, ..Desc::default() },
            Desc { addr: DATA, len: 1 << 20, flags: WRITE, next: 0 },
            Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
        ];
        guest.put_chain(0, 3 * i, &chain);
    }
    for _ in 0..3 {
        for i in 0..340 {
            guest.offer_quietly(0, 3 * i);
        }
        guest.kick(0);
        let mut heads: Vec<u32> = (0..340)
            .map(|_| {
                let (head, len) = guest.next_used(0, SOON).expect("every request is answered");
                assert_eq!(len, (1 << 20) + 1);
                head
            })
            .collect();
        heads.sort_unstable();
        assert!(heads.iter().copied().eq((0..340).map(|i| 3 * i)), "each exactly once");
    }
    assert_eq!(guest.next_used(0, Duration::from_millis(50)), None);
}

/// Random chains, mostly well formed: each comes back exactly once and nothing is kept behind.
fn a16_error_paths_leak_nothing(ring: u64) {
    let mut rng = Rng::for_test("a16_error_paths_leak_nothing");
    let mut s = scene(ring);
    for round in 0..2000 {
        let header = DATA - 64;
        let kind = rng.pick(&[IN, OUT, IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES, SCSI, 99]);
        let sector = rng.pick(&[0, 8, CAPACITY / 512 - 1, CAPACITY / 512, u64::MAX]);
        s.guest.put_header(header, kind, sector);
        let pieces = 1 + rng.below(6);
        let places = [DATA, DATA + 1, DATA + 511, header, 0, u64::MAX - 3, DATA + 8192];
        let mut chain: Vec<Desc> = (0..pieces)
            .map(|_| Desc {
                addr: rng.pick(&places),
                len: rng.pick(&[512, 512, 1024, 4096, 1, 0, 16, u32::MAX]),
                flags: rng.pick(&[0, WRITE, WRITE, 0, INDIRECT]),
                next: 0,
            })
            .collect();
        if rng.below(8) != 0 {
            chain.insert(0, Desc { addr: header, len: 16, ..Desc::default() });
        }
        if rng.below(8) != 0 {
            chain.push(Desc { addr: header + 32, len: 1, flags: WRITE, next: 0 });
        }
        s.guest.put_chain(0, 0, &chain);
        s.guest.offer(0, 0);
        let used = s.guest.next_used(0, SOON);
        assert!(matches!(used, Some((0, _))), "round {round}: {chain:x?} gave {used:?}");
    }
    // A queue only stops when every slot and bounce page is back.
    assert_eq!(s.guest.stop_queue(0).unwrap(), s.guest.base(0));
    assert!(s.guest.start_queue(0).unwrap());
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 512).0, OK);
    s.neighbours_live();
}

fn a17_nothing_is_written_after_a_stop(ring: u64) {
    let mut rng = Rng::for_test("a17_nothing_is_written_after_a_stop");
    let mut s = scene(ring);
    for round in 0..50u8 {
        let header = DATA - 64;
        for i in 0..40u16 {
            s.guest.put_header(header, IN, rng.below(1000));
            let chain = [
                Desc { addr: header, len: 16, ..Desc::default() },
                Desc { addr: DATA, len: 1 << 20, flags: WRITE, next: 0 },
                Desc { addr: header + 32, len: 1, flags: WRITE, next: 0 },
            ];
            s.guest.put_chain(0, 3 * i, &chain);
            s.guest.offer_quietly(0, 3 * i);
        }
        s.guest.kick(0);
        if rng.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(rng.below(2000)));
        }
        let base = s.guest.stop_queue(0).unwrap();
        s.guest.poke(DATA, &vec![round; 1 << 20]);
        let (table, _, used) = s.guest.rings(0);
        if ring == SPLIT {
            let index = s.guest.peek(used + 2, 2);
            assert_eq!(index, base.to_le_bytes()[..2], "what was taken was answered");
        } else {
            assert_eq!(base & 0xffff, base >> 16, "what was taken was answered");
        }
        let rings = s.guest.peek(table, 0xa000);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(s.guest.peek(DATA, 1 << 20), vec![round; 1 << 20], "written after the reply");
        assert!(s.guest.peek(table, 0xa000) == rings, "rings written after the reply");
        // Start over at the point the device named.
        while s.guest.next_used(0, Duration::ZERO).is_some() {}
        s.guest.rewind(0, base);
        assert_eq!(s.guest.base(0), base);
        assert!(s.guest.start_queue(0).unwrap());
    }
    s.neighbours_live();
}

fn a17_reset_during_io(ring: u64) {
    let mut s = scene(ring);
    let header = DATA - 64;
    s.guest.put_header(header, IN, 0);
    for i in 0..40u16 {
        let chain = [
            Desc { addr: header, len: 16, ..Desc::default() },
            Desc { addr: DATA, len: 1 << 20, flags: WRITE, next: 0 },
            Desc { addr: header + 32, len: 1, flags: WRITE, next: 0 },
        ];
        s.guest.put_chain(0, 3 * i, &chain);
        s.guest.offer_quietly(0, 3 * i);
    }
    s.guest.kick(0);
    assert!(s.guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap());
    s.guest.poke(DATA, &vec![7; 1 << 20]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(s.guest.peek(DATA, 1 << 20), vec![7; 1 << 20]);
}

fn a18_any_legal_layout(ring: u64) {
    let mut s = scene(ring);
    let header = DATA - 64;
    let mut content = vec![0; 8192];
    pattern::fill(&mut content, 1, 64, 5);
    // A write whose header comes in pieces of 1 and 15 bytes, the second with data behind it, and
    // data cut at odd places.
    s.guest.put_header(header, OUT, 64);
    s.guest.poke(header + 16, &content[..10]);
    s.guest.poke(DATA, &content[10..]);
    let read = |addr, len| Desc { addr, len, flags: 0, next: 0 };
    let write = |addr, len| Desc { addr, len, flags: WRITE, next: 0 };
    let chain = [
        read(header, 1),
        read(header + 1, 15 + 10),
        read(DATA, 1),
        read(DATA + 1, 4096),
        read(DATA + 4097, 8192 - 10 - 4097),
        write(DATA + 0x4000, 1),
    ];
    s.guest.put_chain(0, 0, &chain);
    s.guest.offer(0, 0);
    assert_eq!(s.guest.next_used(0, SOON), Some((0, 1)));
    assert_eq!(s.guest.peek(DATA + 0x4000, 1), [OK]);
    // A read whose status byte is the end of the data buffer, and whose data begins with one byte.
    s.guest.put_header(header, IN, 64);
    s.guest.put_chain(0, 10, &[read(header, 16), write(DATA + 7, 1), write(DATA + 8, 8192)]);
    s.guest.offer(0, 10);
    assert_eq!(s.guest.next_used(0, SOON), Some((10, 8193)));
    assert_eq!(s.guest.peek(DATA + 7, 8192), content);
    assert_eq!(s.guest.peek(DATA + 7 + 8192, 1), [OK]);
    // The same through an indirect table that lies at an odd address.
    let table = DATA + 0x20001;
    // Those of packed rings have no links: entries count in their order.
    let (second, third) = if ring == PACKED { (1, 2) } else { (2, 1) };
    s.guest.put_desc(table, 0, Desc { flags: 1, next: second, ..read(header, 16) });
    s.guest.put_desc(table, second, Desc { flags: WRITE | 1, next: third, ..write(DATA, 8192) });
    s.guest.put_desc(table, third, write(DATA + 0x3000, 1));
    s.guest.put_chain(0, 20, &[Desc { addr: table, len: 48, flags: INDIRECT, next: 0 }]);
    s.guest.offer(0, 20);
    assert_eq!(s.guest.next_used(0, SOON), Some((20, 8193)));
    assert_eq!(s.guest.peek(DATA, 8192), content);
    s.neighbours_live();
}

fn a19_a_kick_storm_leaves_the_neighbour_its_share(ring: u64) {
    let mut s = scene(ring);
    let mut neighbour = RawGuest::start(s.rig.connect(), 1, 16, F_VERSION_1 | F_EVENT_IDX | ring);
    let storm = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        let guest = &s.guest;
        let storm = &storm;
        scope.spawn(move || {
            while storm.load(std::sync::atomic::Ordering::Relaxed) {
                guest.kick(0);
            }
        });
        for i in 0..500 {
            assert_eq!(neighbour.simple(0, IN, i, DATA, 512), (OK, 513));
        }
        storm.store(false, std::sync::atomic::Ordering::Relaxed);
    });
    s.neighbours_live();
}

fn a20_neighbouring_sectors_from_scattered_memory(ring: u64) {
    let mut s = scene(ring);
    // Sectors in order, memory in reverse order with gaps, all in flight together.
    let header = |i: u64| DATA - 0x2000 + 64 * i;
    for i in 0..16u64 {
        let at = DATA + (15 - i) * 8192;
        let mut sector = vec![0; 4096];
        pattern::fill(&mut sector, 9, 8 * i, 1);
        s.guest.poke(at, &sector);
        s.guest.put_header(header(i), OUT, 8 * i);
        let chain = [
            Desc { addr: header(i), len: 16, ..Desc::default() },
            Desc { addr: at, len: 4096, ..Desc::default() },
            Desc { addr: header(i) + 32, len: 1, flags: WRITE, next: 0 },
        ];
        let first = u16::try_from(3 * i).unwrap();
        s.guest.put_chain(0, first, &chain);
        s.guest.offer_quietly(0, first);
    }
    s.guest.kick(0);
    for _ in 0..16 {
        assert!(s.guest.next_used(0, SOON).is_some());
    }
    for i in 0..16u64 {
        assert_eq!(s.guest.peek(header(i) + 32, 1), [OK]);
    }
    assert_eq!(s.guest.simple(0, IN, 0, DATA, 65536), (OK, 65537));
    assert_eq!(pattern::first_difference(&s.guest.peek(DATA, 65536), 9, 0, 1), None);
}
