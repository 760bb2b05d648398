//! qcow2 images: ours beside QEMU's, on images that are raw, allocated, and based on others.

use crate::bench::daemon::Running;
use crate::bench::lab::Lab;
use crate::bench::options::Waiting;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use ringway_bench::{AccessArgs, Load, Rw, Sizes, Target, measure, median};
use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Bytes of a cluster.
const CLUSTER: u64 = 65536;
/// How long a server may take until it listens.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Which cells.
#[derive(Debug, Args)]
pub(crate) struct Qcow2Args {
    /// The folder for the images: on tmpfs, or on the disk to measure.
    #[arg(long, default_value = "/dev/shm", value_name = "FOLDER")]
    folder: PathBuf,
    /// Size of the disk.
    #[arg(long, default_value_t = 512, value_name = "MIB")]
    mib: u64,
    /// Requests of 4 KiB in flight.
    #[arg(long, value_delimiter = ',', default_value = "1,32,64", value_name = "LIST")]
    depths: Vec<u32>,
    /// Which loads.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "read,write,sequential,first",
        value_name = "LIST"
    )]
    loads: Vec<Kind>,
    /// Direct I/O, past the page cache, for ours and for QEMU's.
    #[arg(long)]
    direct: bool,
    /// How the client waits.
    #[arg(long, value_delimiter = ',', default_value = "polling", value_name = "LIST")]
    clients: Vec<Waiting>,
}

/// Kinds of loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
enum Kind {
    /// 4 KiB reads, at random.
    Read,
    /// 4 KiB writes, at random.
    Write,
    /// 128 KiB, one behind the other.
    Sequential,
    /// 4 KiB writes, most of them the first one of their cluster.
    First,
}

/// What is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Image {
    Raw,
    /// All clusters are there.
    Allocated,
    /// Nothing is there: all is read from the base.
    OnRaw,
    OnQcow2,
    /// Nothing is there, and nothing below.
    Empty,
}

impl Image {
    const ALL: [Self; 5] = [Self::Raw, Self::Allocated, Self::OnRaw, Self::OnQcow2, Self::Empty];

    const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Allocated => "qcow2, allocated",
            Self::OnRaw => "overlay on raw",
            Self::OnQcow2 => "overlay on qcow2",
            Self::Empty => "qcow2, empty",
        }
    }

    const fn file(self) -> &'static str {
        match self {
            Self::Raw => "raw.img",
            Self::Allocated => "allocated.qcow2",
            Self::OnRaw => "on-raw.qcow2",
            Self::OnQcow2 => "on-qcow2.qcow2",
            Self::Empty => "empty.qcow2",
        }
    }

    /// What a new overlay is based on.
    const fn base(self) -> Option<&'static str> {
        match self {
            Self::Raw | Self::Allocated | Self::Empty => None,
            Self::OnRaw => Some("raw.img"),
            Self::OnQcow2 => Some("allocated.qcow2"),
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, Serialize)]
struct Ask {
    what: &'static str,
    size: u32,
    depth: u32,
    waiting: Waiting,
    #[serde(skip)]
    rw: Rw,
    kind: Kind,
}

impl Ask {
    /// An image of its own, and no more requests than a quarter of its clusters.
    fn first(&self) -> bool {
        self.kind == Kind::First
    }

    /// True if an image is one for this.
    fn is_for(&self, image: Image) -> bool {
        match image {
            Image::Raw | Image::Allocated => !self.first(),
            Image::Empty => self.first(),
            // Written overlays are allocated ones.
            Image::OnRaw | Image::OnQcow2 => {
                self.first() || matches!(self.rw, Rw::Randread | Rw::Read)
            }
        }
    }
}

