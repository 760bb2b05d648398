//! The daemon that is measured, built if none is named.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

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
