//! The options of `ringway bench`.

use crate::load::{AccessArgs, LoadArgs};
use crate::origins::OriginsArgs;
use crate::target::Target;
use clap::{Args, Subcommand};
use std::path::PathBuf;

pub(crate) const EXAMPLES: &str = "\
Examples:
  ringway bench vhost-user:/run/ringway/disk.sock
  ringway bench disk.img --rw read --bs 128k --iodepth 16 --runtime 10s
  ringway bench new.img --size 4G --rw randwrite --jobs 2
  ringway bench /dev/vg0/scratch --rw randrw --rwmixread 70 --allow-write
  ringway bench vhost-user:/run/ringway/disk.sock --rw read --path request
  ringway bench vhost-user:a.sock --vs vhost-user:b.sock --html report.html
  ringway bench new.img --size 1G --rw randwrite --verify
  ringway bench new.img --rw read --verify
  ringway bench disk.img --rate-iops 5000 --json | jq .read.clat_ns.percentile
  ringway bench origins --html origins.html

The words are fio's where fio has them; rates and --io-size are those of all
jobs together.
Exit status: 0 done, 1 failed, 2 wrong usage, 3 --verify found wrong data,
128+N ended by signal N (what was measured until then is printed).";

/// The options of `ringway bench`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true,
          subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) special: Option<Special>,
    /// vhost-user:SOCKET; file:PATH or a path, measured bare; served in this process: null:SIZE,
    /// sim:ram|ssd|hdd:SIZE, nbd:unix:/PATH:EXPORT (or as a URI), rbd:POOL/IMAGE.
    #[arg(required = true)]
    pub(crate) target: Option<Target>,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

/// Measurements with a name.
#[derive(Debug, Subcommand)]
pub(crate) enum Special {
    /// Repeat the measurements of the changes that Ringway brings together, beside the published.
    Origins(Box<OriginsArgs>),
}

/// What is shown.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Report")]
pub(crate) struct ShowArgs {
    /// Measure another target in turn with this one, and print ratios.
    #[arg(long, value_name = "TARGET")]
    pub vs: Option<Target>,
    /// Rounds of --vs; medians are printed.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "vs",
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Print everything as JSON, histograms included, instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Write a page with pictures.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
