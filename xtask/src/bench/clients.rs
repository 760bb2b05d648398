//! Front-ends against the same server: what an I/O costs the client.
//!
//! A client that polls is always busy, so its figure is IOPS by another name; what a front-end costs
//! by itself shows where it is the bottleneck (a server faster than it) or where it sleeps.

use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::Server;
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::Load;
use crate::bench::options::{Client, Waiting};
use crate::bench::report::{Report, Table};
use anyhow::{Result, bail};
use clap::Args;
use ringway_terminal::short::count;
use serde_json::json;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct ClientsArgs {
    /// Requests in flight.
    #[arg(long, value_delimiter = ',', default_value = "1,32,128", value_name = "LIST")]
    depths: Vec<u32>,
    /// How the clients wait.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "polling,sleeping")]
    clients: Vec<Waiting>,
    /// What is served.
    #[arg(long, value_enum, default_value = "null")]
    device: Device,
    /// Random writes instead of random reads.
    #[arg(long)]
    write: bool,
    /// Who serves: as for `matrix`.
    #[arg(long, value_name = "SERVER", default_value = "ringway:auto")]
    server: Server,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &ClientsArgs) -> Result<Report> {
    if !cfg!(feature = "blkio") {
        bail!(
            "libblkio is not built in: `cargo run --release -p xtask --features blkio -- bench clients`"
        );
    }
    let contestants: Vec<_> = [Client::Blkio, Client::Ringway]
        .map(|client| Contestant::Client(client, args.server.clone()))
        .into();
    let mut cells = Vec::new();
    for &depth in &args.depths {
        for &waiting in &args.clients {
            cells.push(Cell {
                labels: vec![depth.to_string(), waiting.to_string()],
                device: args.device,
                queues: 1,
                load: Load { write: args.write, ..Load::reads(depth, waiting) },
                contestants: contestants.clone(),
            });
        }
    }
    let all = contest::run(lab, &cells)?;
    let rows = all.iter().map(|series| row(series, &all)).collect();
    let op = if args.write { "write" } else { "read" };
    let title = format!(
        "4 KiB random {op}, {}, one queue, served by {}",
        args.device.name(),
        args.server.name_on(args.device)
    );
    let table = Table {
        title,
        head: vec![
            "depth",
            "client",
            "front-end",
            "IOPS",
            "min–max",
            "client ns/IO",
            "IO per ns",
            "server ns/IO",
        ],
        rows,
        notes: vec![
            "client ns/IO: CPU time of the client's threads, user and system, per I/O. IO per ns: \
             I/Os per nanosecond of it, beside libblkio."
                .into(),
        ],
    };
    Ok(Report { name: "clients", tables: vec![table], data: json!(all) })
}

fn row(series: &Series, all: &[Series]) -> Vec<String> {
    let mut row = series.labels.clone();
    row.push(series.name.clone());
    let (Some(iops), Some(cost)) = (series.iops(), series.median(|s| s.client_ns)) else {
        row.push("failed".into());
        return row;
    };
    let (low, high) = series.spread();
    let base = all.iter().find(|other| other.cell == series.cell);
    let base = base.and_then(|base| base.median(|s| s.client_ns));
    row.push(count(iops));
    row.push(format!("{}–{}", count(low), count(high)));
    row.push(format!("{cost:.0}"));
    row.push(base.map_or(String::new(), |base| format!("{:.3}", base / cost)));
    row.push(series.median(|s| s.server_ns).map_or("–".into(), |ns| format!("{ns:.0}")));
    row
}
