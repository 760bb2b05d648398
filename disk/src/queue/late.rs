//! Writes of a queue that others wait for. How requests wait for them: `slow_path/late.rs`.

use super::DiskQueue;
use super::dispatch::mark_late;
use crate::locks::Outliving;

/// How long a write may take before others that overlap it wait for it, in nanoseconds: a client whose cable was cut
/// may have come back before the host knows that it had gone.
const LATE_AFTER_NS: u64 = 1_000_000_000;

impl<C> DiskQueue<C> {
    /// The queue stops. Its writes that storage was given are late from now on: whoever asked for them may come
    /// back elsewhere before they are over, and write something newer.
    #[cold]
    pub fn outlive(&mut self) {
        let mut outliving = Outliving::default();
        for (slot, slow) in self.slots.in_flight() {
            outliving.requests += 1;
            outliving.bytes += slot.request.range.len();
            mark_late(&self.issuer, slot, slow);
        }
        self.give_back_room();
        self.issuer.disk.outlive(outliving);
        self.outliving = outliving;
    }

    /// What outlived its connection is over.
    pub(super) fn give_back_room(&mut self) {
        self.issuer.disk.outlived(std::mem::take(&mut self.outliving));
    }

    /// As [`DiskQueue::outlive`], of what the last scans have seen for longer than a second.
    pub(super) fn mark_old(&mut self, now_ns: u64) {
        for (slot, slow) in self.slots.in_flight() {
            if slow.late.is_none() && slow.held.is_some_and(|held| !held.tried) {
                // It is not with storage.
                continue;
            }
            let age_ns = slow.seen.since_ns.map_or(0, |since| now_ns.saturating_sub(since));
            if age_ns >= LATE_AFTER_NS {
                mark_late(&self.issuer, slot, slow);
            }
        }
    }

    /// True if requests wait for something that rings no bell: [`DiskQueue::retry`] has to be called now and then.
    /// What waits for room in the engine, or for a sync, is not among them: an end of the worker's own operations, or
    /// [`DiskQueue::wake_by`], brings the worker back.
    #[must_use]
    pub fn has_to_look(&self) -> bool {
        self.slow.has_waiting()
    }

    /// True if all of these wait for late writes, which take their time.
    #[must_use]
    pub fn awaits_late_only(&self) -> bool {
        self.slow.awaits_late_only()
    }
}

#[cfg(test)]
mod tests {
    use crate::CustomDisk;
    use crate::queue::DiskQueue;
    use ringway_aio::{Engine, Null, Reaped};
    use ringway_core::{ByteRange, Op, Segment};
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    /// Turns in which nothing is over look at no list: they pass while somebody else has it.
    #[test]
    fn c60_who_waits_for_a_late_write_costs_nothing_meanwhile() {
        const ASKED: u64 = 40;
        let disk = Arc::new(CustomDisk::new(65536).open(None).unwrap());
        let mut engine = Null::new(64).unwrap();
        let file = engine.attach(&disk.file()).unwrap();
        let limits = engine.limits().clone();
        let mut queue = DiskQueue::<u64>::new(Arc::clone(&disk), &limits, file, 0, 64).unwrap();
        let late = disk.begin_late(ByteRange::new(0, 4096).unwrap());
        let mut data = [0u8; 512];
        for n in 0..ASKED {
            let tag = queue.acquire().unwrap();
            let request = queue.request_mut(tag);
            (request.op, request.range) = (Op::Write, ByteRange::new(512 * (n % 8), 512).unwrap());
            request.segments.clear();
            assert!(request.segments.push(Segment { base: data.as_mut_ptr(), len: 512 }));
            // SAFETY: the null engine moves no data.
            unsafe { queue.start(&mut engine, tag, n) };
        }
        let turns = |queue: &mut DiskQueue<u64>, engine: &mut Null| {
            (0..100).for_each(|_| queue.retry(engine, 16));
        };
        turns(&mut queue, &mut engine);
        assert!(queue.has_deferred() && queue.awaits_late_only());
        let list = disk.late.lock();
        let (tell, told) = mpsc::channel();
        let passed = std::thread::scope(|scope| {
            scope.spawn(|| {
                turns(&mut queue, &mut engine);
                tell.send(()).unwrap();
            });
            let passed = told.recv_timeout(Duration::from_secs(10));
            drop(list);
            passed
        });
        assert!(passed.is_ok(), "who waits looks at the list although nothing has changed");
        disk.end_late(&late);
        assert!(queue.awaits_late_only(), "it looks in its next turn");
        let (mut done, mut reaped) = (Vec::new(), Reaped::default());
        while queue.in_flight() > 0 {
            queue.retry(&mut engine, 16);
            engine.submit().unwrap();
            reaped.clear();
            engine.reap(&mut reaped);
            for it in &reaped.done {
                let slot = u16::try_from(it.tag).unwrap();
                done.extend(queue.finish(&mut engine, slot, it.result).map(|it| it.context));
            }
        }
        // Those that overlap in their order, of which the list has seen to it.
        let of = |sector| done.iter().copied().filter(move |n| n % 8 == sector).collect::<Vec<_>>();
        (0..8).for_each(|sector| assert!(of(sector).is_sorted(), "{done:?}"));
        assert_eq!((done.len(), disk.open_to.load(Relaxed)), (40, 65536));
    }

    /// A worker panics, or its engine ends, with writes in flight that others wait for: these go on, and if nobody knows
    /// whether such a write still lands, their flushes fail.
    #[test]
    fn c73_who_waits_for_a_queue_that_is_no_more_goes_on() {
        for is_over in [true, false] {
            let disk = Arc::new(CustomDisk::new(65536).open(None).unwrap());
            let mut engine = Null::new(64).unwrap();
            let file = engine.attach(&disk.file()).unwrap();
            let limits = engine.limits().clone();
            let mut queue = DiskQueue::<u64>::new(Arc::clone(&disk), &limits, file, 0, 64).unwrap();
            let mut data = [0u8; 512];
            for n in 0..4 {
                let tag = queue.acquire().unwrap();
                let request = queue.request_mut(tag);
                (request.op, request.range) = (Op::Write, ByteRange::new(512 * n, 512).unwrap());
                request.segments.clear();
                assert!(request.segments.push(Segment { base: data.as_mut_ptr(), len: 512 }));
                // SAFETY: the null engine moves no data.
                unsafe { queue.start(&mut engine, tag, n) };
            }
            queue.outlive();
            let range = ByteRange::new(4096, 4096).unwrap();
            assert!(disk.locks.try_lock(range));
            queue.slots.both(3).1.lock = Some(range);
            let read = disk.await_turn(ByteRange::new(0, 4096).unwrap(), false).unwrap();
            assert!(disk.has_to_wait(&read) && disk.locks.held() == 1);
            queue.let_go(is_over);
            assert!(!disk.has_to_wait(&read) && disk.locks.held() == 0);
            assert_eq!(disk.open_to.load(Relaxed), 65536);
            assert_eq!(disk.late.lock().outliving.requests, 0);
            assert_eq!(disk.flush_failed.load(Relaxed), !is_over);
            // Dropped later or never.
            queue.let_go(is_over);
        }
    }
}
