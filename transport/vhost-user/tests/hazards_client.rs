//! What a hostile front-end may send, and that a neighbour on the same worker is served meanwhile and
//! afterwards. Rows B1–B10 and B20–B23 of the table in docs/hazards.md, each a test of its name.
#![allow(missing_docs)]

use ringway_disk::{CustomDisk, EngineKind, Source};
use ringway_testkit::StallingStore;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PROTOCOL, F_VERSION_1, GUEST_BASE, MEMORY, NEED_REPLY,
    RawClient, RawGuest, USER_DELTA, halves, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use tempfile::TempDir;

const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const IN: u32 = 0;
const OK: u8 = 0;
const CAPACITY: u64 = 16 << 20;

/// Tests that count descriptors or threads of the process must not overlap with others.
static ALONE: std::sync::RwLock<()> = std::sync::RwLock::new(());

struct Scene {
    rig: Rig,
    neighbour: RawGuest,
    _folder: TempDir,
    _shared: std::sync::RwLockReadGuard<'static, ()>,
}

fn scene() -> Scene {
    let shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
    let (rig, neighbour, folder) = parts();
    Scene { rig, neighbour, _folder: folder, _shared: shared }
}

fn parts() -> (Rig, RawGuest, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), CAPACITY);
    let options = RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1);
    let mut rig = Rig::start(&options);
    let neighbour = RawGuest::start(rig.connect(), 1, 64, BASIC);
    (rig, neighbour, folder)
}

impl Scene {
    fn client(&mut self) -> RawClient {
        let client = RawClient::new(self.rig.connect());
        let features = words(&[BASIC | F_PROTOCOL]);
        client.send(request::SET_FEATURES, 0, &features, &[]).unwrap();
        client
            .send(request::SET_PROTOCOL_FEATURES, 0, &words(&[1 | 1 << 3 | 1 << 15]), &[])
            .unwrap();
        client
    }

    fn neighbour_lives(&mut self) {
        assert_eq!(self.neighbour.simple(0, IN, 0, DATA, 4096).0, OK);
    }
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    let mut payload = halves(&[u32::try_from(regions.len()).unwrap(), 0]);
    for region in regions {
        payload.extend(words(region));
    }
    payload
}

#[test]
fn b01_regions_and_descriptors_disagree() {
    let mut s = scene();
    let fd = memory(1 << 20);
    let region = [0, 1 << 20, 1 << 40, 0];
    for (regions, fds) in [(1, 0), (1, 2), (2, 1), (0, 1), (8, 7)] {
        let client = s.client();
        let fds = vec![fd.as_fd(); fds];
        client
            .send(request::SET_MEM_TABLE, NEED_REPLY, &table(&vec![region; regions]), &fds)
            .unwrap();
        assert!(client.is_closed(), "{regions} regions, {} descriptors", fds.len());
    }
    // A count that does not match the payload, and one beyond all bounds.
    for count in [2u32, 9, 255, u32::MAX] {
        let client = s.client();
        let mut payload = table(&[region]);
        payload[..4].copy_from_slice(&count.to_ne_bytes());
        client.send(request::SET_MEM_TABLE, 0, &payload, &[fd.as_fd()]).unwrap();
        assert!(client.is_closed(), "count {count}");
    }
    s.neighbour_lives();
}

#[test]
fn b02_addresses_that_wrap_or_overlap_are_refused() {
    let mut s = scene();
    let fd = memory(1 << 20);
    let client = s.client();
    let m = 1 << 20;
    for regions in [
        vec![[u64::MAX - 4096, m, 0, 0]],
        vec![[0, m, u64::MAX - 4096, 0]],
        vec![[0, 0, 0, 0]],
        vec![[0, u64::MAX, 0, 0]],
        vec![[0, m, 0, u64::MAX]],
        vec![[0, m, 0, 0], [m - 1, m, m, 0]],
        vec![[0, m, 0, 0], [0, m, m, 0]],
    ] {
        let fds = vec![fd.as_fd(); regions.len()];
        assert!(
            !client.acked(request::SET_MEM_TABLE, &table(&regions), &fds).unwrap(),
            "{regions:x?}"
        );
    }
    s.neighbour_lives();
}

