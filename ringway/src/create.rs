//! `ringway create`: new images.
//!
//! An image is made under another name, made durable, and only then gets its own: whoever looks finds
//! nothing or all of it.

use crate::new_file::{self, cluster_bits};
use crate::wrong_usage::wrong_usage;
use anyhow::{Context, anyhow, bail, ensure};
use clap::{Args, ValueHint};
use ringway_control::config::{Format as Said, base_source, is_unreal};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::{Backing, BackingError, NewFile, OpenOptions, is_named_qcow2};
use ringway_image::{CLUSTER_BITS_DEFAULT, Format, NewImage, is_based_on, printable};
use ringway_terminal::{logging, output};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway create disk.img --size 10G                       a raw image
  ringway create disk.qcow2 --size 10G                     a qcow2 image
  ringway create vm7.qcow2 --backing base.qcow2            a clone, in a moment
  ringway create -f qcow2 disk.qcow2 10G                   as qemu-img says it
  ringway create vm7.qcow2 --backing debian.raw --size 40G and larger than that
  ringway create vm7 --format qcow2 --backing base --backing-format raw

FILE is a path from here, as in any shell. The image names it relative to its
own folder if FILE is a relative path, and as it is if FILE begins with a slash.
Whoever changes FILE later spoils all images that are based on it.
Exit status: 0 made, 1 failed and nothing was made, 2 wrong usage.";

/// The options of `ringway create`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CreateArgs {
    /// The image to make.
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The same as --size.
    #[arg(value_name = "SIZE", conflicts_with = "size")]
    bytes: Option<Size>,
    /// Bytes of disk (512, 64K, 10G, 1.5T; units are powers of 1024) [default: those of FILE].
    #[arg(short, long, value_name = "SIZE", required_unless_present_any = ["backing", "bytes"])]
    size: Option<Size>,
    /// Its format [default: qcow2 with --backing or if IMAGE ends in .qcow2, else raw].
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    format: Option<Said>,
    /// The image that it is based on, or an export of an NBD server: what was not written comes from there.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    backing: Option<PathBuf>,
    /// The format of FILE [default: qcow2 if its name ends in .qcow2, else raw].
    #[arg(short = 'F', long, value_enum, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<Said>,
    /// Bytes of a cluster, a power of two from 512 to 2M [default: 64K].
    #[arg(long, value_name = "SIZE", value_parser = cluster_bits)]
    cluster_size: Option<u32>,
    /// Overwrite IMAGE, if it is a file that nobody uses.
    #[arg(long)]
    force: bool,
}

