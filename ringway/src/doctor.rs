//! `ringway doctor`: what this host and a disk can do, what `auto` would choose, and why.
//!
//! It looks and changes nothing: no file is created, locked or opened for writing. The report is
//! one tree of plain facts (`host.rs`, `engines.rs`, `image.rs`), from which `advice.rs` draws
//! warnings and `report.rs` the table; `--json` prints the tree.

mod advice;
mod engines;
mod host;
pub(crate) mod image;
mod measure;
mod memory;
pub(crate) mod report;

use crate::info::chain;
use anyhow::bail;
use clap::{Args, ValueHint};
use image::Image;
use measure::Measured;
use report::Report;
use ringway_bench::seconds;
use ringway_control::config::{CephArgs, Format};
use ringway_control::log::LogArgs;
use ringway_disk::{EngineKind, Qcow2};
use ringway_terminal::reasons::in_full;
use ringway_terminal::{logging, output};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The shortest round that says anything at all.
const ROUND_MIN: Duration = Duration::from_millis(10);

const EXAMPLES: &str = "\
Examples:
  ringway doctor                 what this host can do
  ringway doctor disk.img        and how disk.img would be served, or why not
  ringway doctor --format qcow2 vm7.qcow2  and all that it is based on
  ringway doctor --measure disk.img  and which engine reads it fastest
  ringway doctor --control /run/ringway/control.sock  and a daemon's limits
  ringway doctor --json disk.img | jq .image.choice

It opens nothing for writing, so it can look at a disk that is being served.
Exit status: 0 done, 1 IMAGE cannot be served, 2 wrong usage.";

/// The options of `ringway doctor`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Also look at this disk: an image file, a block device, nbd:unix:/PATH:EXPORT, rbd:POOL/IMAGE, null:SIZE
    /// or sim:MODEL:SIZE, as for serve.
    #[arg(value_name = "IMAGE")]
    image: Option<PathBuf>,
    /// The format of IMAGE [default: raw]: with qcow2, all that it is based on is looked at, too.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "image")]
    format: Option<Format>,
    /// The folder that names of backing files may not lead out of [default: that of IMAGE].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "format")]
    backing_root: Option<PathBuf>,
    /// Also look whether this daemon may use as much memory as its guests can make it use: its control
    /// socket. With root's rights, as only those tell what is mapped.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Also read IMAGE, a raw file or device, with each engine that works for it: 4 KiB anywhere, at depth 1
    /// and 32, five rounds of this length in turn. With 1s, the default, it takes half a minute.
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1s",
          value_parser = round, requires = "image", conflicts_with = "format")]
    measure: Option<Duration>,
    /// How to get to a Ceph cluster.
    #[command(flatten)]
    ceph: CephArgs,
    /// Print JSON instead of a table.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Carries out `ringway doctor`.
///
/// # Errors
/// That there is no such daemon, or standard output that takes no more. A disk that cannot be served is
/// part of the report.
pub(crate) fn run(args: &DoctorArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    if args.image.is_none() {
        args.ceph.check([]).map_err(anyhow::Error::msg)?;
    }
    let engines = ringway_export::usable_engines();
    let qcow2 = (args.format == Some(Format::Qcow2))
        .then(|| Qcow2 { backing_root: args.backing_root.clone(), ..Qcow2::default() });
    let is_qcow2 = qcow2.is_some();
    let mut image =
        args.image.as_ref().map(|path| image::inspect(path, &engines, qcow2, &args.ceph));
    let mut chain = None;
    if let (Some(image), Some(path), true) = (&mut image, &args.image, is_qcow2) {
        if image.error.is_none() {
            // What is said of it as a raw image is no fault now.
            image.looks_like = None;
            match chain::inspect(path, args.backing_root.as_deref()) {
                Ok(links) => chain = Some(links),
                Err(error) => (image.choice, image.error) = (None, Some(in_full(&error))),
            }
        }
    }
    let measured = match (&image, &args.image, args.measure) {
        (Some(image), Some(path), Some(round)) => measure_engines(path, image, &engines, round)?,
        _ => Vec::new(),
    };
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        host: host::inspect(),
        memory: memory::inspect(args.control.as_deref())?,
        engines: engines::list(&engines),
        io_uring: engines::uring(),
        image,
        measured,
        images: chain.as_deref().map(chain::sections).unwrap_or_default(),
        chain: chain.map(serde_json::to_value).transpose()?,
        warnings: Vec::new(),
    };
    report.warnings = advice::draw(&report);
    let servable = report.image.as_ref().is_none_or(|image| image.error.is_none());
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        report::write(report)
    };
    output::print(&text)?;
    Ok(if servable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The length of a round.
fn round(word: &str) -> Result<Duration, String> {
    let length = seconds(word)?;
    let some = length >= ROUND_MIN;
    some.then_some(length)
        .ok_or_else(|| format!("'{word}' is too short: give {ROUND_MIN:?} at least"))
}

/// Measures the engines that could serve a disk as `auto` would.
fn measure_engines(
    path: &Path,
    image: &Image,
    engines: &[(EngineKind, Result<String, String>)],
    round: Duration,
) -> anyhow::Result<Vec<Measured>> {
    let Some(choice) = &image.choice else { return Ok(Vec::new()) };
    if !matches!(image.kind, Some("file" | "block device")) {
        bail!("{}: engines are measured on files and block devices", path.display());
    }
    if let Some(holder) = &image.in_use_by {
        bail!("{}: it is in use by {holder}, whom measuring would disturb", path.display());
    }
    if let (Some(bytes), Some(there)) = (image.bytes, image.allocated_bytes) {
        if there < bytes / 2 {
            bail!(
                "{}: most of it is a hole, for which no disk is asked. Measure a file with data, such as one made by \
                 `dd if=/dev/urandom of=FILE bs=1M count=1024`",
                path.display()
            );
        }
    }
    let direct = choice.cache == "none";
    let works = |(kind, works): &(EngineKind, Result<_, _>)| {
        let fits = works.is_ok() && (direct || !kind.needs_direct());
        fits.then_some(*kind)
    };
    let kinds: Vec<_> = engines.iter().filter_map(works).collect();
    measure::run(path, &kinds, direct, round)
}
