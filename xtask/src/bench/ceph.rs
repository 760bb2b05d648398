//! A Ceph cluster of one monitor and one OSD on this host, by tools/ceph-mini.sh.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A client that was killed is missed after half of that.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A cluster with a pool `rbd` and in it an image `img`; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Cluster {
    home: TempDir,
}

impl Cluster {
    /// Makes it in `folder`, which its OSD keeps its data in, with an image that is written whole. librbd's
    /// cache is off for whoever reads its configuration.
    pub(crate) fn start(folder: &Path, mib: u64) -> Result<Self> {
        let cluster =
            Self { home: tempfile::Builder::new().prefix("ringway-rbd-").tempdir_in(folder)? };
        cluster.script("start", &[("SIZE", format!("{mib}M")), ("STORE", "bluestore".into())])?;
        let conf = std::fs::read_to_string(cluster.conf())?;
        std::fs::write(cluster.conf(), conf + "[client]\nrbd cache = false\n")?;
        Ok(cluster)
    }

    /// Its configuration.
    pub(crate) fn conf(&self) -> PathBuf {
        self.home.path().join("ceph.conf")
    }

    /// Waits until nobody has the image open: who writes next would wait for somebody who is late, or dead.
    pub(crate) fn wait_until_unused(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let mut command = Command::new("rbd");
            command.arg("-c").arg(self.conf()).args(["status", "--format", "json", "rbd/img"]);
            let output = command.stdin(Stdio::null()).output().context("cannot run rbd")?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "rbd status: {}", said.trim_end());
            let status: Value = serde_json::from_slice(&output.stdout)?;
            if status["watchers"].as_array().is_some_and(Vec::is_empty) {
                return Ok(());
            }
            ensure!(begun.elapsed() < TIMEOUT, "somebody keeps the image open: {status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn script(&self, what: &str, env: &[(&str, String)]) -> Result<()> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/ceph-mini.sh");
        let mut command = Command::new(script);
        command.arg(what).arg(self.home.path()).envs(env.iter().cloned()).stdin(Stdio::null());
        let output = command.output().with_context(|| format!("cannot run {script}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the cluster does not {what}: {}", said.trim_end());
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.script("stop", &[]) {
            eprintln!("{error:#}");
        }
    }
}
