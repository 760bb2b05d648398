//! A campaign: the daemon is killed again and again under verified traffic, and started again; the
//! front-end reconnects and goes on.

#![allow(missing_docs, reason = "a tool of tests; its counts are named")]

mod daemon;
mod faults;
mod killer;
pub mod oracle;
mod writer;

use crate::Rng;
use anyhow::{Context, Result, bail};
use daemon::Daemon;
use faults::Faults;
use hdrhistogram::Histogram;
use killer::Killer;
use oracle::{Findings, Oracle, SECTOR};
use ringway_core::kill_points::Point;
use ringway_driver::{Options, SchedulerMode};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use writer::Writer;

const QUEUES: u16 = 2;
/// Bytes of the image.
const BYTES: u64 = 64 << 20;
/// Sectors that each queue uses, few so that each is written often.
const SECTORS: usize = 2048;
/// How a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Told,
}

/// How many of the kills strike at a named point of the protocol
/// ([`kill_points`](ringway_core::kill_points)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Points {
    /// None: any daemon will do.
    Never,
    /// Every other one.
    Half,
    /// All but the first.
    Always,
}

impl Points {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Half => "half",
            Self::Always => "always",
        }
    }
}

/// A mistake made on purpose half-way, which has to be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// The sectors of one queue are what they were in the beginning.
    Lost,
    /// The sectors of one queue are what memory given back holds.
    Replayed,
    /// A successor is stopped, and answers nothing.
    Missing,
    /// A successor takes the write cache to be on whatever it was.
    Volatile,
    /// A successor does not know that a flush has failed.
    Forgotten,
}

impl Harm {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Lost, Self::Replayed, Self::Missing, Self::Volatile, Self::Forgotten];
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program.
    pub ringway: PathBuf,
    pub engine: String,
    pub cache: String,
    pub packed: bool,
    /// Of the front-end.
    pub path: SchedulerMode,
    pub kills: u64,
    pub end: End,
    pub points: Points,
    /// Requests in flight on each of two queues.
    pub depth: u16,
    pub seed: u64,
    /// Where image and socket are put, in a folder of their own [temporary files' place].
    pub dir: Option<PathBuf>,
    /// How long anything may take.
    pub patience: Duration,
    pub harm: Option<Harm>,
    /// Other faults between kills: see `faults.rs`. Needs points.
    pub faults: bool,
    /// Called now and then with the number of kills so far.
    pub progress: fn(&Plan, u64),
}

impl Plan {
    /// The name of the ring's format.
    pub fn ring(&self) -> &'static str {
        if self.packed { "packed" } else { "split" }
    }
}

/// The command that repeats it: the same requests and delays; where exactly a kill strikes depends
/// on the machine too.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, engine, cache, depth, seed, points, .. } = self;
        write!(
            f,
            "cargo run --release -p xtask -- kill --count {kills} --engine {engine} --ring {} \
             --cache {cache} --depth {depth} --seed {seed} --points {}",
            self.ring(),
            points.name()
        )?;
        if self.path != SchedulerMode::Bio {
            write!(f, " --path {}", self.path)?;
        }
        if self.faults {
            write!(f, " --faults")?;
        }
        self.harm.map_or(Ok(()), |harm| write!(f, " --harm {harm:?}"))
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    pub kills: u64,
    /// How many of them before traffic had resumed.
    pub early: u64,
    /// How many of them at each point, those at the start and the end of the campaign included.
    pub at: BTreeMap<Point, u64>,
    /// How many were to strike at a point that was not reached.
    pub missed: u64,
    pub requests: u64,
    /// How many requests completed after one that was issued later.
    pub overtaken: u64,
    /// Requests that failed, as they had to.
    pub refused: u64,
    /// Lives that served a guest without a write cache from their first request on, and were asked
    /// whether all was durable.
    pub durable_lives: u64,
    /// Flushes that failed, each with a reason.
    pub flushes_failed: u64,
    /// Sizes that daemons were asked for.
    pub resizes: u64,
    /// Times the client disconnected in order and came back.
    pub disconnects: u64,
    pub findings: Findings,
    /// From the last kill to the first completion of a request issued after it, in microseconds.
    pub reattach: Histogram<u64>,
    pub elapsed: Duration,
    /// The image and the last logs, if something was wrong.
    pub kept: Option<PathBuf>,
}

