//! The way of requests that do not go straight: plugged, merged, probed.
//!
//! ```text
//! start ─► start_other ─► plug ─┄ held ┄─► unplug ─► one operation for a run ─► finish_run ─► retire…
//!                    └─► probe ─► one operation, timed ─► finish_rare
//! ```
//!
//! A queue whose path is bio knows none of this: its requests go straight to the engine, as in
//! `queue.rs`. What the paths do is in the crate `ringway-scheduler`; here it meets slots and engines.

use crate::disk::CacheMode;
use crate::overdue::Mark;
use crate::queue::{DiskQueue, Finished};
use crate::slot::Stage;
use ringway_aio::{Engine, IoOp};
use ringway_core::{Op, Status};
use ringway_scheduler::{
    DataOp, Limits, MERGED_MAX, MergeQueue, QueuePolicy, RunId, SchedulerStats, SharedPolicy,
};
use std::time::Duration;

/// Turns between looks at the clock: a worker's turn takes microseconds, a look every 20 ms is meant.
pub(crate) const TURNS: u8 = 64;

/// What a queue needs for any path but `bio` by order.
#[derive(Debug)]
pub(crate) struct Way {
    requests: MergeQueue,
    follower: QueuePolicy,
    /// When the first request since the last unplugging came.
    batch: Option<u64>,
}

impl Way {
    pub(crate) fn new(
        board: &SharedPolicy,
        depth: u16,
        max_bytes: u32,
        max_segments: usize,
    ) -> Box<Self> {
        let limits = Limits { max_bytes: MERGED_MAX.min(max_bytes.into()), max_segments };
        Box::new(Self {
            requests: MergeQueue::new(depth, limits),
            follower: QueuePolicy::new(board),
            batch: None,
        })
    }

    pub(crate) fn stats(&self) -> SchedulerStats {
        self.requests.stats()
    }
}

impl<C> DiskQueue<C> {
    /// Which operations may go straight: a bit for each [`Op`].
    pub(crate) fn choose_straight(&mut self) {
        let aside =
            self.way.as_ref().is_some_and(|way| way.follower.plugs() || way.follower.probes());
        let ops = [(Op::Read, aside), (Op::Write, aside || self.needs_locks)];
        let bits = ops.into_iter().filter(|(_, aside)| !aside).map(|(op, _)| 1 << op as u8);
        self.straight = bits.sum();
    }