/// All rounds of one cell.
#[derive(Debug, Serialize)]
struct Row {
    image: Image,
    ask: Ask,
    ours: Vec<f64>,
    qsd: Vec<f64>,
}

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &Qcow2Args) -> Result<Report> {
    let home = tempfile::Builder::new().prefix("ringway-qcow2-").tempdir_in(&args.folder)?;
    let home = home.path();
    make(lab, home, args.mib << 20)?;
    let mut rows: Vec<Row> = Vec::new();
    for ask in args.clients.iter().flat_map(|waiting| asks(args, *waiting)) {
        let images = Image::ALL.into_iter().filter(|image| ask.is_for(*image));
        rows.extend(images.map(|image| Row { image, ask, ours: Vec::new(), qsd: Vec::new() }));
    }
    let begun = std::time::Instant::now();
    let rounds = lab.common.rounds;
    for round in 0..rounds {
        for row in &mut rows {
            // There and back, so that a drift favours nobody.
            for ours in [round % 2 == 0, round % 2 == 1] {
                let found = one(lab, args, home, row, ours);
                let who = if ours { "ringway" } else { "qemu-storage-daemon" };
                let Row { image, ask, .. } = row;
                let found = found.with_context(|| format!("{who}, {}, {ask:?}", image.name()))?;
                if ours { row.ours.push(found) } else { row.qsd.push(found) }
            }
        }
        eprintln!("round {} of {rounds}: {:.0} s", round + 1, begun.elapsed().as_secs_f64());
    }
    let bench = qemu_img(home, args)?;
    let table = Table {
        title: format!("qcow2 of {} MiB in {}", args.mib, args.folder.display()),
        head: vec!["load", "image", "ringway", "min–max", "of raw", "qsd", "min–max", "times qsd"],
        rows: rows.iter().map(|row| cells(row, &rows)).collect(),
        notes: vec![format!(
            "Requests a second, medians. Clusters of 64 KiB, all {} the page cache; qsd: \
             qemu-storage-daemon with an l2-cache of 64 MiB, aio=io_uring.",
            if args.direct { "past" } else { "through" }
        )],
    };
    let other = Table {
        title: "qemu-img bench, 4 KiB, depth 32, each request 68 KiB behind the one before".into(),
        head: vec!["image", "reads a second", "writes a second"],
        rows: bench.iter().map(|(name, r, w)| vec![name.clone(), k(*r), k(*w)]).collect(),
        notes: Vec::new(),
    };
    Ok(Report {
        name: "qcow2",
        tables: vec![table, other],
        data: json!({ "rows": rows, "qemu_img": bench }),
    })
}

fn asks(args: &Qcow2Args, waiting: Waiting) -> Vec<Ask> {
    let small = |what, rw, kind, depth| Ask { what, size: 4096, depth, waiting, rw, kind };
    let large = |what, rw| Ask { size: 128 << 10, ..small(what, rw, Kind::Sequential, 8) };
    let mut all = Vec::new();
    for kind in &args.loads {
        let (what, rw) = match kind {
            Kind::Read => ("4 KiB random read", Rw::Randread),
            Kind::Write => ("4 KiB random write", Rw::Randwrite),
            Kind::Sequential => {
                all.push(large("128 KiB sequential read", Rw::Read));
                all.push(large("128 KiB sequential write", Rw::Write));
                continue;
            }
            Kind::First => {
                let first = |depth| small("4 KiB first writes", Rw::Randwrite, *kind, depth);
                all.extend([1, 32].map(first));
                continue;
            }
        };
        all.extend(args.depths.iter().map(|&depth| small(what, rw, *kind, depth)));
    }
    all
}

/// All images, with every cluster of the lower ones there.
fn make(lab: &Lab, home: &Path, bytes: u64) -> Result<()> {
    let raw = File::create(home.join("raw.img"))?;
    ringway_bench::fill::fill(&raw, bytes).context("cannot fill the image")?;
    ringway(lab, home, &["--quiet", "copy", "raw.img", "allocated.qcow2"])?;
    Image::ALL.iter().try_for_each(|image| anew(lab, home, *image, bytes))
}

/// Makes an image anew that is to be written for the first time.
fn anew(lab: &Lab, home: &Path, image: Image, bytes: u64) -> Result<()> {
    let size = bytes.to_string();
    let (option, value) = match (image, image.base()) {
        (_, Some(base)) => ("--backing", base),
        (Image::Empty, None) => ("--size", &size[..]),
        (_, None) => return Ok(()),
    };
    ringway(lab, home, &["--quiet", "create", "--force", image.file(), option, value])
}