/// Between the queues' threads and the one that kills.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// A queue is over.
    fatal: AtomicBool,
    /// Daemons that have ended, and one.
    life: AtomicU64,
    findings: Mutex<Findings>,
    /// A flush was answered with an error: no later one may succeed.
    flush_failed: AtomicBool,
    /// A daemon was told to have a sync fail.
    sync_fails: AtomicBool,
    /// The guest's write cache may have been off, so that writes were durable.
    cache_off: AtomicBool,
    /// The latest life in which a request was issued and completed, and when.
    resumed: Mutex<(u64, Option<Instant>)>,
    has_resumed: Condvar,
}

impl Shared {
    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request of this life is complete: only the daemon of this life can have done it.
    fn resumed(&self, life: u64) {
        let now = Instant::now();
        let mut last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        if life > last.0 {
            *last = (life, Some(now));
            self.has_resumed.notify_all();
        }
    }

    /// When traffic resumed in this life, if it does within `patience`.
    fn wait_resumed(&self, life: u64, patience: Duration) -> Option<Instant> {
        let last = self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.has_resumed.wait_timeout_while(last, patience, |last| last.0 < life);
        let (last, _) = waited.unwrap_or_else(PoisonError::into_inner);
        last.1.filter(|_| last.0 == life)
    }
}

/// Runs it. What is wrong with the daemon is in the outcome; an error means that it could not be
/// carried out, or that a daemon ended by itself.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut folder = tempfile::Builder::new();
    let folder = folder.prefix("ringway-kill-");
    let folder = match &plan.dir {
        Some(dir) => folder.tempdir_in(dir).with_context(|| dir.display().to_string())?,
        None => folder.tempdir()?,
    };
    let result = run_in(plan, folder.path());
    match result {
        Ok(outcome) if outcome.findings.is_empty() => Ok(outcome),
        Ok(outcome) => Ok(Outcome { kept: Some(folder.keep()), ..outcome }),
        Err(error) => {
            let dir = folder.keep();
            Err(error).with_context(|| format!("image and logs: {}", dir.display()))
        }
    }
}

