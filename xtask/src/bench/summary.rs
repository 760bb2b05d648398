//! All cells that are judged, by one command: disk, memory, null, several workers, idle.

use crate::bench::contest::{self, Cell, Contestant, Series};
use crate::bench::daemon::{Running, Server};
use crate::bench::idle::{Idle, raise_open_files};
use crate::bench::image::Device;
use crate::bench::lab::Lab;
use crate::bench::load::{Load, measure_server};
use crate::bench::matrix::Servers;
use crate::bench::options::{Waiting, pin};
use crate::bench::report::{Report, SERIES_HEAD, Table, series_row};
use crate::bench::wake::Wake;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use ringway_bench::HostLook;
use ringway_bench::usage::Usage;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Which parts, beside whom.
#[derive(Debug, Args)]
pub(crate) struct SummaryArgs {
    /// Which of them.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "disk,memory,null,workers,idle,disks"
    )]
    only: Vec<Part>,
    /// SPDK's vhost program, as one more peer.
    #[arg(long, value_name = "PATH")]
    spdk: Option<PathBuf>,
    /// A measurement while others have more than this of the cores in use, in percent, is made again,
    /// up to three times, and does not count.
    #[arg(long, default_value_t = 5.0, value_name = "PERCENT")]
    foreign_max: f64,
    /// Seconds for which a daemon without load is watched.
    #[arg(long, default_value_t = 30, value_name = "S")]
    watch: u64,
    /// Connected disks without load, of four queues each.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    disks: u16,
}

/// A part of the summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// A file on the disk beside the bare file.
    Disk,
    /// Reads of a file on tmpfs, short and long.
    Memory,
    /// Requests without data.
    Null,
    /// Two queues on two workers, which share all cores with the client.
    Workers,
    /// A daemon whose front-end asks for nothing after a load.
    Idle,
    /// Many connected disks that nobody asks for anything.
    Disks,
}

/// How long a server may take to fall asleep.
const SETTLING: Duration = Duration::from_secs(6);

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &SummaryArgs) -> Result<Report> {
    let lab = &Lab { foreign_max: Some(args.foreign_max), ..lab.clone() };
    let mut report = Report { name: "summary", ..Report::default() };
    let mut data = serde_json::Map::new();
    let asked: Vec<(Part, Vec<Cell>)> = args
        .only
        .iter()
        .filter_map(|&part| Some((part, cells_of(part, args.spdk.as_ref())?)))
        .collect();
    if !asked.is_empty() {
        let (table, found) = speed(lab, &asked)?;
        report.tables.push(table);
        data.insert("speed".into(), found);
    }
    if args.only.contains(&Part::Workers) {
        let (table, found) = workers(lab)?;
        report.tables.push(table);
        data.insert("workers".into(), found);
    }
    let (mut rows, mut found) = (Vec::new(), Vec::new());
    if args.only.contains(&Part::Idle) {
        for name in ["ringway:auto", "qsd:native"] {
            rows.push(after_load(lab, name, args.watch, &mut found)?);
        }
    }
    if args.only.contains(&Part::Disks) {
        rows.push(many_disks(lab, args, &mut found)?);
    }
    if !rows.is_empty() {
        report.tables.push(idle_table(rows, args.watch));
        data.insert("idle".into(), Value::Array(found));
    }
    report.data = Value::Object(data);
    Ok(report)
}

/// Ours and the peers.
fn servers(spdk: Option<&PathBuf>) -> Servers {
    let names = ["ringway:auto", "ringway:linux-aio", "qsd:native", "qsd:io_uring"];
    let spdk = spdk.map(|path| format!("spdk@{}:aio", path.display()));
    let names = names.into_iter().map(str::to_owned).chain(spdk);
    let servers = names.map(|name| name.parse::<Server>().expect("the names of servers"));
    Servers { servers: servers.collect() }
}

/// The cells of a part that is a contest.
fn cells_of(part: Part, spdk: Option<&PathBuf>) -> Option<Vec<Cell>> {
    use Waiting::{Polling, Sleeping};
    let both = [Sleeping, Polling];
    let reads = |depth, waiting| Load::reads(depth, waiting);
    let (device, loads): (Device, Vec<Load>) = match part {
        Part::Disk => {
            let read = [1, 32].iter().flat_map(|&depth| both.map(|waiting| reads(depth, waiting)));
            let write = [32, 64].map(|depth| Load { write: true, ..reads(depth, Sleeping) });
            (Device::File, read.chain([reads(64, Sleeping)]).chain(write).collect())
        }
        Part::Memory => {
            let sizes = [(4 << 10, 32), (128 << 10, 1), (128 << 10, 8), (1 << 20, 1), (1 << 20, 8)];
            let loads = sizes.map(|(size, depth)| Load { size, ..reads(depth, Sleeping) });
            (Device::Tmpfs, loads.to_vec())
        }
        Part::Null => {
            let loads = [1, 32].iter().flat_map(|&depth| both.map(|waiting| reads(depth, waiting)));
            (Device::Null, loads.collect())
        }
        Part::Workers | Part::Idle | Part::Disks => return None,
    };
    let servers = servers(spdk).on(device);
    let cell = |load: Load| {
        let bare = (device == Device::File).then_some(Contestant::Fio);
        Cell {
            labels: vec![device.name().into(), words(&load), load.waiting.to_string()],
            device,
            queues: 1,
            load,
            contestants: bare.into_iter().chain(servers.iter().cloned()).collect(),
        }
    };
    Some(loads.into_iter().map(cell).collect())
}

