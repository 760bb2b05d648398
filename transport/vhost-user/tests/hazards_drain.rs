//! Queues stop under full load, in every way there is: bounded, and not a byte of guest memory is
//! written once the front-end has its answer. Rows A17, B7, B8, B12, B37 to B40, C59 of docs/hazards.md.

use ringway_disk::{Alignment, CustomDisk, EngineKind, SimModel, Source};
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_PACKED, F_VERSION_1, GUEST_BASE, MEMORY, RawGuest, USER_DELTA, halves,
    inflight_payload, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Rng, StallingStore};
use ringway_vhost_user::Ended;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 16 << 20;
const QUEUES: u32 = 2;
/// Requests in flight per queue; each takes three descriptors.
const LOAD: u16 = 20;
const READ: u32 = 0;

/// How a queue is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    GetBase,
    Reset,
    NewMemory,
    Disconnect,
    Order,
}

fn rig(options: &RigOptions) -> Rig {
    Rig::start(&options.clone().queues(2, 1))
}

/// A disk that takes its time: every read is in flight for 80 µs at least.
fn slow() -> RigOptions {
    let source = Source::Sim { model: SimModel::Ssd, bytes: CAPACITY };
    RigOptions::new(source, EngineKind::Sim(SimModel::Ssd))
}

/// Where request `at` of a queue has its data; its header and status lie in front of it.
fn data(queue: u32, at: u16) -> u64 {
    DATA + 0x1000 + u64::from(queue) * 0x10_0000 + u64::from(at) * 0x2000
}

/// Puts all requests of both queues down and rings both bells.
fn load(guest: &mut RawGuest, kind: u32) {
    for queue in 0..QUEUES {
        for at in 0..LOAD {
            let place = data(queue, at);
            guest.put_header(place - 64, kind, u64::from(at) * 16);
            let flags = if kind == READ { 2 } else { 0 };
            let chain = [
                Desc { addr: place - 64, len: 16, ..Desc::default() },
                Desc { addr: place, len: 4096, flags, next: 0 },
                Desc { addr: place - 32, len: 1, flags: 2, next: 0 },
            ];
            guest.put_chain(queue, 3 * at, &chain);
            guest.offer_quietly(queue, 3 * at);
        }
        guest.kick(queue);
    }
}

/// The parts of guest memory that a device could write: rings and buffers.
fn parts() -> [(u64, usize); 3] {
    let len = usize::from(LOAD) * 0x2000 + 0x1000;
    [(GUEST_BASE, 0x2_0000), (DATA, len), (DATA + 0x10_0000, len)]
}

/// Writes over everything the device could write, and returns what is there now.
fn scramble(memory: &std::fs::File, seed: u8) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut all = Vec::new();
    for (addr, len) in parts() {
        let bytes = vec![seed | 1; len];
        memory.write_all_at(&bytes, addr - GUEST_BASE).unwrap();
        all.extend(bytes);
    }
    all
}

fn contents(memory: &std::fs::File) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut all = Vec::new();
    for (addr, len) in parts() {
        let mut bytes = vec![0; len];
        memory.read_exact_at(&mut bytes, addr - GUEST_BASE).unwrap();
        all.extend(bytes);
    }
    all
}

/// Stops all queues of a guest; returns with the front-end's answer.
fn stop(rig: &mut Rig, mut guest: RawGuest, how: Stop) -> (std::fs::File, Option<RawGuest>) {
    let memory = guest.memory.try_clone().unwrap();
    match how {
        Stop::GetBase => {
            for queue in 0..QUEUES {
                guest.stop_queue(queue).unwrap();
            }
        }
        Stop::Reset => assert!(guest.client.acked(request::RESET_DEVICE, &[], &[]).unwrap()),
        Stop::NewMemory => {
            let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&other, MEMORY).unwrap();
            let region = words(&[GUEST_BASE, MEMORY, GUEST_BASE + USER_DELTA, 0]);
            let table = [halves(&[1, 0]), region].concat();
            let fds = [other.as_fd()];
            assert!(guest.client.acked(request::SET_MEM_TABLE, &table, &fds).unwrap());
        }
        Stop::Disconnect => {
            drop(guest);
            // All but the first session, which keeps the rig in order.
            rig.join_some();
            return (memory, None);
        }
        Stop::Order => unreachable!("ends the whole rig"),
    }
    (memory, Some(guest))
}

