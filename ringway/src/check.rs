//! `ringway check`: a qcow2 image gone through.

use crate::new_file::cannot_open;
use crate::waiting::{ADVICE, nothing_waits_for};
use anyhow::{Context, bail};
use clap::{Args, ValueEnum, ValueHint};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::{LockError, lock_image, read_as_stored};
use ringway_image::{CheckOptions, Findings, Header, check, printable, repair_leaks};
use ringway_terminal::{logging, output};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway check disk.qcow2                     read it, change nothing
  ringway check --repair leaks disk.qcow2      give lost space back
  ringway check --json disk.qcow2 | jq .leaks

An error is a wrong entry of a table, or a cluster in use that is not counted:
data may be lost. A leak is a cluster that is counted and not used: space is
lost, and nothing else. The image must not be in use; those it is based on are
not looked at. The verdict is that of `qemu-img check`, whose exit status says
2 for errors and 3 for leaks.
Exit status: 0 whole, 1 it cannot be gone through, 2 wrong usage, 3 errors,
4 leaks and no errors.";

/// The options of `ringway check`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckArgs {
    /// A qcow2 image: a file or a block device.
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Repair what can be repaired without a guess; nothing is changed if there are errors.
    #[arg(long, value_enum, value_name = "WHAT")]
    repair: Option<Repair>,
    /// Print JSON instead of sentences.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// What may be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Repair {
    /// Clusters that are counted more often than they are used.
    Leaks,
}

/// The verdict. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
struct Verdict<'a> {
    image: String,
    errors: u64,
    /// That are left.
    leaks: u64,
    leaks_fixed: u64,
    /// A mark of an image that was not closed is gone.
    cleaned: bool,
    /// A daemon that was killed has more of it than it has.
    waits_for_daemon: bool,
    cluster_bytes: u64,
    clusters: u64,
    allocated_clusters: u64,
    compressed_clusters: u64,
    fragmented_clusters: u64,
    /// Where the last cluster in use ends.
    end_bytes: u64,
    file_bytes: u64,
    problems: &'a [String],
    more_problems: u64,
}

/// Carries out `ringway check`.
///
/// # Errors
/// An image that cannot be gone through.
pub(crate) fn run(args: &CheckArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let name = printable(&args.image);
    let (mut file, writes) = (open(&args.image, args.repair.is_some())?, args.repair.is_some());
    let bytes =
        file.seek(SeekFrom::End(0)).with_context(|| format!("{name}: cannot tell its size"))?;
    let read = || format!("{name}: cannot read it");
    let header = Header::read(&file, bytes).with_context(read)?;
    let header = header.map_err(|refused| anyhow::anyhow!("{name}: {refused}"))?;
    if writes {
        nothing_waits_for(&args.image, Some(&header))?;
    }
    let options = CheckOptions::default();
    let found = if writes {
        repair_leaks(&file, &header, bytes, options)
            .with_context(|| format!("{name}: cannot repair it"))?
    } else {
        check(&file, &header, bytes, options).with_context(read)?
    };
    let found = found.map_err(|refused| anyhow::anyhow!("{name}: {refused}"))?;
    let verdict = Verdict {
        image: name,
        errors: found.errors,
        leaks: found.leaks - found.leaks_fixed,
        leaks_fixed: found.leaks_fixed,
        cleaned: found.cleaned,
        waits_for_daemon: header.waits_for_journal(),
        cluster_bytes: header.cluster_bytes(),
        clusters: found.total,
        allocated_clusters: found.allocated,
        compressed_clusters: found.compressed,
        fragmented_clusters: found.fragmented,
        end_bytes: found.end,
        file_bytes: bytes,
        problems: &found.problems,
        more_problems: found.more_problems,
    };
    let text = if args.json {
        serde_json::to_string_pretty(&verdict)? + "\n"
    } else {
        words(&verdict, &found, &header, writes)
    };
    output::print(&text)?;
    Ok(match (verdict.errors, verdict.leaks) {
        (0, 0) => ExitCode::SUCCESS,
        (0, _) => ExitCode::from(4),
        _ => ExitCode::from(3),
    })
}

