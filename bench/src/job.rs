//! One job: keeps its slots in flight and takes the time of each request (hot).
//!
//! A turn takes a few completions, asks for as many again and shows them at once; the target never
//! waits for the rest of the depth. The clock is read twice per turn: when completions are seen, and
//! when the new requests have been shown. A job that only counts reads it once in [`LAZY_TURNS`].

pub(crate) mod after;

use crate::backend::{Ask, Backend, Effort};
use crate::counters::Tick;
use crate::pattern::Pattern;
use crate::rate_limit::RateLimit;
use crate::record::Record;
use crate::verifier::{Judged, Verifier};
use anyhow::Result;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// The longest sleep, in nanoseconds: then it looks whether it is to stop.
const NAP_NS: u64 = 100_000_000;

/// The driver sleeps for whole milliseconds; whoever is due sooner looks instead.
const SHORTEST_NAP_NS: u64 = 2_000_000;

/// Turns without a completion between two looks at the clock, for a job that polls; and at the
/// server, which takes a system call.
const TURNS_PER_CLOCK: u32 = 4096;
const TURNS_PER_CHECK: u32 = 64 * TURNS_PER_CLOCK;

/// Turns of a job that only counts between two looks at the clock.
const LAZY_TURNS: u32 = 64;

/// When to count, in nanoseconds since `epoch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub epoch: Instant,
    /// Requests that complete before this are not counted.
    pub begin_ns: u64,
    pub end_ns: u64,
    pub tick_ns: u64,
}

impl Schedule {
    #[inline]
    fn now(&self) -> u64 {
        // 584 years.
        #[allow(clippy::cast_possible_truncation)]
        let now = self.epoch.elapsed().as_nanos() as u64;
        now
    }
}

/// What one job is told.
pub(crate) struct JobSetup<'a> {
    /// Which one, from 0.
    pub index: usize,
    pub depth: u32,
    /// Completions taken before the requests that replace them are shown.
    pub batch: u32,
    pub polling: bool,
    /// Takes the time of each request.
    pub timed: bool,
    pub pattern: Pattern,
    pub verifier: Option<Verifier>,
    /// What to leave for later readers, but for how far it came.
    pub record: Option<Record>,
    pub limit: Option<RateLimit>,
    /// Bytes to ask for in all, if there is an end to them.
    pub budget: Option<u64>,
    pub schedule: Schedule,
    pub stop: &'a AtomicBool,
    pub news: Sender<News>,
    pub empty: Receiver<Box<Tick>>,
}

/// What a job tells while it works.
#[derive(Debug)]
pub(crate) enum News {
    /// What a job did in the tick of this number.
    Tick { job: usize, number: usize, tick: Box<Tick> },
    /// Nothing more is counted.
    Counted(Counted),
}

/// What a job knows at the end of counting.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// When the last request of a budget was done.
    pub ended_ns: Option<u64>,
    pub effort: Option<Effort>,
}

/// A job at work.
struct Job<'a, P> {
    backend: P,
    setup: JobSetup<'a>,
    /// Of each slot: its request, when it was queued, and shown.
    asks: Vec<Ask>,
    queued: Vec<u64>,
    shown: Vec<u64>,
    free: Vec<u32>,
    fresh: Vec<u32>,
    in_flight: u32,
    tick: Box<Tick>,
    tick_number: usize,
    tick_end: u64,
    last_done: u64,
    /// Turns that found something, if only they are counted.
    turns: u32,
    base: Option<Effort>,
    /// A write that waits for its place: a request in flight has it.
    held: Option<Ask>,
}

/// Does a job; returns what it has judged.
///
/// # Errors
/// The first request that failed, or data that is wrong.
pub(crate) fn run<P: Backend>(backend: P, setup: JobSetup<'_>) -> Result<Judged> {
    let depth = setup.depth as usize;
    let mut job = Job {
        asks: vec![Ask::default(); depth],
        queued: vec![0; depth],
        shown: vec![0; depth],
        free: (0..setup.depth).rev().collect(),
        fresh: Vec::with_capacity(depth),
        in_flight: 0,
        tick: Box::default(),
        tick_number: 0,
        tick_end: setup.schedule.begin_ns + setup.schedule.tick_ns,
        last_done: 0,
        turns: 0,
        base: None,
        held: None,
        backend,
        setup,
    };
    job.prepare();
    job.work()?;
    job.drain()?;
    job.hand_over();
    job.read_back()?;
    job.leave_record()
}