fn nothing_is_written_afterwards(ring: u64, rounds: u32) {
    let mut rng = Rng::for_test("b08");
    let mut rig = rig(&slow());
    let _first = rig.connect();
    let mut unfinished = 0;
    for round in 0..rounds {
        let how = [Stop::GetBase, Stop::Reset, Stop::NewMemory, Stop::Disconnect];
        let how = how[round as usize % how.len()];
        let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1 | F_FLUSH | ring);
        load(&mut guest, READ);
        std::thread::sleep(Duration::from_micros(rng.below(60)));
        // The status of the last request tells whether there was anything to wait for.
        unfinished += u32::from(guest.next_used(1, Duration::ZERO).is_none());
        let (memory, guest) = stop(&mut rig, guest, how);
        // Whatever comes from now on is seen, be it the very bytes that were there.
        let seed = u8::try_from(rng.below(256)).unwrap();
        let expected = scramble(&memory, seed);
        std::thread::sleep(Duration::from_micros(500));
        assert!(contents(&memory) == expected, "round {round}: written after {how:?}");
        drop(guest);
        rig.join_some();
    }
    println!("{rounds} rounds, {unfinished} stopped before the first answer");
    assert!(unfinished > rounds / 50, "the load was no load");
}

/// How often, unless `RINGWAY_DRAINS` says otherwise.
fn rounds() -> u32 {
    std::env::var("RINGWAY_DRAINS").map_or(1000, |word| word.parse().expect("a number"))
}

#[test]
fn b08_nothing_is_written_after_the_answer_split() {
    nothing_is_written_afterwards(0, rounds());
}

#[test]
fn b08_nothing_is_written_after_the_answer_packed() {
    nothing_is_written_afterwards(F_PACKED, rounds());
}

/// The order to stop, as SIGTERM gives it, ends all sessions.
#[test]
fn b08_nothing_is_written_after_the_order_to_stop() {
    for round in 0..100u32 {
        let mut rig = rig(&slow());
        let ring = if round % 2 == 0 { 0 } else { F_PACKED };
        let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1 | ring);
        load(&mut guest, READ);
        rig.order_to_stop();
        rig.join_sessions();
        let expected = scramble(&guest.memory, 0x55);
        std::thread::sleep(Duration::from_micros(500));
        assert!(contents(&guest.memory) == expected, "round {round}");
    }
}

/// A disk that does not answer for so long, which is far longer than a daemon waits for it.
fn stuck(stuck: Duration) -> RigOptions {
    let micros = u32::try_from(stuck.as_micros()).unwrap();
    let source = Source::Null { bytes: CAPACITY, latency_us: micros };
    let mut options = RigOptions::new(source, EngineKind::NullAfter(micros));
    options.drain_max = Duration::from_millis(200);
    options
}

/// Sends the message that stops queues.
fn ask_to_stop(guest: &RawGuest, how: Stop) {
    let client = &guest.client;
    match how {
        Stop::GetBase => client.send(request::GET_VRING_BASE, 0, &halves(&[0, 0]), &[]).unwrap(),
        Stop::Reset => client.send(request::RESET_DEVICE, 8, &[], &[]).unwrap(),
        Stop::NewMemory => {
            let region = words(&[GUEST_BASE, MEMORY, GUEST_BASE + USER_DELTA, 0]);
            let table = [halves(&[1, 0]), region].concat();
            client.send(request::SET_MEM_TABLE, 8, &table, &[guest.memory.as_fd()]).unwrap();
        }
        Stop::Disconnect | Stop::Order => unreachable!("no message"),
    }
}

