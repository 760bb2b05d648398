//! Measures, tries, and chooses between [`Path::Bio`] and [`Path::Request`].
//!
//! Merging wins where an operation costs the disk much beside its bytes, and loses where it costs
//! little; no property of a disk that can be asked for tells which. So the choice is made by trying
//! both ways in turns and comparing bytes per second (`docs/adr/` argues the rule):
//!
//! ```text
//!        would neighbours meet? is the disk slow enough to care? has it rested?
//! Bio ────────────────────────────────────────────────────────────────────────► Trial
//!  ▲ ▲                                                 request, bio, bio, request │
//!  │ └── request did not carry more in both turns ────────────────────────────────┤
//!  │                                                                              ▼
//!  └── nothing merges any more, or another trial was lost ───────────────────── Request
//! ```
//!
//! It never flaps. A choice changes only if *every* turn of the other path was better than every
//! turn of the present one, to request by 3 %. A trial begins with a
//! quarter of the requests adjacent, and request is left for want of merging below a sixteenth. And
//! trials rest: one that changed nothing doubles the time until the next one under the same load,
//! and whatever did not last doubles it under any load.

use crate::Path;

/// The time between looks, in nanoseconds. Queues report about as often.
pub const LOOK_NS: u64 = 20_000_000;

const SECOND: u64 = 1_000_000_000;

/// Requests that have to be seen before the share of neighbours means anything.
const ENOUGH: u64 = 32;

/// Requests a trial needs in each turn, unless [`LEG_MAX_NS`] is over.
const LEG_REQUESTS: u64 = 256;
/// After a change of path: until queues have taken it up and what is in flight is through.
const SETTLE_NS: u64 = SECOND / 50;
/// The least and the longest turn of a trial. Four of the longest, with settling, stay below a
/// second. Their order is A, B, B, A: a drift or a load that comes and goes favours nobody.
const LEG_MIN_NS: u64 = SECOND / 25;
const LEG_MAX_NS: u64 = SECOND / 5;
const LEGS: usize = 4;
/// Fewer requests than this in a turn: there is no load to measure.
const LEG_IDLE: u64 = 8;

/// A disk that takes less than this for a request has nothing to win: sorting costs as much.
const FAST_NS: u64 = 500;

/// The shortest and the longest rest between trials.
const REST_MIN_NS: u64 = SECOND;
const REST_MAX_NS: u64 = 64 * SECOND;

/// What is taken back or tried again sooner has not lasted.
const LASTING_NS: u64 = 5 * SECOND;

/// What queues have seen since they were asked last. Sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Reads and writes completed, and their bytes.
    pub requests: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Requests looked at while the path was bio.
    pub sampled: u64,
    /// Those that would have met a neighbour in flight.
    pub adjacent: u64,
    /// Requests in flight, themselves included, when they started.
    pub in_flight: u64,
    /// Those of them that are done.
    pub timed: u64,
    /// Nanoseconds that these took.
    pub latency: u64,
    /// Requests sent by the request path, and those of them that went along with another one.
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
    #[must_use]
    pub fn service_ns(&self) -> u64 {
        let latency = self.latency / self.timed.max(1);
        latency * self.sampled.max(1) / self.in_flight.max(1)
    }

    /// True if the request path could win: neighbours meet, requests queue, the disk is no faster
    /// than the sorting.
    #[must_use]
    pub fn may_merge(&self) -> bool {
        self.adjacent * 4 >= self.sampled
            && self.in_flight >= self.sampled * 2
            && self.service_ns() >= FAST_NS
    }
}

/// What one turn of a trial carried.
#[derive(Clone, Copy, Debug, Default)]
struct Leg {
    bytes: u64,
    ns: u64,
}

impl Leg {
    /// Bytes per second.
    fn rate(self) -> u128 {
        u128::from(self.bytes) * u128::from(SECOND) / u128::from(self.ns.max(1))
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Settled,
    /// Trying; the legs before `leg` are over. First and last are on the path that is not `home`.
    Trial {
        leg: usize,
        legs: [Leg; LEGS],
        /// When the path was changed, and since when it is measured.
        changed: u64,
        measured: Option<u64>,
    },
}

/// The choice for one disk.
#[derive(Debug)]
pub struct Auto {
    /// The path outside of trials.
    home: Path,
    state: State,
    /// What was seen since it was last judged or cleared.
    pub(crate) seen: Seen,
    since: u64,
    looked: u64,
    /// No trial before this.
    rested: u64,
    /// The rest after a trial that changed nothing, under the same load.
    patience: u64,
    /// The rest after anything, under any load.
    caution: u64,
    /// When the last trial ended, and when `home` last changed.
    tried: u64,
    switched: u64,
    switches: u64,
}

impl Auto {
    /// Begins with bio: nothing is known yet, and it costs nothing. `now` in nanoseconds.
    #[must_use]
    pub fn new(now: u64) -> Self {
        Self {
            home: Path::Bio,
            state: State::Settled,
            seen: Seen::default(),
            since: now,
            looked: now,
            rested: now,
            patience: REST_MIN_NS,
            caution: REST_MIN_NS,
            tried: now,
            switched: now,
            switches: 0,
        }
    }

