//! Front against back in one process, and both against peers that keep no rule.

mod hostile;
mod pieces;

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

/// A successor knows from its predecessor how far it had got and to whom answers are owed.
#[test]
fn a_successor_answers_what_its_predecessor_took() {
    const WRITE: Ask<'static> = Ask { command: Command::Write, ..READ };
    for shape in shapes() {
        let first = 0xffff_fffe;
        let memory = Memory::new(Shape { first, ..shape });
        let (mut front, mut back) = (memory.front(), memory.back(ALL));
        for ask in [READ, WRITE, READ, WRITE, READ] {
            front.push(ask).unwrap();
        }
        let _ = front.publish();
        let mut tokens: VecDeque<_> =
            (0..4).map(|_| back.pop(&mut nothing).unwrap().unwrap().0).collect();
        let taken = first.wrapping_add(4);
        back.push(tokens.pop_front().unwrap(), Status::Ok);
        assert_eq!((back.taken(), back.published()), (taken, first), "nothing is seen yet");
        let _ = back.publish();
        assert_eq!((back.taken(), back.published()), (taken, first.wrapping_add(1)));
        let owed: Vec<_> = tokens.iter().map(Token::parts).collect();
        let ids: Vec<_> = tokens.iter().map(Token::id).collect();
        assert_eq!(owed, [(ids[0], OP_WRITE), (ids[1], OP_READ), (ids[2], OP_WRITE)]);
        drop(back);

        // SAFETY: the mapping is kept as long as the ring; the other back side is gone.
        let mut back = unsafe { Back::resumed(memory.at(), ALL, taken) }.unwrap();
        assert_eq!((back.taken(), back.published()), (taken, first.wrapping_add(1)));
        assert_eq!(back.in_flight(), 3);
        for parts in owed {
            back.push(Token::from_parts(parts), Status::Ok);
        }
        let (token, asked) = back.pop(&mut nothing).unwrap().unwrap();
        asked.unwrap();
        back.push(token, Status::Ok);
        assert!(back.pop(&mut nothing).unwrap().is_none());
        let _ = back.publish();
        for _ in 0..5 {
            assert_eq!(front.pop_response().unwrap().unwrap().status, Status::Ok);
        }
        assert_eq!(front.in_flight(), 0);
    }
}

#[test]
fn a_piece_says_where_it_is_in_its_page() {
    let piece = GrantPiece::new(9, 2, 5);
    assert_eq!((piece.grant(), piece.first(), piece.last()), (9, 2, 5));
    assert_eq!((piece.sectors(), piece.offset(), piece.len()), (4, 1024, 2048));
    let whole = GrantPiece::whole(9);
    assert_eq!((whole.sectors(), whole.offset(), whole.len()), (8, 0, PAGE_BYTES));
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
