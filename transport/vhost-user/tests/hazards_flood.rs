//! Whoever comes again and again, or sends one thing without end, leaves nothing behind: rows B3,
//! B5, B11 and A19 of docs/hazards.md. Descriptors, memory and log lines of the whole process are
//! counted here, so one test runs at a time.
#![allow(missing_docs)]

use ringway_disk::{CacheMode, EngineKind};
use ringway_testkit::raw::{
    DATA, Desc, F_EVENT_IDX, F_PACKED, F_PROTOCOL, F_VERSION_1, GUEST_BASE, RawClient, RawGuest,
    halves, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Need, Rng, skip};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const READ: u32 = 0;
const OK: u8 = 0;
static ALONE: Mutex<()> = Mutex::new(());

struct Scene {
    rig: Rig,
    neighbour: RawGuest,
    _folder: TempDir,
    _alone: MutexGuard<'static, ()>,
}

fn scene() -> Scene {
    let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    count_warnings();
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let options = RigOptions::buffered(&path, EngineKind::Threads).queues(4, 1);
    let mut rig = Rig::start(&options);
    let neighbour = RawGuest::start(rig.connect(), 1, 64, F_VERSION_1);
    Scene { rig, neighbour, _folder: folder, _alone: alone }
}

impl Scene {
    fn neighbour_lives(&mut self) {
        assert_eq!(self.neighbour.simple(0, READ, 0, DATA, 512), (OK, 513));
    }
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The fewest within a fifth of a second: a session that ends closes its own a moment later.
fn settled_fds() -> usize {
    let counts = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        open_fds()
    });
    counts.min().unwrap()
}

/// The same again, later: not more than there were, once those that end have ended. (Fewer are no
/// leak: something may have been slow to end the first time.)
fn settle_at(fds: usize, maps: usize) {
    let begun = Instant::now();
    while settled_fds() > fds || mappings() > maps + 4 {
        let (fds_now, maps_now) = (open_fds(), mappings());
        let patient = begun.elapsed() < Duration::from_secs(15);
        assert!(patient, "{fds} descriptors became {fds_now}, {maps} mappings {maps_now}");
    }
}

/// Memory of this process that is in use, in bytes, without files and memory shared with guests.
fn memory_used() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// How often, unless the environment says otherwise.
fn times(variable: &str, otherwise: u32) -> u32 {
    let times = std::env::var(variable).map_or(otherwise, |word| word.parse().expect("a number"));
    println!("{times} times ({variable})");
    times
}

// ---- what is logged ----

static WARNINGS: AtomicU64 = AtomicU64::new(0);

struct Counter;

impl tracing::Subscriber for Counter {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        *about.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        WARNINGS.fetch_add(1, SeqCst);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn count_warnings() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Counter).unwrap());
}

/// Refused messages without end: ten are told, and a thousand are enough.
#[test]
fn b09_a_flood_of_refused_messages_is_told_ten_times() {
    let mut s = scene();
    let client = RawClient::new(s.rig.connect());
    client.send(request::SET_FEATURES, 0, &words(&[F_VERSION_1 | F_PROTOCOL]), &[]).unwrap();
    client.send(request::SET_PROTOCOL_FEATURES, 0, &words(&[1 << 3]), &[]).unwrap();
    let before = WARNINGS.load(SeqCst);
    for number in 0..999 {
        assert!(!client.acked(request::SET_VRING_NUM, &halves(&[9, 64]), &[]).unwrap(), "{number}");
    }
    assert_eq!(WARNINGS.load(SeqCst) - before, 10);
    client.send(request::SET_VRING_NUM, 8, &halves(&[9, 64]), &[]).unwrap();
    assert!(client.is_closed());
    assert!(WARNINGS.load(SeqCst) - before <= 12);
    s.neighbour_lives();
}

/// A guest that breaks its queue, starts it again and breaks it again.
#[test]
fn b09_a_flood_of_broken_queues_is_told_ten_times() {
    let mut s = scene();
    let mut guest = RawGuest::connect(s.rig.connect(), F_VERSION_1);
    let before = WARNINGS.load(SeqCst);
    for _ in 0..200 {
        guest.reset_queue(0);
        guest.client.send(request::SET_VRING_BASE, 0, &halves(&[0, 0]), &[]).unwrap();
        assert!(guest.start_queue(0).unwrap());
        // Far more than the ring holds.
        guest.set_avail_index(0, 1000);
        guest.kick(0);
        std::thread::sleep(Duration::from_micros(300));
        guest.stop_queue(0).unwrap();
    }
    let lines = WARNINGS.load(SeqCst) - before;
    assert!((1..=11).contains(&lines), "{lines} lines");
    s.neighbour_lives();
}

// ---- descriptors ----

