//! Values in buckets, as the control socket tells them, and the difference of two tellings.

use ringway_control::protocol::{Latencies, Spread};
use serde::Serialize;
use std::collections::BTreeMap;

/// How many values there are, by the highest value of their bucket.
#[derive(Clone, Debug, Default)]
pub(super) struct Buckets(BTreeMap<u64, u64>);

/// `null` where there are too few values to tell: one percent of ten is nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Percentiles {
    pub(super) count: u64,
    pub(super) p50: Option<u64>,
    pub(super) p99: Option<u64>,
    pub(super) p999: Option<u64>,
    pub(super) max: Option<u64>,
}

impl Buckets {
    /// The values of one spread.
    pub(super) fn spread(spread: &Spread) -> Self {
        Self(spread.buckets.iter().flatten().copied().collect())
    }

    /// Those of some kinds of requests together.
    pub(super) fn of(latencies: Option<&Latencies>, kinds: &[fn(&Latencies) -> &Spread]) -> Self {
        let all = latencies.iter().flat_map(|all| kinds.iter().map(|kind| Self::spread(kind(all))));
        all.reduce(Self::and).unwrap_or_default()
    }

    /// Both together.
    pub(super) fn and(mut self, other: Self) -> Self {
        for (value, count) in other.0 {
            *self.0.entry(value).or_default() += count;
        }
        self
    }

    /// The values that came after `then`: all of them if they were counted anew since.
    pub(super) fn since(self, then: &Self) -> Self {
        let begun_anew =
            then.0.iter().any(|(value, &count)| self.0.get(value).is_none_or(|&now| now < count));
        if begun_anew {
            return self;
        }
        let came = |(value, count): (u64, u64)| {
            let count = count - then.0.get(&value).copied().unwrap_or(0);
            (count > 0).then_some((value, count))
        };
        Self(self.0.into_iter().filter_map(came).collect())
    }

    /// The highest value of each bucket, rising, and how many are in it.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|(&value, &count)| (value, count))
    }

    fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// Their average, if there are any.
    pub(super) fn mean(&self) -> Option<f64> {
        let sum: f64 = self.0.iter().map(|(&value, &count)| value as f64 * count as f64).sum();
        let count = self.count();
        (count > 0).then(|| sum / count as f64)
    }

    /// The value that all but one in `rest` do not exceed; `None` if there are fewer than `rest`.
    fn all_but_one_in(&self, rest: u64) -> Option<u64> {
        let count = self.count();
        let beyond = count / rest;
        if beyond == 0 {
            return None;
        }
        let mut left = count - beyond;
        for (&value, &here) in &self.0 {
            match left.checked_sub(here) {
                Some(0) | None => return Some(value),
                Some(more) => left = more,
            }
        }
        None
    }

    pub(super) fn percentiles(&self) -> Percentiles {
        let max = self.0.last_key_value().map(|(&value, _)| value);
        Percentiles {
            count: self.count(),
            // Of one value, half is that one.
            p50: self.all_but_one_in(2).or(max),
            p99: self.all_but_one_in(100),
            p999: self.all_but_one_in(1000),
            max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(pairs: &[(u64, u64)]) -> Buckets {
        Buckets(pairs.iter().copied().collect())
    }

    #[test]
    fn percentiles_are_told_when_there_are_values_enough() {
        let few = buckets(&[(7, 1)]).percentiles();
        assert_eq!((few.p50, few.p99, few.p999, few.max), (Some(7), None, None, Some(7)));
        let some = buckets(&[(10, 50), (20, 49), (30, 1)]).percentiles();
        assert_eq!((some.p50, some.p99, some.p999), (Some(10), Some(20), None));
        let many = buckets(&[(10, 989), (20, 10), (30, 1)]).percentiles();
        assert_eq!((many.p50, many.p99, many.p999), (Some(10), Some(20), Some(20)));
        assert_eq!(Buckets::default().percentiles(), Percentiles::default());
    }

    #[test]
    fn what_came_in_between_is_the_difference_unless_it_was_counted_anew() {
        let then = buckets(&[(10, 5), (20, 1)]);
        let more = buckets(&[(10, 5), (20, 3), (30, 1)]).since(&then);
        assert_eq!(more.0, BTreeMap::from([(20, 2), (30, 1)]));
        assert_eq!(more.mean(), Some(70.0 / 3.0));
        assert_eq!(buckets(&[(10, 4), (20, 9)]).since(&then).count(), 13);
        assert_eq!(buckets(&[(10, 9)]).since(&then).count(), 9);
    }
}
