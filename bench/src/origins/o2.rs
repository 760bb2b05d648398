//! O2: looking for completions right after each submission, on and off (QEMU, September 2016).
//!
//! The back-end runs in this process, because no option of the daemon turns it off.

use crate::inside::Serving;
use crate::load::{AccessArgs, Load};
use crate::origins::finding::Finding;
use crate::origins::lab::{Lab, on_server_cpus};
use crate::origins::o1::direct;
use crate::pattern::{Rw, Sizes};
use crate::runner;
use crate::target::served_here;
use crate::units::micros;
use crate::versus::median;
use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use ringway_disk::EngineKind;
use ringway_export::{WorkerStats, usable_engines};
use ringway_terminal::short::count;
use serde_json::json;
use std::path::Path;

const QUEUES: u16 = 8;
const DEPTH: u32 = 128;

const QUANTILES: [f64; 11] = [0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9999];

const PUBLISHED_HARVESTS: [(&str, [u64; 11]); 2] = [
    ("published: before", [2, 4, 42, 112, 128, 128, 128, 128, 128, 128, 128]),
    ("published: after", [1, 1, 4, 14, 33, 45, 47, 48, 50, 51, 108]),
];

const PUBLISHED_SPEED: [[&str; 8]; 2] = [
    [
        "published: before",
        "1822.7",
        "179779",
        "",
        "338.35",
        "1051.45",
        "1389.83",
        "1048 / 1384 / 1800 / 4704",
    ],
    [
        "published: after",
        "1921.2",
        "189529",
        "1.054",
        "329.61",
        "988.78",
        "1318.42",
        "1012 / 1224 / 1496 / 5408",
    ],
];

/// All rounds of one engine, off or on.
struct Half {
    name: String,
    engine: EngineKind,
    on: bool,
    /// One thread of the client looks after all queues and never sleeps, instead of one for each.
    polls: bool,
    harvests: Histogram<u64>,
    /// MB/s, IOPS, slat, clat and lat mean, clat p50, p90, p99, p99.99, all in ns; system calls of
    /// the engine per I/O.
    samples: Vec<[f64; 10]>,
}

pub(super) fn run(lab: &Lab<'_>) -> Result<Vec<Finding>> {
    let engines = [EngineKind::LinuxAio, EngineKind::IoUring].into_iter().filter(|engine| {
        usable_engines().iter().any(|(usable, works)| usable == engine && works.is_ok())
    });
    let both = engines.flat_map(|engine| [(engine, false), (engine, true)]);
    let mut halves: Vec<Half> = both
        .flat_map(|(engine, polls)| {
            let client = if polls { "polls" } else { "sleeps" };
            [(false, "later"), (true, "at once")].map(|(on, when)| Half {
                name: format!("{engine}, client {client}: {when}"),
                engine,
                on,
                polls,
                harvests: WorkerStats::default().harvests,
                samples: Vec::new(),
            })
        })
        .collect();
    lab.alternate(halves.len(), |at| {
        lab.tell(&format!("O2 {}", halves[at].name));
        measure(lab, &mut halves[at])
    })?;
    Ok(findings(&halves, &lab.memory()?))
}

fn measure(lab: &Lab<'_>, half: &mut Half) -> Result<()> {
    let sizes: Sizes = "iometer".parse().map_err(anyhow::Error::msg)?;
    let (jobs, queues) = if half.polls { (1, QUEUES) } else { (QUEUES, 1) };
    let load = Load { queues, polling: half.polls, ..lab.load(Rw::Randread, sizes, DEPTH, jobs) };
    let serving =
        Serving { queues: QUEUES, queue_size: 1024, workers: 1, harvest_at_once: half.on };
    let access = AccessArgs::default();
    let disk = direct(&lab.memory()?, Some(half.engine))?;
    let mut opened = on_server_cpus(|| served_here(disk, &serving, &load, &access))?;
    let inside = opened.inside.take().context("a back-end in this process")?;
    let mut seen = Vec::new();
    let mut boundary = || {
        seen.push(inside.stats()?);
        Ok(())
    };
    let outcome =
        runner::run(&mut opened, &load, lab.signal, &mut boundary, &mut |_| lab.bar.tick());
    // It disconnects before the back-end ends.
    drop(opened);
    let outcome = outcome?;
    let [before, mut after] =
        <[_; 2]>::try_from(seen).map_err(|_| anyhow::anyhow!("two looks were expected"))?;
    after.harvests.subtract(&before.harvests).context("a worker forgot harvests")?;
    half.harvests.add(&after.harvests).context("harvests do not add up")?;
    let side = outcome.tick.total();
    let calls = (after.engine.syscalls - before.engine.syscalls) as f64;
    let p = |percentile: f64| side.clat.value_at_percentile(percentile) as f64;
    half.samples.push([
        side.bytes as f64 / outcome.seconds / 1e6,
        side.done as f64 / outcome.seconds,
        side.slat.mean(),
        side.clat.mean(),
        side.lat.mean(),
        p(50.0),
        p(90.0),
        p(99.0),
        p(99.99),
        calls / side.done.max(1) as f64,
    ]);
    Ok(())
}

