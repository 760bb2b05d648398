//! Contestants measured in turn, cell by cell, round by round.

use crate::bench::daemon::Server;
use crate::bench::fio;
use crate::bench::foreign::Watch;
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::{Load, measure_file, measure_server};
use crate::bench::options::{Client, Waiting};
use crate::bench::sample::Sample;
use anyhow::{Context, Result};
use ringway_bench::usage::Usage;
use ringway_bench::{Outcome, median};
use ringway_control::config::Choice;
use ringway_disk::EngineKind;
use serde::Serialize;

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
    Engine(Choice<EngineKind>),
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
    /// Measurements that do not count, because others used the same cores meanwhile.
    pub(crate) dropped: usize,
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
                dropped: 0,
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
                    match undisturbed(lab, cell, at, one) {
                        Ok(Some(sample)) => one.samples.push(sample),
                        Ok(None) => {}
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

/// Attempts at a round that others disturb.
const ATTEMPTS: usize = 3;

/// One measurement, again if others use its cores; `None` if they do each time.
fn undisturbed(lab: &Lab, cell: &Cell, at: usize, one: &mut Series) -> Result<Option<Sample>> {
    for _ in 0..ATTEMPTS {
        let watch = Watch::begin(lab)?;
        let sample = cell.contestants[at].measure(lab, cell, &mut one.engine)?;
        let foreign = watch.foreign_percent()?;
        if lab.foreign_max.is_none_or(|most| foreign <= most) {
            return Ok(Some(Sample { foreign_percent: foreign, ..sample }));
        }
        one.dropped += 1;
    }
    Ok(None)
}

impl Contestant {
    /// The word in tables.
    pub(crate) fn name(&self, device: Device) -> String {
        match self {
            Self::Fio => "bare: fio io_uring".into(),
            Self::Engine(Choice::Auto) => "bare: auto".into(),
            Self::Engine(Choice::Is(engine)) => format!("bare: {engine}"),
            Self::Server(server) => server.name_on(device),
            Self::Client(client, _) => client.name().into(),
        }
    }

    fn measure(&self, lab: &Lab, cell: &Cell, engine: &mut Option<String>) -> Result<Sample> {
        let Cell { device, load, queues, .. } = cell;
        let file = || device.path(lab).context("a null device cannot be measured bare");
        match self {
            Self::Fio => fio::run(lab, file()?, load),
            Self::Engine(kind) => {
                let outcome = measure_file(*kind, lab, file()?, load)?;
                let mb_s = outcome.bytes() as f64 / outcome.seconds / 1e6;
                Ok(Sample { iops: outcome.iops(), mb_s, ..Sample::default() })
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
                let outcome = measure_server(client, lab, socket, *queues, load, &mut boundary);
                *engine = running.engine();
                let outcome = outcome.with_context(|| running.last_words())?;
                let (used, kicks) = match usage[..] {
                    [(before, b), (after, a)] => (after.since(&before), a - b),
                    _ => (Usage::default(), 0),
                };
                Ok(Sample::of(&outcome, load, &used, kicks))
            }
        }
    }
}

impl Sample {
    /// What client and kernel have counted; `writes` are those of the client, for a client that counts no
    /// kicks.
    fn of(outcome: &Outcome, load: &Load, used: &Usage, writes: u64) -> Self {
        let done = outcome.done().max(1) as f64;
        let (kicks, sleeps) = match outcome.effort() {
            Some(effort) => (effort.kicks, effort.sleeps),
            None => (writes, u64::MAX),
        };
        let calls = match load.waiting {
            // Each sleep ends with a call, each call is a write: the smaller count is closer.
            Waiting::Sleeping => used.writes.min(sleeps),
            Waiting::Polling => used.writes,
        };
        Self {
            iops: outcome.iops(),
            mb_s: outcome.bytes() as f64 / outcome.seconds / 1e6,
            server_ns: Some(used.cpu_ns as f64 / done),
            client_ns: Some(outcome.client_ns as f64 / done),
            kicks: Some(kicks as f64 / done),
            calls: Some(calls as f64 / done),
            switches: Some(used.switches as f64 / done),
            latency: None,
            foreign_percent: 0.0,
        }
    }
}
