//! What a session knows of the guest that was served before: whether its write cache is on, and that a
//! flush of it has failed.

use ringway_aio::{Immediate, IoOp, Null};
use ringway_disk::{
    CacheMode, CustomDisk, Disk, EngineKind, STATE_BYTES, STATE_FLUSH_FAILED, Source, open,
};
use ringway_ring::virtqueue::inflight_bytes;
use ringway_testkit::LateStore;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PROTOCOL, F_VERSION_1, RawGuest, halves, inflight_payload,
    request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;
use tempfile::TempDir;

/// With CONFIG_WCE.
const FEATURES: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH | 1 << 11;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const OK: u8 = 0;
const IOERR: u8 = 1;
const QUEUES: u16 = 2;
const SIZE: u16 = 64;

fn rig() -> (Rig, TempDir) {
    rig_with(CacheMode::Writeback)
}

fn rig_with(cache: CacheMode) -> (Rig, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads).queues(QUEUES, 1);
    options.disk.cache = Some(cache);
    (Rig::start(&options), folder)
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

/// Switches it; true if that was taken.
fn set_cache(guest: &RawGuest, on: bool) -> bool {
    let mut payload = halves(&[32, 1, 0]);
    payload.push(on.into());
    guest.client.acked(request::SET_CONFIG, &payload, &[]).unwrap()
}

/// Bytes that were given to the file to be durable, of one sector written.
fn durable(rig: &Rig, guest: &mut RawGuest) -> u64 {
    let count = || rig.stats().iter().map(|worker| worker.disk.durable_bytes).sum::<u64>();
    let before = count();
    assert_eq!(guest.simple(0, OUT, 8, DATA, 512).0, OK);
    count() - before
}

/// VIRTIO 1.2 §5.2.6.2: where there is no cache, or no way to flush it, each write is durable; also if a guest
/// would like to have one, or the region of a disk that had one says that it is on.
#[test]
fn c06_each_write_is_durable_without_a_cache_or_a_flush() {
    const FLUSHES: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
    for (cache, features, bytes) in [
        (CacheMode::Writethrough, FLUSHES, 512),
        (CacheMode::Writethrough, FLUSHES & !F_FLUSH, 512),
        (CacheMode::Writethrough, FEATURES, 512),
        (CacheMode::Writethrough, FEATURES & !F_FLUSH, 512),
        (CacheMode::Writeback, FLUSHES & !F_FLUSH, 512),
        (CacheMode::Writeback, FLUSHES, 0),
    ] {
        let (mut rig, _folder) = rig_with(cache);
        let mut guest = RawGuest::connect(rig.connect(), features);
        if cache == CacheMode::Writethrough {
            give(&guest, &region(note_at() + 64, b"RWcache1"));
            assert!(!cache_is_on(&guest), "{cache:?}, {features:#x}");
        }
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(durable(&rig, &mut guest), bytes, "{cache:?}, {features:#x}");
        if cache == CacheMode::Writethrough && features & FEATURES == FEATURES {
            assert!(set_cache(&guest, true), "a wish");
            assert!(!cache_is_on(&guest));
            assert_eq!(durable(&rig, &mut guest), bytes);
        }
    }
}

