//! Two back-ends on one image, and a guest that goes from one to the other: the lock of the image
//! belongs to the rings that run (hazard C17).

use ringway_disk::{EngineKind, lock_image, unlock_image};
use ringway_testkit::StallingStore;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_PACKED, F_PROTOCOL, F_VERSION_1, RawGuest, halves,
};
use ringway_testkit::raw::{request, words};
use ringway_testkit::rig::{Rig, RigOptions, image, open_patiently};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const LOG_ALL: u64 = 1 << 26;
const BASIC: u64 = F_VERSION_1 | F_FLUSH;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;
const SOON: Duration = Duration::from_secs(20);
/// Long enough for what must not happen to happen.
const A_WHILE: Duration = Duration::from_millis(300);
const BYTES: u64 = 1 << 20;

fn serves(path: &Path, incoming: bool) -> Rig {
    let mut options = RigOptions::buffered(path, EngineKind::Threads);
    options.queues = 2;
    options.disk.incoming = incoming;
    Rig::start(&options)
}

fn guest(rig: &mut Rig, features: u64) -> RawGuest {
    RawGuest::start(rig.connect(), 2, 64, features)
}

/// A migration begins or ends.
fn log_all(guest: &RawGuest, features: u64, on: bool) {
    let features = features | F_PROTOCOL | if on { LOG_ALL } else { 0 };
    assert!(guest.client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap());
}

fn stop(guest: &mut RawGuest) {
    for queue in 0..2 {
        guest.stop_queue(queue).unwrap();
    }
}

fn start(guest: &mut RawGuest) {
    for queue in 0..2 {
        assert!(guest.start_queue(queue).unwrap());
    }
}

fn write(guest: &mut RawGuest, sector: u64, byte: u8) {
    guest.poke(DATA, &[byte; 512]);
    assert_eq!(guest.simple(0, OUT, sector, DATA, 512).0, OK);
}

fn read(guest: &mut RawGuest, sector: u64) -> u8 {
    guest.poke(DATA, &[0xee; 512]);
    assert_eq!(guest.simple(1, IN, sector, DATA, 512).0, OK);
    guest.peek(DATA, 1)[0]
}

fn soon(what: &str, mut happens: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happens() {
        assert!(begun.elapsed() < SOON, "not yet: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// True if somebody has the image locked.
fn is_locked(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let locked = lock_image(&file, false).is_err();
    unlock_image(&file);
    locked
}

fn running(rig: &Rig) -> usize {
    rig.stats().iter().map(|worker| worker.queues.len()).sum()
}

fn a_guest_goes_there_and_back(ring: u64) {
    let features = BASIC | ring;
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut here = serves(&path, false);
    let mut there = serves(&path, true);
    let mut source = guest(&mut here, features);
    // The destination's front-end connects and reads the configuration while the source serves.
    let mut target = RawGuest::connect(there.connect(), features);
    target.size = 64;
    write(&mut source, 7, 1);
    log_all(&source, features, true);
    write(&mut source, 8, 2);
    assert!(here.export().is_locked() && !there.export().is_locked());

    // Its rings are told to start before the source has let go: they do not run.
    start(&mut target);
    std::thread::sleep(A_WHILE);
    assert_eq!((running(&here), running(&there)), (2, 0));
    write(&mut source, 9, 3);
    source.stop_queue(0).unwrap();
    std::thread::sleep(A_WHILE);
    assert!(here.export().is_locked(), "a ring runs still");
    source.stop_queue(1).unwrap();
    soon("the destination runs", || running(&there) == 2);
    assert!(!here.export().is_locked() && there.export().is_locked());
    assert_eq!([7, 8, 9].map(|sector| read(&mut target, sector)), [1, 2, 3]);
    write(&mut target, 7, 4);

    // The source starts again, by somebody's mistake: its guest waits, connected, and nothing is
    // written twice.
    start(&mut source);
    std::thread::sleep(A_WHILE);
    assert_eq!((running(&here), running(&there)), (0, 2));
    log_all(&target, features, true);
    stop(&mut target);
    soon("the source runs again", || running(&here) == 2);
    assert_eq!([7, 8].map(|sector| read(&mut source, sector)), [4, 2]);
}

#[test]
fn c17_a_guest_on_split_rings_goes_there_and_back() {
    a_guest_goes_there_and_back(0);
}

#[test]
fn c17_a_guest_on_packed_rings_goes_there_and_back() {
    a_guest_goes_there_and_back(F_PACKED);
}

/// A machine whose front-end has gone with a write that storage still has begins anew, in other memory, and is migrated: its
/// image is given up once that write is over, and its front-end is told to go on elsewhere then. It was never given up.
#[test]
fn c87_a_guest_leaves_once_what_was_left_before_it_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let store = StallingStore::new(usize::try_from(BYTES).unwrap());
    store.stall(Some(2));
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.queues = 2;
    let (disk, engines) = (open_patiently(&options.disk).unwrap(), store.clone());
    let mut here = Rig::with_engines(disk, &options, move || engines.engine());
    let mut gone = guest(&mut here, BASIC);
    gone.poke(DATA, &[2; 512]);
    let header = DATA - 0x4000;
    gone.put_header(header, OUT, 0);
    let chain = [
        Desc { addr: header, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 512, ..Desc::default() },
        Desc { addr: header + 64, len: 1, flags: 2, next: 0 },
    ];
    gone.put_chain(0, 30, &chain);
    gone.offer(0, 30);
    store.wait_stalled(1);
    gone.client.hang_up();
    here.join_sessions();

    let mut source = guest(&mut here, BASIC);
    write(&mut source, 8, 3);
    log_all(&source, BASIC, true);
    let goes_on = std::thread::spawn({
        let store = store.clone();
        move || {
            std::thread::sleep(A_WHILE);
            store.stall(None);
        }
    });
    stop(&mut source);
    soon("it is given up", || !here.export().is_locked());
    assert_eq!((store.byte(0), is_locked(&path)), (2, false), "the write was over by then");
    goes_on.join().unwrap();
}

/// A cancelled migration: the source goes on, whether the lock was given up by then or not.
#[test]
fn c17_the_source_takes_its_lock_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut here = serves(&path, false);
    let mut source = guest(&mut here, BASIC);
    for round in 0..50 {
        log_all(&source, BASIC, true);
        stop(&mut source);
        if round % 2 == 0 {
            soon("it is given up", || !here.export().is_locked());
            assert!(!is_locked(&path));
        }
        start(&mut source);
        write(&mut source, round, 9);
        assert!(is_locked(&path));
        log_all(&source, BASIC, false);
    }
}

/// A guest that is paused or reset stays where it is, and nobody steals its disk meanwhile; so does one
/// whose front-end is killed.
#[test]
fn c17_without_a_migration_the_lock_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut here = serves(&path, false);
    let mut source = guest(&mut here, BASIC);
    let kept = |what: &str| {
        std::thread::sleep(A_WHILE);
        assert!(here.export().is_locked() && is_locked(&path), "{what}");
    };
    stop(&mut source);
    kept("paused");
    start(&mut source);
    write(&mut source, 1, 1);
    source.client.acked(request::RESET_DEVICE, &[], &[]).unwrap();
    kept("reset");
    drop(source);
    kept("disconnected");

    // In the middle of a migration, with its rings running.
    let mut source = guest(&mut here, BASIC);
    log_all(&source, BASIC, true);
    write(&mut source, 1, 2);
    drop(source);
    here.join_sessions();
    assert!(here.export().is_locked() && is_locked(&path), "killed");
    let mut source = guest(&mut here, BASIC);
    assert_eq!(read(&mut source, 1), 2);
}

