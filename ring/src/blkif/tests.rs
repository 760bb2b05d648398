//! Front against back in one process, and both against peers that keep no rule.

use super::layout::{OP_INDIRECT, OP_READ, OP_WRITE};
use super::*;
use crate::virtqueue::tests::Rng;
use ringway_core::mem::Mapping;
use ringway_core::{ByteRange, Status};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

pub(super) const ALL: Offered =
    Offered { flush: true, barrier: true, discard: true, indirect_segments: 256 };

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) abi: Abi,
    pub(super) order: u32,
    /// Where the indices begin.
    pub(super) first: u32,
}

fn shapes() -> Vec<Shape> {
    let orders = if cfg!(miri) { vec![0, 1] } else { vec![0, 1, 2, 4] };
    let abis = [Abi::X86_64, Abi::X86_32];
    let shape = |abi| move |order| Shape { abi, order, first: 0xffff_fff0 };
    abis.into_iter().flat_map(|abi| orders.iter().copied().map(shape(abi))).collect()
}

/// The pages of a ring.
pub(super) struct Memory(Mapping, Shape);

impl Memory {
    pub(super) fn new(shape: Shape) -> Self {
        Self(Mapping::anonymous(PAGE_BYTES << shape.order).unwrap(), shape)
    }

    fn at(&self) -> RingAt {
        RingAt { base: self.0.at(0), order: self.1.order, abi: self.1.abi }
    }

    pub(super) fn front(&self) -> Front {
        // SAFETY: the tests keep the mapping as long as the ring.
        unsafe { Front::new(self.at(), self.1.first) }.unwrap()
    }

    pub(super) fn back(&self, offered: Offered) -> Back {
        // SAFETY: as in `front`.
        unsafe { Back::new(self.at(), offered) }.unwrap()
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset + 4 <= self.0.len());
        // SAFETY: an aligned word of the mapping; nothing else runs meanwhile.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU32::from_ptr(self.0.at(offset).cast())
        }
    }

    /// The bytes of a slot.
    fn slot(&self, number: usize) -> Vec<u8> {
        let start = 64 + number * self.1.abi.slot_bytes();
        let words = (start..start + self.1.abi.slot_bytes()).step_by(4);
        words.flat_map(|at| self.word(at).load(Relaxed).to_le_bytes()).collect()
    }

    fn set_slot(&self, number: usize, bytes: &[u8]) {
        let start = 64 + number * self.1.abi.slot_bytes();
        for (index, word) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes(word.try_into().unwrap());
            self.word(start + 4 * index).store(word, Relaxed);
        }
    }
}

/// No page is granted.
pub(super) fn nothing(_: u32, _: &mut [u8]) -> Result<(), NotGranted> {
    Err(NotGranted)
}

const PIECE: GrantPiece = GrantPiece::whole(7);

pub(super) const READ: Ask<'static> =
    Ask { command: Command::Read, sector: 8, with: With::Pieces(&[PIECE]) };

fn rounds() -> usize {
    if cfg!(miri) { 60 } else { 40_000 }
}

/// Pages that list pieces.
#[derive(Default)]
struct Pages(HashMap<u32, Vec<u8>>);

impl Grants for Pages {
    fn read(&mut self, grant: u32, into: &mut [u8]) -> Result<(), NotGranted> {
        // Behind what was written pages are empty; a scribble may ask for that, too.
        let page = self.0.get(&grant).ok_or(NotGranted)?;
        let there = page.len().min(into.len());
        into.fill(0);
        into[..there].copy_from_slice(&page[..there]);
        Ok(())
    }
}

/// A request to compare with.
#[derive(Clone, Debug)]
struct Wanted {
    command: Command,
    range: ByteRange,
    pieces: Vec<GrantPiece>,
}

