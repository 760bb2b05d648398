//! Memory that comes and goes slot by slot (ADD_MEM_REG, REM_MEM_REG) while a queue runs.

use ringway_disk::EngineKind;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PROTOCOL, F_VERSION_1, GUEST_BASE, MEMORY, RawGuest,
    USER_DELTA, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const LOG_ALL: u64 = 1 << 26;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;
const IOERR: u8 = 1;
const SLOT: u64 = 1 << 20;

fn memory() -> File {
    let fd = memfd_create("slot", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, SLOT).unwrap();
    fd.into()
}

/// The guest and the user address of a slot.
fn place(number: u64) -> (u64, u64) {
    let guest = GUEST_BASE + 2 * MEMORY + 2 * SLOT * number;
    (guest, guest + USER_DELTA)
}

fn add(guest: &RawGuest, number: u64, file: &File) -> bool {
    let (at, user) = place(number);
    let payload = words(&[0, at, SLOT, user, 0]);
    guest.client.acked(request::ADD_MEM_REG, &payload, &[file.as_fd()]).unwrap()
}

fn remove(guest: &RawGuest, at: u64, bytes: u64, user: u64) -> bool {
    let payload = words(&[0, at, bytes, user, 0]);
    guest.client.acked(request::REM_MEM_REG, &payload, &[]).unwrap()
}

fn guest(rig: &mut Rig) -> RawGuest {
    let mut guest = RawGuest::start(rig.connect(), 1, 64, BASIC);
    guest.poke(DATA, &[0x5a; 512]);
    assert_eq!(guest.simple(0, OUT, 9, DATA, 512).0, OK);
    guest
}

/// Sector 9, read into the beginning of a slot.
fn read_into(guest: &mut RawGuest, number: u64) -> u8 {
    guest.simple(0, IN, 9, place(number).0, 512).0
}

fn holds_the_sector(file: &File) -> bool {
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes == [0x5a; 512]
}

#[test]
fn slots_come_and_go_while_a_queue_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut guest = guest(&mut rig);
    assert_eq!(read_into(&mut guest, 0), IOERR, "there is no such memory yet");
    let files: Vec<File> = (0..3).map(|_| memory()).collect();
    for (number, file) in (0..).zip(&files) {
        assert!(add(&guest, number, file), "slot {number}");
        assert!(!holds_the_sector(file));
        assert_eq!(read_into(&mut guest, number), OK, "slot {number}");
        assert!(holds_the_sector(file));
    }
    // A slot is named by all three; what names none changes nothing.
    let ((at, user), (other_at, other_user)) = (place(1), place(0));
    for (at, bytes, user) in [
        (other_at, SLOT, user),
        (at, SLOT, other_user),
        (at, SLOT / 2, user),
        (at, 2 * SLOT, user),
        (at + SLOT, SLOT, user + SLOT),
    ] {
        assert!(!remove(&guest, at, bytes, user), "{bytes:#x} bytes at {at:#x}, {user:#x}");
    }
    for number in 0..3 {
        assert_eq!(read_into(&mut guest, number), OK, "slot {number}");
    }
    assert!(remove(&guest, at, SLOT, user));
    files[1].write_all_at(&[0xee; 512], 0).unwrap();
    for (number, status) in [(0, OK), (1, IOERR), (2, OK)] {
        assert_eq!(read_into(&mut guest, number), status, "slot {number}");
    }
    assert!(!holds_the_sector(&files[1]), "nothing is written there any more");
    assert!(!remove(&guest, at, SLOT, user), "it has gone");
    assert!(add(&guest, 1, &files[1]));
    assert_eq!(read_into(&mut guest, 1), OK);
    assert!(holds_the_sector(&files[1]));
}

#[test]
fn as_many_slots_are_taken_as_are_offered() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut guest = guest(&mut rig);
    let slots = guest.client.ask_u64(request::GET_MAX_MEM_SLOTS).unwrap();
    let file = memory();
    // The guest's own memory takes one.
    for number in 1..slots {
        assert!(add(&guest, number, &file), "{number} of {slots}");
    }
    assert!(!add(&guest, slots, &file), "all are taken");
    let (at, user) = place(7);
    assert!(remove(&guest, at, SLOT, user));
    assert!(add(&guest, slots, &file), "one has become free");
    assert_eq!(read_into(&mut guest, slots), OK);
    assert_eq!(guest.simple(0, IN, 9, DATA, 512).0, OK);
}

/// A log has to have a bit for each page, but only while it is used.
#[test]
fn a_small_log_that_is_not_used_keeps_no_memory_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let guest = guest(&mut rig);
    // MQ, LOG_SHMFD, REPLY_ACK, CONFIGURE_MEM_SLOTS.
    let protocol = words(&[1 | 1 << 1 | 1 << 3 | 1 << 15]);
    assert!(guest.client.acked(request::SET_PROTOCOL_FEATURES, &protocol, &[]).unwrap());
    let (file, log) = (memory(), memory());
    // Bits for 128 MiB of memory.
    assert!(guest.client.acked(request::SET_LOG_BASE, &words(&[4096, 0]), &[log.as_fd()]).unwrap());
    let (near, far) = (0, 1 << 16);
    assert!(add(&guest, far, &file), "nothing is logged");
    let (at, user) = place(far);
    assert!(remove(&guest, at, SLOT, user));
    let features = words(&[BASIC | F_PROTOCOL | LOG_ALL]);
    assert!(guest.client.acked(request::SET_FEATURES, &features, &[]).unwrap());
    assert!(!add(&guest, far, &file), "there is no bit for it");
    assert!(add(&guest, near, &file));
}

/// A layout changes under a queue: the region with its ring is taken away, and its parts are added. The queue waits
/// until its ring is there again.
#[test]
fn b42_a_region_with_a_ring_is_taken_away_and_its_parts_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1));
    let mut guest = guest(&mut rig);
    for round in 0..3 {
        assert!(remove(&guest, GUEST_BASE, MEMORY, GUEST_BASE + USER_DELTA), "round {round}");
        let (header, status) = (DATA - 0x1000, DATA - 0x1000 + 64);
        guest.put_header(header, IN, 9);
        guest.poke(DATA, &[0; 512]);
        let chain = [
            Desc { addr: header, len: 16, ..Desc::default() },
            Desc { addr: DATA, len: 512, flags: 2, next: 0 },
            Desc { addr: status, len: 1, flags: 2, next: 0 },
        ];
        guest.put_chain(0, 0, &chain);
        guest.offer(0, 0);
        let half = MEMORY / 2;
        for (offset, waits) in [(half, true), (0, false)] {
            let (at, user) = (GUEST_BASE + offset, GUEST_BASE + offset + USER_DELTA);
            let payload = words(&[0, at, half, user, offset]);
            let fds = [guest.memory.as_fd()];
            assert!(guest.client.acked(request::ADD_MEM_REG, &payload, &fds).unwrap());
            let patience = Duration::from_secs(if waits { 0 } else { 20 });
            let used = guest.next_used(0, patience);
            assert_eq!(used, if waits { None } else { Some((0, 513)) }, "round {round}");
        }
        assert_eq!(guest.peek(DATA, 512), [0x5a; 512]);
        assert!(guest.set_mem_table().unwrap());
    }
}
