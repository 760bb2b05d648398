//! The dirty log for live migration: every page the device writes is marked, and a hostile log harms
//! nobody else.

use ringway_disk::{EngineKind, Source};
use ringway_export::Polling;
use ringway_ring::virtqueue::inflight_bytes;
use ringway_testkit::pattern;
use ringway_testkit::raw::{
    DATA, Desc, F_EVENT_IDX, F_FLUSH, F_INDIRECT, F_PACKED, F_PROTOCOL, F_VERSION_1, GUEST_BASE,
    MEMORY, RawGuest, USER_DELTA, halves, inflight_payload, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::seed::Rng;
use ringway_testkit::{Need, skip};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const LOG_ALL: u64 = 1 << 26;
const LOG_SHMFD: u64 = 1 << 1;
/// MQ, REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS: what `RawGuest` has.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;
const VRING_F_LOG: u32 = 1;
const PAGE: u64 = 4096;
/// Bytes of a log that covers the guest's memory.
const LOG_BYTES: u64 = (GUEST_BASE + MEMORY) / PAGE / 8;
const WRITE: u16 = 2;
const IN: u32 = 0;
const OK: u8 = 0;
const SOON: Duration = Duration::from_secs(20);
const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;

fn log_file(bytes: u64) -> File {
    let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

/// A guest that can be migrated, and the features it has negotiated.
struct Migrant {
    guest: RawGuest,
    features: u64,
    log: File,
}

impl Migrant {
    fn new(mut guest: RawGuest, features: u64) -> Self {
        let protocol = words(&[PROTOCOL | LOG_SHMFD]);
        assert!(guest.client.acked(request::SET_PROTOCOL_FEATURES, &protocol, &[]).unwrap());
        guest.size = 1024;
        Self { guest, features: features | F_PROTOCOL, log: log_file(LOG_BYTES) }
    }

    /// SET_LOG_BASE; whether it was taken.
    fn set_base(&self, file: impl AsFd, size: u64, offset: u64) -> bool {
        let payload = words(&[size, offset]);
        self.guest.client.acked(request::SET_LOG_BASE, &payload, &[file.as_fd()]).unwrap()
    }

    /// SET_FEATURES; whether it was taken.
    fn log_all(&self, on: bool) -> bool {
        let features = self.features | if on { LOG_ALL } else { 0 };
        self.guest.client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap()
    }

    /// SET_VRING_ADDR with this log address, or without; whether it was taken.
    fn log_ring(&self, queue: u32, at: Option<u64>) -> bool {
        let (desc, avail, used) = self.guest.rings(queue);
        let mut payload = halves(&[queue, if at.is_some() { VRING_F_LOG } else { 0 }]);
        let user = [desc, used, avail].map(|at| at + USER_DELTA);
        payload.extend(words(&user));
        payload.extend(words(&[at.unwrap_or(0)]));
        self.guest.client.acked(request::SET_VRING_ADDR, &payload, &[]).unwrap()
    }

    fn enable(&self, on: bool) {
        let payload = halves(&[0, u32::from(on)]);
        assert!(self.guest.client.acked(request::SET_VRING_ENABLE, &payload, &[]).unwrap());
    }

    /// The marked pages, as guest page numbers; clears them.
    fn take_marks(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; usize::try_from(LOG_BYTES).unwrap()];
        self.log.read_exact_at(&mut bytes, 0).unwrap();
        self.log.write_all_at(&vec![0; bytes.len()], 0).unwrap();
        let bits = bytes.iter().enumerate().flat_map(|(at, byte)| {
            (0..8).filter(move |bit| byte >> bit & 1 != 0).map(move |bit| 8 * at as u64 + bit)
        });
        bits.collect()
    }

    fn memory(&self) -> Vec<u8> {
        self.guest.peek(GUEST_BASE, usize::try_from(MEMORY).unwrap())
    }

    /// A read of `len` bytes to `data`, offered as `head` without a kick.
    fn offer_read(&mut self, head: u16, data: u64, len: u32) {
        self.guest.put_header(DATA - 64, IN, 0);
        self.guest.put_chain(0, head, &Self::read_chain(data, len));
        self.guest.offer_quietly(0, head);
    }

    fn read_chain(data: u64, len: u32) -> [Desc; 3] {
        [
            Desc { addr: DATA - 64, len: 16, ..Desc::default() },
            Desc { addr: data, len, flags: WRITE, next: 0 },
            Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
        ]
    }
}

fn pages(addr: u64, len: u64) -> std::ops::Range<u64> {
    addr / PAGE..(addr + len).div_ceil(PAGE)
}

/// A request of random kind, size and layout. Adds the pages it may write to `writable`.
fn random_chain(rng: &mut Rng, m: &Migrant, at: u16, writable: &mut BTreeSet<u64>) -> Vec<Desc> {
    // Header and, for some, an indirect table: in memory that holds nothing else.
    let mine = GUEST_BASE + 0x10_0000 + 0x1000 * u64::from(at);
    // Reads, writes, flushes, a serial number, an unknown type; some beyond the end.
    let kind = rng.pick(&[0, 0, 0, 0, 1, 4, 8, 77]);
    m.guest.put_header(mine, kind, rng.pick(&[0, 1, 7, 1000, 20_000, 1 << 40]));
    let mut descs = vec![Desc { addr: mine, len: 16, ..Desc::default() }];
    let flags = if kind == 1 { 0 } else { WRITE };
    let mut left = match kind {
        0 | 1 => 512 * (1 + rng.pick(&[0, 1, 7, 15, 100, 255])),
        8 => 20,
        _ => 0,
    };
    let mut place = |len: u64| DATA + rng.below(0x40_0000 - len);
    let mut cuts = Vec::new();
    while left > 0 {
        let len = if cuts.len() == 4 { left } else { 1 + place(1) % left };
        cuts.push((place(len), len));
        left -= len;
    }
    for (addr, len) in cuts {
        descs.push(Desc { addr, len: u32::try_from(len).unwrap(), flags, next: 0 });
    }
    descs.push(Desc { addr: place(1), len: 1, flags: WRITE, next: 0 });
    for desc in descs.iter().filter(|desc| desc.flags & WRITE != 0) {
        writable.extend(pages(desc.addr, desc.len.into()));
    }
    if rng.below(3) > 0 {
        return descs;
    }
    let bytes = u32::try_from(16 * descs.len()).unwrap();
    let count = descs.len();
    for (i, desc) in descs.into_iter().enumerate() {
        let last = i + 1 == count;
        let next = u16::try_from(i + 1).unwrap();
        // Packed tables have no NEXT flag; `put_desc` knows where each format has its fields.
        let chained = m.features & F_PACKED == 0 && !last;
        let flags = desc.flags | u16::from(chained);
        m.guest.put_desc(mine + 64, i.try_into().unwrap(), Desc { flags, next, ..desc });
    }
    vec![Desc { addr: mine + 64, len: bytes, flags: 4, next: 0 }]
}

/// A copy of the memory as the guest left it, compared with the log after each batch. The guest only
/// writes while the queue is disabled, so that what differs was written by the device.
fn every_written_page_is_marked(ring: u64, engine: EngineKind) {
    every_written_page_is_marked_by(ring, engine, false);
}

/// As above, with a record of what is in flight if the queue is to be tracked.
fn every_written_page_is_marked_by(ring: u64, engine: EngineKind, tracked: bool) {
    let mut rng = Rng::for_test("every_written_page_is_marked");
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut content = vec![0; 16 << 20];
    for (sector, bytes) in content.chunks_mut(512).enumerate() {
        pattern::fill(bytes, 1, sector as u64, 1);
    }
    std::fs::write(&path, content).unwrap();
    let mut rig = Rig::start(&RigOptions::buffered(&path, engine));
    let features = BASIC | ring;
    let mut m = Migrant::new(RawGuest::connect(rig.connect(), features), features);
    if tracked {
        let (bytes, region) = m.guest.client.get_inflight(1, 1024).unwrap();
        let payload = inflight_payload(bytes, 0, 1, 1024);
        assert!(m.guest.client.set_inflight(&payload, region.as_fd()).unwrap());
    }
    assert!(m.guest.start_queue(0).unwrap());
    let (desc, _, used) = m.guest.rings(0);
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true) && m.log_ring(0, Some(used)));
    let ring_pages: BTreeSet<u64> = if ring & F_PACKED != 0 {
        pages(desc, 16 * 1024).chain(pages(used, 4)).collect()
    } else {
        pages(used, 6 + 8 * 1024).collect()
    };
    let mut differing = 0;
    for round in 0..50 {
        m.enable(false);
        m.take_marks();
        let mut writable = BTreeSet::new();
        let count = 1 + rng.below(24);
        for at in 0..u16::try_from(count).unwrap() {
            let chain = random_chain(&mut rng, &m, at, &mut writable);
            m.guest.put_chain(0, 8 * at, &chain);
            m.guest.offer_quietly(0, 8 * at);
        }
        let before = m.memory();
        m.enable(true);
        m.guest.kick(0);
        for _ in 0..count {
            assert!(m.guest.next_used(0, SOON).is_some(), "round {round}");
        }
        m.enable(false);
        let (after, marks) = (m.memory(), m.take_marks());
        let both = before.chunks(4096).zip(after.chunks(4096));
        for (page, _) in both.enumerate().filter(|(_, (before, after))| before != after) {
            let page = GUEST_BASE / PAGE + page as u64;
            differing += 1;
            assert!(marks.contains(&page), "round {round}: page {page:#x} is not marked");
        }
        // And nothing else: a page too many is copied for nothing.
        let too_many = marks.iter().find(|p| !writable.contains(p) && !ring_pages.contains(p));
        assert_eq!(too_many, None, "round {round}");
    }
    assert!(differing > 500, "{differing} pages were written: this tested nothing");
}

