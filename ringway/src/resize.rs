//! `ringway resize`: the disk of an image becomes larger or smaller, while nobody serves it.

use crate::merge::{as_stored, lock_named, open, prepare};
use crate::waiting::nothing_waits;
use anyhow::{Context, bail, ensure};
use clap::{Args, ValueHint};
use ringway_control::config::Format as Said;
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::{ForeignFormat, is_named_qcow2};
use ringway_image::{Bases, Chain, Format, Image, Layer, Top, Use, printable};
use ringway_terminal::{logging, output};
use serde::Serialize;
use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway resize vm7.qcow2 40G               what was added reads as zeroes
  ringway resize --shrink vm7.qcow2 10G      all beyond 10 GiB is gone for good
  ringway resize vm7.img 40G                 a raw image: its file
  ringway resize --json vm7.qcow2 40G | jq .virtual_bytes

Make the guest's file systems smaller before the disk, and larger after it.
Internal snapshots keep the size that they have. Killed at any time, the disk
has the old size or the new one, and holds all that lies before both; with
--shrink and the old size, what lies beyond SIZE may be gone: the same command
goes on.
A disk that is served: ringway ctl resize, which only makes a qcow2 image
larger; of a raw one make the file larger first (truncate -s 40G vm7.img).
Exit status: 0 done, 1 failed, 2 wrong usage.";

/// The options of `ringway resize`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ResizeArgs {
    /// An image: a raw file, or qcow2. Nobody may have it open.
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Bytes of the disk (10G, 512M), a multiple of 512.
    #[arg(value_name = "SIZE")]
    size: Size,
    /// Its format [default: qcow2 if its name ends in .qcow2, else raw, refused if it looks like another one].
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    format: Option<Said>,
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
        "{name}: {size} bytes are not a positive multiple of 512 bytes, as {} are",
        (size / 512).max(1) * 512
    );
    ensure!(
        i64::try_from(size).is_ok(),
        "{name}: a size of {} is too large: an image has less than 8 EiB (8E)",
        args.size
    );
    let file = open(&args.image, true)?;
    let from = match format(args, &file, &name)? {
        Format::Raw => raw(args, &file, &name, size)?,
        Format::Qcow2 => qcow2(args, file, &name, size)?,
    };
    let resized = Resized { image: name, from_bytes: from, virtual_bytes: size };
    let text = match args.json {
        true => Some(serde_json::to_string_pretty(&resized)? + "\n"),
        false => (!log.quiet).then(|| words(&resized)),
    };
    text.map_or(Ok(()), |text| output::print(&text)).context("it is done, but")?;
    Ok(ExitCode::SUCCESS)
}

/// What is said, else what the name says: in a raw image a guest may have written any header.
fn format(args: &ResizeArgs, file: &File, name: &str) -> anyhow::Result<Format> {
    match args.format {
        Some(Said::Raw) => return Ok(Format::Raw),
        Some(Said::Qcow2) => return Ok(Format::Qcow2),
        None if is_named_qcow2(&args.image) => return Ok(Format::Qcow2),
        None => {}
    }
    let look = || format!("{name}: cannot look at it");
    let bytes = (&*file).seek(SeekFrom::End(0)).with_context(look)?;
    match ForeignFormat::of(file, bytes).with_context(look)? {
        None => Ok(Format::Raw),
        Some(ForeignFormat::Qcow2) => bail!(
            "{name}: it looks like a qcow2 image: if it is one, add --format qcow2; if a guest has written \
             what is there, add --format raw"
        ),
        Some(other) => bail!(
            "{name}: it looks like {}, which is not resized here: `qemu-img resize` does it. If a guest has \
             written what is there, add --format raw",
            other.words()
        ),
    }
}

/// Resizes a raw image. The size that it had.
fn raw(args: &ResizeArgs, file: &File, name: &str, size: u64) -> anyhow::Result<u64> {
    let meta = file.metadata().with_context(|| format!("{name}: cannot look at it"))?;
    ensure!(meta.is_file(), "{name}: it is a block device, which has the size that it has");
    let from = meta.len();
    as_stored(file).with_context(|| name.to_owned())?;
    if size != from {
        may_shrink(args, name, from, size)?;
        if let Err(error) = file.set_len(size) {
            ensure!(
                error.kind() != ErrorKind::FileTooLarge,
                "{name}: the file system takes no file as long as {}. Choose a smaller size",
                args.size
            );
            return Err(error).with_context(|| format!("{name}: cannot be made so large or small"));
        }
        file.sync_all().with_context(|| format!("{name}: cannot make its size durable"))?;
    }
    Ok(from)
}

/// Resizes a qcow2 image. The size that it had.
fn qcow2(args: &ResizeArgs, file: File, name: &str, size: u64) -> anyhow::Result<u64> {
    prepare(&args.image, &file)?;
    let (layers, is_file) = chain(args, file, name)?;
    let usage = Use { read_only: false, grows: is_file, barriers: true };
    let image = Image::open_beside(layers, usage, &Bases::default(), 1)
        .with_context(|| format!("{name}: cannot read its tables"))?;
    let from = image.size();
    may_shrink(args, name, from, size)?;
    if size < from {
        image.shrink(size).with_context(|| format!("{name}: cannot be made smaller"))?;
    } else if size > from {
        // Also if it has failed: what was taken ahead is not to leak.
        let grown = image.grow(size);
        let settled = image.give_back();
        grown.and(settled).with_context(|| format!("{name}: cannot be made larger"))?;
    }
    Ok(from)
}

fn may_shrink(args: &ResizeArgs, name: &str, from: u64, size: u64) -> anyhow::Result<()> {
    ensure!(
        size >= from || args.shrink,
        "{name}: it has {} now: making it smaller loses all that lies beyond {}. Shrink the guest's file \
         systems first, then add --shrink",
        Size(from),
        Size(size)
    );
    Ok(())
}

/// The image and all that it is based on, each of them locked; whether it is a file, and not a device.
fn chain(args: &ResizeArgs, file: File, name: &str) -> anyhow::Result<(Vec<Layer>, bool)> {
    let is_file = file.metadata().with_context(|| format!("{name}: cannot look at it"))?.is_file();
    let path = args.image.clone();
    let top = Top { file, name: path, format: Format::Qcow2, read_only: false };
    let chain = Chain::open(top, args.backing_root.as_deref(), &mut lock_named)?;
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
