//! Campaigns on a qcow2 image: it is based on a raw one, is judged after each kill, and begins anew now
//! and then, so that there are first writes in every life.

use super::plan::{BYTES, Plan};
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const IMAGE: &str = "disk.qcow2";
const BASE: &str = "base.img";
/// After so many kills what is in the image becomes its base.
const ANEW: u64 = 8;
/// Small clusters have many first writes, usual ones long copies of the base.
const CLUSTERS: [&str; 4] = ["4K", "512", "64K", "16K"];
/// How long what a killed daemon started may keep the image.
const HELD: Duration = Duration::from_secs(10);

/// The name of the image that is served.
pub(super) fn name(plan: &Plan) -> &'static str {
    if plan.qcow2 { IMAGE } else { "disk.img" }
}

/// Makes what is served at first.
pub(super) fn make(plan: &Plan, dir: &Path) -> Result<()> {
    File::create(dir.join("disk.img"))?.set_len(BYTES)?;
    if plan.qcow2 {
        File::create(dir.join(BASE))?.set_len(BYTES)?;
        overlay(plan, dir, 0)?;
    }
    Ok(())
}

/// After kill number `kill`, with nobody at the image: no error, and now and then a new overlay.
pub(super) fn judge(plan: &Plan, dir: &Path, kill: u64) -> Result<()> {
    if !plan.qcow2 {
        return Ok(());
    }
    // 4: leaks, and nothing else.
    let judged = patiently(|| ringway(plan, dir, &["check", IMAGE]))?;
    if !matches!(judged.status.code(), Some(0 | 4)) {
        bail!("after kill {kill}: {}", words(&judged));
    }
    if plan.qemu {
        let qemu = || Command::new("qemu-img").args(["check", IMAGE]).current_dir(dir).output();
        let judged = patiently(|| Ok(qemu()?))?;
        if !matches!(judged.status.code(), Some(0 | 3)) {
            bail!("qemu-img check after kill {kill}: {}", words(&judged));
        }
    }
    if copies(kill) {
        let repaired = ringway(plan, dir, &["check", "--repair", "leaks", IMAGE])?;
        // It was killed, at a point of its own or before it heard that it should end: what it had answered is in the
        // state folder, and the next daemon's to find.
        if words(&repaired).contains("--state-dir") {
            return Ok(());
        }
        succeeds(repaired)?;
        copy(plan, dir, "next.img")?;
        std::fs::rename(dir.join("next.img"), dir.join(BASE))?;
        overlay(plan, dir, kill / ANEW)?;
    }
    Ok(())
}

/// Whether the image is copied after that kill, by somebody who does not know what a daemon keeps elsewhere.
pub(super) fn copies(kill: u64) -> bool {
    kill % ANEW == ANEW - 1
}

/// Has `disk.img` hold what the disk holds.
pub(super) fn flatten(plan: &Plan, dir: &Path) -> Result<()> {
    if plan.qcow2 {
        copy(plan, dir, "disk.img")?;
    }
    Ok(())
}

fn copy(plan: &Plan, dir: &Path, to: &str) -> Result<()> {
    let args = ["--quiet", "copy", "--force", "--from-format", "qcow2", IMAGE, to];
    succeeds(patiently(|| ringway(plan, dir, &args))?)
}

fn overlay(plan: &Plan, dir: &Path, nth: u64) -> Result<()> {
    let cluster = CLUSTERS[usize::try_from(nth)? % CLUSTERS.len()];
    let args = ["create", "--force", IMAGE, "--backing", BASE, "--cluster-size", cluster];
    succeeds(patiently(|| ringway(plan, dir, &args))?)
}

fn ringway(plan: &Plan, dir: &Path, args: &[&str]) -> Result<Output> {
    let output = Command::new(&plan.ringway).args(args).current_dir(dir).output();
    output.with_context(|| format!("cannot start {}", plan.ringway.display()))
}

/// Again, while the image is in use: what a killed daemon started ends a moment after it.
fn patiently(mut act: impl FnMut() -> Result<Output>) -> Result<Output> {
    let deadline = Instant::now() + HELD;
    loop {
        let output = act()?;
        let said = words(&output);
        let held = said.contains("in use by") || said.contains("\" lock");
        if !held || Instant::now() > deadline {
            return Ok(output);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn succeeds(output: Output) -> Result<()> {
    if output.status.success() { Ok(()) } else { bail!("{}", words(&output)) }
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}
