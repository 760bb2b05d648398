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
