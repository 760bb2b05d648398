//! What a copy must not do, and what belongs to its destination.

use super::CopyArgs;
use super::end::End;
use super::journal::{Identity, Story, with_suffix};
use super::open::Opened;
use crate::io::target::Target;
use anyhow::bail;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

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
                bail!("{to} exists: overwrite it with --force")
            }
            _ => bail!("{to} may hold something: overwrite it with --force"),
        }
    };
    let percent = 100 * u128::from(story.done) / u128::from(story.source.bytes.max(1));
    if !args.resume {
        bail!(
            "{to} is an unfinished copy of {} ({percent} %): go on with --resume, or begin anew with \
             --force",
            story.source.path.display()
        );
    }
    if !story.source.is_same_place(source) {
        let path = story.source.path.display();
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

/// Files by device and inode, devices by number, sockets by both: links and names do not matter.
pub(super) fn is_same(one: &Target, other: &Target) -> bool {
    let key = |target: &Target| {
        let meta = target.path().metadata().ok()?;
        if meta.file_type().is_block_device() {
            return Some((meta.rdev(), 0));
        }
        Some((meta.dev(), meta.ino()))
    };
    key(one).is_some_and(|one| key(other) == Some(one))
}

pub(super) fn journal_path(args: &CopyArgs) -> Option<PathBuf> {
    let to = args.destination.path();
    let device = to.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    match &args.journal {
        Some(path) => Some(path.clone()),
        None if device => None,
        None => Some(with_suffix(to, ".ringway-copy")),
    }
}

/// A new file is for whom the source is; what is no file is for its owner.
pub(super) fn mode_of(source: &Opened) -> u32 {
    match &source.end {
        End::File(file) if file.regular => {
            file.file.metadata().map_or(0o600, |meta| meta.mode() & 0o777)
        }
        _ => 0o600,
    }
}

/// Removes an empty file that this copy has made.
pub(super) fn discard_if_new(to: &Target, there: bool) {
    if !there && to.path().metadata().is_ok_and(|meta| meta.is_file() && meta.len() == 0) {
        // Best effort: the error that brought us here is the one worth telling.
        let _ = std::fs::remove_file(to.path());
    }
}

/// Makes the file one hole of the right size.
pub(super) fn set_size(file: &File, bytes: u64) -> std::io::Result<()> {
    file.set_len(0)?;
    file.set_len(bytes)
}
