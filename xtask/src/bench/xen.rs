//! Three back-ends for Xen under one guest: `ringway serve --xen`, QEMU's qdisk, and the kernel's
//! xen-blkback on a loop device.
//!
//! The host is emulated ([`ringway_e2e::xen`]), and its time is what it does: an instruction takes a
//! nanosecond. Figures repeat within a few percent on a busy computer, and are ratios of path lengths:
//! what a real CPU waits for (caches, TLBs, the way into the hypervisor) is not in them.

use crate::bench::lab::Lab;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ringway_bench::median;
use ringway_e2e::xen::Machine;
use ringway_terminal::short::count;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

/// The host, and what is measured on it.
#[derive(Debug, Args)]
pub(crate) struct XenArgs {
    /// Sizes of requests, as fio has them.
    #[arg(long, default_value = "4k,64k,1m", value_delimiter = ',', value_name = "LIST")]
    sizes: Vec<String>,
    /// Requests at a time.
    #[arg(long, default_value = "1,32", value_delimiter = ',', value_name = "LIST")]
    depths: Vec<u32>,
    /// Measure time by this computer's clock instead of by instructions.
    #[arg(long)]
    real_time: bool,
    /// CPUs of the guest.
    #[arg(long, default_value_t = 1, value_name = "N")]
    vcpus: u32,
    /// Another ringway in the place of qdisk, with these options of `serve`, separated by blanks.
    #[arg(long, default_value = "", allow_hyphen_values = true, value_name = "OPTIONS")]
    rival: String,
    /// Size of each disk, a file on dom0's tmpfs.
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    disk_mib: u32,
}

/// The disks of the guest: ours, qdisk's or a rival's, blkback's.
const DISKS: [&str; 3] = ["xvda", "xvdb", "xvdc"];

/// Boots the host, has it measure, and tabulates.
pub(crate) fn run(lab: &Lab, args: &XenArgs) -> Result<Report> {
    let mut cells = Vec::new();
    for size in &args.sizes {
        for depth in &args.depths {
            cells.extend(["read", "write"].map(|rw| format!("{rw}:{size}:{depth}")));
        }
    }
    ensure!(!cells.is_empty(), "nothing to measure: give --sizes and --depths");
    let millis = |seconds: f64| Duration::from_secs_f64(seconds).as_millis();
    let turns = u32::try_from(DISKS.len() * cells.len() * lab.common.rounds)?;
    // A second of instructions takes up to half a minute, and so does the start of fio.
    let limit = 600.0 + f64::from(turns) * 30.0 * (lab.seconds + lab.common.warmup + 1.0);
    let mut machine = Machine::new("speed")
        .measures(args.real_time)
        .program(&lab.daemon)
        .limit(Duration::from_secs_f64(limit))
        .param("cells", cells.join("+"))
        .param("rounds", lab.common.rounds)
        .param("runtime", millis(lab.seconds))
        .param("ramp", millis(lab.common.warmup))
        .param("vcpus", args.vcpus)
        .param("mib", args.disk_mib);
    for (name, options) in [("options", &lab.common.daemon_args), ("rival", &args.rival)] {
        let words: Vec<_> = options.split_whitespace().collect();
        if !words.is_empty() {
            machine = machine.param(name, words.join("+"));
        }
    }
    let Some(running) = machine.boot()? else { bail!("there is no Xen host to be had here") };
    let said = running.finish()?;
    let failed: Vec<_> = said.checks.iter().filter(|check| !check.ok).collect();
    ensure!(failed.is_empty() && said.done, "the Xen host failed: {}", said.tail());

    let found = Found::read(&said.infos)?;
    let time = if args.real_time { "in real time" } else { "an instruction a nanosecond" };
    Ok(Report {
        name: "xen",
        tables: vec![found.table(
            &cells,
            time,
            if args.rival.is_empty() { "qdisk" } else { "rival" },
        )],
        data: json!(found.iops),
    })
}

/// What the host has told.
struct Found {
    /// By disk and cell (`xvda.read:4k:1`), each round.
    iops: BTreeMap<String, Vec<f64>>,
}

impl Found {
    fn read(infos: &BTreeMap<String, String>) -> Result<Self> {
        let mut found = Self { iops: BTreeMap::new() };
        for (key, value) in infos {
            let number = || value.parse().with_context(|| format!("{key} {value}: no number"));
            let words: Vec<_> = key.split('.').collect();
            if let ["speed", disk, rw, size, depth, _round] = words[..] {
                let cell = format!("{disk}.{rw}:{size}:{depth}");
                found.iops.entry(cell).or_default().push(number()?);
            }
        }
        ensure!(!found.iops.is_empty(), "the guest has told no figure");
        Ok(found)
    }

    fn median(&self, disk: &str, cell: &str) -> Option<f64> {
        self.iops.get(&format!("{disk}.{cell}")).cloned().and_then(median)
    }

    fn table(&self, cells: &[String], time: &str, peer: &'static str) -> Table {
        let rows = cells.iter().map(|cell| {
            let mut row: Vec<_> = cell.split(':').map(str::to_owned).collect();
            let medians = DISKS.map(|disk| self.median(disk, cell));
            for (disk, middle) in DISKS.iter().zip(medians) {
                let all = self.iops.get(&format!("{disk}.{cell}")).map_or(&[][..], Vec::as_slice);
                let (low, high) =
                    all.iter().fold((f64::MAX, 0f64), |(l, h), &n| (l.min(n), h.max(n)));
                row.push(middle.map_or("–".into(), count));
                row.push(format!("{}–{}", count(low), count(high)));
            }
            for peer in &medians[1..] {
                let ratio = medians[0].zip(*peer).filter(|(_, peer)| *peer > 0.0);
                row.push(ratio.map_or("–".into(), |(ours, peer)| format!("{:.2}", ours / peer)));
            }
            row
        });
        Table {
            title: format!("Back-ends for Xen on an emulated host, {time}: IOPS in the guest"),
            head: vec![
                "load",
                "size",
                "depth",
                "ringway",
                "min–max",
                peer,
                "min–max",
                "blkback",
                "min–max",
                "to it",
                "to blkback",
            ],
            rows: rows.collect(),
            notes: vec!["to it, to blkback: IOPS of ringway, divided by theirs.".into()],
        }
    }
}