#[test]
fn every_page_written_by_a_split_queue_is_marked() {
    every_written_page_is_marked(0, EngineKind::Threads);
}

#[test]
fn every_page_written_by_a_split_queue_with_event_index_is_marked() {
    every_written_page_is_marked(F_EVENT_IDX, EngineKind::Threads);
}

#[test]
fn every_page_written_by_a_packed_queue_is_marked() {
    every_written_page_is_marked(F_PACKED, EngineKind::Threads);
    every_written_page_is_marked(F_PACKED | F_EVENT_IDX, EngineKind::Threads);
}

#[test]
fn every_page_written_by_a_tracked_queue_is_marked() {
    every_written_page_is_marked_by(F_EVENT_IDX, EngineKind::Threads, true);
    every_written_page_is_marked_by(F_PACKED, EngineKind::Threads, true);
}

/// A record of 1024 entries that has chains of three descriptors in flight, the first of each of
/// `heads`: as the protocol lays it out.
fn record_of(packed: bool, heads: &[u16], descs: impl Fn(u16) -> [Desc; 3]) -> Vec<u8> {
    let mut bytes = vec![0; inflight_bytes(packed, 1024)];
    let mut put = |at: usize, word: &[u8]| bytes[at..at + word.len()].copy_from_slice(word);
    // version, desc_num
    put(8, &[1, 0, 0, 4]);
    if !packed {
        for &head in heads {
            put(16 + 16 * usize::from(head), &[1]);
        }
        return bytes;
    }
    // Every entry leads to the next one; those of the chains come first, then the free ones.
    let entry = |index: u16| 32 + 32 * usize::from(index);
    for index in 0..1024u16 {
        put(entry(index) + 2, &(index + 1).to_le_bytes());
    }
    let free = 3 * u16::try_from(heads.len()).unwrap();
    for at in [12, 14] {
        put(at, &free.to_le_bytes());
    }
    // used_wrap_counter, old_used_wrap_counter
    put(20, &[1, 1]);
    for (first, &head) in (0..).step_by(3).zip(heads) {
        // inflight; last, num; counter
        put(entry(first), &[1]);
        put(entry(first) + 4, &(first + 2).to_le_bytes());
        put(entry(first) + 6, &[3]);
        put(entry(first) + 8, &u64::from(first).to_le_bytes());
        for (at, desc) in (first..).zip(descs(head)) {
            // id, flags, len, addr
            put(entry(at) + 16, &head.to_le_bytes());
            put(entry(at) + 18, &desc.flags.to_le_bytes());
            put(entry(at) + 20, &desc.len.to_le_bytes());
            put(entry(at) + 24, &desc.addr.to_le_bytes());
        }
    }
    bytes
}

