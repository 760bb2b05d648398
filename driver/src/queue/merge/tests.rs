//! The path request against the device side of the ring, in one process: what the server sees is
//! counted chain by chain, and no time passes that matters.

use crate::queue::tests::{Rig, rig_on, shapes};
use crate::{
    BlkQueue, Buffer, Data, Error, Policy, Refusal, SchedulerMode, SchedulerStats, Status,
};
use ringway_ring::virtqueue::Head;
use ringway_scheduler::merge_queue::WINDOW;
use std::sync::atomic::{AtomicU16, Ordering};

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;

/// A chain, as the device sees it.
struct Seen {
    head: Option<Head>,
    kind: u32,
    sector: u64,
    /// Bytes of each piece between header and status.
    pieces: Vec<u32>,
    status: *mut u8,
}

impl Seen {
    fn what(&self) -> (u32, u64, usize) {
        (self.kind, self.sector, self.pieces.len())
    }
}

/// All chains that are there, in the order of the ring.
fn see(rig: &mut Rig) -> Vec<Seen> {
    let mut all = Vec::new();
    while let Some((head, chain)) = rig.device.pop(&mut rig.translator).unwrap() {
        let chain = chain.unwrap();
        let pieces: Vec<_> = chain.readable().iter().chain(chain.writable()).copied().collect();
        let (first, last) = (pieces[0], pieces[pieces.len() - 1]);
        let header = rig.translator.one(first.addr, 16).unwrap();
        // SAFETY: a mapped header of a chain in flight, 16 bytes.
        let header = unsafe { header.cast::<[u8; 16]>().read() };
        all.push(Seen {
            head: Some(head),
            kind: u32::from_le_bytes(header[..4].try_into().unwrap()),
            sector: u64::from_le_bytes(header[8..].try_into().unwrap()),
            pieces: pieces[1..pieces.len() - 1].iter().map(|piece| piece.len).collect(),
            status: rig.translator.one(last.addr, 1).unwrap().as_ptr(),
        });
    }
    all
}

fn answer(rig: &mut Rig, seen: &mut Seen, status: u8) {
    let data = if seen.kind == READ { seen.pieces.iter().sum() } else { 0 };
    // SAFETY: the status byte of a chain in flight.
    unsafe { seen.status.write(status) };
    rig.device.push(seen.head.take().expect("answered once"), data + 1);
    let _ = rig.device.publish();
}

/// Answers all that comes with success until nothing comes; returns what was seen and the contexts
/// that came back.
fn serve<C>(queue: &mut BlkQueue<C>, rig: &mut Rig) -> (Vec<(u32, u64, usize)>, Vec<C>) {
    let (mut saw, mut back) = (Vec::new(), Vec::new());
    loop {
        let mut all = see(rig);
        for seen in &mut all {
            answer(rig, seen, 0);
            saw.push(seen.what());
        }
        let done: Vec<_> = queue.completions().collect();
        assert!(done.iter().all(|done| done.status == Status::Ok));
        if all.is_empty() && done.is_empty() {
            return (saw, back);
        }
        back.extend(done.into_iter().map(|done| done.ctx));
    }
}

/// A buffer of one sector.
fn sector(rig: &Rig) -> Buffer {
    rig.pool().alloc(512).unwrap()
}

fn read(queue: &mut BlkQueue<u64>, rig: &Rig, at: u64) {
    queue.read(at * 512, sector(rig), at).unwrap();
}

#[test]
fn neighbours_become_one_chain_and_come_back_one_by_one() {
    for (packed, tables) in shapes() {
        let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, packed, 32, tables);
        let free = rig.pool().available();
        for at in [13, 11, 10, 12, 40] {
            read(&mut queue, &rig, at);
        }
        let two = vec![sector(&rig), sector(&rig)];
        queue.write_vectored(14 * 512, two, 14).unwrap();
        queue.write(16 * 512, sector(&rig), 16).unwrap();
        assert!(see(&mut rig).is_empty(), "nothing is visible yet");
        assert_eq!(queue.in_flight(), 7);
        queue.submit().unwrap();
        let mut seen = see(&mut rig);
        let what: Vec<_> = seen.iter().map(Seen::what).collect();
        assert_eq!(what, [(READ, 10, 4), (WRITE, 14, 3), (READ, 40, 1)], "in order of sectors");
        assert!(seen.iter().flat_map(|seen| &seen.pieces).all(|&len| len == 512));
        for seen in &mut seen {
            answer(&mut rig, seen, 0);
        }
        assert!(queue.wait_for(7, None).unwrap());
        let done: Vec<_> = queue.completions().collect();
        let mut back: Vec<_> = done.iter().map(|done| (done.ctx, done.used_len)).collect();
        back.sort_unstable();
        let expected = [(10, 513), (11, 513), (12, 513), (13, 513), (14, 1), (16, 1), (40, 513)];
        assert_eq!(back, expected);
        assert!(done.iter().all(|done| done.status == Status::Ok));
        assert!(done.iter().any(|done| matches!(&done.data, Data::Many(two) if two.len() == 2)));
        drop(done);
        let path = SchedulerStats { plugged: 7, runs: 3, merged: 4, ..SchedulerStats::default() };
        let stats = queue.stats();
        assert_eq!((stats.path, stats.queued, stats.completed), (path, 7, 7));
        assert_eq!((queue.in_flight(), queue.policy()), (0, Policy::Request));
        assert!(!queue.wait(None).unwrap(), "nothing in flight: no sleep without end");
        assert_eq!(rig.pool().available(), free);
    }
}

