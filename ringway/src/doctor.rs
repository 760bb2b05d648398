//! `ringway doctor`: what this host and a disk can do, what `auto` would choose, and why.
//!
//! It looks and changes nothing: no file is created, locked or opened for writing. The report is
//! one tree of plain facts (`host.rs`, `engines.rs`, `image.rs`), from which `advice.rs` draws
//! warnings and `report.rs` the table; `--json` prints the tree.

mod advice;
mod engines;
mod host;
pub(crate) mod image;
mod memory;
pub(crate) mod report;

use clap::Args;
use report::Report;
use ringway_control::log::LogArgs;
use ringway_terminal::{logging, output};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway doctor                 what this host can do
  ringway doctor disk.img        and how disk.img would be served, or why not
  ringway doctor --control /run/ringway.sock  and a daemon's limits
  ringway doctor --json disk.img | jq .image.choice

It opens nothing for writing, so it can look at a disk that is being served.
Exit status: 0 done, 1 IMAGE cannot be served, 2 wrong usage.";

/// What `ringway doctor` is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Also look at this disk: a raw image file, a block device, `null:…` or `sim:…` as for serve.
    #[arg(value_name = "IMAGE")]
    image: Option<PathBuf>,
    /// Also look whether this daemon may use as much memory as its guests can make it use: its control
    /// socket. With root's rights, as only those tell what is mapped.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
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
    let engines = ringway_export::usable_engines();
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        host: host::look(),
        memory: memory::look(args.control.as_deref())?,
        engines: engines::list(&engines),
        io_uring: engines::uring(),
        image: args.image.as_ref().map(|path| image::look(path, &engines)),
        warnings: Vec::new(),
    };
    report.warnings = advice::draw(&report);
    let text = if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        report::write(&report)
    };
    output::print(&text)?;
    let servable = report.image.is_none_or(|image| image.error.is_none());
    Ok(if servable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