/// Reads that a predecessor left in flight are answered with the log switched on, and the whole ring
/// is marked: that one may have died before it marked what it wrote there.
fn recovery_is_marked(ring: u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let (features, packed) = (BASIC | ring, ring & F_PACKED != 0);
    let mut m = Migrant::new(RawGuest::connect(rig.connect(), features), features);
    let (heads, data) = ([0u16, 4, 8], |head: u16| DATA + 0x2000 * u64::from(head));
    let record = record_of(packed, &heads, |head| Migrant::read_chain(data(head), 512));
    let region = log_file(record.len() as u64);
    region.write_all_at(&record, 0).unwrap();
    for head in heads {
        m.offer_read(head, data(head), 512);
    }
    let payload = inflight_payload(record.len() as u64, 0, 1, 1024);
    assert!(m.guest.client.set_inflight(&payload, region.as_fd()).unwrap());
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
    assert!(m.guest.start_queue(0).unwrap());
    for head in heads {
        let (first, written) = m.guest.next_used(0, SOON).expect("an answer");
        assert!(heads.contains(&u16::try_from(first).unwrap()) && written == 513, "{head}");
    }
    m.enable(false);
    let answers = pages(DATA - 32, 1);
    let expected = heads.iter().flat_map(|&head| pages(data(head), 512)).chain(answers);
    assert_eq!(m.take_marks(), expected.collect());
    let (desc, _, used) = m.guest.rings(0);
    assert!(m.log_ring(0, Some(used)));
    m.enable(true);
    let all: BTreeSet<_> = if packed {
        pages(desc, 16 * 1024).chain(pages(used, 4)).collect()
    } else {
        pages(used, 6 + 8 * 1024).collect()
    };
    // It may wait for the image's lock, which goes with the guest that is migrated.
    let (deadline, mut marks) = (Instant::now() + SOON, BTreeSet::new());
    while marks != all && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
        marks.extend(m.take_marks());
    }
    assert_eq!(marks, all);
    m.enable(false);
}