/// A front-end that gets no answer goes on without us, and its machine begins anew in the same memory: it is
/// answered when the disk has finished, however long that takes, and its connection lives.
#[test]
fn b37_who_stops_a_queue_is_answered_once_the_disk_has_finished() {
    let threads = [Stop::GetBase, Stop::Reset, Stop::NewMemory].map(|how| {
        std::thread::spawn(move || {
            let mut rig = rig(&stuck(Duration::from_secs(3)));
            let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1);
            load(&mut guest, READ);
            rig.wait_in_flight(QUEUES as usize * usize::from(LOAD));
            ask_to_stop(&guest, how);
            // Long after its time is over orders are carried out, as far as they can be.
            std::thread::sleep(Duration::from_millis(600));
            assert!(rig.export().pause().is_err(), "{how:?}: something is in flight");
            assert!(!rig.export().is_paused(), "{how:?}: storage may still write");
            guest.client.receive().unwrap_or_else(|error| panic!("{how:?}: {error}"));
            let queues = if how == Stop::GetBase { 0..1 } else { 0..QUEUES };
            for queue in queues {
                let done = (0..LOAD).filter(|_| guest.next_used(queue, Duration::ZERO).is_some());
                assert_eq!(done.count(), usize::from(LOAD), "{how:?}: answered before");
            }
            let after = contents(&guest.memory);
            assert!(guest.client.ask_u64(request::GET_FEATURES).is_ok(), "{how:?}");
            rig.export().pause().unwrap();
            if how != Stop::GetBase {
                assert!(contents(&guest.memory) == after, "written after {how:?}");
            }
            rig.export().resume().unwrap();
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
}

/// A pause that had to give up, and a resume, while a front-end waits for one of its queues to stop. Its next
/// message comes at once.
#[test]
fn b37_the_other_queues_go_on_after_a_pause_that_gave_up() {
    let mut rig = rig(&stuck(Duration::from_secs(2)));
    let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1);
    load(&mut guest, READ);
    rig.wait_in_flight(QUEUES as usize * usize::from(LOAD));
    ask_to_stop(&guest, Stop::GetBase);
    std::thread::sleep(Duration::from_millis(600));
    assert!(rig.export().pause().is_err(), "something is in flight");
    rig.export().resume().unwrap();
    guest.client.receive().unwrap();
    guest.client.ask_u64(request::GET_FEATURES).unwrap();
    for at in 0..LOAD {
        assert!(guest.next_used(1, Duration::from_secs(30)).is_some(), "{at}");
    }
    assert_eq!(guest.simple(1, READ, 0, DATA, 512).0, 0);
}

/// The front-end goes while the disk has requests: what comes of them is not written into memory that may be
/// somebody else's, and the record goes on naming them.
#[test]
fn b38_a_disk_that_goes_on_writes_no_answers_into_memory_of_a_front_end_that_has_gone() {
    for format in [0, F_PACKED] {
        let mut rig = rig(&stuck(Duration::from_secs(2)));
        let mut guest = RawGuest::connect(rig.connect(), F_VERSION_1 | format);
        let (bytes, region) = guest.client.get_inflight(2, 64).unwrap();
        let payload = inflight_payload(bytes, 0, 2, 64);
        assert!(guest.client.set_inflight(&payload, region.as_fd()).unwrap());
        for queue in 0..QUEUES {
            assert!(guest.start_queue(queue).unwrap());
        }
        load(&mut guest, READ);
        rig.wait_in_flight(QUEUES as usize * usize::from(LOAD));
        guest.client.hang_up();
        rig.join_sessions();
        let expected = scramble(&guest.memory, 0x55);
        let begun = Instant::now();
        while !rig.export().is_clear() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let found = contents(&guest.memory);
        let changed: Vec<_> = (0..found.len()).filter(|&at| found[at] != expected[at]).collect();
        assert!(changed.is_empty(), "the old queue has written at {changed:x?}");
        let mut record = vec![0; usize::try_from(bytes).unwrap()];
        std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::from(region), &mut record, 0)
            .unwrap();
        let entry = if format == 0 { 16 } else { 32 };
        assert_eq!(record[entry], 1, "a successor finds what was not answered");
    }
}

/// A disk that does not answer holds nobody up who has gone, nor the daemon's end.
#[test]
fn b08_every_way_to_end_is_bounded() {
    let long = Duration::from_secs(5);
    let options = stuck(long);
    let threads = [Stop::Disconnect, Stop::Order].map(|how| {
        let options = options.clone();
        std::thread::spawn(move || {
            let mut rig = rig(&options);
            let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1);
            load(&mut guest, READ);
            rig.wait_in_flight(QUEUES as usize * usize::from(LOAD));
            let begun = Instant::now();
            match how {
                Stop::Order => rig.order_to_stop(),
                _ => guest.client.hang_up(),
            }
            rig.join_sessions();
            let took = begun.elapsed();
            let waits = how == Stop::Order;
            assert!(!waits || took >= options.drain_max, "{how:?}: it did not wait for the disk");
            assert!(took < long, "{how:?} took {took:?}");
            assert!(guest.client.is_closed());
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
}

/// The memory table changes over and over while requests are in flight: none is lost, none fails,
/// and all the data is right.
fn memory_changes_under_load(ring: u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), CAPACITY);
    for at in 0..LOAD {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let byte = u8::try_from(at + 1).unwrap();
        file.write_all_at(&[byte; 4096], u64::from(at) * 8192).unwrap();
    }
    let mut rig = rig(&RigOptions::buffered(&path, EngineKind::Threads));
    let mut guest = RawGuest::start(rig.connect(), QUEUES, 64, F_VERSION_1 | ring);
    let user = GUEST_BASE + USER_DELTA;
    let cut = data(1, 3) - GUEST_BASE;
    let whole = vec![[GUEST_BASE, MEMORY, user, 0]];
    let halved =
        vec![[GUEST_BASE, cut, user, 0], [GUEST_BASE + cut, MEMORY - cut, user + cut, cut]];
    for round in 0..200 {
        load(&mut guest, READ);
        let regions = if round % 2 == 0 { &halved } else { &whole };
        let mut table = halves(&[u32::try_from(regions.len()).unwrap(), 0]);
        table.extend(regions.iter().flat_map(|region| words(region)));
        let fds = vec![guest.memory.as_fd(); regions.len()];
        assert!(guest.client.acked(request::SET_MEM_TABLE, &table, &fds).unwrap());
        for queue in 0..QUEUES {
            for _ in 0..LOAD {
                let used = guest.next_used(queue, Duration::from_secs(30));
                assert!(used.is_some(), "round {round}: a request got lost");
            }
            for at in 0..LOAD {
                let place = data(queue, at);
                assert_eq!(guest.peek(place - 32, 1), [0], "round {round}: request {at} failed");
                let byte = u8::try_from(at + 1).unwrap();
                assert!(guest.peek(place, 4096).iter().all(|&b| b == byte), "round {round}");
                guest.poke(place - 32, &[0xee]);
                guest.poke(place, &[0; 4096]);
            }
        }
    }
}

#[test]
fn b07_memory_changes_under_load_split() {
    memory_changes_under_load(0);
}

#[test]
fn b07_memory_changes_under_load_packed() {
    memory_changes_under_load(F_PACKED);
}

const WRITE: u32 = 1;
const GET_ID: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk of this storage, whose requests a test holds up.
fn stalling(store: &StallingStore) -> Rig {
    let options = stuck(Duration::ZERO).queues(1, 2);
    let store = store.clone();
    let disk = CustomDisk::new(CAPACITY).open(None).unwrap();
    Rig::with_engines(disk, &options, move || store.engine())
}

/// Asks for a request of 512 bytes at the start of the disk, whose answer is not waited for; its data is at `DATA`.
fn ask(guest: &mut RawGuest, kind: u32) {
    ask_at(guest, 0, kind, (0, 512));
}

/// Asks queue `queue` for `len` bytes at `sector`; its data is at `DATA`, and a page further for each queue.
fn ask_at(guest: &mut RawGuest, queue: u32, kind: u32, (sector, len): (u64, u32)) {
    let data = DATA + 0x1000 * u64::from(queue);
    let header = data - 0x4000;
    guest.put_header(header, kind, sector);
    let chain = [
        Desc { addr: header, len: 16, ..Desc::default() },
        Desc { addr: data, len, flags: if kind == READ { 2 } else { 0 }, next: 0 },
        Desc { addr: header + 64, len: 1, flags: 2, next: 0 },
    ];
    guest.put_chain(queue, 30, &chain);
    guest.offer(queue, 30);
}

/// A front-end with a request that stalls, which has gone: its memory.
fn leave_a_request(rig: &mut Rig, store: &StallingStore, kind: u32) -> std::fs::File {
    let mut guest = RawGuest::start(rig.connect(), 1, 64, F_VERSION_1 | F_FLUSH);
    guest.poke(DATA, &[2; 512]);
    ask(&mut guest, kind);
    store.wait_stalled(1);
    let begun = Instant::now();
    guest.client.hang_up();
    rig.join_sessions();
    assert!(begun.elapsed() < PATIENCE, "its place is taken until storage goes on");
    guest.memory
}

/// Storage is away, the front-end has gone, and its machine starts anew: it gets all that is not behind the old
/// writes.
#[test]
fn b40_who_comes_while_storage_is_away_waits_for_what_overlaps_only() {
    let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
    store.stall(Some(2));
    let mut rig = stalling(&store);
    leave_a_request(&mut rig, &store, WRITE);
    let mut guest = RawGuest::start(rig.connect(), 1, 64, F_VERSION_1 | F_FLUSH);
    assert!(guest.client.ask_u64(request::GET_FEATURES).is_ok());
    let place = DATA + 0x1000;
    assert_eq!(guest.simple(0, GET_ID, 0, place, 20).0, 0);
    guest.poke(place, &[4; 512]);
    assert_eq!(guest.simple(0, WRITE, 8, place, 512).0, 0);
    assert_eq!(guest.simple(0, READ, 8, place, 512).0, 0);
    assert!(!rig.export().is_clear(), "it is told that requests are in flight");
    guest.poke(DATA, &[3; 512]);
    ask(&mut guest, WRITE);
    // Asked for later, and answered.
    assert_eq!(guest.simple(0, WRITE, 16, place, 512).0, 0);
    assert_eq!((store.asked(3), store.byte(0)), (0, 0));
    store.stall(None);
    assert_eq!(guest.next_used(0, PATIENCE).expect("an answer").0, 30);
    assert_eq!(store.byte(0), 3, "the old write came last");
}

/// Storage goes on after a while; whether it has, and who does it.
fn goes_on_soon(store: &StallingStore) -> (Arc<AtomicBool>, std::thread::JoinHandle<()>) {
    let went_on = Arc::new(AtomicBool::new(false));
    let (store, told) = (store.clone(), Arc::clone(&went_on));
    let goes_on = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        told.store(true, SeqCst);
        store.stall(None);
        store.stall_reads(false);
    });
    (went_on, goes_on)
}

