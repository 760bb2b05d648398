//! Row B12 of the table in docs/hazards.md: a disk changes its size, or rests, while guests use it.

use ringway_disk::{EngineKind, ResizeError, Source};
use ringway_driver::{BlkQueue, Device, Options, Status};
use ringway_export::{ChangeError, GuestNotice, Resized};
use ringway_testkit::pattern;
use ringway_testkit::raw::{
    DATA, F_FLUSH, F_INDIRECT, F_VERSION_1, RawGuest, halves, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Need, skip};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const IN: u32 = 0;
const OK: u8 = 0;
const IOERR: u8 = 1;
/// MQ, REPLY_ACK, BACKEND_REQ, CONFIG, of the protocol's features.
const LISTENS: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9;

fn listening() -> Options {
    Options::new().queues(0).watch_config(true)
}

/// A disk that moves no data and takes its time.
fn slow(latency_us: u32, drain_max: Duration) -> Rig {
    let source = Source::Null { bytes: MIB, latency_us };
    let mut options = RigOptions::new(source, EngineKind::NullAfter(latency_us));
    options.drain_max = drain_max;
    Rig::start(&options)
}

fn request(device: &Device, queue: &mut BlkQueue<u64>, write: bool, offset: u64) -> Status {
    let mut buffer = device.pool().alloc(4096).unwrap();
    buffer.fill(9);
    match write {
        true => queue.write(offset, buffer, 0).unwrap(),
        false => queue.read(offset, buffer, 0).unwrap(),
    }
    assert!(queue.wait(Some(PATIENCE)).unwrap(), "a request hangs");
    queue.pop().unwrap().unwrap().status
}

/// The front-end was told and finds the new size.
fn learns(device: &mut Device, bytes: u64) {
    let events = device.config_events().expect("it listens");
    let mut polled = [rustix::event::PollFd::new(&events, rustix::event::PollFlags::IN)];
    let patience = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&patience)), Ok(1), "nobody told it");
    assert!(device.config_changed().unwrap());
    assert_eq!(device.capacity(), bytes);
    assert!(!device.config_changed().unwrap(), "told once");
}

/// Writes and verifies the first MiB without a pause until told to stop; returns how often.
fn load(
    device: &Device,
    mut queue: BlkQueue<u64>,
    stop: Arc<AtomicBool>,
) -> std::thread::JoinHandle<u64> {
    let pool = device.pool();
    std::thread::spawn(move || {
        let mut sequence = 0;
        while !stop.load(Relaxed) {
            sequence += 1;
            for part in 0..16u64 {
                let mut buffer = pool.alloc(4096).unwrap();
                pattern::fill(&mut buffer, 1, part * 8, sequence);
                queue.write(part * 4096, buffer, part).unwrap();
            }
            assert!(queue.wait_for(16, Some(PATIENCE)).unwrap(), "a write hangs");
            assert!(queue.completions().all(|done| done.is_ok()));
            for part in 0..16u64 {
                queue.read(part * 4096, pool.alloc(4096).unwrap(), part).unwrap();
            }
            assert!(queue.wait_for(16, Some(PATIENCE)).unwrap(), "a read hangs");
            for done in queue.completions().collect::<Vec<_>>() {
                let (ok, part) = (done.is_ok(), done.ctx);
                let buffer = done.into_buffer().unwrap();
                assert!(ok && pattern::first_difference(&buffer, 1, part * 8, sequence).is_none());
            }
        }
        sequence
    })
}

fn resized(from: u64, to: u64, notice: GuestNotice) -> Resized {
    Resized { from, to, notice }
}

/// Grows and shrinks a hundred times while another queue writes and verifies.
#[test]
fn b12_resize_under_load() {
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let usable = ringway_export::usable_engines();
        let works = usable.iter().find(|(kind, _)| *kind == engine);
        if let Some((_, Err(why))) = works {
            skip(Need::IoUring, why);
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path(), MIB);
        let mut rig = Rig::start(&RigOptions::buffered(&path, engine).queues(2, 2));
        let mut device = listening().over(rig.connect()).unwrap();
        let mut queues = device.queues().unwrap();
        let (mut mine, stop) = (queues.pop().unwrap(), Arc::new(AtomicBool::new(false)));
        let worker = load(&device, queues.pop().unwrap(), Arc::clone(&stop));
        let len = |path: &Path| path.metadata().unwrap().len();
        for round in 1..=50 {
            let large = MIB + round * 4096;
            assert_eq!(request(&device, &mut mine, true, large - 4096), Status::IoError);
            let answer = rig.export().resize(Some(large), false).unwrap();
            assert_eq!(answer, resized(MIB, large, GuestNotice::Yes));
            learns(&mut device, large);
            assert_eq!(request(&device, &mut mine, true, large - 4096), Status::Ok);
            assert_eq!(len(&path), large);

            let error = rig.export().resize(Some(MIB), false).unwrap_err();
            assert!(matches!(error, ChangeError::Shrinks { .. }), "{error}");
            assert_eq!((device.capacity(), len(&path)), (large, large), "nothing has changed");
            let answer = rig.export().resize(Some(MIB), true).unwrap();
            assert_eq!(answer, resized(large, MIB, GuestNotice::Yes));
            learns(&mut device, MIB);
            assert_eq!(len(&path), MIB);
            for write in [true, false] {
                assert_eq!(request(&device, &mut mine, write, MIB), Status::IoError);
                assert_eq!(request(&device, &mut mine, write, MIB - 4096), Status::Ok);
            }
        }
        stop.store(true, Relaxed);
        assert!(worker.join().unwrap() > 0);
    }
}

