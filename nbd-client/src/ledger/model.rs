//! Every order in which two connections of an export, its server and its guest can do their steps: a search
//! through all states, with the real [`Ledger`] in it (hazard F15).
//!
//! What is simulated: a server that forgets what is not durable when it is started anew; answers that stay in
//! a socket after their server has gone; a connection that breaks though its server lives; how connections are
//! given up and made anew (`supervisor.rs`). A flush that succeeds has to have made durable whatever its guest
//! had answers for when it was asked.

use super::Ledger;
use std::collections::{HashSet, VecDeque};

const LANES: usize = 2;
/// How far the search goes.
const WRITES: u8 = 2;
const FLUSHES_MAX: u8 = 2;
const STARTS_MAX: u8 = 2;
const BREAKS_MAX: u8 = 1;

/// Rules that are left out, on purpose: the search has to find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A lost connection is made anew while the other one is used on.
    OthersGoOn,
    /// A new connection is used before the other one is there.
    UsedBeforeAllAreThere,
    /// A connection is judged by what it has answered itself.
    CountsAlone,
    /// A flush covers what is answered until it succeeds.
    CoversLateAnswers,
    /// Nobody judges a connection that is given up because another one is lost.
    RetreatsUnjudged,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Answer {
    Write(u8),
    Flush,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Lane {
    /// Which start of the server it reaches, or has reached.
    server: Option<u8>,
    /// It is made anew, and not used yet.
    new: Option<u8>,
    /// Answers that were not read.
    answers: VecDeque<Answer>,
    /// Writes that were sent and not answered to the guest.
    sent: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flush {
    lane: usize,
    mark: u64,
    /// What the guest has answers for.
    covers: u8,
    sent: bool,
}

/// Written, flushed, lost.
type Count = (u64, u64, bool);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    starts: u8,
    breaks: u8,
    flushes: u8,
    /// Sets of writes.
    cached: u8,
    durable: u8,
    answered: u8,
    lanes: [Lane; LANES],
    flush: Option<Flush>,
    counts: [Count; LANES],
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(usize, u8),
    Flush(usize),
    SendFlush,
    Read(usize),
    StartServer,
    Break(usize),
    Notice(usize),
    Retreat(usize),
    Connect(usize),
    Use,
}

fn steps() -> Vec<Step> {
    let mut all = vec![Step::SendFlush, Step::StartServer, Step::Use];
    for lane in 0..LANES {
        all.extend((0..WRITES).map(|write| Step::Write(lane, 1 << write)));
        let of = [Step::Flush, Step::Read, Step::Break, Step::Notice, Step::Retreat, Step::Connect];
        all.extend(of.map(|step| step(lane)));
    }
    all
}

impl State {
    fn ledger<T>(&mut self, lane: usize, mistake: Mistake, act: impl FnOnce(&Ledger) -> T) -> T {
        let count = &mut self.counts[if mistake == Mistake::CountsAlone { lane } else { 0 }];
        let ledger = Ledger {
            written: count.0.into(),
            flushed: count.1.into(),
            lost: count.2.into(),
            ..Ledger::default()
        };
        let told = act(&ledger);
        *count =
            (ledger.written.into_inner(), ledger.flushed.into_inner(), ledger.lost.into_inner());
        told
    }

    fn reaches(&self, lane: usize) -> bool {
        self.lanes[lane].server == Some(self.starts)
    }

    /// As `Connection::lose`.
    fn lose(&mut self, lane: usize, judged: bool, mistake: Mistake) {
        if judged {
            self.ledger(lane, mistake, Ledger::connection_lost);
        }
        self.lanes[lane] = Lane::default();
        if let Some(flush) = self.flush.as_mut().filter(|flush| flush.lane == lane) {
            flush.sent = false;
            if self.ledger(lane, mistake, Ledger::is_lost) {
                self.flush = None;
            }
        }
    }

    /// As `Connection::done`. False if the guest is told of a flush that did not do what it has to.
    fn read(&mut self, lane: usize, mistake: Mistake) -> Option<bool> {
        match self.lanes[lane].answers.pop_front()? {
            Answer::Write(write) => {
                self.lanes[lane].sent &= !write;
                self.answered |= write;
                self.ledger(lane, mistake, Ledger::write_answered);
            }
            Answer::Flush => {
                let flush = self.flush.take()?;
                let late = mistake == Mistake::CoversLateAnswers;
                let lost = self.ledger(lane, mistake, |ledger| {
                    ledger.flush_answered(if late { ledger.mark() } else { flush.mark });
                    ledger.is_lost()
                });
                return Some(lost || flush.covers & !self.durable == 0);
            }
        }
        Some(true)
    }

    /// What comes of a step, if it can be taken.
    fn after(&self, step: Step, mistake: Mistake) -> Option<(Self, bool)> {
        let mut next = self.clone();
        let alone = mistake == Mistake::OthersGoOn;
        match step {
            Step::Write(lane, write) => {
                let sent = self.lanes.iter().fold(self.answered, |sent, lane| sent | lane.sent);
                let can = self.reaches(lane) && sent & write == 0;
                can.then_some(())?;
                next.cached |= write;
                next.lanes[lane].sent |= write;
                next.lanes[lane].answers.push_back(Answer::Write(write));
            }
            Step::Flush(lane) => {
                let can = self.flush.is_none() && self.flushes < FLUSHES_MAX;
                (can && !next.ledger(lane, mistake, Ledger::is_lost)).then_some(())?;
                next.flushes += 1;
                let mark = next.ledger(lane, mistake, Ledger::mark);
                next.flush = Some(Flush { lane, mark, covers: self.answered, sent: false });
            }
            Step::SendFlush => {
                let flush = next.flush.as_mut().filter(|flush| !flush.sent)?;
                self.reaches(flush.lane).then_some(())?;
                flush.sent = true;
                next.durable |= std::mem::take(&mut next.cached);
                next.lanes[flush.lane].answers.push_back(Answer::Flush);
            }
            Step::Read(lane) => {
                let good = next.read(lane, mistake)?;
                return Some((next, good));
            }
            Step::StartServer => {
                (self.starts < STARTS_MAX).then_some(())?;
                next.starts += 1;
                next.cached = 0;
            }
            Step::Break(lane) => {
                (self.breaks < BREAKS_MAX && self.reaches(lane)).then_some(())?;
                next.breaks += 1;
                next.lose(lane, true, mistake);
            }
            Step::Notice(lane) => {
                let server = self.lanes[lane].server?;
                (server < self.starts && self.lanes[lane].answers.is_empty()).then_some(())?;
                next.lose(lane, true, mistake);
            }
            Step::Retreat(lane) => {
                let lost =
                    self.lanes.iter().any(|lane| lane.server.is_none() && lane.new.is_none());
                (lost && !alone && self.lanes[lane].server.is_some()).then_some(())?;
                next.lose(lane, mistake != Mistake::RetreatsUnjudged, mistake);
            }
            Step::Connect(lane) => {
                let gone = alone || self.lanes.iter().all(|lane| lane.server.is_none());
                let early = mistake == Mistake::UsedBeforeAllAreThere;
                let fresh = self.lanes[lane].server.is_none() && self.lanes[lane].new.is_none();
                (fresh && (gone || early)).then_some(())?;
                next.lanes[lane].new = Some(self.starts);
            }
            Step::Use => {
                let early = alone || mistake == Mistake::UsedBeforeAllAreThere;
                let all = self.lanes.iter().all(|lane| lane.new.is_some());
                (all || early && self.lanes.iter().any(|lane| lane.new.is_some())).then_some(())?;
                for lane in next.lanes.iter_mut().filter(|lane| lane.new.is_some()) {
                    lane.server = lane.new.take();
                }
            }
        }
        Some((next, true))
    }
}

/// How many states there are, and the steps to the first in which a guest is told what is not so.
fn search(mistake: Mistake) -> (usize, Option<Vec<Step>>) {
    let mut begin = State::default();
    begin.lanes.iter_mut().for_each(|lane| lane.server = Some(0));
    let (mut seen, mut next) = (HashSet::from([begin.clone()]), VecDeque::new());
    next.push_back((begin, Vec::new()));
    let steps = steps();
    while let Some((state, way)) = next.pop_front() {
        for &step in &steps {
            let Some((then, good)) = state.after(step, mistake) else { continue };
            if good && !seen.insert(then.clone()) {
                continue;
            }
            let mut way = way.clone();
            way.push(step);
            if !good {
                return (seen.len(), Some(way));
            }
            next.push_back((then, way));
        }
    }
    (seen.len(), None)
}

#[test]
fn f15_no_order_of_events_has_a_guest_believe_what_is_lost() {
    let (states, wrong) = search(Mistake::None);
    assert!(wrong.is_none(), "{wrong:?}");
    // It went somewhere.
    assert!(states > 10_000, "{states} states");
}

#[test]
fn f15_each_rule_of_the_supervisor_is_needed() {
    for mistake in [
        Mistake::OthersGoOn,
        Mistake::UsedBeforeAllAreThere,
        Mistake::CountsAlone,
        Mistake::CoversLateAnswers,
        Mistake::RetreatsUnjudged,
    ] {
        assert!(search(mistake).1.is_some(), "nobody notices {mistake:?}");
    }
}