/// A good request of any kind; indirect lists go to `pages`, on the grants 1000 and up.
fn push(front: &mut Front, rng: &mut Rng, pages: &mut Pages) -> Option<(u16, Wanted)> {
    let sector = rng.below(1 << 40) as u64;
    let piece = |rng: &mut Rng| {
        let first = rng.below(8);
        let last = first + rng.below(8 - first);
        let [first, last] = [first, last].map(|sector| u8::try_from(sector).unwrap());
        GrantPiece::new(u32::try_from(rng.below(999)).unwrap(), first, last)
    };
    let command = match rng.below(8) {
        0..=2 => Command::Read,
        3..=5 => Command::Write,
        6 => [Command::WriteBarrier, Command::Flush][rng.below(2)],
        _ => Command::Discard { secure: rng.below(2) == 0 },
    };
    let long = matches!(command, Command::Read | Command::Write) && rng.below(3) == 0;
    let bound = if long { 256 } else { 11 };
    let count = match command {
        Command::Discard { .. } => 0,
        Command::Read | Command::Write => 1 + rng.below(bound),
        _ => rng.below(12),
    };
    let pieces: Vec<_> = (0..count).map(|_| piece(rng)).collect();
    let sectors: u64 = pieces.iter().map(|piece| u64::from(piece.sectors())).sum();
    let (mut wanted, with, grant);
    wanted = (sector, sectors);
    if matches!(command, Command::Discard { .. }) {
        wanted.1 = rng.below(1 << 30) as u64;
        with = With::Sectors(wanted.1);
    } else if long {
        // Each time another one: requests in flight must not share a page.
        grant = [1000 + u32::try_from(pages.0.len()).unwrap()];
        pages.0.insert(grant[0], pieces_to_bytes(&pieces).to_vec());
        with = With::Pages { segments: u16::try_from(count).unwrap(), pages: &grant };
    } else {
        with = With::Pieces(&pieces);
        if count == 0 {
            wanted = (0, 0);
        }
    }
    let id = match front.push(Ask { command, sector, with }) {
        Ok(id) => id,
        Err(full) => {
            assert_eq!((full, front.in_flight()), (NoRoom::Full, front.size()));
            return None;
        }
    };
    let range = ByteRange::from_sector(wanted.0, wanted.1 * 512).unwrap();
    Some((id, Wanted { command, range, pieces }))
}

/// Both sides take random steps. Requests arrive as they were added, answers as they were given, in
/// any order; and whoever was told `Quiet` is notified of the next news.
#[test]
fn a09_front_and_back_agree_for_ever() {
    let mut rng = Rng::seeded("a09_blkif");
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let mut pages = Pages::default();
        let mut added: VecDeque<(u16, Wanted)> = VecDeque::new();
        let mut held: Vec<Token> = Vec::new();
        let mut pushed: VecDeque<(u16, Status)> = VecDeque::new();
        let (mut hidden_requests, mut hidden_answers) = (0, 0);
        let (mut back_sleeps, mut front_sleeps_for) = (false, None);
        let mut laps = 0;
        for round in 0..rounds() {
            match rng.below(8) {
                0..=2 => {
                    let request = push(&mut front, &mut rng, &mut pages);
                    hidden_requests += usize::from(request.is_some());
                    added.extend(request);
                }
                3 => {
                    let notify = front.publish();
                    let news = hidden_requests > 0;
                    assert!(!(news && back_sleeps && !notify), "lost, {shape:?} at {round}");
                    assert!(news || !notify, "a notification of nothing");
                    back_sleeps &= !notify;
                    hidden_requests = 0;
                }
                4 if !back_sleeps => {
                    while let Some((token, asked)) = back.pop(&mut pages).unwrap() {
                        let asked = asked.unwrap();
                        let (id, wanted) = added.pop_front().expect("never added");
                        assert_eq!(token.id(), u64::from(id));
                        assert_eq!(
                            (asked.command(), asked.range()),
                            (wanted.command, wanted.range)
                        );
                        assert_eq!(asked.pieces(), wanted.pieces);
                        held.push(token);
                        laps += 1;
                    }
                    assert_eq!(added.len(), hidden_requests);
                    if rng.below(2) == 0 {
                        back_sleeps = back.arm().unwrap() == Armed::Quiet;
                    } else {
                        back.disarm();
                    }
                }
                5 if !held.is_empty() => {
                    for _ in 0..=rng.below(held.len()) {
                        let token = held.swap_remove(rng.below(held.len()));
                        let all = [Status::Ok, Status::IoError, Status::Unsupported];
                        let status = all[rng.below(3)];
                        pushed.push_back((u16::try_from(token.id()).unwrap(), status));
                        back.push(token, status);
                        hidden_answers += 1;
                    }
                }
                6 => {
                    let call = back.publish();
                    assert!(hidden_answers > 0 || !call, "a notification of nothing");
                    let seen = pushed.len();
                    let due = front_sleeps_for.is_some_and(|wanted| seen >= wanted);
                    assert!(!due || call || hidden_answers == 0, "lost, {shape:?} at {round}");
                    if call {
                        front_sleeps_for = None;
                    }
                    hidden_answers = 0;
                }
                7 if front_sleeps_for.is_none() => {
                    while let Some(answer) = front.pop_response().unwrap() {
                        assert_eq!(Some((answer.id, answer.status)), pushed.pop_front());
                    }
                    assert_eq!(pushed.len(), hidden_answers);
                    let out = front.in_flight() as usize - hidden_requests;
                    if out > 0 && rng.below(2) == 0 {
                        let after = 1 + rng.below(out);
                        let quiet = front.arm(u32::try_from(after).unwrap()).unwrap();
                        assert_eq!(quiet, Armed::Quiet);
                        front_sleeps_for = Some(after);
                    } else {
                        front.disarm();
                    }
                }
                _ => {}
            }
            assert_eq!(back.in_flight() as usize, held.len());
        }
        assert!(cfg!(miri) || laps > front.size() * 4, "{shape:?} never wrapped");
    }
}