/// What is in flight beyond the new end ends first; the file is not cut under it.
#[test]
fn b12_shrinking_waits_for_what_is_in_flight() {
    let mut rig = slow(1_000_000, PATIENCE);
    let mut device = listening().over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    let begun = Instant::now();
    queue.read(MIB - 4096, device.pool().alloc(4096).unwrap(), 1).unwrap();
    queue.submit().unwrap();
    rig.wait_in_flight(1);
    rig.export().resize(Some(MIB / 2), true).unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "it did not wait");
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert_eq!(queue.pop().unwrap().unwrap().status, Status::Ok, "begun before, ended well");
    assert_eq!(request(&device, &mut queue, false, MIB - 4096), Status::IoError);
    assert_eq!(request(&device, &mut queue, false, 0), Status::Ok);
}

/// A stuck disk keeps its size, and nobody waits for ever.
#[test]
fn b12_a_stuck_disk_does_not_shrink() {
    let mut rig = slow(4_000_000, Duration::from_millis(100));
    let mut device = listening().over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    queue.read(MIB - 4096, device.pool().alloc(4096).unwrap(), 1).unwrap();
    queue.submit().unwrap();
    rig.wait_in_flight(1);
    let begun = Instant::now();
    let error = rig.export().resize(Some(MIB / 2), true).unwrap_err();
    assert!(matches!(error, ChangeError::Stuck { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_millis(3500));
    assert_eq!(rig.disk().capacity(), MIB);
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert_eq!(queue.pop().unwrap().unwrap().status, Status::Ok);
}

/// The answer says whether the guest knows: it may not listen, not read, or not be there.
#[test]
fn b12_who_was_told_of_a_new_size() {
    let mut rig = slow(0, PATIENCE);
    let sizes = |n: u64| Some(MIB + n * 4096);
    assert_eq!(rig.export().resize(sizes(1), false).unwrap().notice, GuestNotice::NobodyThere);
    let mut unasked = Options::new().over(rig.connect()).unwrap();
    assert_eq!(rig.export().resize(sizes(2), false).unwrap().notice, GuestNotice::NotListening);
    assert!(!unasked.config_changed().unwrap());
    assert_eq!(unasked.refresh().unwrap().capacity, MIB + 2 * 4096, "it can still ask");
    drop(unasked);
    rig.join_sessions();

    // One that listens and does not read: no more than its own messages are lost.
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    let ours = listen(&guest);
    // QEMU 7.2 would not survive it before its guest has started the device.
    assert_eq!(rig.export().resize(sizes(3), false).unwrap().notice, GuestNotice::Later);
    assert!(heard(&ours).is_empty());
    assert!(guest.start_queue(0).unwrap());
    assert_eq!(heard(&ours), changed(), "told when it starts");
    let notices: Vec<_> =
        (4..2000).map(|n| rig.export().resize(sizes(n), false).unwrap().notice).collect();
    assert_eq!(notices[0], GuestNotice::Yes);
    assert!(notices.contains(&GuestNotice::Undelivered), "the socket never fills");
    assert_eq!(notices.last(), Some(&GuestNotice::NotListening), "not again after half a message");
    assert_eq!(guest.simple(0, IN, 0, DATA, 512).0, OK, "its connection lives");
    // Nor does a descriptor that is no socket harm anybody.
    let file = tempfile::tempfile().unwrap();
    assert!(guest.client.acked(request::SET_BACKEND_REQ_FD, &[], &[file.as_fd()]).unwrap());
    assert_eq!(rig.export().resize(sizes(1), true).unwrap().notice, GuestNotice::Undelivered);
    // Nor is one told that has stopped its queues.
    let ours = listen(&guest);
    guest.stop_queue(0).unwrap();
    assert_eq!(rig.export().resize(sizes(2), false).unwrap().notice, GuestNotice::Later);
    assert!(heard(&ours).is_empty());
}

/// A front-end may have a channel for what the back-end says, and not say that it understands this.
#[test]
fn b12_who_did_not_ask_for_it_is_not_told() {
    const CONFIG: u64 = 1 << 9;
    const BACKEND_REQ: u64 = 1 << 5;
    let mut rig = slow(0, PATIENCE);
    for (size, missing) in (1..).zip([CONFIG, BACKEND_REQ, CONFIG | BACKEND_REQ]) {
        let mut guest = RawGuest::connect(rig.connect(), BASIC);
        let ours = listen_with(&guest, LISTENS & !missing);
        assert!(guest.start_queue(0).unwrap());
        let answer = rig.export().resize(Some(MIB + size * 4096), false).unwrap();
        assert_eq!(answer.notice, GuestNotice::NotListening, "without {missing:#x}");
        assert!(heard(&ours).is_empty(), "without {missing:#x}");
        drop(guest);
        rig.join_sessions();
    }
}

/// Listens for what the back-end says by itself.
fn listen(guest: &RawGuest) -> UnixStream {
    listen_with(guest, LISTENS)
}

fn listen_with(guest: &RawGuest, protocol: u64) -> UnixStream {
    let protocol = words(&[protocol]);
    guest.client.send(request::SET_PROTOCOL_FEATURES, 0, &protocol, &[]).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(guest.client.acked(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap());
    ours.set_nonblocking(true).unwrap();
    ours
}

/// What it has said by now.
fn heard(mut ours: &UnixStream) -> Vec<u8> {
    let mut message = [0; 64];
    let got = std::io::Read::read(&mut ours, &mut message).unwrap_or(0);
    message[..got].to_vec()
}

/// CONFIG_CHANGE_MSG, version 1, no payload.
fn changed() -> Vec<u8> {
    [2u32, 1, 0].map(u32::to_ne_bytes).concat()
}

/// QEMU does not read the configuration space when it reconnects. So whoever has not read the size in
/// this connection is told when its first queue starts: what it has missed may have happened under an
/// earlier daemon.
#[test]
fn a_front_end_that_reconnects_is_told_of_the_size_it_missed() {
    let mut rig = slow(0, PATIENCE);
    // Parts of the configuration space: offset and bytes.
    let come_back = |rig: &mut Rig, reads: &[(u32, u32)]| {
        let mut guest = RawGuest::connect(rig.connect(), BASIC);
        let ours = listen(&guest);
        for &(offset, bytes) in reads {
            let mut payload = halves(&[offset, bytes, 0]);
            payload.resize(12 + bytes as usize, 0);
            guest.client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
            guest.client.receive().unwrap();
        }
        assert!(guest.start_queue(0).unwrap());
        // By now all that is to be said was said.
        let said = heard(&ours);
        drop(guest);
        rig.join_sessions();
        said
    };
    assert_eq!(come_back(&mut rig, &[]), changed(), "nobody knows what it knows");
    assert_eq!(come_back(&mut rig, &[(0, 8)]), [0u8; 0], "it knows");
    rig.export().resize(Some(2 * MIB), false).unwrap();
    assert_eq!(come_back(&mut rig, &[]), changed());
    assert_eq!(come_back(&mut rig, &[(0, 4)]), changed(), "half of the size is none");
    assert_eq!(come_back(&mut rig, &[(4, 56)]), changed(), "nor is the other half");
    assert_eq!(come_back(&mut rig, &[(0, 8)]), [0u8; 0], "it knows");
    assert_eq!(come_back(&mut rig, &[(0, 4), (0, 60)]), [0u8; 0], "it knows");
}

#[test]
fn sizes_that_cannot_be_change_nothing() {
    let rig = slow(0, PATIENCE);
    let error = rig.export().resize(Some(1000), true).unwrap_err();
    assert!(matches!(error, ChangeError::Resize(ResizeError::Size { .. })), "{error}");
    let error = rig.export().resize(None, true).unwrap_err();
    assert!(matches!(error, ChangeError::Resize(ResizeError::NoFile)), "{error}");
    assert_eq!(rig.export().resize(Some(MIB), false).unwrap().to, MIB);
    assert_eq!(rig.disk().capacity(), MIB);
}

/// Somebody else made the file longer: without a size the disk follows it.
#[test]
fn a_disk_follows_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), MIB);
    let rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    std::fs::File::options().write(true).open(&path).unwrap().set_len(3 * MIB).unwrap();
    let answer = rig.export().resize(None, false).unwrap();
    assert_eq!(answer, resized(MIB, 3 * MIB, GuestNotice::NobodyThere));
}

