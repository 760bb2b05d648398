//! `xtask bench`: the daemon beside its peers, and beside the bare disk.
//!
//! Every comparison alternates its contestants within one run and reports medians. The client runs
//! in this process on its own core, the server on another.

mod bare;
#[cfg(feature = "blkio")]
mod blkio;
mod client;
mod clients;
mod contest;
mod copy;
mod daemon;
mod engine;
mod fio;
mod idle;
mod image;
mod lane;
mod matrix;
mod options;
mod origins;
mod report;
mod tmpfs;
mod xen;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use options::Common;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// The place of measurement: options with nothing left open.
#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) common: Common,
    /// Seconds measured per cell.
    pub(crate) seconds: f64,
    /// The daemon's binary.
    pub(crate) daemon: PathBuf,
}

impl Lab {
    /// The cores of the server, as `taskset` has them.
    pub(crate) fn server_list(&self) -> String {
        options::cpu_list(&self.common.server_cpus)
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

/// Builds the daemon in release mode; returns where it is. `option` names it instead.
pub(crate) fn build(option: &str) -> Result<PathBuf> {
    build_in(option, "", &[])
}

/// As [`build`], with a feature, in a folder of its own: it must not be taken for a release.
pub(crate) fn build_with(option: &str, feature: &str) -> Result<PathBuf> {
    build_in(option, feature, &["--features", feature])
}

fn build_in(option: &str, folder: &str, features: &[&str]) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's folder")?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    let target = root.join(target).join(folder);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(root)
        .args(["build", "--release", "--quiet", "-p", "ringway"])
        .args(features)
        .arg("--target-dir")
        .arg(&target)
        .status()
        .with_context(|| format!("cannot run cargo to build the daemon: give {option} PATH"))?;
    if !status.success() {
        bail!("the daemon does not build: mend it, or give {option} PATH");
    }
    Ok(target.join("release/ringway"))
}
