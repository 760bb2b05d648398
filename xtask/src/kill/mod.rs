//! `xtask kill`: campaigns over engines and formats of rings, and one table of what came of them.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use ringway_driver::SchedulerMode;
use ringway_testkit::kill::oracle::Wrong;
use ringway_testkit::kill::{self as campaign, End, Harm, Outcome, Plan, Points};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// Kills for each engine and ring.
    #[arg(long, default_value_t = 500)]
    count: u64,
    /// Engines of the daemon.
    #[arg(long, value_delimiter = ',', default_value = "io_uring,linux-aio,threads")]
    engine: Vec<String>,
    /// Formats of the rings.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "split,packed")]
    ring: Vec<Ring>,
    /// Cache mode of the daemon [default: none, and writeback with --format qcow2].
    #[arg(long, value_enum)]
    cache: Option<Cache>,
    /// Requests in flight on each of two queues.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// How requests travel from the front-end: bio, request or auto.
    #[arg(long, default_value = "bio")]
    path: SchedulerMode,
    /// Repeats requests and delays [default: of the clock].
    #[arg(long)]
    seed: Option<u64>,
    /// How many kills strike at a named point of the protocol; the others at any moment.
    #[arg(long, default_value = "half", value_parser = points)]
    points: Points,
    /// The daemon [default: built in release mode, with the feature kill-points if it is needed].
    #[arg(long, value_name = "PATH")]
    ringway: Option<PathBuf>,
    /// Where a folder for the image is made [default: where temporary files are].
    #[arg(long, value_name = "PATH")]
    dir: Option<PathBuf>,
    /// How long anything may take, in seconds.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    patience: u64,
    /// Other faults between kills: sectors that cannot be written, a full disk, syncs that fail, a
    /// write cache that is switched, clients that disconnect, daemons told to end.
    #[arg(long)]
    faults: bool,
    /// A disk that is full now and then, whose requests are held, and kills around that.
    #[arg(long, conflicts_with = "faults")]
    hold: bool,
    /// A disk with limits that change all the time, alone or together with the above.
    #[arg(long)]
    limits: bool,
    /// The format of the image. qcow2 is based on a raw image, judged after each kill by `ringway check`
    /// and, where it is there, `qemu-img check`, and goes through the page cache.
    #[arg(long, value_enum, default_value = "raw", conflicts_with_all = ["faults", "hold"])]
    format: ImageFormat,
    /// A mistake made on purpose half-way: Lost, Replayed, Missing, Volatile or Forgotten (these two
    /// with --faults). It should be noticed.
    #[arg(long, value_parser = harm)]
    harm: Option<Harm>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ring {
    Split,
    Packed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImageFormat {
    Raw,
    Qcow2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Cache {
    None,
    Writeback,
    Writethrough,
}

fn harm(word: &str) -> Result<Harm, String> {
    let names = || Harm::ALL.map(|harm| format!("{harm:?}"));
    let found = Harm::ALL.into_iter().find(|harm| format!("{harm:?}") == word);
    found.ok_or_else(|| format!("'{word}' is not one of {}", names().join(", ")))
}

fn points(word: &str) -> Result<Points, String> {
    let all = [Points::Never, Points::Half, Points::Always];
    let found = all.into_iter().find(|points| points.name() == word);
    found.ok_or_else(|| format!("'{word}' is not one of {}", all.map(Points::name).join(", ")))
}

/// The program that is killed.
fn daemon(args: &KillArgs) -> Result<PathBuf> {
    let blind = args.points == Points::Never && !args.faults && !args.hold;
    let ringway = match &args.ringway {
        // The daemon runs in a folder of its own.
        Some(path) => std::path::absolute(path)?,
        None if blind => crate::bench::build("--ringway")?,
        None => crate::bench::build_with("--ringway", "kill-points")?,
    };
    if !ringway.is_file() {
        bail!("--ringway: there is no file {}", ringway.display());
    }
    Ok(ringway)
}

/// Runs the campaigns one after the other, and prints what came of them.
pub(crate) fn run(args: &KillArgs) -> Result<()> {
    let ringway = daemon(args)?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let seed = args.seed.unwrap_or(clock.as_secs());
    println!("seed {seed}");
    let qcow2 = args.format == ImageFormat::Qcow2;
    let usual = if qcow2 { Cache::Writeback } else { Cache::None };
    let cache = args.cache.unwrap_or(usual);
    let qemu = std::process::Command::new("qemu-img").arg("--version").output().is_ok();
    let mut table = head();
    let (mut at, mut missed, mut blind, mut all, mut wrong) = (BTreeMap::new(), 0, 0, 0, 0);
    for engine in &args.engine {
        for &ring in &args.ring {
            let plan = Plan {
                ringway: ringway.clone(),
                engine: engine.clone(),
                cache: format!("{cache:?}").to_lowercase(),
                packed: ring == Ring::Packed,
                path: args.path,
                kills: args.count,
                end: End::Killed,
                points: args.points,
                depth: args.depth,
                seed,
                dir: args.dir.clone(),
                patience: Duration::from_secs(args.patience),
                harm: args.harm,
                faults: args.faults,
                hold: args.hold,
                limits: args.limits,
                qcow2,
                qemu,
                progress: |plan, kills| {
                    eprintln!("{} {}: {kills} of {} kills", plan.engine, plan.ring(), plan.kills);
                },
            };
            match campaign::run(&plan) {
                Ok(outcome) => {
                    row(&mut table, &plan, &outcome);
                    for (&point, &kills) in &outcome.at {
                        *at.entry(point).or_insert(0u64) += kills;
                    }
                    missed += outcome.missed;
                    all += outcome.all;
                    blind += outcome.kills - outcome.at.values().sum::<u64>();
                    if outcome.findings.is_empty() {
                        continue;
                    }
                    outcome.findings.notes().iter().for_each(|note| eprintln!("{note}"));
                    if let Some(dir) = &outcome.kept {
                        eprintln!("image and logs: {}", dir.display());
                    }
                }
                Err(error) => eprintln!("{engine} {}: {error:#}", plan.ring()),
            }
            wrong += 1;
            eprintln!("again: {plan}");
        }
    }
    print!("{table}");
    println!("\n{blind} at any moment, {all} with the helper, {missed} for want of their point");
    for (point, kills) in at {
        println!("{kills:>8} at {}", point.name());
    }
    if wrong > 0 {
        bail!("{wrong} campaigns went wrong");
    }
    println!("nothing lost, nothing done twice");
    Ok(())
}

fn head() -> String {
    let mut head = format!(
        "{:<10} {:<6} {:>6} {:>6} {:>9} {:>9} {:>7} {:>7} {:>9} {:>7} {:>10} {:>7}",
        "engine",
        "ring",
        "kills",
        "early",
        "requests",
        "overtaken",
        "refused",
        "durable",
        "no flush",
        "resizes",
        "disconnect",
        "limited"
    );
    for wrong in Wrong::ALL {
        let _ = write!(head, " {:>9}", format!("{wrong:?}").to_lowercase());
    }
    head + "  reattach p50, p99, most ms  kills/s\n"
}

fn row(table: &mut String, plan: &Plan, outcome: &Outcome) {
    let Outcome { kills, early, requests, overtaken, findings, reattach, elapsed, .. } = outcome;
    let Outcome { refused, durable_lives, flushes_failed, resizes, disconnects, throttled, .. } =
        outcome;
    let _ = write!(
        table,
        "{:<10} {:<6} {kills:>6} {early:>6} {requests:>9} {overtaken:>9} {refused:>7} {durable_lives:>7} \
         {flushes_failed:>9} {resizes:>7} {disconnects:>10} {throttled:>7}",
        plan.engine,
        plan.ring(),
    );
    for wrong in Wrong::ALL {
        let _ = write!(table, " {:>9}", findings.count(wrong));
    }
    let ms =
        |quantile| Duration::from_micros(reattach.value_at_quantile(quantile)).as_secs_f64() * 1e3;
    // One that took seconds tells of something that was waited for, which may be a fault.
    let most = ms(1.0);
    let rate = Duration::as_secs_f64(elapsed).recip()
        * f64::from(u32::try_from(*kills).unwrap_or(u32::MAX));
    let _ = writeln!(table, "  {:>12.1}, {:>5.1}, {most:>6.1}  {rate:>7.1}", ms(0.5), ms(0.99));
}
