//! A limit to how much is asked for, spread evenly over time (hot).

/// One job's share of a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimit {
    per_request_ns: f64,
    per_byte_ns: f64,
    due_ns: f64,
}

/// What is limited, all jobs together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Requests a second.
    Requests(f64),
    /// Bytes a second.
    Bytes(f64),
}

impl RateLimit {
    /// The share of job `index` of `jobs`, from the time `start_ns` on. Jobs begin one after the
    /// other, so that their requests do not come together.
    pub(crate) fn new(rate: Rate, index: u32, jobs: u32, start_ns: u64) -> Self {
        let share = f64::from(jobs) * 1e9;
        let (per_request_ns, per_byte_ns) = match rate {
            Rate::Requests(iops) => (share / iops, 0.0),
            Rate::Bytes(bytes) => (0.0, share / bytes),
        };
        let stagger = per_request_ns * f64::from(index) / f64::from(jobs);
        Self { per_request_ns, per_byte_ns, due_ns: start_ns as f64 + stagger }
    }

    /// When the next request is due.
    #[inline]
    pub(crate) fn due(&self) -> u64 {
        // A time in nanoseconds, positive; the fraction does not matter.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let due = self.due_ns as u64;
        due
    }

    /// Counts a request of `bytes` bytes.
    #[inline]
    pub(crate) fn spend(&mut self, bytes: u32) {
        self.due_ns += self.per_request_ns + self.per_byte_ns * f64::from(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_share_a_rate() {
        for (rate, bytes, expected) in
            [(Rate::Requests(1000.0), 4096, 1000), (Rate::Bytes(4_096_000.0), 8192, 500)]
        {
            let mut count = 0;
            for index in 0..4 {
                let mut limit = RateLimit::new(rate, index, 4, 5_000);
                while limit.due() < 1_000_005_000 {
                    limit.spend(bytes);
                    count += 1;
                }
            }
            assert_eq!(count, expected, "{rate:?}");
        }
    }
}
