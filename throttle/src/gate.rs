//! One queue's hand on the limits of its disk (hot, if there are any).
//!
//! ```text
//! if gate.open(wanted, clock) {            // once a turn
//!     while gate.is_open() { … gate.take(op, bytes) }
//!     gate.settle(clock)
//! } else { sleep for gate.wait(now) }
//! ```

use super::bucket::REQUEST;
use super::member::{Member, Part};
use super::rates::Kind;
use ringway_core::Op;
use std::sync::Arc;

/// Portions in a second: credit is taken for half a millisecond at a time.
const PORTIONS: u64 = 2000;

/// The longest time until a queue that waits looks again: that is how the others of a group know that
/// it still waits.
pub(crate) const LOOK_NS: u64 = 100_000_000;

/// A closed gate looks at the clock once in so many turns of a worker that others keep busy.
const SKIP: u32 = 7;

/// Credit from one bucket.
#[derive(Debug)]
struct Tap {
    member: Arc<Member>,
    kind: Kind,
    part: Part,
    portion: u64,
    /// Units that may be used now. A request is taken while there are any, whatever it costs.
    credit: i64,
    /// Units that were taken and may be used from `ripe_at` on; 0 if there are none.
    claimed: u64,
    ripe_at: u64,
    /// A request was taken on those before they were ripe.
    overdrawn: bool,
}

impl Tap {
    fn new(member: Arc<Member>, kind: Kind, part: Part) -> Self {
        let one = if kind.counts_requests() { REQUEST } else { 1 };
        let portion = (member.rate(kind) / PORTIONS).max(one);
        let (credit, claimed, ripe_at, overdrawn) = (0, 0, 0, false);
        Self { member, kind, part, portion, credit, claimed, ripe_at, overdrawn }
    }

    /// Whether it counts such requests; those that are neither reads nor change the disk cost nothing.
    fn counts(&self, op: Op) -> bool {
        match self.kind {
            Kind::Iops | Kind::Bps => op == Op::Read || op.changes_disk(),
            Kind::IopsRead | Kind::BpsRead => op == Op::Read,
            Kind::IopsWrite | Kind::BpsWrite => op.changes_disk(),
        }
    }

    fn is_for_all(&self) -> bool {
        matches!(self.kind, Kind::Iops | Kind::Bps)
    }

    fn cost(&self, bytes: u64) -> i64 {
        let size = self.member.request_bytes();
        let units = match self.kind.counts_requests() {
            false => bytes,
            true if bytes <= size => REQUEST,
            true => {
                let units = u128::from(bytes) * u128::from(REQUEST) / u128::from(size);
                u64::try_from(units).unwrap_or(u64::MAX)
            }
        };
        i64::try_from(units).unwrap_or(i64::MAX)
    }

    /// Takes the next portion if there is no credit. True if there is some now.
    fn refill(&mut self, wanted: bool, now: u64) -> bool {
        if self.claimed == 0 {
            self.ripe_at = self.member.claim(self.kind, self.part, now, self.portion);
            self.claimed = self.portion;
        }
        if self.ripe_at > now {
            if wanted {
                self.member.mark(self.kind, now);
            }
            return false;
        }
        self.credit = self.credit.saturating_add_unsigned(std::mem::take(&mut self.claimed));
        self.overdrawn = false;
        true
    }
}

/// One queue's hand on all limits of its disk.
#[derive(Debug)]
pub struct Gate {
    taps: Box<[Tap]>,
    open: bool,
    /// Closed until then.
    until: Option<u64>,
    /// Since when.
    since: u64,
    /// Turns until the next look at the clock.
    skip: u32,
    throttled_ns: u64,
}

impl Gate {
    /// For a queue of a disk that has these limits; none if they limit nothing.
    #[must_use]
    pub fn new(members: Vec<Arc<Member>>) -> Option<Self> {
        let taps = members.iter().flat_map(|member| {
            member.taps().map(|(kind, part)| Tap::new(Arc::clone(member), kind, part))
        });
        let mut taps: Box<[Tap]> = taps.collect();
        // What closes the whole queue comes first: nothing is taken from the others meanwhile.
        taps.sort_by_key(|tap| !tap.is_for_all());
        let (open, until, since, skip, throttled_ns) = (false, None, 0, 0, 0);
        (!taps.is_empty()).then_some(Self { taps, open, until, since, skip, throttled_ns })
    }

    /// Whether requests may be taken in this turn; `wanted` if there are any. The time is asked for
    /// once, if at all. To nobody who wants nothing it is closed: [`Gate::is_closed`] says no then.
    ///
    /// What the next request of a ring is, nobody knows before it is taken. So one request of a kind
    /// whose credit is used up is taken in advance, and only then the queue waits: a limit of writes
    /// does not keep reads waiting that come before the next write.
    pub fn open(&mut self, wanted: bool, clock: impl FnOnce() -> u64) -> bool {
        if self.until.is_some() && self.skip > 0 && wanted {
            self.skip -= 1;
            return false;
        }
        if self.until.is_none() && self.taps.iter().all(|tap| tap.credit > 0) {
            self.open = true;
            return true;
        }
        self.refill(wanted, clock());
        self.open
    }

    fn refill(&mut self, wanted: bool, now: u64) {
        if self.until.is_some() {
            self.throttled_ns += now.saturating_sub(self.since);
        }
        let mut closes = None;
        for tap in &mut self.taps {
            if tap.credit > 0 || tap.refill(wanted, now) || !(tap.is_for_all() || tap.overdrawn) {
                continue;
            }
            closes = Some(tap.ripe_at);
            break;
        }
        (self.open, self.until) = (closes.is_none(), closes.filter(|_| wanted));
        (self.since, self.skip) = (now, SKIP);
    }

    /// Whether one more request may be taken in this turn.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// A request was taken, for so many bytes of the disk.
    pub fn take(&mut self, op: Op, bytes: u64) {
        for tap in &mut self.taps {
            if tap.counts(op) {
                tap.credit = tap.credit.saturating_sub(tap.cost(bytes));
                tap.overdrawn |= tap.claimed > 0;
                self.open &= tap.credit > 0;
            }
        }
    }

    /// At the end of a turn: what was taken beyond the credit is taken off the buckets.
    pub fn settle(&mut self, clock: impl FnOnce() -> u64) {
        if self.taps.iter().all(|tap| tap.credit >= 0) {
            return;
        }
        let now = clock();
        for tap in self.taps.iter_mut().filter(|tap| tap.credit < 0) {
            tap.member.owe(tap.kind, tap.part, now, tap.credit.unsigned_abs());
            tap.credit = 0;
        }
    }

    /// True if it was closed when it was asked last.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.until.is_some()
    }

    /// In how many nanoseconds a closed gate is to be asked again; none if it is not closed.
    pub fn wait(&mut self, now: u64) -> Option<u64> {
        // After that the clock has moved on.
        self.skip = 0;
        self.until.map(|until| until.saturating_sub(now).min(LOOK_NS))
    }

    /// How long it has been closed in all, in nanoseconds.
    #[must_use]
    pub fn throttled_ns(&self, now: u64) -> u64 {
        let since = self.until.map_or(0, |_| now.saturating_sub(self.since));
        self.throttled_ns.saturating_add(since)
    }
}