#[test]
fn a_full_ring_says_so_and_recovers() {
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let size = 32 << shape.order;
        assert_eq!((front.size(), back.size()), (size, size));
        for _ in 0..3 {
            for _ in 0..size {
                front.push(READ).unwrap();
            }
            assert_eq!(front.push(READ), Err(NoRoom::Full));
            assert!(!back.has_work());
            let _ = front.publish();
            assert!(back.has_work());
            let mut tokens = Vec::new();
            while let Some((token, asked)) = back.pop(&mut nothing).unwrap() {
                asked.unwrap();
                tokens.push(token);
            }
            assert_eq!(tokens.len(), size as usize);
            for token in tokens.into_iter().rev() {
                back.push(token, Status::Ok);
            }
            assert!(!front.has_responses(1).unwrap());
            let _ = back.publish();
            assert!(front.has_responses(size).unwrap());
            while front.pop_response().unwrap().is_some() {}
            assert_eq!((front.in_flight(), back.in_flight()), (0, 0));
        }
    }
}

/// Every field is where the C header has it: `offsetof` as computed by GCC for both ABIs.
#[test]
fn slots_are_those_of_blkif_h() {
    struct Header {
        request: usize,
        response: usize,
        id: usize,
        sector: usize,
        seg: usize,
        nr_sectors: usize,
        grefs: usize,
    }
    let header = |abi| match abi {
        Abi::X86_64 => Header {
            request: 112,
            response: 16,
            id: 8,
            sector: 16,
            seg: 24,
            nr_sectors: 24,
            grefs: 28,
        },
        Abi::X86_32 => Header {
            request: 108,
            response: 12,
            id: 4,
            sector: 12,
            seg: 20,
            nr_sectors: 20,
            grefs: 24,
        },
    };
    for shape in shapes() {
        let want = header(shape.abi);
        assert_eq!(shape.abi.slot_bytes(), want.request);
        assert_eq!(shape.abi.response_bytes(), want.response);
        assert_eq!(Abi::from_name(shape.abi.name()), Some(shape.abi));
        let memory = Memory::new(Shape { first: 0, ..shape });
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let sector = 0x0011_2233_4455_6677;
        let pieces: Vec<_> = (0..11).map(|n| GrantPiece::new(0xa0b0_c000 + n, 1, 6)).collect();
        let grants: Vec<_> = (0..8).map(|n| 0x0506_0700 + n).collect();
        let long = u64::MAX - 5;
        let asks = [
            Ask { command: Command::Write, sector, with: With::Pieces(&pieces) },
            Ask { command: Command::Discard { secure: true }, sector, with: With::Sectors(long) },
            Ask {
                command: Command::Write,
                sector,
                with: With::Pages { segments: 4096, pages: &grants },
            },
        ];
        for ask in asks {
            front.push(ask).unwrap();
        }
        let slots = [0, 1, 2].map(|number| memory.slot(number));
        let heads = [[1, 11, 0, 0], [5, 1, 0, 0], [6, 1, 0, 16]];
        for (number, (slot, head)) in slots.iter().zip(heads).enumerate() {
            assert_eq!(slot[..4], head);
            assert_eq!(slot[want.id..][..8], (number as u64).to_le_bytes());
            assert_eq!(slot[want.sector..][..8], u64::to_le_bytes(sector));
        }
        for (at, piece) in (want.seg..).step_by(8).zip(&pieces) {
            assert_eq!(slots[0][at..][..4], piece.grant().to_le_bytes());
            assert_eq!(slots[0][at + 4..][..4], [1, 6, 0, 0]);
        }
        assert_eq!(want.seg + 88, want.request);
        assert_eq!(slots[1][want.nr_sectors..][..8], long.to_le_bytes());
        for (at, grant) in (want.grefs..).step_by(4).zip(&grants) {
            assert_eq!(slots[2][at..][..4], grant.to_le_bytes());
        }
        // The indices: req_prod, req_event, rsp_prod, rsp_event.
        let _ = front.publish();
        let (token, _) = back.pop(&mut nothing).unwrap().unwrap();
        back.push(token, Status::Unsupported);
        let _ = (back.publish(), back.arm(), front.arm(2));
        let indices = [0, 4, 8, 12].map(|at| memory.word(at).load(Relaxed));
        // The back side was popped once, so that two requests were left.
        assert_eq!(indices, [3, 2, 1, 2]);
        let slot = memory.slot(0);
        assert_eq!(slot[..12], [0, 0, 0, 0, 0, 0, 0, 0, OP_WRITE, 0, 0xfe, 0xff]);
        // The last slot ends in the last page.
        assert!(64 + want.request * back.size() as usize <= PAGE_BYTES << shape.order);
    }
}

