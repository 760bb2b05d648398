//! The measurements of the origins are the program's own: `ringway bench origins`.

use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::Path;
use std::process::Command;

/// What is passed on.
#[derive(Debug, Args)]
pub(crate) struct OriginsArgs {
    /// Options of `ringway bench origins`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

/// Runs the daemon's binary.
pub(crate) fn run(daemon: &Path, args: &OriginsArgs) -> Result<()> {
    let mut command = Command::new(daemon);
    let status = command.args(["bench", "origins"]).args(&args.options).status();
    let status = status.with_context(|| format!("cannot run {}", daemon.display()))?;
    if !status.success() {
        bail!("ringway bench origins: {status}");
    }
    Ok(())
}
