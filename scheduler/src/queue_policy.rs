//! One queue's part in the choice of a policy.

use crate::auto::REPORT_NS;
use crate::mode::{Policy, SchedulerMode};
use crate::probe::Probe;
use crate::shared_policy::SharedPolicy;
use crate::stats::SchedulerStats;
use ringway_core::{ByteRange, DataOp};

/// Takes the policy of a queue from its disk's [`SharedPolicy`], and reports what the queue sees.
#[derive(Debug)]
pub struct QueuePolicy {
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
    merging: SchedulerStats,
}

impl QueuePolicy {
    /// A part in `shared`, with the policy that is in use now.
    #[must_use]
    pub fn new(shared: &SharedPolicy) -> Self {
        Self {
            adapts: shared.mode() == SchedulerMode::Auto,
            plugs: shared.present() == Policy::Request,
            probes: false,
            probe: Probe::default(),
            reported: Totals::default(),
        }
    }

    /// True if the policy may change: call [`QueuePolicy::follow`] now and then.
    #[must_use]
    pub fn adapts(&self) -> bool {
        self.adapts
    }

    /// True if new requests are to be plugged.
    #[must_use]
    pub fn plugs(&self) -> bool {
        self.plugs
    }

    /// True if the next requests, each by itself, are to be told of ([`QueuePolicy::started`]).
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
        now.saturating_sub(self.reported.at) >= REPORT_NS
    }

    /// Reports what the queue has done since it was made, reads and writes, and begins another probe.
    pub fn report(
        &mut self,
        shared: &SharedPolicy,
        now: u64,
        (requests, bytes): (u64, u64),
        merging: SchedulerStats,
    ) {
        let mut seen = self.probe.take();
        seen.requests = requests - self.reported.requests;
        seen.bytes = bytes - self.reported.bytes;
        seen.plugged = merging.plugged - self.reported.merging.plugged;
        seen.merged = merging.merged - self.reported.merging.merged;
        if shared.report(now, &seen) {
            self.reported = Totals { at: now, requests, bytes, merging };
            self.probe.restart();
            self.probes = true;
        }
    }

    /// Takes up the policy that is in use now.
    pub fn follow(&mut self, shared: &SharedPolicy) {
        self.plugs = shared.present() == Policy::Request;
        self.probes &= !self.plugs;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::Seen;
    use crate::probe::PROBE;

    fn merging(plugged: u64, merged: u64) -> SchedulerStats {
        SchedulerStats { plugged, merged, ..SchedulerStats::default() }
    }

    #[test]
    fn a_queue_does_as_its_disk_says() {
        for (mode, adapts, plugs) in [
            (SchedulerMode::Bio, false, false),
            (SchedulerMode::Request, false, true),
            (SchedulerMode::Auto, true, false),
        ] {
            let shared = SharedPolicy::new(mode);
            let queue = QueuePolicy::new(&shared);
            assert_eq!((queue.adapts(), queue.plugs()), (adapts, plugs), "{mode}");
            assert!(!queue.probes(), "before the first report");
        }
        // Another policy, taken up when it is asked for.
        let bio = SharedPolicy::new(SchedulerMode::Bio);
        let mut queue = QueuePolicy::new(&SharedPolicy::new(SchedulerMode::Auto));
        queue.report(&bio, 1, (0, 0), merging(0, 0));
        queue.follow(&bio);
        assert!(queue.probes() && !queue.plugs());
        queue.follow(&SharedPolicy::new(SchedulerMode::Request));
        assert!(queue.plugs() && !queue.probes(), "what is plugged is not probed");
    }

    #[test]
    fn a_queue_reports_what_came_since_its_last_report() {
        let shared = SharedPolicy::new(SchedulerMode::Auto);
        let mut queue = QueuePolicy::new(&shared);
        let seen = || shared.auto.lock().unwrap().seen;
        // All before the first judgement, until which it is added up.
        queue.report(&shared, 1, (100, 4000), merging(30, 20));
        let first = Seen { requests: 100, bytes: 4000, plugged: 30, merged: 20, ..Seen::default() };
        assert_eq!(seen(), first);
        queue.started(DataOp::Read, ByteRange::new(0, 512).unwrap(), 2);
        queue.finished(7);
        queue.report(&shared, 2, (150, 9000), merging(37, 23));
        let probed = Seen { sampled: 1, in_flight: 3, timed: 1, latency: 7, ..Seen::default() };
        let sum = Seen { requests: 150, bytes: 9000, plugged: 37, merged: 23, ..probed };
        assert_eq!(seen(), sum);
        // A report that found the lock taken is made up for.
        let held = shared.auto.lock().unwrap();
        queue.report(&shared, 3, (170, 9500), merging(37, 23));
        drop(held);
        queue.report(&shared, 4, (200, 9900), merging(38, 23));
        let sum = Seen { requests: 200, bytes: 9900, plugged: 38, merged: 23, ..probed };
        assert_eq!(seen(), sum);
    }

    #[test]
    fn a_report_is_due_after_each_interval_and_begins_a_probe() {
        let shared = SharedPolicy::new(SchedulerMode::Auto);
        let mut queue = QueuePolicy::new(&shared);
        for at in [0, REPORT_NS, 2 * REPORT_NS + 5] {
            assert!(!queue.is_due(at + REPORT_NS - 1) && queue.is_due(at + REPORT_NS));
            let held = shared.auto.lock().unwrap();
            queue.report(&shared, at + REPORT_NS, (0, 0), merging(0, 0));
            drop(held);
            assert!(!queue.probes() && queue.is_due(at + REPORT_NS), "it did not come through");
            let next = if at == REPORT_NS { at + REPORT_NS + 5 } else { at + REPORT_NS };
            queue.report(&shared, next, (0, 0), merging(0, 0));
            for _ in 0..PROBE {
                assert!(queue.probes());
                queue.started(DataOp::Write, ByteRange::new(0, 512).unwrap(), 0);
            }
            assert!(!queue.probes(), "it has seen enough");
        }
    }
}
