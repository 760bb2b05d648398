mod held;
mod limited;

use super::super::fake_host::{FakeGuest, FakeHost, FakeMapped};
use super::super::movement::Movement;
use super::super::record::{Identity, RecordError};
use super::*;
use crate::host::{GrantMapping, PAGE};
use ringway_core::{ByteRange, Op};
use ringway_export::abandon;
use ringway_ring::blkif::{
    Abi, Ask, Command, Front, GrantPiece, Offered, Response, RingAt, With, pieces_to_bytes,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

const ALL: [Movement; 4] = Movement::ALL;
const RING_GRANT: u32 = 1;
/// Grants of data pages are this and the page's number.
const DATA_GRANT: u32 = 1000;
const DATA_PAGES: usize = 1600;
const OFFERED: Offered =
    Offered { flush: true, barrier: true, discard: true, indirect_segments: 256 };

/// What a popped request asks for, or how it is refused.
type Outcome = Result<(Op, ByteRange), Status>;

/// A guest with one ring of one page, and a disk in memory that answers when it is told to.
struct Rig {
    guest: Arc<FakeGuest>,
    front: Front,
    queue: Queue<FakeHost>,
    disk: Vec<u8>,
    movement: Movement,
    record: Option<PathBuf>,
}

fn identity() -> Identity {
    Identity { domid: 1, devid: 51712, queue: 0, slots: 32, pieces: 256, port: 5, pages: [0; 16] }
}

fn setup(guest: &Arc<FakeGuest>, movement: Movement) -> QueueSetup<FakeHost> {
    let mut host = FakeHost::new(guest);
    let ring_pages: FakeMapped = host.map(&[RING_GRANT], true).unwrap();
    let at = RingAt { base: ring_pages.base(), order: 0, abi: Abi::X86_64 };
    let persistent = movement.offers_persistent();
    QueueSetup { host, ring_pages, at, offered: OFFERED, movement, persistent }
}

fn grant(page: usize) -> u32 {
    DATA_GRANT + u32::try_from(page).unwrap()
}

fn whole(pages: std::ops::Range<usize>) -> Vec<GrantPiece> {
    pages.map(|page| GrantPiece::whole(grant(page))).collect()
}

impl Rig {
    fn new(movement: Movement) -> Self {
        Self::kept(movement, None)
    }

    fn kept(movement: Movement, path: Option<&Path>) -> Self {
        let guest = FakeGuest::new(1 + DATA_PAGES);
        guest.grant(RING_GRANT, 0, true);
        (1..=DATA_PAGES).for_each(|page| guest.grant(grant(page), page, true));
        let at = RingAt { base: guest.memory.at(0), order: 0, abi: Abi::X86_64 };
        // SAFETY: the page stays mapped with the guest.
        let front = unsafe { Front::new(at, 0) }.unwrap();
        let record = match path {
            Some(path) => Record::create(path, &identity()).unwrap(),
            None => Record::unkept(&identity()).unwrap(),
        };
        // SAFETY: the ring lies in its pages, and there is one back side.
        let queue = unsafe { Queue::new(setup(&guest, movement), record) }.unwrap();
        let record = path.map(Path::to_path_buf);
        Self { guest, front, queue, disk: vec![0; 8 << 20], movement, record }
    }

    /// The back-end is killed, and another one comes.
    fn kill(&mut self) {
        let path = self.record.clone().expect("there is a record");
        let record = Record::open(&path, &identity()).unwrap();
        // SAFETY: as in `new`: the queue that was is not used any more.
        self.queue = unsafe { Queue::adopt(setup(&self.guest, self.movement), record) }.unwrap();
    }

    fn ask(&mut self, command: Command, sector: u64, pieces: &[GrantPiece]) -> u16 {
        let id = self.front.push(Ask { command, sector, with: With::Pieces(pieces) }).unwrap();
        let _ = self.front.publish();
        id
    }

    /// An indirect request, whose list is in page `list`.
    fn ask_listed(
        &mut self,
        command: Command,
        sector: u64,
        list: usize,
        pieces: &[GrantPiece],
    ) -> u16 {
        let bytes = pieces_to_bytes(pieces);
        self.guest.page(list)[..bytes.len()].copy_from_slice(bytes);
        let segments = u16::try_from(pieces.len()).unwrap();
        let with = With::Pages { segments, pages: &[grant(list)] };
        let id = self.front.push(Ask { command, sector, with }).unwrap();
        let _ = self.front.publish();
        id
    }

    /// Takes one request, as a worker does.
    fn pop(&mut self) -> Option<(Token, Outcome)> {
        let mut request = Request::with_capacity(1024);
        match self.queue.pop(&mut request).unwrap() {
            Pop::Empty => None,
            Pop::Refused(token, status) => Some((token, Err(status))),
            Pop::Request(token) => {
                let (start, len) = (request.range.offset(), request.range.len());
                let at = usize::try_from(start).unwrap();
                let bytes = &mut self.disk[at..][..usize::try_from(len).unwrap()];
                // SAFETY: the segments are valid until the request is answered, and not the disk's.
                let moved = unsafe {
                    match request.op {
                        Op::Read => request.segments.scatter(0, bytes),
                        Op::Write => request.segments.gather(0, bytes),
                        _ => 0,
                    }
                };
                if request.op.moves_data() {
                    assert_eq!(moved as u64, len, "all of it is in memory");
                    assert_eq!(request.segments.bytes(), len);
                }
                Some((token, Ok((request.op, request.range))))
            }
        }
    }

    fn answers(&mut self) -> Vec<Response> {
        self.queue.publish().unwrap();
        std::iter::from_fn(|| self.front.pop_response().unwrap()).collect()
    }

    /// Carries out all there is; the answers in the order they came.
    fn run(&mut self) -> Vec<Response> {
        let mut answers = Vec::new();
        loop {
            let mut moved = false;
            while let Some((token, outcome)) = self.pop() {
                moved = true;
                self.queue.complete(token, outcome.err().unwrap_or(Status::Ok), 0);
            }
            answers.append(&mut self.answers());
            if !moved {
                return answers;
            }
        }
    }

    fn statuses(&mut self) -> Vec<Status> {
        self.run().into_iter().map(|answer| answer.status).collect()
    }

    fn fill(&self, pages: std::ops::Range<usize>, seed: u8) {
        for page in pages {
            let value = |at: usize| u8::try_from((page * 31 + at / 7) % 251).unwrap() ^ seed;
            self.guest.page(page).iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at));
        }
    }
}