#[test]
fn nothing_is_merged_across_what_orders() {
    for (packed, tables) in shapes() {
        let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, packed, 32, tables);
        read(&mut queue, &rig, 8);
        read(&mut queue, &rig, 9);
        queue.flush(0).unwrap();
        read(&mut queue, &rig, 10);
        queue.discard(0, 512, 0).unwrap();
        queue.write(11 * 512, sector(&rig), 0).unwrap();
        queue.get_id(rig.pool().alloc(20).unwrap(), 0).unwrap();
        queue.write(12 * 512, sector(&rig), 0).unwrap();
        queue.submit().unwrap();
        let what: Vec<_> = see(&mut rig).iter().map(Seen::what).collect();
        let expected = [
            (READ, 8, 2),
            (FLUSH, 0, 0),
            (READ, 10, 1),
            (DISCARD, 0, 1),
            // It orders nothing.
            (GET_ID, 0, 1),
            (WRITE, 11, 2),
        ];
        assert_eq!(what, expected);
        drop(queue);
    }
}

#[test]
fn a_merged_request_keeps_to_the_limits_of_server_and_ring() {
    // Of the rig: 14 buffers in a table of 16, a quarter of the ring without one.
    for (packed, tables) in shapes() {
        let most = if tables.is_some() { 14 } else { 8 };
        let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, packed, 32, tables);
        // As many requests as there are descriptors: they would not fit one by one without tables.
        for at in 0..32 {
            read(&mut queue, &rig, at);
        }
        let rejected = queue.read(0, sector(&rig), 99).unwrap_err();
        assert_eq!((rejected.why, rejected.ctx), (Refusal::Full, 99));
        queue.submit().unwrap();
        let (saw, mut back) = serve(&mut queue, &mut rig);
        assert!(saw.iter().all(|&(.., pieces)| pieces <= most), "{saw:?}");
        assert_eq!(saw.len(), 32_usize.div_ceil(most), "{saw:?}");
        back.sort_unstable();
        assert!(back.into_iter().eq(0..32));
    }
}

#[test]
fn a_full_ring_delays_what_is_sent_and_keeps_its_order() {
    for packed in [false, true] {
        // Without tables each of these takes three descriptors of eight.
        let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, packed, 8, None);
        for at in [2, 4, 6] {
            read(&mut queue, &rig, at);
        }
        queue.flush(0).unwrap();
        for at in [1, 3] {
            read(&mut queue, &rig, at);
        }
        queue.submit().unwrap();
        let (saw, back) = serve(&mut queue, &mut rig);
        let at = |wanted| saw.iter().position(|&(kind, at, _)| (kind, at) == wanted).unwrap();
        let flush = at((FLUSH, 0));
        assert!([2, 4, 6].iter().all(|&sector| at((READ, sector)) < flush), "{saw:?}");
        assert!([1, 3].iter().all(|&sector| at((READ, sector)) > flush), "{saw:?}");
        assert_eq!(back.len(), 6);
    }
}

#[test]
fn what_waits_for_the_window_meets_its_neighbours() {
    let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, false, 256, Some(true));
    let (window, more) = (WINDOW as u64, 20);
    // Far apart, each shown by itself.
    for i in 0..window + more {
        read(&mut queue, &rig, i * 100);
        queue.submit().unwrap();
    }
    let mut seen = see(&mut rig);
    assert_eq!(seen.len(), WINDOW, "the server has as much as it is to have");
    // Neighbours of those that wait, last ones first.
    for i in (window..window + more).rev() {
        read(&mut queue, &rig, i * 100 + 1);
        queue.submit().unwrap();
    }
    assert!(see(&mut rig).is_empty());
    assert_eq!(u64::from(queue.in_flight()), window + 2 * more);
    for seen in &mut seen {
        answer(&mut rig, seen, 0);
    }
    let first = queue.completions().count();
    assert_eq!(first, WINDOW, "popping makes room for the rest");
    let (saw, back) = serve(&mut queue, &mut rig);
    assert_eq!(saw.len() as u64, more, "{saw:?}");
    assert!(saw.iter().all(|&(.., pieces)| pieces == 2), "{saw:?}");
    assert_eq!(back.len() as u64, 2 * more);
    assert_eq!(queue.stats().path.merged, more);
}

