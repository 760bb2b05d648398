//! A guest behind an IOMMU (ACCESS_PLATFORM): translations are asked for, obeyed and given up. Row A22
//! of docs/hazards.md. The front-end here keeps a page table by hand, and answers when a test lets it.

use ringway_disk::{Alignment, CacheMode, CustomDisk, EngineKind, SchedulerMode, SimModel, Source};
use ringway_export::Polling;
use ringway_testkit::power_cut::{Faults, PowerCutEngine, SimulatedDisk, SimulatedSetup};
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PACKED, F_PROTOCOL, F_VERSION_1, GUEST_BASE, MEMORY,
    RawClient, RawGuest, USER_DELTA, halves, inflight_payload, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use ringway_testkit::{Rng, pattern as sectors};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// MQ, REPLY_ACK, BACKEND_REQ, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15;
const IOTLB_MSG: u32 = 22;
const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
const PAGE: u64 = 4096;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;
const IOERR: u8 = 1;
/// Where the guest's driver puts its buffers: addresses that mean nothing in its memory.
const IOVA: u64 = 0xfff0_0000_0000;
const SOON: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(150);

/// A guest, and the IOMMU that its front-end emulates.
struct Vm {
    guest: RawGuest,
    channel: UnixStream,
    /// I/O virtual page to guest-physical page and permission.
    table: HashMap<u64, (u64, u8)>,
    /// Questions that came, by page.
    asked: Vec<u64>,
}

fn iotlb(iova: u64, size: u64, user: u64, permission: u8, kind: u8) -> Vec<u8> {
    let mut payload = words(&[iova, size, user]);
    payload.extend([permission, kind, 0, 0, 0, 0, 0, 0]);
    payload
}

impl Vm {
    /// Connected, with a channel to ask on, and rings of `queues` mapped; they start when their pages
    /// are asked for.
    fn start(rig: &mut Rig, queues: u32, packed: bool) -> Self {
        let mut vm = Self::connect(rig, packed, PROTOCOL);
        for queue in 0..queues {
            assert!(vm.guest.start_queue(queue).unwrap(), "queue {queue}");
        }
        vm
    }

    fn connect(rig: &mut Rig, packed: bool, protocol: u64) -> Self {
        let features = F_VERSION_1 | F_FLUSH | F_INDIRECT | F_ACCESS_PLATFORM;
        let guest = RawGuest::connect(rig.connect(), features | if packed { F_PACKED } else { 0 });
        let client = &guest.client;
        let protocol = words(&[protocol]);
        client.send(request::SET_PROTOCOL_FEATURES, 0, &protocol, &[]).unwrap();
        let (channel, theirs) = UnixStream::pair().unwrap();
        channel.set_nonblocking(true).unwrap();
        assert!(client.acked(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap());
        // Whoever has not read the size is told to, by that channel.
        let mut config = halves(&[0, 8, 0]);
        config.resize(12 + 8, 0);
        client.send(request::GET_CONFIG, 0, &config, &[]).unwrap();
        client.receive().unwrap();
        let rings = GUEST_BASE..GUEST_BASE + 0x8_0000;
        let pages = rings.step_by(4096).map(|page| (page + USER_DELTA, (page, 3)));
        Self { guest, channel, table: pages.collect(), asked: Vec::new() }
    }

    /// Maps adjoining I/O virtual pages from `iova` to these guest-physical pages.
    fn map(&mut self, iova: u64, pages: &[u64], permission: u8) {
        for (at, &page) in (0..).zip(pages) {
            self.table.insert(iova + at * PAGE, (page, permission));
        }
    }

    fn tell(&self, payload: &[u8]) -> bool {
        self.guest.client.acked(IOTLB_MSG, payload, &[]).unwrap()
    }

    fn update(&self, iova: u64, page: u64, permission: u8) -> bool {
        self.tell(&iotlb(iova, PAGE, page + USER_DELTA, permission, UPDATE))
    }

    fn invalidate(&self, iova: u64, size: u64) -> bool {
        self.tell(&iotlb(iova, size, 0, 0, INVALIDATE))
    }

    /// The next question, if one is there: page and permission.
    fn question(&mut self) -> Option<(u64, u8)> {
        let mut bytes = [0; 12 + 32];
        match self.channel.read(&mut bytes) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
            got => assert_eq!(got.unwrap(), bytes.len(), "half a question"),
        }
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4), word(8)), (1, 1 | 8, 32), "IOTLB_MSG, an answer is wanted");
        assert_eq!(bytes[12 + 25], MISS);
        let iova = u64::from_ne_bytes(bytes[12..20].try_into().unwrap());
        assert_eq!(iova % PAGE, 0);
        self.asked.push(iova);
        Some((iova, bytes[12 + 24]))
    }

    /// As QEMU does it: first the translation, on the main connection, then the answer.
    fn answer(&mut self, iova: u64, wanted: u8) {
        let found = self.table.get(&iova).filter(|(_, has)| has & wanted == wanted).copied();
        if let Some((page, permission)) = found {
            assert!(self.update(iova, page, permission));
        }
        self.reply(u64::from(found.is_none()));
    }

    fn reply(&mut self, result: u64) {
        let mut bytes = Vec::new();
        for word in [1u32, 1 | 4, 8] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(result.to_ne_bytes());
        self.channel.write_all(&bytes).unwrap();
    }

    /// Answers all that is asked until a request of `queue` comes back.
    fn used(&mut self, queue: u32) -> Option<(u32, u32)> {
        let end = Instant::now() + SOON;
        while Instant::now() < end {
            while let Some((iova, wanted)) = self.question() {
                self.answer(iova, wanted);
            }
            if let Some(used) = self.guest.next_used(queue, Duration::from_millis(1)) {
                return Some(used);
            }
        }
        None
    }

    /// Answers all that is asked, until nothing has been asked for a while.
    fn settle(&mut self) {
        let mut end = Instant::now() + A_WHILE;
        while Instant::now() < end {
            match self.question() {
                Some((iova, wanted)) => {
                    self.answer(iova, wanted);
                    end = Instant::now() + A_WHILE;
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Puts a request down: its header and status in the page `control` (I/O virtual, and where that
    /// is), its data in one buffer.
    fn put(
        &self,
        queue: u32,
        at: u16,
        kind: u32,
        sector: u64,
        control: (u64, u64),
        data: (u64, u32),
    ) {
        self.guest.put_header(control.1, kind, sector);
        self.guest.poke(control.1 + 64, &[0xee]);
        let flags = if kind == IN { 2 } else { 0 };
        let chain = [
            Desc { addr: control.0, len: 16, ..Desc::default() },
            Desc { addr: data.0, len: data.1, flags, next: 0 },
            Desc { addr: control.0 + 64, len: 1, flags: 2, next: 0 },
        ];
        self.guest.put_chain(queue, 3 * at, &chain);
    }

    fn status(&self, control: u64) -> u8 {
        self.guest.peek(control + 64, 1)[0]
    }

    /// Waits until something is asked.
    fn asks(&mut self) -> (u64, u8) {
        let end = Instant::now() + SOON;
        loop {
            assert!(Instant::now() < end, "nothing is asked");
            if let Some(question) = self.question() {
                return question;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the device has closed its end of the channel.
    fn loses_channel(&self) {
        let end = Instant::now() + SOON;
        let mut bytes = [0; 4096];
        while !matches!((&self.channel).read(&mut bytes), Ok(0)) {
            assert!(Instant::now() < end, "the channel is open");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// So many bytes of a pattern.
fn content_of(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    sectors::fill(&mut bytes, seed, 0, 0);
    bytes
}

/// A file of 1 MiB with a pattern.
fn disk(folder: &tempfile::TempDir) -> (RigOptions, Vec<u8>) {
    let path = image(folder.path(), 1 << 20);
    let content = content_of(7, 1 << 20);
    std::fs::write(&path, &content).unwrap();
    (RigOptions::buffered(&path, EngineKind::Threads), content)
}

/// Pages of guest memory, scattered on purpose: none adjoins its neighbour.
fn scattered(count: u64) -> Vec<u64> {
    (0..count).map(|at| DATA + 2 * PAGE * (count - at)).collect()
}

#[test]
fn a22_what_is_missing_is_asked_for_and_the_request_goes_on() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, packed);
        let pages = scattered(9);
        vm.map(IOVA, &pages, 3);
        // A buffer of six pages and some, in the middle of pages.
        let data = IOVA + PAGE + 512;
        let len = 6 * 4096 + 1024;
        let control = (IOVA, pages[0]);
        vm.put(0, 0, IN, 8, control, (data, len));
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, len + 1)));
        assert_eq!(vm.status(pages[0]), OK);
        let read = |vm: &Vm| -> Vec<u8> {
            let all: Vec<u8> =
                pages[1..9].iter().flat_map(|&page| vm.guest.peek(page, 4096)).collect();
            all[512..512 + len as usize].to_vec()
        };
        assert!(read(&vm) == content[4096..4096 + len as usize], "packed: {packed}");
        let asked = vm.asked.len();
        assert!((9..20).contains(&asked), "{asked} questions");
        // And the other way; nothing is asked twice.
        let new = content_of(8, len as usize);
        let mut at = 0;
        for (number, &page) in pages[1..9].iter().enumerate() {
            let skip = if number == 0 { 512 } else { 0 };
            let take = (4096 - skip).min(new.len() - at);
            vm.guest.poke(page + skip as u64, &new[at..at + take]);
            at += take;
        }
        vm.put(0, 0, OUT, 100, control, (data, len));
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, 1)));
        assert_eq!((vm.status(pages[0]), vm.asked.len()), (OK, asked));
        vm.guest.stop_queue(0).unwrap();
        drop(rig);
        let file = std::fs::read(folder.path().join("disk.img")).unwrap();
        assert!(file[51200..51200 + len as usize] == new[..], "packed: {packed}");
    }
}

/// An indirect table is memory like any other: here it lies over two pages that do not adjoin.
#[test]
fn a22_an_indirect_table_is_translated() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::start(&mut rig, 1, false);
    let pages = scattered(4);
    vm.map(IOVA, &pages, 3);
    vm.guest.put_header(pages[0], IN, 4);
    let table = IOVA + 2 * PAGE - 24;
    let entries = [
        Desc { addr: IOVA, len: 16, flags: 1, next: 1 },
        Desc { addr: IOVA + 3 * PAGE, len: 512, flags: 3, next: 2 },
        Desc { addr: IOVA + 64, len: 1, flags: 2, next: 0 },
    ];
    let mut bytes = Vec::new();
    for desc in entries {
        bytes.extend(desc.addr.to_le_bytes());
        bytes.extend(desc.len.to_le_bytes());
        bytes.extend(desc.flags.to_le_bytes());
        bytes.extend(desc.next.to_le_bytes());
    }
    vm.guest.poke(pages[1] + PAGE - 24, &bytes[..24]);
    vm.guest.poke(pages[2], &bytes[24..]);
    vm.guest.put_chain(0, 0, &[Desc { addr: table, len: 48, flags: 4, next: 0 }]);
    vm.guest.offer(0, 0);
    assert_eq!(vm.used(0), Some((0, 513)));
    assert!(vm.guest.peek(pages[3], 512) == content[2048..2560]);
}