#[test]
fn b02_a_buffer_over_two_regions_works() {
    let mut s = scene();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
    assert_eq!(guest.stop_queue(0).unwrap(), 0);
    // The same memory, cut in two in the middle of the data.
    let cut = DATA + 4096 - GUEST_BASE;
    let user = GUEST_BASE + USER_DELTA;
    let regions = [[GUEST_BASE, cut, user, 0], [GUEST_BASE + cut, MEMORY - cut, user + cut, cut]];
    let fds = [guest.memory.as_fd(); 2];
    assert!(guest.client.acked(request::SET_MEM_TABLE, &table(&regions), &fds).unwrap());
    assert!(guest.start_queue(0).unwrap());
    guest.poke(DATA, &[0x5a; 8192]);
    assert_eq!(guest.simple(0, 1, 0, DATA, 8192), (OK, 1));
    guest.poke(DATA, &[0; 8192]);
    assert_eq!(guest.simple(0, IN, 0, DATA, 8192), (OK, 8193));
    assert_eq!(guest.peek(DATA, 8192), [0x5a; 8192]);
    // A ring that straddles the seam is refused: its address is not one piece of our memory.
    assert!(guest.stop_queue(0).is_ok());
    let mut addr = halves(&[0, 0]);
    let over = user + cut - 256;
    addr.extend(words(&[over, user + 0x8000, user + 0x6000, 0]));
    let kick = bell();
    let c = &guest.client;
    c.send(request::SET_VRING_ADDR, 0, &addr, &[]).unwrap();
    assert!(!c.acked(request::SET_VRING_KICK, &words(&[0]), &[kick.as_fd()]).unwrap());
    s.neighbour_lives();
}

#[test]
fn b03_memory_shorter_than_claimed() {
    let mut s = scene();
    let fd = memory(1 << 20);
    let client = s.client();
    for region in [[0, (1 << 20) + 1, 0, 0], [0, 4096, 0, 1 << 20], [0, 1 << 30, 0, 0]] {
        assert!(!client.acked(request::SET_MEM_TABLE, &table(&[region]), &[fd.as_fd()]).unwrap());
    }
    // Not a file of memory at all.
    let bell = bell();
    let region = [0, 4096, 0, 0];
    assert!(!client.acked(request::SET_MEM_TABLE, &table(&[region]), &[bell.as_fd()]).unwrap());
    s.neighbour_lives();
}

#[test]
fn b03_memory_cut_short_later() {
    let mut s = scene();
    for round in 0..50u64 {
        let mut guest = RawGuest::start(s.rig.connect(), 2, 64, BASIC);
        assert_eq!(guest.simple(0, IN, 0, DATA, 512).0, OK);
        // Everything, or all but the rings, or in the middle of requests.
        for i in 0..20u16 {
            guest.put_header(DATA - 64, IN, u64::from(i));
            let chain = [
                Desc { addr: DATA - 64, len: 16, ..Desc::default() },
                Desc { addr: DATA, len: 65536, flags: 2, next: 0 },
                Desc { addr: DATA - 32, len: 1, flags: 2, next: 0 },
            ];
            guest.put_chain(1, 3 * i, &chain);
            guest.offer_quietly(1, 3 * i);
        }
        guest.kick(1);
        guest.memory.set_len(if round % 2 == 0 { 0 } else { DATA - GUEST_BASE - 0x2000 }).unwrap();
        guest.kick(0);
        guest.kick(1);
        if round % 2 == 0 {
            assert!(guest.client.is_closed(), "round {round} lives on: {:?}", s.rig.stats());
        }
        s.neighbour_lives();
    }
}

