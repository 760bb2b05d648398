//! NBD servers beside each other, under clients that are nobody's: fio's nbd engine and nbdcopy.

use crate::bench::daemon::Running;
use crate::bench::lab::Lab;
use crate::bench::options;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ringway_bench::median;
use ringway_terminal::short::count;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct NbdArgs {
    /// What is served: null (memory without content; of nbdkit its memory plugin), or a file.
    #[arg(long, value_delimiter = ',', default_value = "null,file", value_name = "LIST",
          value_parser = ["null", "file"])]
    devices: Vec<String>,
    /// Size of the disk.
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    mib: u64,
    /// The folder for the file, which stays in the page cache.
    #[arg(long, default_value = "/var/tmp", value_name = "FOLDER")]
    folder: PathBuf,
    /// Who serves.
    #[arg(long, value_delimiter = ',', value_name = "LIST",
          default_value = "ringway,nbdkit,qsd,qemu-nbd",
          value_parser = ["ringway", "nbdkit", "qsd", "qemu-nbd"])]
    servers: Vec<String>,
}

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Random reads of so many bytes, so many in flight on one connection.
    Fio { bytes: u32, depth: u32 },
    /// All of the disk, on four connections.
    Copy,
}

const LOADS: [Load; 4] = [
    Load::Fio { bytes: 4096, depth: 1 },
    Load::Fio { bytes: 4096, depth: 32 },
    Load::Fio { bytes: 1 << 20, depth: 4 },
    Load::Copy,
];

impl Load {
    fn name(self) -> String {
        match self {
            Self::Fio { bytes: 4096, depth } => format!("4 KiB, depth {depth}"),
            Self::Fio { depth, .. } => format!("1 MiB, depth {depth}"),
            Self::Copy => "nbdcopy".into(),
        }
    }

    /// True if its figure is MiB/s, not IOPS.
    const fn is_throughput(self) -> bool {
        !matches!(self, Self::Fio { bytes: 4096, .. })
    }
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &NbdArgs) -> Result<Report> {
    let home = tempfile::Builder::new().prefix("ringway-nbd-").tempdir_in(&args.folder)?;
    let file = home.path().join("disk.img");
    if args.devices.iter().any(|device| device == "file") {
        make(&file, args.mib).context("cannot make the file")?;
    }
    let (mut tables, mut data) = (Vec::new(), Vec::new());
    for device in &args.devices {
        let path = (device == "file").then_some(&*file);
        let mut rows = Vec::new();
        for load in LOADS {
            let all = rounds(lab, args, path, load)?;
            rows.extend(table_rows(&args.servers, load, &all));
            data.push(json!({ "device": device, "load": load.name(),
                "servers": args.servers.iter().zip(&all).collect::<Vec<_>>() }));
        }
        tables.push(Table {
            title: format!("NBD over a Unix socket, {device}, {} MiB", args.mib),
            head: vec!["load", "server", "IOPS or MiB/s", "min–max", "to the best peer", "CPU s"],
            rows,
            notes: vec![
                "4 KiB: IOPS of random reads by fio's nbd engine; 1 MiB and nbdcopy (all of the disk to \
                 null:, 4 connections): MiB/s. CPU s: of the server, per measurement. All files \
                 through the page cache. null: nbdkit has its memory plugin, which copies."
                    .into(),
            ],
        });
    }
    Ok(Report { name: "nbd", tables, data: json!(data) })
}