fn ok(count: usize) -> Vec<Status> {
    vec![Status::Ok; count]
}

#[test]
fn data_moves_in_every_way() {
    for movement in ALL {
        let mut rig = Rig::new(movement);
        rig.fill(1..268, 3);
        rig.ask(Command::Write, 0, &whole(1..12));
        rig.ask_listed(Command::Write, 100, 600, &whole(12..268));
        // Parts of pages, in no order.
        let odd = [(20, 3, 3), (19, 7, 7), (18, 0, 4), (17, 0, 7), (16, 1, 7)]
            .map(|(page, first, last)| GrantPiece::new(grant(page), first, last));
        rig.ask(Command::Write, 3000, &odd);
        assert_eq!(rig.statuses(), ok(3), "{movement:?}");
        // Into other pages, and compared there.
        rig.ask(Command::Read, 0, &whole(301..312));
        rig.ask_listed(Command::Read, 100, 600, &whole(312..568));
        let other =
            odd.map(|piece| GrantPiece::new(piece.grant() + 560, piece.first(), piece.last()));
        rig.ask(Command::Read, 3000, &other);
        assert_eq!(rig.statuses(), ok(3), "{movement:?}");
        for page in 1..268 {
            assert!(
                rig.guest.page(page) == rig.guest.page(300 + page),
                "{movement:?}: page {page}"
            );
        }
        for piece in odd {
            let page = piece.grant() as usize - DATA_GRANT as usize;
            let bytes = piece.offset()..piece.offset() + piece.len();
            assert!(
                rig.guest.page(page)[bytes.clone()] == rig.guest.page(page + 560)[bytes.clone()]
            );
            // Nothing beside it was touched.
            assert!(rig.guest.page(page + 560)[..bytes.start].iter().all(|byte| *byte == 0));
        }
        assert_eq!(rig.queue.bytes_in_use(), 0, "{movement:?}");
    }
}

