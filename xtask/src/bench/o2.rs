//! Origin O2: looking for completions right after each submission, on and off.
//!
//! The back-end runs in this process, because no option of the daemon turns it off.

use crate::bench::Lab;
use crate::bench::client::{self, IOMETER, Load};
use crate::bench::contest::{Sample, median};
use crate::bench::image::Device;
use crate::bench::options::{Waiting, pin};
use crate::bench::proc::Usage;
use crate::bench::report::{Report, Table, count};
use anyhow::{Context, Result, bail};
use clap::Args;
use hdrhistogram::Histogram;
use ringway_disk::{CacheMode, EngineKind, Source};
use ringway_export::WorkerStats;
use ringway_testkit::rig::{Rig, RigOptions};
use serde_json::json;

/// Which disk, which load.
#[derive(Debug, Args)]
pub(crate) struct O2Args {
    /// Where the data is: tmpfs, file, sim:ram, sim:ssd, sim:hdd.
    #[arg(long, default_value = "tmpfs")]
    on: String,
    /// The engines; a simulation has its own.
    #[arg(long, value_delimiter = ',', default_value = "linux-aio,io_uring", value_name = "LIST")]
    engines: Vec<EngineKind>,
    /// Queues.
    #[arg(long, default_value_t = 8)]
    queues: u16,
    /// Workers that serve them.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Requests in flight per queue.
    #[arg(long, default_value_t = 128)]
    depth: u32,
    /// How the client waits.
    #[arg(long, value_enum, default_value = "polling")]
    clients: Waiting,
}

const QUANTILES: [f64; 11] = [0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9999];

/// Completions per harvest as published in September 2016.
const PUBLISHED_HARVESTS: [(&str, [u64; 11]); 2] = [
    ("published: off", [2, 4, 42, 112, 128, 128, 128, 128, 128, 128, 128]),
    ("published: on", [1, 1, 4, 14, 33, 45, 47, 48, 50, 51, 108]),
];

/// MB/s, IOPS, latencies in µs as published.
const PUBLISHED_SPEED: [[&str; 12]; 2] = [
    [
        "published: off",
        "1822.7",
        "179779",
        "",
        "338.35",
        "1051.45",
        "1389.83",
        "1048",
        "1384",
        "1800",
        "4704",
        "",
    ],
    [
        "published: on",
        "1921.2",
        "189529",
        "1.054",
        "329.61",
        "988.78",
        "1318.42",
        "1012",
        "1224",
        "1496",
        "5408",
        "",
    ],
];

/// All rounds of one engine, off or on.
#[derive(Debug)]
struct Half {
    name: String,
    samples: Vec<Sample>,
    harvests: Histogram<u64>,
    syscalls: Vec<f64>,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &O2Args) -> Result<Report> {
    let (source, engines, _temporary) = match args.on.strip_prefix("sim:") {
        Some(model) => {
            let model = model.parse()?;
            let source = Source::Sim { model, bytes: lab.common.tmpfs_mib << 20 };
            (source, vec![EngineKind::Sim(model)], None)
        }
        None => {
            let device = match args.on.as_str() {
                "tmpfs" => Device::Tmpfs,
                "file" => Device::File,
                other => {
                    bail!("--on {other}: it is none of tmpfs, file, sim:ram, sim:ssd, sim:hdd")
                }
            };
            let temporary = device.prepare(lab)?;
            let path = device.path(lab).context("a file")?.to_path_buf();
            (Source::Path(path), args.engines.clone(), temporary)
        }
    };
    let mut halves = Vec::new();
    for engine in engines {
        let mut pair = [false, true].map(|on| Half {
            name: format!("{engine}: {}", if on { "on" } else { "off" }),
            samples: Vec::new(),
            harvests: WorkerStats::default().harvests,
            syscalls: Vec::new(),
        });
        for round in 0..lab.common.rounds {
            for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                eprintln!("[{}/{}] {}", round + 1, lab.common.rounds, pair[at].name);
                one(lab, args, &source, engine, at == 1, &mut pair[at])?;
            }
        }
        halves.extend(pair);
    }
    Ok(report(args, &halves))
}

