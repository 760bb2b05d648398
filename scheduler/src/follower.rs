//! One queue's part in the choice of a path.

use crate::auto::LOOK_NS;
use crate::bio::Probe;
use crate::board::PathBoard;
use crate::kind::{DataOp, Path, PathKind};
use crate::stats::PathStats;
use ringway_core::ByteRange;

/// Takes the path of a queue from its disk's [`PathBoard`], and reports what the queue sees.
#[derive(Debug)]
pub struct Follower {
    /// The choice may change.
    adapts: bool,
    plugs: bool,
    probes: bool,
    probe: Probe,
    /// At the last report.
    reported: Totals,
}

/// Sums of a queue since it was made.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    at: u64,
    requests: u64,
    bytes: u64,
    path: PathStats,
}

impl Follower {
    /// A follower of `board`, on the path that is in use now.
    #[must_use]
    pub fn new(board: &PathBoard) -> Self {
        Self {
            adapts: board.kind() == PathKind::Auto,
            plugs: board.present() == Path::Request,
            probes: false,
            probe: Probe::default(),
            reported: Totals::default(),
        }
    }

    /// True if the path may change: call [`Follower::follow`] now and then.
    #[must_use]
    pub fn adapts(&self) -> bool {
        self.adapts
    }

    /// True if new requests are to be plugged.
    #[must_use]
    pub fn plugs(&self) -> bool {
        self.plugs
    }

    /// True if the next requests, which go straight, are to be told of ([`Follower::started`]).
    #[must_use]
    pub fn probes(&self) -> bool {
        self.probes
    }

    /// A request of a probe starts while `in_flight` others of its queue are. Probing may end by it.
    pub fn started(&mut self, op: DataOp, range: ByteRange, in_flight: usize) {
        self.probe.started(op, range, in_flight);
        self.probes &= !self.probe.is_full();
    }

    /// A request of the probe was done `latency` nanoseconds after it had started.
    pub fn finished(&mut self, latency: u64) {
        self.probe.finished(latency);
    }

    /// True if it is time to report.
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        now.saturating_sub(self.reported.at) >= LOOK_NS
    }

    /// Reports what the queue has done since it was made, reads and writes, and begins another probe.
    pub fn report(
        &mut self,
        board: &PathBoard,
        now: u64,
        (requests, bytes): (u64, u64),
        path: PathStats,
    ) {
        let mut seen = self.probe.take();
        seen.requests = requests - self.reported.requests;
        seen.bytes = bytes - self.reported.bytes;
        seen.plugged = path.plugged - self.reported.path.plugged;
        seen.merged = path.merged - self.reported.path.merged;
        if board.report(now, &seen) {
            self.reported = Totals { at: now, requests, bytes, path };
            self.probe.restart();
            self.probes = true;
        }
    }

    /// Takes up the path that the board has now.
    pub fn follow(&mut self, board: &PathBoard) {
        self.plugs = board.present() == Path::Request;
        self.probes &= !self.plugs;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::Seen;
    use crate::bio::PROBE;

    fn path(plugged: u64, merged: u64) -> PathStats {
        PathStats { plugged, merged, ..PathStats::default() }
    }

    #[test]
    fn a_follower_does_as_its_board_says() {
        for (kind, adapts, plugs) in [
            (PathKind::Bio, false, false),
            (PathKind::Request, false, true),
            (PathKind::Auto, true, false),
        ] {
            let board = PathBoard::new(kind);
            let follower = Follower::new(&board);
            assert_eq!((follower.adapts(), follower.plugs()), (adapts, plugs), "{kind}");
            assert!(!follower.probes(), "before the first report");
        }
        // Another path, taken up when it is asked for.
        let bio = PathBoard::new(PathKind::Bio);
        let mut follower = Follower::new(&PathBoard::new(PathKind::Auto));
        follower.report(&bio, 1, (0, 0), path(0, 0));
        follower.follow(&bio);
        assert!(follower.probes() && !follower.plugs());
        follower.follow(&PathBoard::new(PathKind::Request));
        assert!(follower.plugs() && !follower.probes(), "what is plugged is not probed");
    }

    #[test]
    fn a_follower_reports_what_came_since_its_last_report() {
        let board = PathBoard::new(PathKind::Auto);
        let mut follower = Follower::new(&board);
        let seen = || board.auto.lock().unwrap().seen;
        // All before the first look of the board, which adds up until then.
        follower.report(&board, 1, (100, 4000), path(30, 20));
        let first = Seen { requests: 100, bytes: 4000, plugged: 30, merged: 20, ..Seen::default() };
        assert_eq!(seen(), first);
        follower.started(DataOp::Read, ByteRange::new(0, 512).unwrap(), 2);
        follower.finished(7);
        follower.report(&board, 2, (150, 9000), path(37, 23));
        let probed = Seen { sampled: 1, in_flight: 3, timed: 1, latency: 7, ..Seen::default() };
        let sum = Seen { requests: 150, bytes: 9000, plugged: 37, merged: 23, ..probed };
        assert_eq!(seen(), sum);
        // A report that found the board taken is made up for.
        let held = board.auto.lock().unwrap();
        follower.report(&board, 3, (170, 9500), path(37, 23));
        drop(held);
        follower.report(&board, 4, (200, 9900), path(38, 23));
        let sum = Seen { requests: 200, bytes: 9900, plugged: 38, merged: 23, ..probed };
        assert_eq!(seen(), sum);
    }

    #[test]
    fn a_report_is_due_after_each_look_and_begins_a_probe() {
        let board = PathBoard::new(PathKind::Auto);
        let mut follower = Follower::new(&board);
        for at in [0, LOOK_NS, 2 * LOOK_NS + 5] {
            assert!(!follower.is_due(at + LOOK_NS - 1) && follower.is_due(at + LOOK_NS));
            let held = board.auto.lock().unwrap();
            follower.report(&board, at + LOOK_NS, (0, 0), path(0, 0));
            drop(held);
            assert!(!follower.probes() && follower.is_due(at + LOOK_NS), "it did not come through");
            let next = if at == LOOK_NS { at + LOOK_NS + 5 } else { at + LOOK_NS };
            follower.report(&board, next, (0, 0), path(0, 0));
            for _ in 0..PROBE {
                assert!(follower.probes());
                follower.started(DataOp::Write, ByteRange::new(0, 512).unwrap(), 0);
            }
            assert!(!follower.probes(), "it has seen enough");
        }
    }
}
