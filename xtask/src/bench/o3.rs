//! Origin O3: request-based and bio-based paths, and the choice between them, on fast and slow disks.

use crate::bench::Lab;
use crate::bench::client::Load;
use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::Server;
use crate::bench::image::Device;
use crate::bench::options::Waiting;
use crate::bench::report::{Report, Table};
use crate::bench::short::count;
use anyhow::Result;
use clap::Args;
use serde_json::json;

/// Seconds of load before each measurement: what `auto` may take after a change of load.
pub(crate) const WARMUP: f64 = 2.0;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct O3Args {
    /// What is served; those called sim are simulations.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "null,sim-ram,sim-hdd,file",
        value_name = "LIST"
    )]
    devices: Vec<Device>,
    /// Requests in flight.
    #[arg(long, default_value_t = 32)]
    depth: u32,
    /// Bytes of a request.
    #[arg(long, default_value_t = 4096)]
    size: u32,
    /// How the client waits.
    #[arg(long, value_enum, default_value = "polling")]
    clients: Waiting,
    /// The engine for files.
    #[arg(long, default_value = "auto")]
    engine: String,
}

/// In the order of the published tables: sequential, write.
const PATTERNS: [(&str, bool, bool); 4] = [
    ("seq read", true, false),
    ("seq write", true, true),
    ("rand read", false, false),
    ("rand write", false, true),
];

const PATHS: [&str; 3] = ["bio", "request", "auto"];

/// What was measured, request-based and bio-based IOPS, by pattern.
type Published = (&'static str, [u32; 4], [u32; 4]);

/// The tables of July 2012: an 8-vCPU guest, about 4 KiB.
const PUBLISHED: [Published; 4] = [
    (
        "ramdisk, kvm tool",
        [182_147, 161_449, 184_211, 165_630],
        [233_991, 201_658, 224_268, 192_396],
    ),
    (
        "Fusion-IO SSD, kvm tool",
        [105_791, 115_711, 104_773, 114_619],
        [117_840, 128_616, 119_266, 125_985],
    ),
    ("image on a SATA disk, qemu", [6470, 8829, 488, 324], [6360, 5060, 487, 354]),
    ("image on a SATA disk, kvm tool", [10037, 6722, 498, 382], [9060, 6065, 520, 384]),
];

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &O3Args) -> Result<Report> {
    let servers = PATHS.map(|path| format!("ringway:{}+--path={path}", args.engine));
    let contestants: Vec<_> = servers
        .iter()
        .map(|name| name.parse::<Server>().map(Contestant::Server).map_err(anyhow::Error::msg))
        .collect::<Result<_>>()?;
    let mut cells = Vec::new();
    for &device in &args.devices {
        for (name, sequential, write) in PATTERNS {
            let load = Load {
                size: args.size,
                sequential,
                write,
                ..Load::reads(args.depth, args.clients)
            };
            let labels = vec![device.name().into(), name.into()];
            let contestants = contestants.clone();
            cells.push(Cell { labels, device, queues: 1, load, contestants });
        }
    }
    let all = contest::run(lab, &cells)?;
    let rows = (0..cells.len()).map(|cell| {
        let series: Vec<_> = all.iter().filter(|series| series.cell == cell).collect();
        row(&series)
    });
    let ours = Table {
        title: format!("{} bytes, depth {}, client {}, IOPS", args.size, args.depth, args.clients),
        head: vec![
            "device",
            "load",
            "bio",
            "request",
            "auto",
            "bio ÷ request",
            "auto ÷ better",
            "min–max of auto",
            "CPU ns/IO bio",
            "request",
            "auto",
        ],
        rows: rows.collect(),
        notes: vec![
            "One queue. Each measurement begins with a new daemon and 2 s of the load, which is the \
             time auto may take. Devices called sim are simulations."
                .into(),
        ],
    };
    Ok(Report { name: "o3", tables: vec![ours, published()], data: json!(all) })
}

fn row(series: &[&Series]) -> Vec<String> {
    let mut cells = series.first().map(|first| first.labels.clone()).unwrap_or_default();
    let iops: Vec<_> = series.iter().map(|one| one.iops()).collect();
    cells.extend(iops.iter().map(|iops| iops.map_or("failed".into(), count)));
    let [Some(bio), Some(request), Some(auto)] = iops[..] else { return cells };
    let (low, high) = series[2].spread();
    cells.push(format!("{:.2}", bio / request));
    cells.push(format!("{:.3}", auto / bio.max(request)));
    cells.push(format!("{}–{}", count(low), count(high)));
    let cost = |one: &&Series| one.median(|s| s.server_ns);
    cells.extend(series.iter().map(|one| cost(one).map_or("–".into(), |ns| format!("{ns:.0}"))));
    cells
}

fn published() -> Table {
    let rows = PUBLISHED.iter().flat_map(|&(what, request, bio)| {
        let figures = PATTERNS.iter().zip(request).zip(bio);
        figures.map(move |((pattern, request), bio)| {
            vec![
                what.into(),
                pattern.0.into(),
                bio.to_string(),
                request.to_string(),
                format!("{:.2}", f64::from(bio) / f64::from(request)),
            ]
        })
    });
    Table {
        title: "Published: virtio_blk in Linux, 2012, IOPS".into(),
        head: vec!["device", "load", "bio", "request", "bio ÷ request"],
        rows: rows.collect(),
        notes: Vec::new(),
    }
}