/// Opens the image and locks it: what is being written cannot be gone through.
fn open(path: &Path, writes: bool) -> anyhow::Result<File> {
    let name = printable(path);
    let mut options = OpenOptions::new();
    // A pipe that nobody writes to would be waited for.
    let options = options.read(true).write(writes).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| cannot_open(path, error))?;
    let kind = file.metadata().with_context(|| format!("{name}: cannot look at it"))?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{name}: it is neither a file nor a block device");
    }
    match lock_image(&file, !writes) {
        Ok(()) => {}
        Err(LockError::Host(error)) if writes => {
            return Err(error)
                .with_context(|| format!("{name}: cannot lock it, and others may use it"));
        }
        // Who only reads harms nobody.
        Err(LockError::Host(error)) => tracing::warn!("cannot lock {name}: {error}"),
        Err(error) => bail!(
            "{name}: it is in use by {}. What is being written cannot be checked: stop it first",
            error.holder(&file)
        ),
    }
    if writes {
        // A sync may have failed since it was written: counts are to be right for what storage has.
        let stored = read_as_stored(&file);
        stored.with_context(|| format!("{name}: what was written to it cannot be made durable"))?;
    }
    Ok(file)
}

/// So many of something.
fn several(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

fn words(verdict: &Verdict<'_>, found: &Findings, header: &Header, repaired: bool) -> String {
    let mut text = String::new();
    let name = &verdict.image;
    // What was repaired is not listed cluster by cluster.
    for problem in found.problems.iter().filter(|_| verdict.errors > 0 || verdict.leaks > 0) {
        let _ = writeln!(text, "{problem}");
    }
    if found.more_problems > 0 && (verdict.errors > 0 || verdict.leaks > 0) {
        let _ = writeln!(text, "… and {} more", found.more_problems);
    }
    let lost = Size(verdict.leaks.saturating_mul(verdict.cluster_bytes));
    let _ = match (verdict.errors, verdict.leaks) {
        (0, 0) => writeln!(text, "{name}: whole"),
        (0, leaks) => writeln!(
            text,
            "{name}: {} ({lost}), no errors: its data are whole. --repair leaks \
             gives the space back",
            several(leaks, "leaked cluster")
        ),
        (errors, leaks) => writeln!(
            text,
            "{name}: {}, {}. Make a copy of it, then `qemu-img check -r all` repairs what can be \
             repaired{}",
            several(errors, "error"),
            several(leaks, "leaked cluster"),
            if repaired { "; nothing was changed here" } else { "" }
        ),
    };
    if verdict.leaks_fixed > 0 {
        let space = Size(verdict.leaks_fixed.saturating_mul(verdict.cluster_bytes));
        let leaks = several(verdict.leaks_fixed, "leaked cluster");
        let _ = writeln!(text, "{leaks} repaired ({space})");
    }
    if verdict.cleaned {
        let _ = writeln!(text, "it is not marked as dirty or corrupt any more");
    } else if header.is_dirty() || header.is_corrupt() {
        let mark = if header.is_corrupt() { "corrupt" } else { "dirty (not closed)" };
        let _ =
            writeln!(text, "it is marked as {mark}; --repair leaks takes that away if it is whole");
    }
    if verdict.waits_for_daemon {
        let _ = writeln!(text, "{ADVICE}");
    }
    let hundred = 100.0 * verdict.allocated_clusters as f64 / verdict.clusters.max(1) as f64;
    let _ = writeln!(
        text,
        "{} of {} clusters allocated ({hundred:.2} %), {} compressed, {} fragmented; in use up to {}",
        verdict.allocated_clusters,
        verdict.clusters,
        verdict.compressed_clusters,
        verdict.fragmented_clusters,
        Size(verdict.end_bytes)
    );
    text
}