#[test]
fn a22_permissions_are_obeyed() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, packed);
        let pages = scattered(4);
        vm.map(IOVA, &pages[..1], 3);
        vm.map(IOVA + PAGE, &pages[1..2], 1);
        vm.map(IOVA + 2 * PAGE, &pages[2..3], 2);
        let control = (IOVA, pages[0]);
        let before = content_of(3, 4096);
        vm.guest.poke(pages[1], &before);
        let done = |vm: &mut Vm, kind, data| {
            vm.put(0, 0, kind, 0, control, data);
            vm.guest.offer(0, 0);
            let (_, written) = vm.used(0).expect("answered");
            (vm.status(pages[0]), written)
        };
        assert_eq!(done(&mut vm, OUT, (IOVA + PAGE, 512)), (OK, 1), "read-only, and read");
        assert_eq!(done(&mut vm, IN, (IOVA + PAGE, 4096)), (IOERR, 1), "read-only, and written");
        assert!(vm.guest.peek(pages[1], 4096) == before, "a write into read-only memory");
        assert_eq!(
            done(&mut vm, IN, (IOVA + 2 * PAGE, 4096)),
            (OK, 4097),
            "write-only, and written"
        );
        assert!(vm.guest.peek(pages[2], 4096)[512..] == content[512..4096]);
        assert_eq!(done(&mut vm, OUT, (IOVA + 2 * PAGE, 512)), (IOERR, 1), "write-only, and read");
        assert_eq!(done(&mut vm, IN, (IOVA + PAGE - 512, 1024)), (IOERR, 1), "half of it");
        assert_eq!(done(&mut vm, IN, (IOVA + 9 * PAGE, 512)), (IOERR, 1), "nothing is there");
        // What was refused once is asked for again: it may be there by now.
        vm.map(IOVA + 9 * PAGE, &pages[3..], 3);
        assert_eq!(done(&mut vm, IN, (IOVA + 9 * PAGE, 512)), (OK, 513));
        // A guest-physical address is none.
        assert_eq!(done(&mut vm, IN, (DATA, 512)), (IOERR, 1));
    }
}

/// The first request of a queue, of which nothing is known yet, fails as any other: in its status.
#[test]
fn a22_a_request_without_its_memory_says_so_from_the_first_on() {
    for packed in [false, true] {
        for (kind, data) in [(IN, IOVA + PAGE), (OUT, IOVA + 7 * PAGE), (IN, IOVA - PAGE)] {
            let folder = tempfile::tempdir().unwrap();
            let (options, _) = disk(&folder);
            let mut rig = Rig::start(&options);
            let mut vm = Vm::start(&mut rig, 1, packed);
            let pages = scattered(1);
            vm.map(IOVA, &pages, 3);
            vm.put(0, 0, kind, 0, (IOVA, pages[0]), (data, 512));
            vm.guest.offer(0, 0);
            assert_eq!(vm.used(0), Some((0, 1)), "{kind} at {data:#x}, packed: {packed}");
            assert_eq!(vm.status(pages[0]), IOERR, "{kind} at {data:#x}, packed: {packed}");
        }
    }
}

