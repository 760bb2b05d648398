//! What a session knows of the guest that was served before: whether its write cache is on, and that a
//! flush of it has failed.
#![allow(missing_docs)]

use ringway_aio::Null;
use ringway_disk::{CustomDisk, EngineKind, STATE_BYTES, STATE_FLUSH_FAILED, Source};
use ringway_ring::virtqueue::inflight_bytes;
use ringway_testkit::raw::{
    DATA, F_FLUSH, F_INDIRECT, F_VERSION_1, RawGuest, halves, inflight_payload, request,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

/// With CONFIG_WCE.
const FEATURES: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH | 1 << 11;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const OK: u8 = 0;
const IOERR: u8 = 1;
const QUEUES: u16 = 2;
const SIZE: u16 = 64;

fn rig() -> (Rig, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads).queues(QUEUES, 1));
    (rig, folder)
}

/// Where the note lies: behind the parts of all queues, as large as packed rings need them.
fn note_at() -> u64 {
    u64::from(QUEUES) * inflight_bytes(true, SIZE) as u64
}

/// A region of so many bytes that nobody has used, with this note.
fn region(bytes: u64, note: &[u8; 8]) -> File {
    let fd = memfd_create("write-cache-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    let file = File::from(fd);
    file.write_all_at(note, note_at()).unwrap();
    file
}

fn give(guest: &RawGuest, region: &File) {
    let bytes = region.metadata().unwrap().len();
    let payload = inflight_payload(bytes, 0, QUEUES, SIZE);
    assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
}

/// What the configuration space says.
fn cache_is_on(guest: &RawGuest) -> bool {
    let mut payload = halves(&[32, 1, 0]);
    payload.push(0);
    guest.client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
    guest.client.receive().unwrap().1[12] == 1
}

/// Bytes that were given to the file to be durable, of one sector written.
fn durable(rig: &Rig, guest: &mut RawGuest) -> u64 {
    let count = || rig.stats().iter().map(|worker| worker.disk.durable_bytes).sum::<u64>();
    let before = count();
    assert_eq!(guest.simple(0, OUT, 8, DATA, 512).0, OK);
    count() - before
}

/// A front-end may give more memory than its queues need: the note lies where it lies in the smallest.
#[test]
fn c06_the_note_of_a_large_region_counts() {
    for bytes in [note_at() + 64, note_at() + 128, 1 << 20] {
        let (mut rig, _folder) = rig();
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        let region = region(bytes, b"RWcache1");
        give(&guest, &region);
        assert!(guest.start_queue(0).unwrap());
        assert!(cache_is_on(&guest), "{bytes} bytes");
        assert_eq!(durable(&rig, &mut guest), 0, "{bytes} bytes");
        guest.stop_queue(0).unwrap();
    }
}

/// A front-end that has just read that there is a write cache may still be of a guest that switched it
/// off: it says no more than the region does.
#[test]
fn c06_a_region_that_says_off_outweighs_what_was_read() {
    let (mut rig, _folder) = rig();
    let mut guest = RawGuest::connect(rig.connect(), FEATURES);
    assert!(cache_is_on(&guest), "as it is offered");
    let region = region(note_at() + 64, b"RWcache0");
    give(&guest, &region);
    assert!(!cache_is_on(&guest), "before any queue runs");
    assert!(guest.start_queue(0).unwrap());
    assert_eq!(durable(&rig, &mut guest), 512);
    assert!(!cache_is_on(&guest));
}

/// What was not known of one guest says nothing of the next one.
#[test]
fn c06_the_next_guest_is_offered_a_cache_again() {
    let (mut rig, _folder) = rig();
    let mut guest = RawGuest::start(rig.connect(), 1, SIZE, FEATURES);
    assert!(!cache_is_on(&guest), "nobody knew whether it has one");
    guest.stop_queue(0).unwrap();
    drop(guest);
    rig.join_sessions();
    let guest = RawGuest::connect(rig.connect(), FEATURES);
    assert!(cache_is_on(&guest));
}

/// Who cannot switch it has what is offered, wherever its ring is.
#[test]
fn c06_a_guest_that_cannot_switch_its_cache_keeps_it() {
    let (mut rig, _folder) = rig();
    let mut guest = RawGuest::connect(rig.connect(), F_VERSION_1 | F_INDIRECT | F_FLUSH);
    guest.set_avail_index(0, 7);
    assert!(guest.start_queue(0).unwrap());
    assert!(cache_is_on(&guest));
    assert_eq!(durable(&rig, &mut guest), 0);
}

/// A flush had failed under an earlier process: that concerns the guest of then. One that has read the
/// configuration space and begins with a new ring is another one.
#[test]
fn c06_only_a_guest_that_begins_afresh_is_free_of_a_failed_flush() {
    for (asks, index, status) in
        [(true, 0, OK), (false, 0, IOERR), (true, 7, IOERR), (false, 7, IOERR)]
    {
        let page = tempfile::tempfile().unwrap();
        page.set_len(STATE_BYTES).unwrap();
        page.write_all_at(&STATE_FLUSH_FAILED.to_ne_bytes(), 0).unwrap();
        let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
        let mut disk = CustomDisk::new(1 << 20).open(None).unwrap();
        disk.keep_state(&page, Box::new(())).unwrap();
        let options = RigOptions::new(source, EngineKind::Null);
        let mut rig = Rig::with_engines(disk, &options, || Null::new(64).unwrap());
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        if asks {
            assert!(cache_is_on(&guest));
        }
        guest.set_avail_index(0, index);
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(guest.simple(0, FLUSH, 0, DATA, 0).0, status, "asks: {asks}, index {index}");
        // That it begins afresh is known of its first start only.
        cache_is_on(&guest);
        guest.stop_queue(0).unwrap();
        guest.reset_queue(0);
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(guest.simple(0, FLUSH, 0, DATA, 0).0, status, "asks: {asks}, index {index}");
    }
}