/// Each new descriptor takes the place of the one before, whether the queue runs or not.
#[test]
fn b05_a_flood_of_descriptors_leaves_the_last_one() {
    let mut s = scene();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, F_VERSION_1);
    let all = [request::SET_VRING_CALL, request::SET_VRING_ERR, request::SET_VRING_KICK];
    let before = open_fds();
    for number in 0..3000u64 {
        for (request, queue) in all.iter().zip([number % 2, number % 2, 1]) {
            let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            assert!(guest.client.acked(*request, &words(&[queue]), &[bell.as_fd()]).unwrap());
        }
        assert!(open_fds() <= before + 8, "{} descriptors after {number}", open_fds());
    }
    // The last call descriptor is not ours to read any more; the answer comes all the same.
    assert_eq!(guest.simple(0, READ, 0, DATA, 512), (OK, 513));
    drop(guest);
    s.rig.join_some();
    s.neighbour_lives();
}

/// Clients come, do I/O and go, some in good order and some not: descriptors, memory and mappings
/// are as before.
#[test]
fn b11_connections_come_and_go_and_leave_nothing() {
    let mut s = scene();
    let cycle = |s: &mut Scene, number: u32| {
        let ring = if number % 2 == 0 { 0 } else { F_PACKED };
        let queues = 1 + number % 4;
        let mut guest = RawGuest::start(s.rig.connect(), queues, 64, F_VERSION_1 | ring);
        assert_eq!(guest.simple(0, READ, 0, DATA, 4096), (OK, 4097));
        match number % 3 {
            0 => drop(guest.stop_queue(0)),
            1 => drop(guest.client.acked(request::RESET_DEVICE, &[], &[])),
            _ => {}
        }
        drop(guest);
        s.rig.join_some();
    };
    for number in 0..200 {
        cycle(&mut s, number);
    }
    let (fds, memory, maps) = (settled_fds(), memory_used(), mappings());
    for number in 0..times("RINGWAY_CYCLES", 2000) {
        cycle(&mut s, number);
    }
    let grown = memory_used().saturating_sub(memory);
    settle_at(fds, maps);
    assert!(grown < 2 << 20, "{grown} bytes leak");
    s.neighbour_lives();
}

// ---- memory that vanishes ----

/// Puts requests down whose buffers are in the memory that is about to vanish.
fn load(guest: &mut RawGuest) {
    for at in 0..20u16 {
        let place = DATA + u64::from(at) * 0x1_0000;
        guest.put_header(place - 64, READ, u64::from(at));
        let chain = [
            Desc { addr: place - 64, len: 16, ..Desc::default() },
            Desc { addr: place, len: 0x8000, flags: 2, next: 0 },
            Desc { addr: place - 32, len: 1, flags: 2, next: 0 },
        ];
        guest.put_chain(0, 3 * at, &chain);
        guest.offer_quietly(0, 3 * at);
    }
}

/// All memory vanishes at a moment of no choice: that connection ends, and nothing else does.
#[test]
fn b03_races_with_memory_that_vanishes() {
    let mut s = scene();
    let mut rng = Rng::for_test("b03");
    let (mut fds, mut maps) = (0, 0);
    let races = times("RINGWAY_RACES", 1000);
    for race in 0..100 + races {
        if race == 100 {
            // By now the allocator has an arena for each thread there may be at a time.
            (fds, maps) = (settled_fds(), mappings());
        }
        let ring = rng.pick(&[0, F_PACKED]) | rng.pick(&[0, F_EVENT_IDX]);
        let mut guest = RawGuest::start(s.rig.connect(), 1, 64, F_VERSION_1 | ring);
        load(&mut guest);
        guest.kick(0);
        for _ in 0..rng.below(3000) {
            std::hint::spin_loop();
        }
        guest.memory.set_len(rng.pick(&[0, 4096])).unwrap();
        guest.kick(0);
        if ring & F_PACKED != 0 || race % 2 == 0 {
            // Whoever has nothing left to do need not look: the neighbour's requests go on.
            assert_eq!(s.neighbour.simple(0, READ, 0, DATA, 512).0, OK, "race {race}");
        }
        drop(guest);
        s.rig.join_some();
    }
    settle_at(fds, maps);
    s.neighbour_lives();
}

/// Nothing at all is left, and the guest rings once: the connection ends, each time.
#[test]
fn b03_vanished_memory_always_ends_the_connection() {
    let mut s = scene();
    for round in 0..300 {
        let ring = [0, F_PACKED, F_EVENT_IDX, F_PACKED | F_EVENT_IDX][round % 4];
        let mut guest = RawGuest::start(s.rig.connect(), 1, 64, F_VERSION_1 | ring);
        assert_eq!(guest.simple(0, READ, 0, DATA, 512).0, OK);
        guest.memory.set_len(0).unwrap();
        guest.kick(0);
        assert!(guest.client.is_closed(), "round {round} lives on: {:?}", s.rig.stats());
        drop(guest);
        s.rig.join_some();
        s.neighbour_lives();
    }
}