/// As when a front-end reconnects, or its machine was reset: it has the memory that the disk reads and writes for the
/// old connection.
#[test]
fn b39_nobody_goes_on_in_memory_that_storage_may_still_use() {
    for kind in [READ, WRITE] {
        let stops = [Stop::GetBase, Stop::Reset, Stop::NewMemory].map(Some);
        for stop in std::iter::once(None).chain(stops) {
            let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
            store.stall(Some(2));
            store.stall_reads(true);
            let mut rig = stalling(&store);
            let memory = leave_a_request(&mut rig, &store, kind);
            let mut guest = RawGuest::connect(rig.connect(), F_VERSION_1 | F_FLUSH);
            guest.memory = memory;
            assert!(guest.set_mem_table().unwrap());
            guest.reset_queue(0);
            assert!(guest.start_queue(0).unwrap());
            let (went_on, goes_on) = goes_on_soon(&store);
            if let Some(how) = stop {
                ask_to_stop(&guest, how);
                guest.client.receive().unwrap();
            } else {
                assert_eq!(guest.simple(0, GET_ID, 0, DATA + 0x1000, 20).0, 0, "{kind}");
            }
            assert!(went_on.load(SeqCst), "{kind}, {stop:?}: storage may still use its memory");
            let expected = if kind == READ { 0 } else { 2 };
            assert_eq!(guest.peek(DATA, 512), [expected; 512], "{kind}: before, or never");
            goes_on.join().unwrap();
        }
    }
}

