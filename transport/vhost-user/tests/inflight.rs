//! The inflight region at the door: what it is made like, what is refused, and that requests which a
//! predecessor left in flight are carried out first.

use ringway_disk::EngineKind;
use ringway_ring::virtqueue::inflight_bytes;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PACKED, F_PROTOCOL, F_VERSION_1, RawClient, RawGuest,
    halves, inflight_payload, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tempfile::TempDir;

const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;
const WRITE: u16 = 2;
const SIZE: u16 = 64;
/// The beginning of a record from `version` on: version 1, entries.
const MADE: [u8; 4] = [1, 0, 64, 0];
/// The largest rings that these back-ends accept.
const RINGS: u16 = 1024;
const SOON: Duration = Duration::from_secs(20);

fn rig() -> (Rig, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1));
    (rig, folder)
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("inflight-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

fn peek<const N: usize>(file: &File, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn version(file: &File, at: u64) -> u16 {
    u16::from_le_bytes(peek(file, at + 8))
}

/// A guest with a region of the back-end's own making, and two queues that use it.
fn tracked(rig: &mut Rig, format: u64, entries: u16) -> (RawGuest, File) {
    let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
    guest.size = SIZE;
    let (bytes, fd) = guest.client.get_inflight(2, entries).unwrap();
    let payload = inflight_payload(bytes, 0, 2, entries);
    assert!(guest.client.set_inflight(&payload, fd.as_fd()).unwrap());
    for queue in 0..2 {
        assert!(guest.start_queue(queue).unwrap());
    }
    (guest, fd.into())
}

/// Puts down a write of one sector full of `byte`, whose header and status byte are at `number`.
fn put_write(guest: &RawGuest, number: u16, sector: u64, byte: u8) {
    let at = DATA + 0x1000 * u64::from(number);
    guest.put_header(at, OUT, sector);
    guest.poke(at + 16, &[0xee]);
    guest.poke(at + 512, &[byte; 512]);
    let chain = [
        Desc { addr: at, len: 16, ..Desc::default() },
        Desc { addr: at + 512, len: 512, ..Desc::default() },
        Desc { addr: at + 16, len: 1, flags: WRITE, next: 0 },
    ];
    guest.put_chain(0, 3 * number, &chain);
}

#[test]
fn b35_a_region_is_made_sealed_with_room_for_the_largest_rings() {
    let (mut rig, _folder) = rig();
    let guest = RawGuest::connect(rig.connect(), BASIC);
    for (queues, size) in [(1, 1), (2, 64), (2, 100), (2, 1024), (2, 1025), (1, 32768)] {
        let (bytes, fd) = guest.client.get_inflight(queues, size).unwrap();
        let file = File::from(fd);
        assert_eq!(file.metadata().unwrap().len(), bytes);
        let parts = |size| u64::from(queues) * inflight_bytes(true, size) as u64;
        // With a word behind them, and the same for the largest ring that is accepted.
        let larger = if size < RINGS { parts(RINGS) + 64 } else { 0 };
        assert_eq!(bytes, parts(size) + 64 + larger);
        assert!(file.set_len(0).is_err() && file.set_len(2 * bytes).is_err(), "not sealed");
        assert_eq!(version(&file, 0), 0, "it says that it is new");
    }
}

#[test]
fn b04_sizes_of_a_region_are_judged() {
    let (mut rig, _folder) = rig();
    // No answer could say no.
    for (queues, size) in [(0, 64), (3, 64), (1, 0), (1, 32769), (u16::MAX, u16::MAX)] {
        let guest = RawGuest::connect(rig.connect(), BASIC);
        assert!(guest.client.get_inflight(queues, size).is_err(), "{queues} queues of {size}");
        assert!(guest.client.is_closed());
    }
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    let room = memory(1 << 20);
    let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let need = 2 * inflight_bytes(false, SIZE) as u64;
    let refused = |payload: &[u8], fd: &OwnedFd| {
        assert!(!guest.client.set_inflight(payload, fd.as_fd()).unwrap(), "{payload:?}");
    };
    for (bytes, offset, queues, size) in [
        (need, 0, 0, SIZE),
        (need, 0, 3, SIZE),
        (need, 0, u16::MAX, u16::MAX),
        (need, 0, 2, 0),
        (0, 0, 2, SIZE),
        (need, 1, 2, SIZE),
        (need, 1 << 20, 2, SIZE),
        (need, (1 << 20) - need + 64, 2, SIZE),
        (u64::MAX, 0x1_0000_0000, 2, SIZE),
        (u64::MAX, u64::MAX - 63, 2, SIZE),
        (need, 1 << 63, 2, SIZE),
    ] {
        refused(&inflight_payload(bytes, offset, queues, size), &room);
    }
    refused(&inflight_payload(need, 0, 2, SIZE), &bell);
    refused(&inflight_payload(need, 0, 2, SIZE), &memory(need - 1));
    // The longest size that can be said, and the smallest file that does.
    let payload = inflight_payload(u64::MAX, 64, 2, SIZE);
    assert!(guest.client.set_inflight(&payload, room.as_fd()).unwrap());
    let payload = inflight_payload(need, 0, 2, SIZE);
    assert!(guest.client.set_inflight(&payload, memory(need).as_fd()).unwrap());
    guest.size = SIZE;
    let payload = inflight_payload(1 << 16, 0, 1, SIZE);
    assert!(guest.client.set_inflight(&payload, room.as_fd()).unwrap());
    assert!(guest.start_queue(0).unwrap());
    assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    assert!(!guest.client.set_inflight(&payload, room.as_fd()).unwrap(), "a queue runs");
}

/// Regions of earlier versions, and of front-ends that say what they like: the queues that have no room
/// there are served all the same, and nothing is written elsewhere.
#[test]
fn b35_a_region_that_is_too_small_costs_the_record_and_not_the_disk() {
    for format in [0, F_PACKED] {
        let (mut rig, _folder) = rig();
        let packed = format == F_PACKED;
        let need = |queues: u64, size| queues * inflight_bytes(packed, size) as u64;
        for (bytes, queues, size, recorded) in [
            (need(2, 32), 2, 32, 0),
            (need(2, 32) + 64, 2, 32, 0),
            (2 * inflight_bytes(true, 32) as u64 + 64, 2, 32, 0),
            (need(1, SIZE), 1, SIZE, 1),
            (need(2, SIZE) - 1, 2, SIZE, 1),
            (need(2, SIZE), 2, SIZE, 2),
            (64, 2, SIZE, 0),
        ] {
            let case = format!("packed: {packed}, {bytes} bytes for {queues} of {size}");
            let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
            guest.size = SIZE;
            let file = File::from(memory(bytes));
            let payload = inflight_payload(bytes, 0, queues, size);
            assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap(), "{case}");
            for queue in 0..2 {
                assert!(guest.start_queue(queue).unwrap(), "{case}");
                for sector in 0..70 {
                    assert_eq!(guest.simple(queue, IN, sector, DATA, 512), (OK, 513), "{case}");
                }
            }
            let mut content = vec![0; usize::try_from(bytes).unwrap()];
            file.read_exact_at(&mut content, 0).unwrap();
            let parts = (0..2).map(|queue| queue * inflight_bytes(packed, SIZE));
            let made = parts.filter(|&at| content.get(at + 8..at + 12) == Some(&MADE)).count();
            assert_eq!(made, recorded, "{case}");
            // But for the word about the write cache, where that has room.
            content.truncate(2 * inflight_bytes(true, size));
            assert!(recorded > 0 || content.iter().all(|&byte| byte == 0), "{case}");
            let end = guest.base(1);
            assert_eq!(guest.stop_queue(1).unwrap(), end, "{case}");
            assert!(guest.start_queue(1).unwrap(), "{case}");
            assert_eq!(guest.simple(1, IN, 0, DATA, 512), (OK, 513), "{case}");
        }
    }
}

/// Offers a write on queue 0, and makes the record at `at`, for `entries`, that of a daemon which had taken
/// it and nothing else.
fn leave_write(guest: &mut RawGuest, file: &File, at: u64, entries: u16, packed: bool) {
    put_write(guest, 0, 5, 1);
    guest.offer_quietly(0, 0);
    let put = |offset: usize, bytes: &[u8]| file.write_all_at(bytes, at + offset as u64).unwrap();
    put(0, &vec![0; inflight_bytes(packed, entries)]);
    put(8, &[1, 0]);
    put(10, &entries.to_le_bytes());
    if !packed {
        return put(16, &[1]);
    }
    // QueueRegionPacked: free_head, old_free_head, used_idx, old_used_idx, both wrap counters.
    put(12, &[3, 0, 3, 0, 0, 0, 0, 0, 1, 1]);
    for entry in 0..entries {
        put(32 + 32 * usize::from(entry) + 2, &(entry + 1).to_le_bytes());
    }
    let desc = [(DATA, 16u32, 1u16), (DATA + 512, 512, 1), (DATA + 16, 1, 2)];
    for (entry, (addr, len, flags)) in desc.into_iter().enumerate() {
        // DescStatePacked: flags and len, addr.
        put(32 + 32 * entry + 18, &flags.to_le_bytes());
        put(32 + 32 * entry + 20, &len.to_le_bytes());
        put(32 + 32 * entry + 24, &addr.to_le_bytes());
    }
    // The first one: inflight, last, num.
    put(32, &[1]);
    put(32 + 4, &[2, 0, 3, 0]);
}

/// One daemon makes a region for `asked` entries and serves rings of `ring`; what it leaves in flight the next one
/// carries out, which accepts rings of `accepted` and is told `repeated`. Each queue's record is where it belongs.
fn rings_are_recorded(format: u64, asked: u16, ring: u16, repeated: u16, accepted: u16) {
    let case = format!("format {format:#x}: asked {asked}, ring {ring}");
    let (mut rig, _folder) = self::rig();
    let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
    guest.size = ring;
    let (bytes, fd) = guest.client.get_inflight(2, asked).unwrap();
    let region = File::from(fd);
    let payload = inflight_payload(bytes, 0, 2, asked);
    assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap(), "{case}");
    for queue in 0..2 {
        assert!(guest.start_queue(queue).unwrap(), "{case}");
        assert_eq!(guest.simple(queue, IN, 7, DATA, 512), (OK, 513), "{case}");
    }
    let of_parts = |size| inflight_bytes(format == F_PACKED, size) as u64;
    let first = 2 * inflight_bytes(true, asked) as u64;
    let (begin, size) = if ring > asked { (first + 64, RINGS) } else { (0, asked) };
    for at in [begin, begin + of_parts(size)] {
        let [a, b] = size.to_le_bytes();
        assert_eq!(peek(&region, at + 8), [1, 0, a, b], "{case}");
    }
    assert_eq!(peek::<6>(&region, first), *b"RWcach", "{case}");
    // It dies: nothing is said of where its queues are. The record of the second one is that of a
    // daemon that had taken a write.
    drop(guest);
    drop(rig);
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1);
    options.queue_size = accepted;
    let mut rig = Rig::start(&options);
    let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
    guest.size = ring;
    leave_write(&mut guest, &region, begin, size, format == F_PACKED);
    let payload = inflight_payload(bytes, 0, 2, repeated);
    assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap(), "{case}");
    assert!(guest.start_queue(0).unwrap(), "{case}");
    assert!(guest.next_used(0, SOON).is_some(), "{case}: it was recorded");
    assert_eq!(guest.peek(DATA + 16, 1), [OK], "{case}");
}

