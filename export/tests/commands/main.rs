//! A transport whose requests come as results of commands, as those of ublk do.
#![allow(missing_docs)]

mod rig;

use rig::{DEPTH, PATIENCE, SECTORS, Scene, until};
use ringway_aio::Null;
use ringway_export::{Alarm, Broken};
use std::io::{self, Write};
use std::sync::atomic::Ordering::SeqCst;

/// Requests come as results, and are answered by the same ring; each queue gets the results of its own
/// commands, though both give them the same tags.
#[test]
fn requests_that_come_as_results_are_served() {
    let Some(scene) = Scene::uring(2) else { return };
    let mut guests = [(); 2].map(|()| scene.add(Some((1, 16))).unwrap());
    std::thread::scope(|scope| {
        for guest in &mut guests {
            // A few, as many as there are slots, and more.
            scope.spawn(move || {
                for burst in [1, 3, u64::from(DEPTH), 100].into_iter().cycle().take(100) {
                    guest.ask((0..burst).map(|n| (n * 37 + burst) % SECTORS));
                }
            });
        }
    });
    for guest in guests {
        let stopped = scene.worker().stop(guest.id).unwrap().recv_timeout(PATIENCE).unwrap();
        assert_eq!((stopped.stats.reads, stopped.ring.asked), (25 * 120, None));
    }
}

#[test]
fn a_queue_is_given_back_when_its_last_command_has_ended() {
    let Some(scene) = Scene::uring(1) else { return };
    let guest = scene.add_held();
    scene.stop_held(guest.id);
    // Its place is free again.
    scene.add(Some((1, 0))).unwrap().ask(0..9);
}

#[test]
fn so_is_one_that_its_guest_has_broken() {
    let Some(scene) = Scene::uring(1) else { return };
    let mut guest = scene.add_held();
    scene.shared.breaks.store(true, SeqCst);
    guest.stream.write_all(&[0]).unwrap();
    let alarm = guest.alarms.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(alarm, Alarm::Broken(Broken::Rule(_))), "{alarm:?}");
    scene.stop_held(guest.id);
}

/// Their driver may go on using the memory of such queues: it is not given back.
#[test]
fn a_worker_that_ends_leaves_queues_whose_commands_are_in_flight() {
    let Some(scene) = Scene::uring(1) else { return };
    let _without = scene.add(None).unwrap();
    let _held = scene.add_held();
    let Scene { pool, shared, failures, .. } = scene;
    drop(pool);
    assert_eq!((shared.dropped.load(SeqCst), failures.load(SeqCst)), (1, 0), "of two");
}

#[test]
fn so_does_one_that_panics() {
    let Some(scene) = Scene::uring(1) else { return };
    let mut guest = scene.add_held();
    scene.shared.panics.store(true, SeqCst);
    guest.stream.write_all(&[0]).unwrap();
    let alarm = guest.alarms.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(alarm, Alarm::WorkerFailed), "{alarm:?}");
    let Scene { pool, shared, failures, .. } = scene;
    drop(pool);
    assert_eq!((shared.dropped.load(SeqCst), failures.load(SeqCst)), (0, 1));
}

/// Nothing rings when there is room again: the worker asks the queue without being woken.
#[test]
fn what_the_engine_has_no_room_for_is_sent_again() {
    let Some(scene) = Scene::uring(1) else { return };
    scene.shared.full.store(3, SeqCst);
    let mut guest = scene.add(Some((1, 0))).unwrap();
    until("it is asked again", || scene.shared.full.load(SeqCst) == 0);
    guest.ask(0..9);
    let stopped = scene.worker().stop(guest.id).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(stopped.ring.refused, 3);
}

#[test]
fn an_engine_without_a_port_refuses_the_queue() {
    let scene = Scene::with(|| Null::new(16));
    let refused = scene.add(Some((1, 0))).err().expect("it cannot work");
    assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
    let why = "the engine null takes no commands, as which this queue gets its requests";
    assert_eq!(refused.to_string(), why);
    assert_eq!(scene.shared.dropped.load(SeqCst), 1);
    assert_eq!(scene.worker().stats().unwrap().queues.len(), 0);
    scene.add(None).unwrap();
}

#[test]
fn an_engine_refuses_a_queue_with_more_than_it_takes() {
    let Some(scene) = Scene::uring(2) else { return };
    let refused =
        |depth, bytes| scene.add(Some((depth, bytes))).err().expect("too much").to_string();
    let why = "the queue has commands of 17 bytes, where the engine io_uring takes 16";
    assert_eq!(refused(1, 17), why);
    let mut first = scene.add(Some((1, 16))).unwrap();
    let why = "the queue has up to 2 commands in flight, where the engine io_uring has room for 1 of 2 \
               beside its other queues";
    assert_eq!(refused(2, 16), why);
    let mut second = scene.add(Some((1, 16))).unwrap();
    assert!(refused(1, 16).contains("room for 0 of 2"));
    first.ask(0..9);
    second.ask(0..9);
    scene.worker().stop(first.id).unwrap().recv_timeout(PATIENCE).unwrap();
    scene.add(Some((1, 16))).unwrap().ask(0..9);
}
