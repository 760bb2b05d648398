//! Options that all benchmarks share.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use ringway_bench::IndirectArg;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;

/// Options of every benchmark.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Measuring")]
pub(crate) struct Common {
    /// Rounds; each measures every contestant of a cell once, in turn.
    #[arg(long, global = true, default_value_t = 5, value_name = "N")]
    pub(crate) rounds: usize,
    /// Seconds measured per contestant and round [default: 0.7 to 2].
    #[arg(long, global = true, value_name = "S")]
    pub(crate) seconds: Option<f64>,
    /// Seconds of load before that.
    #[arg(long, global = true, default_value_t = 0.1, value_name = "S")]
    pub(crate) warmup: f64,
    /// Write everything that was measured, every round, to a file.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Print tables for docs/performance.md.
    #[arg(long, global = true)]
    pub(crate) markdown: bool,

    /// The daemon [default: target/release/ringway, built first].
    #[arg(long, global = true, value_name = "PATH", help_heading = "Servers")]
    pub(crate) daemon: Option<PathBuf>,
    /// Further options of every `ringway serve`, separated by blanks.
    #[arg(
        long,
        global = true,
        default_value = "",
        allow_hyphen_values = true,
        value_name = "OPTIONS",
        help_heading = "Servers"
    )]
    pub(crate) daemon_args: String,
    /// The storage daemon of QEMU.
    #[arg(
        long,
        global = true,
        default_value = "qemu-storage-daemon",
        value_name = "PATH",
        help_heading = "Servers"
    )]
    pub(crate) qsd: PathBuf,
    /// The cores of the server.
    #[arg(
        long,
        global = true,
        default_value = "0",
        value_delimiter = ',',
        value_name = "LIST",
        help_heading = "Servers"
    )]
    pub(crate) server_cpus: Vec<usize>,

    /// Who asks.
    #[arg(long, global = true, value_enum, default_value_t = Client::Ringway,
          help_heading = "Client")]
    pub(crate) client: Client,
    /// The cores of the client.
    #[arg(
        long,
        global = true,
        default_value = "1",
        value_delimiter = ',',
        value_name = "LIST",
        help_heading = "Client"
    )]
    pub(crate) client_cpus: Vec<usize>,
    /// Descriptors of each of the client's rings.
    #[arg(long, global = true, default_value_t = 256, value_name = "N", help_heading = "Client")]
    pub(crate) queue_size: u16,
    /// When the client uses indirect descriptors.
    #[arg(long, global = true, value_enum, default_value_t = IndirectArg::Scarce,
          help_heading = "Client")]
    pub(crate) indirect: IndirectArg,
    /// The client asks for packed rings.
    #[arg(long, global = true, help_heading = "Client")]
    pub(crate) packed: bool,

    /// The file on the disk; made and filled once, then kept.
    #[arg(
        long,
        global = true,
        default_value = "/var/tmp/ringway-bench.img",
        value_name = "PATH",
        help_heading = "Files"
    )]
    pub(crate) file: PathBuf,
    /// Its size in MiB.
    #[arg(long, global = true, default_value_t = 4096, value_name = "MIB", help_heading = "Files")]
    pub(crate) file_mib: u64,
    /// The file on tmpfs; removed at the end.
    #[arg(
        long,
        global = true,
        default_value = "/dev/shm/ringway-bench.img",
        value_name = "PATH",
        help_heading = "Files"
    )]
    pub(crate) tmpfs: PathBuf,
    /// Its size in MiB.
    #[arg(long, global = true, default_value_t = 1024, value_name = "MIB", help_heading = "Files")]
    pub(crate) tmpfs_mib: u64,
}

/// Which front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Client {
    /// Ours, the crate `ringway-driver`.
    Ringway,
    /// The crate `blkio` (libblkio); needs `--features blkio`.
    Blkio,
}

impl Client {
    /// The word in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ringway => "ringway-driver",
            Self::Blkio => "libblkio",
        }
    }
}

/// How the client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub(crate) enum Waiting {
    /// It spins.
    Polling,
    /// It sleeps until it is called.
    Sleeping,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Polling { "polls" } else { "sleeps" })
    }
}

/// Keeps this thread on `cpus`.
pub(crate) fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        anyhow::ensure!(cpu < CpuSet::MAX_CPU, "there is no core {cpu}");
        set.set(cpu);
    }
    let list = cpu_list(cpus);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on core {list}"))
}

/// `0,2,3`
pub(crate) fn cpu_list(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
