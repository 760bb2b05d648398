//! `ringway info`: what a disk is, whoever serves it.

pub(crate) mod chain;
mod elsewhere;
mod image;
mod report;
mod server;

use crate::io::target::Target;
use anyhow::bail;
use clap::{Args, ValueHint};
use report::Info;
use ringway_control::config::{CephArgs, Format};
use ringway_control::log::LogArgs;
use ringway_disk::Source;
use ringway_terminal::reasons::in_full;
use ringway_terminal::{logging, output};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway info disk.img                        an image, and what it costs
  ringway info --format qcow2 vm7.qcow2        and all that it is based on
  ringway info vhost-user:/run/ringway/disk.sock  a served disk, by any server
  ringway info --json /run/ringway/disk.sock | jq .limits
  ringway info rbd:rbd/vm7                     an image of a Ceph cluster
  ringway info nbd:unix:/run/n.sock            what an NBD server offers

A server has one front-end at a time: while a virtual machine uses the disk, it
cannot be asked. Nothing of the disk is read or written. Without --format an
image is raw; one that looks like qcow2 is shown both ways.
Exit status: 0 done, 1 failed, 2 wrong usage.";

/// The options of `ringway info`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArgs {
    /// A raw image file, a block device, vhost-user:SOCKET, nbd:unix:/PATH:EXPORT (or as a URI), or
    /// rbd:POOL/IMAGE, with @SNAP a snapshot of it.
    #[arg(value_name = "TARGET", value_parser = Target::parser(), value_hint = ValueHint::AnyPath)]
    target: Target,
    /// The format of an image: with qcow2, what is wrong with its chain is an error.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    format: Option<Format>,
    /// The folder that names of backing files may not lead out of [default: that of the image].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    backing_root: Option<PathBuf>,
    /// How to get to a Ceph cluster.
    #[command(flatten)]
    ceph: CephArgs,
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
    args.ceph.check(args.target.source()).map_err(anyhow::Error::msg)?;
    let info = match &args.target {
        Target::VhostUser(socket) => Info::Served(Box::new(server::ask(socket)?)),
        Target::Elsewhere(..) if args.format == Some(Format::Qcow2) => {
            bail!("{} is looked at as a raw disk: leave --format out", args.target)
        }
        // As a disk of this host.
        Target::Elsewhere(path, Source::Path(_)) => Info::Image(Box::new(image::inspect(path)?)),
        Target::Elsewhere(_, source) => {
            Info::Elsewhere(Box::new(elsewhere::inspect(&args.target, source, &args.ceph)?))
        }
        Target::Path(path) if args.format == Some(Format::Qcow2) => {
            Info::Chain { chain: chain::inspect(path, args.backing_root.as_deref())? }
        }
        Target::Path(path) => {
            let mut facts = image::inspect(path)?;
            if args.format.is_none() && facts.image.looks_like == Some("qcow2") {
                match chain::inspect(path, args.backing_root.as_deref()) {
                    Ok(chain) => facts.chain = Some(chain),
                    Err(error) => facts.chain_error = Some(in_full(&error)),
                }
            }
            Info::Image(Box::new(facts))
        }
    };
    let text =
        if args.json { serde_json::to_string_pretty(&info)? + "\n" } else { report::write(&info) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
