//! A load, how the target is reached, and what of that can be said on the command line.

use crate::indirect::IndirectArg;
use crate::pattern::{Rw, Sizes, request_len};
use crate::rate_limit::Rate;
use crate::round::part;
use anyhow::{Result, bail, ensure};
use clap::Args;
use ringway_control::config::{self, CephArgs, Choice, Format};
use ringway_control::size::Size;
use ringway_disk::{EngineKind, SchedulerMode};
use std::{ops::Range, time::Duration};

/// What is asked for.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Reads or writes, in order or anywhere.
    #[arg(long, value_enum, value_name = "KIND", default_value = "randread")]
    pub rw: Rw,
    /// Percent of reads, of rw and randrw.
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes of a request [default: 4K].
    #[arg(long, value_name = "SIZE", value_parser = request_len)]
    pub bs: Option<u32>,
    /// Several sizes with their percentages: 4k/60:64k/40, or iometer for fio's storage server.
    #[arg(long, value_name = "LIST", conflicts_with = "bs")]
    pub bssplit: Option<Sizes>,
    /// Requests in flight, each job; with --queues each queue.
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub iodepth: u32,
    /// Threads, each with a queue or an engine of its own.
    #[arg(long, alias = "numjobs", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub jobs: u16,
    /// Queues of a served disk that each job polls in turn.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "polling",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: u16,
    /// How long to measure: 10s, 500ms, 2m [default: 5s, with --vs 1s each round, with --verify all of
    /// the range once].
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub runtime: Option<Duration>,
    /// Load before that, which is not counted [default: 200ms].
    #[arg(long, visible_alias = "warmup", value_name = "TIME", value_parser = seconds)]
    pub ramp: Option<Duration>,
    /// End after so much data instead.
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["runtime", "ramp"])]
    pub io_size: Option<Size>,
    /// Use only so much of the target; a file that does not exist is made and filled.
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Size>,
    /// Where the part that is used begins.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub offset: Size,
    /// Ask for so many bytes a second, evenly.
    #[arg(long, value_name = "SIZE", conflicts_with = "rate_iops")]
    pub rate: Option<Size>,
    /// Ask for so many requests a second, evenly. A request that is late counts from when it was
    /// due.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate_iops: Option<u32>,
    /// Write data that says which target, sector and write it belongs to, each block once before any
    /// twice, and judge all of it when read; what was written is read back at the end. Readers judge
    /// what such a run has left. Ends after all of the range unless told otherwise.
    #[arg(long)]
    pub verify: bool,
    /// Only count: no latencies, and the clock is read once in 64 batches. For targets so fast that
    /// taking the time of each request costs more than the request.
    #[arg(long, conflicts_with_all = ["rate", "rate_iops"])]
    pub gtod_reduce: bool,
    /// Of places, sizes and --verify's data: the same seed asks for the same.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// How the target is reached.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// Write even though this destroys data. Not needed for files without data, null and sim.
    #[arg(long)]
    pub allow_write: bool,
    /// The format of an image [default: raw, not written if it looks like another one].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// The folder that names of backing files may not lead out of [default: that of the image].
    #[arg(long, value_name = "DIR")]
    pub backing_root: Option<std::path::PathBuf>,
    /// For files, as for serve [default: auto].
    #[arg(long, value_parser = config::engines())]
    pub engine: Option<Choice<EngineKind>>,
    /// Files through the host's page cache instead of O_DIRECT.
    #[arg(long)]
    pub cached: bool,
    /// How to get to a Ceph cluster.
    #[command(flatten)]
    pub ceph: CephArgs,
    /// Look for completions without sleeping: what the target can do.
    #[arg(long)]
    pub polling: bool,
    /// Sleep until completions come: what a guest feels (default).
    #[arg(long, conflicts_with = "polling")]
    pub sleeping: bool,
    /// Completions to take before the requests that replace them are sent.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,
    /// Packed instead of split rings.
    #[arg(long)]
    pub packed: bool,
    /// Descriptors of each ring, a power of two [default: twice --iodepth, at least 256].
    #[arg(long, value_name = "N", value_parser = queue_size)]
    pub queue_size: Option<u16>,
    /// When a request takes an indirect table instead of descriptors of the ring [default: scarce].
    #[arg(long, value_enum, value_name = "WHEN")]
    pub indirect: Option<IndirectArg>,
    /// How requests travel from this front-end: straight (default), sorted and merged, or as measured
    /// under load. The server has a --path of its own.
    #[arg(long, value_name = "PATH", value_parser = config::paths())]
    pub path: Option<SchedulerMode>,
    /// CPUs of the jobs, in turn: 1,2,3.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = cpu)]
    pub cpus: Vec<usize>,
    /// The process whose CPU time counts as the server's [default: who listens at the socket].
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub server_pid: Option<u32>,
}

