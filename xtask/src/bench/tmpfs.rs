//! A file on tmpfs: a disk as fast as memory.

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
pub(crate) struct TmpfsArgs {
    /// Requests in flight.
    #[arg(long, value_delimiter = ',', default_value = "32", value_name = "LIST")]
    depths: Vec<u32>,
    /// How the client waits.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "polling,sleeping")]
    clients: Vec<Waiting>,
    /// Random writes instead of random reads.
    #[arg(long)]
    write: bool,
    /// Who serves: as for `matrix`.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "ringway:auto,ringway:io_uring,ringway:linux-aio,ringway:threads,qsd:native,qsd:io_uring"
    )]
    servers: Vec<Server>,
}

/// What others did on such a machine, at depth 32 with a client that sleeps and polls.
const PUBLISHED: [(&str, &str, &str); 3] = [
    ("SPDK vhost, Linux AIO", "553 k", "713 k"),
    ("cloud-hypervisor's vhost_user_block, polling", "375 k", "451 k"),
    ("qemu-storage-daemon 10.0, io_uring", "201 k", "300 k"),
];

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &TmpfsArgs) -> Result<Report> {
    let contestants: Vec<_> = args.servers.iter().cloned().map(Contestant::Server).collect();
    let mut cells = Vec::new();
    for &depth in &args.depths {
        for &waiting in &args.clients {
            cells.push(Cell {
                labels: vec![depth.to_string(), waiting.to_string()],
                device: Device::Tmpfs,
                queues: 1,
                load: Load { write: args.write, ..Load::reads(depth, waiting) },
                contestants: contestants.clone(),
            });
        }
    }
    let all = contest::run(lab, &cells)?;
    let rows = all.iter().map(|series| {
        let base = all.iter().find(|other| other.cell == series.cell);
        let mut row = series.labels.clone();
        row.extend(series_row(series, base, cells[series.cell].load.depth));
        row
    });
    let op = if args.write { "write" } else { "read" };
    let mut notes = vec!["ratio: to the first server.".to_owned()];
    notes.extend(series_engines(&all));
    let ours = Table {
        title: format!("4 KiB random {op}, file on tmpfs, O_DIRECT, one queue"),
        head: [&["depth", "client"], &SERIES_HEAD[..]].concat(),
        rows: rows.collect(),
        notes,
    };
    let published = Table {
        title: "Others, random read at depth 32, measured on such a machine before".into(),
        head: vec!["server", "client sleeps", "client polls"],
        rows: PUBLISHED.iter().map(|&(a, b, c)| vec![a.into(), b.into(), c.into()]).collect(),
        notes: Vec::new(),
    };
    Ok(Report { name: "tmpfs", tables: vec![ours, published], data: json!(all) })
}

/// What `auto` chose.
fn series_engines(all: &[Series]) -> Option<String> {
    let chosen = all.iter().find(|series| series.name.starts_with("ringway:auto"))?;
    chosen.engine.as_ref().map(|engine| format!("auto chose {engine}."))
}
