//! A scheduler and an owner on paper.

use super::*;
use crate::auto::REPORT_NS;
use crate::{MERGED_MAX, SchedulerMode};

const LIMITS: Limits = Limits { max_bytes: MERGED_MAX, max_segments: 16 };

/// Remembers what it is told. Every request has 4096 bytes.
#[derive(Default)]
struct Paper {
    now: u64,
    room: usize,
    runs: Vec<(RunId, Vec<u16>)>,
    alone: Vec<u16>,
    finished: Vec<u16>,
}

impl Owner for Paper {
    fn now(&self) -> u64 {
        self.now
    }
    fn bytes(&self, _slot: u16) -> u64 {
        4096
    }
    fn start_run(&mut self, run: Run<'_>) -> bool {
        assert_eq!(run.range().len(), run.slots().count() as u64 * 4096);
        assert_eq!(run.slots().next(), Some(run.first()));
        self.runs.push((run.id(), run.slots().collect()));
        self.room -= 1;
        self.room > 0
    }
    fn start_alone(&mut self, slot: u16) {
        self.alone.push(slot);
    }
    fn finish(&mut self, slot: u16) {
        self.finished.push(slot);
    }
}

fn read(block: u64) -> Kind {
    let range = ByteRange::new(block * 4096, 4096).unwrap();
    Kind::Data { op: DataOp::Read, range, segments: 1 }
}

fn world(mode: SchedulerMode) -> (SharedPolicy, Scheduler, Paper) {
    let shared = SharedPolicy::new(mode);
    let scheduler = Scheduler::new(&shared, 16, LIMITS);
    (shared, scheduler, Paper { room: 100, ..Paper::default() })
}

#[test]
fn neighbours_go_together_and_end_one_by_one() {
    let (_, mut scheduler, mut paper) = world(SchedulerMode::Request);
    assert!(scheduler.merges() && !scheduler.is_idle() && !scheduler.holds());
    for (slot, block) in [(0, 7), (1, 6), (2, 8), (3, 50)] {
        assert_eq!(scheduler.admit(&mut paper, slot, read(block), 0), Admitted::Held);
    }
    assert!(scheduler.holds() && paper.runs.is_empty());
    scheduler.dispatch(&mut paper);
    assert!(!scheduler.holds());
    let (merged, single) = (paper.runs[0].clone(), paper.runs[1].clone());
    assert_eq!((&*merged.1, &*single.1), (&[1, 0, 2][..], &[3][..]));
    assert_eq!(scheduler.run(merged.0).op(), DataOp::Read);
    assert_eq!((scheduler.end_single(merged.0), scheduler.end_single(single.0)), (None, Some(3)));
    scheduler.end_run(&mut paper, merged.0, 3 * 4096);
    assert_eq!((&*paper.finished, paper.alone.len()), (&[1, 0, 2][..], 0));
    let stats = SchedulerStats { plugged: 4, runs: 2, merged: 2, ..SchedulerStats::default() };
    assert_eq!(scheduler.stats(), stats);
}

#[test]
fn what_an_operation_did_not_move_goes_again_by_itself() {
    for (moved, finished) in [(0, 0), (4095, 0), (4096, 1), (2 * 4096 + 1, 2), (3 * 4096, 3)] {
        let (_, mut scheduler, mut paper) = world(SchedulerMode::Request);
        for slot in 0..3 {
            assert_eq!(scheduler.admit(&mut paper, slot, read(slot.into()), 0), Admitted::Held);
        }
        scheduler.dispatch(&mut paper);
        let run = paper.runs[0].0;
        scheduler.end_run(&mut paper, run, moved);
        let all = [0, 1, 2];
        assert_eq!((&*paper.finished, &*paper.alone), all.split_at(finished), "{moved}");
        assert_eq!(scheduler.stats().split, u64::from(finished < 3));
    }
}