/// A front-end that reconnects says nothing, and as often as it likes: what its guest has set stays.
#[test]
fn c06_a_cache_that_is_off_stays_off_for_whoever_says_nothing() {
    let (mut rig, _folder) = rig();
    let guest = RawGuest::start(rig.connect(), 1, SIZE, FEATURES);
    assert!(set_cache(&guest, true) && set_cache(&guest, false));
    drop(guest);
    rig.join_sessions();
    for round in 0..3 {
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        guest.set_avail_index(0, 7);
        assert!(guest.start_queue(0).unwrap());
        assert_eq!(durable(&rig, &mut guest), 512, "round {round}");
        assert!(!cache_is_on(&guest), "round {round}");
        drop(guest);
        rig.join_sessions();
    }
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

/// Serves a disk of which a flush had failed under an earlier process, and the page that says so.
fn after_a_failed_flush(disk: Disk) -> (Rig, File) {
    let page = tempfile::tempfile().unwrap();
    page.set_len(STATE_BYTES).unwrap();
    page.write_all_at(&STATE_FLUSH_FAILED.to_ne_bytes(), 0).unwrap();
    disk.keep_state(&page, Arc::new(())).unwrap();
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let options = RigOptions::new(source, EngineKind::Null).queues(QUEUES, 1);
    (Rig::with_engines(disk, &options, || Null::new(64).unwrap()), page)
}

/// A flush had failed under an earlier process: that concerns the guest of then. One that has read the
/// configuration space and begins with a new ring is another one.
#[test]
fn c06_only_a_guest_that_begins_afresh_is_free_of_a_failed_flush() {
    for (asks, index, status) in
        [(true, 0, OK), (false, 0, IOERR), (true, 7, IOERR), (false, 7, IOERR)]
    {
        let (mut rig, _page) = after_a_failed_flush(CustomDisk::new(1 << 20).open(None).unwrap());
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

/// A guest that goes on has a queue that it did not use yet: that one begins, and says nothing of the guest. Its
/// front-end tells where all queues are before it starts one, or one after the other; then it may reset its device.
#[test]
fn b63_a_queue_that_was_not_used_does_not_speak_for_its_guest() {
    for (told, used) in [(true, 1), (false, 1), (true, 0)] {
        let (mut rig, page) = after_a_failed_flush(CustomDisk::new(1 << 20).open(None).unwrap());
        let failed = || {
            let mut word = [0; 8];
            page.read_exact_at(&mut word, 0).unwrap();
            u64::from_ne_bytes(word) & STATE_FLUSH_FAILED != 0
        };
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        assert!(cache_is_on(&guest));
        guest.set_avail_index(used, 7);
        if told {
            let base = halves(&[used, 7]);
            assert!(guest.client.acked(request::SET_VRING_BASE, &base, &[]).unwrap());
        }
        for queue in 0..2 {
            assert!(guest.start_queue(queue).unwrap());
            assert!(failed() || !told, "queue {used} goes on");
        }
        assert!(failed(), "told: {told}, queue {used} goes on");
        assert!(!cache_is_on(&guest), "nor is it known whether it has a cache");
        for queue in 0..2 {
            assert_eq!(guest.simple(queue, FLUSH, 0, DATA, 0).0, IOERR, "told: {told}");
        }
        // Which is what a machine does that wakes up, too.
        assert!(guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap());
        let features = words(&[FEATURES | F_PROTOCOL]);
        assert!(guest.client.acked(request::SET_FEATURES, &features, &[]).unwrap());
        cache_is_on(&guest);
        for queue in 0..2 {
            guest.reset_queue(queue);
            assert!(guest.start_queue(queue).unwrap());
            assert_eq!(guest.simple(queue, FLUSH, 0, DATA, 0).0, IOERR, "told: {told}");
        }
        drop(guest);
        rig.join_sessions();
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        assert!(cache_is_on(&guest));
        for queue in 0..2 {
            assert!(guest.start_queue(queue).unwrap());
            assert_eq!(guest.simple(queue, FLUSH, 0, DATA, 0).0, OK, "it begins afresh");
        }
        assert!(!failed());
    }
}

/// A guest that has switched its cache off flushes no more. So that is answered once all it wrote before is
/// durable, and where that cannot be, because a flush has failed, the answer says so each time; the cache
/// is off all the same. What is never flushed needs no sync.
#[test]
fn c06_a_cache_is_off_once_what_was_written_before_is_durable() {
    let custom = |cache| CustomDisk { cache, ..CustomDisk::new(1 << 20) }.open(None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let mut read_only = RigOptions::buffered(&path, EngineKind::Threads).disk;
    read_only.read_only = true;
    for (what, disk, taken) in [
        ("a cached disk", custom(CacheMode::Writeback), false),
        ("one whose device may have a cache", custom(CacheMode::None), false),
        ("one that is never flushed", custom(CacheMode::Unsafe), true),
        ("one that is not written", open(&read_only).unwrap(), true),
    ] {
        let (mut rig, _page) = after_a_failed_flush(disk);
        let mut guest = RawGuest::connect(rig.connect(), FEATURES);
        assert!(set_cache(&guest, true), "{what}");
        assert!(guest.start_queue(0).unwrap(), "{what}");
        for round in 0..2 {
            assert_eq!(set_cache(&guest, false), taken, "{what}, round {round}");
            assert!(!cache_is_on(&guest), "{what}, round {round}");
            assert_eq!(guest.simple(0, IN, 8, DATA, 512).0, OK, "{what}: its queue goes on");
        }
        assert!(set_cache(&guest, true) && cache_is_on(&guest), "{what}");
    }
}

/// Nor is a write durable that is under way: it is waited for, and synced.
#[test]
fn c06_a_write_under_way_is_durable_when_the_cache_is_off() {
    let mount = tempfile::tempdir().unwrap();
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let mut rig = Rig::start(&RigOptions::buffered(store.path(), EngineKind::Threads));
    let mut guest = RawGuest::connect(rig.connect(), FEATURES);
    assert!(set_cache(&guest, true));
    assert!(guest.start_queue(0).unwrap());
    assert_eq!(guest.simple(0, OUT, 8, DATA, 4096).0, OK);
    let before = store.syncs().len();
    store.set_delay(Duration::from_millis(200));
    guest.put_header(DATA - 64, OUT, 16);
    let chain = [
        Desc { addr: DATA - 64, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 4096, ..Desc::default() },
        Desc { addr: DATA - 32, len: 1, flags: 2, next: 0 },
    ];
    guest.put_chain(0, 0, &chain);
    guest.offer(0, 0);
    rig.wait_in_flight(1);
    assert!(set_cache(&guest, false));
    let landed = store.log()[1].landed.expect("it is still on its way");
    let synced = store.syncs()[before..].last().copied().expect("nobody has synced it");
    assert!(landed <= synced, "synced before it was there");
    assert_eq!(guest.next_used(0, Duration::from_secs(20)), Some((0, 1)));
}

/// Where the host has no sync for a disk, which is with a server or wherever a custom engine has it, the engines
/// flush it that have answered: for a guest that switches its cache off, and for who wants a moment of rest.
#[test]
fn c06_what_only_engines_can_flush_is_flushed_by_them() {
    let (flushes, fails) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (counted, failing) = (Arc::clone(&flushes), Arc::clone(&fails));
    let make = move || {
        let (counted, failing) = (Arc::clone(&counted), Arc::clone(&failing));
        Immediate::new(64, move |io: &ringway_aio::Io<'_>| match io.op {
            IoOp::Sync => {
                counted.fetch_add(1, SeqCst);
                if failing.load(SeqCst) { -libc::EIO } else { 0 }
            }
            op if op.moves_data() => i32::try_from(io.len).unwrap(),
            _ => 0,
        })
        .unwrap()
    };
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let mut options = RigOptions::new(source, EngineKind::Null).queues(QUEUES, 2);
    options.queue_size = SIZE;
    let mut rig = Rig::with_engines(CustomDisk::new(1 << 20).open(None).unwrap(), &options, make);
    let mut guest = RawGuest::connect(rig.connect(), FEATURES);
    assert!(set_cache(&guest, true));
    assert!(rig.export().drain().is_ok());
    assert_eq!(flushes.load(SeqCst), 0, "nothing was answered");
    assert!(guest.start_queue(0).unwrap());
    assert_eq!(guest.simple(0, OUT, 8, DATA, 512).0, OK);
    assert!(rig.export().drain().is_ok());
    assert_eq!(flushes.load(SeqCst), 1, "by the worker of its queue");
    assert!(set_cache(&guest, false));
    assert_eq!(flushes.load(SeqCst), 2);
    // What is durable by itself ends with a flush of its own.
    assert!(set_cache(&guest, true));
    assert_eq!(guest.simple(0, OUT, 8, DATA, 512).0, OK);
    let before = flushes.load(SeqCst);
    fails.store(true, SeqCst);
    assert!(!set_cache(&guest, false), "it is not durable");
    assert!(!cache_is_on(&guest));
    fails.store(false, SeqCst);
    assert!(!set_cache(&guest, false), "nor is it now: one has failed");
    assert_eq!(flushes.load(SeqCst), before + 1);
    assert_eq!(guest.simple(0, FLUSH, 0, DATA, 0).0, IOERR);
    assert!(rig.export().drain().is_err());
}