/// Every read is in flight for 80 µs at least when its memory is taken away. Afterwards not a byte of
/// it changes; the other requests, and those that find it elsewhere, have the right content.
fn invalidated_under_load(packed: bool) {
    const LOAD: u16 = 20;
    let source = Source::Sim { model: SimModel::Ssd, bytes: 1 << 20 };
    let mut rig = Rig::start(&RigOptions::new(source, EngineKind::Sim(SimModel::Ssd)));
    let mut vm = Vm::start(&mut rig, 1, packed);
    let mut rng = Rng::for_test("iommu");
    let content = content_of(5, 256 << 10);
    // Control pages never move.
    let (controls, buffers) = (DATA, DATA + 0x10_0000);
    let control = |at: u16| (IOVA + u64::from(at) * 128, controls + u64::from(at) * 128);
    vm.map(IOVA, &[controls], 3);
    let place = |at: u16, there: u64| buffers + (2 * u64::from(at) + there) * 2 * PAGE;
    let data = |at: u16| IOVA + 0x100_0000 + u64::from(at) * PAGE;
    for at in 0..LOAD {
        let (from, to) = (usize::from(at) * 4096, usize::from(at + 1) * 4096);
        vm.guest.poke(place(at, 0), &content[from..to]);
        vm.map(data(at), &[place(at, 0)], 3);
        vm.put(0, at, OUT, u64::from(at) * 8, control(at), (data(at), 4096));
        vm.guest.offer(0, 3 * at);
        vm.used(0).expect("written");
        assert_eq!(vm.status(control(at).1), OK);
    }
    let mut late = 0;
    for round in 0..200u64 {
        let (old, new) = (round % 2, (round + 1) % 2);
        for at in 0..LOAD {
            vm.guest.poke(place(at, 0), &[0x11; 4096]);
            vm.guest.poke(place(at, 1), &[0x22; 4096]);
            vm.put(0, at, IN, u64::from(at) * 8, control(at), (data(at), 4096));
            vm.guest.offer_quietly(0, 3 * at);
        }
        vm.guest.kick(0);
        // One page, some, or all; and from now on they are elsewhere.
        let first = u16::try_from(rng.below(u64::from(LOAD))).unwrap();
        let count = [1, 4, LOAD][usize::try_from(round % 3).unwrap()].min(LOAD - first);
        let some: Vec<u16> = (first..first + count).collect();
        if round % 5 == 0 {
            std::thread::sleep(Duration::from_micros(rng.below(200)));
        }
        assert!(vm.invalidate(data(first), u64::from(count) * PAGE));
        let taken: Vec<_> = some.iter().map(|&at| vm.guest.peek(place(at, old), 4096)).collect();
        for &at in &some {
            vm.map(data(at), &[place(at, new)], 3);
        }
        for _ in 0..LOAD {
            vm.used(0).expect("answered");
        }
        for at in 0..LOAD {
            let expected = &content[usize::from(at) * 4096..usize::from(at + 1) * 4096];
            assert_eq!(vm.status(control(at).1), OK);
            let here = |there| vm.guest.peek(place(at, there), 4096);
            match some.iter().position(|&moved| moved == at) {
                None => assert!(here(old) == expected, "round {round}, request {at}"),
                Some(number) => {
                    assert!(here(old) == taken[number], "round {round}: written after the answer");
                    let early = here(old) == expected;
                    late += usize::from(!early);
                    assert!(early || here(new) == expected, "round {round}, request {at}");
                }
            }
            // All begin the next round at the same place.
            vm.map(data(at), &[place(at, new)], 3);
        }
        assert!(vm.invalidate(data(0), u64::from(LOAD) * PAGE));
    }
    assert!(late > 0, "every request was done before its memory was taken away");
}

#[test]
fn a22_nothing_is_written_after_an_invalidation_split() {
    invalidated_under_load(false);
}

#[test]
fn a22_nothing_is_written_after_an_invalidation_packed() {
    invalidated_under_load(true);
}

/// A disk of 1 MiB with this content, behind an engine that does nothing before the test says so.
fn held(content: &[u8]) -> (SimulatedDisk, Rig) {
    let bytes = content.len() as u64;
    let disk = SimulatedDisk::new(
        SimulatedSetup {
            bytes: content.len(),
            granule: 512,
            erase_granule: 512,
            failed_flush_loses: false,
            faults: Faults::default(),
            lie: None,
            seed: 1,
        },
        content,
    );
    let shape = CustomDisk {
        bytes,
        cache: CacheMode::None,
        alignment: Alignment { memory: 512, offset: 512 },
        block_device: false,
        path: SchedulerMode::Bio,
    };
    let source = Source::Sim { model: SimModel::Ram, bytes };
    let options = RigOptions::new(source, EngineKind::Sim(SimModel::Ram));
    let of_worker = disk.clone();
    let rig = Rig::with_engines(shape.open(None).unwrap(), &options, move || {
        PowerCutEngine::by_hand(&of_worker)
    });
    (disk, rig)
}

/// Whatever part of a request in flight is taken away: its data, the place of its status, the ring.
#[test]
fn a22_an_invalidation_waits_for_what_is_in_flight() {
    let content = content_of(6, 1 << 20);
    let (ring, other) = (GUEST_BASE + USER_DELTA, IOVA + 9 * PAGE);
    for packed in [false, true] {
        for (part, taken) in [("data", IOVA + PAGE), ("status", IOVA), ("ring", ring)] {
            for kind in [IN, OUT] {
                let what = format!("{part} of {kind}, packed: {packed}");
                let (disk, mut rig) = held(&content);
                let mut vm = Vm::start(&mut rig, 1, packed);
                let pages = scattered(3);
                vm.map(IOVA, &pages, 3);
                vm.put(0, 0, kind, 0, (IOVA, pages[0]), (IOVA + PAGE, 4096));
                vm.guest.offer(0, 0);
                let end = Instant::now() + SOON;
                while rig.stats()[0].queues.first().is_none_or(|queue| queue.in_flight == 0) {
                    assert!(Instant::now() < end, "{what}: it does not begin");
                    vm.settle();
                }
                // Memory that it does not use goes at once.
                assert!(vm.update(other, pages[2], 3) && vm.invalidate(other, PAGE), "{what}");
                let held = AtomicBool::new(true);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(A_WHILE);
                        held.store(false, SeqCst);
                        while disk.step() {}
                    });
                    assert!(vm.invalidate(taken, PAGE), "{what}");
                    assert!(!held.load(SeqCst), "{what}: answered while it is in flight");
                });
                if kind == IN {
                    let here = vm.guest.peek(pages[1], 4096);
                    assert!(here == content[..4096], "{what}: not all of it has come");
                }
                assert_eq!(vm.used(0), Some((0, if kind == IN { 4097 } else { 1 })), "{what}");
                assert_eq!(vm.status(pages[0]), OK, "{what}");
            }
        }
    }
}

