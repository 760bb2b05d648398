//! The Debian package in a fresh Debian: installed, started as its units do, upgraded, removed, purged.
//!
//! systemd itself does not run there, only its programs: what it does with the units is done by
//! `package/inside.sh`. The program is the one of the tests, stripped; packing a release is left to
//! releases.

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{ringway_program, skip_reason, target_dir};
use ringway_testkit::{Need, skip};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

/// What it takes; the reason to leave it out, if anything is missing.
fn lacking() -> Option<String> {
    // SAFETY: it only tells.
    if unsafe { libc::geteuid() } != 0 {
        return Some("it takes root to install packages in a chroot".into());
    }
    let is_there = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    for (program, args, from) in [
        ("cargo", &["deb", "--version"][..], "cargo install cargo-deb --locked"),
        ("mmdebstrap", &["--version"], "the package mmdebstrap"),
        ("unshare", &["--mount", "--pid", "--fork", "true"], "the right to make namespaces"),
    ] {
        if !is_there(program, args) {
            return Some(format!("{program} {} does not work: {from}", args.join(" ")));
        }
    }
    None
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{command:?}: {}\n{}{}", output.status, text[0], text[1]);
    let [said, _] = text;
    Ok(said)
}

#[test]
fn the_package_is_installed_started_upgraded_and_purged() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    if let Some(why) = lacking() {
        skip(Need::DebianPackage, why);
        return Ok(());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?;
    let folder = tempfile::tempdir()?;
    let packages = [1, 2].map(|revision| folder.path().join(format!("{revision}.deb")));
    for (package, revision) in packages.iter().zip(["1", "2"]) {
        let mut build = Command::new(root.join("packaging/build.sh"));
        run(build.arg(ringway_program()?).arg(package).arg(revision).current_dir(root))?;
    }
    let mut check = Command::new(root.join("e2e/package/check.sh"));
    check.arg(target_dir().join("debian.tar")).args(&packages);
    let said = run(&mut check)?;
    ensure!(said.ends_with("passed\n"), "{said}");
    println!("{said}");
    Ok(())
}

/// What systemd forbids would end a daemon, or a helper, that did nothing wrong.
#[test]
fn the_unit_allows_every_system_call_of_the_sandbox() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?;
    let unit = std::fs::read_to_string(root.join("packaging/systemd/ringway@.service"))?;
    let filter = Command::new("systemd-analyze").args(["--no-pager", "syscall-filter"]).output();
    let Ok(filter) = filter else {
        skip(Need::Systemd, "there is no systemd-analyze");
        return Ok(());
    };
    // "@group", and below it, indented, comments, calls and other groups.
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut group = String::new();
    for line in String::from_utf8(filter.stdout)?.lines() {
        match line.strip_prefix("    ") {
            Some(call) => groups.entry(group.clone()).or_default().push(call.to_owned()),
            None => group = line.to_owned(),
        }
    }
    let mut allowed = BTreeSet::new();
    let lines = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    let mut words: Vec<_> = lines.flat_map(str::split_whitespace).map(str::to_owned).collect();
    while let Some(word) = words.pop() {
        words.extend(groups.get(&word).into_iter().flatten().cloned());
        allowed.insert(word);
    }
    let mut calls = BTreeSet::new();
    for file in ["server/src/sandbox/calls.rs", "server/src/sandbox/calls/helper.rs"] {
        let text = std::fs::read_to_string(root.join(file))?;
        let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let names = text.split("SYS_").skip(1);
        let end = |rest: &str| rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        calls.extend(names.map(|rest| rest[..end(rest)].to_owned()));
    }
    ensure!(calls.len() > 60 && allowed.len() > 200, "{} of {}", calls.len(), allowed.len());
    let missing: Vec<_> = calls.difference(&allowed).collect();
    ensure!(missing.is_empty(), "the unit does not allow {missing:?}");
    Ok(())
}
