//! O5: one block ring or several for a disk (Linux xen-blkfront and xen-blkback, February 2015).
//!
//! The front end and the back end are in this process, without Xen: the rings are those of a guest,
//! the device behind them is null, and no worker stands between. So what is measured is the rings:
//! what a request costs in their code, and what happens when jobs share one.

use crate::origins::finding::Finding;
use crate::origins::lab::{Interrupted, Lab};
use crate::versus::median;
use anyhow::{Context, Result, anyhow};
use ringway_control::config::cpus;
use ringway_driver::blkif::{BackEnd, BlkifQueue, LocalRing};
use ringway_driver::{Buffer, BufferPool};
use ringway_terminal::short::count;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::json;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Rings of a disk with several, as published.
const RINGS: usize = 16;
/// Requests a job keeps in flight. A ring of one page holds 32 of all its jobs.
const DEPTH: usize = 32;
const BLOCK: usize = 4096;

const JOBS: [usize; 6] = [1, 4, 8, 16, 32, 64];
const PUBLISHED: [(&str, [f64; 6]); 2] = [
    ("published: one ring", [57e3, 95e3, 89e3, 68e3, 65e3, 63e3]),
    ("published: sixteen rings", [58e3, 201e3, 372e3, 284e3, 196e3, 183e3]),
];

/// Rings, depth of each: one thread plays both ends in turn.
const ALONE: [(usize, usize); 4] = [(1, 1), (1, 32), (RINGS, 1), (RINGS, 32)];

/// What a request costs, in ns.
#[derive(Clone, Copy)]
struct Cost {
    /// Both ends.
    whole: f64,
    /// The back end: taking, judging, answering, publishing.
    back: f64,
}

pub(super) fn run(lab: &Lab<'_>) -> Result<Vec<Finding>> {
    let mut alone: Vec<Vec<Cost>> = vec![Vec::new(); ALONE.len()];
    lab.alternate(ALONE.len(), |at| {
        let (rings, depth) = ALONE[at];
        lab.tell(&format!("O5 {rings} rings, depth {depth}, one thread"));
        // A fifth of the time is plenty for what repeats this often.
        alone[at].push(cost(rings, depth, lab.runtime / 5)?);
        Ok(())
    })?;
    let mut shared: Vec<Vec<f64>> = vec![Vec::new(); 2 * JOBS.len()];
    lab.alternate(shared.len(), |at| {
        let (rings, jobs) = ([1, RINGS][at % 2], JOBS[at / 2]);
        lab.tell(&format!("O5 {rings} rings, {jobs} jobs"));
        shared[at].push(speed(lab, rings, jobs)?);
        Ok(())
    })?;
    Ok(vec![speeds(&shared), costs(&alone)])
}

/// A ring with both its ends and the buffers of its requests.
struct Ring {
    queue: BlkifQueue<usize>,
    back_end: BackEnd,
    buffers: Vec<Buffer>,
}

fn ring(buffers: usize) -> Result<Ring> {
    let data = buffers * BLOCK;
    let (queue, back_end, pool) = LocalRing { data, ..LocalRing::default() }.open()?;
    let alloc = |pool: &BufferPool| pool.alloc(BLOCK).context("no room for a buffer");
    let buffers = (0..buffers).map(|_| alloc(&pool)).collect::<Result<_>>()?;
    Ok(Ring { queue, back_end, buffers })
}

/// One thread, which is the front end of all rings and then their back end, over and over.
fn cost(rings: usize, depth: usize, runtime: Duration) -> Result<Cost> {
    let mut rings: Vec<Ring> = (0..rings).map(|_| ring(depth)).collect::<Result<_>>()?;
    // Clocks are read around so many requests that their own cost is lost, but for the back end of
    // few requests.
    let batch = 1.max(1024 / (rings.len() * depth));
    let (mut turned, mut turning) = (0, Duration::ZERO);
    let (mut served, mut serving) = (0, Duration::ZERO);
    let start = Instant::now();
    while start.elapsed() < runtime {
        let begin = Instant::now();
        for _ in 0..batch {
            for ring in &mut rings {
                ask(ring)?;
                ring.back_end.answer_all()?;
            }
            for ring in &mut rings {
                turned += take(ring)?;
            }
        }
        turning += begin.elapsed();
        for ring in &mut rings {
            ask(ring)?;
        }
        let begin = Instant::now();
        for ring in &mut rings {
            served += ring.back_end.answer_all()?;
        }
        serving += begin.elapsed();
        for ring in &mut rings {
            take(ring)?;
        }
    }
    let each = |time: Duration, count: u32| time.as_nanos() as f64 / f64::from(count.max(1));
    Ok(Cost { whole: each(turning, turned), back: each(serving, served) })
}