/// QEMU 10 asks for a region with the property `queue-size`, and has rings of another size. What one daemon
/// leaves in flight the next one carries out, also if that accepts other rings, and the front-end asks
/// with another number by then. Rings that are not larger than what was asked for are where earlier
/// versions have them, as is the word about the write cache.
#[test]
fn b35_rings_larger_than_the_region_was_asked_for_are_recorded() {
    for format in [0, F_PACKED] {
        for (asked, ring, repeated, accepted) in [
            (128, 1024, 128, 4096),
            (64, 1024, 1024, 1024),
            (128, 512, 64, 512),
            (128, 128, 128, 2048),
            (256, 16, 256, 256),
            (1024, 1024, 1024, 2048),
        ] {
            rings_are_recorded(format, asked, ring, repeated, accepted);
        }
    }
}

/// No size of ring and no property is special.
#[test]
fn a29_rings_of_all_sizes_are_recorded_in_regions_for_all_properties() {
    for asked in [64, 100, 128, 256, 512, 1024] {
        for ring in [16, 32, 64, 128, 256, 512, 1024] {
            rings_are_recorded(0, asked, ring, asked, RINGS);
            rings_are_recorded(F_PACKED, asked, ring, asked, RINGS);
        }
        for ring in [17, 100, 999, 1023] {
            rings_are_recorded(F_PACKED, asked, ring, asked, RINGS);
        }
    }
}

