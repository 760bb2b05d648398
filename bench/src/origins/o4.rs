//! O4: page-aligned and 512-byte-aligned buffers, counted at the block device (QEMU, May 2015).

use crate::origins::finding::Finding;
use crate::origins::lab::Lab;
use crate::origins::o1::direct;
use crate::pattern::{Rw, Sizes};
use crate::target::bare;
use crate::versus::median;
use anyhow::{Context, Result};
use ringway_disk::EngineKind;
use ringway_export::usable_engines;
use ringway_terminal::short::count;
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Writes of 4 KiB, as published; of larger ones as many as make a fair measurement.
const SMALL: u64 = 100_000;
const LARGE: u64 = 2000;

const ALIGNMENTS: [(&str, usize); 2] = [("page-aligned", 0), ("512-aligned", 512)];

/// All rounds of one alignment.
#[derive(Debug, Default)]
struct Half {
    requests: Vec<f64>,
    sectors: Vec<f64>,
    seconds: Vec<f64>,
}

pub(super) fn run(lab: &Lab<'_>) -> Result<Vec<Finding>> {
    let path = lab.disk()?;
    let Ok(stat) = stat_of(&path) else {
        let title = "O4: left out, because the image is on no block device: use --dir".into();
        return Ok(vec![Finding { title, ..Finding::default() }]);
    };
    let works = |engine: &EngineKind| {
        usable_engines().iter().any(|(usable, works)| usable == engine && works.is_ok())
    };
    let engines: Vec<_> =
        [EngineKind::IoUring, EngineKind::LinuxAio].into_iter().filter(works).collect();
    let mut sizes = vec![(4 << 10, SMALL), (512 << 10, LARGE)];
    sizes.extend(longest(&stat).map(|bytes| (bytes, LARGE)));
    let (mut rows, mut data, mut bars) = (Vec::new(), Vec::new(), Vec::new());
    bars.push(("published: QEMU, 512 KiB".to_owned(), 2.0));
    for (bytes, writes) in sizes {
        for &engine in &engines {
            let mut halves = [Half::default(), Half::default()];
            lab.alternate(2, |at| {
                lab.tell(&format!("O4 {} KiB, {engine}, {}", bytes >> 10, ALIGNMENTS[at].0));
                measure(
                    lab,
                    &path,
                    &stat,
                    engine,
                    (bytes, writes),
                    ALIGNMENTS[at].1,
                    &mut halves[at],
                )
            })?;
            for at in [0, 1] {
                rows.push(row((bytes, writes), engine, at, &halves));
            }
            let ratio = least(&halves[1].requests) / least(&halves[0].requests);
            bars.push((format!("{} KiB, {engine}", bytes >> 10), ratio));
            data.push(json!({
                "bytes": bytes, "writes": writes, "engine": engine.name(),
                "requests_per_write": halves.each_ref().map(|half| &half.requests),
                "seconds": halves.each_ref().map(|half| &half.seconds),
            }));
        }
    }
    let published = "published: QEMU, 512 KiB before: 1023 + 8 + 1016 + 8 … sectors, after: 1024";
    let mut first = vec![published.to_owned()];
    first.extend(["", "", "", "", "", "", "2", "1.05"].map(str::to_owned));
    rows.insert(0, first);
    Ok(vec![Finding {
        title: "O4: sequential writes by alignment of their buffers, O_DIRECT, one at a time"
            .into(),
        head: vec![
            "writes",
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
        ],
        bars: ("requests of 512-aligned buffers per request of page-aligned ones", bars),
        even: 1.0,
        data: json!(data),
        ..Finding::default()
    }])
}

fn measure(
    lab: &Lab<'_>,
    path: &Path,
    stat: &Path,
    engine: EngineKind,
    (bytes, writes): (u32, u64),
    skew: usize,
    half: &mut Half,
) -> Result<()> {
    let mut load = lab.load(Rw::Write, Sizes::one(bytes), 1, 1);
    load.runtime = None;
    load.ramp = std::time::Duration::ZERO;
    load.budget = Some(writes * u64::from(bytes));
    let mut opened = bare(direct(path, Some(engine))?, &load, skew);
    let before = written(stat)?;
    let outcome = lab.measure(&mut opened, &load)?;
    let after = written(stat)?;
    half.requests.push((after.0 - before.0) as f64 / outcome.tick.done().max(1) as f64);
    half.sectors.push((after.1 - before.1) as f64);
    half.seconds.push(outcome.seconds);
    Ok(())
}

fn row(
    (bytes, writes): (u32, u64),
    engine: EngineKind,
    at: usize,
    halves: &[Half; 2],
) -> Vec<String> {
    let of = |values: &[f64]| median(values.to_vec()).unwrap_or(f64::NAN);
    let [page, odd] = halves;
    let half = &halves[at];
    let (requests, seconds) = (least(&half.requests), of(&half.seconds));
    let per_second = writes as f64 / seconds;
    let mut row = vec![
        format!("{writes} × {} KiB", bytes >> 10),
        engine.name().to_owned(),
        ALIGNMENTS[at].0.to_owned(),
        format!("{requests:.3}"),
        format!("{:.0}", least(&half.sectors) / (requests * writes as f64)),
        format!("{:.1}", per_second * f64::from(bytes) / 1e6),
        count(per_second),
    ];
    row.extend(if at == 1 {
        let ratio = least(&odd.requests) / least(&page.requests);
        [format!("{ratio:.2}"), format!("{:.3}", of(&odd.seconds) / of(&page.seconds))]
    } else {
        [String::new(), String::new()]
    });
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
    Ok(folder.canonicalize()?.join("stat"))
}

/// The most bytes of one request, if each page of a page-aligned buffer is a segment.
fn longest(stat: &Path) -> Option<u32> {
    let segments: u32 = limit(stat, "max_segments").parse().ok()?;
    let kib: u32 = limit(stat, "max_sectors_kb").parse().ok()?;
    Some(segments.checked_mul(4)?.min(kib).min(1 << 16) << 10)
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
