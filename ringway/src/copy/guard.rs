//! What a copy must not do, and what belongs to its destination.

use super::args::{CopyArgs, Prealloc, Reflink};
use super::end::End;
use super::journal::{Identity, Story, fnv1a, with_suffix};
use super::open::Opened;
use crate::io::target::{Target, kind};
use crate::new_file;
use crate::wrong_usage::{WrongUsage, wrong_usage};
use anyhow::{Context, bail};
use ringway_control::config::Format;
use ringway_disk::ForeignFormat;
use ringway_image::{Format as ImageFormat, printable};
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Refuses what is no disk, before it is opened, and words that mean nothing for these.
pub(super) fn are_disks(args: &CopyArgs) -> anyhow::Result<()> {
    let ends = [&args.source, &args.destination];
    ends.into_iter().try_for_each(is_disk)?;
    args.ceph
        .check(ends.into_iter().filter_map(Target::source))
        .map_err(|why| WrongUsage(why).into())
}

/// Refuses what is neither a file nor a block device nor a socket: a pipe would wait.
fn is_disk(target: &Target) -> anyhow::Result<()> {
    let Target::Path(path) = target else { return Ok(()) };
    let Ok(meta) = path.metadata() else { return Ok(()) };
    let kind = meta.file_type();
    let what = if kind.is_file() || kind.is_block_device() {
        return Ok(());
    } else if kind.is_dir() {
        "a folder: name a file in it"
    } else if kind.is_fifo() {
        "a pipe, not a file or block device"
    } else if kind.is_socket() {
        "a socket: write vhost-user: before it"
    } else {
        "a character device, not a file or block device"
    };
    bail!("{target} is {what}")
}

/// Refuses a source that looks as if it were no raw image: its bytes are not those of its disk. What
/// the destination looks like does not matter: nothing of it is left.
pub(super) fn is_raw(args: &CopyArgs, source: &Opened) -> anyhow::Result<()> {
    let End::File(file) = &source.end else { return Ok(()) };
    let from = &args.source;
    let looks_like = || {
        let found = ForeignFormat::of(&file.file, source.identity.bytes);
        found.with_context(|| format!("cannot read {from}"))
    };
    if args.from_format == Some(Format::Raw) {
        // The bytes of an image, or the disk in it?
        let unsaid = args.to_format.is_none() && is_named_qcow2(&args.destination);
        if unsaid && looks_like()? == Some(ForeignFormat::Qcow2) {
            bail!(
                "{from} looks like a qcow2 image. Say --from-format qcow2 to make one of its disk, or \
                 --to-format raw to copy its bytes as they are"
            );
        }
        return Ok(());
    }
    match looks_like()? {
        None => Ok(()),
        Some(ForeignFormat::Luks) if !file.regular => Ok(()),
        Some(ForeignFormat::Qcow2) => bail!(
            "{from} looks like a qcow2 image: its bytes are not those of its disk. If it is one, add \
             --from-format qcow2; if a guest has written what is there, or the bytes are what you \
             want, add --from-format raw"
        ),
        Some(format) => bail!(
            "{from} looks like {}: its bytes are not those of its disk. Copy the disk with `qemu-img \
             convert -O raw`; if a guest has written what is there, or the bytes are what you want, \
             add --from-format raw",
            format.words()
        ),
    }
}

/// True if DST will be a new qcow2 image: the format is said, or the name says it, or only such an
/// image can be what was asked for.
///
/// # Errors
/// Options that contradict each other.
pub(super) fn makes_image(args: &CopyArgs) -> anyhow::Result<bool> {
    let to = &args.destination;
    let option = match (args.compress, args.cluster_size, args.to_format) {
        (Some(_), ..) => Some("--compress"),
        (_, Some(_), _) => Some("--cluster-size"),
        (_, _, Some(Format::Qcow2)) => Some("--to-format qcow2"),
        _ => None,
    };
    let wanted = match args.to_format {
        Some(format) => format == Format::Qcow2,
        None => option.is_some() || is_named_qcow2(to),
    };
    match (option, no_file(to)) {
        (Some(option), Some(what)) => wrong_usage!("{to} is a {what}: {option} is for files"),
        (Some(option), None) if !wanted => {
            wrong_usage!(
                "{to}: {option} is for qcow2 images: leave out --to-format raw, or the option"
            )
        }
        _ => {
            if let (Target::Path(path), None, None) = (to, args.to_format, no_file(to)) {
                new_file::warn_of_raw(
                    path,
                    if wanted { ImageFormat::Qcow2 } else { ImageFormat::Raw },
                );
            }
            Ok(wanted)
        }
    }
}