/// Nothing is in flight while a disk is paused, whoever comes and goes; nothing is lost either.
#[test]
fn a_paused_disk_takes_nothing_and_loses_nothing() {
    let mut rig = slow(20_000, PATIENCE);
    let mut guest = RawGuest::start(rig.connect(), 1, 64, BASIC);
    let mut device = Options::new().over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    let submit = |queue: &mut BlkQueue<u64>, n| {
        queue.read(n * 4096, device.pool().alloc(4096).unwrap(), n).unwrap();
        queue.submit().unwrap();
    };
    for round in 0..5 {
        submit(&mut queue, round);
        rig.export().pause().unwrap();
        submit(&mut queue, round);
        let stats = rig.stats();
        assert!(stats.iter().all(|worker| worker.queues.is_empty()), "no queue runs");
        std::thread::sleep(Duration::from_millis(30));
        while let Some(done) = queue.pop().unwrap() {
            assert!(done.is_ok());
        }
        assert!(queue.in_flight() > 0, "a paused disk has answered");
        // One that comes now waits, too.
        let mut late = RawGuest::start(rig.connect(), 1, 64, BASIC);
        rig.export().resume().unwrap();
        let all = queue.in_flight();
        assert!(queue.wait_for(all, Some(PATIENCE)).unwrap(), "lost by a pause");
        assert!(queue.completions().all(|done| done.is_ok()));
        assert_eq!(guest.simple(0, IN, 0, DATA, 512).0, OK);
        assert_eq!(late.simple(0, IN, 0, DATA, 512).0, OK);
        assert_eq!(late.simple(0, IN, MIB / 512, DATA, 512).0, IOERR);
    }
    // Draining is a pause that ends by itself, unless there was one.
    submit(&mut queue, 1);
    rig.export().drain().unwrap();
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert!(!rig.export().is_paused());
    rig.export().pause().unwrap();
    rig.export().drain().unwrap();
    assert!(rig.export().is_paused());
    rig.export().resume().unwrap();
}