#[test]
fn b05_unexpected_descriptors_are_closed() {
    let alone = ALONE.write().unwrap_or_else(|e| e.into_inner());
    let (mut rig, mut neighbour, _folder) = parts();
    let open_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let fds: Vec<OwnedFd> = (0..32).map(|_| bell()).collect();
    let all: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let before = open_fds();
    for request in 0..64 {
        for count in [1, 2, 32] {
            let client = RawClient::new(rig.connect());
            client.send(request, 0, &words(&[0]), &all[..count]).unwrap();
            // Whatever it makes of the message: no descriptor stays once the connection is gone.
            drop(client);
            rig.join_some();
        }
    }
    // The rig's own first session is still there; everything else is gone.
    assert_eq!(open_fds(), before, "descriptors leak");
    // More descriptors than fit in a message at all.
    let many: Vec<OwnedFd> = (0..200).map(|_| bell()).collect();
    let many: Vec<BorrowedFd<'_>> = many.iter().map(AsFd::as_fd).collect();
    let client = RawClient::new(rig.connect());
    client.send(request::SET_OWNER, 0, &[], &many).unwrap();
    assert!(client.is_closed());
    drop(client);
    assert_eq!(neighbour.simple(0, IN, 0, DATA, 512).0, OK);
    drop(alone);
}

/// What is wrong with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Right,
    NoDescriptor,
    OneMore,
    Short,
    Long,
    Huge,
}

impl Form {
    const ALL: [Self; 6] =
        [Self::Right, Self::NoDescriptor, Self::OneMore, Self::Short, Self::Long, Self::Huge];
}

/// Every ordered pair of messages, with right and wrong numbers of descriptors and lengths: no
/// panic, no hang, and the neighbour never notices.
#[test]
fn b06_message_order_matrix() {
    let mut s = scene();
    let memory = memory(1 << 20);
    let kick = bell();
    let mut cases = 0;
    let requests: Vec<u32> = (0..46).collect();
    let payload = |request: u32| -> Vec<u8> {
        match request {
            5 => table(&[[GUEST_BASE, 1 << 20, 1 << 40, 0]]),
            9 => [halves(&[0, 0]), words(&[1 << 40, (1 << 40) + 0x8000, (1 << 40) + 0x6000, 0])]
                .concat(),
            37 | 38 => words(&[0, GUEST_BASE, 1 << 20, 1 << 40, 0]),
            24 | 25 => [halves(&[32, 1, 0]), vec![0]].concat(),
            8 => halves(&[0, 64]),
            18 => halves(&[0, 1]),
            10..=14 => words(&[0]),
            2 => words(&[BASIC | F_PROTOCOL]),
            16 => words(&[1 | 1 << 3 | 1 << 12 | 1 << 15]),
            31 | 32 => [words(&[1 << 16, 0]), halves(&[2 | 64 << 16, 0])].concat(),
            _ => Vec::new(),
        }
    };
    let asks_for_fd = |request| matches!(request, 5 | 12..=14 | 21 | 32 | 37);
    for &first in &requests {
        for &second in &requests {
            for form in Form::ALL {
                // The same message as with the right form.
                if (form == Form::NoDescriptor && !asks_for_fd(second))
                    || (form == Form::Short && payload(second).is_empty())
                {
                    continue;
                }
                let client = RawClient::new(s.rig.connect());
                // The first one has its right form, or nobody would read the second.
                for (request, form) in [(first, Form::Right), (second, form)] {
                    let mut bytes = payload(request);
                    let mut fds: Vec<BorrowedFd<'_>> = match request {
                        5 | 32 | 37 => vec![memory.as_fd()],
                        _ if asks_for_fd(request) => vec![kick.as_fd()],
                        _ => Vec::new(),
                    };
                    match form {
                        Form::Right => {}
                        Form::NoDescriptor => fds.clear(),
                        Form::OneMore => fds.push(kick.as_fd()),
                        Form::Short => bytes.truncate(bytes.len() / 2),
                        Form::Long => bytes.extend_from_slice(&[0; 8]),
                        Form::Huge => bytes.resize(5000, 0),
                    }
                    // The peer may have hung up after the first already.
                    let _ = client.send(request, NEED_REPLY, &bytes, &fds);
                }
                cases += 1;
            }
            s.rig.join_some();
        }
        s.neighbour_lives();
    }
    println!("{cases} cases");
    assert!(cases > 5000);
}

