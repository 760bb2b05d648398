//! `ringway flatten`: an image takes in what it is based on, while nobody serves it.

use crate::merge::{Copying, Images, MergeArgs};
use anyhow::Context;
use clap::Args;
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_image::{Bases, Image, Use};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway flatten vm7.qcow2                  as qemu-img rebase -b \"\"
  ringway flatten --bps 100M vm7.qcow2       and leave the disk to others
  ringway flatten --json vm7.qcow2 | jq .copied_bytes

What IMAGE lacks is copied into it, without zeroes; then its header names no
base. It holds what it did, and so do the files that it was based on. All are
locked meanwhile. It can be stopped and killed at any time: IMAGE is as good as
before, and the same command goes on. Of a disk that is served: ringway ctl
flatten.
Exit status: 0 done, 1 failed, 2 wrong usage, 128+N ended by signal N.";

/// The options of `ringway flatten`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct FlattenArgs {
    #[command(flatten)]
    merge: MergeArgs,
}

/// Carries out `ringway flatten`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &FlattenArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    let copying = Copying::begin(&args.merge, log)?;
    let images = Images::open(&args.merge, true)?;
    let name = &images.name;
    let usage = Use { read_only: false, grows: images.is_file, barriers: true };
    let image = Image::open_beside(images.layers.clone(), usage, &Bases::default(), 1)
        .with_context(|| format!("{name}: cannot read its tables"))?;
    image.may_detach().with_context(|| name.clone())?;
    let copied = copying.all("flatten", image.size(), |at, most| image.pull(at, most));
    // Also if it has failed: what was taken ahead is not to leak.
    let settled = image.give_back();
    let copied = copied.with_context(|| {
        format!("{name}: cannot go on; what was copied stays, and the same command goes on there")
    })?;
    settled.with_context(|| format!("{name}: cannot be made durable"))?;
    let Some(copied) = copied else {
        return Ok(copying.stopped(&format!(
            "interrupted; {name} is based on what it was, and the same command goes on"
        )));
    };
    image.detach().with_context(|| format!("{name}: its header"))?;
    let merged = images.merged(image.size(), copied);
    let line = format!("{name}: it is based on nothing any more; {} were copied\n", Size(copied));
    copying.done(&merged, &line)
}
