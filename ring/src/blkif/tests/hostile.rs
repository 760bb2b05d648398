//! Rings whose other side keeps no rule: indexes, slots, answers, noise.

use super::*;

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
        let answer = Response { id, status: Status::Ok };
        assert_eq!(front.pop_response().unwrap(), Some(answer));
        assert_eq!(reads, 1);
    }
}

/// A request that the header knows, with its first four bytes and its tail.
pub(super) fn raw(abi: Abi, head: [u8; 4], sector: u64, rest: &[u32]) -> Vec<u8> {
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
            assert_eq!(front.pop_response().unwrap(), Some(Response { id, status: Status::Ok }));
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
            (0, OP_READ, Ok(Some(Response { id: 0, status: Status::Ok }))),
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