#[test]
fn every_page_written_by_recovery_is_marked() {
    recovery_is_marked(0);
}

#[test]
fn every_page_written_by_recovery_of_a_packed_queue_is_marked() {
    recovery_is_marked(F_PACKED);
    recovery_is_marked(F_PACKED | F_EVENT_IDX);
}

#[test]
fn every_page_written_with_io_uring_is_marked() {
    let usable = ringway_export::usable_engines();
    let Some((_, Err(why))) = usable.iter().find(|(engine, _)| *engine == EngineKind::IoUring)
    else {
        return every_written_page_is_marked(F_EVENT_IDX, EngineKind::IoUring);
    };
    skip(Need::IoUring, why);
}

/// Requests taken before the log was switched on or off count as it is when they are answered.
fn switched_while_queues_run(ring: u64) {
    let engine = EngineKind::NullAfter(300_000);
    let source = Source::Null { bytes: 1 << 30, latency_us: 300_000 };
    let mut rig = Rig::start(&RigOptions::new(source, engine));
    let features = BASIC | ring;
    let mut m = Migrant::new(RawGuest::connect(rig.connect(), features), features);
    assert!(m.guest.start_queue(0).unwrap());
    let used = m.guest.rings(0).2;
    assert!(m.set_base(&m.log, LOG_BYTES, 0));
    for round in 0..6u64 {
        let on = round % 2 == 0;
        let data = DATA + 0x1_0000 * round;
        // On a busy machine a request may be answered before this thread has switched the log: one of
        // ten is not.
        let in_time = (0..10).any(|_| {
            assert!(m.log_all(!on) && m.log_ring(0, (!on).then_some(used)));
            m.offer_read(0, data, 8192);
            m.guest.kick(0);
            // Time for the worker to take it, much less than it takes.
            std::thread::sleep(Duration::from_millis(20));
            assert!(m.log_all(on), "round {round}: only this bit changes");
            assert!(m.log_ring(0, on.then_some(used)), "round {round}");
            m.take_marks();
            let early = m.guest.next_used(0, Duration::ZERO).is_some();
            if early {
                m.guest.stop_queue(0).unwrap();
                assert!(m.guest.start_queue(0).unwrap());
            }
            !early
        });
        assert!(in_time, "round {round}: each is answered before the log is switched");
        assert!(m.guest.next_used(0, SOON).is_some());
        // The answer is seen before the mark of the index is made; after this message both are.
        assert!(m.log_ring(0, on.then_some(used)));
        m.guest.stop_queue(0).unwrap();
        let marks = m.take_marks();
        let all = pages(data, 8192).chain(pages(DATA - 32, 1)).chain(pages(used, 1));
        if on && ring == 0 {
            assert_eq!(marks, all.collect(), "round {round}");
        } else if on {
            assert!(pages(data, 8192).all(|page| marks.contains(&page)), "round {round}");
        } else {
            assert!(marks.is_empty(), "round {round}: {marks:x?}");
        }
        assert!(m.guest.start_queue(0).unwrap());
    }
    let other = words(&[(features | F_PROTOCOL) & !F_FLUSH]);
    assert!(!m.guest.client.acked(request::SET_FEATURES, &other, &[]).unwrap(), "another bit");
}

