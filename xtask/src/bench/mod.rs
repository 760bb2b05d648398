//! `xtask bench`: the daemon beside its peers, and beside the bare disk.
//!
//! Every comparison alternates its contestants within one run and reports medians. The client runs
//! in this process on its own core, the server on another.

mod bare;
#[cfg(feature = "blkio")]
mod blkio;
mod build;
mod ceph;
mod clients;
mod contest;
mod copy;
mod daemon;
mod fio;
mod foreign;
mod idle;
mod image;
mod lab;
mod load;
mod matrix;
mod nbd;
mod options;
mod origins;
mod qcow2;
mod rbd;
mod report;
mod sample;
mod scrape;
mod spdk;
mod summary;
mod tmpfs;
mod wake;
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
    /// NBD servers: ours, nbdkit, QEMU's storage daemon and qemu-nbd, under fio and nbdcopy.
    Nbd(nbd::NbdArgs),
    /// The published measurements, repeated: `ringway bench origins` of the daemon's binary.
    Origins(origins::OriginsArgs),
    /// qcow2 images of several kinds, beside raw ones and beside QEMU's.
    Qcow2(qcow2::Qcow2Args),
    /// An image of a Ceph cluster: ours, librbd under fio, QEMU's storage daemon.
    Rbd(rbd::RbdArgs),
    /// Scrapes of the metrics of many disks, and how soon events are reported.
    Scrape(scrape::ScrapeArgs),
    /// The cells that sum it all up, ours beside the peers': disk, memory, null, idle.
    Summary(summary::SummaryArgs),
    /// A file on tmpfs, a disk as fast as memory, depth 32.
    Tmpfs(tmpfs::TmpfsArgs),
    /// Back-ends for Xen: ours, QEMU's and the kernel's, under one guest of an emulated Xen host.
    Xen(xen::XenArgs),
}

impl What {
    /// How long one cell is measured unless the user says otherwise, in seconds.
    const fn seconds(&self) -> f64 {
        match self {
            Self::Matrix(_)
            | Self::Clients(_)
            | Self::Bare(_)
            | Self::Copy(_)
            | Self::Idle(_)
            | Self::Nbd(_)
            | Self::Qcow2(_) => 0.7,
            Self::Summary(_) | Self::Tmpfs(_) | Self::Origins(_) | Self::Scrape(_) => 1.0,
            Self::Rbd(_) => 2.0,
            Self::Xen(_) => 0.25,
        }
    }

    /// True if servers, clients and whatever they need share all cores.
    const fn is_spread(&self) -> bool {
        matches!(self, Self::Rbd(_) | Self::Xen(_))
    }
}

/// Measures, prints, writes the JSON.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    let BenchArgs { what, mut common } = args;
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
    if matches!(what, What::Rbd(_)) {
        let cores = std::thread::available_parallelism()?.get();
        (common.server_cpus, common.client_cpus) = ((0..cores).collect(), (0..cores).collect());
    }
    // The emulator, and a cluster, need all cores.
    if !what.is_spread() {
        options::pin(&common.client_cpus)?;
    }
    let lab = Lab { common, seconds, daemon, foreign_max: None };
    let report = match &what {
        What::Matrix(args) => matrix::run(&lab, args),
        What::Clients(args) => clients::run(&lab, args),
        What::Copy(args) => copy::run(&lab, args),
        What::Bare(args) => bare::run(&lab, args),
        What::Idle(args) => idle::run(&lab, args),
        What::Nbd(args) => nbd::run(&lab, args),
        What::Qcow2(args) => qcow2::run(&lab, args),
        What::Rbd(args) => rbd::run(&lab, args),
        What::Origins(_) => unreachable!("it has returned"),
        What::Scrape(args) => scrape::run(&lab, args),
        What::Summary(args) => summary::run(&lab, args),
        What::Tmpfs(args) => tmpfs::run(&lab, args),
        What::Xen(args) => xen::run(&lab, args),
    }?;
    report.deliver(&lab)
}