/// A guest behind an IOMMU takes a page back that the disk reads into for the old connection.
#[test]
fn b55_what_an_iommu_takes_back_is_not_what_storage_may_still_use() {
    const ACCESS_PLATFORM: u64 = 1 << 33;
    const IOTLB_MSG: u32 = 22;
    let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
    store.stall_reads(true);
    let mut rig = stalling(&store);
    let memory = leave_a_request(&mut rig, &store, READ);
    let features = F_VERSION_1 | F_FLUSH | ACCESS_PLATFORM;
    let mut guest = RawGuest::connect(rig.connect(), features);
    guest.memory = memory;
    assert!(guest.set_mem_table().unwrap());
    let (went_on, goes_on) = goes_on_soon(&store);
    // All of the guest's addresses, any permission, of the type that invalidates.
    let all = [words(&[0, u64::MAX, 0]), vec![0, 3, 0, 0, 0, 0, 0, 0]].concat();
    assert!(guest.client.acked(IOTLB_MSG, &all, &[]).unwrap());
    assert!(went_on.load(SeqCst), "storage may still use its memory");
    goes_on.join().unwrap();
}

/// Its disk is paused meanwhile, and storage goes on: only a queue that would have to start waits for the disk.
#[test]
fn b65_who_takes_memory_back_from_a_paused_disk_does_not_wait_for_it_to_go_on() {
    for stop in [Stop::GetBase, Stop::Reset, Stop::NewMemory] {
        let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
        store.stall_reads(true);
        let mut rig = stalling(&store);
        let memory = leave_a_request(&mut rig, &store, READ);
        let mut guest = RawGuest::connect(rig.connect(), F_VERSION_1 | F_FLUSH);
        guest.memory = memory;
        assert!(guest.set_mem_table().unwrap());
        ask_to_stop(&guest, stop);
        std::thread::scope(|scope| {
            // Whether it is through in time is not asked.
            scope.spawn(|| drop(rig.export().pause()));
            while !rig.export().holds() {
                std::thread::yield_now();
            }
            store.stall_reads(false);
        });
        guest.client.receive().unwrap_or_else(|error| panic!("{stop:?}: {error}"));
        assert!(rig.export().holds());
    }
}

