use super::*;

/// Bytes of a page, as a number of bytes here.
const PAGE: usize = 4096;

fn page(number: usize) -> Miss {
    Miss { page: number as u64 * IOMMU_PAGE, access: Access::Read }
}

/// Where the page numbered so is; what is there is not looked at.
fn place(number: usize) -> Translation {
    let first = page(number).page;
    let host = std::ptr::without_provenance_mut(0x10_0000 + 2 * PAGE * number);
    Translation { first, last: first + (IOMMU_PAGE - 1), host, permission: Permission::BOTH }
}

/// Sends whatever may be sent.
fn send(iommu: &mut Iommu) -> Vec<Miss> {
    let mut sent = Vec::new();
    while let Some(miss) = iommu.next_question() {
        iommu.was_sent();
        sent.push(miss);
    }
    sent
}

fn answer_all(iommu: &mut Iommu) {
    while iommu.asked.front().is_some() {
        iommu.was_answered(false).unwrap();
    }
}

#[test]
fn a_queue_waits_for_so_many_pages_each_of_them_once() {
    let mut iommu = Iommu::new(2);
    for number in 0..MISSES_MAX {
        iommu.want(1, page(number));
        iommu.want(1, page(0));
    }
    assert_eq!(iommu.who_wants(page(MISSES_MAX - 1)), [1]);
    iommu.want(1, page(MISSES_MAX));
    assert!(iommu.who_wants(page(MISSES_MAX)).is_empty(), "no room");
    iommu.want(0, page(MISSES_MAX));
    assert_eq!(iommu.who_wants(page(MISSES_MAX)), [0], "that is each queue's own");
}

#[test]
fn a_page_is_asked_for_once_and_not_if_it_is_known() {
    let mut iommu = Iommu::new(2);
    iommu.table.insert(place(9));
    for at in [0, 1, 0] {
        iommu.ask(at, page(1));
        iommu.ask(at, page(9));
    }
    assert_eq!(send(&mut iommu), [page(1)]);
    iommu.ask(0, page(1));
    assert!(send(&mut iommu).is_empty(), "it was asked for");
    // Whoever is known, or asked for, takes no room of those who are not.
    for _ in 0..UNSENT_MAX {
        for number in [1, 9, 2] {
            iommu.ask(0, page(number));
        }
    }
    iommu.ask(0, page(3));
    assert_eq!(send(&mut iommu), [page(2), page(3)]);
}

#[test]
fn questions_of_a_queue_are_bounded_and_those_that_were_told_make_room() {
    let mut iommu = Iommu::new(1);
    for number in 0..=UNSENT_MAX {
        iommu.ask(0, page(number));
    }
    // The last one had no room. Now two have.
    iommu.table.insert(place(3));
    iommu.table.insert(place(7));
    for number in [100, 101, 102] {
        iommu.ask(0, page(number));
    }
    let all = [page(100), page(101)];
    let expected = (0..UNSENT_MAX).filter(|number| ![3, 7].contains(number)).map(page);
    let expected: Vec<Miss> = expected.chain(all).collect();
    assert_eq!(send(&mut iommu), expected);
}

#[test]
fn so_many_questions_are_open_and_queues_take_turns() {
    let mut iommu = Iommu::new(3);
    for number in 0..40 {
        for at in [0, 2] {
            iommu.ask(at, page(1000 * at + number));
        }
    }
    let sent = send(&mut iommu);
    let expected: Vec<Miss> = (0..32).flat_map(|n| [page(n), page(2000 + n)]).collect();
    assert_eq!(sent.len(), ASKED_MAX);
    assert_eq!(sent, expected);
    assert!(iommu.is_asking());
    iommu.was_answered(false).unwrap();
    assert_eq!(send(&mut iommu), [page(32)], "one answer, one question");
    answer_all(&mut iommu);
    assert!(iommu.is_asking(), "some wait to be sent");
    let rest: Vec<Miss> = (32..40).flat_map(|n| [page(n), page(2000 + n)]).skip(1).collect();
    assert_eq!(send(&mut iommu).len(), rest.len());
    answer_all(&mut iommu);
    assert!(!iommu.is_asking());
    assert_eq!(iommu.was_answered(false), Err(Nonsense::NotAsked));
}