fn ringway(lab: &Lab, home: &Path, args: &[&str]) -> Result<()> {
    let output =
        Command::new(std::path::absolute(&lab.daemon)?).args(args).current_dir(home).output()?;
    if !output.status.success() {
        bail!("{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Requests a second.
fn one(lab: &Lab, args: &Qcow2Args, home: &Path, row: &Row, ours: bool) -> Result<f64> {
    let Row { image, ask, .. } = row;
    if ask.first() {
        anew(lab, home, *image, args.mib << 20)?;
    }
    let path = home.join(image.file());
    let running = Running::of_image(lab, ours, &path, *image != Image::Raw, args.direct)?;
    let polling = ask.waiting == Waiting::Polling;
    let seconds = Duration::from_secs_f64(lab.seconds);
    let budget = (args.mib << 20) / CLUSTER / 4 * u64::from(ask.size);
    let load = Load {
        runtime: (!ask.first()).then_some(seconds),
        budget: ask.first().then_some(budget),
        ramp: Duration::from_secs_f64(if ask.first() { 0.0 } else { lab.common.warmup }),
        timed: false,
        polling,
        cpus: lab.common.client_cpus.clone(),
        ..Load::new(ask.rw, Sizes::one(ask.size), ask.depth)
    };
    let access = AccessArgs {
        allow_write: true,
        queue_size: Some(lab.common.queue_size),
        ..AccessArgs::default()
    };
    let name = format!("vhost-user:{}", running.socket().display());
    let target: Target = name.parse().map_err(anyhow::Error::msg)?;
    let opened = target.open_within(TIMEOUT, &load, &access, || Ok(()))?;
    let outcome = measure(opened, &load, &mut || Ok(()));
    let iops = outcome.with_context(|| running.last_words())?.iops();
    ensure!(iops > 0.0, "no request was answered: {}", running.last_words());
    Ok(iops)
}

/// Reads and writes a second of the program that needs no server.
fn qemu_img(home: &Path, args: &Qcow2Args) -> Result<Vec<(String, f64, f64)>> {
    let mut all = Vec::new();
    for (image, format) in [(Image::Raw, "raw"), (Image::Allocated, "qcow2")] {
        let run = |write: bool| -> Result<f64> {
            let count = (args.mib << 20) / (CLUSTER + 4096) * 8;
            let (count_word, step) = (count.to_string(), (CLUSTER + 4096).to_string());
            let mut command = Command::new("qemu-img");
            let cache = if args.direct { "none" } else { "writeback" };
            command.args(["bench", "-f", format, "-t", cache, "-i", "io_uring", "-d", "32"]);
            command.args(["-s", "4096", "-S", &step, "-c", &count_word]);
            command.args(write.then_some("-w")).arg(home.join(image.file()));
            let output = command.output().context("cannot run qemu-img")?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            // Run completed in 1.234 seconds.
            let seconds =
                said.split("completed in ").nth(1).and_then(|rest| rest.split(' ').next());
            let seconds: f64 = seconds.context(said.clone())?.parse()?;
            Ok(count as f64 / seconds)
        };
        all.push((image.name().to_owned(), run(false)?, run(true)?));
    }
    Ok(all)
}

fn cells(row: &Row, all: &[Row]) -> Vec<String> {
    let middle = |found: &[f64]| median(found.to_vec()).unwrap_or(0.0);
    let spread = |found: &[f64]| {
        let least = found.iter().copied().fold(f64::INFINITY, f64::min);
        format!("{}–{}", k(least), k(found.iter().copied().fold(0.0, f64::max)))
    };
    let same = |other: &&Row| {
        let (one, two) = (row.ask, other.ask);
        other.image == Image::Raw
            && (one.what, one.depth, one.waiting) == (two.what, two.depth, two.waiting)
    };
    let ours = middle(&row.ours);
    let raw = all.iter().find(same).map(|raw| format!("{:.1} %", 100.0 * ours / middle(&raw.ours)));
    vec![
        format!("{}, depth {}, client {}", row.ask.what, row.ask.depth, row.ask.waiting),
        row.image.name().to_owned(),
        k(ours),
        spread(&row.ours),
        raw.unwrap_or_default(),
        k(middle(&row.qsd)),
        spread(&row.qsd),
        format!("{:.2}", ours / middle(&row.qsd)),
    ]
}

fn k(per_second: f64) -> String {
    format!("{:.1} k", per_second / 1000.0)
}