fn findings(halves: &[Half], image: &Path) -> Vec<Finding> {
    let what = format!("{QUEUES} queues, depth {DEPTH}, random reads of fio's IOmeter sizes");
    let published = PUBLISHED_HARVESTS.iter().map(|(name, row)| {
        let cells = row.iter().map(u64::to_string);
        std::iter::once((*name).to_owned()).chain(cells).collect::<Vec<_>>()
    });
    let ours = halves.iter().map(|half| {
        let cells = QUANTILES.map(|q| half.harvests.value_at_quantile(q).to_string());
        std::iter::once(half.name.clone()).chain(cells).collect()
    });
    let harvests = Finding {
        title: format!("O2: completions found per harvest, percentiles; {what}"),
        head: vec![
            "", "1st", "10th", "20th", "30th", "40th", "50th", "60th", "70th", "80th", "90th",
            "99.99th",
        ],
        rows: published.chain(ours).collect(),
        notes: vec![format!(
            "At once: completions are looked for right after each submission; later: only when \
             there is nothing to submit. One worker serves all queues here, with direct I/O on {}.",
            place(image)
        )],
        ..Finding::default()
    };
    vec![harvests, speed(halves, &what)]
}

fn speed(halves: &[Half], what: &str) -> Finding {
    let mut rows: Vec<Vec<String>> = PUBLISHED_SPEED
        .iter()
        .map(|row| row.iter().map(|&cell| cell.to_owned()).chain([String::new()]).collect())
        .collect();
    let mut bars = vec![("published: QEMU, linux-aio".to_owned(), 5.4)];
    for (at, half) in halves.iter().enumerate() {
        let of = |half: &Half, what: usize| {
            median(half.samples.iter().map(|sample| sample[what]).collect()).unwrap_or(f64::NAN)
        };
        let mine = |what| of(half, what);
        // Off and on stand in pairs.
        let ratio = half.on.then(|| mine(1) / of(&halves[at - 1], 1));
        rows.push(vec![
            half.name.clone(),
            format!("{:.1}", mine(0)),
            count(mine(1)),
            ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")),
            micros(mine(2)),
            micros(mine(3)),
            micros(mine(4)),
            [5, 6, 7, 8].map(|what| format!("{:.0}", mine(what) / 1e3)).join(" / "),
            format!("{:.4}", mine(9)),
        ]);
        let (whose, _) = half.name.split_once(':').unwrap_or((&half.name, ""));
        bars.extend(ratio.map(|ratio| (format!("ringway: {whose}"), (ratio - 1.0) * 100.0)));
    }
    let data = halves.iter().map(|half| json!({ "name": half.name, "samples": half.samples }));
    Finding {
        title: format!("O2: speed; {what}"),
        head: vec![
            "",
            "MB/s",
            "IOPS",
            "at once ÷ later",
            "submit µs",
            "complete µs",
            "latency µs",
            "complete p50 / p90 / p99 / p99.99 µs",
            "calls/IO",
        ],
        rows,
        notes: vec![
            "A client that sleeps has a thread for each queue, as fio had a job; one that polls has one \
             for all."
                .into(),
        ],
        bars: ("percent of IOPS won by looking at once", bars),
        even: 0.0,
        data: data.collect(),
        ..Finding::default()
    }
}

/// What the image lies on: tmpfs, or else whatever the folder is on.
fn place(image: &Path) -> String {
    match rustix::fs::statfs(image) {
        Ok(stat) if stat.f_type == libc::TMPFS_MAGIC => "tmpfs (a file in memory)".into(),
        _ => "the file system of --fast-dir".into(),
    }
}