#[test]
fn promises_in_a_row_that_are_not_kept_are_counted() {
    let mut iommu = Iommu::new(1);
    iommu.want(0, page(1));
    iommu.ask(0, page(1));
    let promise = |iommu: &mut Iommu| {
        assert_eq!(send(iommu), [page(1)], "it is asked for again");
        iommu.was_answered(true)
    };
    for _ in 0..FUTILE_MAX {
        assert_eq!(promise(&mut iommu), Ok(None));
    }
    iommu.translation_came();
    for _ in 0..FUTILE_MAX {
        assert_eq!(promise(&mut iommu), Ok(None));
    }
    assert_eq!(promise(&mut iommu), Err(Nonsense::Futile));
    // A new channel begins anew, and is asked all that is open.
    iommu.ask(0, page(1));
    assert_eq!(send(&mut iommu), [page(1)]);
    iommu.answer.push(1);
    iommu.renew_channel();
    assert!(iommu.answer.is_empty(), "half an answer is none");
    assert_eq!(promise(&mut iommu), Ok(None));
    // And so does who has forgotten everything.
    for _ in 1..FUTILE_MAX {
        assert_eq!(promise(&mut iommu), Ok(None));
    }
    iommu.restart();
    iommu.want(0, page(1));
    iommu.ask(0, page(1));
    assert_eq!(promise(&mut iommu), Ok(None), "the row began anew");
}

#[test]
fn who_has_all_it_waits_for_is_told_each_range_once() {
    let mut iommu = Iommu::new(3);
    for number in [1, 2, 5] {
        iommu.want(0, page(number));
    }
    iommu.want(2, page(8));
    assert!(iommu.satisfied().is_empty());
    let two = Translation { last: place(2).first + (IOMMU_PAGE - 1), ..place(1) };
    iommu.table.insert(two);
    assert!(iommu.satisfied().is_empty(), "one is missing");
    iommu.table.insert(place(5));
    let answered = Answered { learned: vec![two, place(5)], denied: Vec::new() };
    assert_eq!(iommu.satisfied(), [(0, answered)]);
    assert!(iommu.satisfied().is_empty(), "nobody is told twice");
    assert_eq!(iommu.who_wants(page(8)), [2]);
}

/// A request that fails has to say so, in a page that it may still wait for.
#[test]
fn who_cannot_have_a_page_is_told_with_the_others() {
    let mut iommu = Iommu::new(4);
    for (queue, number) in [(0, 1), (0, 2), (0, 3), (1, 2), (2, 1), (3, 2), (3, 4)] {
        iommu.want(queue, page(number));
    }
    let answered = |learned, denied| Answered { learned, denied };
    iommu.deny(page(2));
    assert_eq!(
        iommu.satisfied(),
        [(1, answered(vec![], vec![page(2)]))],
        "it waits for nothing else"
    );
    assert!(iommu.who_wants(page(2)).is_empty() && iommu.satisfied().is_empty());
    iommu.table.insert(place(1));
    assert_eq!(iommu.satisfied(), [(2, answered(vec![place(1)], vec![]))]);
    iommu.deny(page(3));
    assert_eq!(iommu.satisfied(), [(0, answered(vec![place(1)], vec![page(2), page(3)]))]);
    // A queue that stops waits for nothing, and neither does one whose front-end begins anew.
    iommu.unwant(3);
    iommu.table.insert(place(4));
    assert!(iommu.satisfied().is_empty());
    iommu.want(3, page(2));
    iommu.want(3, page(4));
    iommu.deny(page(2));
    iommu.restart();
    assert!(iommu.satisfied().is_empty());
}

#[test]
fn pages_that_are_lost_to_the_byte_are_asked_for_again() {
    let mut iommu = Iommu::new(1);
    for number in 1..=4 {
        iommu.table.insert(place(number));
        iommu.want(0, page(number));
    }
    let (second, fourth) = (place(2), place(4));
    let hosts = iommu.forget(second.last, fourth.first);
    let host = |number: usize| place(number).host as usize;
    let last = PAGE - 1;
    let expected =
        [(host(2) + last, host(2) + last), (host(3), host(3) + last), (host(4), host(4))];
    assert_eq!(hosts, expected);
    // Of the second and the fourth page the first byte is what a question is about.
    assert_eq!(send(&mut iommu), [page(3), page(4)]);
    assert!(iommu.forget(place(1).last + 1, second.first - 1).is_empty());
}