#[test]
fn a08_rings_that_cannot_be() {
    let mapping = Mapping::anonymous(PAGE_BYTES * 32).unwrap();
    for order in (0..100).chain([u32::MAX, 1 << 31]) {
        let at = RingAt { base: mapping.at(0), order, abi: Abi::X86_64 };
        // SAFETY: the mapping has room for each ring that is not refused, and for one more order.
        let (front, back) = unsafe { (Front::new(at, 0), Back::new(at, ALL)) };
        let good = order <= 4;
        assert_eq!((front.is_ok(), back.is_ok()), (good, good), "order {order}");
    }
    let base = mapping.at(64);
    let at = RingAt { base, order: 0, abi: Abi::X86_64 };
    // SAFETY: the ring lies in the mapping.
    assert_eq!(unsafe { Back::new(at, ALL) }.unwrap_err(), LayoutError::Unaligned);
    let at = RingAt { base: mapping.at(0), ..at };
    for (indirect_segments, good) in [(0, true), (4096, true), (4097, false), (65535, false)] {
        // SAFETY: likewise.
        let back = unsafe { Back::new(at, Offered { indirect_segments, ..ALL }) };
        assert_eq!(back.is_ok(), good, "{indirect_segments} segments");
    }
}

/// A front-end may be ahead by as many requests as there are slots whose answers it can have seen.
#[test]
fn a09_index_jumps() {
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, size) = (memory.front(), 32 << shape.order);
        let first = shape.first;
        for (ahead, good) in
            [(0, true), (1, true), (size, true), (size + 1, false), (1 << 31, false), (!0, false)]
        {
            let mut back = memory.back(ALL);
            memory.word(0).store(first.wrapping_add(ahead), Relaxed);
            assert_eq!(back.arm().is_ok(), good, "{ahead} ahead");
            assert_eq!(back.pop(&mut nothing).is_ok(), good, "{ahead} ahead");
            // A back-end that comes later does not begin with such a ring at all.
            // SAFETY: as in `Memory::back`; the other one is not used any more.
            assert_eq!(unsafe { Back::new(memory.at(), ALL) }.is_ok(), good);
            memory.word(0).store(first, Relaxed);
        }
        // With requests in flight there is less room, also when their answers are only written.
        let mut back = memory.back(ALL);
        for _ in 0..3 {
            front.push(READ).unwrap();
        }
        let _ = front.publish();
        let mut tokens = Vec::new();
        while let Some((token, _)) = back.pop(&mut nothing).unwrap() {
            tokens.push(token);
        }
        back.push(tokens.pop().unwrap(), Status::Ok);
        memory.word(0).store(first.wrapping_add(size + 1), Relaxed);
        assert!(back.has_work());
        let from = first.wrapping_add(3);
        let to = first.wrapping_add(size + 1);
        let jump = Broken::IndexJump { from, to, owed: 3, size };
        assert_eq!(back.pop(&mut nothing).unwrap_err(), jump);
        // Once it is published the same index is in order; one step back is not.
        let _ = back.publish();
        assert!(back.pop(&mut nothing).is_ok());
        let mut back = memory.back(ALL);
        while back.pop(&mut nothing).unwrap().is_some() {}
        memory.word(0).store(to.wrapping_sub(1), Relaxed);
        assert!(back.pop(&mut nothing).is_err(), "an index that went back");
    }
}

/// What is judged is what was copied, whatever the guest writes meanwhile.
#[test]
fn a10_a_slot_is_read_once() {
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let with = With::Pages { segments: 2, pages: &[55] };
        let id = front.push(Ask { command: Command::Read, sector: 3, with }).unwrap();
        let _ = front.publish();
        let list = [GrantPiece::new(1, 0, 0), GrantPiece::new(2, 3, 4)];
        let number = (shape.first % front.size()) as usize;
        // The guest writes over all of the slot while its list is read.
        let mut reads = 0;
        let mut grants = |grant: u32, into: &mut [u8]| {
            assert_eq!((grant, into.len()), (55, 16));
            into.copy_from_slice(pieces_to_bytes(&list));
            memory.set_slot(number, &vec![0xff; shape.abi.slot_bytes()]);
            reads += 1;
            Ok(())
        };
        let (token, asked) = back.pop(&mut grants).unwrap().unwrap();
        let asked = asked.unwrap();
        assert_eq!((asked.command(), asked.pieces()), (Command::Read, &list[..]));
        assert_eq!(asked.range(), ByteRange::new(3 * 512, 3 * 512).unwrap());
        back.push(token, Status::Ok);
        let _ = back.publish();
        // The answer is that of the request as it was: its id, and the operation inside.
        let answer = Answer { id, status: Status::Ok };
        assert_eq!(front.pop_response().unwrap(), Some(answer));
        assert_eq!(reads, 1);
    }
}

