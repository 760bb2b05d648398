//! Origin O4: page-aligned versus 512-byte-aligned buffers, counted at the block device.

use crate::bench::Lab;
use crate::bench::contest::median;
use crate::bench::engine::{self, Direct, Until};
use crate::bench::image::Device;
use crate::bench::report::{Report, Table, count};
use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Which writes.
#[derive(Debug, Args)]
pub(crate) struct O4Args {
    /// Writes of 4 KiB.
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    small: u64,
    /// Writes of 512 KiB.
    #[arg(long, default_value_t = 4000, value_name = "N")]
    large: u64,
    /// Size of the large ones in KiB.
    #[arg(long, default_value_t = 512, value_name = "KIB")]
    large_kib: usize,
    /// Leave out the longest writes that the device takes in one request.
    #[arg(long)]
    no_longest: bool,
    /// Writes in flight; dd has one.
    #[arg(long, default_value_t = 1)]
    depth: u32,
    /// The engines.
    #[arg(long, value_delimiter = ',', default_value = "io_uring,linux-aio", value_name = "LIST")]
    engines: Vec<String>,
}

/// All rounds of one alignment.
#[derive(Debug, Default)]
struct Half {
    requests: Vec<f64>,
    sectors: Vec<f64>,
    seconds: Vec<f64>,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &O4Args) -> Result<Report> {
    let temporary = Device::File.prepare(lab)?;
    let path = &lab.common.file;
    let stat = stat_of(path)?;
    let mut sizes = vec![(4 << 10, args.small), (args.large_kib << 10, args.large)];
    sizes.extend(longest(&stat).filter(|_| !args.no_longest).map(|size| (size, args.large)));
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    for (size, writes) in sizes {
        for engine in &args.engines {
            let mut halves = [Half::default(), Half::default()];
            for round in 0..lab.common.rounds {
                for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                    eprintln!(
                        "[{}/{}] {writes} × {} KiB, {engine}, {}",
                        round + 1,
                        lab.common.rounds,
                        size >> 10,
                        ALIGNMENTS[at]
                    );
                    let direct = Direct {
                        depth: args.depth,
                        size,
                        write: true,
                        sequential: true,
                        skew: [0, 512][at],
                        until: Until::Count(writes),
                    };
                    let before = written(&stat)?;
                    let ran = engine::run(engine, path, &direct)?;
                    let after = written(&stat)?;
                    let half = &mut halves[at];
                    half.requests.push((after.0 - before.0) as f64 / ran.done as f64);
                    half.sectors.push((after.1 - before.1) as f64);
                    half.seconds.push(ran.seconds);
                }
            }
            for (at, half) in halves.iter().enumerate() {
                rows.push(row(size, writes, engine, at, half, &halves[0], &halves[1]));
                data.push(json!({
                    "size": size, "writes": writes, "engine": engine, "buffers": ALIGNMENTS[at],
                    "requests_per_write": half.requests, "sectors": half.sectors,
                    "seconds": half.seconds,
                }));
            }
        }
    }
    drop(temporary);
    let table = Table {
        title: format!(
            "Sequential writes, O_DIRECT, depth {}, by alignment of buffers",
            args.depth
        ),
        head: vec![
            "writes",
            "KiB",
            "engine",
            "buffers",
            "requests/write",
            "sectors/request",
            "MB/s",
            "writes/s",
            "requests 512 ÷ page",
            "page ÷ 512 speed",
        ],
        rows,
        notes: vec![
            format!(
                "Requests: write requests completed by the device ({}), least of the rounds; its \
                 max_sectors_kb is {}, its max_segments {}.",
                stat.display(),
                limit(&stat, "max_sectors_kb"),
                limit(&stat, "max_segments"),
            ),
            "Buffers consist of pages scattered in physical memory, so that each is a segment."
                .into(),
            "Published (QEMU 2015): blktrace showed 1023 + 8 + 1016 + 8 … sectors before, clean \
             1024-sector requests after: half the requests, 5 % faster."
                .into(),
        ],
    };
    Ok(Report { name: "o4", tables: vec![table], data: json!(data) })
}

const ALIGNMENTS: [&str; 2] = ["page-aligned", "512-aligned"];

fn row(
    size: usize,
    writes: u64,
    engine: &str,
    at: usize,
    half: &Half,
    page: &Half,
    odd: &Half,
) -> Vec<String> {
    let of = |values: &[f64]| median(values.to_vec()).unwrap_or(f64::NAN);
    let (requests, seconds) = (least(&half.requests), of(&half.seconds));
    let per_second = writes as f64 / seconds;
    let mut row = vec![
        writes.to_string(),
        (size >> 10).to_string(),
        engine.to_owned(),
        ALIGNMENTS[at].to_owned(),
        format!("{requests:.3}"),
        format!("{:.0}", least(&half.sectors) / (requests * writes as f64)),
        format!("{:.1}", per_second * size as f64 / 1e6),
        count(per_second),
    ];
    if at == 1 {
        row.push(format!("{:.2}", least(&odd.requests) / least(&page.requests)));
        row.push(format!("{:.3}", of(&odd.seconds) / of(&page.seconds)));
    }
    row
}

/// The count without what others wrote meanwhile, which only ever adds.
fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The statistics of the block device that a file is on.
fn stat_of(path: &Path) -> Result<PathBuf> {
    let device = std::fs::metadata(path)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let found = folder.canonicalize().with_context(|| {
        format!("{} is on no block device: give --file on a disk", path.display())
    })?;
    Ok(found.join("stat"))
}

/// The most bytes of one request, if each page of a page-aligned buffer is a segment.
fn longest(stat: &Path) -> Option<usize> {
    let segments: usize = limit(stat, "max_segments").parse().ok()?;
    let kib: usize = limit(stat, "max_sectors_kb").parse().ok()?;
    Some((segments * 4).min(kib) << 10)
}

/// A limit of the device's queue.
fn limit(stat: &Path, name: &str) -> String {
    // A partition's folder lies in that of its disk.
    let folders = stat.ancestors().skip(1).take(2);
    let mut texts = folders.map(|f| std::fs::read_to_string(f.join("queue").join(name)));
    texts.find_map(Result::ok).map_or("unknown".into(), |text| text.trim().to_owned())
}

/// Write requests completed, and sectors written.
fn written(stat: &Path) -> Result<(u64, u64)> {
    let text = std::fs::read_to_string(stat).with_context(|| format!("no {}", stat.display()))?;
    let mut fields = text.split_whitespace().skip(4).map(str::parse);
    let mut next = || fields.next().and_then(Result::ok).context("a short stat file");
    let (requests, _merges, sectors) = (next()?, next()?, next()?);
    Ok((requests, sectors))
}
