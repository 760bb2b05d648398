//! Through the device versus direct I/O on the same file in the same run.

use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::Server;
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::Load;
use crate::bench::options::Waiting;
use crate::bench::report::{Report, SERIES_HEAD, Table, series_row};
use anyhow::Result;
use clap::{Args, ValueEnum};
use ringway_control::config::{Choice, engines};
use ringway_disk::EngineKind;
use serde_json::json;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct BareArgs {
    /// Requests in flight.
    #[arg(long, value_delimiter = ',', default_value = "1,32,64,128", value_name = "LIST")]
    depths: Vec<u32>,
    /// Random reads, random writes.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "read,write")]
    ops: Vec<Op>,
    /// How the client of a device waits.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "polling")]
    clients: Vec<Waiting>,
    /// The file.
    #[arg(long, value_enum, default_value = "file")]
    device: Device,
    /// Further bare contestants: engines of ringway-aio in this process (io_uring, linux-aio,
    /// threads).
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = engines())]
    engines: Vec<Choice<EngineKind>>,
    /// Who serves: as for `matrix`.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "ringway:auto,ringway:linux-aio,qsd:native,qsd:io_uring"
    )]
    servers: Vec<Server>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    Read,
    Write,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &BareArgs) -> Result<Report> {
    let mut contestants = vec![Contestant::Fio];
    contestants.extend(args.engines.iter().copied().map(Contestant::Engine));
    contestants.extend(args.servers.iter().cloned().map(Contestant::Server));
    let mut cells = Vec::new();
    for &op in &args.ops {
        for &depth in &args.depths {
            for &waiting in &args.clients {
                let load = Load { write: op == Op::Write, ..Load::reads(depth, waiting) };
                let word = if load.write { "random write" } else { "random read" };
                cells.push(Cell {
                    labels: vec![word.into(), depth.to_string(), waiting.to_string()],
                    device: args.device,
                    queues: 1,
                    load,
                    contestants: contestants.clone(),
                });
            }
        }
    }
    let all = contest::run(lab, &cells)?;
    let table = Table {
        title: format!("4 KiB through the device versus bare, {}, one queue", args.device.name()),
        head: [&["load", "depth", "client"], &SERIES_HEAD[..], &["added us"]].concat(),
        rows: all.iter().map(|series| row(series, &cells, &all)).collect(),
        notes: vec![
            "ratio: to bare fio. latency: in flight ÷ IOPS. added us: that, less bare fio's, at \
             depth 1. The client column is that of devices; fio sleeps in the kernel."
                .into(),
        ],
    };
    Ok(Report { name: "bare", tables: vec![table], data: json!(all) })
}

fn row(series: &Series, cells: &[Cell], all: &[Series]) -> Vec<String> {
    let depth = cells[series.cell].load.depth;
    let bare = all.iter().find(|other| other.cell == series.cell);
    let mut row = series.labels.clone();
    row.extend(series_row(series, bare, depth));
    if let (1, Some(ours), Some(bare)) = (depth, series.iops(), bare.and_then(Series::iops)) {
        row.push(format!("{:+.2}", 1e6 / ours - 1e6 / bare));
    }
    row
}