/// A stuck disk cannot be paused: its front-end goes, the daemon stays.
#[test]
fn pausing_a_stuck_disk_ends_the_connection() {
    let mut rig = slow(4_000_000, Duration::from_millis(100));
    let mut device = Options::new().over(rig.connect()).unwrap();
    let mut queue = device.queue::<u64>().unwrap();
    queue.read(0, device.pool().alloc(4096).unwrap(), 1).unwrap();
    queue.submit().unwrap();
    rig.wait_in_flight(1);
    let error = rig.export().pause().unwrap_err();
    assert!(matches!(error, ChangeError::Disconnected), "{error}");
    rig.join_sessions();
    rig.export().resume().unwrap();
    // The workers answer meanwhile.
    let workers: Vec<_> = rig.stats().into_iter().map(Some).collect();
    let report = rig.export().report(&workers);
    assert!(report.stuck && !report.connected && !report.paused);
}

/// What a report says of queues, counts and latencies.
#[test]
fn a_report_tells_what_each_queue_has_done() {
    let source = Source::Null { bytes: MIB, latency_us: 0 };
    let mut rig = Rig::start(&RigOptions::new(source, EngineKind::Null).queues(3, 2));
    let mut device = Options::new().queues(3).queue_size(64).over(rig.connect()).unwrap();
    let mut queues = device.queues::<u64>().unwrap();
    for _ in 0..200 {
        assert_eq!(request(&device, &mut queues[1], false, 0), Status::Ok);
    }
    assert_eq!(request(&device, &mut queues[2], true, MIB), Status::IoError);
    let ask =
        |rig: &Rig| rig.export().report(&rig.stats().into_iter().map(Some).collect::<Vec<_>>());
    let report = ask(&rig);
    assert!(report.connected && report.writeback && !report.paused && !report.stuck);
    let found: Vec<_> = report
        .queues
        .iter()
        .map(|q| (q.queue, q.worker, q.stats.queue_size, q.stats.counts.reads))
        .collect();
    assert_eq!(found, [(0, 0, 64, 0), (1, 1, 64, 200), (2, 0, 64, 0)]);
    assert_eq!((report.counts.reads, report.counts.errors), (200, 1));
    let timed = report.latency.unwrap().reads;
    assert!((3..=4).contains(&timed.len()), "{} of 200 were timed", timed.len());
    device.stop().unwrap();
    drop(device);
    rig.join_sessions();
    let report = ask(&rig);
    assert_eq!((report.queues.len(), report.counts.reads, report.connected), (0, 200, false));
}
