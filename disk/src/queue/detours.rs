//! Requests that the file does not take as they are: when there are so many that somebody should
//! know.

use crate::disk::Disk;
use crate::incidents::Detours;
use crate::stats::DiskStats;

/// Detours of one queue, counted in stretches.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DetourWatch {
    begun_ns: u64,
    detours: u64,
    requests: u64,
    reported: bool,
}

/// So many detours of one queue make a stretch.
const DETOURS: u64 = 4096;
/// If they came within this time, in nanoseconds,
const MINUTE: u64 = 60_000_000_000;
/// and were at least one of so many reads and writes, they are worth telling. Firmware that boots a
/// guest does not get there.
const SHARE: u64 = 10;

impl DetourWatch {
    /// One more request of a queue was bounced or split.
    pub(crate) fn count(&mut self, stats: &DiskStats, disk: &Disk) {
        let (detours, requests) = (stats.bounced + stats.split, stats.reads + stats.writes);
        if let Some(found) = self.judge(detours, requests, || disk.now()) {
            disk.incidents.detours(found.count, found.requests);
        }
    }

    /// A queue counts `detours` and `requests` now. Gives those of a stretch that is worth telling,
    /// once. `now_ns` is only asked for at the end of a stretch.
    fn judge(&mut self, detours: u64, requests: u64, now_ns: impl Fn() -> u64) -> Option<Detours> {
        if self.reported || (self.begun_ns > 0 && detours - self.detours < DETOURS) {
            return None;
        }
        let now = now_ns();
        let (count, of) = (detours - self.detours, requests - self.requests);
        let costly =
            self.begun_ns > 0 && now - self.begun_ns <= MINUTE && of <= count.saturating_mul(SHARE);
        *self = Self { begun_ns: now.max(1), detours, requests, reported: costly };
        costly.then_some(Detours { count, requests: of })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each call counts one more detour, of `of` requests.
    fn reported(of: u64, ns_each: u64, count: u64) -> Vec<Detours> {
        let mut watch = DetourWatch::default();
        let judge = |n: u64| watch.judge(n, n * of, || n * ns_each);
        (1..=count).filter_map(judge).collect()
    }

    #[test]
    fn many_detours_are_reported_once_and_a_few_are_not() {
        let ms = 1_000_000;
        assert_eq!(reported(1, ms, 4000), [], "firmware");
        assert_eq!(reported(2, ms, 100_000), [Detours { count: 4096, requests: 8192 }]);
        assert_eq!(reported(11, ms, 100_000), [], "a small share");
        assert_eq!(reported(1, 20 * ms, 100_000), [], "50 a second");
    }
}