/// Rings that are disabled, as cloud-hypervisor has it, have stopped as well.
#[test]
fn c17_disabled_rings_have_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut here = serves(&path, false);
    let source = guest(&mut here, BASIC);
    let enable = |queue, on| {
        let payload = halves(&[queue, u32::from(on)]);
        assert!(source.client.acked(request::SET_VRING_ENABLE, &payload, &[]).unwrap());
    };
    log_all(&source, BASIC, true);
    enable(0, false);
    std::thread::sleep(A_WHILE);
    assert!(is_locked(&path));
    enable(1, false);
    soon("it is given up", || !is_locked(&path));
    enable(1, true);
    soon("it is taken back", || is_locked(&path));
    assert_eq!(running(&here), 1);
}

/// A front-end that gives up waiting leaves nothing behind that would take the lock later.
#[test]
fn c17_who_has_gone_does_not_take_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut here = serves(&path, false);
    let mut there = serves(&path, true);
    let mut source = guest(&mut here, BASIC);
    let target = guest(&mut there, BASIC);
    drop(target);
    there.join_sessions();
    let mut target = guest(&mut there, BASIC);
    stop(&mut target);
    log_all(&source, BASIC, true);
    stop(&mut source);
    soon("it is given up", || !here.export().is_locked());
    std::thread::sleep(A_WHILE);
    assert!(!is_locked(&path) && !there.export().is_locked());
    start(&mut target);
    soon("the destination runs", || running(&there) == 2);
}

/// What changed while another daemon had the image is seen: content, and size.
#[test]
fn c17_what_changed_meanwhile_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut there = serves(&path, true);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    lock_image(&file, false).unwrap();
    let mut target = guest(&mut there, BASIC);
    assert_eq!(there.export().disk().capacity(), BYTES);
    let refused = there.export().resize(Some(4 * BYTES), false).unwrap_err();
    assert!(refused.to_string().contains("not locked"), "{refused}");
    file.set_len(2 * BYTES).unwrap();
    file.write_all_at(&[5; 512], 2 * BYTES - 512).unwrap();
    assert_eq!(running(&there), 0);
    unlock_image(&file);
    soon("it runs", || running(&there) == 2);
    assert_eq!(there.export().disk().capacity(), 2 * BYTES);
    assert_eq!(read(&mut target, 2 * BYTES / 512 - 1), 5);
    assert!(there.export().resize(Some(4 * BYTES), false).is_ok());
}

/// A size that no disk can have keeps the rings from running, not the front-end from staying.
#[test]
fn c17_an_odd_size_is_waited_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), BYTES);
    let mut there = serves(&path, true);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(BYTES + 1).unwrap();
    let mut target = guest(&mut there, BASIC);
    std::thread::sleep(A_WHILE);
    assert_eq!(running(&there), 0);
    file.set_len(BYTES).unwrap();
    soon("it runs", || running(&there) == 2);
    write(&mut target, 0, 1);
}