/// Guests invalidate more than they unmap: a page that was told may be asked for once more before the
/// request that needs it has all of its pages.
#[test]
fn a22_a_page_that_is_lost_while_others_are_missing_is_asked_for_again() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::start(&mut rig, 1, false);
    vm.settle();
    let pages = scattered(3);
    vm.map(IOVA, &pages, 3);
    vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 8192));
    vm.guest.offer(0, 0);
    let mut questions = Vec::new();
    let end = Instant::now() + SOON;
    while questions.len() < 4 && Instant::now() < end {
        questions.extend(vm.question());
    }
    // Header, two pages of data, and the header's page once more for the status.
    let (last, first) = questions.split_last().expect("questions");
    for &(iova, wanted) in first {
        vm.answer(iova, wanted);
    }
    // The main connection answers in order: the answers on the channel were not read before this.
    vm.settle();
    assert!(vm.invalidate(IOVA, 2 * PAGE));
    vm.answer(last.0, last.1);
    assert_eq!(vm.used(0), Some((0, 8193)));
    assert!(vm.guest.peek(pages[1], 4096) == content[..4096]);
    assert!(vm.asked.iter().filter(|&&page| page == IOVA + PAGE).count() > 1);
}

impl Vm {
    /// Connected, with rings of `size` descriptors whose pages adjoin for the device and the guest, and nowhere in
    /// its memory. Between them is a pattern.
    fn with_scattered_rings(rig: &mut Rig, queues: u32, packed: bool, size: u16) -> Self {
        let mut vm = Self::connect(rig, packed, PROTOCOL | 1 << 1);
        vm.guest.size = size;
        for queue in 0..queues {
            let places = RINGS + u64::from(queue) * 2 * RING_PAGES * PAGE;
            vm.guest.poke(places, &vec![0x5a; usize::try_from(2 * RING_PAGES * PAGE).unwrap()]);
            let (table, _, _) = vm.guest.rings(queue);
            for at in 0..RING_PAGES {
                // Backwards.
                vm.move_ring_page(table + at * PAGE, places + 2 * PAGE * (RING_PAGES - 1 - at));
            }
        }
        vm
    }

    /// Guest and IOMMU have this page of a ring there from now on.
    fn move_ring_page(&mut self, page: u64, to: u64) {
        self.guest.move_page(page, to);
        self.map(page + USER_DELTA, &[to], 3);
    }
}

/// Where scattered rings lie, and how many pages each of them has.
const RINGS: u64 = DATA + 0x20_0000;
const RING_PAGES: u64 = 16;

/// Linux gives a ring of 1024 descriptors pages that adjoin for the device only.
#[test]
fn a28_a_scattered_ring_is_served() {
    for (packed, size) in [false, true]
        .into_iter()
        .flat_map(|packed| [16, 64, 128, 256, 512, 1024].map(|size| (packed, size)))
    {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options.queues(2, 1));
        let mut vm = Vm::with_scattered_rings(&mut rig, 2, packed, size);
        for queue in 0..2 {
            assert!(vm.guest.start_queue(queue).unwrap(), "{size} descriptors, packed: {packed}");
        }
        let pages = scattered(2);
        vm.map(IOVA, &pages, 3);
        // More than once around each ring. Split ones use all descriptors, too.
        for round in 0..size + 3 {
            let (queue, sector) = (u32::from(round % 2), u64::from(round % 2000));
            let at = if packed { 0 } else { round % (size / 3) };
            vm.put(queue, at, IN, sector, (IOVA, pages[0]), (IOVA + PAGE, 512));
            vm.guest.offer(queue, 3 * at);
            assert_eq!(vm.used(queue), Some((u32::from(3 * at), 513)), "{size}: round {round}");
            assert_eq!(vm.status(pages[0]), OK);
            let from = usize::try_from(sector).unwrap() * 512;
            assert!(vm.guest.peek(pages[1], 512) == content[from..from + 512], "round {round}");
        }
        for page in (0..2 * RING_PAGES).map(|at| RINGS + (2 * at + 1) * PAGE) {
            assert!(vm.guest.peek(page, 4096) == [0x5a; 4096], "{size}: between pages of a ring");
        }
    }
}

/// One page of a ring is taken back while requests are in flight, whichever it is: once that was answered nothing is
/// written there, and the queue goes on where the page is then.
fn a_page_of_a_ring_is_invalidated(packed: bool) {
    const LOAD: u16 = 20;
    const SIZE: u16 = 1024;
    let source = Source::Sim { model: SimModel::Ssd, bytes: 1 << 20 };
    let mut rig = Rig::start(&RigOptions::new(source, EngineKind::Sim(SimModel::Ssd)));
    let mut vm = Vm::with_scattered_rings(&mut rig, 1, packed, SIZE);
    assert!(vm.guest.start_queue(0).unwrap());
    let mut rng = Rng::for_test("ring page");
    let content = content_of(5, 256 << 10);
    let control = |at: u16| (IOVA + u64::from(at) * 128, DATA + u64::from(at) * 128);
    let data = |at: u16| (IOVA + u64::from(at + 1) * PAGE, DATA + u64::from(at + 1) * 2 * PAGE);
    vm.map(IOVA, &[DATA], 3);
    for at in 0..LOAD {
        let from = usize::from(at) * 4096;
        vm.guest.poke(data(at).1, &content[from..from + 4096]);
        vm.map(data(at).0, &[data(at).1], 3);
        vm.put(0, at, OUT, u64::from(at) * 8, control(at), (data(at).0, 4096));
        vm.guest.offer(0, 3 * at);
        vm.used(0).expect("written");
    }
    let (desc, avail, used) = vm.guest.rings(0);
    let areas = if packed { vec![desc; 4] } else { vec![desc, avail, used, used + PAGE] };
    let (mut free, mut unfinished) = (RINGS + 2 * RING_PAGES * PAGE, 0);
    for round in 0..200u64 {
        for at in 0..LOAD {
            vm.guest.poke(data(at).1, &[0x11; 4096]);
            vm.put(0, at, IN, u64::from(at) * 8, control(at), (data(at).0, 4096));
            vm.guest.offer_quietly(0, 3 * at);
        }
        vm.guest.kick(0);
        std::thread::sleep(Duration::from_micros(rng.below(200)));
        let area = areas[usize::try_from(round % 4).unwrap()];
        let page = area + if packed || area == desc { rng.below(4) * PAGE } else { 0 };
        let (old, _) = vm.table[&(page + USER_DELTA)];
        assert!(vm.invalidate(page + USER_DELTA, PAGE));
        let open = (0..LOAD).filter(|&at| vm.status(control(at).1) == 0xee).count();
        unfinished += usize::from(open > 0);
        vm.move_ring_page(page, free);
        // Not even a byte that was there before: the place is somebody else's by now.
        vm.guest.poke(old, &[0x22; 4096]);
        for number in 0..LOAD {
            assert!(vm.used(0).is_some(), "round {round}: answer {number}");
        }
        assert!(
            vm.guest.peek(old, 4096) == [0x22; 4096],
            "round {round}: written after the answer"
        );
        for at in 0..LOAD {
            let from = usize::from(at) * 4096;
            assert_eq!(vm.status(control(at).1), OK, "round {round}");
            assert!(vm.guest.peek(data(at).1, 4096) == content[from..from + 4096]);
        }
        free = old;
    }
    assert!(unfinished > 0, "every request was done before a page was taken away");
}

#[test]
fn a28_a_page_of_a_split_ring_is_invalidated_under_load() {
    a_page_of_a_ring_is_invalidated(false);
}

