//! `ringway info`: what a disk is, whoever serves it.

mod image;
mod report;
mod server;

use crate::io::target::Target;
use clap::{Args, ValueHint};
use report::Info;
use ringway_control::log::LogArgs;
use ringway_terminal::{logging, output};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway info disk.img                        an image, and what it costs
  ringway info vhost-user:/run/disk.sock       a served disk, by any server
  ringway info --json /run/disk.sock | jq .limits

A server has one front-end at a time: while a virtual machine uses the disk, it
cannot be asked. Nothing of the disk is read or written.
Exit status: 0 done, 1 failed, 2 wrong usage.";

/// What `ringway info` is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArgs {
    /// A raw image file, a block device, or vhost-user:SOCKET.
    #[arg(value_name = "TARGET", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    target: Target,
    /// Print JSON instead of a table.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Carries out `ringway info`.
///
/// # Errors
/// A target that cannot be asked.
pub(crate) fn run(args: &InfoArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let info = match &args.target {
        Target::VhostUser(socket) => Info::Served(Box::new(server::ask(socket)?)),
        Target::Path(path) => Info::Image(Box::new(image::look(path)?)),
    };
    let text =
        if args.json { serde_json::to_string_pretty(&info)? + "\n" } else { report::write(&info) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