/// QEMU gives the region of before the reset again: a new ring begins where new rings do.
#[test]
fn b43_a_reset_leaves_nothing_in_the_record() {
    for format in [0, F_PACKED] {
        let (mut rig, _folder) = rig();
        let (mut guest, region) = tracked(&mut rig, format, SIZE);
        let bytes = region.metadata().unwrap().len();
        for round in 0..3 {
            for queue in [0, 1] {
                for sector in 0..10 {
                    let done = guest.simple(queue, IN, sector, DATA, 512);
                    assert_eq!(done, (OK, 513), "round {round}");
                }
            }
            assert!(guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap());
            let features = words(&[BASIC | format | F_PROTOCOL]);
            assert!(guest.client.acked(request::SET_FEATURES, &features, &[]).unwrap());
            let payload = inflight_payload(bytes, 0, 2, SIZE);
            assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
            for queue in [0, 1] {
                guest.reset_queue(queue);
                assert!(guest.start_queue(queue).unwrap(), "round {round}");
            }
        }
    }
}

#[test]
fn b04_a_damaged_region_costs_the_queue() {
    let (mut rig, _folder) = rig();
    for format in [0, F_PACKED] {
        let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
        guest.size = SIZE;
        let file = File::from(memory(1 << 16));
        let part = inflight_bytes(format == F_PACKED, SIZE) as u64;
        // Version 7, and a version without entries.
        file.write_all_at(&[7, 0], 8).unwrap();
        file.write_all_at(&[1, 0], part + 8).unwrap();
        let payload = inflight_payload(1 << 16, 0, 2, SIZE);
        assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
        assert!(!guest.start_queue(0).unwrap());
        assert!(!guest.start_queue(1).unwrap());
        file.write_all_at(&[0, 0], 8).unwrap();
        assert!(guest.start_queue(0).unwrap(), "the connection lives");
        assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    }
}