/// No byte of an answer is left as it was (XSA-216).
#[test]
fn a11_answers_are_zeroed() {
    for shape in shapes() {
        let memory = Memory::new(Shape { first: 0, ..shape });
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        front.push(READ).unwrap();
        let _ = front.publish();
        let (token, _) = back.pop(&mut nothing).unwrap().unwrap();
        memory.set_slot(0, &vec![0xaa; shape.abi.slot_bytes()]);
        back.push(token, Status::IoError);
        let slot = memory.slot(0);
        let (response, rest) = slot.split_at(shape.abi.response_bytes());
        let mut want = vec![0; response.len()];
        want[10..12].copy_from_slice(&(-1i16).to_le_bytes());
        assert_eq!(response, want);
        assert!(rest.iter().all(|byte| *byte == 0xaa), "more was written than an answer");
    }
}

/// A request that the header knows, with its first four bytes and its tail.
fn raw(abi: Abi, head: [u8; 4], sector: u64, rest: &[u32]) -> Vec<u8> {
    let mut words = vec![0u32; abi.slot_bytes() / 4];
    words[0] = u32::from_le_bytes(head);
    let (id, [low, high]) = (
        abi.id_at(),
        [sector & 0xffff_ffff, sector >> 32].map(|half| u32::try_from(half).unwrap()),
    );
    (words[id], words[id + 1]) = (0x5555_5555, 0x6666_6666);
    (words[id + 2], words[id + 3]) = (low, high);
    words[id + 4..id + 4 + rest.len()].copy_from_slice(rest);
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Each malformed request costs the guest this request: it is answered, and the next one served.
#[test]
fn a03_a04_b13_malformed_requests_are_refused_alone() {
    let sectors = |first: u32, last: u32| [9, first | last << 8];
    let good = sectors(0, 7);
    let none = Offered::default();
    let limit = Offered { indirect_segments: 600, ..ALL };
    let bad = |first, last| Refused::Sectors { first, last };
    let far = u64::MAX / 512;
    let many = |count, max| Refused::TooManySegments { count, max };
    let over = |sector, sectors| Refused::Range { sector, sectors };
    type Case<'a> = (Offered, [u8; 4], u64, &'a [u32], Refused);
    let cases: &[Case<'_>] = &[
        (ALL, [0, 0, 0, 0], 0, &good, Refused::NoSegments),
        (ALL, [1, 0, 0, 0], 0, &good, Refused::NoSegments),
        (ALL, [0, 12, 0, 0], 0, &good, many(12, 11)),
        (ALL, [1, 255, 0, 0], 0, &good, many(255, 11)),
        (ALL, [3, 12, 0, 0], 0, &good, many(12, 11)),
        (ALL, [0, 1, 0, 0], 0, &sectors(1, 0), bad(1, 0)),
        (ALL, [0, 1, 0, 0], 0, &sectors(0, 8), bad(0, 8)),
        (ALL, [1, 1, 0, 0], 0, &sectors(255, 255), bad(255, 255)),
        (ALL, [1, 2, 0, 0], 0, &[good[0], good[1], 9, 0x0607], bad(7, 6)),
        (ALL, [0, 1, 0, 0], far, &good, over(far, 8)),
        (ALL, [1, 1, 0, 0], u64::MAX, &good, over(u64::MAX, 8)),
        (ALL, [2, 1, 0, 0], far - 6, &good, over(far - 6, 8)),
        (ALL, [5, 0, 0, 0], 1, &[!0, !0], over(1, u64::MAX)),
        (ALL, [5, 0, 0, 0], far, &[1, 0], over(far, 1)),
        (ALL, [4, 1, 0, 0], 0, &good, Refused::Operation(4)),
        (ALL, [7, 1, 0, 0], 0, &good, Refused::Operation(7)),
        (ALL, [255, 1, 0, 0], 0, &good, Refused::Operation(255)),
        (none, [2, 1, 0, 0], 0, &good, Refused::Operation(2)),
        (none, [3, 0, 0, 0], 0, &good, Refused::Operation(3)),
        (none, [5, 0, 0, 0], 0, &[1, 0], Refused::Operation(5)),
        (none, [6, 0, 1, 0], 0, &[0, 40], Refused::Operation(6)),
        (limit, [6, 2, 1, 0], 0, &[0, 40], Refused::InnerOperation(2)),
        (limit, [6, 6, 1, 0], 0, &[0, 40], Refused::InnerOperation(6)),
        (limit, [6, 0, 0, 0], 0, &[0, 40], Refused::NoSegments),
        (limit, [6, 0, 89, 2], 0, &[0, 40, 40], many(601, 600)),
        (limit, [6, 1, 255, 255], 0, &[0, 40, 40], many(65535, 600)),
        (limit, [6, 1, 1, 0], 0, &[0, 41], Refused::Page(41)),
        (limit, [6, 0, 88, 2], 0, &[0, 40, 41], Refused::Page(41)),
        (limit, [6, 0, 1, 0], 0, &[0, 42], bad(3, 2)),
        (limit, [6, 0, 88, 2], 0, &[0, 40, 42], bad(3, 2)),
        (limit, [6, 1, 1, 0], far, &[0, 40], over(far, 8)),
    ];
    let pages = HashMap::from([
        (40, pieces_to_bytes(&[GrantPiece::whole(3); 512]).to_vec()),
        (42, pieces_to_bytes(&[GrantPiece::new(3, 3, 2); 512]).to_vec()),
    ]);
    let mut pages = Pages(pages);
    for shape in shapes() {
        let memory = Memory::new(Shape { first: 0, ..shape });
        for (offered, head, sector, rest, refused) in cases {
            let mut front = memory.front();
            let mut back = memory.back(*offered);
            front.push(READ).unwrap();
            front.push(READ).unwrap();
            memory.set_slot(0, &raw(shape.abi, *head, *sector, rest));
            let _ = front.publish();
            let (token, asked) = back.pop(&mut pages).unwrap().unwrap();
            assert_eq!(asked.unwrap_err(), *refused, "{head:?} {shape:?}");
            let unsupported = matches!(refused, Refused::Operation(_));
            assert_eq!(refused.status() == Status::Unsupported, unsupported);
            back.push(token, refused.status());
            let (_, asked) = back.pop(&mut pages).unwrap().unwrap();
            asked.unwrap();
            let slot = memory.slot(0);
            let status = if unsupported { -2i16 } else { -1 };
            let operation = if head[0] == OP_INDIRECT { head[1] } else { head[0] };
            assert_eq!(slot[..8], [0x55, 0x55, 0x55, 0x55, 0x66, 0x66, 0x66, 0x66]);
            assert_eq!((slot[8], &slot[10..12]), (operation, &status.to_le_bytes()[..]));
        }
    }
}

