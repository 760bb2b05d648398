//! Measures, tries, and chooses between [`Policy::Bio`] and [`Policy::Request`].
//!
//! Merging wins where an operation costs the disk much beside its bytes, and loses where it costs
//! little; no property of a disk that can be asked for tells which. So the choice is made by trying
//! both policies in turns and comparing bytes per second (`docs/adr/` argues the rule):
//!
//! ```text
//!        would neighbours meet? is the disk slow enough to care? is a trial due?
//! Bio ────────────────────────────────────────────────────────────────────────► Trial
//!  ▲ ▲                                                 request, bio, bio, request │
//!  │ └── request did not carry more in both turns ────────────────────────────────┤
//!  │                                                                              ▼
//!  └── nothing merges any more, or another trial was lost ───────────────────── Request
//! ```
//!
//! It never flaps. A choice changes only if *every* turn of the other policy was better than every
//! turn of the present one, to request by 3 %. A trial begins with a
//! quarter of the requests adjacent, and request is left for want of merging below a sixteenth. And
//! trials back off: one that changed nothing doubles the time until the next one under the same load,
//! and whatever did not last doubles it under any load.

use crate::mode::Policy;

/// The time between judgements, in nanoseconds. Queues report about as often.
pub const REPORT_NS: u64 = 20_000_000;

const SECOND: u64 = 1_000_000_000;

/// Requests that have to be seen before the share of neighbours means anything.
const ENOUGH: u64 = 32;

/// Requests a trial needs in each turn, unless [`TURN_MAX_NS`] is over.
const TURN_REQUESTS: u64 = 256;
/// After a change of policy: until queues have taken it up and what is in flight is through.
const SETTLE_NS: u64 = SECOND / 50;
/// The least and the longest turn of a trial. Four of the longest, with settling, stay below a
/// second. Their order is A, B, B, A: a drift or a load that comes and goes favours nobody.
const TURN_MIN_NS: u64 = SECOND / 25;
const TURN_MAX_NS: u64 = SECOND / 5;
const TURNS: usize = 4;
/// Fewer requests than this in a turn: there is no load to measure.
const TURN_IDLE: u64 = 8;

/// A disk that takes less than this for a request has nothing to win: sorting costs as much.
const FAST_NS: u64 = 500;

/// The shortest and the longest time between trials.
const BACKOFF_MIN_NS: u64 = SECOND;
const BACKOFF_MAX_NS: u64 = 64 * SECOND;

/// What is taken back or tried again sooner has not lasted.
const LASTING_NS: u64 = 5 * SECOND;

/// What queues have seen since they were asked last. Sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Reads and writes completed, and their bytes.
    pub requests: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Requests last_judged at while the policy was bio.
    pub sampled: u64,
    /// Those that would have met a neighbour in flight.
    pub adjacent: u64,
    /// Requests in flight, themselves included, when they started.
    pub in_flight: u64,
    /// Those of them that are done.
    pub timed: u64,
    /// Nanoseconds that these took.
    pub latency: u64,
    /// Requests sent by the policy request, and those of them that went along with another one.
    pub plugged: u64,
    /// Those of them that went along with another one.
    pub merged: u64,
}

impl Seen {
    /// Adds what another queue has seen.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.sampled += other.sampled;
        self.adjacent += other.adjacent;
        self.in_flight += other.in_flight;
        self.timed += other.timed;
        self.latency += other.latency;
        self.plugged += other.plugged;
        self.merged += other.merged;
    }

    /// Nanoseconds of the disk per request, as Little's law has it: the time that each took, shared
    /// by those that were in flight together.
    fn service_ns(&self) -> u64 {
        let latency = self.latency / self.timed.max(1);
        latency * self.sampled.max(1) / self.in_flight.max(1)
    }

    /// True if the policy request could win: neighbours meet, requests queue, the disk is no faster
    /// than the sorting.
    fn may_merge(&self) -> bool {
        self.adjacent * 4 >= self.sampled
            && self.in_flight >= self.sampled * 2
            && self.service_ns() >= FAST_NS
    }
}

/// What one turn of a trial carried.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    bytes: u64,
    ns: u64,
}

impl Turn {
    /// Bytes per second.
    fn rate(self) -> u128 {
        u128::from(self.bytes) * u128::from(SECOND) / u128::from(self.ns.max(1))
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Settled,
    /// Trying; the turns before `turn` are over. The first and the last are on the candidate, the
    /// policy that is not `current`.
    Trial {
        turn: usize,
        turns: [Turn; TURNS],
        /// When the policy was changed, and since when it is measured.
        changed: u64,
        measured: Option<u64>,
    },
}

/// The choice for one disk.
#[derive(Debug)]
pub struct Auto {
    /// The policy outside of trials.
    current: Policy,
    state: State,
    /// What was seen since it was last judged or cleared.
    pub(crate) seen: Seen,
    since: u64,
    last_judged: u64,
    /// No trial before this.
    next_trial: u64,
    /// The time after a trial that changed nothing, under the same load.
    trial_backoff_ns: u64,
    /// The time after anything, under any load.
    flap_backoff_ns: u64,
    /// When the last trial ended, and when `current` last changed.
    last_trial: u64,
    last_switch: u64,
    switches: u64,
}

impl Auto {
    /// Begins with bio: nothing is known yet, and it costs nothing. `now` in nanoseconds.
    #[must_use]
    pub fn new(now: u64) -> Self {
        Self {
            current: Policy::Bio,
            state: State::Settled,
            seen: Seen::default(),
            since: now,
            last_judged: now,
            next_trial: now,
            trial_backoff_ns: BACKOFF_MIN_NS,
            flap_backoff_ns: BACKOFF_MIN_NS,
            last_trial: now,
            last_switch: now,
            switches: 0,
        }
    }