#[test]
fn the_log_is_switched_while_a_split_queue_runs() {
    switched_while_queues_run(0);
}

#[test]
fn the_log_is_switched_while_a_packed_queue_runs() {
    switched_while_queues_run(F_PACKED);
}

/// Only data and answers are logged until the ring's own flag is set, and under the address given.
#[test]
fn the_ring_is_logged_where_the_front_end_wants_it() {
    let (_folder, _rig, mut m) = scene();
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    m.guest.stop_queue(0).unwrap();
    assert_eq!(m.take_marks(), pages(DATA, 1).chain(pages(DATA - 0x1000, 1)).collect());
    assert!(m.guest.start_queue(0).unwrap());
    // An address that is no memory of the guest is fine as long as the log has a bit for it.
    let elsewhere = 0x3000;
    assert!(m.log_ring(0, Some(elsewhere)));
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    m.guest.stop_queue(0).unwrap();
    assert!(m.take_marks().contains(&(elsewhere / PAGE)));
}

/// A connection with one running queue and polling switched off.
fn scene() -> (tempfile::TempDir, Rig, Migrant) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads);
    options.polling = Polling::Never;
    let mut rig = Rig::start(&options);
    let mut m = Migrant::new(RawGuest::connect(rig.connect(), BASIC), BASIC);
    assert!(m.guest.start_queue(0).unwrap());
    (folder, rig, m)
}

#[test]
fn the_front_end_is_told_of_marks() {
    let (_folder, _rig, mut m) = scene();
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    assert!(m.guest.client.acked(request::SET_LOG_FD, &[], &[bell.as_fd()]).unwrap());
    assert!(m.set_base(&m.log, LOG_BYTES, 0));
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    let mut count = [0; 8];
    assert!(rustix::io::read(&bell, &mut count).is_err(), "nothing is logged yet");
    assert!(m.log_all(true));
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    m.guest.stop_queue(0).unwrap();
    assert_eq!(rustix::io::read(&bell, &mut count), Ok(8));
}

#[test]
fn b10_the_log_descriptor_must_be_an_eventfd() {
    let (_folder, _rig, m) = scene();
    let file = log_file(4096);
    assert!(!m.guest.client.acked(request::SET_LOG_FD, &[], &[file.as_fd()]).unwrap());
}