    /// The path to use now.
    #[must_use]
    pub fn path(&self) -> Path {
        match self.state {
            State::Trial { leg: 0 | 3, .. } => other(self.home),
            _ => self.home,
        }
    }

    /// The path that was chosen; trials leave it alone.
    #[must_use]
    pub fn chosen(&self) -> Path {
        self.home
    }

    /// How often the choice has changed.
    #[must_use]
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Takes in what queues have seen since they were asked last, and judges if it is time.
    pub fn look(&mut self, now: u64, seen: &Seen) {
        self.seen.add(seen);
        if now.saturating_sub(self.looked) < LOOK_NS {
            return;
        }
        self.looked = now;
        match self.state {
            State::Trial { .. } => self.leg(now),
            State::Settled if self.home == Path::Bio => self.judge_bio(now),
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
            self.patience = REST_MIN_NS;
            self.rested = self.rested.min(self.tried.max(self.switched) + self.caution);
        } else if now >= self.rested {
            return self.try_other(now);
        }
        self.clear(now);
    }

    fn judge_request(&mut self, now: u64) {
        let enough = self.seen.plugged >= LEG_REQUESTS
            || (self.seen.plugged >= ENOUGH && now - self.since >= LEG_MAX_NS);
        if !enough {
            return;
        }
        if self.seen.merged * 16 < self.seen.plugged {
            self.settle(now, Path::Bio);
        } else if now >= self.rested {
            return self.try_other(now);
        }
        self.clear(now);
    }

    fn try_other(&mut self, now: u64) {
        let legs = [Leg::default(); LEGS];
        self.state = State::Trial { leg: 0, legs, changed: now, measured: None };
        self.clear(now);
    }

    /// One look during a trial.
    fn leg(&mut self, now: u64) {
        let State::Trial { leg, mut legs, changed, measured } = self.state else { return };
        let Some(begun) = measured else {
            if now - changed >= SETTLE_NS {
                self.state = State::Trial { leg, legs, changed, measured: Some(now) };
                self.clear(now);
            }
            return;
        };
        let ns = now - begun;
        if ns < LEG_MIN_NS || (self.seen.requests < LEG_REQUESTS && ns < LEG_MAX_NS) {
            return;
        }
        if self.seen.requests < LEG_IDLE {
            // The load has gone: nothing was found out, and nothing was lost.
            self.state = State::Settled;
            (self.tried, self.rested) = (now, now + REST_MIN_NS);
            return self.clear(now);
        }
        legs[leg] = Leg { bytes: self.seen.bytes, ns };
        self.clear(now);
        if leg + 1 < LEGS {
            self.state = State::Trial { leg: leg + 1, legs, changed: now, measured: None };
        } else {
            self.decide(now, &legs);
        }
    }

    fn decide(&mut self, now: u64, legs: &[Leg; LEGS]) {
        let [away, home] = [[legs[0], legs[3]], [legs[1], legs[2]]].map(|two| two.map(Leg::rate));
        // Request has to be worth it.
        let margin = if self.home == Path::Bio { 103 } else { 100 };
        let leave = away[0].min(away[1]) * 100 > home[0].max(home[1]) * margin;
        self.state = State::Settled;
        let since = now - self.tried;
        self.tried = now;
        if leave {
            return self.settle(now, other(self.home));
        }
        self.be_cautious(since);
        self.patience = (self.patience * 2).min(REST_MAX_NS);
        self.rested = now + self.patience.max(self.caution);
    }

    fn settle(&mut self, now: u64, path: Path) {
        // Request has just won: bio gets its chance later.
        self.patience = LASTING_NS;
        if path == Path::Bio {
            self.be_cautious(now - self.switched);
            self.patience = REST_MIN_NS;
        }
        self.rested = now + self.patience.max(self.caution);
        self.home = path;
        self.state = State::Settled;
        self.switched = now;
        self.switches += 1;
    }

    /// Something ended `ns` after it had begun: too soon, or after a calm.
    fn be_cautious(&mut self, ns: u64) {
        if ns < LASTING_NS {
            self.caution = (self.caution * 2).min(REST_MAX_NS);
        } else if ns >= REST_MAX_NS / 2 {
            self.caution = (self.caution / 2).max(REST_MIN_NS);
        }
    }
}

const fn other(path: Path) -> Path {
    match path {
        Path::Bio => Path::Request,
        Path::Request => Path::Bio,
    }
}

#[cfg(test)]
mod tests;