/// An indirect request over several pages, up to what the protocol has room for.
#[test]
fn a04_the_longest_request_is_read_page_by_page() {
    let all: Vec<_> = (0..4096).map(|n| GrantPiece::new(n, 0, (n % 8) as u8)).collect();
    let grants: Vec<u32> = (70..78).collect();
    let lists = all.chunks(512).map(|list| pieces_to_bytes(list).to_vec());
    let mut pages = Pages(grants.iter().copied().zip(lists).collect());
    let offered = Offered { indirect_segments: 4096, ..ALL };
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(offered));
        for count in [1usize, 511, 512, 513, 4095, 4096] {
            let segments = u16::try_from(count).unwrap();
            let with = With::Pages { segments, pages: &grants[..count.div_ceil(512)] };
            let id = front.push(Ask { command: Command::Write, sector: 1, with }).unwrap();
            let _ = front.publish();
            let (token, asked) = back.pop(&mut pages).unwrap().unwrap();
            let asked = asked.unwrap();
            assert_eq!((asked.command(), asked.pieces()), (Command::Write, &all[..count]));
            back.push(token, Status::Ok);
            let _ = back.publish();
            assert_eq!(front.pop_response().unwrap(), Some(Answer { id, status: Status::Ok }));
        }
        for (segments, pages) in [(512, 2), (513, 1), (1, 0), (4097, 8), (65535, 8)] {
            let with = With::Pages { segments, pages: &grants[..pages] };
            let pushed = front.push(Ask { command: Command::Read, sector: 1, with });
            assert_eq!(pushed, Err(NoRoom::Segments { segments: segments.into(), pages }));
        }
    }
}