/// A batch of requests costs one call each way.
#[test]
fn copies_are_batched() {
    let mut rig = Rig::new(Movement::Copy);
    let before = rig.guest.calls.load(SeqCst);
    for at in 0..16 {
        rig.ask(Command::Write, 8 * at as u64, &whole(1 + at..2 + at));
    }
    assert_eq!(rig.statuses(), ok(16));
    assert_eq!(rig.guest.calls.load(SeqCst) - before, 1);
    for at in 0..16 {
        rig.ask(Command::Read, 8 * at as u64, &whole(1 + at..2 + at));
    }
    assert_eq!(rig.statuses(), ok(16));
    assert_eq!(rig.guest.calls.load(SeqCst) - before, 2);
}

/// Hazard B13 (XSA-365): a grant that cannot be used costs its request, whichever way data moves.
#[test]
fn b13_a_bad_grant_fails_its_request_only() {
    for movement in ALL {
        let mut rig = Rig::new(movement);
        rig.fill(1..30, 9);
        rig.guest.revoke(grant(6));
        // Readable only: good enough for a write to the disk, and not for a read.
        if movement == Movement::Copy || movement == Movement::Map {
            rig.guest.grant(grant(20), 20, false);
        }
        let good = [rig.ask(Command::Write, 0, &whole(1..4))];
        let bad =
            [rig.ask(Command::Write, 100, &whole(4..8)), rig.ask(Command::Read, 0, &whole(5..8))];
        let good = [good[0], rig.ask(Command::Write, 200, &whole(8..10))];
        let listed_bad = rig.ask_listed(Command::Write, 300, 600, &whole(1..20));
        // A list that cannot be read.
        let with = With::Pages { segments: 12, pages: &[7] };
        let unlisted = rig.front.push(Ask { command: Command::Read, sector: 0, with }).unwrap();
        let _ = rig.front.publish();
        for answer in rig.run() {
            let wanted = if good.contains(&answer.id) { Status::Ok } else { Status::IoError };
            assert_eq!(answer.status, wanted, "{movement:?}: {answer:?}");
            assert!(
                answer.id == listed_bad
                    || answer.id == unlisted
                    || bad.contains(&answer.id)
                    || good.contains(&answer.id)
            );
        }
        if movement == Movement::Copy || movement == Movement::Map {
            rig.ask(Command::Write, 0, &whole(20..21));
            rig.ask(Command::Read, 0, &whole(20..21));
            assert_eq!(rig.statuses(), [Status::Ok, Status::IoError], "{movement:?}");
        }
        assert_eq!(rig.queue.bytes_in_use(), 0, "{movement:?}: nothing leaks");
        rig.ask(Command::Read, 0, &whole(1..4));
        assert_eq!(rig.statuses(), ok(1), "{movement:?}: the queue is as good as before");
    }
}

/// Hazard B15: pages that stay mapped are bounded, those in use stay, and others take their place.
#[test]
fn b15_persistent_grants_are_capped_and_evicted() {
    let mut rig = Rig::new(Movement::Persistent);
    let base = rig.guest.mapped.load(SeqCst);
    // One request is in flight all the time.
    rig.ask(Command::Write, 0, &whole(1..4));
    let (held, _) = rig.pop().unwrap();
    for round in 0..2 {
        for page in (4..DATA_PAGES).step_by(11) {
            rig.ask(Command::Write, 0, &whole(page..(page + 11).min(DATA_PAGES)));
            assert_eq!(rig.statuses(), ok(1), "round {round}");
            let mapped = rig.guest.mapped.load(SeqCst) - base;
            assert!(mapped <= PERSISTENT_MAX as usize, "{mapped} pages");
            assert_eq!(mapped, rig.queue.pages_mapped());
        }
    }
    assert!(rig.queue.pages.evicted() > 0);
    for page in 1..4 {
        let place = rig.queue.pages.hold(&mut rig.queue.host, grant(page)).unwrap();
        rig.queue.pages.release(place);
    }
    rig.queue.complete(held, Status::Ok, 0);
    assert_eq!(rig.answers().len(), 1);
    // A page that nobody uses any more is let go.
    for _ in 0..3 * PERSISTENT_MAX as u64 + 9000 {
        rig.queue.pages.sweep();
    }
    assert_eq!(rig.queue.pages_mapped(), 0);
}

