//! What idle queues cost: one busy disk, alone and beside a hundred idle ones, in turn.

use crate::bench::daemon::Running;
use crate::bench::lab::Lab;
use crate::bench::load::{Load, measure_server};
use crate::bench::options::Waiting;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result};
use clap::Args;
use ringway_bench::median;
use ringway_bench::usage::Usage;
use ringway_driver::{Device, Options};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct IdleArgs {
    /// Idle disks, each connected, with all its queues started.
    #[arg(long, default_value_t = 100)]
    disks: u16,
    /// Queues of each idle disk.
    #[arg(long, default_value_t = 16)]
    queues: u16,
    /// Requests in flight on the busy disk.
    #[arg(long, value_delimiter = ',', default_value = "1,32")]
    depths: Vec<u32>,
    /// How the busy disk's client waits.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "polling,sleeping")]
    clients: Vec<Waiting>,
}

/// A front-end that has started all queues of its disk and asks for nothing.
pub(crate) struct Idle {
    // Queues first: they use the device's memory.
    _queues: Vec<ringway_driver::BlkQueue<()>>,
    _device: Device,
}

impl Idle {
    pub(crate) fn connect(socket: &Path, queues: u16) -> Result<Self> {
        let options = Options::new().queues(queues).queue_size(128).memory(1 << 20);
        let mut device = options.timeout(Duration::from_secs(5)).connect(socket)?;
        let queues = device.queues()?;
        Ok(Self { _queues: queues, _device: device })
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    iops: f64,
    cpu_ns: f64,
}

/// Measures and tabulates. All disks have one worker, so that every idle queue is beside the busy
/// one.
pub(crate) fn run(lab: &Lab, args: &IdleArgs) -> Result<Report> {
    raise_open_files();
    let folder = tempfile::Builder::new().prefix("ringway-idle-").tempdir()?;
    let socket = |name: String| folder.path().join(name);
    let mut config = "workers = 1\n".to_owned();
    for (name, queues) in std::iter::once(("busy".to_owned(), 1))
        .chain((0..args.disks).map(|at| (format!("idle{at}"), args.queues)))
    {
        let path = socket(name);
        let path = path.display();
        let _ =
            write!(config, "[[disk]]\nimage = 'null:1G'\nsocket = '{path}'\nqueues = {queues}\n");
    }
    let file = socket("disks.toml".into());
    std::fs::write(&file, config)?;
    let server = Running::from_file(lab, &file, socket(format!("idle{}", args.disks - 1)))?;
    let busy = socket("busy".into());
    let mut cells = Vec::new();
    for &waiting in &args.clients {
        cells.extend(args.depths.iter().map(|&depth| (waiting, depth, [Vec::new(), Vec::new()])));
    }
    let (mut resting, mut kib) = (Vec::new(), Vec::new());
    for round in 0..lab.common.rounds {
        let alone = server.resident_kib()?;
        for (waiting, depth, samples) in &mut cells {
            // Who goes first changes from round to round.
            for turn in 0..2 {
                let with = (turn + round) % 2 == 1;
                let idle = if with { connect(args, &socket)? } else { Vec::new() };
                samples[usize::from(with)].push(one(lab, &server, &busy, *waiting, *depth)?);
                drop(idle);
            }
        }
        let idle = connect(args, &socket)?;
        kib.push((server.resident_kib()? - alone) / f64::from(args.disks * args.queues));
        // The last turns of polling, and the time in which queues are looked at before they rest.
        std::thread::sleep(Duration::from_millis(500));
        let before = server.usage()?;
        std::thread::sleep(Duration::from_secs(1));
        #[allow(clippy::cast_precision_loss)]
        resting.push(server.usage()?.since(&before).cpu_ns as f64 / 1e7);
        drop(idle);
    }
    Ok(report(args, &cells, &resting, &kib))
}

type Cells = (Waiting, u32, [Vec<Sample>; 2]);

fn connect(args: &IdleArgs, socket: &dyn Fn(String) -> std::path::PathBuf) -> Result<Vec<Idle>> {
    let one = |at| {
        Idle::connect(&socket(format!("idle{at}")), args.queues)
            .with_context(|| format!("idle disk {at}"))
    };
    (0..args.disks).map(one).collect()
}

fn one(lab: &Lab, server: &Running, busy: &Path, waiting: Waiting, depth: u32) -> Result<Sample> {
    let mut usages: Vec<Usage> = Vec::new();
    let mut boundary = || {
        usages.push(server.usage()?);
        Ok(())
    };
    let outcome = measure_server(
        lab.common.client,
        lab,
        busy,
        1,
        &Load::reads(depth, waiting),
        &mut boundary,
    )?;
    let [before, after] = usages[..] else { anyhow::bail!("it was not measured") };
    #[allow(clippy::cast_precision_loss)]
    let (done, cpu_ns) = (outcome.done() as f64, after.since(&before).cpu_ns as f64);
    Ok(Sample { iops: outcome.iops(), cpu_ns: cpu_ns / done.max(1.0) })
}

fn report(args: &IdleArgs, cells: &[Cells], resting: &[f64], kib: &[f64]) -> Report {
    let mut rows = Vec::new();
    for (waiting, depth, [alone, beside]) in cells {
        let of = |samples: &[Sample], what: fn(&Sample) -> f64| {
            median(samples.iter().map(what).collect()).unwrap_or(f64::NAN)
        };
        let (a, b) = (of(alone, |s| s.iops), of(beside, |s| s.iops));
        rows.push(vec![
            format!("depth {depth}, client {waiting}"),
            format!("{a:.0}"),
            format!("{b:.0}"),
            format!("{:+.1} %", (b / a - 1.0) * 100.0),
            format!("{:.0}", of(alone, |s| s.cpu_ns)),
            format!("{:.0}", of(beside, |s| s.cpu_ns)),
        ]);
    }
    let middle = |all: &[f64]| median(all.to_vec()).unwrap_or(f64::NAN);
    let notes = vec![
        format!("All of them idle: {:.2} % of a core in the whole daemon.", middle(resting)),
        format!("Memory: {:.1} KiB resident per idle queue.", middle(kib)),
    ];
    let title = format!(
        "One busy disk beside {} idle disks of {} queues, null device, one worker",
        args.disks, args.queues
    );
    let head = vec!["load", "IOPS alone", "beside", "change", "CPU ns/IO alone", "CPU beside"];
    let pairs = |samples: &[Sample]| samples.iter().map(|s| [s.iops, s.cpu_ns]).collect::<Vec<_>>();
    let data = cells.iter().map(|(waiting, depth, [alone, beside])| {
        json!({ "client": waiting.to_string(), "depth": depth,
                "alone": pairs(alone), "beside": pairs(beside) })
    });
    let data = json!({ "cells": data.collect::<Vec<_>>(), "resting_percent": resting,
                       "kib_per_queue": kib });
    Report { name: "idle", tables: vec![Table { title, head, rows, notes }], data }
}

/// Each queue has two descriptors here, too.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it may not be raised, connecting says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