/// Of each server, each round: the figure, and seconds of CPU time.
fn rounds(
    lab: &Lab,
    args: &NbdArgs,
    file: Option<&Path>,
    load: Load,
) -> Result<Vec<Vec<(f64, f64)>>> {
    let mut all = vec![Vec::new(); args.servers.len()];
    for round in 0..lab.common.rounds {
        let mut order: Vec<_> = (0..args.servers.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for who in order {
            let server = start(lab, &args.servers[who], file, args.mib)?;
            let before = server.usage()?;
            let figure = measure(lab, &server, load, args.mib)
                .with_context(|| format!("{}: {}", args.servers[who], server.last_words()))?;
            #[allow(clippy::cast_precision_loss)]
            let cpu = server.usage()?.since(&before).cpu_ns as f64 / 1e9;
            eprintln!("{}, {}: {figure:.0}", load.name(), args.servers[who]);
            all[who].push((figure, cpu));
        }
    }
    Ok(all)
}

fn table_rows(servers: &[String], load: Load, all: &[Vec<(f64, f64)>]) -> Vec<Vec<String>> {
    let middle = |of: &[(f64, f64)]| median(of.iter().map(|one| one.0).collect()).unwrap_or(0.0);
    let peers = servers.iter().zip(all).filter(|(name, _)| *name != "ringway");
    let best = peers.map(|(_, of)| middle(of)).fold(0.0, f64::max);
    let show = |figure: f64| {
        if load.is_throughput() { format!("{figure:.0}") } else { count(figure) }
    };
    let row = |(name, of): (&String, &Vec<(f64, f64)>)| {
        let figures = of.iter().map(|one| one.0);
        let (low, high) = figures.fold((f64::MAX, 0f64), |(l, h), f| (l.min(f), h.max(f)));
        let cpu = median(of.iter().map(|one| one.1).collect()).unwrap_or(0.0);
        let ratio = if best > 0.0 { format!("{:.2}", middle(of) / best) } else { "–".into() };
        vec![
            load.name(),
            name.clone(),
            show(middle(of)),
            format!("{}–{}", show(low), show(high)),
            ratio,
            format!("{cpu:.2}"),
        ]
    };
    servers.iter().zip(all).map(row).collect()
}

/// Starts a server whose disk is called `d`.
fn start(lab: &Lab, server: &str, file: Option<&Path>, mib: u64) -> Result<Running> {
    let path = file.map(|path| path.display().to_string());
    let program = match server {
        "ringway" => lab.daemon.clone(),
        "qsd" => lab.common.qsd.clone(),
        other => other.into(),
    };
    Running::of_program(lab, &program, |socket| {
        let socket = socket.display();
        let words = match (server, path) {
            ("ringway", path) => {
                let image = path.unwrap_or_else(|| format!("null:{mib}M"));
                let mut words = format!("nbd {image} --export d --listen unix:{socket}");
                if file.is_some() {
                    words += " --format raw --cache writeback";
                }
                words + " " + &lab.common.daemon_args
            }
            ("nbdkit", None) => format!("-f -U {socket} memory {mib}M"),
            ("nbdkit", Some(path)) => format!("-f -U {socket} file {path}"),
            ("qsd", path) => {
                let node = path.map_or_else(
                    || format!("driver=null-co,node-name=f,size={}", mib << 20),
                    |path| format!("driver=file,filename={path},node-name=f,aio=io_uring"),
                );
                format!(
                    "--blockdev {node} --object iothread,id=t0 \
                     --nbd-server addr.type=unix,addr.path={socket},max-connections=16 \
                     --export type=nbd,id=e,node-name=f,name=d,writable=on,iothread=t0"
                )
            }
            (_, None) => {
                let node = format!("driver=null-co,size={}", mib << 20);
                format!("-t -k {socket} -e 16 -x d --image-opts {node}")
            }
            (_, Some(path)) => {
                format!("-t -k {socket} -e 16 -x d -f raw --cache=writeback --aio=io_uring {path}")
            }
        };
        words.split_whitespace().map(str::to_owned).collect()
    })
}

/// IOPS, or MiB/s.
fn measure(lab: &Lab, server: &Running, load: Load, mib: u64) -> Result<f64> {
    let uri = format!("nbd+unix:///d?socket={}", server.socket().display());
    let cpus = options::cpu_list(&lab.common.client_cpus);
    match load {
        Load::Fio { bytes, depth } => {
            let words = format!(
                "--name=b --ioengine=nbd --uri={uri} --rw=randread --bs={bytes} --iodepth={depth} \
                 --size={mib}M --time_based --runtime={}ms --ramp_time={}ms --norandommap \
                 --cpus_allowed={cpus} --output-format=json",
                millis(lab.seconds),
                millis(lab.common.warmup)
            );
            let output = client("fio", words.split_whitespace())?;
            let text = String::from_utf8_lossy(&output.stdout);
            let json = text.find('{').map_or("", |at| &text[at..]);
            let said: Value = serde_json::from_str(json).context("fio says no JSON")?;
            let read = &said["jobs"][0]["read"];
            let iops = read["iops"].as_f64().context("fio tells no IOPS")?;
            ensure!(iops > 0.0, "fio has read nothing");
            Ok(if load.is_throughput() {
                iops * f64::from(bytes) / f64::from(1 << 20)
            } else {
                iops
            })
        }
        Load::Copy => {
            let words = ["-c", &cpus, "nbdcopy", "--no-extents", "--connections=4", &uri, "null:"];
            let begun = Instant::now();
            client("taskset", words.into_iter())?;
            #[allow(clippy::cast_precision_loss)]
            let mib = mib as f64;
            Ok(mib / begun.elapsed().as_secs_f64())
        }
    }
}

fn millis(seconds: f64) -> u128 {
    std::time::Duration::from_secs_f64(seconds).as_millis().max(1)
}

fn client<'a>(program: &str, words: impl Iterator<Item = &'a str>) -> Result<Output> {
    let output = Command::new(program).args(words).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{program}: {}: {}", output.status, why.lines().next().unwrap_or_default());
    }
    Ok(output)
}

/// Data without order, and no holes.
fn make(path: &Path, mib: u64) -> Result<()> {
    let (mut file, mut data, mut random) = (File::create(path)?, vec![0; 1 << 20], 1u64);
    for _ in 0..mib {
        for word in data.chunks_exact_mut(8) {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            word.copy_from_slice(&random.to_le_bytes());
        }
        file.write_all(&data)?;
    }
    Ok(file.sync_all()?)
}