/// A queue that cannot start keeps its descriptors, and is nobody else's trouble: the others start, and messages
/// about them are not refused for it.
#[test]
fn b04_a_queue_that_cannot_start_is_no_trouble_of_the_others() {
    let (mut rig, _folder) = rig();
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    guest.size = SIZE;
    let file = File::from(memory(1 << 16));
    file.write_all_at(&[7, 0], 8).unwrap();
    let payload = inflight_payload(1 << 16, 0, 2, SIZE);
    assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
    assert!(!guest.start_queue(0).unwrap(), "it is damaged");
    assert!(guest.start_queue(1).unwrap());
    assert_eq!(guest.simple(1, IN, 0, DATA, 512), (OK, 513));
    assert!(guest.set_mem_table().unwrap());
    assert_eq!(guest.simple(1, IN, 0, DATA, 512), (OK, 513));
    file.write_all_at(&[0, 0], 8).unwrap();
    assert!(guest.client.acked(request::SET_VRING_ENABLE, &halves(&[0, 1]), &[]).unwrap());
    assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513), "it is heard, and rings");
}

#[test]
fn b04_a_region_cut_short_later_costs_the_connection() {
    let (mut rig, _folder) = rig();
    let mut neighbour = RawGuest::start(rig.connect(), 1, SIZE, BASIC);
    for format in [0, F_PACKED] {
        let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
        guest.size = SIZE;
        let file = File::from(memory(1 << 16));
        let payload = inflight_payload(1 << 16, 0, 2, SIZE);
        assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513));
        file.set_len(0).unwrap();
        put_write(&guest, 0, 9, 9);
        guest.offer(0, 0);
        assert!(guest.client.is_closed());
        assert_eq!(neighbour.simple(0, IN, 0, DATA, 512), (OK, 513));
    }
}