    /// The policy to use now.
    #[must_use]
    pub fn policy(&self) -> Policy {
        match self.state {
            State::Trial { turn: 0 | 3, .. } => other(self.current),
            _ => self.current,
        }
    }

    /// The policy that was chosen; trials leave it alone.
    #[must_use]
    pub fn chosen(&self) -> Policy {
        self.current
    }

    /// How often the choice has changed.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Takes in what queues have seen since they were asked last, and judges if it is time.
    pub fn observe(&mut self, now: u64, seen: &Seen) {
        self.seen.add(seen);
        if now.saturating_sub(self.last_judged) < REPORT_NS {
            return;
        }
        self.last_judged = now;
        match self.state {
            State::Trial { .. } => self.measure_turn(now),
            State::Settled if self.current == Policy::Bio => self.judge_bio(now),
            State::Settled => self.judge_request(now),
        }
    }

    fn clear(&mut self, now: u64) {
        self.seen = Seen::default();
        self.since = now;
    }

    fn judge_bio(&mut self, now: u64) {
        if self.seen.sampled < ENOUGH || self.seen.timed == 0 {
            return;
        }
        if !self.seen.may_merge() {
            // Another load than the one that was tried: what was found out then counts no more.
            self.trial_backoff_ns = BACKOFF_MIN_NS;
            self.next_trial =
                self.next_trial.min(self.last_trial.max(self.last_switch) + self.flap_backoff_ns);
        } else if now >= self.next_trial {
            return self.try_other(now);
        }
        self.clear(now);
    }

    fn judge_request(&mut self, now: u64) {
        let enough = self.seen.plugged >= TURN_REQUESTS
            || (self.seen.plugged >= ENOUGH && now - self.since >= TURN_MAX_NS);
        if !enough {
            return;
        }
        if self.seen.merged * 16 < self.seen.plugged {
            self.settle(now, Policy::Bio);
        } else if now >= self.next_trial {
            return self.try_other(now);
        }
        self.clear(now);
    }

    fn try_other(&mut self, now: u64) {
        let turns = [Turn::default(); TURNS];
        self.state = State::Trial { turn: 0, turns, changed: now, measured: None };
        self.clear(now);
    }

    /// One report during a trial.
    fn measure_turn(&mut self, now: u64) {
        let State::Trial { turn, mut turns, changed, measured } = self.state else { return };
        let Some(begun) = measured else {
            if now - changed >= SETTLE_NS {
                self.state = State::Trial { turn, turns, changed, measured: Some(now) };
                self.clear(now);
            }
            return;
        };
        let ns = now - begun;
        if ns < TURN_MIN_NS || (self.seen.requests < TURN_REQUESTS && ns < TURN_MAX_NS) {
            return;
        }
        if self.seen.requests < TURN_IDLE {
            // The load has gone: nothing was found out, and nothing was lost.
            self.state = State::Settled;
            (self.last_trial, self.next_trial) = (now, now + BACKOFF_MIN_NS);
            return self.clear(now);
        }
        turns[turn] = Turn { bytes: self.seen.bytes, ns };
        self.clear(now);
        if turn + 1 < TURNS {
            self.state = State::Trial { turn: turn + 1, turns, changed: now, measured: None };
        } else {
            self.decide(now, &turns);
        }
    }

    fn decide(&mut self, now: u64, turns: &[Turn; TURNS]) {
        let [candidate, current] =
            [[turns[0], turns[3]], [turns[1], turns[2]]].map(|two| two.map(Turn::rate));
        // Request has to be worth it.
        let margin = if self.current == Policy::Bio { 103 } else { 100 };
        let leave = candidate[0].min(candidate[1]) * 100 > current[0].max(current[1]) * margin;
        self.state = State::Settled;
        let since = now - self.last_trial;
        self.last_trial = now;
        if leave {
            return self.settle(now, other(self.current));
        }
        self.adjust_flap_backoff(since);
        self.trial_backoff_ns = (self.trial_backoff_ns * 2).min(BACKOFF_MAX_NS);
        self.next_trial = now + self.trial_backoff_ns.max(self.flap_backoff_ns);
    }

    fn settle(&mut self, now: u64, policy: Policy) {
        // Request has just won: bio gets its chance later.
        self.trial_backoff_ns = LASTING_NS;
        if policy == Policy::Bio {
            self.adjust_flap_backoff(now - self.last_switch);
            self.trial_backoff_ns = BACKOFF_MIN_NS;
        }
        self.next_trial = now + self.trial_backoff_ns.max(self.flap_backoff_ns);
        self.current = policy;
        self.state = State::Settled;
        self.last_switch = now;
        self.switches += 1;
    }

    /// Something ended `ns` after it had begun: too soon, or after a calm.
    fn adjust_flap_backoff(&mut self, ns: u64) {
        if ns < LASTING_NS {
            self.flap_backoff_ns = (self.flap_backoff_ns * 2).min(BACKOFF_MAX_NS);
        } else if ns >= BACKOFF_MAX_NS / 2 {
            self.flap_backoff_ns = (self.flap_backoff_ns / 2).max(BACKOFF_MIN_NS);
        }
    }
}

const fn other(policy: Policy) -> Policy {
    match policy {
        Policy::Bio => Policy::Request,
        Policy::Request => Policy::Bio,
    }
}

#[cfg(test)]
mod tests;
