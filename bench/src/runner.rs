//! All jobs of one measurement: a thread each, one schedule, and somebody who adds up.

use crate::counters::{Frames, Tick};
use crate::host::HostLook;
use crate::inside;
use crate::job::{Counted, JobSetup, News, Schedule};
use crate::load::Load;
use crate::outcome::Outcome;
use crate::pattern::Pattern;
use crate::rate_limit::RateLimit;
use crate::record::{self, Record};
use crate::round::Reached;
use crate::target::{Opened, Server};
use crate::usage::Usage;
use crate::verifier::{Judged, Verifier};
use anyhow::{Context, Result, anyhow};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

/// How often to look at signals, and to tell of progress.
const POLL_EVERY: Duration = Duration::from_millis(100);

/// Frames per measurement of known length.
const FRAMES: f64 = 120.0;

/// Seconds of a tick, at least and at most.
const TICK_SECONDS: (f64, f64) = (0.02, 1.0);

/// How far a measurement is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub seconds: f64,
    pub done: u64,
    pub bytes: u64,
}

/// Something to do when counting begins and when it ends.
pub(crate) type Boundary<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Measures a target. `boundary` is called when counting begins and when it ends.
///
/// # Errors
/// The first failed request, or a target that is gone.
pub fn measure(mut opened: Opened, load: &Load, boundary: Boundary<'_>) -> Result<Outcome> {
    run(&mut opened, load, &AtomicUsize::new(0), boundary, &mut |_| ())
}

/// Runs one job per handle. `signal` is not 0 once the program is to end.
///
/// # Errors
/// The first failed request, wrong data, or a target that is gone.
pub(crate) fn run(
    opened: &mut Opened,
    load: &Load,
    signal: &AtomicUsize,
    boundary: Boundary<'_>,
    watch: &mut dyn FnMut(Progress),
) -> Result<Outcome> {
    let handles = std::mem::take(&mut opened.handles);
    let jobs = handles.len();
    let (stop, schedule) = (AtomicBool::new(false), OnceLock::new());
    let (ready, go) = (Barrier::new(jobs + 1), Barrier::new(jobs + 1));
    let (news, heard) = channel();
    let region = load.region(opened.capacity, opened.block)?;
    let verifiers = verifiers(load, &region, jobs)?;
    let (block, budget) = (opened.block, load.budget_of(&region));
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut empties = Vec::new();
        for (index, (handle, (part, verifier))) in handles.into_iter().zip(verifiers).enumerate() {
            let (recycle, empty) = channel();
            empties.push(recycle);
            let (news, stop, schedule, ready, go) = (news.clone(), &stop, &schedule, &ready, &go);
            let region = &region;
            let thread = std::thread::Builder::new().name(format!("job-{index}"));
            threads.push(thread.spawn_scoped(scope, move || {
                let mut verifier = verifier;
                let backend = pin(&load.cpus, index).and_then(|()| handle());
                let backend = backend.and_then(|mut backend| {
                    if let Some(verifier) = verifier.as_mut().filter(|_| !load.rw.writes()) {
                        verifier.expect(backend.learn(load.seed, region, &part, block)?);
                    }
                    Ok(backend)
                });
                ready.wait();
                go.wait();
                let schedule = *schedule.get().expect("set before go");
                let done = backend.and_then(|backend| {
                    let setup = JobSetup {
                        index,
                        depth: load.depth * u32::from(load.queues),
                        batch: load.batch,
                        polling: load.polling,
                        timed: load.timed,
                        pattern: pattern(load, &part, index, jobs),
                        record: (load.verify && load.rw.writes())
                            .then(|| record(load, region, index, jobs)),
                        verifier,
                        limit: load
                            .rate
                            .map(|rate| RateLimit::new(rate, number(index), number(jobs), 0)),
                        budget: budget.map(|bytes| share(load, bytes, &part, region, jobs)),
                        schedule,
                        stop,
                        news,
                        empty,
                    };
                    backend.run(setup)
                });
                if done.is_err() {
                    stop.store(true, Relaxed);
                }
                done
            })?);
        }
        drop(news);
        ready.wait();
        let plan = Schedule::new(load);
        schedule.get_or_init(|| plan);
        go.wait();
        let watcher = Watcher { heard, empties, server: &opened.server, signal, stop: &stop };
        let outcome = watcher.run(load, &plan, jobs, boundary, watch);
        if outcome.is_err() {
            stop.store(true, Relaxed);
        }
        // Whoever failed says more than whoever was told to stop.
        let mut judged = Judged::default();
        for thread in threads {
            judged.add(&thread.join().map_err(|_| anyhow!("a job panicked"))??);
        }
        Ok(Outcome { judged, ..outcome? })
    })
}