#[test]
fn a28_a_page_of_a_packed_ring_is_invalidated_under_load() {
    a_page_of_a_ring_is_invalidated(true);
}

/// The ring's own memory is taken away: its queue pauses, and goes on elsewhere.
#[test]
fn a22_a_ring_that_is_unmapped_pauses_its_queue() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, packed);
        let pages = scattered(2);
        vm.map(IOVA, &pages, 3);
        let control = (IOVA, pages[0]);
        let request = |vm: &mut Vm| {
            vm.put(0, 0, IN, 0, control, (IOVA + PAGE, 512));
            vm.guest.offer(0, 0);
        };
        request(&mut vm);
        vm.used(0).expect("answered");
        // Everything, as a guest does that frees addresses in bulk; a size of 0 is 2^64.
        for size in [u64::MAX, 0] {
            assert!(vm.invalidate(0, size));
            request(&mut vm);
            let ring = vm.guest.peek(GUEST_BASE, 0x1_0000);
            vm.guest.poke(pages[1], &[0; 512]);
            std::thread::sleep(A_WHILE);
            assert!(vm.guest.peek(GUEST_BASE, 0x1_0000) == ring, "a ring that is not mapped");
            assert_eq!(vm.used(0), Some((0, 513)));
            assert!(vm.guest.peek(pages[1], 512) == content[..512]);
        }
    }
}

/// A guest that takes everything back at once does so between a translation and the answer to its
/// question, which then says that it was told: a ring whose page it is has to be asked for again.
#[test]
fn a22_a_ring_that_is_lost_before_its_answer_is_asked_for_again() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, packed);
        let end = Instant::now() + SOON;
        let mut lost = Vec::new();
        while Instant::now() < end {
            let Some((iova, wanted)) = vm.question() else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            if lost.contains(&iova) {
                vm.answer(iova, wanted);
                break;
            }
            lost.push(iova);
            let (page, permission) = vm.table[&iova];
            assert!(vm.update(iova, page, permission));
            assert!(vm.invalidate(iova, PAGE));
            vm.reply(0);
        }
        assert!(!lost.is_empty() && lost.len() < vm.asked.len(), "asked {:x?} only", vm.asked);
        let pages = scattered(2);
        vm.map(IOVA, &pages, 3);
        vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, 513)), "packed: {packed}");
        assert!(vm.guest.peek(pages[1], 512) == content[..512]);
    }
}

/// Nobody answers: that queue waits, the worker sleeps, the neighbour on it works; and the queue can
/// still be stopped, with the request in its ring.
#[test]
fn a22_a_question_without_an_answer_costs_its_queue_only() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (mut options, content) = disk(&folder);
        options.polling = Polling::Never;
        let mut rig = Rig::start(&options.queues(2, 1));
        let mut vm = Vm::start(&mut rig, 2, packed);
        vm.settle();
        let pages = scattered(4);
        vm.map(IOVA, &pages[..2], 3);
        let far = IOVA + 0x1000_0000;
        vm.map(far, &pages[2..], 3);
        let request = |vm: &mut Vm, queue, iova, control| {
            vm.put(queue, 0, IN, 0, (iova, control), (iova + PAGE, 512));
            vm.guest.offer(queue, 0);
        };
        request(&mut vm, 0, IOVA, pages[0]);
        let end = Instant::now() + SOON;
        let first = loop {
            assert!(Instant::now() < end, "nothing is asked");
            if let Some(question) = vm.question() {
                break question;
            }
        };
        // The neighbour's translations come unasked.
        assert!(vm.update(far, pages[2], 3) && vm.update(far + PAGE, pages[3], 3));
        for _ in 0..100 {
            request(&mut vm, 1, far, pages[2]);
            assert!(vm.guest.next_used(1, SOON).is_some(), "the neighbour");
        }
        let turns = |rig: &Rig| rig.stats()[0].turns;
        let before = turns(&rig);
        std::thread::sleep(Duration::from_millis(300));
        let spun = turns(&rig) - before;
        assert!(spun < 50, "{spun} turns while there is nothing to do");
        assert_eq!(vm.guest.next_used(0, Duration::ZERO), None);
        let base = vm.guest.stop_queue(0).unwrap();
        vm.guest.rewind(0, base);
        assert_eq!(vm.guest.base(0), base);
        assert!(vm.guest.start_queue(0).unwrap());
        request(&mut vm, 0, IOVA, pages[0]);
        vm.answer(first.0, first.1);
        assert_eq!(vm.used(0), Some((0, 513)));
        assert!(vm.guest.peek(pages[1], 512) == content[..512]);
    }
}

/// The queue was stopped, and started again, while a question was on its way. Its answer, that there is
/// no translation, does not belong to the same question asked anew.
#[test]
fn a22_a_late_answer_is_not_taken_for_another() {
    for anew in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, false);
        vm.settle();
        let pages = scattered(2);
        let request = |vm: &mut Vm| {
            vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
            vm.guest.offer(0, 0);
        };
        request(&mut vm);
        let mut late = 0;
        let end = Instant::now() + SOON;
        while late < 3 && Instant::now() < end {
            late += usize::from(vm.question().is_some());
        }
        assert_eq!(late, 3, "header, data, and the header's page for the status");
        let base = vm.guest.stop_queue(0).unwrap();
        vm.guest.rewind(0, base);
        if anew {
            let features = F_VERSION_1 | F_FLUSH | F_ACCESS_PLATFORM | F_PROTOCOL;
            let features = words(&[features]);
            assert!(vm.guest.client.acked(request::SET_FEATURES, &features, &[]).unwrap());
        }
        assert!(vm.guest.start_queue(0).unwrap());
        // The ring is told unasked, so that the same questions come before the old answers.
        for page in (GUEST_BASE..GUEST_BASE + 0x1_0000).step_by(4096) {
            assert!(vm.update(page + USER_DELTA, page, 3));
        }
        request(&mut vm);
        std::thread::sleep(A_WHILE);
        (0..late).for_each(|_| vm.reply(1));
        vm.map(IOVA, &pages, 3);
        assert_eq!(vm.used(0), Some((0, 513)));
        assert_eq!(vm.status(pages[0]), OK);
        assert!(vm.guest.peek(pages[1], 512) == content[..512]);
    }
}

