//! The bare file through fio: the judge that is not ours.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// What fio is asked for.
#[derive(Clone, Copy, Debug)]
pub struct FioLoad<'a> {
    /// The file.
    pub path: &'a Path,
    /// randread, randwrite, read, write
    pub rw: &'a str,
    /// Bytes of each request.
    pub bytes: u32,
    /// Requests in flight.
    pub depth: u32,
    /// How long it is measured,
    pub runtime: Duration,
    /// and how long it runs before that.
    pub ramp: Duration,
    /// Where it runs: `0,2`; empty is anywhere.
    pub cpus: &'a str,
}

/// What fio says. Latencies in microseconds, percentiles of completion alone.
#[derive(Clone, Copy, Debug)]
pub struct FioFigures {
    /// Requests done each second.
    pub iops: f64,
    /// Millions of bytes each second.
    pub mb_s: f64,
    /// Mean time of a submission.
    pub slat_us: f64,
    /// Mean time from submission to completion.
    pub clat_us: f64,
    /// Mean of both together.
    pub lat_us: f64,
    /// 50, 90, 99, 99.99
    pub percentiles_us: [f64; 4],
}

/// Runs fio's io_uring engine with O_DIRECT.
///
/// # Errors
/// What fio says.
pub fn run(load: &FioLoad<'_>) -> Result<FioFigures> {
    let mut command = Command::new("fio");
    command.args(["--name=bare", "--ioengine=io_uring", "--direct=1", "--time_based"]);
    command.args(["--norandommap", "--randrepeat=0", "--thread", "--output-format=json"]);
    command.arg(format!("--filename={}", load.path.display()));
    command.arg(format!("--rw={}", load.rw)).arg(format!("--bs={}", load.bytes));
    command.arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--runtime={}ms", load.runtime.as_millis()));
    command.arg(format!("--ramp_time={}ms", load.ramp.as_millis()));
    if !load.cpus.is_empty() {
        command.arg(format!("--cpus_allowed={}", load.cpus));
    }
    let output = command.stdin(Stdio::null()).output().context("cannot run fio: install it")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("fio: {}: {}", output.status, error.lines().next().unwrap_or("no message"));
    }
    // Notes may stand before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let json: Value = serde_json::from_str(json).context("fio does not speak JSON")?;
    let part = &json["jobs"][0][if load.rw.ends_with("write") { "write" } else { "read" }];
    let number = |value: &Value| value.as_f64().context("fio leaves out a figure");
    let us = |name: &str| Ok::<_, anyhow::Error>(number(&part[name]["mean"])? / 1e3);
    let percentile = |p: &str| number(&part["clat_ns"]["percentile"][p]).unwrap_or(0.0) / 1e3;
    Ok(FioFigures {
        iops: number(&part["iops"])?,
        mb_s: number(&part["bw_bytes"])? / 1e6,
        slat_us: us("slat_ns")?,
        clat_us: us("clat_ns")?,
        lat_us: us("lat_ns")?,
        percentiles_us: ["50.000000", "90.000000", "99.000000", "99.990000"].map(percentile),
    })
}