/// As for the call of a queue: no second descriptor is tried.
#[test]
fn b21_a_log_bell_that_blocks_ends_the_connection() {
    let (_folder, mut rig, mut m) = scene();
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, BASIC);
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
    let bell: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert!(m.guest.client.acked(request::SET_LOG_FD, &[], &[bell.as_fd()]).unwrap());
    rustix::fs::fcntl_setfl(&bell, rustix::fs::OFlags::empty()).unwrap();
    // It may have been rung already.
    rustix::io::write(&bell, &(u64::MAX - 2).to_ne_bytes()).unwrap();
    for _ in 0..2 {
        m.offer_read(0, DATA, 512);
        m.guest.kick(0);
        assert!(m.guest.next_used(0, SOON).is_some(), "answered");
        if m.guest.client.ask_u64(request::GET_QUEUE_NUM).is_err() {
            break;
        }
    }
    assert!(m.guest.client.is_closed());
    assert_eq!(neighbour.simple(0, IN, 0, DATA, 512), (OK, 513));
}

#[test]
fn b03_a_hostile_dirty_log() {
    let (_folder, mut rig, mut m) = scene();
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, BASIC);
    let bell: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let sealed = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    File::from(sealed.try_clone().unwrap()).set_len(LOG_BYTES).unwrap();
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    for on in [false, true] {
        if on {
            assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
            assert!(!m.set_base(log_file(LOG_BYTES), LOG_BYTES - 1, 0), "a page has no bit");
            assert!(!m.set_base(log_file(1), 1, 0), "hardly a page has a bit");
        }
        for (size, offset) in [
            (0, 0),
            (LOG_BYTES, 1),
            (LOG_BYTES + 1, 0),
            (LOG_BYTES, u64::MAX),
            (u64::MAX, 0),
            (u64::MAX, u64::MAX),
            (LOG_BYTES, 1 << 63),
        ] {
            assert!(!m.set_base(log_file(LOG_BYTES), size, offset), "{size} at {offset}");
        }
        // What is neither memory nor an eventfd ends the connection: row B22.
        for fd in [bell.as_fd(), sealed.as_fd()] {
            assert!(!m.set_base(fd, LOG_BYTES, 0), "not shared memory that can be written");
        }
        // As it was before there were descriptors for it.
        assert!(!m.guest.client.acked(request::SET_LOG_BASE, &words(&[0x1000]), &[]).unwrap());
        assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513), "the queue works on");
    }
    assert!(m.take_marks().contains(&(DATA / PAGE)), "the log in use stayed in use");
    // The used ring beyond the log, or beyond everything.
    for at in [GUEST_BASE + MEMORY, GUEST_BASE + MEMORY - 4, u64::MAX, u64::MAX - 8000] {
        assert!(!m.log_ring(0, Some(at)), "{at:#x}");
    }
    assert!(m.log_ring(0, Some(GUEST_BASE + MEMORY - 0x3000)));
    // Memory beyond the log.
    let more = log_file(4096);
    let mut region = words(&[0]);
    region.extend(words(&[GUEST_BASE + MEMORY + (1 << 30), 4096, 1 << 40, 0]));
    let add =
        |m: &Migrant| m.guest.client.acked(request::ADD_MEM_REG, &region, &[more.as_fd()]).unwrap();
    assert!(!add(&m), "its pages have no bits");
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513), "the queue works on");
    // QEMU sends a larger log first.
    let large = log_file(1 << 20);
    assert!(m.set_base(&large, 1 << 20, 0) && add(&m));
    m.log = large;
    m.take_marks();
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    assert!(m.take_marks().contains(&(DATA / PAGE)));
    assert_eq!(neighbour.simple(0, IN, 0, DATA, 512), (OK, 513));
}

#[test]
fn b03_a_log_without_the_protocol_feature() {
    let (_folder, mut rig, _m) = scene();
    let guest = RawGuest::connect(rig.connect(), BASIC);
    let (log, payload) = (log_file(LOG_BYTES), words(&[LOG_BYTES, 0]));
    assert!(!guest.client.acked(request::SET_LOG_BASE, &payload, &[log.as_fd()]).unwrap());
}

