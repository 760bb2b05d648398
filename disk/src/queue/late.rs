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
