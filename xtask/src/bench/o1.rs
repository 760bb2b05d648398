//! Origin O1: 16 KiB writes at depth 74 through each engine, beside bare fio.

use crate::bench::Lab;
use crate::bench::client::Load;
use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::Server;
use crate::bench::image::Device;
use crate::bench::options::Waiting;
use crate::bench::report::{Report, Table};
use anyhow::Result;
use clap::Args;
use serde_json::json;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct O1Args {
    /// Requests in flight.
    #[arg(long, default_value_t = 74)]
    depth: u32,
    /// How the client of a device waits.
    #[arg(long, value_enum, default_value = "sleeping")]
    clients: Waiting,
    /// The file.
    #[arg(long, value_enum, default_value = "file")]
    device: Device,
    /// Who serves: as for `matrix`.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "ringway:io_uring,ringway:linux-aio,ringway:threads,qsd:native,qsd:io_uring"
    )]
    servers: Vec<Server>,
}

/// MB/s, submit latency in µs, completion latency in ms: random, then sequential write.
type Published = (&'static str, [&'static str; 3], [&'static str; 3]);

/// The table of September 2008.
const PUBLISHED: [Published; 5] = [
    ("bare metal, O_DIRECT", ["61.2", "13.07", "19.59"], ["128.1", "10.90", "9.45"]),
    (
        "guest, cache=off, posix-aio before",
        ["4.7", "3467.44", "254.08"],
        ["5.1", "3152.00", "231.06"],
    ),
    ("guest, cache=off, linux-aio", ["61.1", "75.35", "19.57"], ["130.0", "83.83", "8.99"]),
    ("guest, cache=on, posix-aio before", ["127.0", "115.78", "9.19"], ["184.0", "80.46", "6.35"]),
    ("guest, cache=on, posix-aio after", ["126.0", "67.35", "9.30"], ["165.0", "70.90", "7.09"]),
];

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &O1Args) -> Result<Report> {
    let mut contestants = vec![Contestant::Fio];
    contestants.extend(args.servers.iter().cloned().map(Contestant::Server));
    let cells: Vec<_> = [false, true]
        .into_iter()
        .map(|sequential| Cell {
            labels: vec![if sequential { "sequential write" } else { "random write" }.into()],
            device: args.device,
            queues: 1,
            load: Load {
                size: 16 << 10,
                write: true,
                sequential,
                timed: true,
                ..Load::reads(args.depth, args.clients)
            },
            contestants: contestants.clone(),
        })
        .collect();
    let all = contest::run(lab, &cells)?;
    let mut tables = Vec::new();
    for (index, cell) in cells.iter().enumerate() {
        let group: Vec<_> = all.iter().filter(|series| series.cell == index).collect();
        let title = format!("16 KiB {}, depth {}", cell.labels[0], args.depth);
        tables.push(Table {
            title: format!("{title}, client {}", args.clients),
            head: vec![
                "contestant",
                "MB/s",
                "min–max",
                "of bare",
                "submit us",
                "complete ms",
                "CPU ns/IO",
            ],
            rows: group.iter().map(|series| row(series, group[0])).collect(),
            notes: Vec::new(),
        });
        let figures = |p: &Published| if index == 0 { p.1 } else { p.2 };
        let bare: f64 = figures(&PUBLISHED[0])[0].parse()?;
        let rows = PUBLISHED.iter().map(|published| {
            let [mb_s, submit, complete] = figures(published);
            let part = mb_s.parse::<f64>().unwrap_or(0.0) / bare;
            let part = format!("{:.1} %", part * 100.0);
            [published.0, mb_s, &part, submit, complete].map(str::to_owned).to_vec()
        });
        tables.push(Table {
            title: format!("{title}: published, QEMU 2008"),
            head: vec!["contestant", "MB/s", "of bare", "submit us", "complete ms"],
            rows: rows.collect(),
            notes: Vec::new(),
        });
    }
    Ok(Report { name: "o1", tables, data: json!(all) })
}

fn row(series: &Series, bare: &Series) -> Vec<String> {
    let Some(mb_s) = series.median(|s| Some(s.mb_s)) else {
        return vec![series.name.clone(), "failed".into()];
    };
    let bare = bare.median(|s| Some(s.mb_s)).unwrap_or(f64::NAN);
    let all = series.samples.iter().map(|s| s.mb_s);
    let (low, high) = all.fold((f64::INFINITY, 0.0_f64), |(l, h), x| (l.min(x), h.max(x)));
    let latency = |what: fn(&contest::Latency) -> f64| {
        series.median(|s| s.latency.as_ref().map(what)).map_or("–".into(), |x| format!("{x:.2}"))
    };
    vec![
        series.name.clone(),
        format!("{mb_s:.1}"),
        format!("{low:.1}–{high:.1}"),
        format!("{:.1} %", mb_s / bare * 100.0),
        latency(|l| l.submit_us),
        latency(|l| l.complete_us / 1e3),
        series.median(|s| s.server_ns).map_or("–".into(), |ns| format!("{ns:.0}")),
    ]
}