#[test]
fn the_front_refuses_what_makes_no_request() {
    let memory = Memory::new(Shape { abi: Abi::X86_64, order: 0, first: 0 });
    let mut front = memory.front();
    let twelve = [PIECE; 12];
    let discard = Command::Discard { secure: false };
    for (command, with, error) in [
        (Command::Read, With::Pieces(&twelve), NoRoom::Segments { segments: 12, pages: 0 }),
        (Command::Read, With::Sectors(1), NoRoom::Kind(Command::Read)),
        (discard, With::Pieces(&[PIECE]), NoRoom::Kind(discard)),
        (Command::Flush, With::Pages { segments: 1, pages: &[1] }, NoRoom::Kind(Command::Flush)),
    ] {
        assert_eq!(front.push(Ask { command, sector: 0, with }), Err(error));
    }
    assert_eq!(front.in_flight(), 0);
}

/// Requests of the same id are the guest's own business: each is served, and answered once.
#[test]
fn a06_the_same_id_twice_in_flight() {
    for shape in shapes() {
        let memory = Memory::new(Shape { first: 0, ..shape });
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        for number in 0..3 {
            front.push(READ).unwrap();
            memory.set_slot(number, &raw(shape.abi, [OP_READ, 1, 0, 0], 1, &[5, 0x0700]));
        }
        let _ = front.publish();
        let mut tokens = Vec::new();
        while let Some((token, asked)) = back.pop(&mut nothing).unwrap() {
            asked.unwrap();
            tokens.push(token);
        }
        assert_eq!(tokens.len(), 3);
        assert!(tokens.windows(2).all(|pair| pair[0] == pair[1]));
        for token in tokens {
            back.push(token, Status::Ok);
        }
        let _ = back.publish();
        assert_eq!(memory.word(8).load(Relaxed), 3);
    }
}

/// A front-end does not believe its back-end either.
#[test]
fn hostile_answers_end_the_ring() {
    for shape in shapes() {
        let memory = Memory::new(Shape { first: 0, ..shape });
        let answer = |id: u64, operation: u8| {
            let mut bytes = id.to_le_bytes().to_vec();
            bytes.extend([operation, 0, 0, 0]);
            memory.set_slot(0, &bytes);
        };
        for (id, operation, want) in [
            (0, OP_READ, Ok(Some(Answer { id: 0, status: Status::Ok }))),
            (0, OP_WRITE, Err(BackFault::WrongOperation { id: 0, asked: 0, answered: 1 })),
            (0, OP_INDIRECT, Err(BackFault::WrongOperation { id: 0, asked: 0, answered: 6 })),
            (1, OP_READ, Err(BackFault::NotInFlight(1))),
            (1, u8::MAX, Err(BackFault::NotInFlight(1))),
            (512, OP_READ, Err(BackFault::NotInFlight(512))),
            (1 << 32, OP_READ, Err(BackFault::NotInFlight(1 << 32))),
        ] {
            let mut front = memory.front();
            front.push(READ).unwrap();
            let _ = front.publish();
            answer(id, operation);
            memory.word(8).store(1, Relaxed);
            assert_eq!(front.pop_response(), want, "{id} {operation}");
        }
        for (to, good) in [(0, true), (1, true), (2, false), (1 << 31, false), (!0, false)] {
            let mut front = memory.front();
            front.push(READ).unwrap();
            let _ = front.publish();
            // Added, not published: it cannot be answered yet.
            front.push(READ).unwrap();
            memory.word(8).store(to, Relaxed);
            assert_eq!(front.has_responses(1).is_ok(), good, "{to} answers");
            assert_eq!(front.arm(1).is_ok(), good, "{to} answers");
        }
    }
}

/// Writes a word somewhere into the ring behind everyone's back: often one that means something.
fn scribble(memory: &Memory, rng: &mut Rng) {
    let near = memory.word([0, 8][rng.below(2)]).load(Relaxed);
    let noise = match rng.below(4) {
        0 => u32::try_from(rng.below(1 << 32)).unwrap(),
        1 => u32::try_from(rng.below(8)).unwrap(),
        2 => near.wrapping_add(u32::try_from(rng.below(70)).unwrap()).wrapping_sub(35),
        _ => u32::from_le_bytes([
            u8::try_from(rng.below(8)).unwrap(),
            u8::try_from(rng.below(13)).unwrap(),
            0,
            0,
        ]),
    };
    // An index, the request added last, or anything.
    let slot = memory.1.abi.slot_bytes();
    let newest = memory.word(0).load(Relaxed).wrapping_sub(1) & ((32 << memory.1.order) - 1);
    let at = match rng.below(8) {
        0 => 4 * rng.below(4),
        1..=4 => 64 + newest as usize * slot + 4 * rng.below(8),
        _ => 4 * rng.below(16 + 8 * slot),
    };
    memory.word(at).store(noise, Relaxed);
}