#[test]
fn b06_headers_that_are_none() {
    let mut s = scene();
    for header in
        [[1u32, 0, 0], [1, 2, 0], [1, 1 | 4, 0], [1, 1, u32::MAX], [2, 1, 9000], [u32::MAX, 1, 0]]
    {
        let client = RawClient::new(s.rig.connect());
        client.send_bytes(&halves(&header), &[]).unwrap();
        assert!(client.is_closed(), "{header:x?}");
    }
    // Offered to nobody, but answered if an answer is wanted.
    let client = s.client();
    for unknown in [0, 4 + 100, 33, 39, 42, 1000] {
        assert!(!client.acked(unknown, &[], &[]).unwrap(), "request {unknown}");
    }
    // Parts of the configuration space that do not exist: an empty answer, or a refusal to write.
    for (offset, size) in [(0, 257), (256, 1), (u32::MAX, 1), (255, 2), (0, 0)] {
        let bytes = vec![0; size as usize];
        let payload = [halves(&[offset, size, 0]), bytes].concat();
        client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
        assert_eq!(client.receive().unwrap(), (request::GET_CONFIG, Vec::new()));
        assert!(!client.acked(request::SET_CONFIG, &payload, &[]).unwrap());
    }
    // The base of a queue that is not there: no answer could say so.
    client.send(request::GET_VRING_BASE, NEED_REPLY, &halves(&[2, 0]), &[]).unwrap();
    assert!(client.is_closed());
    s.neighbour_lives();
}

#[test]
fn b09_a_client_that_stops_in_the_middle() {
    let mut s = scene();
    let half = RawClient::new(s.rig.connect());
    half.send_bytes(&[1, 0, 0, 0, 1], &[]).unwrap();
    let body = RawClient::new(s.rig.connect());
    body.send_bytes(&halves(&[2, 1, 8]), &[]).unwrap();
    s.neighbour_lives();
    // One that never reads its answers.
    let socket = s.rig.connect();
    socket.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let unread = RawClient::new(socket);
    for _ in 0..2000 {
        if unread.send(request::GET_FEATURES, 0, &[], &[]).is_err() {
            break;
        }
        if s.neighbour.simple(0, IN, 0, DATA, 512).0 != OK {
            panic!("the neighbour suffers");
        }
    }
    drop((half, body, unread));
    s.neighbour_lives();
}

#[test]
fn b09_a_full_call_eventfd() {
    let mut s = scene();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
    let call = bell();
    // One more write would block, were the descriptor blocking.
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    assert!(guest.client.acked(request::SET_VRING_CALL, &words(&[0]), &[call.as_fd()]).unwrap());
    for i in 0..20 {
        assert_eq!(guest.simple(0, IN, i, DATA, 512), (OK, 513));
    }
    s.neighbour_lives();
}

