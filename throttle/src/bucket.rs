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

/// How long one disk of a group may have the others wait by requests that cost more than their credit.
const OWED_MAX_NS: u64 = 2_000_000_000;

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

    /// How long `units` take to leak, each as if it were so many.
    fn cost(&self, units: u64, Times(times): Times) -> u64 {
        let cost = u128::from(units) * u128::from(times) * SECOND_NS;
        let cost = cost / u128::from(Times::ONE.0) / u128::from(self.rate);
        u64::try_from(cost).unwrap_or(NEVER)
    }

    /// Pours in what takes so long to leak. When what comes after it may pass.
    fn pour(&self, now: u64, cost: u64) -> u64 {
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

    /// Takes out again what was poured in and not used.
    fn give_back(&self, cost: u64) {
        let less = |dry_at: u64| Some(dry_at.saturating_sub(cost));
        let _ = self.dry_at.fetch_update(Relaxed, Relaxed, less);
    }

    /// When what is in it has leaked so far that more may pass.
    fn opens(&self) -> u64 {
        self.dry_at.load(Relaxed).saturating_sub(self.room_ns)
    }
}

/// What one disk has had a group pay beyond the credit that it took: it leaks at the group's rate.
#[derive(Debug, Default)]
pub(crate) struct Paid {
    long_run: AtomicU64,
    burst: AtomicU64,
}

/// How much of `cost` still fits, if the whole of it is to leak within `most`.
fn fit(dry_at: &AtomicU64, now: u64, cost: u64, most: u64) -> u64 {
    let until = |dry_at: u64| {
        let from = dry_at.max(now);
        from.saturating_add(cost).min(now.saturating_add(most)).max(from)
    };
    let before = dry_at.fetch_update(Relaxed, Relaxed, |dry_at| Some(until(dry_at)));
    before.map_or(0, |before| until(before) - before.max(now))
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
        let from = self.long_run.pour(now, self.long_run.cost(units, times));
        match &self.burst {
            None => from,
            Some(burst) => from.max(burst.pour(now, burst.cost(units, times))),
        }
    }

    /// Gives credit back that was taken and not used.
    pub(crate) fn give_back(&self, units: u64) {
        for leak in std::iter::once(&self.long_run).chain(&self.burst) {
            leak.give_back(leak.cost(units, Times::ONE));
        }
    }

    /// When it has paid for what was taken from it.
    pub(crate) fn opens(&self) -> u64 {
        let burst = self.burst.as_ref().map_or(0, Leak::opens);
        self.long_run.opens().max(burst)
    }

    /// Takes off what one disk of a group has taken beyond its credit, but of all that it has taken
    /// so not more than makes others wait for [`OWED_MAX_NS`].
    pub(crate) fn owe(&self, now: u64, units: u64, paid: &Paid) {
        let leaks = [(Some(&self.long_run), &paid.long_run), (self.burst.as_ref(), &paid.burst)];
        for (leak, paid) in leaks {
            let Some(leak) = leak else { continue };
            let most = leak.room_ns.saturating_add(OWED_MAX_NS);
            leak.pour(now, fit(paid, now, leak.cost(units, Times::ONE), most));
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