/// While queues run the record counts; after GET_VRING_BASE it is as new, so that a queue may be
/// reset and begin anywhere.
#[test]
fn a_stop_leaves_a_clean_region() {
    for format in [0, F_PACKED] {
        let (mut rig, _folder) = rig();
        let (mut guest, region) = tracked(&mut rig, format, 128);
        let part = inflight_bytes(format == F_PACKED, 128) as u64;
        let sizes = if format == F_PACKED { [64, 100, 7] } else { [64, 128, 8] };
        for size in sizes {
            let current = std::mem::replace(&mut guest.size, SIZE);
            for sector in 0..70 {
                assert_eq!(guest.simple(1, IN, sector, DATA, 512), (OK, 513));
            }
            assert_eq!((version(&region, 0), version(&region, part)), (1, 1));
            guest.size = current;
            let expected = guest.base(0);
            assert_eq!(guest.stop_queue(0).unwrap(), expected);
            // The record is forgotten once the answer is out, and before the next message.
            guest.client.ask_u64(request::GET_FEATURES).unwrap();
            assert_eq!((version(&region, 0), version(&region, part)), (0, 1));
            guest.reset_queue(0);
            guest.size = size;
            assert!(guest.start_queue(0).unwrap(), "size {size}");
            for sector in 0..70 {
                assert_eq!(guest.simple(0, IN, sector, DATA, 512), (OK, 513), "size {size}");
            }
        }
    }
}

/// The record says that three writes to one sector were taken, in an order of its own, and not
/// returned; a fourth one waits in the ring. All are carried out, in that order.
#[test]
fn what_a_predecessor_left_in_flight_comes_first() {
    let (mut rig, _folder) = rig();
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    guest.size = SIZE;
    for number in [2, 0, 1, 3] {
        put_write(&guest, number, 5, 10 + u8::try_from(number).unwrap());
        guest.offer_quietly(0, 3 * number);
    }
    let file = File::from(memory(1 << 16));
    file.write_all_at(&MADE, 8).unwrap();
    for (counter, number) in [(7u64, 2), (8, 0), (9, 1)] {
        let entry = 16 + 16 * (3 * number);
        file.write_all_at(&[1], entry).unwrap();
        file.write_all_at(&counter.to_le_bytes(), entry + 8).unwrap();
    }
    let payload = inflight_payload(1 << 16, 0, 1, SIZE);
    assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
    assert!(guest.start_queue(0).unwrap());
    let mut back: Vec<_> = (0..4).map(|_| guest.next_used(0, SOON).unwrap()).collect();
    assert_eq!(guest.next_used(0, Duration::from_millis(100)), None);
    back.sort_unstable();
    assert_eq!(back, [(0, 1), (3, 1), (6, 1), (9, 1)], "each came back once");
    for number in 0..4u64 {
        assert_eq!(guest.peek(DATA + 0x1000 * number + 16, 1), [OK]);
    }
    for number in 0..3 {
        assert_eq!(peek(&file, 16 + 16 * (3 * number)), [0], "nothing is in flight now");
    }
    assert_eq!(guest.stop_queue(0).unwrap(), 4);
}