/// The owner has chosen the name of what is made; what is read has none that counts.
fn is_named_qcow2(to: &Target) -> bool {
    let Target::Path(path) = to else { return false };
    let named = path.extension().is_some_and(|word| word.eq_ignore_ascii_case("qcow2"));
    named && !is_block_device(path)
}

/// Refuses what would destroy something, or be something else than what was asked for.
pub(super) fn may_write(
    args: &CopyArgs,
    there: bool,
    story: Option<&Story>,
    source: &Identity,
) -> anyhow::Result<()> {
    let (from, to) = (&args.source, &args.destination);
    if !there || args.force {
        return Ok(());
    }
    let Some(story) = story else {
        match to {
            Target::Path(path) if path.is_file() => {
                bail!("{to}: it is there already. Overwrite it with --force")
            }
            _ => bail!("{to}: it may hold something. Overwrite it with --force"),
        }
    };
    let percent = 100 * u128::from(story.done) / u128::from(story.source.bytes.max(1));
    if !args.resume {
        bail!(
            "{to} is an unfinished copy of {} ({percent} %): go on with --resume, or begin anew with \
             --force",
            printable(&story.source.path)
        );
    }
    if !story.source.is_same_place(source) {
        let path = printable(&story.source.path);
        bail!("{to} was being copied from {path}, which is not {from}: begin anew with --force");
    }
    if story.source.changed != source.changed || story.source.bytes != source.bytes {
        bail!("{from} has changed since {to} was begun: begin anew with --force");
    }
    if !source.tells_changes() && !args.source_unchanged {
        bail!(
            "whether {from} has changed since {to} was begun cannot be seen: add \
             --source-unchanged if it was not written, or begin anew with --force"
        );
    }
    Ok(())
}

/// Where to begin: behind what an unfinished copy has done.
pub(super) fn start_of(
    to: &Target,
    story: Option<&Story>,
    destination: &Opened,
    bytes: u64,
) -> anyhow::Result<u64> {
    let Some(story) = story else { return Ok(0) };
    let there = &destination.identity;
    let cut = there.kind == "file" && story.done > 0 && there.bytes != bytes;
    if !story.destination.is_same_place(there) || cut || story.done > bytes {
        bail!("{to} is not what was being written: begin anew with --force");
    }
    Ok(story.done)
}

/// Refuses what --reflink and --prealloc cannot mean here; otherwise what DST's holes and zeroes get.
/// An unfinished copy goes on as it was begun.
pub(super) fn space(args: &CopyArgs, story: Option<&Story>) -> anyhow::Result<Prealloc> {
    let (from, to) = (&args.source, &args.destination);
    let begun = story.map(|story| story.prealloc);
    let how = args.prealloc.or(begun).unwrap_or_default();
    if let Some(begun) = begun.filter(|&begun| begun != how) {
        bail!(
            "{to} was begun with --prealloc {begun}: go on with that, or begin anew with --force"
        );
    }
    if how != Prealloc::Off {
        if let Some(what) = no_file(to) {
            wrong_usage!("{to} is a {what}: --prealloc is for files");
        }
    }
    if args.reflink == Reflink::Always {
        if args.from_format == Some(Format::Qcow2) {
            wrong_usage!(
                "{from} is qcow2 and {to} is not: they cannot share blocks (--reflink always)"
            );
        }
        for target in [from, to] {
            if let Some(what) = no_file(target) {
                wrong_usage!(
                    "{target} is a {what}: only files can share blocks (--reflink always)"
                );
            }
        }
        if how != Prealloc::Off {
            wrong_usage!(
                "shared blocks take no space: --reflink always and --prealloc {how} exclude each \
                 other"
            );
        }
    }
    Ok(how)
}

