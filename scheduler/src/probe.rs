//! Straight through: each request is one operation, sent at once.
//!
//! There is nothing to do, so there is nothing here that does it: a disk whose policy is bio hands
//! its requests to the engine itself. What [`crate::auto`] has to know of such a disk it learns from
//! a few requests now and then, a *probe*.

use crate::auto::Seen;
use ringway_core::{ByteRange, DataOp};

/// Requests of one probe. Enough to see sixteen streams that take turns; few enough to cost
/// nothing, once in [`crate::auto::REPORT_NS`].
pub const PROBE: usize = 64;

/// Looks at the requests of one probe: would they have met their neighbours?
#[derive(Debug)]
pub struct Probe {
    /// Where each request ended that was looked at.
    ends: [(DataOp, u64); PROBE],
    count: usize,
    seen: Seen,
}

impl Default for Probe {
    fn default() -> Self {
        Self { ends: [(DataOp::Read, 0); PROBE], count: 0, seen: Seen::default() }
    }
}

impl Probe {
    /// True if the probe wants to see no more requests.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.count == PROBE
    }

    /// Begins another probe.
    pub fn restart(&mut self) {
        self.count = 0;
    }

    /// A request starts while `in_flight` others of its queue are.
    pub fn started(&mut self, op: DataOp, range: ByteRange, in_flight: usize) {
        if self.is_full() {
            return;
        }
        // Only a neighbour that is still in flight could have been met.
        let near = &self.ends[self.count.saturating_sub(in_flight)..self.count];
        let adjacent = near.contains(&(op, range.offset()));
        self.ends[self.count] = (op, range.end());
        self.count += 1;
        self.seen.sampled += 1;
        self.seen.adjacent += u64::from(adjacent);
        self.seen.in_flight += in_flight as u64 + 1;
    }

    /// A request of the probe was done `latency` nanoseconds after it had started.
    pub fn finished(&mut self, latency: u64) {
        self.seen.timed += 1;
        self.seen.latency += latency;
    }

    /// What was seen since the last call.
    pub fn take(&mut self) -> Seen {
        std::mem::take(&mut self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjacent(offsets: &[u64], in_flight: usize) -> u64 {
        let mut probe = Probe::default();
        for &offset in offsets {
            probe.started(DataOp::Read, ByteRange::new(offset, 4096).unwrap(), in_flight);
        }
        probe.take().adjacent
    }

    #[test]
    fn neighbours_are_seen_only_while_they_are_in_flight() {
        let stream: Vec<_> = (0..64).map(|i| i * 4096).collect();
        assert_eq!(adjacent(&stream, 8), 63);
        assert_eq!(adjacent(&stream, 0), 0, "one at a time meets nobody");
        let four: Vec<_> = (0..64).map(|i| ((i % 4) << 30) + (i / 4) * 4096).collect();
        assert_eq!(adjacent(&four, 8), 60, "streams that take turns");
        assert_eq!(adjacent(&four, 3), 0, "the neighbour is done by then");
        let scattered: Vec<_> = (0..64).map(|i| i * 8192).collect();
        assert_eq!(adjacent(&scattered, 8), 0);
    }

    #[test]
    fn a_probe_counts_its_requests_and_then_no_more() {
        let mut probe = Probe::default();
        let range = ByteRange::new(0, 512).unwrap();
        for _ in 0..2 {
            for _ in 0..PROBE {
                assert!(!probe.is_full());
                probe.started(DataOp::Read, range, 2);
            }
            assert!(probe.is_full());
            probe.started(DataOp::Read, range, 2);
            probe.finished(30);
            probe.finished(12);
            let sampled = PROBE as u64;
            let seen =
                Seen { sampled, in_flight: 3 * sampled, timed: 2, latency: 42, ..Seen::default() };
            assert_eq!(probe.take(), seen);
            assert_eq!(probe.take(), Seen::default(), "since the last call");
            probe.restart();
        }
    }

    #[test]
    fn reads_and_writes_are_no_neighbours() {
        let mut probe = Probe::default();
        for (i, op) in [DataOp::Read, DataOp::Write, DataOp::WriteDurable].into_iter().enumerate() {
            probe.started(op, ByteRange::new(i as u64 * 512, 512).unwrap(), 5);
        }
        assert_eq!(probe.take().adjacent, 0);
    }
}
