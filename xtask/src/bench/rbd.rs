//! Images of a Ceph cluster: ours beside librbd without any guest (fio), and beside QEMU's storage daemon.

use crate::bench::ceph::Cluster;
use crate::bench::daemon::Running;
use crate::bench::lab::Lab;
use crate::bench::load::{Load, measure_server};
use crate::bench::options::{Client, Waiting};
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ringway_bench::median;
use ringway_bench::usage::Usage;
use ringway_terminal::short::count;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What fio takes to connect and to open the image, about: with a quarter of the time that it is measured to
/// either side.
const CONNECT: Duration = Duration::from_millis(200);

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct RbdArgs {
    /// The folder for the cluster's data: on tmpfs, so that no disk is measured.
    #[arg(long, default_value = "/dev/shm", value_name = "FOLDER")]
    folder: PathBuf,
    /// Size of the image, which is written whole first.
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    mib: u64,
    /// Bytes of a request.
    #[arg(long, value_delimiter = ',', default_value = "4096,131072", value_name = "LIST")]
    sizes: Vec<u32>,
    /// Requests in flight.
    #[arg(long, value_delimiter = ',', default_value = "1,32", value_name = "LIST")]
    depths: Vec<u32>,
    /// Random reads, random writes.
    #[arg(long, value_delimiter = ',', default_value = "read,write", value_name = "LIST",
          value_parser = ["read", "write"])]
    kinds: Vec<String>,
    /// Who is measured; fio is what the others are compared with.
    #[arg(long, value_delimiter = ',', default_value = "fio,ringway,qsd", value_name = "LIST",
          value_parser = ["fio", "ringway", "qsd"])]
    servers: Vec<String>,
}

/// What one turn has given.
#[derive(Clone, Copy, Debug, Serialize)]
struct Turn {
    iops: f64,
    /// CPU time of the serving processes per request.
    cpu_us: f64,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &RbdArgs) -> Result<Report> {
    let cluster = Cluster::start(&args.folder, args.mib).context("cannot make the cluster")?;
    fill(&cluster, args.mib)?;
    let (mut rows, mut data) = (Vec::new(), Vec::new());
    for &size in &args.sizes {
        for &depth in &args.depths {
            for kind in &args.kinds {
                let load = Load { depth, size, write: kind == "write", waiting: Waiting::Sleeping };
                let name = format!("{} KiB {kind}, depth {depth}", size / 1024);
                let all = rounds(lab, args, &cluster, (&name, &load))?;
                rows.extend(table_rows(&args.servers, &name, &all));
                data.push(json!({ "load": name,
                    "servers": args.servers.iter().zip(&all).collect::<Vec<_>>() }));
            }
        }
    }
    let table = Table {
        title: format!("An image of a Ceph cluster on this host, {} MiB, random", args.mib),
        head: vec!["load", "server", "IOPS", "min–max", "to fio", "CPU us/IO"],
        rows,
        notes: vec![
            "One monitor and one OSD with its data on tmpfs share all cores with whoever is measured, and \
             nobody is pinned: the OSD has the most of them. librbd's cache is off for all. fio: its rbd engine \
             in the process of librbd, no guest. ringway and qsd: vhost-user-blk, one queue, the client \
             is ringway-driver and sleeps. CPU us/IO: of the process with librbd, and for ringway its daemon's \
             too; of fio from the middle half of its time."
                .into(),
        ],
    };
    Ok(Report { name: "rbd", tables: vec![table], data: json!(data) })
}