/// All pages are in use: what comes then is copied.
#[test]
fn b15_with_all_pages_in_use_requests_are_copied() {
    let mut rig = Rig::new(Movement::Persistent);
    let mut held = Vec::new();
    for at in 0..5 {
        rig.ask_listed(Command::Write, 0, 1500 + at, &whole(1 + at * 256..257 + at * 256));
    }
    while let Some((token, outcome)) = rig.pop() {
        assert!(outcome.is_ok());
        held.push(token);
    }
    assert_eq!(held.len(), 5);
    assert!(rig.queue.bytes_in_use() > 0, "the last ones are copied");
    held.into_iter().for_each(|token| rig.queue.complete(token, Status::Ok, 0));
    assert_eq!(rig.answers().len(), 5);
    assert_eq!(rig.queue.bytes_in_use(), 0);
}

/// More data than there is memory for waits in the ring, and comes when there is.
#[test]
fn a15_requests_wait_for_memory() {
    let mut rig = Rig::new(Movement::Copy);
    for at in 0..12 {
        rig.ask_listed(Command::Write, 0, 1500 + at, &whole(1..257));
    }
    let mut held = Vec::new();
    while let Some((token, _)) = rig.pop() {
        held.push(token);
        assert!(rig.queue.bytes_in_use() <= POOL_BYTES);
    }
    assert_eq!(held.len(), POOL_BYTES >> 20);
    assert!(!rig.queue.has_work());
    assert_eq!(rig.queue.arm().unwrap(), Armed::Quiet, "an answer brings it back");
    assert_eq!(rig.queue.backlog(), 1, "it was taken, so it is owed");
    held.into_iter().for_each(|token| rig.queue.complete(token, Status::Ok, 0));
    assert_eq!(rig.answers().len(), POOL_BYTES >> 20);
    assert_eq!(rig.statuses(), ok(12 - (POOL_BYTES >> 20)));
}

#[test]
fn a_barrier_waits_for_all_before_it_and_holds_up_all_behind_it() {
    let mut rig = Rig::new(Movement::Copy);
    let before =
        [rig.ask(Command::Write, 0, &whole(1..2)), rig.ask(Command::Write, 8, &whole(2..3))];
    let barrier = rig.ask(Command::WriteBarrier, 16, &whole(3..4));
    let after = rig.ask(Command::Write, 24, &whole(4..5));
    let first = rig.pop().unwrap().0;
    let second = rig.pop().unwrap().0;
    assert!(rig.pop().is_none() && !rig.queue.has_work(), "two are in flight");
    assert_eq!(rig.queue.arm().unwrap(), Armed::Quiet);
    rig.queue.complete(second, Status::Ok, 0);
    assert!(rig.pop().is_none(), "one is in flight");
    rig.queue.complete(first, Status::Ok, 0);
    assert!(rig.queue.has_work());
    // Made durable, written, made durable; each by itself.
    for wanted in [Op::Flush, Op::Write, Op::Flush] {
        assert_eq!(rig.queue.arm().unwrap(), Armed::WorkArrived);
        let (token, outcome) = rig.pop().unwrap();
        assert_eq!(outcome.unwrap().0, wanted);
        assert!(rig.pop().is_none());
        rig.queue.complete(token, Status::Ok, 0);
    }
    let order: Vec<u16> = rig.run().into_iter().map(|answer| answer.id).collect();
    assert_eq!(order, [before[1], before[0], barrier, after]);
}

