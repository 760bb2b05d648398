//! O3: the paths bio, request and auto, on fast and slow disks (Linux virtio_blk, July 2012): those of
//! the back-end, then those of the front-end.

use crate::origins::finding::Finding;
use crate::origins::lab::{IMAGE, Lab};
use crate::origins::server::{Running, ServerKind};
use crate::pattern::{Rw, Sizes};
use crate::versus::median;
use anyhow::Result;
use ringway_disk::SchedulerMode;
use ringway_terminal::short::count;
use serde_json::json;
use std::time::Duration;

const DEPTH: u32 = 32;
const BYTES: u32 = 4 << 10;

/// The load that `auto` gets before it is measured: what it may take to find its path.
const WARMUP_MAX: Duration = Duration::from_secs(2);

const PATHS: [SchedulerMode; 3] = [SchedulerMode::Bio, SchedulerMode::Request, SchedulerMode::Auto];

/// In the order of the published tables.
const PATTERNS: [(&str, Rw); 4] = [
    ("seq read", Rw::Read),
    ("seq write", Rw::Write),
    ("rand read", Rw::Randread),
    ("rand write", Rw::Randwrite),
];

/// What was measured, request-based and bio-based IOPS, by pattern.
type Published = (&'static str, [u32; 4], [u32; 4]);

/// A published table, and what stands for its disk here.
struct PublishedTable {
    title: &'static str,
    published: &'static [Published],
    /// The paths of the front-end are tried, and the back-end's is bio.
    front: bool,
    disks: &'static [Disk],
}

/// What is served here.
#[derive(Clone, Copy, Debug)]
struct Disk {
    /// In tables.
    name: &'static str,
    /// As `ringway serve` calls it; the temporary image if there is none. A client writes all over a
    /// disk in memory, so that one is small.
    unreal: Option<&'static str>,
}

const PARTS: [PublishedTable; 4] = [
    PublishedTable {
        title: "as fast as memory",
        front: false,
        published: &[(
            "ramdisk",
            [182_147, 161_449, 184_211, 165_630],
            [233_991, 201_658, 224_268, 192_396],
        )],
        disks: &[
            Disk { name: "null", unreal: Some("null:1G") },
            Disk { name: "sim:ram (simulation)", unreal: Some("sim:ram:256M") },
        ],
    },
    PublishedTable {
        title: "a real disk",
        front: false,
        published: &[(
            "Fusion-IO SSD",
            [105_791, 115_711, 104_773, 114_619],
            [117_840, 128_616, 119_266, 125_985],
        )],
        disks: &[Disk { name: "file, O_DIRECT", unreal: None }],
    },
    PublishedTable {
        title: "a hard disk",
        front: false,
        published: &[
            ("SATA, qemu", [6470, 8829, 488, 324], [6360, 5060, 487, 354]),
            ("SATA, kvm tool", [10037, 6722, 498, 382], [9060, 6065, 520, 384]),
        ],
        disks: &[Disk { name: "sim:hdd (simulation)", unreal: Some("sim:hdd:64G") }],
    },
    PublishedTable {
        title: "paths of the front-end",
        front: true,
        // The published change was one of a front-end: its tables are above.
        published: &[],
        disks: &[
            Disk { name: "null", unreal: Some("null:1G") },
            Disk { name: "sim:hdd (simulation)", unreal: Some("sim:hdd:64G") },
        ],
    },
];

/// All rounds of a disk under a load, by path.
#[derive(Debug, Default)]
struct Cell {
    iops: [Vec<f64>; 3],
    /// CPU nanoseconds of the daemon per request.
    server_ns: [Vec<f64>; 3],
    /// Of the client.
    client_ns: [Vec<f64>; 3],
    /// Requests of the client by requests that its front-end sent.
    merged: [Vec<f64>; 3],
}

pub(super) fn run(lab: &Lab<'_>) -> Result<Vec<Finding>> {
    PARTS.iter().map(|part| find(lab, part)).collect()
}

fn find(lab: &Lab<'_>, part: &PublishedTable) -> Result<Finding> {
    let (mut rows, mut bars, mut data) = (Vec::new(), Vec::new(), Vec::new());
    for (what, request, bio) in part.published {
        for (at, (pattern, _)) in PATTERNS.iter().enumerate() {
            let name = format!("published: {what}, {pattern}");
            let ratio = f64::from(bio[at]) / f64::from(request[at]);
            let [bio, request] = [bio[at], request[at]].map(|iops| count(iops.into()));
            rows.push(vec![name.clone(), bio, request, String::new(), format!("{ratio:.2}")]);
            bars.push((name, ratio));
        }
    }
    for disk in part.disks {
        for (pattern, rw) in PATTERNS {
            let cell = measure(lab, disk, part.front, pattern, rw)?;
            let name = format!("{}, {pattern}", disk.name);
            let (mut row, ratio) = row(&name, &cell);
            if part.front {
                row.extend(client(&cell));
            }
            rows.push(row);
            bars.push((name, ratio));
            data.push(json!({
                "disk": disk.name, "pattern": pattern, "paths": PATHS.map(|path| path.name()),
                "iops": cell.iops, "server_cpu_ns_per_request": cell.server_ns,
                "client_cpu_ns_per_request": cell.client_ns,
                "requests_per_request_sent": cell.merged,
            }));
        }
    }
    Ok(Finding {
        title: format!("O3: {}; {} KiB, depth {DEPTH}, one queue, IOPS", part.title, BYTES >> 10),
        head: if part.front { [&HEAD[..], &CLIENT[..]].concat() } else { HEAD.to_vec() },
        rows,
        notes: vec![format!(
            "auto has {:?} of the load before it counts. Simulations take the time of a disk and keep \
             their data in memory.",
            warmup(lab)
        )],
        bars: ("bio divided by request", bars),
        even: 1.0,
        data: json!(data),
        ..Finding::default()
    })
}

const HEAD: [&str; 10] = [
    "",
    "bio",
    "request",
    "auto",
    "bio ÷ request",
    "auto ÷ better",
    "min–max of auto",
    "daemon ns/IO bio",
    "request",
    "auto",
];

/// What is told of the client besides.
const CLIENT: [&str; 3] = ["client ns/IO bio", "request", "merged to one by request"];

/// Short tests of the program itself do not wait two seconds.
fn warmup(lab: &Lab<'_>) -> Duration {
    WARMUP_MAX.min(lab.runtime * 4)
}

fn measure(lab: &Lab<'_>, disk: &Disk, front: bool, pattern: &str, rw: Rw) -> Result<Cell> {
    let image = match disk.unreal {
        Some(name) => name.to_owned(),
        None => lab.disk()?.display().to_string(),
    };
    let mut cell = Cell::default();
    // An image has one daemon at a time; others go on, so that auto is warm after its first round.
    let mut running: [Option<Running>; 3] = Default::default();
    lab.alternate(PATHS.len(), |at| {
        let path = PATHS[at];
        lab.tell(&format!("O3 {}, {pattern}, {}", disk.name, path.name()));
        let mut load = lab.load(rw, Sizes::one(BYTES), DEPTH, 1);
        load.polling = true;
        // Or the client would be what is measured.
        load.timed = false;
        // A connection is new each time, and so is the choice of its front-end.
        if path == SchedulerMode::Auto && (front || running[at].is_none()) {
            load.ramp = warmup(lab);
        }
        let (theirs, ours) =
            if front { (SchedulerMode::Bio, path) } else { (path, SchedulerMode::Bio) };
        let kind = ServerKind::Ringway { engine: None, path: theirs };
        let server = match &mut running[at] {
            Some(server) => server,
            none => none.insert(Running::start(kind, &image)?),
        };
        let mut opened = server.open_by(ours, &load)?;
        let outcome = lab.measure(&mut opened, &load)?;
        let done = outcome.tick.done().max(1) as f64;
        cell.iops[at].push(outcome.tick.done() as f64 / outcome.seconds);
        cell.server_ns[at].extend(outcome.server_ns.map(|ns| ns as f64 / done));
        cell.client_ns[at].push(outcome.client_ns as f64 / done);
        let sent = outcome.effort.map_or(0, |effort| effort.path.runs);
        if sent > 0 {
            let plugged = outcome.effort.map_or(0, |effort| effort.path.plugged);
            cell.merged[at].push(plugged as f64 / sent as f64);
        }
        // The connection ends before the daemon may.
        drop(opened);
        if image.ends_with(IMAGE) {
            running[at] = None;
        }
        Ok(())
    })?;
    Ok(cell)
}

/// The line of a cell, and what bio wins or loses.
fn row(name: &str, cell: &Cell) -> (Vec<String>, f64) {
    let of = |values: &Vec<f64>| median(values.clone()).unwrap_or(f64::NAN);
    let [bio, request, auto] = cell.iops.each_ref().map(of);
    let least = cell.iops[2].iter().copied().fold(f64::INFINITY, f64::min);
    let most = cell.iops[2].iter().copied().fold(0.0, f64::max);
    let mut row = vec![name.to_owned()];
    row.extend([bio, request, auto].map(count));
    row.push(format!("{:.2}", bio / request));
    row.push(format!("{:.3}", auto / bio.max(request)));
    row.push(format!("{}–{}", count(least), count(most)));
    row.extend(cell.server_ns.each_ref().map(|values| match median(values.clone()) {
        Some(ns) => format!("{ns:.0}"),
        None => "-".into(),
    }));
    (row, bio / request)
}

/// What the paths cost the client, and how many requests went in one.
fn client(cell: &Cell) -> [String; 3] {
    let of = |values: &Vec<f64>| median(values.clone());
    let ns = |values: &Vec<f64>| of(values).map_or("-".into(), |ns| format!("{ns:.0}"));
    let merged = of(&cell.merged[1]).map_or("-".into(), |count| format!("{count:.1}"));
    [ns(&cell.client_ns[0]), ns(&cell.client_ns[1]), merged]
}