/// The part of the region that is a job's own, and its verifier, if data is verified.
fn verifiers(
    load: &Load,
    region: &Range<u64>,
    jobs: usize,
) -> Result<Vec<(Range<u64>, Option<Verifier>)>> {
    let parts = load.parts(region, jobs)?;
    let unit = load.sizes.least().into();
    parts
        .into_iter()
        .map(|part| {
            let verifier = load
                .verify
                .then(|| Verifier::new(load.seed, &part, unit, load.rw.writes()))
                .transpose()?;
            Ok((part, verifier))
        })
        .collect()
}

fn pattern(load: &Load, part: &Range<u64>, index: usize, jobs: usize) -> Pattern {
    // Jobs that share a region go through it one behind the other.
    let behind = if load.verify { 0 } else { (part.end - part.start) / jobs as u64 * index as u64 };
    let seed = load.seed.wrapping_add(index as u64);
    let first = part.start + behind;
    let sizes = load.sizes.clone();
    let pattern = Pattern::new(load.rw, load.rwmixread.into(), sizes, part.clone(), first, seed);
    if load.verify {
        let stretch = load.sizes.most().into();
        let shuffled = load.rw.is_random();
        pattern.in_rounds(record::order(part.clone(), stretch, shuffled, load.seed))
    } else {
        pattern
    }
}

/// What a job that writes has to say of itself.
fn record(load: &Load, region: &Range<u64>, index: usize, jobs: usize) -> Record {
    Record {
        seed: load.seed,
        region: region.clone(),
        stretch: load.sizes.most().into(),
        jobs: jobs as u64,
        job: index as u64,
        shuffled: load.rw.is_random(),
        reached: Reached::default(),
    }
}

/// A job's share of the bytes to ask for: as large as its part of the region if it has one of its own.
fn share(load: &Load, bytes: u64, part: &Range<u64>, region: &Range<u64>, jobs: usize) -> u64 {
    if !load.verify {
        return bytes / jobs as u64;
    }
    let part = u128::from(part.end - part.start);
    let share = u128::from(bytes) * part / u128::from(region.end - region.start);
    u64::try_from(share).unwrap_or(u64::MAX)
}

fn pin(cpus: &[usize], index: usize) -> Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let cpu = cpus[index % cpus.len()];
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| {
        format!("--cpus: cannot run on CPU {cpu}, which is not there or not for this process")
    })
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl Schedule {
    fn new(load: &Load) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let begin_ns = nanos(load.ramp);
        let end_ns = load.runtime.map_or(u64::MAX, |time| begin_ns.saturating_add(nanos(time)));
        let seconds = load.runtime.map_or(TICK_SECONDS.0, |time| time.as_secs_f64() / FRAMES);
        let tick = Duration::from_secs_f64(seconds.clamp(TICK_SECONDS.0, TICK_SECONDS.1));
        Self { epoch: Instant::now(), begin_ns, end_ns, tick_ns: nanos(tick) }
    }
}

/// Nanoseconds of the client, and of the server if they are known.
type CpuTimes = (u64, Option<u64>);

/// Who adds up.
struct Watcher<'a> {
    heard: Receiver<News>,
    empties: Vec<Sender<Box<Tick>>>,
    server: &'a Server,
    signal: &'a AtomicUsize,
    stop: &'a AtomicBool,
}