/// The back-end scribbles over all of the ring, all the time; the front side must survive.
#[test]
fn noise_does_no_harm_to_the_front() {
    let mut rng = Rng::seeded("noise_does_no_harm_to_the_front");
    let mut pages = Pages::default();
    for shape in shapes() {
        let memory = Memory::new(shape);
        let mut front = memory.front();
        for round in 0..rounds() / 10 {
            if round % 50 == 0 {
                front = memory.front();
            }
            scribble(&memory, &mut rng);
            if front.in_flight() < front.size() {
                let _ = push(&mut front, &mut rng, &mut pages);
            }
            let _ = (front.publish(), front.pop_response(), front.has_responses(3));
            if rng.below(4) == 0 {
                let _ = front.arm(2);
            }
            assert!(front.in_flight() <= front.size(), "{shape:?}");
        }
    }
}

/// The same with a front-end that scribbles now and then: no more requests are in flight than the
/// ring holds, all that are handed out are well formed, and answers never outnumber them.
#[test]
fn noise_does_no_harm_to_the_back() {
    let mut rng = Rng::seeded("noise_does_no_harm_to_the_back");
    let mut pages = Pages::default();
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut popped, mut refused, mut broken) = (0, 0, 0);
        for _ in 0..rounds() / 200 {
            let (mut front, mut back) = (memory.front(), memory.back(ALL));
            let mut held: Vec<Token> = Vec::new();
            for _ in 0..100 {
                if front.in_flight() < front.size() {
                    let _ = push(&mut front, &mut rng, &mut pages);
                }
                let _ = (front.publish(), front.pop_response());
                if rng.below(4) == 0 {
                    scribble(&memory, &mut rng);
                }
                if rng.below(2) == 0 && !held.is_empty() {
                    back.push(held.swap_remove(rng.below(held.len())), Status::Ok);
                }
                match back.pop(&mut pages) {
                    Ok(Some((token, asked))) => {
                        match asked {
                            Ok(asked) => judge(asked),
                            Err(_) => refused += 1,
                        }
                        held.push(token);
                        popped += 1;
                        assert!(held.len() <= back.size() as usize);
                    }
                    Ok(None) => {
                        let _ = (back.publish(), back.arm());
                    }
                    Err(Broken::IndexJump { .. }) => {
                        broken += 1;
                        break;
                    }
                }
            }
        }
        println!("{shape:?}: {popped} requests, {refused} refused, {broken} rings broken");
        assert!(cfg!(miri) || (popped > 300 && refused > 10 && broken > 10), "not deep enough");
    }
}

/// What every user of a request relies on.
fn judge(asked: &Asked) {
    assert!(asked.pieces().iter().all(|piece| piece.is_proper()));
    let bytes: usize = asked.pieces().iter().map(|piece| piece.len()).sum();
    match asked.command() {
        Command::Read | Command::Write => assert!(bytes > 0),
        Command::Discard { .. } => return assert_eq!(bytes, 0),
        _ => {}
    }
    assert_eq!(asked.range().len(), bytes as u64);
}

/// Two threads, each asleep unless it was notified: every request comes back, so no notification is
/// ever lost.
#[test]
fn no_wakeup_is_lost_between_threads() {
    use std::sync::mpsc;
    for shape in shapes() {
        let memory = Memory::new(shape);
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        let (kick, kicked) = mpsc::channel::<()>();
        let (call, called) = mpsc::channel::<()>();
        let total = if cfg!(miri) { 40 } else { 20_000 };
        let serve = move || {
            let mut served = 0;
            while served < total {
                while let Some((token, asked)) = back.pop(&mut nothing).unwrap() {
                    assert_eq!(asked.unwrap().range().offset(), 512 * served);
                    back.push(token, Status::Ok);
                    served += 1;
                }
                if back.publish() {
                    let _ = call.send(());
                }
                if served < total && back.arm().unwrap() == Armed::Quiet {
                    kicked.recv().unwrap();
                }
                back.disarm();
            }
        };
        let server = std::thread::spawn(serve);
        let (mut sent, mut answered) = (0, 0);
        while answered < total {
            while sent < total && front.push(Ask { sector: sent, ..READ }).is_ok() {
                sent += 1;
                if sent % 3 == 0 {
                    break;
                }
            }
            if front.publish() {
                let _ = kick.send(());
            }
            while let Some(answer) = front.pop_response().unwrap() {
                assert_eq!(answer.status, Status::Ok);
                answered += 1;
            }
            if answered < total && front.in_flight() > 0 {
                if front.arm(2).unwrap() == Armed::Quiet {
                    called.recv().unwrap();
                }
                front.disarm();
            }
        }
        server.join().unwrap();
    }
}