#[test]
fn a_barrier_that_fails_is_over_at_once() {
    for failing in 0..3 {
        let mut rig = Rig::new(Movement::Map);
        rig.ask(Command::WriteBarrier, 16, &whole(3..4));
        rig.ask(Command::Read, 0, &whole(4..5));
        for step in 0..=failing {
            let (token, _) = rig.pop().unwrap();
            let status = if step == failing { Status::IoError } else { Status::Ok };
            rig.queue.complete(token, status, 0);
        }
        assert_eq!(rig.statuses(), [Status::IoError, Status::Ok]);
    }
    // One whose data cannot be had, and one without data.
    let mut rig = Rig::new(Movement::Copy);
    rig.ask(Command::WriteBarrier, 16, &[GrantPiece::whole(7)]);
    rig.ask(Command::WriteBarrier, 0, &[]);
    assert_eq!(rig.statuses(), [Status::IoError, Status::Ok]);
}

#[test]
fn flushes_and_discards_go_on_as_they_are() {
    let mut rig = Rig::new(Movement::Copy);
    rig.ask(Command::Flush, 0, &[]);
    let with = With::Sectors(64);
    rig.front.push(Ask { command: Command::Discard { secure: false }, sector: 8, with }).unwrap();
    let _ = rig.front.publish();
    let (flush, outcome) = rig.pop().unwrap();
    assert_eq!(outcome.unwrap().0, Op::Flush);
    let (discard, outcome) = rig.pop().unwrap();
    assert_eq!(outcome.unwrap(), (Op::Discard, ByteRange::new(4096, 64 * 512).unwrap()));
    rig.queue.complete(discard, Status::Ok, 0);
    rig.queue.complete(flush, Status::IoError, 0);
    let statuses: Vec<_> = rig.answers().into_iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::IoError]);
}

/// Hazard A9: the ring stops; what was taken before is answered all the same.
#[test]
fn a09_an_index_that_jumps_breaks_the_ring() {
    let mut rig = Rig::new(Movement::Copy);
    rig.ask(Command::Write, 0, &whole(1..2));
    let (token, _) = rig.pop().unwrap();
    // `req_prod` is the first word of the ring.
    rig.guest.page(0)[..4].copy_from_slice(&1000u32.to_ne_bytes());
    let mut request = Request::with_capacity(16);
    assert!(matches!(rig.queue.pop(&mut request), Err(Broken::Rule(_))));
    assert!(rig.queue.arm().is_err());
    rig.queue.complete(token, Status::Ok, 0);
    rig.queue.publish().unwrap();
}

/// Hazard A17: a queue that is to stop owes what it has taken, and takes no more.
#[test]
fn a17_winding_down_takes_no_more() {
    let mut rig = Rig::new(Movement::Copy);
    for at in 0..20 {
        rig.ask(Command::Write, 8 * at, &whole(1..2));
    }
    let (token, _) = rig.pop().unwrap();
    assert_eq!(rig.queue.backlog(), BATCH - 1);
    rig.queue.wind_down();
    rig.queue.complete(token, Status::Ok, 0);
    assert_eq!(rig.statuses(), ok(BATCH));
    assert_eq!(rig.queue.backlog(), 0);
    rig.queue.resume();
    assert_eq!(rig.statuses(), ok(20 - BATCH));
}

