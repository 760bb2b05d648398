//! O1: 16 KiB writes at depth 74 through each engine, beside the bare file (QEMU, September 2008).

use crate::origins::finding::Finding;
use crate::origins::fio::{self, FioLoad};
use crate::origins::lab::{Lab, client_cpus};
use crate::origins::server::{QSD, Running, ServerKind, is_installed};
use crate::pattern::{Rw, Sizes};
use crate::target::bare;
use crate::versus::median;
use anyhow::{Context, Result};
use ringway_disk::{CacheMode, EngineKind, OpenOptions, SchedulerMode, Source, open};
use ringway_export::usable_engines;
use serde_json::json;
use std::path::Path;

const DEPTH: u32 = 74;
const BYTES: u32 = 16 << 10;

/// MB/s, submit latency in µs, completion latency in ms: random, then sequential write.
type Published = (&'static str, [f64; 3], [f64; 3]);

const PUBLISHED: [Published; 5] = [
    ("bare metal, O_DIRECT", [61.2, 13.07, 19.59], [128.1, 10.90, 9.45]),
    ("guest, cache=off, posix-aio before", [4.7, 3467.44, 254.08], [5.1, 3152.00, 231.06]),
    ("guest, cache=off, linux-aio", [61.1, 75.35, 19.57], [130.0, 83.83, 8.99]),
    ("guest, cache=on, posix-aio before", [127.0, 115.78, 9.19], [184.0, 80.46, 6.35]),
    ("guest, cache=on, posix-aio after", [126.0, 67.35, 9.30], [165.0, 70.90, 7.09]),
];

/// Who takes part.
#[derive(Clone, Copy, Debug)]
enum Contestant {
    Fio,
    Bare,
    Served(ServerKind),
}

impl Contestant {
    fn name(self) -> String {
        match self {
            Self::Fio => "bare: fio, io_uring".into(),
            Self::Bare => "bare: ringway, best engine".into(),
            Self::Served(ServerKind::Ringway { engine, .. }) => {
                format!("ringway: {}", engine.map_or("auto", EngineKind::name))
            }
            Self::Served(ServerKind::Qsd(aio)) => format!("{QSD}: {aio}"),
        }
    }
}

/// MB/s, submit latency in µs, completion latency in ms, the server's CPU time per I/O in ns.
type Sample = [Option<f64>; 4];

pub(super) fn run(lab: &Lab<'_>) -> Result<Vec<Finding>> {
    let mut contestants = Vec::new();
    if is_installed("fio") {
        contestants.push(Contestant::Fio);
    }
    contestants.push(Contestant::Bare);
    for (engine, works) in usable_engines() {
        if works.is_ok() {
            contestants.push(Contestant::Served(ServerKind::Ringway {
                engine: Some(engine),
                path: SchedulerMode::Auto,
            }));
        }
    }
    if is_installed(QSD) {
        contestants
            .extend(["native", "io_uring"].map(|aio| Contestant::Served(ServerKind::Qsd(aio))));
    }
    let path = lab.disk()?;
    let mut findings = Vec::new();
    for rw in [Rw::Randwrite, Rw::Write] {
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); contestants.len()];
        lab.alternate(contestants.len(), |at| {
            let contestant = contestants[at];
            lab.tell(&format!("O1 {}: {}", rw.name(), contestant.name()));
            let sample = measure(lab, contestant, rw, &path);
            samples[at].push(sample.with_context(|| format!("O1, {}", contestant.name()))?);
            Ok(())
        })?;
        findings.push(finding(rw, &contestants, &samples));
    }
    Ok(findings)
}

fn measure(lab: &Lab<'_>, contestant: Contestant, rw: Rw, path: &Path) -> Result<Sample> {
    let load = lab.load(rw, Sizes::one(BYTES), DEPTH, 1);
    let outcome = match contestant {
        Contestant::Fio => {
            let cpus: Vec<_> = client_cpus().iter().map(usize::to_string).collect();
            let found = fio::run(&FioLoad {
                path,
                rw: rw.name(),
                bytes: BYTES,
                depth: DEPTH,
                runtime: lab.runtime,
                ramp: load.ramp,
                cpus: &cpus.join(","),
            })?;
            return Ok([Some(found.mb_s), Some(found.slat_us), Some(found.clat_us / 1e3), None]);
        }
        Contestant::Bare => lab.measure(&mut bare(direct(path, None)?, &load, 0), &load)?,
        Contestant::Served(kind) => {
            let mut running = Running::start(kind, &path.display().to_string())?;
            let mut opened = running.open(&load)?;
            lab.measure(&mut opened, &load)?
        }
    };
    let side = outcome.tick.total();
    Ok([
        Some(side.bytes as f64 / outcome.seconds / 1e6),
        Some(side.slat.mean() / 1e3),
        Some(side.clat.mean() / 1e6),
        outcome.server_ns.map(|ns| ns as f64 / side.done.max(1) as f64),
    ])
}

/// Opens an image past the page cache, for writing.
pub(super) fn direct(path: &Path, engine: Option<EngineKind>) -> Result<ringway_disk::Disk> {
    let mut options = OpenOptions::new(Source::Path(path.into()));
    options.cache = Some(CacheMode::None);
    options.engine = engine;
    options.engines = usable_engines();
    open(&options).context("use --dir to name a folder on another file system")
}

fn finding(rw: Rw, contestants: &[Contestant], samples: &[Vec<Sample>]) -> Finding {
    let kind = if rw == Rw::Write { "sequential write" } else { "random write" };
    let mut rows = Vec::new();
    let mut bars = Vec::new();
    let mut row = |name: String, values: [Option<f64>; 4], bare: Option<f64>| {
        let number = |value: Option<f64>, digits| {
            value.map_or("–".to_owned(), |value| format!("{value:.digits$}"))
        };
        let part = values[0].zip(bare).map(|(mb_s, bare)| mb_s / bare * 100.0);
        rows.push(vec![
            name.clone(),
            number(values[0], 1),
            part.map_or("–".into(), |part| format!("{part:.1} %")),
            number(values[1], 2),
            number(values[2], 2),
            number(values[3], 0),
        ]);
        bars.extend(part.map(|part| (name, part)));
    };
    let published = |p: &Published| if rw == Rw::Write { p.2 } else { p.1 };
    let native = published(&PUBLISHED[0])[0];
    for published_row in &PUBLISHED {
        let [mb_s, slat, clat] = published(published_row).map(Some);
        row(format!("published: {}", published_row.0), [mb_s, slat, clat, None], Some(native));
    }
    let middle = |samples: &[Sample], at: usize| {
        median(samples.iter().filter_map(|sample| sample[at]).collect())
    };
    let bare = samples.first().and_then(|first| middle(first, 0));
    for (contestant, samples) in contestants.iter().zip(samples) {
        row(contestant.name(), [0, 1, 2, 3].map(|at| middle(samples, at)), bare);
    }
    let data = contestants.iter().zip(samples).map(|(contestant, samples)| {
        json!({ "name": contestant.name(), "mb_s, slat_us, clat_ms, server_ns": samples })
    });
    Finding {
        title: format!("O1: 16 KiB {kind}, depth {DEPTH}"),
        head: vec!["", "MB/s", "of bare", "submit µs", "complete ms", "server CPU ns/IO"],
        rows,
        notes: vec![
            "Bare is the first that was measured on the file itself. The client sleeps.".into(),
        ],
        bars: ("percent of the bare file's MB/s", bars),
        even: 100.0,
        data: data.collect(),
        ..Finding::default()
    }
}
