//! Depth × queues × polling or sleeping client × device, ours and others.

use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::Server;
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::Load;
use crate::bench::options::Waiting;
use crate::bench::report::{Report, SERIES_HEAD, Table, series_row};
use anyhow::Result;
use clap::Args;
use serde_json::json;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct MatrixArgs {
    /// Requests in flight per queue.
    #[arg(long, value_delimiter = ',', default_value = "1,32,128", value_name = "LIST")]
    depths: Vec<u32>,
    /// Numbers of queues.
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_name = "LIST")]
    queues: Vec<u16>,
    /// How the client waits.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "polling,sleeping")]
    clients: Vec<Waiting>,
    /// What is served.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "null,file")]
    devices: Vec<Device>,
    /// Bytes of a request.
    #[arg(long, default_value_t = 4096)]
    size: u32,
    /// Random writes instead of random reads.
    #[arg(long)]
    write: bool,
    #[command(flatten)]
    servers: Servers,
}

/// Against whom.
#[derive(Debug, Args)]
pub(crate) struct Servers {
    /// Who is measured: ringway:ENGINE or ringway@BINARY:ENGINE, both with +OPTION… behind,
    /// qsd:AIO, socket:NAME=PATH. Ratios are to the first one that is not ours. A socket serves
    /// what it serves, whatever the device.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "ringway:auto,qsd:native",
        value_name = "LIST"
    )]
    pub(crate) servers: Vec<Server>,
}

impl Servers {
    /// As contestants on `device`, each name once.
    pub(crate) fn on(&self, device: Device) -> Vec<Contestant> {
        let mut names = Vec::new();
        let mut contestants = Vec::new();
        for server in &self.servers {
            let name = server.name_on(device);
            if !names.contains(&name) {
                names.push(name);
                contestants.push(Contestant::Server(server.clone()));
            }
        }
        contestants
    }
}

/// The one that ratios are to: the first that is not ours, or the first.
fn base(cell: &Cell) -> usize {
    let ours = |one: &Contestant| matches!(one, Contestant::Server(server) if server.is_ours());
    cell.contestants.iter().position(|one| !ours(one)).unwrap_or(0)
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &MatrixArgs) -> Result<Report> {
    let mut cells = Vec::new();
    for &device in &args.devices {
        for &queues in &args.queues {
            for &depth in &args.depths {
                for &waiting in &args.clients {
                    let load =
                        Load { size: args.size, write: args.write, ..Load::reads(depth, waiting) };
                    cells.push(Cell {
                        labels: vec![
                            device.name().into(),
                            queues.to_string(),
                            depth.to_string(),
                            waiting.to_string(),
                        ],
                        device,
                        queues,
                        load,
                        contestants: args.servers.on(device),
                    });
                }
            }
        }
    }
    let all = contest::run(lab, &cells)?;
    let op = if args.write { "write" } else { "read" };
    let tables = args
        .devices
        .iter()
        .map(|device| Table {
            title: format!("{} bytes random {op}, {}", args.size, device.name()),
            head: [&["queues", "depth", "client"], &SERIES_HEAD[..]].concat(),
            rows: rows(&cells, &all, *device),
            notes: vec![
                "ratio: IOPS beside the first server that is not ours. CPU: the server's, all \
                 threads; one that polls is always busy. calls/IO: at most so \
                 many. latency: in flight ÷ IOPS."
                    .into(),
            ],
        })
        .collect();
    Ok(Report { name: "matrix", tables, data: json!(all) })
}

fn rows(cells: &[Cell], all: &[Series], device: Device) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (index, cell) in cells.iter().enumerate().filter(|(_, cell)| cell.device == device) {
        let group: Vec<_> = all.iter().filter(|series| series.cell == index).collect();
        let base = group.get(base(cell)).copied();
        for series in &group {
            let in_flight = cell.load.depth * u32::from(cell.queues);
            let mut row = series.labels[1..].to_vec();
            row.extend(series_row(series, base, in_flight));
            rows.push(row);
        }
    }
    rows
}
