//! Leaky buckets, shared by threads without a lock.
//!
//! A bucket fills with what passes and leaks at its rate. What is kept of it is one number: when it
//! will be dry. Its level is the time until then, in nanoseconds of its rate.

use super::rates::Rate;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SECOND_NS: u128 = 1_000_000_000;

/// How long a bucket takes to run dry if no burst was asked for: a tenth of a second's worth passes at
/// once. Guests send in batches, of which every other one would have to wait otherwise.
const ROOM_NS: u64 = 100_000_000;

/// No bucket is said to be dry later than this: 292 years.
const NEVER: u64 = u64::MAX >> 1;

/// Units of cost to a request, so that a part of one can be told.
pub(crate) const REQUEST: u64 = 1024;

#[derive(Debug)]
struct Leak {
    /// Units that leak in a second.
    rate: u64,
    /// How long it takes to run dry when it is full.
    room_ns: u64,
    dry_at: AtomicU64,
}

impl Leak {
    fn new(rate: u64, room_ns: u64) -> Self {
        Self { rate, room_ns, dry_at: AtomicU64::new(0) }
    }

    /// Pours `units` in, each as if it were so many. When what comes after it may pass.
    fn pour(&self, now: u64, units: u64, Times(times): Times) -> u64 {
        let cost = u128::from(units) * u128::from(times) * SECOND_NS;
        let cost = cost / u128::from(Times::ONE.0) / u128::from(self.rate);
        let cost = u64::try_from(cost).unwrap_or(NEVER);
        let mut dry_at = self.dry_at.load(Relaxed);
        loop {
            let from = dry_at.max(now);
            let to = from.saturating_add(cost).min(NEVER);
            match self.dry_at.compare_exchange_weak(dry_at, to, Relaxed, Relaxed) {
                Ok(_) => return from.saturating_sub(self.room_ns),
                Err(other) => dry_at = other,
            }
        }
    }
}

/// What a unit counts for, in 1024ths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times(u64);

impl Times {
    /// As one.
    pub(crate) const ONE: Self = Self(1024);
}

/// One limit: the rate of the long run, and that of a burst if it may last longer than a second.
///
/// On lines of its own: those who take from one bucket leave others alone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Bucket {
    long_run: Leak,
    burst: Option<Leak>,
}

impl Bucket {
    /// For a rate that was checked, with `unit` units to one of what it counts; none if it has no limit.
    pub(crate) fn new(rate: Rate, unit: u64) -> Option<Self> {
        let avg = rate.avg?;
        let length = rate.max_length.unwrap_or(1);
        let room = rate.max.map(|max| {
            let room = u128::from(max) * u128::from(length) * SECOND_NS / u128::from(avg);
            u64::try_from(room).unwrap_or(NEVER)
        });
        let burst = rate.max.filter(|_| length > 1).map(|max| Leak::new(max * unit, ROOM_NS));
        Some(Self { long_run: Leak::new(avg * unit, room.unwrap_or(ROOM_NS)), burst })
    }

    /// Units that leak in a second.
    pub(crate) fn rate(&self) -> u64 {
        self.long_run.rate
    }

    /// Takes `units` of credit: from when on they may be used. Whoever asks next gets a later time, so
    /// that all have their turn.
    pub(crate) fn claim(&self, now: u64, units: u64, times: Times) -> u64 {
        let from = self.long_run.pour(now, units, times);
        match &self.burst {
            None => from,
            Some(burst) => from.max(burst.pour(now, units, times)),
        }
    }

    /// What a unit of a disk's share counts for, if so many disks share this bucket. When it is nearly
    /// full, because others take some of it too, all shares become smaller alike, by half at most: so
    /// it is the shares that keep disks waiting, and not who comes first.
    pub(crate) fn times(&self, now: u64, sharers: u64) -> Times {
        let Leak { room_ns, dry_at, .. } = &self.long_run;
        let (level, quarter) = (dry_at.load(Relaxed).saturating_sub(now), (room_ns / 4).max(1));
        let above = level.saturating_sub(room_ns - quarter).min(quarter);
        let more = u128::from(above) * u128::from(Times::ONE.0) / u128::from(quarter);
        Times(sharers.saturating_mul(Times::ONE.0 + u64::try_from(more).unwrap_or(0)))
    }
}