#[test]
fn of_a_merged_request_that_fails_only_the_bad_part_fails() {
    for (packed, tables) in shapes() {
        for wanted in [Status::IoError, Status::Unsupported] {
            let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, packed, 32, tables);
            for at in 0..6 {
                read(&mut queue, &rig, at);
            }
            queue.submit().unwrap();
            let bad = if wanted == Status::IoError { 1 } else { 2 };
            let (mut chains, mut back) = (0, Vec::new());
            while back.len() < 6 {
                for mut seen in see(&mut rig) {
                    chains += 1;
                    let range = seen.sector..seen.sector + seen.pieces.len() as u64;
                    answer(&mut rig, &mut seen, if range.contains(&3) { bad } else { 0 });
                }
                back.extend(queue.completions().map(|done| (done.ctx, done.status)));
            }
            back.sort_unstable_by_key(|&(ctx, _)| ctx);
            let status = |at| if at == 3 { wanted } else { Status::Ok };
            assert_eq!(back, (0..6).map(|at| (at, status(at))).collect::<Vec<_>>());
            assert_eq!((chains, queue.stats().path.split), (1 + 6, 1));
        }
    }
}

#[test]
fn waiting_counts_requests_not_chains() {
    let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, false, 64, Some(true));
    for at in [0, 1, 2, 3, 50, 60] {
        read(&mut queue, &rig, at);
    }
    queue.submit().unwrap();
    let mut seen = see(&mut rig);
    assert_eq!(seen.len(), 3);
    let soon = Some(std::time::Duration::from_millis(1));
    assert!(!queue.wait_for(4, soon).unwrap());
    answer(&mut rig, &mut seen[1], 0);
    // The time is up: what is there can be popped.
    assert!(queue.wait_for(2, soon).unwrap());
    answer(&mut rig, &mut seen[0], 0);
    assert!(queue.wait_for(5, None).unwrap());
    assert_eq!(queue.completions().count(), 5);
    assert!(!queue.arm().unwrap() && !queue.wait_polling(soon).unwrap());
    answer(&mut rig, &mut seen[2], 0);
    assert!(queue.arm().unwrap() && queue.wait_polling(None).unwrap());
    assert_eq!(queue.pop().unwrap().unwrap().ctx, 60);
    assert!(!queue.wait_polling(None).unwrap());
}

#[test]
fn what_was_not_sent_yet_is_given_back_whole() {
    let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Request, true, 256, Some(true));
    let free = rig.pool().available();
    // As many as may be in flight, one that waits for the window, one that was not submitted.
    let sent = WINDOW as u64;
    for i in 0..=sent {
        read(&mut queue, &rig, i * 10);
    }
    queue.submit().unwrap();
    read(&mut queue, &rig, 5);
    let seen = see(&mut rig);
    assert_eq!(seen.len(), WINDOW);
    let mut contexts = queue.abandon();
    contexts.sort_unstable();
    let mut expected: Vec<_> = (0..=sent).map(|i| i * 10).chain([5]).collect();
    expected.sort_unstable();
    assert_eq!(contexts, expected);
    assert_eq!(rig.pool().available(), free - WINDOW * 512, "the server may still write to these");
}

#[test]
fn a_hostile_device_ends_a_queue_that_merges_as_well() {
    let (mut queue, rig) = rig_on::<u64>(SchedulerMode::Request, false, 32, Some(true));
    for at in 0..4 {
        read(&mut queue, &rig, at);
    }
    queue.submit().unwrap();
    let idx = rig.memory.at(rig.used + 2);
    // SAFETY: the used index, aligned to 2 bytes.
    #[allow(clippy::cast_ptr_alignment)]
    unsafe {
        AtomicU16::from_ptr(idx.cast()).store(7, Ordering::Release);
    }
    assert!(matches!(queue.pop(), Err(Error::Device(_))));
    assert!(queue.wait(None).is_err() && queue.submit().is_err());
    assert!(queue.wait_polling(None).is_err() && queue.arm().is_err());
    drop(queue);
}

#[test]
fn auto_begins_straight_and_takes_no_notice_of_the_rest() {
    let (mut queue, mut rig) = rig_on::<u64>(SchedulerMode::Auto, false, 32, Some(true));
    for at in 0..8 {
        read(&mut queue, &rig, at);
    }
    queue.submit().unwrap();
    let (saw, back) = serve(&mut queue, &mut rig);
    assert_eq!((saw.len(), back.len()), (8, 8));
    assert_eq!((queue.policy(), queue.policy_switches()), (Policy::Bio, 0));
    assert_eq!(queue.stats().path, SchedulerStats::default());
}