/// Marks land at the offset, wherever it is.
#[test]
fn the_log_may_begin_anywhere_in_its_file() {
    let (_folder, _rig, mut m) = scene();
    for offset in [1, 4095, 4096, 5000] {
        let file = log_file(offset + LOG_BYTES);
        assert!(m.log_all(true) && m.set_base(&file, LOG_BYTES, offset));
        assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
        let mut bytes = vec![0; usize::try_from(offset + LOG_BYTES).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let at = usize::try_from(offset + DATA / PAGE / 8).unwrap();
        assert_eq!(bytes[at] >> (DATA / PAGE % 8) & 1, 1, "offset {offset}");
        assert!(bytes[..at - 1].iter().all(|&byte| byte == 0), "offset {offset}");
    }
}

/// Where a ring is logged is judged when the queue starts, and while it runs.
#[test]
fn a_log_address_is_judged_while_its_queue_runs() {
    let (_folder, _rig, mut m) = scene();
    let used = m.guest.rings(0).2;
    let beyond = LOG_BYTES * 8 * PAGE;
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
    assert!(m.log_ring(0, Some(used)) && !m.log_ring(0, Some(beyond)));
    m.guest.stop_queue(0).unwrap();
    assert!(m.log_ring(0, Some(beyond)), "nobody writes there");
    assert!(m.guest.start_queue(0).unwrap(), "it is told another one first");
    assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
}

#[test]
fn b03_a_dirty_log_cut_short_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, BASIC);
    for round in 0..20u16 {
        let mut m = Migrant::new(RawGuest::connect(rig.connect(), BASIC), BASIC);
        assert!(m.guest.start_queue(0).unwrap());
        let used = m.guest.rings(0).2;
        assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true) && m.log_ring(0, Some(used)));
        assert_eq!(m.guest.simple(0, IN, 0, DATA, 512), (OK, 513));
        for head in 0..8 {
            m.offer_read(3 * head, DATA + 0x1_0000 * u64::from(head), 65536);
        }
        if round % 2 == 0 {
            m.guest.kick(0);
        }
        m.log.set_len(0).unwrap();
        m.guest.kick(0);
        assert!(m.guest.client.is_closed(), "round {round}");
        assert_eq!(neighbour.simple(0, IN, 0, DATA, 512), (OK, 513));
    }
}

/// A migration is given up: the queue that had no log of its size starts without one.
#[test]
fn b41_a_queue_that_could_not_log_starts_once_it_need_not() {
    let (_folder, _rig, mut m) = scene();
    m.guest.stop_queue(0).unwrap();
    assert!(m.set_base(log_file(LOG_BYTES / 2), LOG_BYTES / 2, 0) && m.log_all(true));
    assert!(!m.guest.start_queue(0).unwrap(), "the log is too small");
    assert!(m.log_all(false));
    assert_eq!(m.guest.simple(0, IN, 1, DATA, 512), (OK, 513));
}

/// The same of a ring that was to be logged beyond the log.
#[test]
fn b41_a_queue_whose_ring_could_not_be_logged_starts_once_it_need_not() {
    let (_folder, _rig, mut m) = scene();
    let base = m.guest.stop_queue(0).unwrap();
    assert!(m.set_base(&m.log, LOG_BYTES, 0) && m.log_all(true));
    assert!(m.log_ring(0, Some(LOG_BYTES * 8 * PAGE)), "nobody writes there");
    m.offer_read(0, DATA, 512);
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let acked = |request, payload: &[u8], fds: &[_]| m.guest.client.acked(request, payload, fds);
    assert!(acked(request::SET_VRING_BASE, &halves(&[0, base]), &[]).unwrap());
    let started = acked(request::SET_VRING_KICK, &words(&[0]), &[kick.as_fd()]);
    assert!(!started.unwrap(), "its place is not in the log");
    assert!(m.log_ring(0, None));
    assert_eq!(m.guest.next_used(0, SOON).map(|(_, written)| written), Some(513));
}