/// `4k read d32`
fn words(load: &Load) -> String {
    let op = if load.write { "write" } else { "read" };
    format!("{}k {op} d{}", load.size >> 10, load.depth)
}

fn speed(lab: &Lab, asked: &[(Part, Vec<Cell>)]) -> Result<(Table, Value)> {
    let cells: Vec<Cell> = asked.iter().flat_map(|(_, cells)| cells.iter().cloned()).collect();
    let wake = Wake::measure(lab)?;
    let look = HostLook::now();
    let all = contest::run(lab, &cells)?;
    let host = look.since(None);
    let table = Table {
        title: "One queue, beside the bare disk and peers".into(),
        head: [&["device", "load", "client"], &SERIES_HEAD[..], &["MB/s", "foreign %", "dropped"]]
            .concat(),
        rows: all.iter().map(|series| row(series, &cells, &all)).collect(),
        notes: [format!(
            "ratio: to the first that is not ours, bare fio where it is there. foreign: what others, the \
             host below included, had of the cores in use; measurements with more than {} % are dropped \
             and made again. The client column is that of devices; fio sleeps in the kernel.",
            lab.foreign_max.unwrap_or(100.0)
        )]
        .into_iter()
        .chain(wake.map(|wake| wake.words()))
        .chain([host.words()])
        .collect(),
    };
    Ok((table, json!({ "wake": wake, "host": host, "series": all })))
}

fn row(series: &Series, cells: &[Cell], all: &[Series]) -> Vec<String> {
    let cell = &cells[series.cell];
    let ours = |one: &Contestant| matches!(one, Contestant::Server(server) if server.is_ours());
    let base = cell.contestants.iter().position(|one| !ours(one)).unwrap_or(0);
    let base = all.iter().filter(|other| other.cell == series.cell).nth(base);
    let mut row = series.labels.clone();
    row.extend(series_row(series, base, cell.load.depth * u32::from(cell.queues)));
    if series.samples.is_empty() && series.error.is_none() {
        // It did not fail: others were there in each round.
        row.truncate(series.labels.len() + 1);
        row.push("disturbed".into());
    }
    row.resize(series.labels.len() + SERIES_HEAD.len(), String::new());
    let percent = |value: Option<f64>, digits| {
        value.map_or("–".into(), |value: f64| format!("{value:.digits$}"))
    };
    row.push(percent(series.median(|sample| Some(sample.mb_s)), 0));
    row.push(percent(series.median(|sample| Some(sample.foreign_percent)), 1));
    row.push(series.dropped.to_string());
    row
}

/// One queue on one worker and two on two, with all cores for everybody.
fn workers(lab: &Lab) -> Result<(Table, Value)> {
    let mut cores = [&lab.common.server_cpus[..], &lab.common.client_cpus].concat();
    cores.sort_unstable();
    cores.dedup();
    let mut shared = lab.clone();
    (shared.common.server_cpus, shared.common.client_cpus) = (cores.clone(), cores.clone());
    pin(&cores)?;
    let cell = |queues: u16| {
        let name = format!("ringway:auto+--workers={queues}");
        let servers: Vec<Server> = [name.as_str(), "qsd:native"]
            .map(|name| name.parse().expect("the names of servers"))
            .into();
        Cell {
            labels: vec![format!("{queues} on {queues}")],
            device: Device::Null,
            queues,
            load: Load::reads(32, Waiting::Polling),
            contestants: Servers { servers }.on(Device::Null),
        }
    };
    let cells = [cell(1), cell(2)];
    let all = contest::run(&shared, &cells)?;
    pin(&lab.common.client_cpus)?;
    let ours = |series: &&Series| series.name.starts_with("ringway");
    let one_worker = all.iter().find(ours);
    let rows = all.iter().map(|series| {
        let mut row = series.labels.clone();
        let in_flight = 32 * u32::from(cells[series.cell].queues);
        row.extend(series_row(series, one_worker, in_flight));
        row
    });
    let table = Table {
        title:
            "null, 4k read d32, client polls: queues on workers, on the same cores as the client"
                .into(),
        head: [&["queues"], &SERIES_HEAD[..]].concat(),
        rows: rows.collect(),
        notes: vec!["ratio: to one queue on one worker of ours.".into()],
    };
    Ok((table, json!(all)))
}

