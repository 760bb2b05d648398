//! The bare file through fio: the judge that is not ours.

use crate::bench::Lab;
use crate::bench::client::Load;
use crate::bench::contest::{Latency, Sample};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs fio's io_uring engine with O_DIRECT on the client's cores.
pub(crate) fn run(lab: &Lab, path: &Path, load: &Load) -> Result<Sample> {
    let rw = match (load.sequential, load.write) {
        (false, false) => "randread",
        (false, true) => "randwrite",
        (true, false) => "read",
        (true, true) => "write",
    };
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "fio", "--name=bare", "--ioengine=io_uring"]);
    command.args(["--direct=1", "--time_based", "--norandommap", "--randrepeat=0"]);
    command.args(["--thread", "--output-format=json"]);
    command.arg(format!("--filename={}", path.display()));
    command.arg(format!("--rw={rw}")).arg(format!("--bs={}", load.size));
    command.arg(format!("--iodepth={}", load.depth));
    command.arg(format!("--runtime={:.0}ms", lab.seconds * 1e3));
    command.arg(format!("--ramp_time={:.0}ms", lab.common.warmup * 1e3));
    let cpus = crate::bench::options::cpu_list(&lab.common.client_cpus);
    command.arg(format!("--cpus_allowed={cpus}"));
    let output = command
        .stdin(Stdio::null())
        .output()
        .context("cannot run fio: apt-get install fio util-linux")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("fio: {}: {}", output.status, error.lines().next().unwrap_or("no message"));
    }
    // Notes may stand before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let json: Value = serde_json::from_str(json).context("fio does not speak JSON")?;
    let part = &json["jobs"][0][if load.write { "write" } else { "read" }];
    let number = |value: &Value| value.as_f64().context("fio leaves out a figure");
    let us = |name: &str| Ok::<_, anyhow::Error>(number(&part[name]["mean"])? / 1e3);
    let percentile = |p: &str| number(&part["clat_ns"]["percentile"][p]).unwrap_or(0.0) / 1e3;
    Ok(Sample {
        iops: number(&part["iops"])?,
        mb_s: number(&part["bw_bytes"])? / 1e6,
        latency: Some(Latency {
            submit_us: us("slat_ns")?,
            complete_us: us("clat_ns")?,
            mean_us: us("lat_ns")?,
            // Of completion alone, the only ones fio gives.
            p50_us: percentile("50.000000"),
            p90_us: percentile("90.000000"),
            p99_us: percentile("99.000000"),
            p9999_us: percentile("99.990000"),
        }),
        ..Sample::default()
    })
}

/// What fio calls itself.
pub(crate) fn version() -> String {
    said("fio")
}

/// The first line that `program --version` prints.
pub(crate) fn said(program: &str) -> String {
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let line = text.ok().and_then(|text| text.lines().next().map(str::to_owned));
    line.unwrap_or_else(|| format!("no {program}"))
}
