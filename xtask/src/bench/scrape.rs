//! What it costs to be watched: scrapes of the metrics of many disks, and how soon events are reported.

use crate::bench::daemon::Running;
use crate::bench::idle::raise_open_files;
use crate::bench::lab::Lab;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, ensure};
use clap::Args;
use ringway_bench::median;
use ringway_driver::{BlkQueue, Device, Options};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Which disks.
#[derive(Debug, Args)]
pub(crate) struct ScrapeArgs {
    /// Disks, each with a front-end that has used it.
    #[arg(long, default_value_t = 1000)]
    disks: u16,
    /// Workers of the daemon.
    #[arg(long, default_value_t = 1)]
    workers: u16,
    /// Events that are timed.
    #[arg(long, default_value_t = 10)]
    events: u32,
}

/// Requests of each disk: so many that some of them are timed.
const REQUESTS: u64 = 130;
/// An answer is told again for nine times the time that it took to make: after that it is a new one.
const REST: Duration = Duration::from_secs(1);

/// As Prometheus asks.
const ASK: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: ringway\r\n\
    Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n";

/// One scrape.
#[derive(Clone, Copy, Debug, Default)]
struct Scrape {
    cpu_ms: f64,
    wall_ms: f64,
    bytes: usize,
    series: usize,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &ScrapeArgs) -> Result<Report> {
    ensure!(args.disks > 0 && args.events > 0, "--disks and --events are 1 at least");
    raise_open_files();
    let folder = tempfile::Builder::new().prefix("ringway-scrape-").tempdir()?;
    let dir = folder.path();
    let mut config =
        format!("workers = {}\ncontrol = 'control'\nmetrics = 'unix:metrics'\n", args.workers);
    for at in 0..args.disks {
        let _ = write!(config, "[[disk]]\nimage = 'null:1G'\nsocket = 's{at}'\nqueues = 1\n");
    }
    let file = dir.join("disks.toml");
    std::fs::write(&file, config)?;
    let server = Running::from_file(lab, &file, dir.join(format!("s{}", args.disks - 1)))?;
    let guests = (0..args.disks).map(|at| guest(&dir.join(format!("s{at}"))));
    let guests = guests.collect::<Result<Vec<_>>>()?;
    let scrapes = (0..lab.common.rounds)
        .map(|_| scrape(&server, &dir.join("metrics")))
        .collect::<Result<Vec<_>>>()?;
    let events = events(&dir.join("control"), args.events)?;
    drop(guests);
    Ok(report(args, &scrapes, &events))
}

/// A front-end whose disk has something to tell.
fn guest(socket: &Path) -> Result<(BlkQueue<()>, Device)> {
    let options = Options::new().queues(1).queue_size(128).memory(1 << 20);
    let mut device = options.timeout(Duration::from_secs(5)).connect(socket)?;
    let mut queue = device.queue()?;
    for at in 0..REQUESTS {
        let buffer = device.pool().alloc(512).context("no memory")?;
        queue.read(at * 512, buffer, ()).map_err(|_| anyhow::anyhow!("a full queue"))?;
        queue.submit()?;
        ensure!(queue.wait(Some(Duration::from_secs(5)))?, "no answer");
        while queue.pop()?.is_some() {}
    }
    Ok((queue, device))
}

#[allow(clippy::cast_precision_loss)]
fn scrape(server: &Running, metrics: &Path) -> Result<Scrape> {
    std::thread::sleep(REST);
    let before = server.usage()?;
    let begun = Instant::now();
    let mut stream = UnixStream::connect(metrics)?;
    stream.write_all(ASK)?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let wall_ms = begun.elapsed().as_secs_f64() * 1e3;
    // Threads that were asked go back to sleep.
    std::thread::sleep(Duration::from_millis(100));
    let cpu_ms = server.usage()?.since(&before).cpu_ns as f64 / 1e6;
    let series = text.lines().filter(|line| line.starts_with("ringway_")).count();
    Ok(Scrape { cpu_ms, wall_ms, bytes: text.len(), series })
}

/// How long after a request was sent the event was read that it causes, in milliseconds.
fn events(control: &Path, count: u32) -> Result<Vec<f64>> {
    let mut lines = BufReader::new(UnixStream::connect(control)?);
    let mut line = String::new();
    writeln!(lines.get_mut(), "{}", json!({"command": "events"}))?;
    lines.read_line(&mut line)?;
    let mut asks = BufReader::new(UnixStream::connect(control)?);
    let mut times = Vec::new();
    for at in 0..count {
        let (command, event) =
            if at % 2 == 0 { ("pause", "paused") } else { ("resume", "resumed") };
        let begun = Instant::now();
        writeln!(asks.get_mut(), "{}", json!({"command": command, "disk": 0}))?;
        line.clear();
        lines.read_line(&mut line)?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        let answer: Value = serde_json::from_str(&line)?;
        ensure!(answer["event"] == event, "not {event}: {line}");
        line.clear();
        asks.read_line(&mut line)?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(times)
}

fn report(args: &ScrapeArgs, scrapes: &[Scrape], events: &[f64]) -> Report {
    let of = |what: fn(&Scrape) -> f64| scrapes.iter().map(what).collect::<Vec<_>>();
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let (cpu, wall) = (of(|one| one.cpu_ms), of(|one| one.wall_ms));
    let last = scrapes.last().copied().unwrap_or_default();
    let row = |what: &str, values: &[f64]| {
        vec![
            what.into(),
            format!("{:.2}", median(values.to_vec()).unwrap_or(f64::NAN)),
            format!("{:.2}", most(values)),
        ]
    };
    let rows = vec![
        row("a scrape: CPU time of the daemon, user and system", &cpu),
        row("a scrape: until all of it was read", &wall),
        row("an event: from the command that causes it until it was read", events),
    ];
    let title = format!("Watching {} disks, each used by a front-end", args.disks);
    let head = vec!["what", "median ms", "most ms"];
    let notes = vec![
        format!("{} scrapes of {} series in {} bytes.", scrapes.len(), last.series, last.bytes),
        format!("{} events.", events.len()),
    ];
    let data = json!({ "cpu_ms": cpu, "wall_ms": wall, "events_ms": events });
    Report { name: "scrape", tables: vec![Table { title, head, rows, notes }], data }
}