/// Nobody knows any more when its memory is free: it is not told that it is, and does not wait for ever.
#[test]
fn e05_who_waits_for_memory_of_a_disk_that_fails_loses_its_connection() {
    for stop in [Stop::GetBase, Stop::Reset, Stop::NewMemory] {
        let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
        store.stall_reads(true);
        let mut rig = stalling(&store);
        let memory = leave_a_request(&mut rig, &store, READ);
        let mut guest = RawGuest::connect(rig.connect(), F_VERSION_1 | F_FLUSH);
        guest.memory = memory;
        assert!(guest.set_mem_table().unwrap());
        // It has no queue that could not start.
        ask_to_stop(&guest, stop);
        rig.export().fail();
        assert!(guest.client.is_closed(), "{stop:?}: its memory is not known to be free");
        assert_eq!(rig.join_sessions(), [Ended::ByPeer], "{stop:?}");
        store.stall_reads(false);
    }
}

/// What the second request of a guest waits for, while the first one is with storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// A late write that it overlaps.
    Late,
    /// A block of 4 KiB that both are in.
    Block,
    /// Room in the engine.
    Engine,
}

/// A guest with a write of 2 that stalls, and one of 3 on another queue that waits.
fn two_in_a_row(store: &StallingStore, behind: Behind) -> (Rig, RawGuest) {
    let (workers, depth) = if behind == Behind::Engine { (1, 1) } else { (2, 64) };
    let mut options = stuck(Duration::ZERO).queues(2, workers);
    options.drain_max = PATIENCE;
    let offset = if behind == Behind::Block { 4096 } else { 1 };
    let alignment = Alignment { memory: 512, offset };
    let disk = CustomDisk { alignment, ..CustomDisk::new(CAPACITY) }.open(None).unwrap();
    let engines = store.clone();
    let mut rig = Rig::with_engines(disk, &options, move || engines.engine_of(depth));
    store.stall(Some(2));
    let mut guest = RawGuest::start(rig.connect(), 2, 64, F_VERSION_1 | F_FLUSH);
    guest.poke(DATA, &[2; 512]);
    guest.poke(DATA + 0x1000, &[3; 1024]);
    ask_at(&mut guest, 0, WRITE, (0, 512));
    store.wait_stalled(1);
    if behind == Behind::Late {
        drop(rig.inspect(1, u64::MAX));
        drop(rig.inspect(1_000_000_001, u64::MAX));
    }
    let place = if behind == Behind::Late { (0, 1024) } else { (1, 512) };
    ask_at(&mut guest, 1, WRITE, place);
    rig.wait_in_flight(2);
    assert_eq!(store.asked(3), 0, "{behind:?}: it does not wait");
    (rig, guest)
}