/// The memory is gone between its announcement and the start of the queue.
#[test]
fn b03_memory_cut_short_before_the_start() {
    let mut s = scene();
    for ring in [0, F_PACKED, F_EVENT_IDX] {
        let mut guest = RawGuest::connect(s.rig.connect(), F_VERSION_1 | ring);
        guest.memory.set_len(0).unwrap();
        let _ = guest.start_queue(0);
        assert!(guest.client.is_closed());
        // Cut short while the queue is stopped, and started again.
        let mut guest = RawGuest::start(s.rig.connect(), 1, 64, F_VERSION_1 | ring);
        assert_eq!(guest.simple(0, READ, 0, DATA, 512).0, OK);
        guest.stop_queue(0).unwrap();
        guest.memory.set_len(DATA - GUEST_BASE).unwrap();
        guest.memory.set_len(0).unwrap();
        let _ = guest.start_queue(0);
        assert!(guest.client.is_closed());
        s.neighbour_lives();
    }
}

// ---- places in the engine ----

/// Four full queues of one guest want more places than the engine has; the neighbour on the same
/// worker gets its turn.
#[test]
fn a19_full_queues_do_not_starve_a_neighbour() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    count_warnings();
    let latency_us = 20_000;
    let source = ringway_disk::Source::Null { bytes: 1 << 30, latency_us };
    let options = RigOptions::new(source, EngineKind::NullAfter(latency_us)).queues(8, 1);
    let mut rig = Rig::start(&options);
    let mut hog = RawGuest::start(rig.connect(), 8, 1024, F_VERSION_1);
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, F_VERSION_1);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        let refill = scope.spawn(move || {
            // A header and a status byte are a flush; 512 of them fill a ring.
            hog.put_header(DATA, 4, 0);
            for queue in 0..8 {
                for at in 0..512u16 {
                    let status = DATA + 0x1000 + u64::from(at);
                    let chain = [
                        Desc { addr: DATA, len: 16, ..Desc::default() },
                        Desc { addr: status, len: 1, flags: 2, next: 0 },
                    ];
                    hog.put_chain(queue, 2 * at, &chain);
                    hog.offer_quietly(queue, 2 * at);
                }
                hog.kick(queue);
            }
            let mut answers = 0u32;
            while !done.load(SeqCst) {
                for queue in 0..8 {
                    while let Some((head, _)) = hog.next_used(queue, Duration::ZERO) {
                        answers += 1;
                        hog.offer_quietly(queue, u16::try_from(head).unwrap());
                    }
                    hog.kick(queue);
                }
            }
            answers
        });
        for at in 0..20 {
            assert_eq!(neighbour.simple(0, READ, at, DATA, 512), (OK, 513), "request {at}");
        }
        done.store(true, SeqCst);
        println!("{} answers to the hog meanwhile", refill.join().unwrap());
    });
}

/// Reads of 340 MiB at once into memory that O_DIRECT does not take, so that each needs memory of ours:
/// that of a queue is made when it starts, and the rest waits.
#[test]
fn a15_requests_wait_for_bounce_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    count_warnings();
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.disk.cache = Some(CacheMode::None);
    if ringway_disk::open(&options.disk).is_err() {
        return skip(Need::Direct, "this folder takes no O_DIRECT");
    }
    let mut rig = Rig::start(&options);
    let mut guest = RawGuest::start(rig.connect(), 1, 1024, F_VERSION_1);
    let data = DATA + 1;
    assert_eq!(guest.simple(0, READ, 0, data, 1 << 20).0, OK);
    let bounced = |rig: &Rig| rig.stats()[0].disk.bounced;
    assert_eq!(bounced(&rig), 1, "it needs memory of ours");
    guest.put_header(DATA - 64, READ, 0);
    let chain = [
        Desc { addr: DATA - 64, len: 16, ..Desc::default() },
        Desc { addr: data, len: 1 << 20, flags: 2, next: 0 },
        Desc { addr: DATA - 32, len: 1, flags: 2, next: 0 },
    ];
    (0..340).for_each(|number| guest.put_chain(0, 3 * number, &chain));
    let (before, over) = (memory_used(), AtomicBool::new(false));
    let most = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !over.load(SeqCst) {
                most = most.max(memory_used());
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });
        (0..340).for_each(|number| guest.offer_quietly(0, 3 * number));
        guest.kick(0);
        for _ in 0..340 {
            let (_, len) = guest.next_used(0, Duration::from_secs(20)).expect("it is answered");
            assert_eq!(len, (1 << 20) + 1);
        }
        over.store(true, SeqCst);
        watcher.join().unwrap()
    });
    assert_eq!(bounced(&rig), 341);
    let grown = most.saturating_sub(before) >> 20;
    assert!(grown <= 16, "{grown} MiB for requests that want 340 at once");
}