impl<P: Backend> Job<'_, P> {
    /// Nothing that a clever disk could compress or find twice.
    fn prepare(&mut self) {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for slot in 0..self.setup.depth {
            for word in self.backend.memory(slot).chunks_exact_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                word.copy_from_slice(&state.to_le_bytes());
            }
        }
    }

    fn work(&mut self) -> Result<()> {
        let mut idle_turns = 0u32;
        let mut now = self.setup.schedule.now();
        loop {
            self.refill(now)?;
            let found = self.reap()?;
            if found > 0 {
                idle_turns = 0;
                now = self.last_done;
            } else {
                idle_turns = idle_turns.wrapping_add(1);
                if !self.setup.polling {
                    self.rest()?;
                } else if idle_turns % TURNS_PER_CHECK == 0 {
                    self.backend.check()?;
                } else if idle_turns % TURNS_PER_CLOCK != 0 && self.setup.limit.is_none() {
                    // Only whoever keeps to a rate has to know the time.
                    std::hint::spin_loop();
                    continue;
                }
                now = self.setup.schedule.now();
                if !self.setup.timed {
                    self.last_done = now;
                }
            }
            let spent = self.setup.budget == Some(0) && self.in_flight == 0;
            if now >= self.setup.schedule.end_ns || spent || self.setup.stop.load(Relaxed) {
                return Ok(());
            }
        }
    }

    /// Takes completions, a batch at most.
    #[inline(always)]
    fn reap(&mut self) -> Result<u32> {
        let mut found = 0;
        while found < self.setup.batch {
            let Some((slot, ok)) = self.backend.pop()? else { break };
            if found == 0 {
                self.turns = self.turns.wrapping_add(1);
                if self.setup.timed || self.turns % LAZY_TURNS == 0 {
                    self.last_done = self.setup.schedule.now();
                }
            }
            found += 1;
            self.in_flight -= 1;
            let ask = self.asks[slot as usize];
            if !ok {
                return Err(self.failed(&ask));
            }
            self.count(slot, &ask);
            if let Some(verifier) = &mut self.setup.verifier {
                verifier.settle(&ask, self.backend.memory(slot))?;
            }
            self.free.push(slot);
        }
        Ok(found)
    }

    #[inline(always)]
    fn count(&mut self, slot: u32, ask: &Ask) {
        let now = self.last_done;
        if now < self.setup.schedule.begin_ns {
            return;
        }
        if now >= self.tick_end || self.base.is_none() {
            self.turn_page(now);
        }
        let side = &mut self.tick.sides[usize::from(ask.write)];
        if now < self.setup.schedule.end_ns {
            side.count(ask.len);
        } else {
            side.late += 1;
        }
        if self.setup.timed {
            let (queued, shown) = (self.queued[slot as usize], self.shown[slot as usize]);
            side.time(shown.saturating_sub(queued), now.saturating_sub(shown));
        }
    }

    /// Hands over what was counted in a tick that is over.
    #[cold]
    fn turn_page(&mut self, now: u64) {
        if self.base.is_none() {
            self.base = Some(self.backend.counted().unwrap_or_default());
        }
        if now < self.tick_end {
            return;
        }
        self.send();
        let Schedule { begin_ns, end_ns, tick_ns, .. } = self.setup.schedule;
        // What is seen a little late belongs to the last tick.
        let within = now.min(end_ns - 1) - begin_ns;
        self.tick_number = usize::try_from(within / tick_ns).unwrap_or(usize::MAX);
        self.tick_end = begin_ns + (self.tick_number as u64 + 1) * tick_ns;
    }

    fn send(&mut self) {
        if self.tick.all() == 0 {
            return;
        }
        let next = self.setup.empty.try_recv().unwrap_or_default();
        let full = std::mem::replace(&mut self.tick, next);
        // Nobody listens if another job has failed.
        let (job, number) = (self.setup.index, self.tick_number);
        let _ = self.setup.news.send(News::Tick { job, number, tick: full });
    }

    /// Asks with every free slot, as far as rate and budget allow, and shows all of it.
    #[inline(always)]
    fn refill(&mut self, now: u64) -> Result<()> {
        while let Some(&slot) = self.free.last() {
            if self.setup.budget == Some(0) {
                break;
            }
            let mut queued = now;
            if let Some(limit) = &self.setup.limit {
                if limit.due() > now {
                    break;
                }
                // A target that stalls makes requests late: that is part of their latency.
                queued = limit.due();
            }
            let mut ask = self.held.take().unwrap_or_else(|| self.setup.pattern.next());
            if self.setup.verifier.is_some() && !self.find_room(&mut ask) {
                break;
            }
            self.free.pop();
            self.start(slot, ask, queued)?;
        }
        if self.fresh.is_empty() {
            return Ok(());
        }
        self.backend.submit()?;
        if self.setup.timed {
            let shown = self.setup.schedule.now();
            for &slot in &self.fresh {
                self.shown[slot as usize] = shown;
            }
        }
        self.fresh.clear();
        Ok(())
    }

    #[inline(always)]
    fn start(&mut self, slot: u32, ask: Ask, queued: u64) -> Result<()> {
        if ask.write {
            let memory = self.backend.memory(slot);
            match &mut self.setup.verifier {
                Some(verifier) => verifier.fill(&ask, memory),
                // No two blocks are the same.
                None => memory[..8].copy_from_slice(&(ask.offset ^ queued).to_le_bytes()),
            }
        }
        if let Some(limit) = &mut self.setup.limit {
            limit.spend(ask.len);
        }
        if let Some(budget) = &mut self.setup.budget {
            *budget = budget.saturating_sub(ask.len.into());
        }
        self.queued[slot as usize] = queued;
        self.asks[slot as usize] = ask;
        self.backend.start(slot, &ask)?;
        self.fresh.push(slot);
        self.in_flight += 1;
        Ok(())
    }

    /// Moves a read to where nothing is in flight; a write waits for its place, as each has one. False
    /// if it cannot be sent now.
    #[cold]
    fn find_room(&mut self, ask: &mut Ask) -> bool {
        const TRIES: u32 = 64;
        let Some(verifier) = &mut self.setup.verifier else { return true };
        for _ in 0..TRIES {
            if verifier.take(ask) {
                return true;
            }
            if ask.write {
                self.held = Some(*ask);
                return false;
            }
            ask.offset = self.setup.pattern.place(ask.len.into());
        }
        false
    }

    /// Sleeps until a completion comes, or a request is due.
    fn rest(&mut self) -> Result<()> {
        let now = self.setup.schedule.now();
        let nap = NAP_NS.min(self.setup.schedule.end_ns.saturating_sub(now));
        let due = match &self.setup.limit {
            Some(limit) if !self.free.is_empty() => limit.due().saturating_sub(now),
            _ => u64::MAX,
        };
        if self.in_flight == 0 {
            std::thread::sleep(Duration::from_nanos(nap.min(due)));
        } else if due >= nap {
            self.backend.wait(Duration::from_nanos(nap))?;
        } else if due >= SHORTEST_NAP_NS {
            self.backend.wait(Duration::from_nanos(due - SHORTEST_NAP_NS / 2))?;
        }
        Ok(())
    }

    #[cold]
    fn failed(&self, ask: &Ask) -> anyhow::Error {
        let what = if ask.write { "write" } else { "read" };
        let Ask { offset, len, .. } = ask;
        anyhow::anyhow!(
            "a {what} of {len} bytes at offset {offset} failed: {}",
            self.backend.complaint()
        )
    }
}