/// A sparse file costs its owner nothing, but mapping it takes address space that all disks of a daemon
/// share, and a process without any dies of its next allocation.
#[test]
fn b20_a_client_cannot_take_all_address_space() {
    const TIB: u64 = 1 << 40;
    let mut s = scene();
    let huge = memory(1 << 62);
    let client = s.client();
    let add = |client: &RawClient, at: u64, bytes: u64| {
        let payload = words(&[0, at, bytes, at, 0]);
        client.acked(request::ADD_MEM_REG, &payload, &[huge.as_fd()]).unwrap()
    };
    let (mut at, mut bytes, mut taken) = (1 << 48, 1 << 46, 0);
    while bytes >= 4096 {
        if add(&client, at, bytes) {
            (at, taken) = (at + bytes, taken + bytes);
        } else {
            bytes /= 2;
        }
    }
    // Other tests of this process have a little as well.
    assert!((47 * TIB..=48 * TIB).contains(&taken), "{taken:#x} bytes");
    s.neighbour_lives();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
    assert_eq!(guest.simple(0, IN, 0, DATA, 4096).0, OK);
    // What comes next has half of what is left, and the dirty log counts like memory.
    let next = RawClient::new(s.rig.connect());
    next.send(request::SET_FEATURES, 0, &words(&[BASIC | F_PROTOCOL]), &[]).unwrap();
    let protocol = words(&[1 | 1 << 1 | 1 << 3 | 1 << 15]);
    next.send(request::SET_PROTOCOL_FEATURES, 0, &protocol, &[]).unwrap();
    assert!(!add(&next, 1 << 48, 25 * TIB));
    let log = words(&[16 * TIB, 0]);
    next.send(request::SET_LOG_BASE, 0, &log, &[huge.as_fd()]).unwrap();
    assert_eq!(next.receive().unwrap().0, request::SET_LOG_BASE);
    assert!(!add(&next, 1 << 48, 9 * TIB) && add(&next, 1 << 48, 7 * TIB));
    // All of it comes back.
    drop((client, next, guest));
    s.rig.join_some();
    let again = s.client();
    assert!(add(&again, 1 << 48, 47 * TIB));
    s.neighbour_lives();
}

/// Makes the next call of queue 0 sleep. The descriptor's flags belong to both sides: the client can make
/// it blocking again at any time.
fn block_the_next_call(guest: &RawGuest) {
    let call = bell();
    assert!(guest.client.acked(request::SET_VRING_CALL, &words(&[0]), &[call.as_fd()]).unwrap());
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    // A running queue was called once already.
    rustix::io::write(&call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
}

#[test]
fn b09_a_call_eventfd_made_blocking_and_full() {
    let mut s = scene();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
    block_the_next_call(&guest);
    assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513), "answered, and called afterwards");
    s.neighbour_lives();
    assert!(guest.client.is_closed());
    s.neighbour_lives();
}

/// Else a client could go on with a new descriptor, or a new connection, for each request.
#[test]
fn b21_who_holds_up_others_waits_longer_each_time() {
    let mut s = scene();
    assert_eq!(s.rig.export().pause_before_next(), Duration::ZERO);
    for _ in 0..6 {
        let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
        block_the_next_call(&guest);
        assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513));
        assert!(guest.client.is_closed());
        s.rig.join_some();
        s.neighbour_lives();
    }
    let pause = s.rig.export().pause_before_next().as_secs();
    assert!((9..=32).contains(&pause), "{pause} s after six times");
}

/// The connection is over when the call would block, and nobody is left who could end it.
#[test]
fn b21_who_has_left_is_not_rung() {
    let _shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
    let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
    let options =
        RigOptions::new(Source::Null { bytes: CAPACITY, latency_us: 0 }, EngineKind::Null);
    let disk = CustomDisk::new(CAPACITY).open(None).unwrap();
    let mut rig = Rig::with_engines(disk, &options, {
        let store = store.clone();
        move || store.engine()
    });
    store.stall_reads(true);
    let mut guest = RawGuest::start(rig.connect(), 1, 64, BASIC);
    let call = bell();
    assert!(guest.client.acked(request::SET_VRING_CALL, &words(&[0]), &[call.as_fd()]).unwrap());
    // It is rung when it is set.
    rustix::io::read(&call, &mut [0; 8]).unwrap();
    let header = DATA - 0x1000;
    guest.put_header(header, IN, 0);
    let data = Desc { addr: DATA, len: 512, flags: 2, next: 0 };
    let status = Desc { addr: header + 64, len: 1, flags: 2, next: 0 };
    guest.put_chain(0, 0, &[Desc { addr: header, len: 16, ..Desc::default() }, data, status]);
    guest.offer(0, 0);
    store.wait_stalled(1);
    drop(guest);
    rig.join_sessions();
    store.stall_reads(false);
    rig.export().await_clear().unwrap();
    let rung = rustix::io::read(&call, &mut [0; 8]);
    assert_eq!(rung, Err(rustix::io::Errno::AGAIN), "it could have blocked");
}