/// Pages are marked where they are in the guest's memory, whatever the device calls them: data, status
/// and used ring.
#[test]
fn a22_the_dirty_log_has_physical_pages() {
    const LOG_ALL: u64 = 1 << 26;
    for (packed, moved) in [(false, false), (true, false), (false, true), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let (options, _) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = if moved {
            Vm::with_scattered_rings(&mut rig, 1, packed, 1024)
        } else {
            Vm::connect(&mut rig, packed, PROTOCOL | 1 << 1)
        };
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        let bytes = (GUEST_BASE + MEMORY) / PAGE / 8;
        ftruncate(&log, bytes).unwrap();
        let log = File::from(log);
        let client = &vm.guest.client;
        assert!(client.acked(request::SET_LOG_BASE, &words(&[bytes, 0]), &[log.as_fd()]).unwrap());
        let features =
            F_VERSION_1 | F_FLUSH | F_INDIRECT | F_ACCESS_PLATFORM | F_PROTOCOL | LOG_ALL;
        let features = words(&[features | if packed { F_PACKED } else { 0 }]);
        assert!(client.acked(request::SET_FEATURES, &features, &[]).unwrap());
        assert!(vm.guest.start_queue(0).unwrap());
        vm.settle();
        // VHOST_VRING_F_LOG: the address is that of the used ring, an I/O virtual one.
        let (desc, avail, used) = vm.guest.rings(0);
        let mut address = halves(&[0, 1]);
        address.extend(words(&[desc, used, avail, used].map(|at| at + USER_DELTA)));
        assert!(vm.guest.client.acked(request::SET_VRING_ADDR, &address, &[]).unwrap());
        let pages = scattered(3);
        vm.map(IOVA, &pages, 3);
        vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 8192));
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, 8193)));
        vm.guest.stop_queue(0).unwrap();
        let mut bits = vec![0; usize::try_from(bytes).unwrap()];
        log.read_exact_at(&mut bits, 0).unwrap();
        let marked = |page: &u64| {
            bits[usize::try_from(page / PAGE / 8).unwrap()] >> (page / PAGE % 8) & 1 != 0
        };
        let all: Vec<u64> = (0..GUEST_BASE + MEMORY).step_by(4096).filter(marked).collect();
        let ring = [if packed { desc } else { used }, used];
        let mut expected: Vec<u64> = ring.map(|page| vm.table[&(page + USER_DELTA)].0).into();
        expected.extend(&pages);
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(all, expected, "packed: {packed}, moved: {moved}");
    }
}

/// More translations than are kept; each is a page of its own. What was known before is forgotten, is
/// asked for again, and works.
#[test]
fn a22_a_storm_of_updates_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::start(&mut rig, 1, false);
    let pages = scattered(2);
    vm.map(IOVA, &pages, 3);
    let read = |vm: &mut Vm| {
        vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
        vm.guest.poke(pages[1], &[0; 512]);
        vm.asked.clear();
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, 513)));
        assert!(vm.guest.peek(pages[1], 512) == content[..512]);
        [IOVA, IOVA + PAGE].map(|page| vm.asked.contains(&page))
    };
    assert_eq!(read(&mut vm), [true; 2]);
    assert_eq!(read(&mut vm), [false; 2], "they are known");
    let count = 33_000;
    for at in 0..count {
        // Not asked for, never used; the permissions keep neighbours apart.
        let update = iotlb(
            IOVA + 0x1000_0000 + at * PAGE,
            PAGE,
            DATA + USER_DELTA,
            1 + u8::from(at % 2 == 0),
            UPDATE,
        );
        vm.guest.client.send(IOTLB_MSG, 0, &update, &[]).unwrap();
    }
    // All of them have been read.
    vm.guest.client.ask_u64(request::GET_QUEUE_NUM).unwrap();
    assert_eq!(read(&mut vm), [true; 2], "a table without a bound forgets nothing");
    // One large range, cut into pieces again and again.
    let whole = iotlb(IOVA + 0x8000_0000, MEMORY, GUEST_BASE + USER_DELTA, 3, UPDATE);
    assert!(vm.tell(&whole));
    for at in (0..MEMORY).step_by(8192) {
        assert!(vm.invalidate(IOVA + 0x8000_0000 + at, PAGE));
    }
    read(&mut vm);
}

#[test]
fn a22_translations_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let vm = Vm::start(&mut rig, 1, false);
    let user = GUEST_BASE + USER_DELTA;
    for (what, payload) in [
        ("before memory", iotlb(IOVA, PAGE, user - PAGE, 3, UPDATE)),
        ("beyond memory", iotlb(IOVA, PAGE, user + MEMORY, 3, UPDATE)),
        ("half beyond memory", iotlb(IOVA, 2 * PAGE, user + MEMORY - PAGE, 3, UPDATE)),
        ("guest-physical", iotlb(IOVA, PAGE, GUEST_BASE, 3, UPDATE)),
        ("empty", iotlb(IOVA, 0, user, 3, UPDATE)),
        ("a wrap", iotlb(u64::MAX - 10, PAGE, user, 3, UPDATE)),
        ("a wrap here", iotlb(IOVA, PAGE, u64::MAX - 10, 3, UPDATE)),
        ("no permission", iotlb(IOVA, PAGE, user, 0, UPDATE)),
        ("odd permission", iotlb(IOVA, PAGE, user, 4, UPDATE)),
        ("a miss", iotlb(IOVA, PAGE, user, 3, MISS)),
        ("unknown", iotlb(IOVA, PAGE, user, 3, 9)),
    ] {
        assert!(!vm.tell(&payload), "{what}");
    }
    assert!(vm.tell(&iotlb(IOVA, PAGE, user + MEMORY - PAGE, 3, UPDATE)), "the last page");
}

#[test]
fn a22_without_a_channel_no_queue_starts() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    // No BACKEND_REQ: there is nobody to ask.
    let mut vm = Vm::connect(&mut rig, false, PROTOCOL & !(1 << 5));
    assert!(!vm.guest.start_queue(0).unwrap());
    drop(vm);
    rig.join_sessions();
    // Not negotiated: there are no such messages.
    let guest = RawGuest::connect(rig.connect(), F_VERSION_1);
    let update = iotlb(IOVA, PAGE, GUEST_BASE + USER_DELTA, 3, UPDATE);
    assert!(!guest.client.acked(IOTLB_MSG, &update, &[]).unwrap());
}

/// Answers that are none end the channel, and nothing else.
#[test]
fn a22_odd_answers_end_the_channel_only() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let bytes = |words: [u32; 5]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>();
    // The last are in order, but more than there are questions.
    for odd in [vec![0xff; 20], bytes([1, 1, 8, 0, 0]), bytes([1, 1 | 4, 8, 1, 0]).repeat(200)] {
        let mut vm = Vm::start(&mut rig, 1, false);
        let end = Instant::now() + SOON;
        while vm.question().is_none() {
            assert!(Instant::now() < end, "nothing is asked");
        }
        vm.channel.write_all(&odd).unwrap();
        let closed = || {
            let mut byte = [0; 4096];
            loop {
                match (&vm.channel).read(&mut byte) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(_) => return false,
                }
            }
        };
        while !closed() {
            assert!(Instant::now() < end, "the channel is open");
            std::thread::sleep(Duration::from_millis(1));
        }
        let queues = vm.guest.client.ask_u64(request::GET_QUEUE_NUM);
        assert_eq!(queues.unwrap(), 1, "the connection goes on");
        drop(vm);
        rig.join_sessions();
    }
}

/// Descriptors are no answers, however right the bytes are that come with them; and those that could not
/// be closed without asking somebody are kept, until so many are that no more front-ends are taken.
#[test]
fn a22_answers_with_descriptors_end_the_channel() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let (harmless, foreign) = (tempfile::tempfile().unwrap(), std::net::UdpSocket::bind("[::1]:0"));
    let foreign = foreign.or_else(|_| std::net::UdpSocket::bind("127.0.0.1:0")).unwrap();
    for (fds, full) in [(vec![harmless.as_fd()], false), (vec![foreign.as_fd(); 200], true)] {
        let mut vm = Vm::start(&mut rig, 1, false);
        vm.asks();
        let answer: Vec<u8> = [1u32, 1 | 4, 8, 1, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
        RawClient::new(vm.channel.try_clone().unwrap()).send_bytes(&answer, &fds).unwrap();
        vm.loses_channel();
        let queues = vm.guest.client.ask_u64(request::GET_QUEUE_NUM);
        assert_eq!(queues.unwrap(), 1, "the connection goes on");
        assert_eq!(rig.export().is_closed(), full, "{} descriptors", fds.len());
    }
}