/// Its front-end goes: it is carried out, and before what comes later.
#[test]
fn c59_what_waits_when_a_front_end_goes_is_overtaken_by_nothing_newer() {
    for behind in [Behind::Late, Behind::Block, Behind::Engine] {
        let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
        let (mut rig, guest) = two_in_a_row(&store, behind);
        guest.client.hang_up();
        rig.join_sessions();
        let mut next = RawGuest::start(rig.connect(), 1, 64, F_VERSION_1 | F_FLUSH);
        next.poke(DATA, &[4; 512]);
        ask_at(&mut next, 0, WRITE, (1, 512));
        rig.wait_in_flight(3);
        store.stall(None);
        assert!(next.next_used(0, PATIENCE).is_some(), "{behind:?}");
        let first = if behind == Behind::Late { 3 } else { 2 };
        assert_eq!((store.byte(0), store.byte(512)), (first, 4), "{behind:?}");
    }
}

/// The daemon ends in order: it is carried out and answered.
#[test]
fn c59_what_waits_when_the_daemon_ends_is_carried_out() {
    for behind in [Behind::Late, Behind::Block, Behind::Engine] {
        let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
        let (mut rig, mut guest) = two_in_a_row(&store, behind);
        rig.order_to_stop();
        let goes_on = std::thread::spawn({
            let store = store.clone();
            move || {
                std::thread::sleep(Duration::from_millis(200));
                store.stall(None);
            }
        });
        rig.join_sessions();
        goes_on.join().unwrap();
        assert_eq!(store.byte(512), 3, "{behind:?}");
        for queue in 0..2 {
            assert!(guest.next_used(queue, Duration::ZERO).is_some(), "{behind:?}, {queue}");
        }
    }
}

/// Of a sync or an erasure that waits for others of its disk.
#[test]
fn c114_what_waits_for_a_sync_or_for_erasures_is_carried_out() {
    const FLUSH: u32 = 4;
    const WRITE_ZEROES: u32 = 13;
    const F_WRITE_ZEROES: u64 = 1 << 14;
    for (kind, count, begun) in [(FLUSH, 2, 1), (WRITE_ZEROES, 6, 4)] {
        for how in [Stop::Disconnect, Stop::Order] {
            let store = StallingStore::new(usize::try_from(CAPACITY).unwrap());
            let mut options = stuck(Duration::ZERO).queues(1, 1);
            options.drain_max = PATIENCE;
            let disk = CustomDisk::new(CAPACITY).open(None).unwrap();
            let engines = store.clone();
            let mut rig = Rig::with_engines(disk, &options, move || engines.engine());
            let features = F_VERSION_1 | F_FLUSH | F_WRITE_ZEROES;
            let mut guest = RawGuest::start(rig.connect(), 1, 64, features);
            for at in 0..count {
                let place = DATA + 0x1000 * u64::from(at);
                guest.poke(place, &[7; 512]);
                assert_eq!(guest.simple(0, WRITE, u64::from(at), place, 512).0, 0);
            }
            store.stall_others(true);
            for at in 0..count {
                let header = DATA - 0x4000 + 0x100 * u64::from(at);
                guest.put_header(header, kind, 0);
                guest.poke(header + 16, &[words(&[at.into()]), halves(&[1, 0])].concat());
                let data = Desc { addr: header + 16, len: 16, ..Desc::default() };
                let chain = [
                    Desc { addr: header, len: 16, ..Desc::default() },
                    data,
                    Desc { addr: header + 64, len: 1, flags: 2, next: 0 },
                ];
                let chain = if kind == FLUSH { &[chain[0], chain[2]][..] } else { &chain };
                guest.put_chain(0, 3 * at, chain);
                guest.offer(0, 3 * at);
            }
            rig.wait_in_flight(count.into());
            store.wait_stalled(begun);
            assert_eq!(store.others(), begun, "{kind}: the others wait");
            if how == Stop::Disconnect {
                guest.client.hang_up();
                rig.join_sessions();
                store.stall_others(false);
                rig.wait_in_flight(0);
            } else {
                rig.order_to_stop();
                let (goes_on, after) = (store.clone(), Duration::from_millis(200));
                let goes_on = std::thread::spawn(move || {
                    std::thread::sleep(after);
                    goes_on.stall_others(false);
                });
                rig.join_sessions();
                goes_on.join().unwrap();
                (0..count).for_each(|_| {
                    assert!(guest.next_used(0, Duration::ZERO).is_some(), "{kind}");
                });
            }
            assert_eq!(store.others(), usize::from(count), "{kind}, {how:?}");
            let expected = if kind == FLUSH { 7 } else { 0 };
            (0..count).for_each(|at| assert_eq!(store.byte(512 * usize::from(at)), expected));
        }
    }
}