#[test]
fn b08_a_stuck_disk_fences_the_next_connection() {
    let _shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
    let slow = Source::Null { bytes: CAPACITY, latency_us: 4_000_000 };
    let mut options = RigOptions::new(slow, EngineKind::NullAfter(4_000_000)).queues(2, 1);
    options.drain_max = Duration::from_millis(300);
    let mut rig = Rig::start(&options);
    let mut guest = RawGuest::start(rig.connect(), 2, 64, BASIC);
    let header = DATA - 0x1000;
    guest.put_header(header, 1, 0);
    let chain = [
        Desc { addr: header, len: 16, ..Desc::default() },
        Desc { addr: DATA, len: 512, ..Desc::default() },
        Desc { addr: header + 64, len: 1, flags: 2, next: 0 },
    ];
    for queue in 0..2 {
        guest.put_chain(queue, 0, &chain);
    }
    guest.offer(0, 0);
    rig.wait_in_flight(1);
    // It goes, and its other queue with it.
    guest.client.hang_up();
    rig.join_sessions();
    guest.offer(1, 0);
    // Whoever comes next in the same memory waits until the old write has landed.
    let mut other = RawGuest::connect(rig.connect(), BASIC);
    other.memory = guest.memory.try_clone().unwrap();
    assert!(other.set_mem_table().unwrap());
    other.reset_queue(0);
    assert!(other.start_queue(0).unwrap());
    other.put_chain(0, 0, &chain);
    other.put_header(header, 0, 0);
    other.offer(0, 0);
    assert!(other.next_used(0, Duration::from_secs(30)).is_some());
    assert!(rig.export().is_clear(), "served while old writes are in flight");
    assert!(guest.next_used(1, Duration::from_millis(10)).is_none(), "a dead connection is served");
}

#[test]
fn b10_kick_and_call_must_be_eventfds() {
    let mut s = scene();
    let file = memory(4096);
    // One that can be written, which eventfds and few others can.
    // SAFETY: it takes flags.
    let fanotify = unsafe { libc::fanotify_init(libc::FAN_CLOEXEC | libc::FAN_CLASS_CONTENT, 0) };
    let fanotify = (fanotify >= 0).then(|| {
        // SAFETY: it is new, and nobody else's.
        unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fanotify) }
    });
    if fanotify.is_none() {
        ringway_testkit::skip(ringway_testkit::Need::Root, "fanotify_init");
    }
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let all = [Some(&file), Some(&epoll), fanotify.as_ref()];
    for fd in all.into_iter().flatten().map(AsFd::as_fd) {
        for request in [request::SET_VRING_KICK, request::SET_VRING_CALL, request::SET_VRING_ERR] {
            let client = s.client();
            assert!(!client.acked(request, &words(&[0]), &[fd]).unwrap());
        }
    }
    s.neighbour_lives();
}

/// Starts queue 0 with a kick of the caller's.
fn start_with(guest: &RawGuest, kick: BorrowedFd<'_>) {
    let (desc, avail, used) = guest.rings(0);
    let mut addr = halves(&[0, 0]);
    addr.extend(words(&[desc + USER_DELTA, used + USER_DELTA, avail + USER_DELTA, 0]));
    let call = bell();
    for (what, payload, fds) in [
        (request::SET_VRING_NUM, halves(&[0, 64]), &[][..]),
        (request::SET_VRING_BASE, halves(&[0, 0]), &[]),
        (request::SET_VRING_ADDR, addr, &[]),
        (request::SET_VRING_CALL, words(&[0]), &[call.as_fd()]),
        (request::SET_VRING_KICK, words(&[0]), &[kick]),
        (request::SET_VRING_ENABLE, halves(&[0, 1]), &[]),
    ] {
        assert!(guest.client.acked(what, &payload, fds).unwrap(), "{what}");
    }
}

/// Offers one read on queue 0, without a kick.
fn offer_read(guest: &mut RawGuest) {
    guest.put_header(DATA, IN, 0);
    let chain = [
        Desc { addr: DATA, len: 16, ..Desc::default() },
        Desc { addr: DATA + 4096, len: 512, flags: 2, next: 0 },
        Desc { addr: DATA + 64, len: 1, flags: 2, next: 0 },
    ];
    guest.put_chain(0, 0, &chain);
    guest.offer_quietly(0, 0);
}

