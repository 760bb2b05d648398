//! How long requests are said to take: each from its own arrival to its own answer, however many of
//! them one operation of the disk carries.

use crate::scene::{PATIENCE, Queue, Scene};
use ringway_disk::{SchedulerMode, Source};
use ringway_driver::Options;
use ringway_export::Latency;
use std::time::Duration;

const LEN: u64 = 4096;
/// How long the disk takes for an operation: longer than a loaded machine takes for anything else.
const DISK: Duration = Duration::from_millis(2);

/// A disk without data whose every operation takes [`DISK`].
fn slow(path: SchedulerMode) -> Scene {
    Scene::with(1 << 20, &Options::new(), |rig| {
        let latency_us = u32::try_from(DISK.as_micros()).unwrap();
        rig.disk.source = Source::Null { bytes: 1 << 30, latency_us };
        (rig.disk.engine, rig.disk.cache) = (None, None);
        rig.disk.path = path;
    })
}

fn timed(scene: &Scene) -> Latency {
    let mut sum = Latency::new();
    for queue in scene.rig.stats().iter().flat_map(|worker| &worker.queues) {
        sum.add(queue.latency.as_ref().expect("this rig takes samples"));
    }
    sum
}

/// Answers to `count` requests; how many of them were refused.
fn answers(queue: &mut Queue, count: u16) -> usize {
    assert!(queue.wait_for(count, Some(PATIENCE)).unwrap(), "no answer");
    queue.completions().filter(|done| !done.is_ok()).count()
}

/// The last request of a batch is timed, and in a batch of neighbours it is never the one whose
/// operation carries all.
#[test]
fn requests_of_a_merged_operation_are_timed_to_their_own_answer() {
    for path in [SchedulerMode::Request, SchedulerMode::Bio] {
        let mut scene = slow(path);
        let mut queue = scene.queue();
        let (rounds, batch) = (40, 16_u16);
        for round in 0..rounds {
            for at in 0..batch {
                let buffer = scene.buffer(4096, 0);
                queue.read(u64::from(round * batch + at) * LEN, buffer, 0).unwrap();
            }
            assert_eq!(answers(&mut queue, batch), 0);
        }
        let merged = scene.counted().path.merged;
        assert_eq!(merged > 0, path == SchedulerMode::Request, "{path:?}: {merged} merged");
        let latency = timed(&scene);
        // One in 61, and a batch of 16 is counted whole: each fourth or fifth batch has one.
        let count = latency.reads.len();
        assert!((5..=11).contains(&count), "{path:?}: {count} of 640 were timed");
        let least = Duration::from_nanos(latency.reads.min());
        assert!(least >= DISK * 99 / 100, "{path:?}: {least:?}, the disk alone takes {DISK:?}");
    }
}

/// A refused request is answered at the end of the turn, when the next one has its slot already.
#[test]
fn the_answer_of_a_refused_request_ends_nobody_elses_time() {
    let mut scene = slow(SchedulerMode::Bio);
    let mut queue = scene.queue();
    let beyond = scene.device.capacity();
    for round in 0..150_u16 {
        // Every other round has nothing to refuse, and is timed now and then.
        let refused = round % 2;
        if refused > 0 {
            queue.read(beyond, scene.buffer(4096, 0), 0).unwrap();
        }
        queue.read(u64::from(round) * LEN, scene.buffer(4096, 0), 0).unwrap();
        assert_eq!(answers(&mut queue, 1 + refused), usize::from(refused));
    }
    let latency = timed(&scene);
    assert!((2..=4).contains(&latency.reads.len()), "{} were timed", latency.reads.len());
    let least = Duration::from_nanos(latency.reads.min());
    assert!(least >= DISK * 99 / 100, "{least:?}, the disk alone takes {DISK:?}");
}