/// A load with nothing left open.
#[derive(Clone, Debug)]
pub struct Load {
    /// Reads or writes, in order or anywhere.
    pub rw: Rw,
    /// Percent of reads, where there are both.
    pub rwmixread: u8,
    /// Bytes of the requests.
    pub sizes: Sizes,
    /// Requests in flight, each queue.
    pub depth: u32,
    /// Threads.
    pub jobs: u16,
    /// Queues of each; more than one only for clients that poll.
    pub queues: u16,
    /// How long to measure; `None` if something else ends the load.
    pub runtime: Option<Duration>,
    /// Load before that, which is not counted.
    pub ramp: Duration,
    /// Bytes to ask for in all.
    pub budget: Option<u64>,
    /// Bytes of the target that are used.
    pub size: Option<u64>,
    /// Where they begin.
    pub offset: u64,
    /// The most to ask for.
    pub rate: Option<Rate>,
    /// End after all of the region, once.
    pub whole: bool,
    /// Write data that says what it is, and judge it when it is read.
    pub verify: bool,
    /// Take the time of each request.
    pub timed: bool,
    /// Of places and sizes.
    pub seed: u64,
    /// Completions to take before the requests that replace them are sent.
    pub batch: u32,
    /// Look for completions without sleeping.
    pub polling: bool,
    /// CPUs of the jobs, in turn; anywhere if there are none.
    pub cpus: Vec<usize>,
}

impl Load {
    /// One job that sleeps, five seconds long, with times; change the fields for another load.
    pub fn new(rw: Rw, sizes: Sizes, depth: u32) -> Self {
        Self {
            rw,
            rwmixread: 50,
            sizes,
            depth,
            jobs: 1,
            queues: 1,
            runtime: Some(Duration::from_secs(5)),
            ramp: Duration::from_millis(200),
            budget: None,
            size: None,
            offset: 0,
            rate: None,
            whole: false,
            verify: false,
            timed: true,
            seed: 1,
            batch: 8,
            polling: false,
            cpus: Vec::new(),
        }
    }

    /// Requests that each job has in flight.
    pub fn slots(&self) -> u32 {
        self.depth * u32::from(self.queues)
    }

    /// Queues of all jobs together.
    pub(crate) fn all_queues(&self) -> u16 {
        // Two numbers of 256 at most.
        self.jobs.saturating_mul(self.queues)
    }

    /// Fills in the defaults.
    ///
    /// # Errors
    /// Options that do not go together: wrong usage.
    pub(crate) fn of(args: &LoadArgs, access: &AccessArgs, alternating: bool) -> Result<Self> {
        let sizes = args.bssplit.clone().unwrap_or_else(|| Sizes::one(args.bs.unwrap_or(4096)));
        let rate = match (args.rate, args.rate_iops) {
            (Some(Size(0)), _) => bail!("--rate 0 would never send anything: leave it out"),
            (Some(Size(bytes)), _) => Some(Rate::Bytes(bytes as f64)),
            (None, Some(iops)) => Some(Rate::Requests(iops.into())),
            (None, None) => None,
        };
        let budget = args.io_size.map(|Size(bytes)| bytes);
        let default = Duration::from_secs(if alternating { 1 } else { 5 });
        let runtime = budget.is_none().then(|| args.runtime.unwrap_or(default));
        ensure!(budget != Some(0) && runtime != Some(Duration::ZERO), "nothing would be measured");
        // Without a word about the end, all of the region is written or judged, once.
        let whole =
            args.verify && budget.is_none() && args.runtime.is_none() && !args.rw.is_mixed();
        let runtime = runtime.filter(|_| !whole);
        let ramp = args.ramp.unwrap_or(Duration::from_millis(200));
        if args.verify {
            ensure!(!alternating, "--verify judges one target: leave out --vs");
            ensure!(
                sizes.are_multiples(),
                "--verify: the sizes of --bssplit have to be multiples of the smallest"
            );
        }
        Ok(Self {
            rwmixread: args.rwmixread,
            jobs: args.jobs,
            queues: args.queues,
            runtime,
            ramp: if budget.is_some() || whole { Duration::ZERO } else { ramp },
            budget,
            whole,
            size: args.size.map(|Size(bytes)| bytes),
            offset: args.offset.0,
            rate,
            verify: args.verify,
            timed: !args.gtod_reduce,
            seed: args.seed,
            batch: access.batch,
            polling: access.polling,
            cpus: access.cpus.clone(),
            ..Self::new(args.rw, sizes, args.iodepth)
        })
    }