#[test]
fn a_ring_is_overlapped_by_any_byte_of_it() {
    let at = UserAddresses { desc: 0x10_0000, avail: 0x20_0000, used: 0x30_0000 };
    let format = Format { packed: false, size: 8, event_idx: false, indirect: false };
    let (desc, driver, device) = format.area_bytes();
    for (iova, len) in [(at.desc, desc), (at.avail, driver), (at.used, device)] {
        let last = iova + len as u64 - 1;
        for (first, end, overlaps) in [
            (iova, iova, true),
            (last, last, true),
            (0, iova, true),
            (last, u64::MAX, true),
            (iova - 1, iova - 1, false),
            (last + 1, last + 1, false),
        ] {
            assert_eq!(ring_overlaps(at, format, first, end), overlaps, "{first:#x} to {end:#x}");
        }
    }
}

#[test]
fn a_ring_that_lies_in_pieces_is_gathered_unless_they_adjoin() {
    let (map, quota) = (GuestMap::default(), Arc::new(Quota::default()));
    let at = UserAddresses { desc: 0, avail: 0x10_0000, used: 0x20_0000 };
    // Two pages of descriptors.
    let format = Format { packed: true, size: 512, event_idx: false, indirect: false };
    let mut iommu = Iommu::new(1);
    iommu.table.insert(Translation { first: at.avail, last: at.avail + 4095, ..place(100) });
    iommu.table.insert(Translation { first: at.used, last: at.used + 4095, ..place(200) });
    iommu.table.insert(place(0));
    let found = iommu.ring_place(0, at, format, &map, &quota);
    assert!(found.unwrap().is_none(), "one page is missing");
    assert_eq!(send(&mut iommu), [Miss { access: Access::Write, ..page(1) }]);
    iommu.table.insert(place(1));
    // There is no memory behind these addresses that could be mapped.
    let found = iommu.ring_place(0, at, format, &map, &quota);
    assert!(matches!(found, Err(StartError::Scattered("descriptor ring", _))));
    // It adjoins here, with other rights, so that it stays a range of its own.
    let host = place(0).host.wrapping_add(4096);
    let write = Permission::from_bits(2).unwrap();
    iommu.table.insert(Translation { host, permission: write, ..place(1) });
    assert_eq!(iommu.table.len(), 4);
    let areas = iommu.ring_place(0, at, format, &map, &quota).unwrap().unwrap().areas;
    assert_eq!(areas.desc, place(0).host);
    assert_eq!((areas.driver, areas.device), (place(100).host, place(200).host));
}

#[test]
fn a_question_says_page_and_access() {
    let miss = |access| Miss { page: 0x1122_3344_5566_7000, access };
    for (access, number) in [(Access::Read, 1), (Access::Write, 2)] {
        let bytes = question(miss(access));
        assert_eq!(bytes[..8], 0x1122_3344_5566_7000_u64.to_ne_bytes());
        assert_eq!(bytes[8..24], [0; 16]);
        assert_eq!(bytes[24..26], [number, MISS]);
        assert_eq!(bytes[26..], [0; 6]);
    }
}

#[test]
fn what_lies_beside_a_range_that_is_lost_is_not_asked_for() {
    let mut iommu = Iommu::new(1);
    for number in [1, 4] {
        iommu.want(0, page(number));
    }
    iommu.forget(place(2).first, place(3).last);
    assert!(send(&mut iommu).is_empty());
    iommu.forget(place(1).first, place(1).last);
    assert_eq!(send(&mut iommu), [page(1)]);
}

/// What is open already leaves the room to what is not.
#[test]
fn what_was_asked_for_is_not_kept_to_be_asked_for_again() {
    let mut iommu = Iommu::new(1);
    for _ in 0..2 {
        for number in 0..ASKED_MAX {
            iommu.ask(0, page(number));
        }
        send(&mut iommu);
    }
    iommu.ask(0, page(ASKED_MAX));
    answer_all(&mut iommu);
    assert_eq!(send(&mut iommu), [page(ASKED_MAX)]);
}
