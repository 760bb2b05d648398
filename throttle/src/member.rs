//! Buckets of a disk or a group, and a disk's part in them.

use super::bucket::{Bucket, REQUEST, Times};
use super::rates::{Kind, Rates, RatesError};
use super::waiting::{Seen, Waiting};
use std::sync::Arc;

/// A limit of each kind, for one disk or for a group of disks.
#[derive(Debug)]
pub struct Throttle {
    rates: Rates,
    buckets: [Option<Bucket>; 6],
    waiting: [Waiting; 6],
}

fn buckets(rates: &Rates) -> [Option<Bucket>; 6] {
    Kind::ALL.map(|kind| {
        let unit = if kind.counts_requests() { REQUEST } else { 1 };
        Bucket::new(rates[kind], unit)
    })
}

impl Throttle {
    /// Empty buckets.
    ///
    /// # Errors
    /// What is wrong with the rates.
    pub fn new(rates: &Rates) -> Result<Self, RatesError> {
        rates.check()?;
        Ok(Self { rates: *rates, buckets: buckets(rates), waiting: Default::default() })
    }
}

/// A disk's part in a throttle, shared by its queues.
#[derive(Debug)]
pub struct Member {
    throttle: Arc<Throttle>,
    /// Of a group: what this disk may have if all that wait have equal parts.
    shares: Option<[Option<Share>; 6]>,
}

#[derive(Debug)]
struct Share {
    bucket: Bucket,
    seen: Seen,
}

impl Member {
    /// The only disk that these limits are for.
    ///
    /// # Errors
    /// What is wrong with the rates.
    pub fn alone(rates: &Rates) -> Result<Arc<Self>, RatesError> {
        let throttle = Arc::new(Throttle::new(rates)?);
        Ok(Arc::new(Self { throttle, shares: None }))
    }

    /// One disk of a group. Those that want more than they get have equal parts of it.
    #[must_use]
    pub fn of_group(throttle: &Arc<Throttle>) -> Arc<Self> {
        let share =
            |bucket: Option<Bucket>| bucket.map(|b| Share { bucket: b, seen: Seen::default() });
        let shares = Some(buckets(&throttle.rates).map(share));
        Arc::new(Self { throttle: Arc::clone(throttle), shares })
    }

    /// Bytes of a request that counts once.
    pub(crate) fn request_bytes(&self) -> u64 {
        self.throttle.rates.iops_size.unwrap_or(u64::MAX)
    }

    /// The buckets there are: of each kind the disk's share first.
    pub(crate) fn taps(&self) -> impl Iterator<Item = (Kind, Part)> {
        let kinds = Kind::ALL.into_iter();
        let limited = kinds.filter(|&kind| self.throttle.buckets[kind as usize].is_some());
        limited.flat_map(|kind| {
            let share = self.shares.is_some().then_some((kind, Part::Share));
            share.into_iter().chain([(kind, Part::Whole)])
        })
    }

    /// Units that leak in a second.
    pub(crate) fn rate(&self, kind: Kind) -> u64 {
        self.throttle.buckets[kind as usize].as_ref().map_or(u64::MAX, Bucket::rate)
    }

    /// As [`Bucket::claim`].
    pub(crate) fn claim(&self, kind: Kind, part: Part, now: u64, units: u64) -> u64 {
        let at = kind as usize;
        let share = self.shares.as_ref().and_then(|shares| shares[at].as_ref());
        let Some(whole) = &self.throttle.buckets[at] else { return now };
        match (part, share) {
            (Part::Share, Some(share)) => {
                let sharers = self.throttle.waiting[at].sharers(now);
                share.bucket.claim(now, units, whole.times(now, sharers))
            }
            _ => whole.claim(now, units, Times::ONE),
        }
    }

    /// What a request took beyond its credit is taken off the next ones. Of a group's bucket not more
    /// than two seconds' worth, so that a single huge request costs its own disk only.
    pub(crate) fn owe(&self, kind: Kind, part: Part, now: u64, units: u64) {
        let of_group = self.shares.is_some() && part == Part::Whole;
        let most = if of_group { self.rate(kind).saturating_mul(2) } else { u64::MAX };
        self.claim(kind, part, now, units.min(most));
    }

    /// A queue of this disk waits.
    pub(crate) fn mark(&self, kind: Kind, now: u64) {
        if let Some(Some(share)) = self.shares.as_ref().map(|shares| &shares[kind as usize]) {
            self.throttle.waiting[kind as usize].mark(now, &share.seen);
        }
    }
}

/// Which bucket of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The one that all disks of a group share, or that of a disk alone.
    Whole,
    /// What is this disk's of it.
    Share,
}