/// A queue that is stopped as soon as it has started still owes what was left in flight.
#[test]
fn what_was_left_is_done_before_a_stop() {
    let (mut rig, _folder) = rig();
    for _ in 0..20 {
        let mut guest = RawGuest::connect(rig.connect(), BASIC);
        guest.size = SIZE;
        let file = File::from(memory(1 << 16));
        file.write_all_at(&MADE, 8).unwrap();
        for number in 0..20 {
            put_write(&guest, number, u64::from(number), 1);
            guest.offer_quietly(0, 3 * number);
            file.write_all_at(&[1], 16 + 16 * u64::from(3 * number)).unwrap();
        }
        let payload = inflight_payload(1 << 16, 0, 1, SIZE);
        assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(guest.stop_queue(0).unwrap(), 20);
        let back = (0..20).filter(|_| guest.next_used(0, Duration::ZERO).is_some()).count();
        assert_eq!(back, 20, "all before the answer");
    }
}

/// The disk was paused by a daemon that was killed, and is by its successor: the queue does not run, and its
/// front-end asks where it is. What the record names is carried out first, and where the queue is follows from
/// it: front-ends repeat what they knew before (packed rings).
#[test]
fn b36_a_queue_that_never_ran_here_answers_for_its_record() {
    for format in [0, F_PACKED] {
        let (mut rig, _folder) = rig();
        rig.export().pause().unwrap();
        let mut guest = RawGuest::connect(rig.connect(), BASIC | format);
        guest.size = SIZE;
        let region = File::from(memory(1 << 16));
        let told = guest.base(0);
        leave_write(&mut guest, &region, 0, SIZE, format == F_PACKED);
        let payload = inflight_payload(1 << 16, 0, 1, SIZE);
        assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
        assert!(guest.start_queue(0).unwrap());
        let base = halves(&[0, told]);
        assert!(guest.client.acked(request::SET_VRING_BASE, &base, &[]).unwrap());
        guest.client.send(request::GET_VRING_BASE, 0, &halves(&[0, 0]), &[]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(guest.peek(DATA + 16, 1), [0xee], "it is paused");
        rig.export().resume().unwrap();
        let (_, answer) = guest.client.receive().unwrap();
        assert_eq!(guest.peek(DATA + 16, 1), [OK]);
        assert!(guest.next_used(0, Duration::ZERO).is_some());
        assert_eq!(answer, halves(&[0, guest.base(0)]));
        guest.client.ask_u64(request::GET_FEATURES).unwrap();
        assert_eq!(version(&region, 0), 0, "the record names nothing");
    }
}

const WCE: u64 = 1 << 11;

/// Bytes that were given to the file to be durable, of `bytes` written.
fn durable(rig: &Rig, guest: &mut RawGuest, bytes: u32) -> u64 {
    let count = || rig.stats().iter().map(|worker| worker.disk.durable_bytes).sum::<u64>();
    let before = count();
    assert_eq!(guest.simple(0, OUT, 8, DATA, bytes).0, OK);
    count() - before
}

/// What the configuration space says.
fn cache_is_on(guest: &RawGuest) -> bool {
    let mut payload = halves(&[32, 1, 0]);
    payload.push(0);
    guest.client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
    guest.client.receive().unwrap().1[12] == 1
}

fn set_cache(guest: &RawGuest, on: bool) {
    let mut payload = halves(&[32, 1, 0]);
    payload.push(on.into());
    assert!(guest.client.acked(request::SET_CONFIG, &payload, &[]).unwrap());
}

/// A front-end may say so before it tells of features: its guest need not run yet.
#[test]
fn c06_a_cache_is_switched_off_before_features_are_negotiated() {
    let (mut rig, _folder) = rig();
    let socket = rig.connect();
    let early = RawClient::new(socket.try_clone().unwrap());
    let protocol = words(&[1 | 1 << 3 | 1 << 9]);
    early.send(request::SET_PROTOCOL_FEATURES, 0, &protocol, &[]).unwrap();
    let mut payload = halves(&[32, 1, 0]);
    payload.push(0);
    // It reads that there is one.
    early.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
    assert_eq!(early.receive().unwrap().1[12], 1);
    assert!(early.acked(request::SET_CONFIG, &payload, &[]).unwrap(), "off is always safe");
    payload[12] = 1;
    assert!(!early.acked(request::SET_CONFIG, &payload, &[]).unwrap(), "on was not negotiated");
    let mut guest = RawGuest::start(socket, 1, SIZE, BASIC | WCE);
    assert!(!cache_is_on(&guest));
    assert_eq!(durable(&rig, &mut guest, 512), 512);
    set_cache(&guest, true);
    // Workers hear of it after the answer.
    assert!(cache_is_on(&guest));
    assert_eq!(durable(&rig, &mut guest, 512), 0);
}

/// The next daemon has a guest whose front-end says nothing, as QEMU when it reconnects: what the last
/// one noted in the region counts, and nothing else that may be there.
#[test]
fn c06_what_the_region_says_of_the_write_cache_counts() {
    for format in [0, F_PACKED] {
        let (mut rig, _folder) = rig();
        let (mut guest, region) = tracked(&mut rig, format | WCE, SIZE);
        let end = 2 * inflight_bytes(true, SIZE) as u64;
        let bytes = region.metadata().unwrap().len();
        // Nobody had told it anything.
        assert!(!cache_is_on(&guest));
        for on in [true, false, true, false] {
            set_cache(&guest, on);
            assert_eq!(cache_is_on(&guest), on);
            assert_eq!(durable(&rig, &mut guest, 512), if on { 0 } else { 512 });
            let note = if on { *b"RWcache1" } else { *b"RWcache0" };
            assert_eq!(peek::<8>(&region, end), note);
        }
        for queue in 0..2 {
            guest.stop_queue(queue).unwrap();
        }
        drop(guest);
        for (note, on) in [
            (*b"RWcache1", true),
            (*b"RWcache0", false),
            ([0; 8], false),
            ([0xff; 8], false),
            (*b"RWcache2", false),
        ] {
            // Another daemon, and what its predecessor left.
            let (mut rig, _folder) = self::rig();
            region.write_all_at(&note, end).unwrap();
            let mut guest = RawGuest::connect(rig.connect(), BASIC | format | WCE);
            guest.size = SIZE;
            let payload = inflight_payload(bytes, 0, 2, SIZE);
            assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
            assert!(guest.start_queue(0).unwrap());
            assert_eq!(durable(&rig, &mut guest, 1024), if on { 0 } else { 1024 }, "{note:?}");
            assert_eq!(cache_is_on(&guest), on, "the truth");
            guest.stop_queue(0).unwrap();
            // Once the answer is out.
            guest.client.ask_u64(request::GET_FEATURES).unwrap();
        }
    }
}

/// Without a region, or with one that says nothing: a guest that was served before, or may have been,
/// has no write cache until it says so.
#[test]
fn c06_a_guest_that_goes_on_unknown_has_no_write_cache() {
    // Whether it has read the configuration space, where its ring is, and what follows.
    for (asks, index, on) in
        [(true, 0, true), (false, 0, false), (true, 7, false), (false, 7, false)]
    {
        let (mut rig, _folder) = rig();
        let mut guest = RawGuest::connect(rig.connect(), BASIC | WCE);
        if asks {
            assert!(cache_is_on(&guest), "as it is offered");
        }
        if index != 0 {
            guest.set_avail_index(0, index);
        }
        assert!(guest.start_queue(0).unwrap());
        let wanted = if on { 0 } else { 512 };
        assert_eq!(durable(&rig, &mut guest, 512), wanted, "asks: {asks}, index {index}");
        assert_eq!(cache_is_on(&guest), on, "the truth");
        // A reset changes nothing by itself: the front-end may have a copy of what it has read.
        assert!(guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap());
        assert_eq!(cache_is_on(&guest), on);
        // It may say so.
        let mut guest = RawGuest::connect(rig.connect(), BASIC | WCE);
        guest.set_avail_index(0, 7);
        assert!(guest.start_queue(0).unwrap());
        set_cache(&guest, true);
        assert!(cache_is_on(&guest));
        assert_eq!(durable(&rig, &mut guest, 512), 0);
    }
}
