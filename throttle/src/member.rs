//! Buckets of a disk or a group, and a disk's part in them.

use super::bucket::{Bucket, Paid, REQUEST, Times};
use super::rates::{LimitKind, Rates, RatesError};
use super::waiting::{Seen, Waiting};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Requests of a disk that may pass a limit of one kind although it has nothing left for them, until it has been paid
/// for what they cost: of a queue that stops and can leave nothing behind. As many as 16 rings of 1,024 have, so that all
/// passes that a killed daemon has left of a disk.
const PAST_MAX: u64 = 16 << 10;

/// A limit of each kind, for one disk or for a group of disks.
#[derive(Debug)]
pub struct Throttle {
    rates: Rates,
    buckets: [Option<Bucket>; 6],
    waiting: [Waiting; 6],
}

fn buckets(rates: &Rates) -> [Option<Bucket>; 6] {
    LimitKind::ALL.map(|kind| {
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
    /// Until then a queue that begins takes no request of this kind in advance: one that has gone did.
    shut_until: [AtomicU64; 6],
    /// Requests that have passed the limit, and are not paid for.
    past: [AtomicU64; 6],
}

#[derive(Debug)]
struct Share {
    bucket: Bucket,
    seen: Seen,
    paid: Paid,
}

impl Member {
    /// The only disk that these limits are for.
    ///
    /// # Errors
    /// What is wrong with the rates.
    pub fn alone(rates: &Rates) -> Result<Arc<Self>, RatesError> {
        let throttle = Arc::new(Throttle::new(rates)?);
        Ok(Arc::new(Self::new(throttle, None)))
    }

    /// One disk of a group. Those that want more than they get have equal parts of it.
    #[must_use]
    pub fn of_group(throttle: &Arc<Throttle>) -> Arc<Self> {
        let share = |bucket| Share { bucket, seen: Seen::default(), paid: Paid::default() };
        let shares = buckets(&throttle.rates).map(|bucket| bucket.map(share));
        Arc::new(Self::new(Arc::clone(throttle), Some(shares)))
    }

    fn new(throttle: Arc<Throttle>, shares: Option<[Option<Share>; 6]>) -> Self {
        Self { throttle, shares, shut_until: Default::default(), past: Default::default() }
    }

    /// True if it is a part in this group.
    #[must_use]
    pub fn is_of(&self, throttle: &Arc<Throttle>) -> bool {
        Arc::ptr_eq(&self.throttle, throttle)
    }

    /// Bytes of a request that counts once.
    pub(crate) fn request_bytes(&self) -> u64 {
        self.throttle.rates.iops_size.unwrap_or(u64::MAX)
    }

    /// The buckets there are: of each kind the disk's share first.
    pub(crate) fn taps(&self) -> impl Iterator<Item = (LimitKind, BucketKind)> {
        let kinds = LimitKind::ALL.into_iter();
        let limited = kinds.filter(|&kind| self.throttle.buckets[kind as usize].is_some());
        limited.flat_map(|kind| {
            let share = self.shares.is_some().then_some((kind, BucketKind::Share));
            share.into_iter().chain([(kind, BucketKind::Whole)])
        })
    }

    /// Units that leak in a second.
    pub(crate) fn rate(&self, kind: LimitKind) -> u64 {
        self.throttle.buckets[kind as usize].as_ref().map_or(u64::MAX, Bucket::rate)
    }

    fn share(&self, kind: LimitKind) -> Option<&Share> {
        self.shares.as_ref().and_then(|shares| shares[kind as usize].as_ref())
    }

    /// As [`Bucket::claim`].
    pub(crate) fn claim(&self, kind: LimitKind, part: BucketKind, now: u64, units: u64) -> u64 {
        let at = kind as usize;
        let Some(whole) = &self.throttle.buckets[at] else { return now };
        match (part, self.share(kind)) {
            (BucketKind::Share, Some(share)) => {
                let sharers = self.throttle.waiting[at].sharers(now);
                share.bucket.claim(now, units, whole.times(now, sharers))
            }
            _ => whole.claim(now, units, Times::ONE),
        }
    }

    /// Credit that a queue claimed and has not used when it goes. Of a share each unit may have
    /// counted for more: what counts is that it is not more that comes back.
    pub(crate) fn give_back(&self, kind: LimitKind, part: BucketKind, units: u64) {
        let whole = self.throttle.buckets[kind as usize].as_ref();
        let bucket = match (part, self.share(kind)) {
            (BucketKind::Share, Some(share)) => Some(&share.bucket),
            _ => whole,
        };
        bucket.into_iter().for_each(|bucket| bucket.give_back(units));
    }

    /// What a request took beyond its credit is taken off the next ones. Its own disk pays for all of
    /// it, and a group for as much as may keep the others waiting for two seconds, whatever the number
    /// of requests and queues.
    pub(crate) fn owe(&self, kind: LimitKind, part: BucketKind, now: u64, units: u64) {
        match (part, self.share(kind), &self.throttle.buckets[kind as usize]) {
            (BucketKind::Whole, Some(share), Some(whole)) => whole.owe(now, units, &share.paid),
            _ => _ = self.claim(kind, part, now, units),
        }
    }

    /// When this disk has paid for what it has taken.
    fn opens(&self, kind: LimitKind) -> u64 {
        let share = self.share(kind).map(|share| &share.bucket);
        let own = share.or(self.throttle.buckets[kind as usize].as_ref());
        own.map_or(0, Bucket::opens)
    }

    /// A queue goes that has taken a request in advance: those that begin wait until it is paid for.
    pub(crate) fn shut(&self, kind: LimitKind) {
        self.shut_until[kind as usize].fetch_max(self.opens(kind), Relaxed);
    }

    /// A request has passed that the limit had nothing left for.
    pub(crate) fn went_past(&self, kind: LimitKind, part: BucketKind) {
        // Counted once, by what is the disk's own.
        if part == BucketKind::Share || self.shares.is_none() {
            self.past[kind as usize].fetch_add(1, Relaxed);
        }
    }

    /// True if one more may.
    pub(crate) fn may_go_past(&self, kind: LimitKind, now: u64) -> bool {
        let past = &self.past[kind as usize];
        if self.opens(kind) <= now {
            past.store(0, Relaxed);
        }
        past.load(Relaxed) < PAST_MAX
    }

    /// Until when a queue that begins may take no request of this kind in advance.
    pub(crate) fn shut_until(&self, kind: LimitKind) -> u64 {
        self.shut_until[kind as usize].load(Relaxed)
    }

    /// A queue of this disk waits.
    pub(crate) fn mark(&self, kind: LimitKind, now: u64) {
        if let Some(share) = self.share(kind) {
            self.throttle.waiting[kind as usize].mark(now, &share.seen);
        }
    }
}

/// Which bucket of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BucketKind {
    /// The one that all disks of a group share, or that of a disk alone.
    Whole,
    /// What is this disk's of it.
    Share,
}
