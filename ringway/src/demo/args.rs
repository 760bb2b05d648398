//! The options of `ringway demo`.

use clap::Args;
use ringway_control::config::{self, Choice};
use ringway_control::size::Size;
use ringway_disk::{CacheMode, EngineKind};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ringway demo
  ringway demo --quick
  ringway demo --dir /mnt/fast --size 1G --engine threads

Exit status: 0 all data verified, 1 failed or data wrong, 2 wrong usage, 128+N
ended by signal N.";

/// The options of `ringway demo`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DemoArgs {
    /// A smaller disk and shorter measurements.
    #[arg(long)]
    pub(super) quick: bool,
    /// Size of the disk [default: 256M, with --quick 64M].
    #[arg(long, value_name = "SIZE")]
    pub(super) size: Option<Size>,
    /// Folder of the temporary image [default: TMPDIR, or else the system's].
    #[arg(long, value_name = "FOLDER")]
    pub(super) dir: Option<PathBuf>,
    /// Request queues [default: one per CPU, at most 4].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(super) queues: Option<u16>,
    /// As for serve.
    #[arg(long, value_parser = config::engines())]
    pub(super) engine: Option<Choice<EngineKind>>,
    /// As for serve.
    #[arg(long, value_name = "MODE", value_parser = config::cache_modes())]
    pub(super) cache: Option<CacheMode>,
}
