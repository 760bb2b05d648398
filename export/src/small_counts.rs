//! How often small numbers came: what a worker counts each turn (hot) for the price of an addition, where a
//! histogram takes sixty instructions.

use hdrhistogram::Histogram;

/// Numbers below this are counted one by one. Histograms of workers tell them apart, too.
const EACH: usize = 128;

/// How often each number below [`EACH`] came.
#[derive(Debug)]
pub(crate) struct SmallCounts {
    times: Box<[u64; EACH]>,
}

impl Default for SmallCounts {
    fn default() -> Self {
        Self { times: Box::new([0; EACH]) }
    }
}

impl SmallCounts {
    /// Counts `number`: here if it is small, in `large` otherwise.
    #[inline]
    pub(crate) fn record(&mut self, number: usize, large: &mut Histogram<u64>) {
        match self.times.get_mut(number) {
            Some(times) => *times += 1,
            None => large.saturating_record(number as u64),
        }
    }

    /// Adds what was counted here.
    pub(crate) fn add_to(&self, all: &mut Histogram<u64>) {
        for (number, &times) in (0..).zip(&*self.times) {
            if times > 0 {
                all.saturating_record_n(number, times);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::WorkerStats;

    #[test]
    fn counts_what_a_histogram_counts() {
        let (mut counts, mut large) = (SmallCounts::default(), WorkerStats::default().batches);
        let mut expected = large.clone();
        for number in [1, 2, 2, 16, EACH - 1, EACH, EACH + 1, 4096, 1_000_000] {
            counts.record(number, &mut large);
            expected.saturating_record(number as u64);
        }
        assert_eq!(large.len(), 4, "the small ones are not in it");
        counts.add_to(&mut large);
        assert_eq!(large, expected);
    }
}