fn is_answered(guest: &RawGuest, count: u8) {
    let (_, _, used) = guest.rings(0);
    let begun = std::time::Instant::now();
    while guest.peek(used + 2, 2) != [count, 0] {
        assert!(begun.elapsed() < Duration::from_secs(20), "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A kick whose guest has closed its end; and one that is always readable, because reading it takes
/// one off a counter that is almost at its end. The first one's last kick counts; for the second one
/// nobody stays awake.
#[test]
fn b10_kicks_that_are_closed_or_never_empty() {
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let usable = ringway_export::usable_engines();
        if !usable.iter().any(|(kind, usable)| *kind == engine && usable.is_ok()) {
            continue;
        }
        let _shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
        let folder = tempfile::tempdir().unwrap();
        let path = image(folder.path(), CAPACITY);
        let mut rig = Rig::start(&RigOptions::buffered(&path, engine).queues(2, 1));
        let mut neighbour = RawGuest::start(rig.connect(), 1, 64, BASIC);
        let mut lives = || assert_eq!(neighbour.simple(0, IN, 0, DATA, 4096).0, OK);
        let mut guest = RawGuest::connect(rig.connect(), BASIC);
        let kick = bell();
        start_with(&guest, kick.as_fd());
        offer_read(&mut guest);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        drop(kick);
        is_answered(&guest, 1);
        lives();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let kick = eventfd(0, flags).unwrap();
        rustix::io::write(&kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let mut guest = RawGuest::connect(rig.connect(), BASIC);
        offer_read(&mut guest);
        start_with(&guest, kick.as_fd());
        is_answered(&guest, 1);
        lives();
        std::thread::sleep(Duration::from_millis(100));
        let turns = |rig: &Rig| rig.stats()[0].turns;
        let before = turns(&rig);
        std::thread::sleep(Duration::from_millis(200));
        // To be asked wakes it, and it spins a little before it sleeps again.
        let more = turns(&rig) - before;
        assert!(more < 1000, "{engine}: {more} turns for a bell that nobody rings");
        lives();
    }
}

/// A TCP connection whose peer reads nothing, with all it takes in it: closing it waits for hours.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 65536]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    let hours = Some(Duration::from_secs(30_000));
    rustix::net::sockopt::set_socket_linger(&ours, hours).unwrap();
    (ours.into(), theirs)
}

/// Where descriptors can come: with any message, before the end of a connection that is not read any
/// more, and in a socket that is sent.
#[test]
fn b22_a_socket_that_lingers_keeps_nobody_waiting() {
    let mut s = scene();
    let (mut peers, mut closing) = (Vec::new(), Vec::new());
    for case in 0..3 {
        let client = s.client();
        let (fd, peer) = lingering();
        match case {
            0 => client.send(request::GET_FEATURES, 0, &[], &[fd.as_fd()]).unwrap(),
            1 => {
                // The first one ends the connection, with the second one in it.
                client.send(request::SET_OWNER, 0, &[1; 8], &[]).unwrap();
                let _ = client.send(request::SET_OWNER, 0, &[], &[fd.as_fd()]);
            }
            _ => {
                let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
                RawClient::new(ours).send(request::SET_OWNER, 0, &[], &[fd.as_fd()]).unwrap();
                let channel = &[theirs.as_fd()];
                client.send(request::SET_BACKEND_REQ_FD, 0, &[], channel).unwrap();
                client.hang_up();
            }
        }
        // Whoever closes last waits, and that is not to be the session; it is this thread, if the
        // session was gone before it was sent.
        closing.push(std::thread::spawn(move || drop(fd)));
        peers.push(peer);
        assert!(client.is_closed(), "way {case}");
        drop(client);
        s.rig.join_some();
        s.neighbour_lives();
    }
    // What waits for them is over.
    drop(peers);
    closing.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What may ask its file system, or wait for others, is not touched.
#[test]
fn b22_foreign_descriptors_cost_the_connection_and_in_the_end_the_disk() {
    let alone = ALONE.write().unwrap_or_else(|e| e.into_inner());
    let (mut rig, mut neighbour, _folder) = parts();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listener = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let open_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let all = [reader.as_fd(), writer.as_fd(), socket.as_fd(), listener.as_fd(), zero.as_fd()];
    for fd in all {
        for request in [request::SET_VRING_KICK, request::SET_BACKEND_REQ_FD, request::SET_OWNER] {
            let before = open_fds();
            let client = RawClient::new(rig.connect());
            client.send(request, 0, &words(&[0]), &[fd, bell().as_fd()]).unwrap();
            assert!(client.is_closed());
            drop(client);
            rig.join_some();
            assert_eq!(open_fds(), before + 1, "it alone stays open, unused");
        }
    }
    assert!(!rig.export().is_closed());
    let client = RawClient::new(rig.connect());
    client.send(request::SET_OWNER, 0, &[], &vec![reader.as_fd(); 200]).unwrap();
    assert!(client.is_closed());
    assert!(rig.export().is_closed(), "others may take no more descriptors than the process has");
    assert_eq!(neighbour.simple(0, IN, 0, DATA, 512).0, OK);
    drop(alone);
}

/// Memory in files that the kernel alone serves is taken: of memory, and of local disks. One of FUSE that
/// was sent cannot be closed before its server has gone, and so has no place in the process of a test.
#[test]
fn b22_memory_is_taken_from_files_that_the_kernel_alone_serves() {
    let mut s = scene();
    let region = table(&[[0, 1 << 20, 0, 0]]);
    let here = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    here.set_len(1 << 20).unwrap();
    // ext4 and xfs; statfs(2).
    let local = [0xef53, 0x5846_5342].contains(&rustix::fs::fstatfs(&here).unwrap().f_type);
    let mut files = vec![memory(1 << 20)];
    files.extend(local.then(|| here.into()));
    for file in files {
        let client = s.client();
        assert!(client.acked(request::SET_MEM_TABLE, &region, &[file.as_fd()]).unwrap());
    }
    s.neighbour_lives();
}

/// A front-end in the middle of a message is paused as any other, and goes on.
#[test]
fn b23_half_a_message_keeps_no_disk_from_pausing() {
    let mut s = scene();
    let mut guest = RawGuest::start(s.rig.connect(), 1, 64, BASIC);
    let features = halves(&[request::GET_FEATURES, 1, 0]);
    guest.client.send_bytes(&features[..5], &[]).unwrap();
    s.rig.export().pause().unwrap();
    assert!(s.rig.export().is_paused());
    assert!(s.rig.stats().iter().all(|worker| worker.queues.is_empty()), "no queue runs");
    s.rig.export().resume().unwrap();
    assert!(!s.rig.export().is_paused());
    assert_eq!(guest.simple(0, IN, 0, DATA, 512).0, OK);
    guest.client.send_bytes(&features[5..], &[]).unwrap();
    assert_eq!(guest.client.receive().unwrap().0, request::GET_FEATURES);
    s.neighbour_lives();
}

/// Ten seconds are for all of a message, not for each byte of it.
#[test]
fn b23_a_message_that_comes_byte_by_byte_ends_the_connection() {
    let mut s = scene();
    let client = s.client();
    let message = [halves(&[request::GET_FEATURES, 1, 268]), vec![0; 268]].concat();
    let begun = std::time::Instant::now();
    let cut = message.iter().position(|&byte| {
        std::thread::sleep(Duration::from_secs(1));
        client.send_bytes(&[byte], &[]).is_err()
    });
    // By the clock: a thread that sleeps for a second on a busy machine sends fewer bytes in ten.
    let after = begun.elapsed();
    assert!(cut.is_some() && after >= Duration::from_secs(10), "after {after:?}: {cut:?}");
    s.neighbour_lives();
}