fn rounds(
    lab: &Lab,
    args: &RbdArgs,
    cluster: &Cluster,
    (name, load): (&str, &Load),
) -> Result<Vec<Vec<Turn>>> {
    let mut all = vec![Vec::new(); args.servers.len()];
    for round in 0..lab.common.rounds {
        // There and back, so that a drift favours nobody.
        let mut order: Vec<_> = (0..args.servers.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for who in order {
            cluster.wait_until_unused()?;
            let server = args.servers[who].as_str();
            let turn = match server {
                "fio" => with_fio(lab, args.mib, cluster, load),
                _ => with_guest(lab, server == "ringway", cluster, load),
            };
            let turn = turn.with_context(|| format!("{name}, {server}"))?;
            eprintln!("{name}, {server}: {:.0} IOPS, {:.0} us/IO", turn.iops, turn.cpu_us);
            all[who].push(turn);
        }
    }
    Ok(all)
}

fn table_rows(servers: &[String], name: &str, all: &[Vec<Turn>]) -> Vec<Vec<String>> {
    let middle = |of: &[Turn]| median(of.iter().map(|turn| turn.iops).collect()).unwrap_or(0.0);
    let fio = servers.iter().position(|server| server == "fio").map(|at| middle(&all[at]));
    let row = |(server, turns): (&String, &Vec<Turn>)| {
        let (low, high) = turns
            .iter()
            .fold((f64::MAX, 0f64), |(low, high), turn| (low.min(turn.iops), high.max(turn.iops)));
        let cpu = median(turns.iter().map(|turn| turn.cpu_us).collect()).unwrap_or(0.0);
        vec![
            name.to_owned(),
            server.clone(),
            count(middle(turns)),
            format!("{}–{}", count(low), count(high)),
            fio.map_or("–".into(), |fio| format!("{:.2}", middle(turns) / fio)),
            format!("{cpu:.0}"),
        ]
    };
    servers.iter().zip(all).map(row).collect()
}

/// Ours or QEMU's, under a guest.
fn with_guest(lab: &Lab, ours: bool, cluster: &Cluster, load: &Load) -> Result<Turn> {
    let conf = cluster.conf().display().to_string();
    let program = if ours { &lab.daemon } else { &lab.common.qsd };
    let server = Running::of_program(lab, program, |socket| {
        let socket = socket.display();
        let words = if ours {
            let further = &lab.common.daemon_args;
            format!("serve rbd:rbd/img --ceph-conf {conf} --queues 1 --socket {socket} {further}")
        } else {
            format!(
                "--blockdev driver=rbd,pool=rbd,image=img,conf={conf},node-name=f,cache.direct=on \
                 --object iothread,id=t0 --export type=vhost-user-blk,id=e,node-name=f,\
                 addr.type=unix,addr.path={socket},writable=on,num-queues=1,iothread=t0"
            )
        };
        words.split_whitespace().map(str::to_owned).collect()
    })?;
    let mut used = Vec::new();
    let mut boundary = || {
        used.push(of_family(server.pid())?);
        Ok(())
    };
    // Its thread goes where the kernel has room.
    let mut anywhere = lab.clone();
    anywhere.common.client_cpus.clear();
    let outcome =
        measure_server(Client::Ringway, &anywhere, server.socket(), 1, load, &mut boundary)
            .with_context(|| server.last_words())?;
    let [before, after] = used[..] else { bail!("the measurement has not ended") };
    let done = outcome.done();
    ensure!(done > 0, "nothing was done");
    #[allow(clippy::cast_precision_loss)]
    let cpu_us = (after - before) as f64 / 1e3 / done as f64;
    Ok(Turn { iops: outcome.iops(), cpu_us })
}

/// librbd in the process of fio, without any guest.
fn with_fio(lab: &Lab, mib: u64, cluster: &Cluster, load: &Load) -> Result<Turn> {
    let words = format!(
        "--rw={} --bs={} --iodepth={} --time_based --runtime={}ms --ramp_time={}ms --norandommap \
         --randrepeat=0",
        load.rw().name(),
        load.size,
        load.depth,
        Duration::from_secs_f64(lab.seconds).as_millis(),
        Duration::from_secs_f64(lab.common.warmup).as_millis(),
    );
    let child = fio(cluster, mib, &words).spawn().context("cannot run fio: install it")?;
    let pid = child.id();
    let ramp = lab.common.warmup + lab.seconds / 4.0;
    std::thread::sleep(CONNECT + Duration::from_secs_f64(ramp));
    let (before, begun) = (of_family(pid), Instant::now());
    std::thread::sleep(Duration::from_secs_f64(lab.seconds / 2.0));
    let (after, took) = (of_family(pid), begun.elapsed());
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("fio: {}: {}", output.status, error.lines().next().unwrap_or("no message"));
    }
    // Notes may stand before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let json: Value = serde_json::from_str(json).context("fio does not speak JSON")?;
    let part = &json["jobs"][0][if load.write { "write" } else { "read" }];
    let iops = part["iops"].as_f64().context("fio tells no IOPS")?;
    ensure!(iops > 0.0, "fio has done nothing");
    #[allow(clippy::cast_precision_loss)]
    let cpu_us = (after? - before?) as f64 / 1e3 / took.as_secs_f64() / iops;
    Ok(Turn { iops, cpu_us })
}

/// Writes the whole image, so that no hole is measured.
fn fill(cluster: &Cluster, mib: u64) -> Result<()> {
    let output = fio(cluster, mib, "--rw=write --bs=4M --iodepth=4").output();
    let output = output.context("cannot run fio: install it")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "fio does not fill the image: {}", error.trim_end());
    Ok(())
}

/// fio with the image; it never outlives this process.
fn fio(cluster: &Cluster, mib: u64, words: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "fio", "--name=b", "--thread", "--output-format=json"]);
    command.args(["--ioengine=rbd", "--clientname=admin", "--pool=rbd", "--rbdname=img"]);
    command.arg(format!("--size={mib}M")).args(words.split_whitespace());
    command.env("CEPH_CONF", cluster.conf());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// CPU time in nanoseconds of a process and of all that it has started and that lives.
fn of_family(pid: u32) -> Result<u64> {
    let mut all = Usage::of(pid)?.cpu_ns;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let children = std::fs::read_to_string(task?.path().join("children"));
        let children =
            children.context("this kernel does not tell children: CPU time is not known")?;
        for child in children.split_whitespace() {
            all += of_family(child.parse()?)?;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_of_children_count() {
        // A shell gives what is behind it no standard input.
        let script = "exec 3<&0; \
                      (i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo; read x <&3) & wait";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut out, &mut [0]).unwrap();
        let (alone, all) = (Usage::of(child.id()).unwrap().cpu_ns, of_family(child.id()).unwrap());
        assert!(all > 2 * alone, "{all} of all, {alone} of the first");
        drop(out);
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
