//! `xtask power-cut`: seeds of the power-cut simulation, many or one.

use anyhow::{Result, bail};
use clap::Args;
use ringway_testkit::power_cut::{Campaign, Counts, Failure, Lie};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Seeds that a thread takes at a time.
const CHUNK: u64 = 256;

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct PowerCutArgs {
    /// How many seeds.
    #[arg(long, default_value_t = 100_000)]
    seeds: u64,
    /// The first one [default: of the clock].
    #[arg(long, value_name = "SEED")]
    first: Option<u64>,
    /// One seed, again.
    #[arg(long, conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// Threads [default: one per CPU].
    #[arg(long)]
    threads: Option<usize>,
    /// A mistake made on purpose, by its name in ringway-testkit, for example FlushDoesNothing: it
    /// should be noticed.
    #[arg(long, value_parser = lie)]
    lie: Option<Lie>,
}

fn lie(word: &str) -> Result<Lie, String> {
    let names = || Lie::ALL.map(|lie| format!("{lie:?}"));
    let found = Lie::ALL.into_iter().find(|lie| format!("{lie:?}") == word);
    found.ok_or_else(|| format!("'{word}' is not one of {}", names().join(", ")))
}

pub(crate) fn run(args: &PowerCutArgs) -> Result<()> {
    if let Some(seed) = args.seed {
        let mut campaign = Campaign::new(args.lie);
        println!("seed {seed}: {:#?}", campaign.config(seed));
        return match campaign.run(seed) {
            Ok(counters) => {
                println!("{counters:#?}\nnothing lost, nothing else touched");
                Ok(())
            }
            Err(failure) => bail!("{failure}"),
        };
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let first = args.first.unwrap_or(clock.as_secs() << 24);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("a simulation: seeds {first} to {}", first + args.seeds.max(1) - 1);
    let begun = Instant::now();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || worker(args, first, &next, &stop);
    let done: Vec<Result<Counts, Box<Failure>>> = std::thread::scope(|scope| {
        let threads = args.threads.unwrap_or(cpus).max(1);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut counters = Counts::default();
    for result in done {
        match result {
            Ok(more) => counters += more,
            Err(failure) => bail!("{failure}"),
        }
    }
    println!("{counters:#?}");
    println!("{} seeds in {:.1} s: nothing lost", args.seeds, begun.elapsed().as_secs_f64());
    Ok(())
}

fn worker(
    args: &PowerCutArgs,
    first: u64,
    next: &AtomicU64,
    stop: &AtomicBool,
) -> Result<Counts, Box<Failure>> {
    let mut campaign = Campaign::new(args.lie);
    let mut counters = Counts::default();
    loop {
        let from = next.fetch_add(CHUNK, Relaxed);
        if from >= args.seeds || stop.load(Relaxed) {
            return Ok(counters);
        }
        for seed in from..args.seeds.min(from + CHUNK) {
            counters += campaign.run(first + seed).inspect_err(|_| stop.store(true, Relaxed))?;
        }
    }
}