/// A front-end that does not read what it is asked, in a socket that takes little: its session answers
/// all the same, and asks the rest when it has read.
#[test]
fn a22_a_front_end_that_reads_nothing_is_not_waited_for() {
    const QUEUES: u16 = 8;
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options.queues(QUEUES, 1));
    let mut vm = Vm::connect(&mut rig, false, PROTOCOL);
    let (channel, theirs) = UnixStream::pair().unwrap();
    channel.set_nonblocking(true).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
    let client = &vm.guest.client;
    assert!(client.acked(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap());
    drop(theirs);
    vm.channel = channel;
    for queue in 0..u32::from(QUEUES) {
        assert!(vm.guest.start_queue(queue).unwrap(), "queue {queue}");
    }
    std::thread::sleep(A_WHILE);
    assert_eq!(vm.guest.client.ask_u64(request::GET_QUEUE_NUM).unwrap(), u64::from(QUEUES));
    let mut waiting = Vec::new();
    waiting.extend(std::iter::from_fn(|| vm.question()));
    assert!(!waiting.is_empty() && waiting.len() < usize::from(QUEUES) * 3, "{}", waiting.len());
    for (iova, wanted) in waiting {
        vm.answer(iova, wanted);
    }
    let pages = scattered(2);
    vm.map(IOVA, &pages, 3);
    for queue in 0..u32::from(QUEUES) {
        vm.put(queue, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
        vm.guest.offer(queue, 0);
        assert_eq!(vm.used(queue), Some((0, 513)), "queue {queue}");
    }
    assert!(vm.guest.peek(pages[1], 512) == content[..512]);
}

/// Who has closed the channel cannot be asked. Queues that would have to do not start, and say so.
#[test]
fn a22_a_channel_that_was_closed_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::start(&mut rig, 1, false);
    vm.asks();
    let enable =
        |vm: &Vm| vm.guest.client.acked(request::SET_VRING_ENABLE, &halves(&[0, 1]), &[]).unwrap();
    assert!(enable(&vm), "it waits for the answer");
    vm.channel.shutdown(std::net::Shutdown::Both).unwrap();
    let end = Instant::now() + SOON;
    while enable(&vm) {
        assert!(Instant::now() < end, "it waits for an answer for ever");
    }
}

/// An answer that comes before its question is none, and is not even read.
#[test]
fn a22_nobody_listens_while_nothing_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::start(&mut rig, 1, false);
    vm.settle();
    vm.reply(1);
    std::thread::sleep(A_WHILE);
    vm.guest.client.ask_u64(request::GET_QUEUE_NUM).unwrap();
    assert_eq!(vm.question(), None, "the channel is closed, or used");
}

/// Where translations lead has gone with the memory. So with a new table all is asked for anew; and with the
/// last queue that stops, as front-ends need not tell what changes while none runs.
#[test]
fn a22_nothing_is_known_of_new_memory_nor_after_a_stop() {
    for packed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (options, content) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::start(&mut rig, 1, packed);
        let pages = scattered(3);
        vm.map(IOVA, &pages, 3);
        let read = |vm: &mut Vm, page: u64| {
            vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
            vm.guest.offer(0, 0);
            assert_eq!(vm.used(0), Some((0, 513)), "packed: {packed}");
            assert!(vm.guest.peek(page, 512) == content[..512], "packed: {packed}");
            vm.guest.poke(page, &[0; 512]);
        };
        read(&mut vm, pages[1]);
        let new = memfd_create("new-memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&new, MEMORY).unwrap();
        let new = File::from(new);
        new.write_all_at(&vm.guest.peek(GUEST_BASE, usize::try_from(MEMORY).unwrap()), 0).unwrap();
        let old = std::mem::replace(&mut vm.guest.memory, new);
        vm.asked.clear();
        assert!(vm.guest.set_mem_table().unwrap());
        read(&mut vm, pages[1]);
        for page in [GUEST_BASE + USER_DELTA, IOVA, IOVA + PAGE] {
            assert!(vm.asked.contains(&page), "{page:#x}, packed: {packed}");
        }
        let mut there = [1; 512];
        old.read_exact_at(&mut there, pages[1] - GUEST_BASE).unwrap();
        assert_eq!(there, [0; 512], "written where it was");
        // The page moves while no queue runs.
        vm.guest.stop_queue(0).unwrap();
        vm.map(IOVA + PAGE, &pages[2..], 3);
        assert!(vm.guest.start_queue(0).unwrap());
        read(&mut vm, pages[2]);
    }
}

/// A front-end that promises for ever what it does not tell is asked no more.
#[test]
fn a22_answers_without_translations_end_the_channel() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut neighbour = RawGuest::start(rig.connect(), 1, 16, F_VERSION_1);
    let mut vm = Vm::start(&mut rig, 1, false);
    vm.settle();
    vm.put(0, 0, IN, 0, (IOVA, DATA), (IOVA + PAGE, 512));
    vm.guest.offer(0, 0);
    let answer: Vec<u8> = [1u32, 1 | 4, 8, 0, 0].iter().flat_map(|w| w.to_ne_bytes()).collect();
    let end = Instant::now() + SOON;
    let (mut answers, mut question) = (0, [0; 44]);
    let closed = loop {
        assert!(Instant::now() < end, "the channel is silent");
        match vm.channel.read(&mut question) {
            Ok(0) => break true,
            Ok(_) if answers == 5000 => break false,
            Ok(_) => answers += usize::from(vm.channel.write_all(&answer).is_ok()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(_) => break true,
        }
    };
    assert!(closed, "{answers} answers, and it is still asked");
    assert_eq!(
        vm.guest.client.ask_u64(request::GET_QUEUE_NUM).unwrap(),
        1,
        "the connection goes on"
    );
    assert_eq!(neighbour.simple(0, IN, 0, DATA, 512), (OK, 513));
    assert!(neighbour.peek(DATA, 512) == content[..512]);
}

/// Nobody needs to know where a ring was. What is asked is bounded, however often it moves, and in the
/// end what is needed is asked.
#[test]
fn a22_questions_for_a_ring_that_has_moved_are_not_asked() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    let mut vm = Vm::connect(&mut rig, false, PROTOCOL);
    // It starts as soon as it is known where it is.
    let addresses = |at: u64| {
        let mut payload = halves(&[0, 0]);
        payload.extend(words(&[at, at + 0x8000, at + 0x6000, 0]));
        payload
    };
    assert!(vm.guest.start_queue(0).unwrap());
    for round in 0..1000 {
        let payload = addresses(IOVA + (round << 20));
        assert!(vm.guest.client.acked(request::SET_VRING_ADDR, &payload, &[]).unwrap());
    }
    let (table, _, _) = vm.guest.rings(0);
    let payload = addresses(table + USER_DELTA);
    assert!(vm.guest.client.acked(request::SET_VRING_ADDR, &payload, &[]).unwrap());
    vm.put(0, 0, IN, 0, (IOVA, DATA), (IOVA + PAGE, 512));
    vm.map(IOVA, &[DATA, DATA + PAGE], 3);
    vm.guest.offer(0, 0);
    assert_eq!(vm.used(0), Some((0, 513)));
    assert!(vm.guest.peek(DATA + PAGE, 512) == content[..512]);
    assert!(vm.asked.len() < 200, "{} questions", vm.asked.len());
}

