//! A disk fails, requests are held, and their queue is stopped: if the daemon does that they stay in the record
//! of what is in flight, for whoever goes on; if the front-end does they fail, because its guest may go on
//! where nobody knows of the record.

use ringway_aio::{Fault, Faulty, Io, Null};
use ringway_disk::{EngineKind, ErrorPolicy, OnError, OpenOptions, Source, open};
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_PROTOCOL, F_VERSION_1, RawGuest, halves, inflight_payload, request,
    words,
};
use ringway_testkit::rig::{Rig, RigOptions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const BASIC: u64 = F_VERSION_1 | F_FLUSH;
const LOG_ALL: u64 = 1 << 26;
const SIZE: u16 = 64;
const OK: u8 = 0;
const IOERR: u8 = 1;
const WRITE: u16 = 2;
const STATUS: u64 = DATA + 64;
const SOON: Duration = Duration::from_secs(20);

/// A disk that is broken while the flag says so, and holds what fails.
fn scene() -> (Rig, Arc<AtomicBool>) {
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    let disk = open(&OpenOptions::new(source.clone())).unwrap();
    disk.set_error_policy(ErrorPolicy {
        on_read: OnError::Hold,
        on_write: OnError::Hold,
        on_enospc: Some(OnError::Hold),
        hold_timeout: None,
    });
    let broken = Arc::new(AtomicBool::new(true));
    let choice = Arc::clone(&broken);
    let rig = Rig::with_engines(disk, &RigOptions::new(source, EngineKind::Null), move || {
        let broken = Arc::clone(&choice);
        let choose = move |_: &Io<'_>| broken.load(SeqCst).then_some(Fault::Error(libc::EIO));
        Faulty::new(Null::new(64).unwrap(), 512, choose)
    });
    (rig, broken)
}

fn memory() -> File {
    let fd = memfd_create("held-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 1 << 16).unwrap();
    fd.into()
}

/// A guest, with a record if there is a file for it, whose one read is held.
fn held(rig: &mut Rig, record: Option<&File>) -> RawGuest {
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    guest.size = SIZE;
    if let Some(file) = record {
        let payload = inflight_payload(1 << 16, 0, 1, SIZE);
        assert!(guest.client.set_inflight(&payload, file.as_fd()).unwrap());
    }
    assert!(guest.start_queue(0).unwrap());
    guest.put_header(DATA, 0, 0);
    guest.poke(STATUS, &[0xee]);
    let chain = [
        Desc { addr: DATA, len: 16, ..Desc::default() },
        Desc { addr: DATA + 4096, len: 512, flags: WRITE, next: 0 },
        Desc { addr: STATUS, len: 1, flags: WRITE, next: 0 },
    ];
    guest.put_chain(0, 0, &chain);
    guest.offer(0, 0);
    let begun = Instant::now();
    while rig.stats()[0].queues[0].held == 0 {
        assert!(begun.elapsed() < SOON, "it is not held");
        std::thread::sleep(Duration::from_millis(1));
    }
    guest
}

/// The version of the record, and whether its first chain is in flight.
fn recorded(file: &File) -> (u16, bool) {
    let (mut version, mut chain) = ([0; 2], [0; 1]);
    file.read_exact_at(&mut version, 8).unwrap();
    file.read_exact_at(&mut chain, 16).unwrap();
    (u16::from_le_bytes(version), chain == [1])
}

fn stop(guest: &mut RawGuest) {
    assert_eq!(guest.stop_queue(0).unwrap(), 1, "it was taken");
    // A record that says nothing is made new once the answer is out, and before the next message.
    guest.client.ask_u64(request::GET_FEATURES).unwrap();
}

#[test]
fn c18_what_is_held_stays_in_the_record_of_a_disk_that_is_paused() {
    let (mut rig, broken) = scene();
    let file = memory();
    let mut guest = held(&mut rig, Some(&file));
    rig.export().pause().unwrap();
    assert_eq!(guest.next_used(0, Duration::ZERO), None, "it is not answered");
    assert_eq!(guest.peek(STATUS, 1), [0xee]);
    assert_eq!(recorded(&file), (1, true), "whoever goes on finds it");
    broken.store(false, SeqCst);
    rig.export().resume().unwrap();
    assert_eq!(guest.next_used(0, SOON), Some((0, 513)));
    assert_eq!(guest.peek(STATUS, 1), [OK]);
    stop(&mut guest);
    assert_eq!(recorded(&file), (0, false), "nothing is left");
}

#[test]
fn c18_what_is_held_without_a_record_fails_before_its_queue_has_stopped() {
    let (mut rig, _broken) = scene();
    let mut guest = held(&mut rig, None);
    stop(&mut guest);
    assert_eq!(guest.next_used(0, Duration::ZERO), Some((0, 1)));
    assert_eq!(guest.peek(STATUS, 1), [IOERR]);
}

/// As QEMU stops a guest that is saved, or moved: it disables the queue, and asks where it stopped. Or does not
/// disable it before.
#[test]
fn b36_what_is_held_fails_before_a_front_end_learns_where_its_queue_has_stopped() {
    for disables in [false, true] {
        let (mut rig, _broken) = scene();
        let file = memory();
        let mut guest = held(&mut rig, Some(&file));
        if disables {
            let disable = halves(&[0, 0]);
            assert!(guest.client.acked(request::SET_VRING_ENABLE, &disable, &[]).unwrap());
        }
        stop(&mut guest);
        assert_eq!(guest.next_used(0, Duration::ZERO), Some((0, 1)));
        assert_eq!(guest.peek(STATUS, 1), [IOERR]);
        assert_eq!(recorded(&file), (0, false), "nothing stays behind");
    }
}

/// While the disk is paused nothing is carried out: the front-end, whose guest is about to go elsewhere, waits.
#[test]
fn b36_a_front_end_is_told_where_a_paused_queue_is_once_nothing_is_owed() {
    for mended in [false, true] {
        let (mut rig, broken) = scene();
        let file = memory();
        let mut guest = held(&mut rig, Some(&file));
        rig.export().pause().unwrap();
        broken.store(!mended, SeqCst);
        let disable = halves(&[0, 0]);
        assert!(guest.client.acked(request::SET_VRING_ENABLE, &disable, &[]).unwrap());
        guest.client.send(request::GET_VRING_BASE, 0, &disable, &[]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(recorded(&file), (1, true));
        assert_eq!(guest.peek(STATUS, 1), [0xee]);
        rig.export().resume().unwrap();
        let (_, answer) = guest.client.receive().unwrap();
        assert_eq!(answer, halves(&[0, 1]), "it was taken");
        let (status, used) = if mended { (OK, 513) } else { (IOERR, 1) };
        assert_eq!(guest.next_used(0, Duration::ZERO), Some((0, used)));
        assert_eq!(guest.peek(STATUS, 1), [status]);
        guest.client.ask_u64(request::GET_FEATURES).unwrap();
        assert_eq!(recorded(&file), (0, false));
    }
}

/// Where it goes nobody may know of the record.
#[test]
fn c18_what_is_held_of_a_guest_that_is_migrated_fails() {
    let (mut rig, _broken) = scene();
    let (file, log) = (memory(), memory());
    let mut guest = held(&mut rig, Some(&file));
    let client = &guest.client;
    // MQ, LOG_SHMFD, REPLY_ACK.
    let protocol = words(&[1 | 1 << 1 | 1 << 3]);
    assert!(client.acked(request::SET_PROTOCOL_FEATURES, &protocol, &[]).unwrap());
    assert!(client.acked(request::SET_LOG_BASE, &words(&[1 << 16, 0]), &[log.as_fd()]).unwrap());
    let features = words(&[BASIC | F_PROTOCOL | LOG_ALL]);
    assert!(client.acked(request::SET_FEATURES, &features, &[]).unwrap());
    stop(&mut guest);
    assert_eq!(guest.next_used(0, Duration::ZERO), Some((0, 1)));
    assert_eq!(guest.peek(STATUS, 1), [IOERR]);
    assert_eq!(recorded(&file), (0, false));
}