/// Watches a server whose front-end asks for nothing.
fn watch(server: &Running, seconds: u64) -> Result<Usage> {
    std::thread::sleep(SETTLING);
    let before = server.usage()?;
    std::thread::sleep(Duration::from_secs(seconds));
    Ok(server.usage()?.since(&before))
}

fn after_load(lab: &Lab, name: &str, seconds: u64, found: &mut Vec<Value>) -> Result<Vec<String>> {
    let server: Server = name.parse().map_err(anyhow::Error::msg)?;
    let running = server.start(lab, Device::Null, 4)?;
    let (load, socket) = (Load::reads(32, Waiting::Sleeping), running.socket());
    measure_server(lab.common.client, lab, socket, 4, &load, &mut || Ok(()))?;
    let front_end = Idle::connect(running.socket(), 4).context("after the load")?;
    let used = watch(&running, seconds)?;
    let row = idle_row(&server.name_on(Device::Null), 1, &running, used, found)?;
    drop(front_end);
    Ok(row)
}

fn many_disks(lab: &Lab, args: &SummaryArgs, found: &mut Vec<Value>) -> Result<Vec<String>> {
    raise_open_files();
    let folder = tempfile::Builder::new().prefix("ringway-disks-").tempdir()?;
    let socket = |at: u16| folder.path().join(at.to_string());
    let mut config = "workers = 1\n".to_owned();
    for at in 0..args.disks {
        let path = socket(at);
        let _ = write!(
            config,
            "[[disk]]\nimage = 'null:1G'\nsocket = '{}'\nqueues = 4\n",
            path.display()
        );
    }
    let file = folder.path().join("disks.toml");
    std::fs::write(&file, config)?;
    let running = Running::from_file(lab, &file, socket(args.disks.saturating_sub(1)))?;
    let connect = |at| Idle::connect(&socket(at), 4).with_context(|| format!("disk {at}"));
    let front_ends: Vec<Idle> = (0..args.disks).map(connect).collect::<Result<_>>()?;
    let used = watch(&running, args.watch)?;
    let row = idle_row("ringway:null", args.disks, &running, used, found)?;
    drop(front_ends);
    Ok(row)
}

#[allow(clippy::cast_precision_loss)]
fn idle_row(
    name: &str,
    disks: u16,
    running: &Running,
    used: Usage,
    found: &mut Vec<Value>,
) -> Result<Vec<String>> {
    let [threads, descriptors] = running.held()?;
    let kib = running.resident_kib()?;
    found.push(json!({
        "server": name, "disks": disks, "switches": used.switches, "cpu_ns": used.cpu_ns,
        "threads": threads, "descriptors": descriptors, "resident_kib": kib,
    }));
    Ok(vec![
        name.to_owned(),
        disks.to_string(),
        used.switches.to_string(),
        format!("{:.3}", used.cpu_ns as f64 / 1e6),
        threads.to_string(),
        descriptors.to_string(),
        format!("{kib:.0}"),
        format!("{:.1}", kib / f64::from(disks.max(1))),
    ])
}

fn idle_table(rows: Vec<Vec<String>>, seconds: u64) -> Table {
    Table {
        title: format!("Without load, connected with four queues each, watched for {seconds} s"),
        head: vec![
            "server",
            "disks",
            "wake-ups",
            "CPU ms",
            "threads",
            "descriptors",
            "KiB",
            "KiB/disk",
        ],
        rows,
        notes: vec![
            "A server of one disk has had a load before. KiB: resident, of the server alone."
                .into(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_has_ours_and_a_peer_and_those_of_the_disk_the_bare_file() {
        let spdk = PathBuf::from("/opt/spdk/vhost");
        for part in [Part::Disk, Part::Memory, Part::Null] {
            let cells = cells_of(part, Some(&spdk)).unwrap();
            for cell in &cells {
                let names: Vec<_> =
                    cell.contestants.iter().map(|one| one.name(cell.device)).collect();
                let has = |word: &str| names.iter().any(|name| name.starts_with(word));
                assert!(has("ringway") && has("qsd") && has("spdk"), "{names:?}");
                assert_eq!(has("bare"), part == Part::Disk, "{names:?}");
            }
            let count = match part {
                Part::Disk => 7,
                Part::Memory => 5,
                _ => 4,
            };
            assert_eq!(cells.len(), count);
        }
        assert!(cells_of(Part::Idle, None).is_none());
        let load = Load { size: 128 << 10, write: true, ..Load::reads(8, Waiting::Sleeping) };
        assert_eq!(words(&load), "128k write d8");
    }
}