fn one(
    lab: &Lab,
    args: &O2Args,
    source: &Source,
    engine: EngineKind,
    on: bool,
    half: &mut Half,
) -> Result<()> {
    let mut options = RigOptions::new(source.clone(), engine).queues(args.queues, args.workers);
    options.harvest_at_once = on;
    if matches!(source, Source::Path(_)) {
        options.disk.cache = Some(CacheMode::None);
    }
    // Threads stay on the cores of whoever starts them.
    pin(&lab.common.server_cpus)?;
    let mut rig = Rig::start(&options);
    pin(&lab.common.client_cpus)?;
    let load =
        Load { size: 64 << 10, mix: IOMETER, timed: true, ..Load::reads(args.depth, args.clients) };
    let stream = rig.connect();
    let mut seen = Vec::new();
    let mut boundary = || {
        let mut stats = WorkerStats::default();
        rig.stats().iter().for_each(|worker| stats.add(worker));
        let server = |name: &str| name.starts_with("worker-") || name.starts_with("iou-wrk");
        seen.push((stats, Usage::of_threads(std::process::id(), server)?));
        Ok(())
    };
    let connect = |options: &ringway_driver::Options| options.over(stream);
    let outcome = client::attack_over(lab, connect, args.queues, &load, &mut boundary)?;
    let [(before, used_before), (mut after, used_after)] =
        <[_; 2]>::try_from(seen).map_err(|_| anyhow::anyhow!("two looks were expected"))?;
    let mut used = used_after.since(&used_before);
    // Writes of this process are the client's as well.
    used.writes = 0;
    let mut sample = Sample::of(&outcome, &load, &used);
    sample.calls = None;
    half.samples.push(sample);
    after.harvests.subtract(&before.harvests).context("a worker forgot harvests")?;
    half.harvests.add(&after.harvests).context("harvests do not add up")?;
    let calls = after.engine.syscalls - before.engine.syscalls;
    half.syscalls.push(calls as f64 / outcome.done.max(1) as f64);
    Ok(())
}

fn report(args: &O2Args, halves: &[Half]) -> Report {
    let published = PUBLISHED_HARVESTS.iter().map(|(name, row)| {
        let mut cells = vec![(*name).to_owned()];
        cells.extend(row.iter().map(ToString::to_string));
        cells
    });
    let ours = halves.iter().map(|half| {
        let mut cells = vec![half.name.clone()];
        cells.extend(QUANTILES.map(|q| half.harvests.value_at_quantile(q).to_string()));
        cells
    });
    let Load { depth, .. } = Load::reads(args.depth, args.clients);
    let what = format!(
        "{} queues, depth {depth}, reads of 512 B to 64 KiB (fio's IOmeter mix), {}, client {}",
        args.queues, args.on, args.clients
    );
    let harvests = Table {
        title: format!("Completions per harvest, percentiles: {what}"),
        head: vec![
            "harvest on submit",
            "1st",
            "10th",
            "20th",
            "30th",
            "40th",
            "50th",
            "60th",
            "70th",
            "80th",
            "90th",
            "99.99th",
        ],
        rows: published.chain(ours).collect(),
        notes: Vec::new(),
    };
    let mut rows: Vec<Vec<String>> =
        PUBLISHED_SPEED.iter().map(|row| row.map(str::to_owned).to_vec()).collect();
    for (at, half) in halves.iter().enumerate() {
        // Off and on stand in pairs.
        rows.push(speed_row(half, (at % 2 == 1).then(|| &halves[at - 1])));
    }
    let speed = Table {
        title: format!("Speed: {what}"),
        head: vec![
            "harvest on submit",
            "MB/s",
            "IOPS",
            "on ÷ off",
            "submit us",
            "complete us",
            "latency us",
            "p50",
            "p90",
            "p99",
            "p99.99",
            "CPU ns/IO",
            "syscalls/IO",
        ],
        rows,
        notes: vec!["Percentiles: ours of the latency, the published ones of completion.".into()],
    };
    let data: Vec<_> = halves
        .iter()
        .map(|half| {
            let harvests = QUANTILES.map(|q| (q, half.harvests.value_at_quantile(q)));
            let (name, samples, syscalls) = (&half.name, &half.samples, &half.syscalls);
            json!({ "name": name, "samples": samples, "syscalls": syscalls, "harvests": harvests })
        })
        .collect();
    Report { name: "o2", tables: vec![harvests, speed], data: json!(data) }
}

fn speed_row(half: &Half, off: Option<&Half>) -> Vec<String> {
    let of = |half: &Half, what: &dyn Fn(&Sample) -> f64| {
        median(half.samples.iter().map(what).collect()).unwrap_or(f64::NAN)
    };
    let latency = |what: fn(&crate::bench::contest::Latency) -> f64| {
        let value = of(half, &|sample| sample.latency.as_ref().map_or(f64::NAN, what));
        format!("{value:.1}")
    };
    let iops = |half: &Half| of(half, &|sample| sample.iops);
    vec![
        half.name.clone(),
        format!("{:.1}", of(half, &|sample| sample.mb_s)),
        count(iops(half)),
        off.map_or(String::new(), |off| format!("{:.3}", iops(half) / iops(off))),
        latency(|l| l.submit_us),
        latency(|l| l.complete_us),
        latency(|l| l.mean_us),
        latency(|l| l.p50_us),
        latency(|l| l.p90_us),
        latency(|l| l.p99_us),
        latency(|l| l.p9999_us),
        format!("{:.0}", of(half, &|sample| sample.server_ns.unwrap_or(f64::NAN))),
        format!("{:.4}", median(half.syscalls.clone()).unwrap_or(f64::NAN)),
    ]
}
