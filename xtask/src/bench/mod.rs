//! `xtask bench`: the daemon beside its peers, and beside the bare disk.
//!
//! Every comparison alternates its contestants within one run and reports medians. The client runs
//! in this process on its own core, the server on another.

mod bare;
#[cfg(feature = "blkio")]
mod blkio;
mod build;
mod client;
mod clients;
mod contest;
mod copy;
mod daemon;
mod engine;
mod fio;
mod idle;
mod image;
mod lab;
mod load;
mod matrix;
mod options;
mod origins;
mod phases;
mod queue_load;
mod report;
mod sample;
mod tmpfs;
mod xen;

use anyhow::{Result, bail};
pub(crate) use build::{build, build_with};
use clap::{Args, Subcommand};
use lab::Lab;
use options::Common;

/// What to measure, and how.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Depth × queues × polling or sleeping client × device, against peers.
    Matrix(matrix::MatrixArgs),
    /// Our front-end beside libblkio on the same server: I/Os per nanosecond of client CPU.
    Clients(clients::ClientsArgs),
    /// `ringway copy` beside `qemu-img convert` and `cp`.
    Copy(copy::CopyArgs),
    /// Through the device versus direct I/O on the same file, 4 KiB random.
    Bare(bare::BareArgs),
    /// A busy disk alone and beside a hundred idle ones.
    Idle(idle::IdleArgs),
    /// The published measurements, repeated: `ringway bench origins` of the daemon's binary.
    Origins(origins::OriginsArgs),
    /// A file on tmpfs, a disk as fast as memory, depth 32.
    Tmpfs(tmpfs::TmpfsArgs),
    /// Back-ends for Xen: ours, QEMU's and the kernel's, under one guest of an emulated Xen host.
    Xen(xen::XenArgs),
}

impl What {
    /// How long one cell is measured unless the user says otherwise, in seconds.
    const fn seconds(&self) -> f64 {
        match self {
            Self::Matrix(_) | Self::Clients(_) | Self::Bare(_) | Self::Copy(_) | Self::Idle(_) => {
                0.7
            }
            Self::Tmpfs(_) | Self::Origins(_) => 1.0,
            Self::Xen(_) => 0.25,
        }
    }
}

/// Measures, prints, writes the JSON.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    let BenchArgs { what, common } = args;
    if common.rounds == 0 {
        bail!("--rounds 0 measures nothing: give at least 1");
    }
    let daemon = match &common.daemon {
        Some(path) if !path.is_file() => bail!("--daemon: there is no file {}", path.display()),
        Some(path) => path.clone(),
        None => build("--daemon")?,
    };
    let seconds = common.seconds.unwrap_or(what.seconds());
    if !(seconds > 0.0 && seconds < 3600.0) {
        bail!("--seconds {seconds} is not between 0 and 3600");
    }
    if let What::Origins(args) = &what {
        return origins::run(&daemon, args);
    }
    // The emulator needs all cores.
    if !matches!(what, What::Xen(_)) {
        options::pin(&common.client_cpus)?;
    }
    let lab = Lab { common, seconds, daemon };
    let report = match &what {
        What::Matrix(args) => matrix::run(&lab, args),
        What::Clients(args) => clients::run(&lab, args),
        What::Copy(args) => copy::run(&lab, args),
        What::Bare(args) => bare::run(&lab, args),
        What::Idle(args) => idle::run(&lab, args),
        What::Origins(_) => unreachable!("it has returned"),
        What::Tmpfs(args) => tmpfs::run(&lab, args),
        What::Xen(args) => xen::run(&lab, args),
    }?;
    report.deliver(&lab)
}