    /// The part of a target of `capacity` bytes in blocks of `block` bytes that is used.
    ///
    /// # Errors
    /// A region or sizes that do not fit the target.
    pub(crate) fn region(&self, capacity: u64, block: u32) -> Result<Range<u64>> {
        let block = u64::from(block);
        let all = Size(capacity);
        for (name, bytes) in [
            ("--bs", u64::from(self.sizes.least())),
            ("--bs", u64::from(self.sizes.most())),
            ("--offset", self.offset),
        ] {
            ensure!(
                bytes % block == 0,
                "{name} {}: this target takes multiples of {block} bytes",
                Size(bytes)
            );
        }
        ensure!(self.offset < capacity, "--offset {}: the target has {all}", Size(self.offset));
        let left = capacity - self.offset;
        let size = self.size.unwrap_or(left);
        ensure!(
            size <= left,
            "--size {}: the target has {all}, of which {} are left behind --offset",
            Size(size),
            Size(left)
        );
        // What is judged in order need not be whole requests.
        let reads_all = self.verify && self.rw == Rw::Read;
        let unit = if reads_all { block } else { u64::from(self.sizes.least()) };
        let size = size / unit * unit;
        ensure!(
            size >= self.sizes.most().into(),
            "{} are too small for requests of {}: use a larger --size or a smaller --bs",
            Size(size),
            Size(self.sizes.most().into())
        );
        Ok(self.offset..self.offset + size)
    }

    /// The region of each job: the same for all, or with `--verify` one of its own.
    ///
    /// # Errors
    /// Parts that are too small for what is in flight.
    pub(crate) fn parts(&self, region: &Range<u64>, jobs: usize) -> Result<Vec<Range<u64>>> {
        if !self.verify {
            return Ok(vec![region.clone(); jobs]);
        }
        let (unit, jobs) = (u64::from(self.sizes.most()), jobs as u64);
        let parts: Vec<_> = (0..jobs).map(|job| part(region, unit, jobs, job)).collect();
        let in_flight = if self.rw.writes() { u64::from(self.slots()) * unit } else { unit };
        let least = parts.iter().map(|part| part.end - part.start).min().unwrap_or(0);
        ensure!(
            least >= in_flight,
            "--verify: each job has {} of the target for {} in flight: use a larger --size, fewer \
             --jobs or a smaller --iodepth",
            Size(least),
            Size(in_flight)
        );
        Ok(parts)
    }

    /// Bytes to ask for in all, if there is an end to them.
    pub(crate) fn budget_of(&self, region: &Range<u64>) -> Option<u64> {
        if self.whole { Some(region.end - region.start) } else { self.budget }
    }

    /// `randread 4 KiB, depth 32, 2 jobs, polling client`
    pub(crate) fn describe(&self) -> String {
        let mix = match self.rw {
            Rw::Mixed | Rw::Randrw => format!(" ({} % reads)", self.rwmixread),
            _ => String::new(),
        };
        let jobs = if self.jobs == 1 { String::new() } else { format!(", {} jobs", self.jobs) };
        let queues = match self.queues {
            1 => String::new(),
            count => format!(", {count} queues each"),
        };
        let client = if self.polling { "polls" } else { "sleeps" };
        let untimed = if self.timed { "" } else { ", only counted" };
        let rate = match self.rate {
            Some(Rate::Requests(iops)) => format!(", at most {iops} IOPS"),
            Some(Rate::Bytes(bytes)) => format!(", at most {:.1} MB/s", bytes / 1e6),
            None => String::new(),
        };
        format!(
            "{}{mix} {}, depth {}{jobs}{queues}, client {client}{untimed}{rate}",
            self.rw.name(),
            self.sizes.describe(),
            self.depth
        )
    }
}

/// `10`, `10s`, `500ms`, `2m`, `1h`
pub fn seconds(word: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)];
    let found = units.iter().find_map(|(unit, factor)| {
        let number: f64 = word.strip_suffix(unit)?.parse().ok()?;
        Duration::try_from_secs_f64(number * factor).ok()
    });
    let year = Duration::from_secs(366 * 86400);
    found
        .filter(|time| *time < year)
        .ok_or_else(|| format!("'{word}' is not a time: give 10s, 500ms or 2m"))
}

fn queue_size(word: &str) -> Result<u16, String> {
    match word.parse::<u16>() {
        Ok(size) if size.is_power_of_two() => Ok(size),
        _ => Err(format!("a ring has a power of two of descriptors, up to 32768, not {word}")),
    }
}

fn cpu(word: &str) -> Result<usize, String> {
    match word.parse() {
        Ok(cpu) if cpu < rustix::thread::CpuSet::MAX_CPU => Ok(cpu),
        _ => Err(format!("'{word}' is no CPU: give numbers such as 1,2,3")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (word, ms) in [("10", 10_000), ("1.5s", 1500), ("500ms", 500), ("2m", 120_000)] {
            assert_eq!(seconds(word), Ok(Duration::from_millis(ms)), "{word}");
        }
        for word in ["", "s", "-1", "5d", "inf", "nan", "1e300"] {
            assert!(seconds(word).unwrap_err().contains("is not a time"), "{word}");
        }
    }
}