fn run_in(plan: &Plan, dir: &Path) -> Result<Outcome> {
    let begun = Instant::now();
    File::create(dir.join("disk.img"))?.set_len(BYTES)?;
    let options = Options::new()
        .queues(QUEUES)
        .queue_size((plan.depth * 4).next_power_of_two())
        .memory(16 << 20)
        .packed(plan.packed)
        .path(plan.path)
        .patience(plan.patience)
        .timeout(plan.patience)
        .reconnect(plan.patience);
    let has_points = plan.points != Points::Never;
    let mut at = BTreeMap::new();
    if has_points {
        no_record(plan, dir, &options)?;
        at.insert(Point::RecordMade, 1);
    }
    let mut random = Rng::new(plan.seed);
    let faults = plan.faults.then(|| Faults::of(plan).variable(1, &mut random));
    let daemon = Daemon::start(plan, dir, 1, None, faults)?;
    let mut device = options.connect(dir.join("s"))?;
    let shared = Shared::default();
    shared.life.store(1, Relaxed);
    let mut writers = Vec::new();
    for (queue, number) in device.queues()?.into_iter().zip(0..) {
        let oracle = Oracle::new(plan.seed, first_sector(number), SECTORS);
        let random = Rng::new(random.next_u64());
        let mut writer = Writer::new(queue, &device, oracle, random, (plan.depth, plan.patience));
        if let Some(writer) = &mut writer {
            writer.faults = plan.faults.then(|| Faults::of(plan));
        }
        writers.push(writer.context("not enough shared memory")?);
    }
    let mut killer = Killer {
        plan,
        dir,
        random,
        shared: &shared,
        early: 0,
        kills: 0,
        at,
        missed: 0,
        reattach: Histogram::new(3)?,
        killed: None,
        cache: None,
        durable_lives: 0,
        resizes: 0,
        disconnects: 0,
        stopped: false,
    };
    // How the last daemons end: while they are told to stop their queues, and in good order.
    let ends: &[_] =
        if has_points { &[Some(Point::Drained), Some(Point::Told), None] } else { &[None] };
    // The daemon comes back out: it has to live until the queues are done.
    let mut ended = traffic(&mut writers, &shared, || killer.work(&mut device, daemon, ends[0]));
    for (at, &last) in ends.iter().enumerate() {
        if shared.fatal.load(Relaxed) {
            // Not every request came back, so the image has no one right content; the daemon dies
            // here.
            if let Err(error) = ended {
                shared.findings().note(format!("{error:#}"));
            }
            break;
        }
        let mut daemon = ended?;
        let stopped = device.stop();
        let Some(point) = last else {
            stopped?;
            daemon.end(End::Told)?;
            compare(dir, &mut writers, &shared)?;
            break;
        };
        if stopped.is_ok() {
            bail!("the queues were stopped by a daemon that was to die at {point:?}");
        }
        let status = daemon.0.wait()?;
        let life = shared.life.fetch_add(1, Relaxed) + 1;
        if status.code().is_some() {
            bail!("the daemon ended by itself: {status}");
        }
        *killer.at.entry(point).or_default() += 1;
        killer.kills += 1;
        killer.early += 1;
        let dies = ends[at + 1].map(|point| (point, 1));
        let mut daemon = Daemon::start(plan, dir, life, dies, None)?;
        device.reconnect()?;
        ended = traffic(&mut writers, &shared, || {
            killer.resume(&mut daemon)?;
            std::thread::sleep(Duration::from_millis(10));
            Ok(daemon)
        });
    }
    let Killer { early, kills, at, missed, reattach, durable_lives, resizes, disconnects, .. } =
        killer;
    let first = u64::from(has_points);
    let findings = shared.findings().clone();
    Ok(Outcome {
        kills: kills + first,
        early: early + first,
        at,
        missed,
        requests: writers.iter().map(|writer| writer.done).sum(),
        overtaken: writers.iter().map(|writer| writer.overtaken).sum(),
        refused: writers.iter().map(|writer| writer.refused).sum(),
        durable_lives,
        flushes_failed: writers.iter().map(|writer| writer.flushes_failed).sum(),
        resizes,
        disconnects,
        findings,
        reattach,
        elapsed: begun.elapsed(),
        kept: None,
    })
}

/// A daemon dies before it hands a record out: the front-end hears of it, and the next one serves.
fn no_record(plan: &Plan, dir: &Path, options: &Options) -> Result<()> {
    let mut daemon = Daemon::start(plan, dir, 0, Some((Point::RecordMade, 1)), None)?;
    if options.clone().connect(dir.join("s")).is_ok() {
        bail!("this daemon knows no points: build it with --features kill-points, or strike never");
    }
    let status = daemon.0.wait()?;
    if status.code().is_some() {
        bail!("the daemon ended by itself: {status}");
    }
    Ok(())
}

/// Lets the queues work for as long as `act` takes.
fn traffic<T>(writers: &mut [Writer], shared: &Shared, act: impl FnOnce() -> T) -> T {
    shared.stop.store(false, Relaxed);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            writers.iter_mut().map(|writer| scope.spawn(|| writer.run(shared))).collect();
        let result = act();
        shared.stop.store(true, Relaxed);
        let panicked = threads.into_iter().any(|thread| thread.join().is_err());
        assert!(!panicked, "a queue's thread panicked");
        result
    })
}

/// Where the sectors of a queue begin.
const fn first_sector(queue: u64) -> u64 {
    queue * (BYTES / QUEUES as u64 / SECTOR as u64)
}

/// Compares the file itself with all that was acknowledged.
fn compare(dir: &Path, writers: &mut [Writer], shared: &Shared) -> Result<()> {
    let image = File::open(dir.join("disk.img"))?;
    let mut bytes = vec![0; SECTORS * SECTOR];
    for writer in writers {
        image.read_exact_at(&mut bytes, writer.oracle.offset(&(0..SECTORS)))?;
        writer.oracle.judge(&(0..SECTORS), &bytes, &mut shared.findings());
    }
    Ok(())
}
