//! `ringway bench origins`: the measurements of the changes that Ringway brings together, repeated,
//! each table beside the one that was published. Their machines were others: compare ratios.
//!
//! An origin is a module with one function `run(&Lab) -> Result<Vec<Finding>>` and a line in
//! `Origin::run`.

mod finding;
pub mod fio;
mod lab;
mod o1;
mod o2;
mod o3;
mod o4;
mod o5;
mod server;

use crate::html::page;
use crate::html::{self, page::Page};
use crate::load::seconds;
use crate::origins::finding::Finding;
use crate::origins::lab::{IMAGE, Interrupted, Lab};
use crate::target;
use crate::usage;
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_terminal::output;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tempfile::TempDir;

const EXAMPLES: &str = "\
Examples:
  ringway bench origins
  ringway bench origins --only o1,o4 --dir /mnt/disk --html origins.html
  ringway bench origins --only o3                   four minutes
  ringway bench origins --rounds 1 --runtime 300ms

fio and qemu-storage-daemon take part where they are installed.

Exit status: 0 done, 1 a measurement failed, 2 wrong usage, 128+N ended by
signal N.";

/// The options of `ringway bench origins`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct OriginsArgs {
    /// Which ones [default: all].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    only: Vec<Origin>,
    /// Rounds; in each, all take part in turn. Medians are printed [default: 5; O3: 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// How long to measure each, every round [default: 1s; O3: 500ms].
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    runtime: Option<Duration>,
    /// Folder of the temporary image of O1, O3 and O4: on the disk in question [default: TMPDIR].
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Folder of the temporary image of O2: a fast one.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    fast_dir: PathBuf,
    /// Size of the images.
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    size: Size,
    /// Print everything as JSON, every round, instead of tables.
    #[arg(long)]
    json: bool,
    /// Write a page with pictures.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Origin {
    /// Engines at the speed of the disk (QEMU, 2008).
    O1,
    /// Completions looked for right after submitting (QEMU, 2016).
    O2,
    /// Straight through, merged, or whichever is better (Linux, 2012).
    O3,
    /// Page-aligned buffers (QEMU, 2015).
    O4,
    /// Several rings for a disk (Xen, 2015).
    O5,
}

impl Origin {
    fn run(self, lab: &Lab<'_>) -> Result<Vec<Finding>> {
        match self {
            Self::O1 => o1::run(lab),
            Self::O2 => o2::run(lab),
            Self::O3 => o3::run(lab),
            Self::O4 => o4::run(lab),
            Self::O5 => o5::run(lab),
        }
    }

    /// Rounds, and how long each is: as told, or what makes it a matter of a few minutes.
    fn rounds(self, args: &OriginsArgs) -> (usize, Duration) {
        let (rounds, millis) = if self == Self::O3 { (3, 500) } else { (5, 1000) };
        let runtime = args.runtime.unwrap_or(Duration::from_millis(millis));
        (args.rounds.unwrap_or(rounds).into(), runtime)
    }
}

/// Carries out `ringway bench origins`.
///
/// # Errors
/// Whatever keeps it from measuring.
pub fn run(args: &OriginsArgs, log: &LogArgs, signal: &AtomicUsize) -> Result<()> {
    ensure!(args.runtime != Some(Duration::ZERO), "--runtime 0 measures nothing");
    let all = Origin::value_variants();
    let wanted = |origin: &&Origin| args.only.is_empty() || args.only.contains(origin);
    let origins: Vec<Origin> = all.iter().filter(wanted).copied().collect();
    let page = args.html.as_deref().map(crate::html::create).transpose()?;
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let image = |folder: &Path| image(folder, args.size.0);
    let needs_disk = origins.iter().any(|origin| !matches!(origin, Origin::O2 | Origin::O5));
    let style = ProgressStyle::with_template("{spinner} {msg}");
    let mut lab = Lab {
        rounds: 0,
        runtime: Duration::ZERO,
        slow: needs_disk.then(|| image(&disk)).transpose()?,
        fast: origins.contains(&Origin::O2).then(|| image(&args.fast_dir)).transpose()?,
        signal,
        bar: if log.quiet { ProgressBar::hidden() } else { ProgressBar::new_spinner() }
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner())),
    };
    let mut findings = Vec::new();
    for origin in origins {
        (lab.rounds, lab.runtime) = origin.rounds(args);
        match origin.run(&lab) {
            Err(error) if error.is::<Interrupted>() => break,
            found => findings.extend(found?.into_iter().map(|finding| Finding {
                how: (lab.rounds, lab.runtime.as_secs_f64()),
                ..finding
            })),
        }
    }
    lab.bar.finish_and_clear();
    if args.json {
        let json: Vec<_> = findings.iter().map(Finding::json).collect();
        let json = json!({ "machine": usage::machine(), "tables": json });
        output::print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
    } else {
        for finding in &findings {
            output::print(&finding.text())?;
        }
    }
    if let Some(path) = page {
        let text = report(&findings);
        html::write(path, &text)?;
    }
    Ok(())
}

/// A full image in a folder that goes when this goes.
fn image(folder: &Path, bytes: u64) -> Result<TempDir> {
    let home = tempfile::Builder::new().prefix("ringway-origins-").tempdir_in(folder);
    let home = home.with_context(|| format!("{}: cannot make a folder here", folder.display()))?;
    let host = rustix::fs::statvfs(folder)?;
    let free = host.f_bavail.saturating_mul(host.f_frsize);
    if free < bytes + bytes / 8 {
        bail!(
            "{}: an image of {} does not fit, {} are free. Use a smaller --size or another folder",
            folder.display(),
            Size(bytes),
            Size(free)
        );
    }
    target::fill(&home.path().join(IMAGE), bytes)?;
    Ok(home)
}

fn report(findings: &[Finding]) -> String {
    let lines = [
        "What the changes published that Ringway brings together, and what it measures here."
            .to_owned(),
        "Medians of rounds in which all take part in turn. Their machines were others: compare \
         ratios, not absolute values."
            .to_owned(),
    ];
    let lines: Vec<_> = lines.into_iter().chain(page::origin()).collect();
    let mut page = Page::new("Ringway beside its origins", &lines);
    for finding in findings {
        let (what, bars) = &finding.bars;
        if !bars.is_empty() {
            let caption = "Longer bars: the change wins more. Grey: published. Blue: measured here. Dashed: nothing won, nothing lost.";
            page.bars(&format!("{}: {what}", finding.title), caption, bars, Some(finding.even));
        }
        let head: Vec<String> = finding.head.iter().map(|&word| word.to_owned()).collect();
        let (rounds, seconds) = finding.how;
        let mut notes = finding.notes.clone();
        let plural = if rounds == 1 { "" } else { "s" };
        notes.push(format!("{rounds} round{plural}, {seconds} s each."));
        page.table(&finding.title, &head, &finding.rows, &notes);
    }
    page.footer(&html::footer());
    page.finish()
}
