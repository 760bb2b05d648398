//! The bare file through fio: the judge that is not ours.

use crate::bench::lab::Lab;
use crate::bench::load::Load;
use crate::bench::sample::{Latency, Sample};
use anyhow::Result;
use ringway_bench::origins::fio as shared;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Runs fio's io_uring engine with O_DIRECT on the client's cores.
pub(crate) fn run(lab: &Lab, path: &Path, load: &Load) -> Result<Sample> {
    let found = shared::run(&shared::FioLoad {
        path,
        rw: load.rw().name(),
        bytes: load.size,
        depth: load.depth,
        runtime: Duration::from_secs_f64(lab.seconds),
        ramp: Duration::from_secs_f64(lab.common.warmup),
        cpus: &crate::bench::options::cpu_list(&lab.common.client_cpus),
    })?;
    let [p50_us, p90_us, p99_us, p9999_us] = found.percentiles_us;
    Ok(Sample {
        iops: found.iops,
        mb_s: found.mb_s,
        latency: Some(Latency {
            submit_us: found.slat_us,
            complete_us: found.clat_us,
            mean_us: found.lat_us,
            p50_us,
            p90_us,
            p99_us,
            p9999_us,
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
