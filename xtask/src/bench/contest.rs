//! Contestants measured in turn, cell by cell, round by round.

use crate::bench::client;
use crate::bench::daemon::Server;
use crate::bench::engine::{self, Direct};
use crate::bench::fio;
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::{Load, Outcome};
use crate::bench::options::{Client, Waiting};
use crate::bench::sample::{Latency, Sample};
use anyhow::{Context, Result};
use ringway_bench::usage::Usage;
use serde::Serialize;
use std::time::Duration;

/// One load on one device; all contestants meet it.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    /// What tells it from the others, for the first columns.
    pub(crate) labels: Vec<String>,
    pub(crate) device: Device,
    pub(crate) queues: u16,
    pub(crate) load: Load,
    pub(crate) contestants: Vec<Contestant>,
}

/// Who answers.
#[derive(Clone, Debug)]
pub(crate) enum Contestant {
    /// The bare file, asked by fio.
    Fio,
    /// The bare file, asked through one of our engines.
    Engine(String),
    /// A device.
    Server(Server),
    /// A device, asked by this client whatever the options say: the client is the contestant.
    Client(Client, Server),
}

/// All rounds of one contestant in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) cell: usize,
    pub(crate) labels: Vec<String>,
    pub(crate) name: String,
    pub(crate) samples: Vec<Sample>,
    /// The engine that our daemon says it uses.
    pub(crate) engine: Option<String>,
    /// Why there are no more.
    pub(crate) error: Option<String>,
}

impl Series {
    /// The median of something.
    pub(crate) fn median(&self, what: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        median(self.samples.iter().filter_map(what).collect())
    }

    /// The median of the requests per second.
    pub(crate) fn iops(&self) -> Option<f64> {
        self.median(|sample| Some(sample.iops))
    }

    /// Least and most requests per second.
    pub(crate) fn spread(&self) -> (f64, f64) {
        let iops = self.samples.iter().map(|sample| sample.iops);
        iops.fold((f64::INFINITY, 0.0), |(low, high), x| (x.min(low), x.max(high)))
    }
}

/// The middle, or the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let high = *values.get(half)?;
    Some(if values.len() % 2 == 1 { high } else { f64::midpoint(values[half - 1], high) })
}

/// Measures everything; says on standard error how far it is.
pub(crate) fn run(lab: &Lab, cells: &[Cell]) -> Result<Vec<Series>> {
    // What a start, a connection and an end take, as seen.
    const OVERHEAD: f64 = 0.1;
    let rounds = lab.common.rounds;
    let runs: usize = cells.iter().map(|cell| cell.contestants.len()).sum::<usize>() * rounds;
    let expected = runs as f64 * (lab.seconds + lab.common.warmup + OVERHEAD);
    eprintln!("{runs} measurements, about {expected:.0} s");
    let mut devices: Vec<Device> = Vec::new();
    let mut temporary = Vec::new();
    for cell in cells {
        if !devices.contains(&cell.device) {
            devices.push(cell.device);
            temporary.extend(cell.device.prepare(lab)?);
        }
    }
    let mut all = Vec::new();
    for (index, cell) in cells.iter().enumerate() {
        eprintln!("[{}/{}] {}", index + 1, cells.len(), cell.labels.join(" "));
        let mut series: Vec<_> = cell
            .contestants
            .iter()
            .map(|contestant| Series {
                cell: index,
                labels: cell.labels.clone(),
                name: contestant.name(cell.device),
                samples: Vec::new(),
                engine: None,
                error: None,
            })
            .collect();
        for round in 0..rounds {
            // There and back, so that a drift favours nobody.
            let mut order: Vec<usize> = (0..series.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for at in order {
                let one = &mut series[at];
                if one.error.is_none() {
                    match cell.contestants[at].measure(lab, cell, &mut one.engine) {
                        Ok(sample) => one.samples.push(sample),
                        Err(error) => {
                            eprintln!("  {}: {error:#}", one.name);
                            one.error = Some(format!("{error:#}"));
                        }
                    }
                }
            }
        }
        all.append(&mut series);
    }
    Ok(all)
}

impl Contestant {
    /// The word in tables.
    pub(crate) fn name(&self, device: Device) -> String {
        match self {
            Self::Fio => "bare: fio io_uring".into(),
            Self::Engine(name) => format!("bare: {name}"),
            Self::Server(server) => server.name_on(device),
            Self::Client(client, _) => client.name().into(),
        }
    }

    fn measure(&self, lab: &Lab, cell: &Cell, engine: &mut Option<String>) -> Result<Sample> {
        let Cell { device, load, queues, .. } = cell;
        let file = || device.path(lab).context("a null device cannot be measured bare");
        match self {
            Self::Fio => fio::run(lab, file()?, load),
            Self::Engine(name) => {
                let warmup = Duration::from_secs_f64(lab.common.warmup);
                let time = Duration::from_secs_f64(lab.seconds);
                let Load { depth, write, sequential, .. } = *load;
                let size = load.size as usize;
                let direct = Direct { depth, size, write, sequential, warmup, time };
                let ran = engine::run(name, file()?, &direct)?;
                let iops = ran.done as f64 / ran.seconds;
                Ok(Sample { iops, mb_s: iops * size as f64 / 1e6, ..Sample::default() })
            }
            Self::Server(server) | Self::Client(_, server) => {
                let client = match self {
                    Self::Client(client, _) => *client,
                    _ => lab.common.client,
                };
                let running = server.start(lab, *device, *queues)?;
                let mut usage = Vec::new();
                let mut boundary = || {
                    // What this process writes is kicks.
                    usage.push((running.usage()?, Usage::of(std::process::id())?.writes));
                    Ok(())
                };
                let socket = running.socket();
                let outcome = client::attack_by(client, lab, socket, *queues, load, &mut boundary);
                *engine = running.engine();
                let mut outcome = outcome.with_context(|| running.last_words())?;
                let (used, kicks) = match usage[..] {
                    [(before, b), (after, a)] => (after.since(&before), a - b),
                    _ => (Usage::default(), 0),
                };
                outcome.kicks = outcome.kicks.or(Some(kicks));
                Ok(Sample::of(&outcome, load, &used))
            }
        }
    }
}

impl Sample {
    /// What client and kernel have counted.
    pub(crate) fn of(outcome: &Outcome, load: &Load, used: &Usage) -> Self {
        let done = outcome.done.max(1) as f64;
        let calls = match load.waiting {
            // Each sleep ends with a call, each call is a write: the smaller count is closer.
            Waiting::Sleeping => used.writes.min(outcome.sleeps.unwrap_or(u64::MAX)),
            Waiting::Polling => used.writes,
        };
        let percentile = |p: f64| outcome.latency.value_at_quantile(p) as f64 / 1e3;
        Self {
            iops: outcome.done as f64 / outcome.seconds,
            mb_s: outcome.bytes as f64 / outcome.seconds / 1e6,
            server_ns: Some(used.cpu_ns as f64 / done),
            client_ns: Some(outcome.cpu_ns as f64 / done),
            kicks: outcome.kicks.map(|kicks| kicks as f64 / done),
            calls: Some(calls as f64 / done),
            switches: Some(used.switches as f64 / done),
            latency: load.timed.then(|| Latency {
                submit_us: outcome.submit_ns as f64 / done / 1e3,
                complete_us: outcome.complete_ns as f64 / done / 1e3,
                mean_us: outcome.latency.mean() / 1e3,
                p50_us: percentile(0.5),
                p90_us: percentile(0.9),
                p99_us: percentile(0.99),
                p9999_us: percentile(0.9999),
            }),
        }
    }
}
