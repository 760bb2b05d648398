//! A campaign: the daemon is killed again and again under verified traffic, and started again; the
//! front-end reconnects and goes on.

#![allow(missing_docs, reason = "a tool of tests; its counts are named")]

mod daemon;
mod faults;
mod image;
mod killer;
mod limits;
pub mod oracle;
mod plan;
mod shared;
mod trouble;
mod writer;

use crate::Rng;
use anyhow::{Context, Result, bail};
use daemon::Daemon;
use faults::Faults;
use hdrhistogram::Histogram;
use killer::Killer;
use oracle::{Findings, Oracle, SECTOR};
pub use plan::{End, Harm, Plan, Points};
use plan::{QUEUES, SECTORS, first_sector};
use ringway_core::kill_points::Point;
use ringway_driver::Options;
use serde_json::json;
use shared::Shared;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use writer::Writer;

/// How often held requests are tried again.
const RETRY: Duration = Duration::from_millis(2);

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
    /// How many of a daemon together with its helper.
    pub all: u64,
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
    /// How often daemons said that requests had waited for a limit.
    pub throttled: u64,
    pub findings: Findings,
    /// From the last kill to the first completion of a request issued after it, in microseconds.
    pub reattach: Histogram<u64>,
    pub elapsed: Duration,
    /// The image and the last logs, if something was wrong.
    pub kept: Option<PathBuf>,
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
        Ok(mut outcome) => {
            outcome.findings.note(daemon::last_words(folder.path()));
            Ok(Outcome { kept: Some(folder.keep()), ..outcome })
        }
        Err(error) => {
            let (said, dir) = (daemon::last_words(folder.path()), folder.keep());
            Err(error).with_context(|| format!("image and logs: {}\n{said}", dir.display()))
        }
    }
}

fn run_in(plan: &Plan, dir: &Path) -> Result<Outcome> {
    let begun = Instant::now();
    image::make(plan, dir)?;
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
    let faults = Faults::in_life(plan, 1, &mut random);
    let daemon = Daemon::start(plan, dir, 1, None, faults)?;
    let mut device = options.connect(dir.join("s"))?;
    let shared = Shared::first(plan, dir, &mut random);
    let mut writers = Vec::new();
    for (queue, number) in device.queues()?.into_iter().zip(0..) {
        let oracle = Oracle::new(plan.seed, first_sector(number), SECTORS);
        let random = Rng::new(random.next_u64());
        let writer = Writer::new(queue, &device, oracle, random, (plan.depth, plan.patience));
        let mut writer = writer.context("not enough shared memory")?;
        writer.faults = plan.faults.then(|| Faults::of(plan));
        writers.push(writer);
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
        all: 0,
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
        if has_points { &[Some(Point::Drained), Some(Point::BaseAnswered), None] } else { &[None] };
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
            daemon.end(End::Terminated)?;
            compare(plan, dir, &mut writers, &shared)?;
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
    let Killer {
        early, kills, at, missed, all, reattach, durable_lives, resizes, disconnects, ..
    } = killer;
    let first = u64::from(has_points);
    let findings = shared.findings().clone();
    Ok(Outcome {
        kills: kills + first,
        early: early + first,
        at,
        missed,
        all,
        requests: writers.iter().map(|writer| writer.done).sum(),
        overtaken: writers.iter().map(|writer| writer.overtaken).sum(),
        refused: writers.iter().map(|writer| writer.refused).sum(),
        durable_lives,
        flushes_failed: writers.iter().map(|writer| writer.flushes_failed).sum(),
        resizes,
        disconnects,
        throttled: shared.throttled.load(Relaxed),
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
        bail!(
            "this daemon knows no points: build it with debug assertions or --features kill-points, or strike never"
        );
    }
    let status = daemon.0.wait()?;
    if status.code().is_some() {
        bail!("the daemon ended by itself: {status}");
    }
    Ok(())
}

/// Has held requests tried again, again and again.
fn retry(dir: &Path, shared: &Shared) {
    while !shared.stop.load(Relaxed) {
        let _ = daemon::ask(dir, &json!({"command": "retry", "disk": 0}));
        std::thread::sleep(RETRY);
    }
}

/// Lets the queues work for as long as `act` takes.
fn traffic<T>(writers: &mut [Writer], shared: &Shared, act: impl FnOnce() -> T) -> T {
    shared.stop.store(false, Relaxed);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            writers.iter_mut().map(|writer| scope.spawn(|| writer.run(shared))).collect();
        let holds = shared.holds.as_ref().map(|dir| scope.spawn(move || retry(dir, shared)));
        let limits = shared.limits.as_ref().map(|(dir, seed)| {
            scope.spawn(move || limits::operate(dir, shared, &mut Rng::new(*seed)))
        });
        let result = act();
        shared.stop.store(true, Relaxed);
        holds.into_iter().chain(limits).for_each(|operator| drop(operator.join()));
        let panicked = threads.into_iter().any(|thread| thread.join().is_err());
        assert!(!panicked, "a queue's thread panicked");
        result
    })
}

/// Compares the file itself with all that was acknowledged.
fn compare(plan: &Plan, dir: &Path, writers: &mut [Writer], shared: &Shared) -> Result<()> {
    image::judge(plan, dir, plan.kills)?;
    image::flatten(plan, dir)?;
    let image = File::open(dir.join("disk.img"))?;
    let mut bytes = vec![0; SECTORS * SECTOR];
    for writer in writers {
        image.read_exact_at(&mut bytes, writer.oracle.offset(&(0..SECTORS)))?;
        writer.oracle.judge(&(0..SECTORS), &bytes, &mut shared.findings());
    }
    Ok(())
}