#[test]
fn a_barrier_has_all_sent_before_it_and_what_orders_nothing_does_not() {
    let (_, mut scheduler, mut paper) = world(SchedulerMode::Request);
    // Even where there is no room: what is taken must not be overtaken.
    paper.room = 2;
    for slot in 0..2 {
        let far = read(u64::from(slot) * 100);
        assert_eq!(scheduler.admit(&mut paper, slot, far, 0), Admitted::Held);
    }
    assert_eq!(scheduler.admit(&mut paper, 2, Kind::Alone, 0), Admitted::Send);
    assert!(paper.runs.is_empty() && scheduler.holds());
    assert_eq!(scheduler.admit(&mut paper, 3, Kind::Barrier, 0), Admitted::Send);
    assert_eq!((paper.runs.len(), scheduler.holds()), (2, false));
}

#[test]
fn an_owner_without_room_is_asked_again_later() {
    let (_, mut scheduler, mut paper) = world(SchedulerMode::Request);
    paper.room = 1;
    for slot in 0..3 {
        let far = read(u64::from(slot) * 100);
        assert_eq!(scheduler.admit(&mut paper, slot, far, 0), Admitted::Held);
    }
    scheduler.dispatch(&mut paper);
    assert_eq!((paper.runs.len(), scheduler.holds()), (1, true));
    assert_eq!(scheduler.wake_at(), Some(crate::merge_queue::HOLD_NS));
    paper.room = 5;
    scheduler.dispatch(&mut paper);
    assert_eq!((paper.runs.len(), scheduler.holds(), scheduler.wake_at()), (3, false, None));
}

#[test]
fn what_is_held_goes_when_nothing_is_merged_any_more() {
    let (_, mut scheduler, mut paper) = world(SchedulerMode::Request);
    assert_eq!(scheduler.admit(&mut paper, 0, read(0), 0), Admitted::Held);
    scheduler.dispatch(&mut paper);
    // It would wait for the one in flight that it continues.
    assert_eq!(scheduler.admit(&mut paper, 1, read(1), 0), Admitted::Held);
    scheduler.dispatch(&mut paper);
    assert_eq!(paper.runs.len(), 1);
    scheduler.follow(&SharedPolicy::new(SchedulerMode::Bio), 0, || unreachable!("nothing is due"));
    scheduler.dispatch(&mut paper);
    assert_eq!((paper.runs.len(), scheduler.holds(), scheduler.is_idle()), (2, false, true));
    assert!(!scheduler.merges());
    assert_eq!(scheduler.admit(&mut paper, 2, read(2), 0), Admitted::Send);
}

#[test]
fn only_a_policy_that_may_change_is_followed_and_a_probe_is_timed() {
    for (mode, follows) in
        [(SchedulerMode::Bio, 0), (SchedulerMode::Request, 0), (SchedulerMode::Auto, 2)]
    {
        let (_, mut scheduler, _) = world(mode);
        assert_eq!((0..2 * u16::from(TURNS)).filter(|_| scheduler.turn()).count(), follows);
        scheduler.follow_soon();
        assert_eq!(scheduler.turn(), follows > 0);
    }
    let (shared, mut scheduler, mut paper) = world(SchedulerMode::Auto);
    assert_eq!(scheduler.admit(&mut paper, 0, read(0), 0), Admitted::Send);
    scheduler.finished(0, || unreachable!("it was not timed"));
    scheduler.follow(&shared, REPORT_NS, || (1, 4096));
    paper.now = 1000;
    assert_eq!(scheduler.admit(&mut paper, 0, read(0), 3), Admitted::SendTimed);
    scheduler.finished(0, || 1500);
    scheduler.finished(0, || unreachable!("once"));
    scheduler.follow(&shared, 2 * REPORT_NS, || (2, 8192));
    let seen = shared.auto.lock().unwrap().seen;
    assert_eq!((seen.sampled, seen.timed, seen.latency, seen.in_flight), (1, 1, 500, 4));
}