/// A guest goes on after its daemon: the new one knows no translation, and asks again.
#[test]
fn a22_after_a_reconnection_everything_is_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let (options, content) = disk(&folder);
    let mut rig = Rig::start(&options);
    for round in 0..2 {
        let mut vm = Vm::start(&mut rig, 1, round == 1);
        let pages = scattered(2);
        vm.map(IOVA, &pages, 3);
        vm.put(0, 0, IN, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
        vm.guest.offer(0, 0);
        assert_eq!(vm.used(0), Some((0, 513)));
        assert!(vm.asked.contains(&IOVA), "round {round}");
        assert!(vm.guest.peek(pages[1], 512) == content[..512]);
        drop(vm);
        rig.join_sessions();
    }
}

/// Nobody can be asked any more: what has its translations goes on, what misses one fails, and what is written is
/// logged, the ring too.
#[test]
fn b44_a_lost_channel_fails_what_misses_a_translation_and_the_log_goes_on() {
    const LOG_ALL: u64 = 1 << 26;
    for (packed, is_asked) in [(false, false), (true, false), (false, true), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let (options, _) = disk(&folder);
        let mut rig = Rig::start(&options);
        let mut vm = Vm::connect(&mut rig, packed, PROTOCOL | 1 << 1);
        assert!(vm.guest.start_queue(0).unwrap());
        vm.settle();
        let pages = scattered(2);
        vm.map(IOVA, &pages, 3);
        let request = |vm: &mut Vm, data| {
            vm.put(0, 0, IN, 0, (IOVA, pages[0]), (data, 512));
            vm.guest.offer(0, 0);
        };
        request(&mut vm, IOVA + PAGE);
        assert_eq!(vm.used(0), Some((0, 513)));
        if is_asked {
            request(&mut vm, IOVA + 7 * PAGE);
            vm.asks();
        }
        vm.channel.shutdown(std::net::Shutdown::Both).unwrap();
        if !is_asked {
            request(&mut vm, IOVA + 7 * PAGE);
        }
        assert_eq!(vm.guest.next_used(0, SOON), Some((0, 1)), "packed: {packed}, {is_asked}");
        assert_eq!(vm.status(pages[0]), IOERR);
        let bytes = (GUEST_BASE + MEMORY) / PAGE / 8;
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, bytes).unwrap();
        let (log, client) = (File::from(log), &vm.guest.client);
        assert!(client.acked(request::SET_LOG_BASE, &words(&[bytes, 0]), &[log.as_fd()]).unwrap());
        let features =
            F_VERSION_1 | F_FLUSH | F_INDIRECT | F_ACCESS_PLATFORM | F_PROTOCOL | LOG_ALL;
        let features = words(&[features | if packed { F_PACKED } else { 0 }]);
        assert!(client.acked(request::SET_FEATURES, &features, &[]).unwrap());
        let (desc, avail, used) = vm.guest.rings(0);
        let mut address = halves(&[0, 1]);
        address.extend(words(&[desc, used, avail, used].map(|at| at + USER_DELTA)));
        assert!(client.acked(request::SET_VRING_ADDR, &address, &[]).unwrap());
        request(&mut vm, IOVA + PAGE);
        assert_eq!(vm.guest.next_used(0, SOON), Some((0, 513)));
        let mut bits = vec![0; usize::try_from(bytes).unwrap()];
        log.read_exact_at(&mut bits, 0).unwrap();
        for page in [if packed { desc } else { used }, pages[0], pages[1]] {
            let bit = bits[usize::try_from(page / PAGE / 8).unwrap()] >> (page / PAGE % 8) & 1;
            assert_eq!(bit, 1, "packed: {packed}: {page:#x}");
        }
    }
}

/// A guest whose queue 0, with a split ring, has its first chain in flight by the record of a daemon that was killed.
fn after_a_kill(rig: &mut Rig) -> (Vm, File) {
    const SIZE: u16 = 64;
    let mut vm = Vm::connect(rig, false, PROTOCOL | 1 << 12);
    vm.guest.size = SIZE;
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&record, 1 << 16).unwrap();
    let record = File::from(record);
    // Version 1, so many entries; the first one is in flight.
    record.write_all_at(&[1, 0, SIZE.to_le_bytes()[0], 0], 8).unwrap();
    record.write_all_at(&[1], 16).unwrap();
    let payload = inflight_payload(1 << 16, 0, 1, SIZE);
    assert!(vm.guest.client.set_inflight(&payload, record.as_fd()).unwrap());
    (vm, record)
}

/// A front-end stops a queue before it has told where the ring is: what the record names cannot be answered there, and
/// it is not told that the queue has stopped.
#[test]
fn b54_a_ring_that_cannot_be_reached_is_not_said_to_have_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    for named in [true, false] {
        let (mut vm, record) = after_a_kill(&mut rig);
        record.write_all_at(&[u8::from(named)], 16).unwrap();
        assert!(vm.guest.start_queue(0).unwrap());
        vm.asks();
        let stopped = vm.guest.stop_queue(0);
        assert_eq!(stopped.is_err(), named, "{stopped:?}");
        drop(vm);
        rig.join_sessions();
        let mut version = [0; 2];
        record.read_exact_at(&mut version, 8).unwrap();
        assert_eq!(version, [1, 0], "it names what it did");
    }
}

/// A daemon was killed with a write in flight, and its successor misses a translation of it when the front-end stops
/// the queue: nobody tells translations meanwhile, and the record stays behind.
#[test]
fn b45_what_a_predecessor_left_and_misses_translations_fails_before_its_queue_has_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let (options, _) = disk(&folder);
    let mut rig = Rig::start(&options);
    let (mut vm, record) = after_a_kill(&mut rig);
    let pages = scattered(2);
    vm.map(IOVA, &pages[..1], 3);
    vm.put(0, 0, OUT, 0, (IOVA, pages[0]), (IOVA + PAGE, 512));
    vm.guest.offer_quietly(0, 0);
    assert!(vm.guest.start_queue(0).unwrap());
    loop {
        match vm.asks() {
            (page, _) if page == IOVA + PAGE => break,
            (page, wanted) => vm.answer(page, wanted),
        }
    }
    std::thread::sleep(A_WHILE);
    assert_eq!(vm.guest.next_used(0, Duration::ZERO), None, "it waits");
    assert_eq!(vm.guest.stop_queue(0).unwrap(), 1);
    assert_eq!(vm.guest.next_used(0, Duration::ZERO), Some((0, 1)));
    assert_eq!(vm.status(pages[0]), IOERR);
    vm.guest.client.ask_u64(request::GET_FEATURES).unwrap();
    let mut version = [0; 2];
    record.read_exact_at(&mut version, 8).unwrap();
    assert_eq!(version, [0; 2], "the record names nothing");
}
