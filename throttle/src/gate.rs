//! One queue's hand on the limits of its disk (hot, if there are any).
//!
//! ```text
//! if gate.open(wanted, clock) {            // once a turn
//!     while gate.is_open() { … gate.take(op, bytes) }
//!     gate.settle(clock)
//! } else { sleep for gate.wait(now) }
//! ```

use super::bucket::REQUEST;
use super::member::{BucketKind, Member};
use super::rates::LimitKind;
use ringway_core::Op;
use std::sync::Arc;

/// Portions in a second: credit is taken for half a millisecond at a time.
const PORTIONS: u64 = 2000;

/// The longest time until a queue that waits looks again: that is how the others of a group know that
/// it still waits.
pub(crate) const RECHECK_NS: u64 = 100_000_000;

/// A closed gate looks at the clock once in so many turns of a worker that others keep busy.
const SKIP: u32 = 7;

/// Credit from one bucket.
#[derive(Debug)]
struct Tap {
    member: Arc<Member>,
    kind: LimitKind,
    part: BucketKind,
    portion: u64,
    /// Units that may be used now. A request is taken while there are any, whatever it costs.
    credit: i64,
    /// Units that were taken and may be used from `ripe_at` on; 0 if there are none.
    claimed: u64,
    ripe_at: u64,
    /// No request is taken in advance before that, or before those are ripe: one was.
    shut_until: u64,
}

impl Tap {
    fn new(member: Arc<Member>, kind: LimitKind, part: BucketKind) -> Self {
        let one = if kind.counts_requests() { REQUEST } else { 1 };
        let portion = (member.rate(kind) / PORTIONS).max(one);
        let (credit, claimed, ripe_at, shut_until) = (0, 0, 0, member.shut_until(kind));
        Self { member, kind, part, portion, credit, claimed, ripe_at, shut_until }
    }

    /// Whether it counts such requests. A flush is a request of no bytes, and neither a read nor a write; what only asks
    /// for a name costs nothing.
    fn counts(&self, op: Op) -> bool {
        match self.kind {
            LimitKind::Iops => op == Op::Read || op == Op::Flush || op.changes_disk(),
            LimitKind::Bps => op == Op::Read || op.changes_disk(),
            LimitKind::IopsRead | LimitKind::BpsRead => op == Op::Read,
            LimitKind::IopsWrite | LimitKind::BpsWrite => op.changes_disk(),
        }
    }

    fn is_for_all(&self) -> bool {
        matches!(self.kind, LimitKind::Iops | LimitKind::Bps)
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
        if self.shut_until <= now {
            self.shut_until = 0;
        }
        if self.claimed == 0 {
            if !wanted {
                return false;
            }
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
        self.shut_until = 0;
        true
    }

    /// Until when it closes the queue although it has no credit; none if one may be taken in advance.
    fn closes(&self) -> Option<u64> {
        (self.is_for_all() || self.shut_until > 0).then(|| match self.is_for_all() {
            true => self.ripe_at,
            false => self.ripe_at.min(self.shut_until),
        })
    }
}

/// What was claimed and not used goes back, and what was taken in advance is not forgotten: a queue
/// that begins anew has no more than one that goes on.
impl Drop for Tap {
    fn drop(&mut self) {
        let unused = u64::try_from(self.credit).unwrap_or(0).saturating_add(self.claimed);
        self.member.give_back(self.kind, self.part, unused);
        if self.shut_until > 0 {
            self.member.shut(self.kind);
        }
    }
}

/// One queue's hand on all limits of its disk.
#[derive(Debug)]
pub struct Gate {
    taps: Box<[Tap]>,
    open: bool,
    /// Requests pass although there is no credit for them; the disk pays later.
    lifted: bool,
    /// Closed until then.
    until: Option<u64>,
    /// Since when.
    since: u64,
    /// Turns until the next look at the clock.
    skip: u32,
    throttled: Throttled,
}

/// How often requests of a queue began to wait, and for how long they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Times.
    pub times: u64,
    /// Nanoseconds in all.
    pub ns: u64,
}

impl Throttled {
    /// Of two gates of one queue.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { times: self.times + other.times, ns: self.ns.saturating_add(other.ns) }
    }
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
        let (open, lifted, until, since, skip) = (false, false, None, 0, 0);
        let throttled = Throttled::default();
        (!taps.is_empty()).then_some(Self { taps, open, lifted, until, since, skip, throttled })
    }

    /// From now on requests pass at once, and the disk pays for them later: a bounded number, until it has.
    pub fn lift(&mut self, now: u64) {
        self.throttled = self.throttled(now);
        (self.lifted, self.until) = (true, None);
    }

    /// Whether requests may be taken in this turn; `wanted` if there are any. The time is asked for
    /// once, if at all. To nobody who wants nothing it is closed: [`Gate::is_closed`] says no then.
    ///
    /// What the next request of a ring is, nobody knows before it is taken. So one request of a kind
    /// whose credit is used up is taken in advance, and only then the queue waits: a limit of writes
    /// does not keep reads waiting that come before the next write.
    pub fn open(&mut self, wanted: bool, clock: impl FnOnce() -> u64) -> bool {
        if self.lifted {
            let now = if wanted { clock() } else { 0 };
            self.open = wanted && self.taps.iter().all(|tap| tap.member.may_go_past(tap.kind, now));
            return self.open;
        }
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
        let waited = self.until.is_some();
        if waited {
            self.throttled.ns += now.saturating_sub(self.since);
        }
        let (mut closes, mut without_share) = (None, None);
        for tap in &mut self.taps {
            // Of a group's bucket a disk takes nothing that it could not use yet.
            let idle = tap.claimed == 0 && without_share == Some(tap.kind);
            if tap.credit > 0 || (!idle && tap.refill(wanted, now)) {
                continue;
            }
            without_share = Some(tap.kind);
            closes = if idle { None } else { tap.closes() };
            if closes.is_some() {
                break;
            }
        }
        (self.open, self.until) = (closes.is_none(), closes.filter(|_| wanted));
        self.throttled.times += u64::from(!waited && self.until.is_some());
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
                if tap.credit <= 0 {
                    tap.shut_until = u64::MAX;
                    if self.lifted {
                        tap.member.went_past(tap.kind, tap.part);
                    }
                }
                tap.credit = tap.credit.saturating_sub(tap.cost(bytes));
                self.open &= tap.credit > 0 || self.lifted;
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
        self.until.map(|until| until.saturating_sub(now).min(RECHECK_NS))
    }

    /// How often it has been closed, and for how long in all.
    #[must_use]
    pub fn throttled(&self, now: u64) -> Throttled {
        let ns = self.until.map_or(0, |_| now.saturating_sub(self.since));
        self.throttled.and(Throttled { times: 0, ns })
    }
}