impl Watcher<'_> {
    fn run(
        &self,
        load: &Load,
        plan: &Schedule,
        jobs: usize,
        boundary: Boundary<'_>,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Outcome> {
        let mut sum = Tick::default();
        let mut frames = Frames::new(plan.tick_ns as f64 / 1e9);
        let mut counted: Vec<Counted> = Vec::new();
        let (mut before, mut after, mut stopped) = (None, None, None);
        let (mut look, mut host) = (HostLook::now(), None);
        let mut reported_at = Instant::now();
        let now = || u64::try_from(plan.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        loop {
            if before.is_none() && now() >= plan.begin_ns {
                boundary()?;
                look = HostLook::now();
                before = Some(self.cpu()?);
            }
            let over = now() >= plan.end_ns || counted.len() == jobs || stopped.is_some();
            if before.is_some() && after.is_none() && over {
                let cpu = self.cpu()?;
                host = Some(look.since(self.ours(before, cpu)));
                after = Some(cpu);
                boundary()?;
            }
            if stopped.is_none() && self.signal.load(Relaxed) != 0 {
                stopped = Some(now());
                self.stop.store(true, Relaxed);
            }
            let edges = [plan.begin_ns, plan.end_ns].map(|edge| edge.saturating_sub(now()));
            let next = edges.into_iter().filter(|left| *left > 0).min().unwrap_or(u64::MAX);
            match self.heard.recv_timeout(POLL_EVERY.min(Duration::from_nanos(next))) {
                Ok(News::Tick { job, number, mut tick }) => {
                    sum.add(&tick);
                    frames.add(number, &tick);
                    tick.clear();
                    // It may have ended.
                    let _ = self.empties[job].send(tick);
                }
                Ok(News::Counted(job)) => counted.push(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if reported_at.elapsed() >= POLL_EVERY && before.is_some() {
                reported_at = Instant::now();
                let seconds = now().saturating_sub(plan.begin_ns) as f64 / 1e9;
                watch(Progress { seconds, done: sum.done(), bytes: sum.bytes() });
            }
        }
        let end = match load.runtime {
            Some(_) => stopped.unwrap_or(plan.end_ns).min(plan.end_ns),
            None => counted.iter().filter_map(|job| job.ended_ns).max().unwrap_or(plan.begin_ns),
        };
        let effort = counted.iter().map(|job| job.effort).reduce(|sum, job| {
            let (mut sum, job) = sum.zip(job)?;
            sum.add(&job);
            Some(sum)
        });
        let (before, after) = (before.unwrap_or_default(), after.unwrap_or_default());
        Ok(Outcome {
            seconds: end.saturating_sub(plan.begin_ns).max(1) as f64 / 1e9,
            client_ns: after.0.saturating_sub(before.0),
            server_ns: after.1.zip(before.1).map(|(after, before)| after.saturating_sub(before)),
            host: host.unwrap_or_else(|| look.since(None)),
            effort: effort.flatten(),
            tick: sum,
            frames,
            judged: Judged::default(),
        })
    }

    /// CPU time of client and server between two looks at it, if the server's is known.
    fn ours(&self, before: Option<CpuTimes>, after: CpuTimes) -> Option<u64> {
        let before = before?;
        let client = after.0.saturating_sub(before.0);
        match self.server {
            Server::None => Some(client),
            _ => Some(client + after.1?.saturating_sub(before.1?)),
        }
    }

    /// CPU time of the client and the server so far, in nanoseconds.
    fn cpu(&self) -> Result<CpuTimes> {
        let own = Usage::of_this_process();
        Ok(match self.server {
            Server::Unknown | Server::None => (own, None),
            Server::Process(pid) => (own, Some(Usage::of(*pid)?.cpu_ns)),
            Server::Inside => {
                let served = Usage::of_threads(std::process::id(), inside::serves)?.cpu_ns;
                (own.saturating_sub(served), Some(served))
            }
        })
    }
}
