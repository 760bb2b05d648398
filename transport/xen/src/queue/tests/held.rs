//! Requests that are held when their queue stops: they are left, and come again.

use super::*;

/// Three writes and a barrier behind them; two of the writes are left, one is answered.
fn leave_two(rig: &mut Rig) {
    rig.fill(1..5, 3);
    for at in 0..3 {
        rig.ask(Command::Write, 8 * at as u64, &whole(1 + at..2 + at));
    }
    rig.ask(Command::WriteBarrier, 24, &whole(4..5));
    let mut out = Vec::new();
    while let Some((token, outcome)) = rig.pop() {
        assert!(matches!(outcome, Ok((Op::Write, _))), "the barrier waits");
        out.push(token);
    }
    assert_eq!(out.len(), 3);
    assert!(rig.queue.can_leave());
    rig.disk.fill(0);
    rig.queue.wind_down();
    rig.queue.complete(out.remove(1), Status::Ok, 0);
    out.into_iter().for_each(|token| rig.queue.leave(token));
    assert_eq!(rig.answers().len(), 1);
    assert_eq!((rig.queue.backlog(), rig.queue.bytes_in_use()), (3, 0));
}

/// In their queue if that is resumed, and in that of a successor; the barrier behind all of them.
#[test]
fn c18_a_xen_ring_keeps_what_is_left() {
    for movement in ALL {
        for killed in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let mut rig = Rig::kept(movement, Some(&folder.path().join("record")));
            leave_two(&mut rig);
            if killed {
                rig.kill();
            } else {
                rig.queue.resume();
            }
            let mut ops = Vec::new();
            let mut answers = Vec::new();
            while answers.len() < 3 {
                while let Some((token, outcome)) = rig.pop() {
                    ops.push(outcome.unwrap().0);
                    rig.queue.complete(token, Status::Ok, 0);
                }
                answers.append(&mut rig.answers());
            }
            assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{movement:?}");
            assert_eq!(
                ops,
                [Op::Write, Op::Write, Op::Flush, Op::Write, Op::Flush],
                "{movement:?}"
            );
            for page in [1, 3, 4] {
                let at = (page - 1) * PAGE;
                assert!(rig.disk[at..at + PAGE] == *rig.guest.page(page), "{movement:?}: {page}");
            }
            assert!(rig.disk[PAGE..2 * PAGE].iter().all(|&byte| byte == 0), "not done twice");
            assert_eq!((rig.queue.backlog(), rig.queue.bytes_in_use()), (0, 0));
        }
    }
}

/// A barrier whose own write is held begins again.
#[test]
fn c18_a_xen_barrier_that_is_left_begins_again() {
    let mut rig = Rig::new(Movement::Copy);
    rig.fill(4..5, 9);
    rig.ask(Command::WriteBarrier, 0, &whole(4..5));
    let (token, outcome) = rig.pop().unwrap();
    assert!(matches!(outcome, Ok((Op::Flush, _))));
    rig.queue.complete(token, Status::Ok, 0);
    let (token, outcome) = rig.pop().unwrap();
    assert!(matches!(outcome, Ok((Op::Write, _))));
    rig.queue.wind_down();
    rig.queue.leave(token);
    assert_eq!((rig.queue.backlog(), rig.answers().len()), (1, 0));
    rig.queue.resume();
    assert_eq!(rig.statuses(), ok(1));
    assert!(rig.disk[..PAGE] == *rig.guest.page(4));
}
