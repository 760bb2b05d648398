//! Requests that take too long: found by looking now and then, at no cost to those that do not.
//!
//! A request on the straight way bears no time. The first look that meets it writes one down beside
//! the slot and takes it off the straight way, so that its end clears the mark; each further look
//! compares. What is told is therefore a little less than what the request took.

use crate::queue::{DiskQueue, Finished};
use crate::slot::Stage;
use ringway_aio::Engine;
use ringway_core::{ByteRange, Op};

/// When a request in flight was first met by a look, in the time of the caller; and whether it was
/// told already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    met_ns: Option<u64>,
    told: bool,
}

/// What a look has found in one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    /// Requests in flight for longer than the limit.
    pub requests: usize,
    /// Those of them that no look has counted before.
    pub new: usize,
    /// The oldest of them.
    pub oldest: Option<Oldest>,
}

/// A request that has been in flight for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// What it is to do.
    pub op: Op,
    /// Where on the disk; empty for flushes.
    pub range: ByteRange,
    /// For how long it has been seen, in nanoseconds.
    pub age_ns: u64,
}

impl Overdue {
    /// Adds what was found in another queue.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.new += other.new;
        let age = |oldest: &Option<Oldest>| oldest.map_or(0, |oldest| oldest.age_ns);
        if age(&other.oldest) > age(&self.oldest) {
            self.oldest = other.oldest;
        }
    }
}

impl<C> DiskQueue<C> {
    /// A request that a look has met is done, well or not; it ends as any other.
    #[cold]
    pub(crate) fn finish_watched<E: Engine>(
        &mut self,
        engine: &mut E,
        tag: u16,
        result: i32,
    ) -> Option<Finished<C>> {
        let at = usize::from(tag);
        let mark = self.cold[at].mark;
        self.slots[at].stage = Stage::Whole;
        let answer = self.finish(engine, tag, result);
        if answer.is_none() {
            // Not yet: it goes on, and is as old as it was.
            self.cold[at].mark = mark;
        }
        answer
    }

    /// Looks for requests that have been in flight for `limit_ns` or longer: in the engine, held by
    /// the path, or waiting for bounce memory or a lock. `now_ns` is of any clock that only goes
    /// forward, always the same one. Takes time by the depth of the queue; call it every few seconds.
    #[cold]
    pub fn look_for_overdue(&mut self, now_ns: u64, limit_ns: u64) -> Overdue {
        let mut found = Overdue::default();
        for (slot, cold) in self.slots.iter_mut().zip(&mut self.cold) {
            if slot.context.is_none() {
                continue;
            }
            if slot.stage == Stage::Whole {
                slot.stage = Stage::Watched;
                cold.mark = Mark::default();
            }
            let met = *cold.mark.met_ns.get_or_insert(now_ns);
            let age_ns = now_ns.saturating_sub(met);
            if age_ns < limit_ns {
                continue;
            }
            let (op, range) = (slot.request.op, slot.request.range);
            let new = usize::from(!cold.mark.told);
            cold.mark.told = true;
            let oldest = Some(Oldest { op, range, age_ns });
            found.add(&Overdue { requests: 1, new, oldest });
        }
        self.stats.overdue += found.new as u64;
        found
    }
}