    /// Begins a request that does not go straight, or not for sure.
    #[inline(never)]
    pub(crate) fn start_other<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        self.cold[usize::from(tag)].mark = Mark::default();
        let request = &self.slots[usize::from(tag)].request;
        let (op, range, segments) = (request.op, request.range, request.segments.len());
        if !op.moves_data() || !self.takes_directly(request) {
            if !op.moves_data() && op != Op::GetId && self.held {
                self.unplug_all(engine);
            }
            return self.start_rare(engine, tag);
        }
        let locks = self.needs_locks && op.changes_disk();
        let io = self.data_op(op);
        let in_flight = self.in_flight() - 1;
        let Some(way) = self.way.as_mut().filter(|_| !locks && !range.is_empty()) else {
            if locks {
                return self.start_rare(engine, tag);
            }
            self.slots[usize::from(tag)].stage = Stage::Whole;
            return self.issue(engine, tag);
        };
        if way.follower.plugs() {
            let now = *way.batch.get_or_insert_with(|| self.disk.now());
            way.requests.plug(tag, data_op(io), range, segments, now);
            self.slots[usize::from(tag)].stage = Stage::Run;
            self.held = true;
            return;
        }
        self.slots[usize::from(tag)].stage = Stage::Whole;
        if way.follower.probes() {
            way.follower.started(data_op(io), range, in_flight);
            let probes = way.follower.probes();
            self.cold[usize::from(tag)].probed = self.disk.now();
            self.slots[usize::from(tag)].stage = Stage::Probe;
            if !probes {
                self.choose_straight();
            }
        }
        self.issue(engine, tag);
    }

    /// Sends what may go of the requests that are held. Call once a turn, after the last
    /// [`DiskQueue::start`].
    #[inline]
    pub fn unplug<E: Engine>(&mut self, engine: &mut E) {
        if self.held {
            self.send_held(engine);
        }
        if self.adapts {
            self.turns = self.turns.wrapping_add(1);
            if self.turns.is_multiple_of(TURNS) {
                self.look();
            }
        }
    }

    fn send_held<E: Engine>(&mut self, engine: &mut E) {
        let Some(way) = self.way.as_mut() else { return };
        if !way.follower.plugs() {
            // The path is bio again: nothing has to wait any more.
            return self.unplug_all(engine);
        }
        let now = way.batch.take().unwrap_or_else(|| self.disk.now());
        while let Some(run) = self.way.as_mut().and_then(|way| way.requests.next(now)) {
            self.send(engine, run);
        }
        self.held = self.way.as_ref().is_some_and(|way| way.requests.holds());
    }

    /// Sends all that is held, for what must not overtake it.
    #[cold]
    fn unplug_all<E: Engine>(&mut self, engine: &mut E) {
        while let Some(run) = self.way.as_mut().and_then(|way| way.requests.next_of_all()) {
            self.send(engine, run);
        }
        if let Some(way) = self.way.as_mut() {
            way.batch = None;
        }
        self.held = false;
    }

    /// A run becomes one operation, in the room of its first slot.
    fn send<E: Engine>(&mut self, engine: &mut E, run: RunId) {
        let Some(way) = self.way.as_ref() else { return };
        let first = way.requests.first(run);
        let cold = &mut self.cold[usize::from(first)];
        let range = way.requests.range(run);
        (cold.op, cold.offset, cold.len) =
            (io_op(way.requests.op(run)), range.offset(), range.len());
        cold.run = Some(run);
        cold.part.clear();
        for slot in way.requests.slots(run) {
            // Neighbours on the disk are none in memory: a list, whatever the addresses (A20).
            for &segment in self.slots[usize::from(slot)].request.segments.as_slice() {
                let pushed = cold.part.push(segment);
                debug_assert!(pushed, "a run keeps within the limits of segments");
            }
        }
        debug_assert_eq!(cold.part.bytes(), cold.len);
        self.issue(engine, first);
    }

    /// When to come back although nothing rings: `None` if nothing is held.
    #[must_use]
    pub fn wake_in(&self) -> Option<Duration> {
        let way = self.way.as_ref().filter(|_| self.held)?;
        let at = way.requests.wake_at()?;
        Some(Duration::from_nanos(at.saturating_sub(self.disk.now())))
    }

    /// Takes the result of a run's operation.
    pub(crate) fn finish_run<E: Engine>(
        &mut self,
        engine: &mut E,
        first: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let cold = &mut self.cold[usize::from(first)];
        let (op, len) = (cold.op, cold.len);
        let run = cold.run.take().expect("a run is in flight in its first slot");
        let way = self.way.as_mut()?;
        way.requests.done(run);
        let mut next = way.requests.after(first);
        if next.is_none() {
            // By itself: as if it had gone straight.
            self.slots[usize::from(first)].stage = Stage::Whole;
            return self.finish(engine, first, result);
        }
        // What has moved has moved from the beginning on.
        let mut moved = u64::try_from(result).unwrap_or(0);
        if moved < len {
            way.requests.was_split();
            if op == IoOp::WriteDurable
                && self.disk.cache != CacheMode::None
                && result == -libc::EIO
            {
                // As for any durable write: it may have been the sync (see `failed`).
                self.disk.flush_has_failed();
                self.disk.incidents.failed(Op::Write, Some(libc::EIO), cold.offset);
            }
        }
        let mut answer = None;
        let mut slot = Some(first);
        while let Some(tag) = slot {
            let bytes = self.slots[usize::from(tag)].request.range.len();
            if bytes <= moved {
                moved -= bytes;
                let finished = self.retire(tag, Status::Ok);
                match answer {
                    None => answer = Some(finished),
                    Some(_) => self.late.push_back(finished),
                }
            } else {
                moved = 0;
                self.restart_alone(engine, tag);
            }
            slot = next;
            next = slot.and_then(|slot| self.way.as_ref()?.requests.after(slot));
        }
        answer
    }

    /// A request of a merged operation that did not get its bytes goes again, by itself.
    #[cold]
    fn restart_alone<E: Engine>(&mut self, engine: &mut E, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        let cold = &mut self.cold[usize::from(tag)];
        (cold.retries, cold.counted, cold.bounce) = (0, false, false);
        (slot.stage, slot.done) = (Stage::Part, 0);
        self.advance(engine, tag);
    }

    /// A request of a probe is done, well or not; it ends as any other.
    pub(crate) fn finish_probe<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let latency = self.disk.now().saturating_sub(self.cold[usize::from(tag)].probed);
        if let Some(way) = self.way.as_mut() {
            way.follower.finished(latency);
        }
        self.slots[usize::from(tag)].stage = Stage::Whole;
        self.finish(engine, tag, result)
    }

    /// Takes up the path that is chosen now, reports what was seen, begins another probe.
    #[cold]
    fn look(&mut self) {
        let Some(way) = self.way.as_mut() else { return };
        let (board, now) = (&self.disk.policy, self.disk.now());
        if way.follower.is_due(now) {
            let requests = self.stats.reads + self.stats.writes;
            let bytes = self.stats.read_bytes + self.stats.written_bytes;
            way.follower.report(board, now, (requests, bytes), way.requests.stats());
        }
        way.follower.follow(board);
        self.choose_straight();
    }
}

/// The kind of an operation that moves data.
fn data_op(op: IoOp) -> DataOp {
    match op {
        IoOp::Read => DataOp::Read,
        IoOp::WriteDurable => DataOp::WriteDurable,
        _ => DataOp::Write,
    }
}

fn io_op(op: DataOp) -> IoOp {
    match op {
        DataOp::Read => IoOp::Read,
        DataOp::Write => IoOp::Write,
        DataOp::WriteDurable => IoOp::WriteDurable,
    }
}
