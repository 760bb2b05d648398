//! `ringway resize`: the disk of a qcow2 image becomes larger or smaller, while nobody serves it.

use crate::merge::open;
use crate::waiting::nothing_waits;
use anyhow::{Context, ensure};
use clap::{Args, ValueHint};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::lock_image;
use ringway_image::{Bases, Chain, Format, Image, Layer, Top, Use, printable};
use ringway_terminal::{logging, output};
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway resize vm7.qcow2 40G               what was added reads as zeroes
  ringway resize --shrink vm7.qcow2 10G      all beyond 10 GiB is gone for good
  ringway resize --json vm7.qcow2 40G | jq .virtual_bytes

Make the guest's file systems smaller before the disk, and larger after it.
Internal snapshots keep the size that they have. Killed at any time, the disk
has the old size or the new one, and holds all that lies before both; with
--shrink and the old size, what lies beyond SIZE may be gone: the same command
goes on.
A disk that is served: ringway ctl resize, which only makes a qcow2 image
larger. A raw image is as large as its file: truncate -s 40G vm7.img.
Exit status: 0 done, 1 failed, 2 wrong usage.";

/// The options of `ringway resize`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ResizeArgs {
    /// A qcow2 image. Nobody may have it open.
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Bytes of the disk (10G, 512M), a multiple of 512.
    #[arg(value_name = "SIZE")]
    size: Size,
    /// It may become smaller: what lies beyond SIZE is lost.
    #[arg(long)]
    shrink: bool,
    /// Allow images to be based on files anywhere in DIR [default: the folder of IMAGE].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    backing_root: Option<PathBuf>,
    /// Print JSON instead of sentences.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// What was done. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
struct Resized {
    image: String,
    /// Bytes that the disk had.
    from_bytes: u64,
    /// Bytes that it has.
    virtual_bytes: u64,
}

/// Carries out `ringway resize`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &ResizeArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let (name, Size(size)) = (printable(&args.image), args.size);
    ensure!(
        size > 0 && size % 512 == 0,
        "{name}: {size} bytes are not a positive multiple of 512 bytes"
    );
    let (layers, is_file) = chain(args, &name)?;
    let usage = Use { read_only: false, grows: is_file, barriers: true };
    let image = Image::open_beside(layers, usage, &Bases::default(), 1)
        .with_context(|| format!("{name}: cannot read its tables"))?;
    let from = image.size();
    if size < from {
        ensure!(
            args.shrink,
            "{name}: it has {} now: making it smaller loses all that lies beyond {}. Shrink the guest's file \
             systems first, then add --shrink",
            Size(from),
            Size(size)
        );
        image.shrink(size).with_context(|| format!("{name}: cannot be made smaller"))?;
    } else if size > from {
        // Also if it has failed: what was taken ahead is not to leak.
        let grown = image.grow(size);
        let settled = image.give_back();
        grown.and(settled).with_context(|| format!("{name}: cannot be made larger"))?;
    }
    let resized = Resized { image: name, from_bytes: from, virtual_bytes: size };
    let text = match args.json {
        true => Some(serde_json::to_string_pretty(&resized)? + "\n"),
        false => (!log.quiet).then(|| words(&resized)),
    };
    text.map_or(Ok(()), |text| output::print(&text)).context("it is done, but")?;
    Ok(ExitCode::SUCCESS)
}

/// The image and all that it is based on, each of them locked; whether it is a file, and not a device.
fn chain(args: &ResizeArgs, name: &str) -> anyhow::Result<(Vec<Layer>, bool)> {
    let file = open(&args.image, true)?;
    let is_file = file.metadata().with_context(|| format!("{name}: cannot look at it"))?.is_file();
    let path = args.image.clone();
    let top = Top { file, name: path, format: Format::Qcow2, read_only: false };
    let mut lock = |file: &File, _: &Path, read_only: bool| {
        lock_image(file, read_only).map_err(|error| error.to_string())
    };
    let chain = Chain::open(top, args.backing_root.as_deref(), &mut lock)?;
    nothing_waits(&chain)?;
    let layers = Layer::of_chain(chain);
    let layers = layers.with_context(|| format!("{name}: cannot learn the sizes of its files"))?;
    Ok((layers, is_file))
}

fn words(resized: &Resized) -> String {
    let Resized { image, from_bytes, virtual_bytes } = resized;
    let size = Size(*virtual_bytes);
    match virtual_bytes == from_bytes {
        true => format!("{image}: it has {size} already\n"),
        false => format!("{image}: {size} by now, it had {}\n", Size(*from_bytes)),
    }
}