/// Fills a ring with reads.
fn ask(ring: &mut Ring) -> Result<()> {
    while let Some(buffer) = ring.buffers.pop() {
        let offset = (ring.buffers.len() * BLOCK) as u64;
        ring.queue.read(offset, buffer, 0)?;
    }
    Ok(ring.queue.submit()?)
}

fn take(ring: &mut Ring) -> Result<u32> {
    let mut count = 0;
    while let Some(done) = ring.queue.pop()? {
        ring.buffers.extend(done.into_buffer());
        count += 1;
    }
    Ok(count)
}

/// What the jobs of one ring share. Like the lock of xen-blkfront's ring.
struct Shared {
    queue: BlkifQueue<usize>,
    buffers: Vec<Buffer>,
    /// Requests in flight of each job.
    in_flight: Vec<usize>,
    done: u64,
}

/// A lock on cache lines of its own.
#[repr(align(128))]
struct Locked(Mutex<Shared>);

/// I/O per second of `jobs` jobs over `rings` rings. Job n uses ring n modulo `rings`.
fn speed(lab: &Lab<'_>, rings: usize, jobs: usize) -> Result<f64> {
    // A job uses one ring, as a thread on a CPU does.
    let rings = rings.min(jobs);
    let (mut fronts, mut backs) = (Vec::new(), Vec::new());
    for number in 0..rings {
        // No more can be in flight than a ring has slots.
        let Ring { queue, back_end, buffers } = ring(DEPTH)?;
        // One entry for each job; those of other rings stay 0.
        let in_flight = vec![0; jobs];
        fronts.push(Locked(Mutex::new(Shared { queue, buffers, in_flight, done: 0 })));
        backs.push((number, back_end));
    }
    let (front_cpus, back_cpus) = halves();
    let servers = back_cpus.len().min(rings);
    let mut shares: Vec<Vec<BackEnd>> = (0..servers).map(|_| Vec::new()).collect();
    for (number, back_end) in backs {
        shares[number % servers].push(back_end);
    }
    let (stop, ready) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (fronts, stop, ready) = (&fronts, &stop, &ready);
    std::thread::scope(|scope| {
        let back_cpus = &back_cpus;
        let front_cpus = &front_cpus;
        let servers: Vec<_> = shares
            .into_iter()
            .map(|share| {
                scope.spawn(move || {
                    pin(back_cpus.clone());
                    serve(share, stop)
                })
            })
            .collect();
        let jobs: Vec<_> = (0..jobs)
            .map(|job| {
                scope.spawn(move || {
                    pin(front_cpus.clone());
                    ready.fetch_add(1, Relaxed);
                    work(job, &fronts[job % fronts.len()].0, stop)
                })
            })
            .collect();
        while ready.load(Relaxed) < jobs.len() {
            std::thread::yield_now();
        }
        let total = || fronts.iter().map(|front| lock(&front.0).done).sum::<u64>();
        // Two looks, so that neither start nor end counts.
        std::thread::sleep(lab.runtime / 10);
        let (begin, before) = (Instant::now(), total());
        std::thread::sleep(lab.runtime);
        let (seconds, after) = (begin.elapsed().as_secs_f64(), total());
        stop.store(true, Relaxed);
        for thread in servers.into_iter().chain(jobs) {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        if lab.signal.load(Relaxed) != 0 {
            return Err(Interrupted.into());
        }
        Ok((after - before) as f64 / seconds)
    })
}

fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job: takes what came back, its own or a neighbour's, and fills its share of the ring up.
fn work(job: usize, shared: &Mutex<Shared>, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Relaxed) {
        let mut shared = lock(shared);
        let Shared { queue, buffers, in_flight, done } = &mut *shared;
        let mut busy = false;
        while let Some(completion) = queue.pop()? {
            in_flight[completion.ctx] -= 1;
            buffers.extend(completion.into_buffer());
            *done += 1;
            busy = true;
        }
        while in_flight[job] < DEPTH {
            let Some(buffer) = buffers.pop() else { break };
            queue.read((job * BLOCK) as u64, buffer, job)?;
            in_flight[job] += 1;
            busy = true;
        }
        queue.submit()?;
        drop(shared);
        if !busy {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// A null device behind some rings; polls them.
fn serve(mut share: Vec<BackEnd>, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Relaxed) {
        let mut busy = false;
        for back_end in &mut share {
            busy |= back_end.has_work() && back_end.answer_all()? > 0;
        }
        if !busy {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// The CPUs of the jobs and those of the back end: half of them each.
fn halves() -> (Range<usize>, Range<usize>) {
    let count = usize::from(cpus()).max(1);
    let half = count.div_ceil(2);
    (count / 2..count, 0..half)
}

fn pin(cpus: Range<usize>) {
    let mut set = CpuSet::new();
    cpus.for_each(|cpu| set.set(cpu));
    // Containers may have other CPUs than the first ones; then nothing is pinned.
    let _ = sched_setaffinity(None, &set);
}

fn speeds(shared: &[Vec<f64>]) -> Finding {
    let row = |name: String, cells: Vec<String>| std::iter::once(name).chain(cells).collect();
    let ratio = |one: f64, many: f64| format!("{:.2}", many / one);
    let ours = [0, 1].map(|which| {
        let of = |at: usize| median(shared[2 * at + which].clone()).unwrap_or(f64::NAN);
        (0..JOBS.len()).map(of).collect::<Vec<_>>()
    });
    let mut rows = Vec::new();
    let mut bars = Vec::new();
    let theirs = PUBLISHED.map(|(_, figures)| figures.to_vec());
    let names = [
        PUBLISHED.map(|(name, _)| name.to_owned()),
        ["ringway: one ring".to_owned(), "ringway: sixteen rings".to_owned()],
    ];
    for (who, (figures, names)) in
        [("published", (&theirs, &names[0])), ("ringway", (&ours, &names[1]))]
    {
        for (name, figures) in names.iter().zip(figures) {
            rows.push(row(name.clone(), figures.iter().map(|&iops| count(iops)).collect()));
        }
        let pairs = figures[0].iter().zip(&figures[1]);
        let cells = pairs.clone().map(|(&one, &many)| ratio(one, many)).collect();
        rows.push(row(format!("{who}: sixteen ÷ one"), cells));
        bars.extend(
            pairs.zip(JOBS).map(|((one, many), jobs)| (format!("{who}: {jobs} jobs"), many / one)),
        );
    }
    let (front, back) = halves();
    Finding {
        title: "O5: one block ring or sixteen for a disk, null device, IOPS by number of jobs"
            .into(),
        head: vec!["", "1", "4", "8", "16", "32", "64"],
        rows,
        notes: vec![
            format!(
                "Published: a guest of 16 CPUs on Xen, fio's IOmeter mix. Here: no Xen, no guest \
                 kernel, no worker; reads of 4 KiB that move no data, up to {DEPTH} of each job in a \
                 ring of 32 slots; the jobs of a ring share it under a lock, as theirs did."
            ),
            format!(
                "Jobs on {} of {} CPUs, back end polling on {}.{}",
                front.len(),
                cpus(),
                back.len(),
                if front.len() < 4 { FEW_CPUS } else { "" }
            ),
        ],
        bars: ("IOPS of sixteen rings, divided by those of one", bars),
        even: 1.0,
        data: json!({ "jobs": JOBS, "iops of one and of sixteen rings, every round": shared }),
        ..Finding::default()
    }
}

/// What a small machine does not show.
const FEW_CPUS: &str = " So few CPUs cannot show what several rings are for: jobs that never run at \
                        the same time do not fight for a lock or its cache line. What is left is \
                        that sixteen rings have sixteen times as many slots.";

fn costs(alone: &[Vec<Cost>]) -> Finding {
    let cell = |samples: &[Cost], what: fn(&Cost) -> f64| {
        let value = median(samples.iter().map(what).collect()).unwrap_or(f64::NAN);
        format!("{value:.1}")
    };
    let rows = ALONE.iter().zip(alone).map(|(&(rings, depth), samples)| {
        vec![
            rings.to_string(),
            depth.to_string(),
            cell(samples, |cost| cost.whole),
            cell(samples, |cost| cost.back),
        ]
    });
    let data = ALONE.iter().zip(alone).map(|(&(rings, depth), samples)| {
        let rounds: Vec<_> = samples.iter().map(|cost| [cost.whole, cost.back]).collect();
        json!({ "rings": rings, "depth": depth, "whole and back, ns": rounds })
    });
    Finding {
        title: "O5: what the code of a block ring costs, ns per request, one thread".into(),
        head: vec!["rings", "depth of each", "both ends", "back end alone"],
        rows: rows.collect(),
        notes: vec![
            "One thread plays both ends, so no cache line travels between CPUs: this is the code \
             alone. Rings share no cache line, so that each costs the same however many there are. \
             At depth 1 on one ring the back end's figure includes the clock."
                .into(),
        ],
        data: data.collect(),
        ..Finding::default()
    }
}