/// Carries out `ringway create`.
///
/// # Errors
/// What is wrong; nothing was made then.
pub(crate) fn run(args: &CreateArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let name = printable(&args.image);
    let format = match args.format {
        Some(said) => format_of(said),
        None if args.backing.is_some() || is_named_qcow2(&args.image) => Format::Qcow2,
        None => Format::Raw,
    };
    if format == Format::Raw {
        let other = match (&args.backing, &args.cluster_size) {
            (Some(_), _) => Some("--backing"),
            (_, Some(_)) => Some("--cluster-size"),
            _ => None,
        };
        if let Some(option) = other {
            wrong_usage!(
                "{name}: {option} is for qcow2 images. Add --format qcow2, or leave {option} out"
            );
        }
    }
    let target = new_file::place(&args.image)?;
    let backing = args.backing.as_deref().map(|file| backing(args, file)).transpose()?;
    let size = match (args.size.or(args.bytes), &backing) {
        (Some(Size(bytes)), _) => bytes,
        (None, Some(backing)) => backing.virtual_size.next_multiple_of(512),
        (None, None) => bail!("{name}: how large? Add --size SIZE"),
    };
    can_be(size).with_context(|| name.clone())?;
    if args.format.is_none() {
        new_file::warn_of_raw(&args.image, format);
    }
    if let Some(backing) = backing.as_ref().filter(|backing| size < backing.virtual_size) {
        tracing::warn!(
            "{name}: what it is based on has {}, and it has {}: what lies beyond cannot be read through it",
            Size(backing.virtual_size),
            Size(size)
        );
    }
    let folder = target.parent().context("an image has a folder")?;
    let named = |backing: &Backing| {
        let name = backing.name_in(folder);
        let name = name.with_context(|| format!("--backing {}", printable(&backing.path)))?;
        anyhow::Ok((name, backing.format))
    };
    let based_on = backing.as_ref().map(named).transpose()?;
    if let Some(Backing { path, format, is_elsewhere: false, .. }) = &backing {
        // Also while there is no such file: the name would lead to the new one.
        ensure!(
            !is_based_on(path, *format, &target),
            "{name}: {} is this image, or is based on it: an image cannot be based on itself. Are the two \
             names swapped?",
            printable(path)
        );
    }
    // Locked until its name leads to the new one.
    let _old = new_file::spare(&args.image, &target, args.force)?;
    let cannot = || format!("{name}: cannot make it");
    // Nobody but its owner may read it, as with `serve --size`.
    let new = NewFile::begin(&target, 0o600).with_context(cannot)?;
    match format {
        Format::Raw => new.file().set_len(size).with_context(cannot)?,
        Format::Qcow2 => {
            let cluster_bits = args.cluster_size.unwrap_or(CLUSTER_BITS_DEFAULT);
            let backing = based_on.as_ref().map(|(name, format)| (&**name, *format));
            let image = NewImage { virtual_size: size, cluster_bits, backing };
            image.write(new.file()).with_context(cannot)?;
        }
    }
    new.finish(args.force).with_context(cannot)?;
    if !log.quiet {
        output::print(&report(args, format, size, based_on))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses a size that no image can have.
fn can_be(size: u64) -> anyhow::Result<()> {
    ensure!(
        size > 0 && size % 512 == 0,
        "its size, {size} bytes, is not a positive multiple of 512 bytes, as {} is",
        (size / 512).max(1) * 512
    );
    let words = Size(size);
    ensure!(
        i64::try_from(size).is_ok(),
        "a size of {words} is too large: an image has less than 8 EiB (8E)"
    );
    Ok(())
}

/// What was made; `based_on` is the name and the format of what holds the rest.
fn report(
    args: &CreateArgs,
    format: Format,
    size: u64,
    based_on: Option<(PathBuf, Format)>,
) -> String {
    let name = printable(&args.image);
    let Some((backing, kind)) = based_on else {
        return format!("{name}: made, {}, {format}\n", Size(size));
    };
    let base = printable(&backing);
    if is_unreal(&backing) {
        let hint = "; it is served with --base, as its header alone leads to no server";
        return format!("{name}: made, {}, {format}, based on {base} ({kind}){hint}\n", Size(size));
    }
    let outside = backing.is_absolute() || backing.starts_with("..");
    let hint = if outside {
        "; --backing-root has to allow its folder where the image is served"
    } else {
        ""
    };
    format!("{name}: made, {}, {format}, based on {base} ({kind}){hint}\n", Size(size))
}

fn format_of(said: Said) -> Format {
    match said {
        Said::Raw => Format::Raw,
        Said::Qcow2 => Format::Qcow2,
    }
}

/// Looks at what the image will be based on.
fn backing(args: &CreateArgs, path: &Path) -> anyhow::Result<Backing> {
    let format = args.backing_format.map(format_of);
    if is_unreal(path) {
        let source =
            base_source(path, format == Some(Format::Qcow2)).map_err(anyhow::Error::msg)?;
        let Some(target) = source.export().cloned() else { bail!("{}: no base", printable(path)) };
        let options = OpenOptions { read_only: true, ..OpenOptions::new(source) };
        let disk = ringway_disk::open(&options)?;
        return Ok(Backing::of_export(&target, disk.geometry().capacity));
    }
    Backing::inspect(path, format).map_err(|error| {
        let hint = match error {
            BackingError::Foreign(_) => " (--backing-format)",
            _ => "",
        };
        anyhow!("--backing {}: {error}{hint}", printable(path))
    })
}
