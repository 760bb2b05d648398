//! Which crate may know which: arrows go down only.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// `ring` is memory and nothing else: no way to a system call.
const NO_SYSTEM: (&str, &[&str]) = ("ringway-ring", &["libc", "rustix", "nix", "vmm-sys-util"]);

/// Looks at what each crate needs beside its tests. `floors` says which crates of the workspace it may;
/// those of `dev_only` are for development, and no crate of a floor may need them.
pub(super) fn floors(
    root: &Path,
    floors: &[(&str, &[&str])],
    dev_only: &[&str],
    found: &mut Vec<String>,
) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    judge(&serde_json::from_slice(&out.stdout)?, floors, dev_only, found)
}

fn judge(
    metadata: &Value,
    floors: &[(&str, &[&str])],
    dev_only: &[&str],
    found: &mut Vec<String>,
) -> Result<()> {
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("name")?;
        let Some((_, allowed)) = floors.iter().find(|(floor, _)| *floor == name) else {
            if !dev_only.contains(&name) {
                found.push(format!("{name}: on which floor is it? (xtask/src/tidy.rs)"));
            }
            continue;
        };
        let needs = package["dependencies"].as_array().context("dependencies")?;
        for need in needs.iter().filter(|need| need["kind"] != "dev") {
            let need = need["name"].as_str().context("dependency")?;
            let floor = need.strip_prefix("ringway-");
            let upward = need == "ringway" || floor.is_some_and(|floor| !allowed.contains(&floor));
            if upward || need == "xtask" {
                found.push(format!("{name} may not use {need}: arrows go down only"));
            }
            if name == NO_SYSTEM.0 && NO_SYSTEM.1.contains(&need) {
                found.push(format!("{name} may not use {need}: it is memory and nothing else"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_that_go_up_are_found() {
        let package = |name: &str, needs: &[(&str, &str)]| {
            let needs: Vec<_> = needs
                .iter()
                .map(|(name, kind)| serde_json::json!({ "name": name, "kind": kind }))
                .collect();
            serde_json::json!({ "name": name, "dependencies": needs })
        };
        let metadata = serde_json::json!({ "packages": [
            package("ringway-core", &[("ringway-testkit", "dev"), ("ringway-disk", "")]),
            package("ringway-ring", &[("ringway-core", ""), ("libc", "")]),
            package("ringway-cellar", &[]),
            package("xtask", &[("ringway-disk", "")]),
        ]});
        let floors: &[(&str, &[&str])] = &[("ringway-core", &[]), ("ringway-ring", &["core"])];
        let mut found = Vec::new();
        judge(&metadata, floors, &["xtask"], &mut found).unwrap();
        let want = [
            "ringway-core may not use ringway-disk: arrows go down only",
            "ringway-ring may not use libc: it is memory and nothing else",
            "ringway-cellar: on which floor is it? (xtask/src/tidy.rs)",
        ];
        assert_eq!(found, want);
    }
}