/// The back-end is killed at any moment, with answers out of order, in part written, in part
/// published: each request is answered once, and its data is right.
#[test]
fn a_successor_owes_exactly_what_was_not_answered() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..60u64 {
        let movement = ALL[usize::try_from(seed % 4).unwrap()];
        let mut rig = Rig::kept(movement, Some(&dir.path().join(format!("record-{seed}"))));
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % below as u64).unwrap()
        };
        let (mut asked, mut answered, mut kills) = (0, 0, 0);
        let mut held: Vec<(Token, Status)> = Vec::new();
        // What each request in flight has written, by id.
        let mut waiting: std::collections::BTreeMap<u16, (usize, u8)> = Default::default();
        while answered < 400 {
            match next(8) {
                0..3 if asked < 400 && waiting.len() < 32 => {
                    // Each place on the disk, and each page, belongs to one request at a time.
                    let place = (0..40).find(|p| waiting.values().all(|(q, _)| q != p)).unwrap();
                    let value = u8::try_from(next(255)).unwrap();
                    rig.guest.page(1 + place).fill(value);
                    let sector = 8 * place as u64;
                    let command =
                        if next(20) == 0 { Command::WriteBarrier } else { Command::Write };
                    let id = rig.ask(command, sector, &whole(1 + place..2 + place));
                    waiting.insert(id, (place, value));
                    asked += 1;
                }
                3..5 => held.extend(
                    rig.pop().map(|(token, outcome)| (token, outcome.err().unwrap_or(Status::Ok))),
                ),
                5..7 if !held.is_empty() => {
                    let (token, status) = held.swap_remove(next(held.len()));
                    rig.queue.complete(token, status, 0);
                }
                7 if next(6) == 0 => {
                    // Tokens die with their process.
                    abandon(std::mem::take(&mut held));
                    rig.kill();
                    kills += 1;
                }
                _ => {}
            }
            if next(3) == 0 {
                for answer in rig.answers() {
                    let (place, value) = waiting.remove(&answer.id).expect("answered once");
                    assert_eq!(answer.status, Status::Ok);
                    assert!(rig.disk[place * PAGE..][..PAGE].iter().all(|byte| *byte == value));
                    answered += 1;
                }
            }
        }
        assert!(kills > 3, "seed {seed}: {kills} kills");
        assert!(waiting.is_empty() && rig.queue.bytes_in_use() == 0);
    }
}

#[test]
fn a_record_of_other_rings_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("record");
    assert!(matches!(Record::open(&path, &identity()), Err(RecordError::None(_))));
    let mut rig = Rig::kept(Movement::Copy, Some(&path));
    rig.ask(Command::Write, 0, &whole(1..2));
    // Nobody will answer it.
    abandon(rig.pop().unwrap());
    for other in [
        Identity { port: 6, ..identity() },
        Identity { domid: 2, ..identity() },
        Identity { slots: 64, ..identity() },
    ] {
        assert!(matches!(Record::open(&path, &other), Err(RecordError::Other(_))));
    }
    // One that does not fit the ring: it was kept from before.
    let mut record = Record::create(&dir.path().join("old"), &identity()).unwrap();
    assert!(matches!(record.recover(1), Err(RecordError::Damaged(_))));
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(Record::open(&path, &identity()), Err(RecordError::Foreign(_))));
}

/// What a record holds is zeroes once its file is cut short: no answer that was read of it gets to the guest,
/// and nothing more is taken.
#[test]
fn b34_a_lost_record_ends_its_queue() {
    let dir = tempfile::tempdir().unwrap();
    for movement in ALL {
        let path = dir.path().join("record");
        let mut rig = Rig::kept(movement, Some(&path));
        for n in 0..2 {
            rig.ask(Command::Write, 8 * n, &whole(1..2));
        }
        let (one, _) = rig.pop().unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        rig.queue.complete(one, Status::Ok, 0);
        assert!(rig.queue.publish().is_err(), "{movement:?}");
        assert!(rig.front.pop_response().unwrap().is_none(), "{movement:?}");
        let broken = rig.queue.pop(&mut Request::with_capacity(1024));
        let Err(broken) = broken.map(|_| ()) else { panic!("{movement:?}: it goes on") };
        assert!(broken.to_string().contains("record"), "{broken}");
    }
}

#[test]
fn b34_a_record_has_all_of_its_room() {
    use ringway_testkit::Mounted;
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let mounted = match Mounted::in_memory(dir.path().join("run"), 32 << 10) {
        Ok(mounted) => mounted,
        Err(lack) => return lack.skip(),
    };
    let path = mounted.path().join("record");
    let refused = Record::create(&path, &identity());
    assert!(matches!(refused, Err(RecordError::Host { .. })), "{refused:?}");
    assert!(!path.exists(), "nothing is left of it");
    mounted.set_room(1 << 20);
    let record = Record::create(&path, &identity()).unwrap();
    let meta = path.metadata().unwrap();
    assert!(meta.blocks() * 512 >= meta.len(), "{} of {}", meta.blocks() * 512, meta.len());
    drop(record);
}