/// What it is if it is no file, and will be none.
fn no_file(target: &Target) -> Option<&'static str> {
    match target {
        Target::VhostUser(_) => Some("served disk"),
        Target::Elsewhere(_, source) => Some(kind(source)),
        Target::Path(path) if is_block_device(path) => Some("block device"),
        Target::Path(_) => None,
    }
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Files by device and inode, devices by number, sockets by both: links and names do not matter. What is
/// elsewhere by its name.
pub(super) fn is_same(one: &Target, other: &Target) -> bool {
    if one.source().is_some() || other.source().is_some() {
        return one == other;
    }
    let key = |target: &Target| {
        let meta = target.path().metadata().ok()?;
        if meta.file_type().is_block_device() {
            return Some((meta.rdev(), 0));
        }
        Some((meta.dev(), meta.ino()))
    };
    key(one).is_some_and(|one| key(other) == Some(one))
}

/// Where the journal is.
///
/// # Errors
/// That it would be one of the two ends.
pub(super) fn journal_path(args: &CopyArgs) -> anyhow::Result<Option<PathBuf>> {
    let to = args.destination.path();
    let Some(path) = &args.journal else {
        let without = is_block_device(to) || args.destination.source().is_some();
        return Ok((!without).then(|| journal_beside(to)));
    };
    let journal = Target::Path(path.clone());
    for end in [&args.source, &args.destination] {
        if is_same(&journal, end) || known_path(&journal) == known_path(end) {
            wrong_usage!(
                "--journal {} is {end}, which is copied: name another file",
                printable(path)
            );
        }
    }
    Ok(Some(path.clone()))
}

/// The journal of a copy to `to`: its name with something behind it, or a short one where that would be longer than
/// names can be.
fn journal_beside(to: &Path) -> PathBuf {
    const NAME_MAX: usize = 255;
    let path = with_suffix(to, ".ringway-copy");
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    if name.len() <= NAME_MAX {
        return path;
    }
    to.with_file_name(format!(".ringway-copy-{:016x}", fnv1a(name)))
}

/// As a journal says where a disk is, whether or not it is there.
fn known_path(target: &Target) -> PathBuf {
    let path = target.path();
    match target {
        Target::Path(_) => new_file::place(path).unwrap_or_else(|_| path.into()),
        Target::VhostUser(_) => std::path::absolute(path).unwrap_or_else(|_| path.into()),
        Target::Elsewhere(..) => path.into(),
    }
}

/// Refuses a journal of an unfinished copy to something else, which would look complete without it.
pub(super) fn is_own_story(args: &CopyArgs, journal: &Path, story: &Story) -> anyhow::Result<()> {
    let (to, of) = (&args.destination, &story.destination);
    let inode = to.path().metadata().ok().filter(Metadata::is_file);
    let is_inode = inode.is_some_and(|meta| (meta.dev(), meta.ino()) == (of.device, of.inode));
    if !is_inode && known_path(to) != of.path {
        bail!(
            "{} is the journal of an unfinished copy to {}, which would look complete without it: name \
             another one with --journal",
            printable(journal),
            printable(&of.path)
        );
    }
    Ok(())
}

/// A new file is for whom the source is; what is no file is for its owner.
pub(super) fn mode_of(source: &Opened) -> u32 {
    match &source.end {
        End::File(file) if file.regular => mode(&file.file),
        End::Image(image) => image.source.as_ref().map_or(0o600, |source| mode(&source.top)),
        _ => 0o600,
    }
}

fn mode(file: &File) -> u32 {
    let meta = file.metadata().ok().filter(Metadata::is_file);
    meta.map_or(0o600, |meta| meta.mode() & 0o777)
}

/// Removes an empty file that this copy has made.
pub(super) fn discard_if_new(to: &Target, there: bool) {
    if !there && to.path().metadata().is_ok_and(|meta| meta.is_file() && meta.len() == 0) {
        // Best effort: the error that brought us here is the one worth telling.
        let _ = std::fs::remove_file(to.path());
    }
}
